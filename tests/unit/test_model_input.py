"""Rows in front of the model and back, packed or not: every token keeps its place, its position and its
successor."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.errors import BatchError
from megarl.models.engine.batching import FixedRows, Planned
from megarl.models.engine.context import ContextShare
from megarl.models.engine.microbatches import (
    HOST_LENGTHS,
    MicroBatch,
    Shapes,
    move_to,
    packed_length,
    split_rows,
)
from megarl.models.engine.model_input import lay_out, lay_out_all
from megarl.models.engine.step import as_floats

LENGTHS = st.lists(st.integers(1, 11), min_size=1, max_size=6)


def rows_of(lengths: list[int]) -> dict[str, Any]:
    """Token ids that say where they are: row x 100 + column + 1, zero where padding is."""
    width = max(lengths)
    ids = torch.arange(len(lengths))[:, None] * 100 + torch.arange(width)[None] + 1
    inside = torch.arange(width)[None] < torch.tensor(lengths)[:, None]
    return {
        "input_ids": ids * inside,
        "input_lengths": torch.tensor(lengths),
        "name": [f"row {row}" for row in range(len(lengths))],
    }


@given(LENGTHS, st.integers(1, 4), st.integers(0, 9))
def test_a_packed_row_holds_every_sequence_behind_the_other(
    lengths: list[int], multiple: int, filler: int
) -> None:
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
        assert (
            packed.targets[0, start : start + length - 1].tolist()
            == data["input_ids"][row, 1:length].tolist()
        )
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
        tokens = laid_out.to_token_rows(laid_out.tokens.float())
        assert tokens.shape == data["input_ids"].shape and torch.equal(tokens, data["input_ids"].float())
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


@pytest.mark.parametrize("size", [1, 2])
def test_all_micro_batches_together_are_laid_out_as_each_alone(size: int) -> None:
    """Packed ones, and rows among them; with lengths that only the host knows."""
    shapes, context = Shapes(packed_multiple=2 * size), ContextShare(size - 1, size)
    micro_batches = [
        MicroBatch(rows_of([3, 8]), True, 12),
        MicroBatch(rows_of([4, 2, 1]), False, 4),
        MicroBatch(rows_of([5, 1, 7]), True, 24),
    ]
    for together, micro_batch in zip(lay_out_all(micro_batches, context, shapes), micro_batches, strict=True):
        known = {
            **micro_batch.data,
            HOST_LENGTHS: micro_batch.data["input_lengths"].tolist(),
            "input_lengths": None,
        }
        alone = lay_out(replace(micro_batch, data=known), context, shapes)
        assert (together.layout, together.longest, together.places is None) == (
            alone.layout,
            alone.longest,
            not micro_batch.packed,
        )
        for name in ("tokens", "positions", "targets"):
            assert torch.equal(getattr(together, name), getattr(alone, name)), name


def test_the_host_keeps_the_lengths_of_a_batch_that_moves() -> None:
    moved = move_to(rows_of([3, 1, 4]), torch.device("cpu"))
    (chunk,) = Planned([[[0, 1], [1, 3]]], [[3, 5]], [3], True).chunks(
        {**moved, "input_lengths": torch.full((3,), 99)}
    )
    assert [micro_batch.lengths for micro_batch in chunk.micro_batches(Shapes())] == [[3], [1, 4]]
    assert FixedRows(2).chunks(moved)[0].without_ragged_end().data[HOST_LENGTHS] == [3, 1, 4, 4]


def test_a_plan_that_is_too_short_is_refused() -> None:
    with pytest.raises(BatchError, match=r"8 tokens of 2 sequences do not fit into the planned 7"):
        lay_out(MicroBatch(rows_of([4, 4]), True, 7), ContextShare(), Shapes())


def test_a_plan_for_other_rows_is_refused() -> None:
    with pytest.raises(BatchError, match=r"the micro-batch plan holds 3 rows, the batch 2"):
        Planned([[[0, 3]]], [[9]], [3], True).chunks(rows_of([2, 4]))


@pytest.mark.parametrize("packed", [True, False])
def test_pipeline_stages_get_one_shape(packed: bool) -> None:
    """Rectangles of different shapes become packed rows of one length; no row is lost, none is longer than
    the longest."""
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
    assert [micro_batch.data["name"] for micro_batch in filled] == [
        ["row 0", "row 1", "row 2"],
        ["row 3"] * 3,
    ]
    assert chunk.rows == 4


def test_numbers_and_tensors_become_floats_in_their_order() -> None:
    tensors = [
        torch.tensor(0.1),
        torch.tensor(2**40),
        torch.tensor([0.1], dtype=torch.float64),
        torch.tensor(0.1).bfloat16(),
    ]
    values = [tensors[0], 3, *tensors[1:3], True, tensors[3], math.inf]
    assert as_floats(values) == [float(value) for value in values]
    assert as_floats([torch.tensor(math.nan), torch.tensor(1)])[1] == 1.0
    assert as_floats([]) == [] and as_floats([2.5]) == [2.5]


@given(LENGTHS, st.integers(1, 3), st.booleans(), st.integers(1, 2), st.integers(0, 2**32))
def test_the_positions_that_are_scored_predict_what_is_wanted(
    lengths: list[int], multiple: int, packed: bool, ranks: int, seed: int
) -> None:
    data = rows_of(lengths)
    shapes = Shapes(packed_multiple=2 * ranks * multiple, row_multiple=2 * ranks)
    wanted = torch.rand(data["input_ids"].shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    wanted &= data["input_ids"] > 0
    moved = move_to(data, torch.device("cpu"), wanted=wanted)
    if packed:
        micro_batch = MicroBatch(moved, True, packed_length(moved, shapes) + 2 * ranks)
    else:
        (micro_batch,) = split_rows(moved, len(lengths), shapes)
    found: list[int] = []
    for rank in range(ranks):
        laid_out = lay_out(micro_batch, ContextShare(rank, ranks), shapes)
        assert laid_out.scored is not None and laid_out.scored.tolist() == sorted(
            set(laid_out.scored.tolist())
        )
        found += laid_out.targets.flatten()[laid_out.scored].tolist()
        spread = laid_out.spread(torch.ones(len(laid_out.scored)), laid_out.scored)
        assert (
            spread.shape == laid_out.targets.shape
            and spread.flatten().nonzero().flatten().tolist() == laid_out.scored.tolist()
        )
    # ids are all different, and nothing predicts the first of a row
    assert sorted(found) == sorted(data["input_ids"][:, 1:][wanted[:, 1:]].tolist())
