"""Floating-point operations of a dense decoder, counted from its sizes. Only matrix products count: norms,
softmax and recomputation do not."""

from __future__ import annotations

from typing import Any


def forward_flops(config: Any, lengths: list[int]) -> float:
    """Return the FLOPs of one forward pass over sequences of these lengths.

    Args:
        config: transformers config of a dense decoder with gated feed-forward layers.
        lengths: tokens of each sequence; attention is causal, so a token attends to half of its sequence on
            average.
    """
    # Some families set the size of a head independently of the hidden size.
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    query, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    # The terms are query and output, keys and values, and then gate, up and down.
    layer = config.hidden_size * (2 * query + 2 * keys + 3 * config.intermediate_size)
    weights = config.num_hidden_layers * layer + config.hidden_size * config.vocab_size
    # There are two products, with the keys and with the values, over half of the square.
    attention = config.num_hidden_layers * sum(2 * query * length * length for length in lengths)
    return 2.0 * weights * sum(lengths) + attention


def training_flops(config: Any, lengths: list[int]) -> float:
    """Return the FLOPs of a forward and a backward pass; the backward pass has two products for each one of
    the forward pass."""
    return 3.0 * forward_flops(config, lengths)
