"""A tiny Qwen2 and a tokenizer of single characters, made on the spot. All its sizes differ."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

CHARACTERS = "0123456789+-=abcdefghijklmnop"


def make_tiny_model(path: Path, seed: int) -> str:
    """Save model and tokenizer to ``path``; returns it as text. Token ids: 0 padding, 1 end of sequence, 2
    unknown, then the characters."""
    vocabulary = {token: place for place, token in enumerate(["<pad>", "<eos>", "<unk>", *CHARACTERS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    ).save_pretrained(path)
    config = Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Qwen2ForCausalLM(config).save_pretrained(path)
    return str(path)
