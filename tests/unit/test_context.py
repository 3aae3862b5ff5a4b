"""Which positions a context-parallel rank holds, against a list that says it slowly; and attention over them
in one process."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.models.engine.attention import SequenceLayout, attention, causal_attention
from megarl.models.engine.context import ContextShare

LAYOUTS = st.tuples(st.integers(1, 4), st.lists(st.integers(0, 5), min_size=1, max_size=5))


def starts_of(size: int, halves: list[int]) -> tuple[int, ...]:
    starts = [0]
    for half in halves:
        starts.append(starts[-1] + 2 * size * half)
    return tuple(starts)


def slow_index(starts: tuple[int, ...], rank: int, size: int) -> list[int]:
    """Deal every sequence's 2 x size chunks out as to a snake: 0 1 2 2 1 0."""
    held = []
    for start, end in itertools.pairwise(starts):
        width = (end - start) // (2 * size)
        for number in range(2 * size):
            owner = number if number < size else 2 * size - 1 - number
            if owner == rank:
                held.extend(range(start + number * width, start + (number + 1) * width))
    return held


@given(LAYOUTS)
def test_every_rank_holds_its_two_chunks_of_every_sequence(drawn: tuple[int, list[int]]) -> None:
    size, halves = drawn
    starts = starts_of(size, halves)
    for rank in range(size):
        expected = slow_index(starts, rank, size) if size > 1 else list(range(starts[-1]))
        assert ContextShare(rank, size).index(starts).tolist() == expected


@given(LAYOUTS)
def test_the_parts_of_all_ranks_come_back_in_order(drawn: tuple[int, list[int]]) -> None:
    size, halves = drawn
    starts = starts_of(size, halves)
    laid_out = torch.cat([ContextShare(rank, size).index(starts) for rank in range(size)])
    assert laid_out[ContextShare(0, size).order(starts)].tolist() == list(range(starts[-1]))


def slow_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: tuple[int, ...], window: int | None
) -> Tensor:
    """float64, one query at a time."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    output = torch.zeros_like(query)
    for start, end in itertools.pairwise(starts):
        for position in range(start, end):
            first = start if window is None else max(start, position - window + 1)
            for head in range(query.shape[1]):
                keys = key[0, head // group, first : position + 1]
                weights = (keys @ query[0, head, position] / query.shape[3] ** 0.5).softmax(0)
                output[0, head, position] = weights @ value[0, head // group, first : position + 1]
    return output


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("starts", [(0, 13), (0, 1, 2, 9, 13), (0, 5, 5, 13)])
def test_packed_attention_stays_inside_each_sequence(starts: tuple[int, ...], window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 6, 13, 4), torch.randn(1, 2, 13, 4), torch.randn(1, 2, 13, 4)
    result = attention(query, key, value, SequenceLayout(starts), window=window)
    torch.testing.assert_close(
        result.double(), slow_attention(query, key, value, starts, window), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("window", [None, 2, 4])
@pytest.mark.parametrize("new", [1, 3])
def test_a_window_counts_from_the_newest_positions_when_decoding(new: int, window: int | None) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(1, 6, 9, 4), torch.randn(1, 3, 9, 4), torch.randn(1, 3, 9, 4)
    expected = slow_attention(query, key, value, (0, 9), window)[:, :, -new:]
    torch.testing.assert_close(
        causal_attention(query[:, :, -new:], key, value, window=window).double(), expected, atol=1e-5, rtol=0
    )
