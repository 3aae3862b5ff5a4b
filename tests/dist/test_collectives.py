"""Collectives over ranks that hold different amounts, in gloo processes. Each ``check_*`` function runs in
any process group."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from megarl.distributed.batched_data_dict import (
    BatchedDataDict,
    gather_jagged_object_lists,
    rebalance_nd_tensor,
)
from megarl.errors import BatchError
from tests.tiers import sampled, slow

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.bool]
TRAILING = [(), (3,), (2, 5), (0,)]


def rows_of_ranks(counts: list[int], trailing: tuple[int, ...], dtype: torch.dtype) -> list[Tensor]:
    """What each rank holds; every rank makes the same, so that each knows the answer."""
    generator = torch.Generator().manual_seed(sum(counts) + len(trailing))
    return [torch.randint(0, 100, (count, *trailing), generator=generator).to(dtype) for count in counts]


def count_patterns(ranks: int) -> list[list[int]]:
    return [
        [7 * rank % 5 for rank in range(ranks)],
        [0] * ranks,
        [0] * (ranks - 1) + [2],
        [4, *[0] * (ranks - 1)],
        [3] * ranks,
    ]


def check_rows(group: dist.ProcessGroup | None) -> None:
    """Rows of all ranks, stacked in rank order, on every rank."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    for counts in count_patterns(ranks):
        for trailing in TRAILING:
            for dtype in DTYPES:
                held = rows_of_ranks(counts, trailing, dtype)
                stacked = torch.cat(held)
                assert_equal(rebalance_nd_tensor(held[rank], group), stacked)
    transposed = torch.arange(6).reshape(2, 3).t()
    assert_equal(rebalance_nd_tensor(transposed, group), torch.cat([transposed] * ranks))


def assert_equal(got: Tensor, expected: Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape and torch.equal(got, expected), (
        got,
        expected,
    )


def check_mismatches(group: dist.ProcessGroup | None) -> None:
    """A difference on one rank raises the same error on all, instead of leaving some waiting."""
    rank = dist.get_rank(group)
    odd = rank == dist.get_world_size(group) - 1
    faults = [
        (torch.ones(1, 3 if odd else 2), "differ in more than the number of rows"),
        (torch.ones(2, dtype=torch.int32 if odd else torch.int64), "differ in more than the number of rows"),
        (torch.ones(2, 2) if odd else torch.ones(2), "differ in more than the number of rows"),
        (torch.tensor(1.0) if odd else torch.ones(1), r"hold a tensor that has no rows"),
        (torch.ones(1, dtype=torch.complex64) if odd else torch.ones(1), "unsupported dtype"),
    ]
    for tensor, message in faults:
        with pytest.raises(BatchError, match=message):
            rebalance_nd_tensor(tensor, group)
    with pytest.raises(BatchError, match="different columns"):
        BatchedDataDict(**{"x": [0], "extra" if odd else "other": [1]}).all_gather(group)
    with pytest.raises(BatchError, match="different columns"):
        BatchedDataDict(x=[0] if odd else torch.ones(1)).all_gather(group)


def check_objects(group: dist.ProcessGroup | None) -> None:
    """Lists of different lengths, also empty ones, join in rank order."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    lists = [[f"{number}:{item}" for item in range(number * 2 % 3)] for number in range(ranks)]
    assert gather_jagged_object_lists(lists[rank], group) == [item for part in lists for item in part]
    assert gather_jagged_object_lists([], group) == []


def check_batches(group: dist.ProcessGroup | None) -> None:
    """A batch gathers column by column, whatever the order of its keys."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    parts = [
        BatchedDataDict(x=torch.full((number + 1, 2, 3), number), names=[f"{number}"] * (number + 1))
        for number in range(ranks)
    ]
    mine = parts[rank] if rank else BatchedDataDict(names=parts[0]["names"], x=parts[0]["x"])
    gathered = mine.all_gather(group)
    assert type(gathered) is BatchedDataDict
    assert_equal(gathered["x"], torch.cat([part["x"] for part in parts]))
    assert gathered["names"] == [name for part in parts for name in part["names"]]
    with pytest.raises(NotImplementedError, match="'text'"):
        BatchedDataDict(text="ab").all_gather(group)


def check_subgroup() -> None:
    """The functions stay inside the group they are given: ranks 0 and 2 of three."""
    group = dist.new_group([0, 2])
    if dist.get_rank() == 1:
        return
    check_rows(group)
    check_objects(group)
    check_batches(group)


def run_rank(
    rank: int, ranks: int, store: str, check: Callable[..., None], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(seconds=120)
    )
    try:
        check(*arguments)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def run_everything(group: dist.ProcessGroup | None) -> None:
    check_rows(group)
    check_objects(group)
    check_batches(group)
    if dist.get_world_size(group) > 1:
        check_mismatches(group)


@sampled(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_collectives(ranks: int, tmp_path: Path) -> None:
    multiprocessing.spawn(
        run_rank, args=(ranks, str(tmp_path / "store"), run_everything, (None,)), nprocs=ranks
    )


def check_three_ranks() -> None:
    run_everything(None)
    check_subgroup()


@slow
def test_collectives_on_three_ranks_and_a_subgroup(tmp_path: Path) -> None:
    multiprocessing.spawn(run_rank, args=(3, str(tmp_path / "store"), check_three_ranks, ()), nprocs=3)
