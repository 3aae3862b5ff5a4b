"""Joining, slicing, selecting and reordering of batches."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from megarl.errors import BatchError


def small_batch(rows: int = 6, width: int = 5) -> BatchedDataDict[Any]:
    return BatchedDataDict(
        input_ids=torch.arange(rows * width).reshape(rows, width),
        top_k=torch.arange(rows * width * 3, dtype=torch.float64).reshape(rows, width, 3),
        input_lengths=torch.arange(1, rows + 1),
        prompts=[f"row {row}" for row in range(rows)],
    )


def test_from_batches_pads_dim_one_only_and_keeps_trailing_dims() -> None:
    generator = torch.Generator().manual_seed(11)
    shapes = [(2, 4, 3, 2), (1, 7, 3, 2), (3, 1, 3, 2)]
    batches = [
        {"x": torch.randn(*shape, generator=generator), "n": torch.arange(shape[0])} for shape in shapes
    ]
    joined = BatchedDataDict.from_batches(batches, {"x": -1.5})
    assert joined["x"].shape == (6, 7, 3, 2)
    row = 0
    for batch in batches:
        for value in batch["x"]:
            assert torch.equal(joined["x"][row, : value.shape[0]], value)
            assert bool((joined["x"][row, value.shape[0] :] == -1.5).all())
            row += 1
    assert joined["n"].tolist() == [0, 1, 0, 0, 1, 2]


def test_from_batches_takes_the_sorted_keys_of_the_first() -> None:
    joined = BatchedDataDict.from_batches(
        [{"b": ["p"], "a": torch.ones(1, 2)}, {"a": torch.zeros(2, 2), "b": ["q", "r"], "c": [1, 2]}]
    )
    assert list(joined) == ["a", "b"]
    assert joined["b"] == ["p", "q", "r"] and joined["a"].tolist() == [[1, 1], [0, 0], [0, 0]]


def test_from_batches_pads_with_zero_by_default_and_keeps_dtype_and_gradient() -> None:
    weights = torch.tensor([[2.0]], requires_grad=True)
    joined = BatchedDataDict.from_batches([{"x": torch.ones(1, 2)}, {"x": weights}])
    assert joined["x"].tolist() == [[1.0, 1.0], [2.0, 0.0]]
    joined["x"].sum().backward()
    assert weights.grad is not None and weights.grad.tolist() == [[1.0]]
    masks = BatchedDataDict.from_batches(
        [{"m": torch.ones(1, 1, dtype=torch.bool)}, {"m": torch.ones(1, 3, dtype=torch.bool)}]
    )
    assert masks["m"].dtype == torch.bool and masks["m"].tolist() == [[True, False, False], [True] * 3]


@pytest.mark.parametrize(
    "batches, message",
    [
        ([], "got 0 batches"),
        ([{"a": torch.ones(1)}, {"b": torch.ones(1)}], r"'a' is in batch 0 but not in batches \[1\]"),
        ([{"a": torch.ones(1, 2, 3)}, {"a": torch.ones(1, 2, 4)}], "differ in more than dims 0 and 1"),
        ([{"a": torch.ones(1, 2)}, {"a": torch.ones(1)}], "differ in more than dims 0 and 1"),
        ([{"a": torch.tensor(1)}], "differ in more than dims 0 and 1"),
    ],
)
def test_from_batches_refuses(batches: list[dict[str, torch.Tensor]], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        BatchedDataDict.from_batches(batches)


@pytest.mark.parametrize("values", [("text", "text"), (torch.ones(1), [1])])
def test_from_batches_joins_only_tensors_or_lists(values: tuple[Any, Any]) -> None:
    with pytest.raises(NotImplementedError, match="'a'"):
        BatchedDataDict.from_batches([{"a": value} for value in values])


def test_size() -> None:
    assert small_batch(4).size == 4
    assert BatchedDataDict(names=["p", "q"]).size == 2
    with pytest.raises(StopIteration):
        _ = BatchedDataDict().size


def test_slice_and_chunk_take_contiguous_rows() -> None:
    batch = small_batch()
    part = batch.slice(1, 3)
    assert (
        isinstance(part, SlicedDataDict)
        and part["prompts"] == ["row 1", "row 2"]
        and part["input_lengths"].tolist() == [2, 3]
    )
    assert batch.slice(2, 2).size == 0
    assert [batch.chunk(rank, 3)["prompts"] for rank in range(3)] == [
        ["row 0", "row 1"],
        ["row 2", "row 3"],
        ["row 4", "row 5"],
    ]
    for start, end in [(0, 7), (-1, 2), (3, 2)]:
        with pytest.raises(AssertionError, match="rows"):
            batch.slice(start, end)
    with pytest.raises(AssertionError, match="not a multiple of chunks"):
        batch.chunk(0, 4)
    with pytest.raises(AssertionError, match="rank = 3"):
        batch.chunk(3, 3)


def test_select_indices_copies_and_may_repeat() -> None:
    batch = small_batch()
    for indices in ([4, 0, 4], torch.tensor([4, 0, 4])):
        chosen = batch.select_indices(indices)
        assert type(chosen) is BatchedDataDict
        assert chosen["prompts"] == ["row 4", "row 0", "row 4"]
        assert torch.equal(chosen["top_k"], batch["top_k"][torch.tensor([4, 0, 4])])
    chosen["input_ids"].zero_()
    assert int(batch["input_ids"].sum()) == sum(range(30))
    assert batch.select_indices([]).size == 0
    for indices in ([6], [-1, 0]):
        with pytest.raises(BatchError, match="row indices run from"):
            batch.select_indices(indices)


def test_repeat_interleave_copies_list_items_deeply() -> None:
    batch = BatchedDataDict(x=torch.tensor([[1, 2], [3, 4]]), log=[[{"role": "user"}], []])
    repeated = batch.repeat_interleave(3)
    assert repeated["x"].tolist() == [[1, 2]] * 3 + [[3, 4]] * 3
    repeated["log"][0][0]["role"] = "changed"
    assert repeated["log"][1] == [{"role": "user"}] and batch["log"][0] == [{"role": "user"}]


def test_truncate_tensors_skips_what_lacks_the_dimension() -> None:
    batch = small_batch()
    batch.truncate_tensors(dim=1, truncated_len=2)
    assert (
        batch["input_ids"].shape == (6, 2)
        and batch["top_k"].shape == (6, 2, 3)
        and batch["input_lengths"].shape == (6,)
    )
    batch.truncate_tensors(dim=2, truncated_len=9)
    assert batch["top_k"].shape == (6, 2, 3)


def test_reorder_data_is_the_inverse_permutation() -> None:
    batch = small_batch()
    order = [3, 0, 5, 1, 4, 2]
    shuffled = batch.select_indices(order)
    shuffled.reorder_data(order)
    assert shuffled["prompts"] == batch["prompts"] and torch.equal(shuffled["top_k"], batch["top_k"])
    for bad in ([0, 0, 1, 2, 3, 4], [0, 1], [1, 2, 3, 4, 5, 6]):
        with pytest.raises(BatchError, match="permutation"):
            batch.reorder_data(bad)


def test_fixed_micro_batches_cover_all_rows() -> None:
    batch = small_batch()
    parts = list(batch.make_microbatch_iterator(2))
    assert [prompt for part in parts for prompt in part["prompts"]] == batch["prompts"] and len(parts) == 3
    for size in (4, 0, -2):
        with pytest.raises(AssertionError, match="multiple of microbatch_size"):
            batch.make_microbatch_iterator(size)


def test_planned_iterators_need_a_plan() -> None:
    batch = small_batch()
    for method in (
        batch.make_microbatch_iterator_with_dynamic_shapes,
        batch.get_microbatch_iterator_dynamic_shapes_len,
        batch.make_microbatch_iterator_for_packable_sequences,
        batch.get_microbatch_iterator_for_packable_sequences_len,
    ):
        with pytest.raises(BatchError, match="no micro-batch plan"):
            method()


def test_get_batch_without_a_plan() -> None:
    batch = small_batch()
    assert batch.get_batch(1, 3)["prompts"] == ["row 3", "row 4", "row 5"]
    for number, size, message in [
        (2, 3, "2 global batches"),
        (-1, 3, "batch_idx = -1"),
        (0, None, "batch_size = None"),
        (0, 0, "batch_size = 0"),
    ]:
        with pytest.raises(BatchError, match=message):
            batch.get_batch(number, size)


def test_to_and_get_dict_and_pickle() -> None:
    batch = small_batch()
    batch.micro_batch_lengths = [[5]]
    assert batch.to("meta") is batch
    assert batch["input_ids"].device.type == "meta" and batch["prompts"][0] == "row 0"
    plain = small_batch()
    plain.micro_batch_lengths = [[5]]
    twin = pickle.loads(pickle.dumps(plain))
    assert (
        type(twin) is BatchedDataDict
        and twin.micro_batch_lengths == [[5]]
        and torch.equal(twin["top_k"], plain["top_k"])
    )
    assert type(plain.get_dict()) is dict and list(plain.get_dict()) == [
        "input_ids",
        "top_k",
        "input_lengths",
        "prompts",
    ]


def test_batches_load_no_ray() -> None:
    code = "import sys, megarl.distributed.batched_data_dict; print('ray' in sys.modules)"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "False"
    )
