"""Rows in front of the model and back, packed or not: every token keeps its place, its position and its successor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import BatchError
from megarl.models.engine.batching import FixedRows, Planned
from megarl.models.engine.context import ContextShare
from megarl.models.engine.microbatches import MicroBatch, Shapes
from megarl.models.engine.model_input import lay_out, lay_out_all

LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=6)


def rows_of(lengths: list[int]) -> dict[str, Any]:
    """Token ids that say where they are: row x 100 + column + 1, zero where padding is."""
    width = max(lengths)
    ids = torch.arange(len(lengths))[:, None] * 100 + torch.arange(width)[None] + 1
    inside = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {"input_ids": ids * inside, "input_lengths": torch.tensor(lengths), "name": [f"row {row}" for row in range(len(lengths))]}


@given(LENGTHS, st.integers(1, 4), st.integers(0, 9))
def test_a_packed_row_holds_every_sequence_behind_the_other(lengths: list[int], multiple: int, filler: int) -> None:
    shapes = Shapes(packed_multiple=multiple)
    padded = [-(-length // multiple) * multiple for length in lengths]
    total = sum(padded) + filler * multiple
    data = rows_of(lengths)
    packed = lay_out(MicroBatch(data, True, total), ContextShare(), shapes)
    assert packed.tokens.shape == packed.positions.shape == packed.targets.shape == (1, total)
    assert packed.longest == max([*padded, filler * multiple])
    start = 0
    for row, (length, room) in enumerate(zip(lengths, padded, strict=True)):
        assert packed.tokens[0, start : start + length].tolist() == data["input_ids"][row, :length].tolist()
        assert packed.targets[0, start : start + length - 1].tolist() == data["input_ids"][row, 1:length].tolist()
        assert packed.positions[0, start : start + room].tolist() == list(range(room))
        start += room
    assert packed.positions[0, start:].tolist() == list(range(filler * multiple))


@given(LENGTHS, st.integers(1, 4))
def test_values_of_targets_come_back_to_their_rows(lengths: list[int], multiple: int) -> None:
    data = rows_of(lengths)
    total = sum(-(-length // multiple) * multiple for length in lengths)
    shapes = Shapes(packed_multiple=multiple)
    for micro_batch in (MicroBatch(data, True, total), MicroBatch(data, False, data["input_ids"].shape[1])):
        laid_out = lay_out(micro_batch, ContextShare(), shapes)
        rows = laid_out.to_rows(laid_out.targets.float())
        assert rows.shape == (len(lengths), max(lengths) - 1)
        for row, length in enumerate(lengths):
            assert rows[row, : length - 1].tolist() == data["input_ids"][row, 1:length].float().tolist()


def test_gradients_come_back_to_their_tokens() -> None:
    laid_out = lay_out(MicroBatch(rows_of([3, 1, 4]), True, 12), ContextShare(), Shapes(packed_multiple=2))
    values = torch.zeros(1, 12, requires_grad=True)
    weight = torch.tensor([[1.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 4.0, 5.0]])
    (laid_out.to_rows(values) * weight).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[1, 2, 0, 0, 0, 0, 3, 4, 5, 0, 0, 0]]


@given(LENGTHS, st.integers(2, 3))
def test_context_parallel_ranks_together_hold_everything_once(lengths: list[int], size: int) -> None:
    data, shapes = rows_of(lengths), Shapes(packed_multiple=2 * size)
    total = sum(-(-length // (2 * size)) * 2 * size for length in lengths)
    whole = lay_out(MicroBatch(data, True, total), ContextShare(), shapes)
    parts = [lay_out(MicroBatch(data, True, total), ContextShare(rank, size), shapes) for rank in range(size)]
    assert {part.tokens.shape for part in parts} == {(1, total // size)}
    for name in ("tokens", "positions", "targets"):
        together = torch.cat([getattr(part, name) for part in parts], dim=1)
        assert sorted(together[0].tolist()) == sorted(getattr(whole, name)[0].tolist())


def test_a_plan_that_is_too_short_is_refused() -> None:
    with pytest.raises(BatchError, match=r"8 tokens of 2 sequences do not fit into the planned 7"):
        lay_out(MicroBatch(rows_of([4, 4]), True, 7), ContextShare(), Shapes())


def test_a_plan_for_other_rows_is_refused() -> None:
    with pytest.raises(BatchError, match=r"the micro-batch plan holds 3 rows, the batch 2"):
        Planned([[[0, 3]]], [[9]], [3], True).chunks(rows_of([2, 4]))


@pytest.mark.parametrize("packed", [True, False])
def test_pipeline_stages_get_one_shape(packed: bool) -> None:
    """Rectangles of different shapes become packed rows of one length; no row is lost, none is longer than the longest."""
    data = rows_of([2, 3, 9, 5, 6])
    plan = Planned([[[0, 2], [2, 3], [3, 5]]], [[3, 9, 6]], [5], packed)
    (chunk,) = plan.chunks(data)
    inputs = lay_out_all(chunk.micro_batches(Shapes(equal=True)), ContextShare(), Shapes(equal=True))
    assert {tuple(laid_out.tokens.shape) for laid_out in inputs} == {(1, 11)}
    names = [name for laid_out in inputs for name in laid_out.micro_batch.data["name"]]
    assert names == data["name"]


def test_a_ragged_end_is_filled_with_the_last_row() -> None:
    (chunk,) = FixedRows(3).chunks(rows_of([2, 5, 3, 4]))
    filled = chunk.without_ragged_end().micro_batches(Shapes())
    assert [micro_batch.data["name"] for micro_batch in filled] == [["row 0", "row 1", "row 2"], ["row 3"] * 3]
    assert chunk.rows == 4
