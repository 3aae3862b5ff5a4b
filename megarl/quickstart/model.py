"""The quickstart's model, a tiny Qwen2 with random weights, and its tokenizer: byte-level pieces over the words of the problems."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from megarl.quickstart.problems import generate_problems

# A prime, so that every tensor-parallel degree above one has to pad the vocabulary.
VOCABULARY_SIZE = 379
PAD_TOKEN = "<pad>"
EOS_TOKEN = "<eos>"
_SAMPLE_COUNT = 3000
_SAMPLE_SEED = 1


def _qwen2(vocabulary: dict[str, int] | None = None, merges: list[tuple[str, str]] | None = None) -> Qwen2Tokenizer:
    """Transformers loads a Qwen2 folder's tokenizer with this class whatever class saved it, and it would add its own unknown token."""
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=merges,
        unk_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        padding_side="right",
        clean_up_tokenization_spaces=False,
    )


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of ``VOCABULARY_SIZE`` tokens, always the same one.

    The words of the problems are single tokens, every decimal digit is a token of its own, and other text falls back to bytes, so that
    decoding an encoded text (in Unicode's NFC form) gives that text back. No token is added to an encoded text; it pads on the right.
    """
    backend = _qwen2().backend_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[PAD_TOKEN, EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = [problem.prompt + problem.answer for problem in generate_problems(_SAMPLE_COUNT, _SAMPLE_SEED)]
    backend.train_from_iterator(texts, trainer)
    model = json.loads(backend.to_str())["model"]
    return _qwen2(model["vocab"], [tuple(pair) for pair in model["merges"]])


_POSITIONS = 128  # the longest prompt with its answer takes about a quarter of it


def make_config(vocab_size: int, pad_token_id: int, eos_token_id: int) -> Qwen2Config:
    """About 150,000 weights; heads, key-value heads and widths divide by two for tensor parallelism.

    The heads are 32 wide because vLLM's attention on a CPU has no kernel for less.
    """
    return Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=_POSITIONS,
        tie_word_embeddings=False,
        # Wider than the usual 0.02: at this width the model then learns several times faster.
        initializer_range=0.1,
        pad_token_id=pad_token_id,
        bos_token_id=None,
        eos_token_id=eos_token_id,
        dtype="float32",
    )


def make_model(out_dir: str | Path, seed: int) -> Path:
    """Save a model with weights drawn from ``seed`` and its tokenizer to ``out_dir``, as float32 safetensors; folders are made.

    The caller's random state is left as it was.
    """
    tokenizer = make_tokenizer()
    config = make_config(len(tokenizer), tokenizer.pad_token_id, tokenizer.eos_token_id)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    target = Path(out_dir)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return target
