"""Sharding in every mode: stack and reorder give the batch back, budgets hold, shards agree, micro-batches
cover all rows."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import PackingAlgorithm
from megarl.distributed.batched_data_dict import (
    BatchedDataDict,
    DynamicBatchingArgs,
    SequencePackingArgs,
    SlicedDataDict,
)
from megarl.errors import BatchError
from tests.tables import read_table

TABLES = read_table("batched_data_dict_sharding.yaml")


def batch_of(lengths: list[int], width: int) -> BatchedDataDict[Any]:
    rows = len(lengths)
    return BatchedDataDict(
        input_ids=torch.arange(rows * width).reshape(rows, width),
        hidden=torch.arange(rows * width * 3).reshape(rows, width, 3),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
        row=list(range(rows)),
    )


def dynamic(budget: int, multiple: int) -> DynamicBatchingArgs:
    return {
        "max_tokens_per_microbatch": budget,
        "sequence_length_round": multiple,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }


def packing(budget: int, multiple: int = 1, **extra: Any) -> SequencePackingArgs:
    return {
        "max_tokens_per_microbatch": budget,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
        "sequence_length_pad_multiple": multiple,
        **extra,
    }


def assert_same(first: BatchedDataDict[Any], second: BatchedDataDict[Any]) -> None:
    assert sorted(first) == sorted(second)
    for key in first:
        same = (
            torch.equal(first[key], second[key])
            if isinstance(first[key], torch.Tensor)
            else first[key] == second[key]
        )
        assert same, key


@st.composite
def cases(draw: st.DrawFn) -> tuple[BatchedDataDict[Any], int, int, int]:
    """A batch, shards, rows of a global batch, and S."""
    shards, share, chunks = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    width = draw(st.integers(1, 13))
    rows = shards * share * chunks
    lengths = draw(st.lists(st.integers(1, width), min_size=rows, max_size=rows))
    return batch_of(lengths, width), shards, shards * share, width


@settings(max_examples=60)
@given(case=cases())
def test_plain_shards_take_their_part_of_every_chunk(
    case: tuple[BatchedDataDict[Any], int, int, int],
) -> None:
    batch, shards, chunk, _ = case
    parts = batch.shard_by_batch_size(shards, batch_size=chunk)
    share = chunk // shards
    expected = [
        [row for row in range(batch.size) if row % chunk // share == shard] for shard in range(shards)
    ]
    assert [part["row"] for part in parts] == expected
    stacked = BatchedDataDict.from_batches(parts)
    stacked.reorder_data([row for rows in expected for row in rows])
    assert_same(stacked, batch)
    for part in parts:
        assert (
            isinstance(part, SlicedDataDict)
            and part.micro_batch_indices is None
            and part.elem_counts_per_gb is None
        )
        gathered = [part.get_batch(number, share) for number in range(batch.size // chunk)]
        assert_same(BatchedDataDict.from_batches(gathered), part)


@settings(max_examples=60)
@given(rows=st.integers(0, 17), shards=st.integers(1, 6))
def test_uneven_shards_have_ceil_size(rows: int, shards: int) -> None:
    batch = batch_of([1] * rows, 2)
    parts = batch.shard_by_batch_size(shards, allow_uneven_shards=True)
    assert len(parts) == shards
    assert_same(BatchedDataDict.from_batches(parts), batch)
    share = math.ceil(rows / shards)
    assert [part.size for part in parts] == [
        max(0, min(share, rows - shard * share)) for shard in range(shards)
    ]


@settings(max_examples=100)
@given(case=cases(), multiple=st.integers(1, 5), slack=st.integers(0, 40))
def test_dynamic_batching(
    case: tuple[BatchedDataDict[Any], int, int, int], multiple: int, slack: int
) -> None:
    batch, shards, chunk, width = case
    longest = max(batch["input_lengths"].tolist())
    budget = min(width, math.ceil(longest / multiple) * multiple) + slack
    parts, order = batch.shard_by_batch_size(
        shards, batch_size=chunk, dynamic_batching_args=dynamic(budget, multiple)
    )
    stacked = BatchedDataDict.from_batches(parts)
    stacked.reorder_data(order)
    assert_same(stacked, batch)
    for part in parts:
        assert (
            part.micro_batch_indices == parts[0].micro_batch_indices
            and part.micro_batch_lengths == parts[0].micro_batch_lengths
        )
        for number in range(batch.size // chunk):
            check_dynamic_global_batch(
                part.get_batch(number, chunk // shards),
                budget,
                multiple,
                width,
                range(number * chunk, number * chunk + chunk),
            )
        assert sum(micro.size for micro in part.make_microbatch_iterator_with_dynamic_shapes()) == part.size


def check_dynamic_global_batch(
    batch: SlicedDataDict, budget: int, multiple: int, width: int, rows: range
) -> None:
    assert set(batch["row"]) <= set(rows)
    micro_batches = list(batch.make_microbatch_iterator_with_dynamic_shapes())
    assert len(micro_batches) == batch.get_microbatch_iterator_dynamic_shapes_len()
    assert [row for micro in micro_batches for row in micro["row"]] == batch["row"]
    for micro in micro_batches:
        count, length = micro["input_ids"].shape
        assert count * length <= budget and micro["hidden"].shape == (count, length, 3)
        assert max(micro["input_lengths"].tolist()) <= length
        assert length % multiple == 0 or length == width


@pytest.mark.parametrize("algorithm", [None, *(member.value for member in PackingAlgorithm)])
@settings(max_examples=50)
@given(case=cases(), multiple=st.integers(1, 5), slack=st.integers(0, 40))
def test_sequence_packing(
    algorithm: str | None, case: tuple[BatchedDataDict[Any], int, int, int], multiple: int, slack: int
) -> None:
    batch, shards, chunk, _ = case
    padded = [math.ceil(length / multiple) * multiple for length in batch["input_lengths"].tolist()]
    budget = max(padded) + slack
    args = packing(budget, multiple) if algorithm is None else packing(budget, multiple, algorithm=algorithm)
    parts, order = batch.shard_by_batch_size(shards, batch_size=chunk, sequence_packing_args=args)
    stacked = BatchedDataDict.from_batches(parts)
    stacked.reorder_data(order)
    assert_same(stacked, batch)
    for number in range(batch.size // chunk):
        global_batches = [part.get_batch(number) for part in parts]
        assert sorted(row for part in global_batches for row in part["row"]) == list(
            range(number * chunk, number * chunk + chunk)
        )
        assert (
            len({part.get_microbatch_iterator_for_packable_sequences_len()[0] for part in global_batches})
            == 1
        )
        for part in global_batches:
            check_packed_global_batch(part, padded, budget)
    for part in parts:
        assert [
            row for pack in part.make_microbatch_iterator_for_packable_sequences() for row in pack["row"]
        ] == part["row"]


def check_packed_global_batch(batch: SlicedDataDict, padded: list[int], budget: int) -> None:
    packs = list(batch.make_microbatch_iterator_for_packable_sequences())
    assert [row for pack in packs for row in pack["row"]] == batch["row"]
    totals = [sum(padded[row] for row in pack["row"]) for pack in packs]
    assert batch.micro_batch_lengths == [totals]
    assert all(pack.size > 0 for pack in packs) and max(totals) <= budget
    assert batch.get_microbatch_iterator_for_packable_sequences_len() == (len(packs), max(totals))


def test_dynamic_batching_by_hand() -> None:
    batch = batch_of([2, 8, 4, 16, 28, 32, 2, 32], 128)
    parts, order = batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(32, 4))
    assert order == [0, 2, 3, 5, 6, 1, 4, 7]
    for part in parts:
        assert part.micro_batch_indices == [[[0, 2], [2, 3], [3, 4]]]
        assert part.micro_batch_lengths == [[8, 28, 32]]


def test_dynamic_batching_fills_the_budget_exactly() -> None:
    part = batch_of([7, 8, 7, 5], 9).shard_by_batch_size(1, dynamic_batching_args=dynamic(16, 4))[0][0]
    assert part.micro_batch_indices == [[[0, 2], [2, 4]]] and part.micro_batch_lengths == [[8, 8]]


def test_default_packing_algorithm_is_best_fit_decreasing() -> None:
    lengths = [6, 3, 7, 4, 5, 5, 2, 8]
    batch = batch_of(lengths, 8)
    plain, _ = batch.shard_by_batch_size(2, sequence_packing_args=packing(10))
    named, _ = batch.shard_by_batch_size(
        2, sequence_packing_args=packing(10, algorithm="best_fit_decreasing")
    )
    assert [part["row"] for part in plain] == [part["row"] for part in named]
    assert [part.micro_batch_lengths for part in plain] == [[[10, 10]], [[10, 10]]]


def test_shards_do_not_share_memory_with_the_batch() -> None:
    batch = batch_of([1] * 6, 4)
    part = batch.shard_by_batch_size(3)[1]
    assert (
        part["input_ids"].untyped_storage().nbytes()
        == part["input_ids"].numel() * part["input_ids"].element_size()
    )


def test_get_batch_refuses_a_size_the_plan_does_not_have() -> None:
    parts, _ = batch_of([1, 2, 3, 4, 5, 6, 7, 8], 8).shard_by_batch_size(
        2, batch_size=4, dynamic_batching_args=dynamic(16, 1)
    )
    with pytest.raises(BatchError, match="planned for 2 rows"):
        parts[0].get_batch(0, 4)
    packed, _ = batch_of([1, 2, 3, 4], 8).shard_by_batch_size(2, sequence_packing_args=packing(16))
    with pytest.raises(BatchError, match="batch_idx = 1"):
        packed[0].get_batch(1)


@pytest.mark.parametrize(
    "arguments, message",
    TABLES["refused arguments"],
)
def test_refused_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        batch_of([1, 2, 3, 4, 5, 6], 7).shard_by_batch_size(**arguments)


@pytest.mark.parametrize("lengths", [[1, 0], [1, 8], [-1, 1]])
def test_refused_lengths(lengths: list[int]) -> None:
    with pytest.raises(BatchError, match=r"input_lengths\[\d\] = -?\d is outside 1 to 7"):
        batch_of(lengths, 7).shard_by_batch_size(2, sequence_packing_args=packing(9))


def test_refused_columns() -> None:
    batch = batch_of([1, 2], 7)
    with pytest.raises(AssertionError, match="Batch sizes are not the same across the rollout batch"):
        BatchedDataDict(a=torch.ones(2), b=["x"]).shard_by_batch_size(1)
    with pytest.raises(BatchError, match="'a' holds Tensor without rows"):
        BatchedDataDict(a=torch.tensor(1)).shard_by_batch_size(1)
    with pytest.raises(BatchError, match="'a' holds int without rows"):
        BatchedDataDict(a=3).shard_by_batch_size(1)
    with pytest.raises(BatchError, match="the batch has 0 rows"):
        BatchedDataDict().shard_by_batch_size(1)
    with pytest.raises(BatchError, match="the batch has 0 rows"):
        batch_of([], 3).shard_by_batch_size(1, allow_uneven_shards=True, sequence_packing_args=packing(9))
    del batch["input_lengths"]
    with pytest.raises(BatchError, match="input_lengths_key = 'input_lengths' must name a tensor"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(9, 1))
    batch["input_lengths"] = torch.tensor([1.0, 2.0])
    with pytest.raises(BatchError, match="must be integers"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(9, 1))
    batch["input_ids"] = torch.tensor([1, 2])
    with pytest.raises(BatchError, match=r"must be \[B, S\]"):
        batch.shard_by_batch_size(2, dynamic_batching_args=dynamic(9, 1))


def test_packing_faults_are_value_errors() -> None:
    batch = batch_of([5, 6], 7)
    with pytest.raises(ValueError, match=r"sequence 0 has length 8, which exceeds bin_capacity = 7"):
        batch.shard_by_batch_size(2, sequence_packing_args=packing(7, 4))
    with pytest.raises(ValueError, match="Unknown packing algorithm 'tetris'"):
        batch.shard_by_batch_size(2, sequence_packing_args=packing(7, algorithm="tetris"))
    with pytest.raises(ValueError, match="Cannot create 4 bins with only 2 sequences"):
        batch.shard_by_batch_size(4, allow_uneven_shards=True, sequence_packing_args=packing(7))
