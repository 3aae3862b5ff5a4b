"""What a FlashAttention kernel is asked for, answered by one that follows its documentation slowly; the kernel itself: tests/gpu."""

from __future__ import annotations

import inspect

import pytest
import torch

from megarl.models.engine.attention import _pieces, serves, varlen_attention, varlen_kernel
from megarl.models.engine.context import ContextShare
from tests.unit.test_context import slow_attention

STARTS = (0, 4, 4, 20, 24)


def slow_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """[T, H, D] each: window and causality are counted from the last query and the last key of a sequence."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32 and cu_seq_q[-1] == query.shape[0] and cu_seq_k[-1] == key.shape[0]
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    assert enable_gqa == (query.shape[1] != key.shape[1])
    left, right = window_size
    output = torch.zeros_like(query)
    for number in range(len(cu_seq_q) - 1):
        first, last = int(cu_seq_q[number]), int(cu_seq_q[number + 1])
        keys, values = (tensor[int(cu_seq_k[number]) : int(cu_seq_k[number + 1])] for tensor in (key, value))
        for position in range(first, last):
            own = keys.shape[0] - (last - position)
            lowest = 0 if left < 0 else max(0, own - left)
            highest = keys.shape[0] if right < 0 else min(keys.shape[0], own + right + 1)
            for head in range(query.shape[1]):
                group = head // (query.shape[1] // key.shape[1])
                scores = keys[lowest:highest, group] @ query[position, head] * (scale or query.shape[2] ** -0.5)
                output[position, head] = scores.softmax(0) @ values[lowest:highest, group]
    return output


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("size", [1, 2])
def test_packed_sequences_and_context_shares(size: int, window: int | None) -> None:
    torch.manual_seed(2)
    query, key, value = (torch.randn(1, heads, 24, 4, dtype=torch.float64) for heads in (6, 2, 2))
    whole = slow_attention(query, key, value, STARTS, window)
    for rank in range(size):
        share = ContextShare(rank, size)
        index = share.index(STARTS)
        mixed = varlen_attention(query[:, :, index], key, value, _pieces(STARTS, share), slow_kernel, window=window)
        torch.testing.assert_close(mixed, whole[:, :, index])


def test_scale_and_single_heads() -> None:
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, 2, 24, 4, dtype=torch.float64) for _ in range(3))
    scaled = slow_attention(query * 0.3 * 2.0, key, value, STARTS, None)
    mixed = varlen_attention(query, key, value, _pieces(STARTS, ContextShare()), slow_kernel, scale=0.3)
    torch.testing.assert_close(mixed, scaled)


def test_the_kernel_of_torch_takes_what_it_is_given() -> None:
    kernel = varlen_kernel()
    assert kernel is not None
    ours, theirs = inspect.signature(slow_kernel).parameters, inspect.signature(kernel).parameters
    assert [name for name in theirs if name in ours] == list(ours)
    for name in ("scale", "window_size", "enable_gqa"):
        assert theirs[name].kind is inspect.Parameter.KEYWORD_ONLY


def test_nothing_on_a_cpu_goes_to_the_kernel() -> None:
    assert not serves(torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16))
