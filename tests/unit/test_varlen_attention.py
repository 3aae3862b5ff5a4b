"""What a FlashAttention kernel is asked for, answered by one that follows its documentation slowly; the
kernel itself: tests/gpu."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.engine import attention as engine
from megarl.models.engine.attention import (
    SequenceLayout,
    attention,
    runs_of,
    serves,
    varlen_attention,
    varlen_kernel,
)
from megarl.models.engine.context import ContextShare
from tests.unit.test_context import slow_attention

STARTS = (0, 4, 4, 20, 24)
CPU = torch.device("cpu")


def slow_kernel(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """[T, H, D] each: window and causality are counted from the last query and the last key of a sequence."""
    assert (
        cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
        and cu_seq_q[-1] == query.shape[0]
        and cu_seq_k[-1] == key.shape[0]
    )
    assert max_q == int(cu_seq_q.diff().max()) and max_k == int(cu_seq_k.diff().max())
    left, right = window_size
    output = []
    for number in range(len(cu_seq_q) - 1):
        first, last = int(cu_seq_q[number]), int(cu_seq_q[number + 1])
        keys, values = (tensor[int(cu_seq_k[number]) : int(cu_seq_k[number + 1])] for tensor in (key, value))
        for position in range(first, last):
            own = keys.shape[0] - (last - position)
            lowest = 0 if left < 0 else max(0, own - left)
            highest = keys.shape[0] if right < 0 else min(keys.shape[0], own + right + 1)
            for head in range(query.shape[1]):
                group = head // (query.shape[1] // key.shape[1])
                scores = (
                    keys[lowest:highest, group] @ query[position, head] * (scale or query.shape[2] ** -0.5)
                )
                output.append(scores.softmax(0) @ values[lowest:highest, group])
    return torch.stack(output).view(query.shape)


def slow_rows(
    query: Tensor, key: Tensor, value: Tensor, starts: tuple[int, ...], window: int | None
) -> Tensor:
    """Row by row."""
    rows = zip(query.split(1), key.split(1), value.split(1), strict=True)
    return torch.cat([slow_attention(*row, starts, window) for row in rows])


@pytest.fixture
def on_the_kernel(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Attention goes to the slow kernel wherever it would go to a fast one; the shapes of the queries that
    went there."""
    shapes: list[tuple[int, ...]] = []

    def noted(query: Tensor, *others: Any, **options: Any) -> Tensor:
        shapes.append(tuple(query.shape))
        return slow_kernel(query, *others, **options)

    monkeypatch.setattr(engine, "serves", lambda query: True)
    monkeypatch.setattr(engine, "varlen_kernel", lambda: noted)
    return shapes


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("rows", [1, 3])
def test_sequences_and_context_shares(rows: int, size: int, window: int | None) -> None:
    torch.manual_seed(2)
    query, key, value = (torch.randn(rows, heads, 24, 4, dtype=torch.float64) for heads in (6, 2, 2))
    starts = STARTS if rows == 1 else (0, 24)
    whole = slow_rows(query, key, value, starts, window)
    for rank in range(size):
        index = ContextShare(rank, size).index(starts)
        runs = runs_of(starts, rows, rank, size, CPU)
        mixed = varlen_attention(query[:, :, index], key, value, runs, slow_kernel, window=window)
        torch.testing.assert_close(mixed, whole[:, :, index])


@pytest.mark.parametrize(
    ("rows", "starts", "window", "goes"),
    [
        (1, STARTS, None, True),
        (1, STARTS, 3, True),
        (2, None, 3, True),
        (2, None, None, False),
        (2, None, 24, False),
    ],
)
def test_what_would_need_a_mask_or_many_calls_goes_to_the_kernel(
    on_the_kernel: list[tuple[int, ...]],
    rows: int,
    starts: tuple[int, ...] | None,
    window: int | None,
    goes: bool,
) -> None:
    """Values and gradients, against the way without a kernel."""
    torch.manual_seed(4)
    leaves = [torch.randn(rows, heads, 24, 4, dtype=torch.float64, requires_grad=True) for heads in (6, 2, 2)]
    output = attention(*leaves, SequenceLayout(starts), window=window)
    expected = slow_rows(*leaves, starts or (0, 24), window)
    torch.testing.assert_close(output, expected)
    pull = torch.randn_like(output)
    torch.testing.assert_close(
        torch.autograd.grad(output, leaves, pull), torch.autograd.grad(expected, leaves, pull)
    )
    assert on_the_kernel == ([(rows * 24, 6, 4)] if goes else [])


def test_decoding_and_sinks_stay_away_from_the_kernel(on_the_kernel: list[tuple[int, ...]]) -> None:
    torch.manual_seed(5)
    query, key, value = torch.randn(2, 2, 1, 4), torch.randn(2, 2, 9, 4), torch.randn(2, 2, 9, 4)
    attention(query, key, value, window=3)
    attention(key, key, value, window=3, row_lengths=torch.tensor([9, 4]))
    attention(key[:1], key[:1], value[:1], SequenceLayout((0, 4, 9)), sinks=torch.zeros(2))
    assert not on_the_kernel


def test_runs_are_made_once_for_all_layers() -> None:
    assert runs_of(STARTS, 1, 0, 1, CPU) is runs_of(STARTS, 1, 0, 1, CPU)


def test_scale_and_single_heads() -> None:
    torch.manual_seed(3)
    query, key, value = (torch.randn(1, 2, 24, 4, dtype=torch.float64) for _ in range(3))
    scaled = slow_attention(query * 0.3 * 2.0, key, value, STARTS, None)
    mixed = varlen_attention(query, key, value, runs_of(STARTS, 1, 0, 1, CPU), slow_kernel, scale=0.3)
    torch.testing.assert_close(mixed, scaled)


def test_the_kernel_of_torch_takes_what_it_is_given() -> None:
    kernel = varlen_kernel()
    assert kernel is not None
    ours, theirs = inspect.signature(slow_kernel).parameters, inspect.signature(kernel).parameters
    assert [name for name in theirs if name in ours] == list(ours)
    for name in ("scale", "window_size"):
        assert theirs[name].kind is inspect.Parameter.KEYWORD_ONLY


def of_2_10(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: Any,
    max_k: Any,
    is_causal: bool = False,
) -> None: ...


def of_2_11(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: Any,
    max_k: Any,
    *,
    scale: Any = None,
    window_size: Any = (-1, -1),
) -> str:
    return "2.11"


def of_2_12(
    query: Any,
    key: Any,
    value: Any,
    cu_seq_q: Any,
    cu_seq_k: Any,
    max_q: Any,
    max_k: Any,
    *,
    scale: Any = None,
    window_size: Any = (-1, -1),
    enable_gqa: bool = False,
) -> str:
    return f"2.12, grouped heads: {enable_gqa}"


@pytest.mark.parametrize(
    ("function", "says"), [(of_2_10, None), (of_2_11, "2.11"), (of_2_12, "2.12, grouped heads: True")]
)
def test_releases_of_torch_differ_in_the_keywords(
    monkeypatch: pytest.MonkeyPatch, function: Any, says: str | None
) -> None:
    module: Any = ModuleType("torch.nn.attention.varlen")
    module.varlen_attn = function
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", module)
    found = varlen_kernel.__wrapped__()
    assert (found and found(*range(7), scale=1.0, window_size=(-1, 0))) == says


def test_nothing_on_a_cpu_goes_to_the_kernel() -> None:
    assert not serves(torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16))
