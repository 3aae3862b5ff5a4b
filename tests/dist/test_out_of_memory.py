"""A micro-batch that has no room: an error that says how large it was, or the same loss, gradient and log-probabilities in halves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MicroBatchMemoryError
from megarl.models.engine.heads import LogprobHead
from megarl.models.policy.batch_plan import shard_batch
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.dist.pool import WorkerPool
from tests.dist.refit_jobs import build
from tests.models import policy_config
from tests.tiers import sampled

ROWS = 16


class HungryLoss(NLLLoss):
    """NLL that has no memory for one of its calls, on one rank, in its forward or backward pass; notes the rows of each."""

    def __init__(self, rank: int, failing: int, way: str) -> None:
        self.rank, self.failing, self.way = rank, failing, way
        self.rows: list[int] = []

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: torch.Tensor, **named: Any) -> Any:
        self.rows.append(data["input_ids"].shape[0])
        if dist.get_rank() == self.rank and len(self.rows) == self.failing:
            if self.way == "forward":
                _no_memory()
            next_token_logprobs.register_hook(_no_memory)
        return super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs, **named)


def _no_memory(*unused: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore lines")


def share(worker: Any, config: Mapping[str, Any], batch: Mapping[str, Any], phase: Any) -> BatchedDataDict[Any]:
    groups = worker.backend.groups
    size = config["train_global_batch_size"] if phase == "train" else None
    return shard_batch(BatchedDataDict(batch), worker.cfg, groups.data_size, phase=phase, global_batch=size).shards[groups.data_rank]


def train(config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], failing: int, way: str) -> dict[str, Any]:
    """Trains on all batches with a loss that has no memory once, on the last rank; losses, norms, the rows of its calls, weights."""
    worker, loss = build(config), HungryLoss(dist.get_world_size() - 1, failing, way)
    found: dict[str, Any] = {"losses": [], "norms": [], "error": None}
    try:
        for batch in batches:
            result = worker.train(data=share(worker, config, batch, "train"), loss_fn=loss)
            found["losses"].append(result["global_loss"])
            found["norms"].append(result["grad_norm"])
    except MicroBatchMemoryError as error:
        found["error"] = (str(error), error.figures)
    found["rows"], found["halvings"] = loss.rows, worker.get_gpu_info()["halvings"]
    found["weights"] = {name: tensor.clone() for name, tensor in worker.backend.export_hf()}
    worker.backend.close()
    return found


LAYOUTS: dict[str, tuple[int, Any]] = {
    "megatron-dp2": (2, lambda model, **changes: policy_config(model, **changes)),
    "megatron-dp2-whole": (2, lambda model, **changes: policy_config(model, distributed_optimizer=False, **changes)),
    "megatron-alone": (1, lambda model, **changes: policy_config(model, **changes)),
    "dtensor-alone": (1, lambda model, **changes: dtensor_config(model, **changes)),
    "fsdp1-alone": (1, lambda model, **changes: fsdp1_config(model, **changes)),
}


def configured(layout: str, model: Path, on_oom: str = "split", **changes: Any) -> tuple[int, dict[str, Any]]:
    world, make = LAYOUTS[layout]
    return world, make(model, **{"gbs": ROWS, "mbs": 4, **changes}) | {"on_oom": on_oom}


@sampled(2)
@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_split_micro_batch_gives_the_same_step(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, batching: str, way: str
) -> None:
    world, config = configured(layout, tiny_models["qwen2"], batching=batching)
    batches = [make_batch(ROWS, 11, seed=seed) for seed in range(2)]
    plain = pool.run(world, train, config, batches, 0, way)
    split = pool.run(world, train, config, batches, 2, way)
    for rank, (whole, halves) in enumerate(zip(plain, split, strict=True)):
        assert halves["error"] is whole["error"] is None
        torch.testing.assert_close(torch.stack(halves["losses"]), torch.stack(whole["losses"]), rtol=1e-5, atol=0)
        torch.testing.assert_close(torch.stack(halves["norms"]), torch.stack(whole["norms"]), rtol=1e-5, atol=0)
        for name, tensor in whole["weights"].items():
            torch.testing.assert_close(halves["weights"][name], tensor, rtol=1e-5, atol=2e-6)
        if rank == world - 1:
            # the two calls that went before it was noticed, and from there on halves, in the second batch too
            assert halves["rows"][:2] == whole["rows"][:2]
            assert max(halves["rows"][2:]) == max(-(-rows // 2) for rows in whole["rows"]) < max(whole["rows"])
            assert sum(halves["rows"][2:]) == sum(whole["rows"])
        else:
            assert halves["rows"] == whole["rows"]


def test_a_single_row_is_not_split(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    world, config = configured("megatron-alone", tiny_models["qwen2"], mbs=1)
    [found] = pool.run(world, train, config, [make_batch(ROWS, 11)], 3, "forward")
    text, figures = found["error"]
    batch = make_batch(ROWS, 11)
    tokens = int(batch["input_lengths"][2])
    assert figures["rows"] == 1 and figures["tokens"] == tokens and figures["positions"] == 11
    assert 0 < figures["peak_gib"] < figures["limit_gib"]
    assert text.startswith(f"out of memory in a training pass, at micro-batch 3 of 16: 1 rows, {tokens} tokens in 11 positions; peak ")
    assert "CUDA out of memory. Tried to allocate 20.00 MiB.)" in text and "train_micro_batch_size" in text


def test_by_default_it_ends_the_call_with_its_size_and_changes_nothing(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    world, config = configured("dtensor-alone", tiny_models["qwen2"], on_oom="raise")
    [whole], [found] = (pool.run(world, train, config, batches, 2, "backward") for batches in ([], [make_batch(ROWS, 11)]))
    text, figures = found["error"]
    assert figures["rows"] == 4 and "policy.on_oom=split" in text and "micro-batch 2 of 4" in text
    assert found["rows"] == [4, 4]
    assert all(torch.equal(tensor, whole["weights"][name]) for name, tensor in found["weights"].items())


@contextmanager
def no_memory_for(call: int) -> Iterator[list[int]]:
    """One call of the head of log-probabilities has no memory. Notes the rows of each."""
    rows: list[int] = []
    real = LogprobHead.next_token_logprobs

    def hungry(self: LogprobHead, output: torch.Tensor, model_input: Any, request: Any = None) -> torch.Tensor:
        rows.append(model_input.micro_batch.size)
        if len(rows) == call:
            _no_memory()
        return real(self, output, model_input, request)

    with mock.patch.object(LogprobHead, "next_token_logprobs", hungry):
        yield rows


def score(config: Mapping[str, Any], batch: Mapping[str, Any], call: int) -> tuple[torch.Tensor, list[int]]:
    worker = build(config)
    with no_memory_for(call) if dist.get_rank() == 0 else nullcontext([]) as rows:
        data = share(worker, config, batch, "logprob")
        first, second = (worker.get_logprobs(data=data)["logprobs"] for _ in range(2))
    worker.backend.close()
    assert torch.allclose(first, second, rtol=0, atol=1e-5)
    return first, rows


@sampled(1)
@pytest.mark.parametrize("layout", ["megatron-dp2", "megatron-alone", "fsdp1-alone"])
def test_split_log_probabilities_are_the_same(pool: WorkerPool, tiny_models: dict[str, Path], layout: str) -> None:
    world, config = configured(layout, tiny_models["qwen2"], logprob_batch_size=4)
    plain, split = (pool.run(world, score, config, make_batch(ROWS, 11), call) for call in (0, 2))
    for (without, _), (found, _) in zip(plain, split, strict=True):
        torch.testing.assert_close(found, without, rtol=0, atol=1e-5)
    assert max(split[0][1][2:]) == 2 and max(plain[0][1]) == 4


def coupled(config: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[str, bool, int]:
    """What is said of a loss that has no memory, on all ranks, as none may wait in a test for one that has left; how often it ran."""
    worker = build(config)
    loss = HungryLoss(dist.get_rank(), 1, "forward")
    try:
        worker.train(data=share(worker, config, batch, "train"), loss_fn=loss)
    except MicroBatchMemoryError as error:
        return error.kind, error.may_go_on_smaller, len(loss.rows)
    finally:
        worker.backend.close()
    return "", False, 0


@sampled(2)
@pytest.mark.parametrize("layout", ["megatron-tp2", "dtensor-dp2", "megatron-overlapping"])
@pytest.mark.parametrize(("rows", "smaller"), [(4, True), (1, False)])
def test_where_ranks_share_the_model_no_pass_is_begun_anew(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, rows: int, smaller: bool
) -> None:
    model = tiny_models["qwen2"]
    config = {
        "megatron-tp2": lambda: policy_config(model, tp=2, gbs=ROWS, mbs=rows),
        "dtensor-dp2": lambda: dtensor_config(model, gbs=ROWS, mbs=rows),
        "megatron-overlapping": lambda: policy_config(model, overlap=True, gbs=ROWS, mbs=rows),
    }[layout]()
    assert pool.run(2, coupled, config | {"on_oom": "split"}, make_batch(ROWS, 11)) == [("training", smaller, 1)] * 2
