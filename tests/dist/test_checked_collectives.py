"""Collectives that do not match are named by rank; those that do give the same results; and no group gives up
before the driver does."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.rendezvous import compare_collectives, set_group_timeouts
from megarl.distributed.worker_stacks import look_at
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.models import policy_config
from tests.tiers import sampled


@contextmanager
def compared() -> Iterator[None]:
    compare_collectives()
    try:
        yield
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def mismatch(odd: int, difference: str) -> str:
    """What every rank is told where rank ``odd`` calls another collective than the others, after some that
    were alike."""
    with compared():
        group = dist.new_group()
    dist.all_reduce(torch.ones(3), group=group)
    is_odd = dist.get_rank() == odd
    tensor = torch.ones(
        5 if is_odd and difference == "shape" else 3,
        dtype=torch.float64 if is_odd and difference == "dtype" else None,
    )
    try:
        if is_odd and difference == "operation":
            dist.broadcast(tensor, src=dist.get_global_rank(group, 0), group=group)
        else:
            dist.all_reduce(tensor, group=group)
    except RuntimeError as error:
        return str(error)
    return ""


@sampled(2)
@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize(
    ("difference", "signs"),
    [("shape", ("[5]", "[3]")), ("dtype", ("Double", "Float")), ("operation", ("BROADCAST", "ALLREDUCE"))],
)
def test_a_rank_whose_collective_differs_is_named(
    pool: WorkerPool, odd: int, difference: str, signs: tuple[str, str]
) -> None:
    for said in pool.run(3, mismatch, odd, difference):
        assert "mismatch between collectives on ranks" in said
        # each rank compares itself with those that differ from it
        assert all(sign in said for sign in signs), said
        assert f"Rank {odd} is running collective" in said, said


def train(config: Mapping[str, Any], batch: Mapping[str, Any], check: bool) -> dict[str, Any]:
    """Loss, norm and weights after a step."""
    with compared() if check else nullcontext():
        worker = jobs.build(config, init_reference_model=False, check_collectives=check)
        result = worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
        weights = {name: tensor.clone() for name, tensor in worker.backend.export_hf()}
        groups = worker.backend.groups
        wrapped = type(groups.tensor._get_backend(torch.device("cpu"))).__name__
        worker.backend.close()
    return {
        "loss": result["global_loss"],
        "norm": result["grad_norm"],
        "weights": weights,
        "backend": wrapped,
    }


@sampled(1)
@pytest.mark.parametrize("kind", ["megatron", "dtensor"])
def test_a_step_whose_collectives_are_compared_is_the_same_step(
    pool: WorkerPool, tiny_models: dict[str, Path], kind: str
) -> None:
    model = tiny_models["qwen2"]
    config = policy_config(model, tp=2, sp=True) if kind == "megatron" else dtensor_config(model, tp=2)
    plain, checked = (pool.run(4, train, config, make_batch(8, 11), check) for check in (False, True))
    for without, compared_one in zip(plain, checked, strict=True):
        assert (without["backend"], compared_one["backend"]) == ("ProcessGroupGloo", "_ProcessGroupWrapper")
        assert torch.equal(without["loss"], compared_one["loss"]) and torch.equal(
            without["norm"], compared_one["norm"]
        )
        assert all(
            torch.equal(tensor, compared_one["weights"][name]) for name, tensor in without["weights"].items()
        )


def wait_alone() -> str:
    """What rank 0 is told that waits in a collective which rank 1 does not join."""
    group, said = dist.new_group(), ""
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 0:
        set_group_timeouts(1.0)
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            said = str(error)
    # a rank that is done would close the connection
    dist.barrier()
    return said


def timeout_inside() -> str:
    """The timeout of a group whose collectives are compared."""
    with compared():
        group = dist.new_group()
    set_group_timeouts(1.0)
    backend: Any = group._get_backend(torch.device("cpu"))
    return str(backend.wrapped_pg.options._timeout)


def test_all_groups_wait_as_long_as_they_are_told(pool: WorkerPool) -> None:
    first, _ = pool.run(2, wait_alone)
    assert "Timed out waiting 1000ms" in first
    assert pool.run(2, timeout_inside) == ["0:00:01"] * 2


def look_at_each_other() -> tuple[bool | None, bool | None]:
    """Whether the first rank is seen to wait in a collective that rank 1 has not joined, and rank 1
    itself."""
    ids = [0] * dist.get_world_size()
    dist.all_gather_object(ids, os.getpid())
    seen: tuple[bool | None, bool | None] = (None, None)
    if dist.get_rank() == 1:
        # it may not be there yet
        while not look_at(ids[0]).waits_for_others:
            pass
        seen = True, look_at(ids[1]).waits_for_others
    dist.all_reduce(torch.ones(1))
    return seen


def test_who_waits_in_a_collective_is_told_from_who_does_not(pool: WorkerPool) -> None:
    assert pool.run(3, look_at_each_other)[1] == (True, False)
