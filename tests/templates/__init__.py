"""Chat templates that behave as published ones do, and tokenizers with the special tokens that each is made for."""

# ruff: noqa: RUF001  # DeepSeek writes its tokens with full-width bars
from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

DIRECTORY = Path(__file__).parent


@dataclass(frozen=True)
class Published:
    """The tokens of a published tokenizer that its template writes.

    Attributes:
        special: tokens that decoding may skip; the first one ends texts.
        stops: further tokens that generation_config.json lists as ends.
        other: added tokens that are ordinary text to a decoder.
        begins: the tokenizer has a begin-of-sequence token.
    """

    special: tuple[str, ...]
    stops: tuple[str, ...] = ()
    other: tuple[str, ...] = ()
    begins: str | None = None


_QWEN_CALLS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_THINK = ("<think>", "</think>")
_LLAMA = ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>")
_DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
_DEEPSEEK_OTHER = (
    *("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
    *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)
_HARMONY = ("<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|endoftext|>", "<|constrain|>")
_GLM = ("<|endoftext|>", "[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GEMMA = ("<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>")

TEMPLATES: dict[str, Published] = {
    "chatml": Published(("<|im_end|>", "<|im_start|>")),
    "qwen2.5": Published(("<|im_end|>", "<|im_start|>", "<|endoftext|>"), ("<|endoftext|>",), _QWEN_CALLS),
    "qwen3": Published(("<|im_end|>", "<|im_start|>", "<|endoftext|>"), ("<|endoftext|>",), (*_QWEN_CALLS, *_THINK)),
    "qwen3.5": Published(("<|im_end|>", "<|im_start|>", "<|endoftext|>"), ("<|endoftext|>",), (*_QWEN_CALLS, *_THINK)),
    "llama3.1": Published(_LLAMA, ("<|eom_id|>", "<|end_of_text|>"), begins="<|begin_of_text|>"),
    "llama3.2": Published(_LLAMA, ("<|eom_id|>", "<|end_of_text|>"), begins="<|begin_of_text|>"),
    "gpt-oss": Published(_HARMONY, ("<|endoftext|>", "<|call|>")),
    "deepseek-v3": Published(_DEEPSEEK, other=_DEEPSEEK_OTHER, begins="<｜begin▁of▁sentence｜>"),
    "deepseek-r1": Published(_DEEPSEEK, other=(*_DEEPSEEK_OTHER, *_THINK), begins="<｜begin▁of▁sentence｜>"),
    "glm-4.5": Published(_GLM, ("<|user|>", "<|observation|>"), (*_THINK, "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")),
    "gemma2": Published(_GEMMA, ("<end_of_turn>",), begins="<bos>"),
    "gemma3": Published(_GEMMA, ("<end_of_turn>",), begins="<bos>"),
    "phi-3.5": Published(("<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"), ("<|end|>", "<|assistant|>")),
    "phi-4": Published(("<|im_end|>", "<|im_start|>", "<|im_sep|>", "<|endoftext|>")),
    "mistral-v3": Published(
        (
            "</s>",
            "<s>",
            "[INST]",
            "[/INST]",
            "[TOOL_CALLS]",
            "[AVAILABLE_TOOLS]",
            "[/AVAILABLE_TOOLS]",
            "[TOOL_RESULTS]",
            "[/TOOL_RESULTS]",
        ),
        begins="<s>",
    ),
    "mistral-v0.1": Published(("</s>", "<s>"), begins="<s>"),
    "nemotron": Published(_LLAMA, ("<|eom_id|>", "<|end_of_text|>"), begins="<|begin_of_text|>"),
    "smollm3": Published(("<|im_end|>", "<|im_start|>"), (), _THINK),
    "zephyr": Published(("</s>", "<s>", "<unk>"), begins="<s>"),
    "vicuna": Published(("</s>", "<s>"), begins="<s>"),
    "kimi-k2": Published(
        ("<|im_end|>", "[BOS]", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>", "[EOS]"),
        other=("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>"),
    ),
    "llama2": Published(("</s>", "<s>"), begins="<s>"),
    "olmo2": Published(("<|endoftext|>", "<|pad|>"), begins="<|endoftext|>"),
    "command-r": Published(
        ("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
        begins="<BOS_TOKEN>",
    ),
    "granite": Published(("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")),
    "deepseek-v3.1": Published(_DEEPSEEK, other=(*_DEEPSEEK_OTHER, *_THINK), begins="<｜begin▁of▁sentence｜>"),
    "chatglm": Published(_GLM, ("<|user|>", "<|observation|>")),
    "hermes": Published(("<|im_end|>", "<|im_start|>", "<|endoftext|>"), other=(*_QWEN_CALLS, *_THINK)),
    "command-a": Published(
        (
            *("<|END_OF_TURN_TOKEN|>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        begins="<BOS_TOKEN>",
    ),
    "ernie": Published(("</s>", "<|begin_of_sentence|>")),
    "plain-text": Published(("</s>",)),
}


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    """Return a byte-level tokenizer with the special tokens that a template is made for; line feeds and some words are merged."""
    published = TEMPLATES[name]
    vocabulary = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [("Ċ", "Ċ"), ("Ġ", "t"), ("o", "n"), ("on", "e"), ("Ġt", "w"), ("Ġtw", "o"), (".", "Ċ"), ("s", "t")]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in published.special])
    backend.add_tokens([AddedToken(token, special=False, normalized=False) for token in published.other])
    names = {"bos_token": published.begins} if published.begins else {}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=published.special[0], clean_up_tokenization_spaces=False, **names
    )
    tokenizer.pad_token = published.special[-1]
    tokenizer.chat_template = (DIRECTORY / f"{name}.jinja").read_text(encoding="utf-8")
    return tokenizer


def stop_ids(name: str, tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the token ids at which the published generation configuration stops."""
    published = TEMPLATES[name]
    return [tokenizer.convert_tokens_to_ids(token) for token in (published.special[0], *published.stops)]
