"""The quickstart's tokenizer: byte-level pieces over the words of the problems, trained on the spot."""

from __future__ import annotations

import json

from tokenizers import pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

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
