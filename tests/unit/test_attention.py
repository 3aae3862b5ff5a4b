"""Portable attention against a loop over heads, queries and keys."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megarl.models.engine.attention import SequenceLayout, attention, causal_attention
from tests.tiers import newest_megatron

pytestmark = newest_megatron


def by_loops(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    """float64, one query and one head at a time; the queries are the last of the key positions."""
    rows, heads, queries, size = query.shape
    groups, keys = key.shape[1:3]
    output = torch.zeros(rows, heads, queries, value.shape[3], dtype=torch.float64)
    for row in range(rows):
        for head in range(heads):
            group = head // (heads // groups)
            for position in range(queries):
                last = keys - queries + position + 1
                scores = [
                    float(query[row, head, position].double() @ key[row, group, k].double())
                    for k in range(last)
                ]
                weights = [math.exp(score * (scale or size**-0.5)) for score in scores]
                for k, weight in enumerate(weights):
                    output[row, head, position] += weight / math.fsum(weights) * value[row, group, k].double()
    return output


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (5, 5), (1, 7), (3, 8), (7, 8)])
def test_equals_the_loops(queries: int, keys: int, heads: int, groups: int, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    query = torch.randn(2, heads, queries, 5, generator=generator, requires_grad=True)
    key = torch.randn(2, groups, keys, 5, generator=generator, requires_grad=True)
    value = torch.randn(2, groups, keys, 5, generator=generator, requires_grad=True)
    output = causal_attention(query, key, value, scale)
    torch.testing.assert_close(
        output.double(), by_loops(query.detach(), key.detach(), value.detach(), scale), atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize(("width", "values"), [(6, 4), (3, 8)])
def test_values_may_have_another_width(width: int, values: int, scale: float | None) -> None:
    generator = torch.Generator().manual_seed(width)
    query = torch.randn(2, 6, 7, width, generator=generator)
    key, value = (torch.randn(2, 2, 7, size, generator=generator) for size in (width, values))
    torch.testing.assert_close(
        attention(query, key, value, scale=scale).double(),
        by_loops(query, key, value, scale),
        atol=1e-5,
        rtol=1e-5,
    )
    packed = attention(query[:1], key[:1], value[:1], SequenceLayout((0, 3, 7)), scale=scale)
    for start, end in ((0, 3), (3, 7)):
        alone = by_loops(*(tensor[:1, :, start:end] for tensor in (query, key, value)), scale)
        torch.testing.assert_close(packed[:, :, start:end].double(), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("keys", [6, 9])
def test_no_gradient_reaches_what_a_query_cannot_see(keys: int) -> None:
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(1, 2, 6, 4, generator=generator)
    key = torch.randn(1, 2, keys, 4, generator=generator, requires_grad=True)
    value = torch.randn(1, 2, keys, 4, generator=generator, requires_grad=True)
    causal_attention(query, key, value)[:, :, 2].sum().backward()
    seen = keys - 6 + 3
    for tensor in (key, value):
        assert tensor.grad[:, :, seen:].eq(0).all()
    assert value.grad[:, :, :seen].ne(0).all()


def test_megatron_shapes_go_in_and_out() -> None:
    """[S, B, H, D] in, [S, B, H * D] out, heads in order."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megarl.models.megatron.specs import PortableAttention

    config = TransformerConfig(
        num_layers=1, hidden_size=12, num_attention_heads=6, num_query_groups=2, kv_channels=5
    )
    attention = PortableAttention(config, 1, softmax_scale=0.4)
    generator = torch.Generator().manual_seed(2)
    query = torch.randn(7, 3, 6, 5, generator=generator)
    key, value = (torch.randn(7, 3, 2, 5, generator=generator) for _ in range(2))
    output = attention(query, key, value)
    expected = by_loops(query.permute(1, 2, 0, 3), key.permute(1, 2, 0, 3), value.permute(1, 2, 0, 3), 0.4)
    assert output.shape == (7, 3, 30)
    torch.testing.assert_close(
        output.view(7, 3, 6, 5).permute(1, 2, 0, 3).double(), expected, atol=1e-5, rtol=1e-5
    )
