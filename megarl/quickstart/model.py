"""The quickstart's model: a tiny Qwen2 with random weights, saved together with its tokenizer."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.quickstart.tokenizer import make_tokenizer

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
