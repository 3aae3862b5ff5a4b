"""A micro-batch that has no room ends the call with an error that says how large it was, and changes no
weight."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.errors import MicroBatchMemoryError
from megarl.models.engine.heads import LogprobHead
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import fsdp1_config
from tests.models import policy_config

ROWS = 16


class HungryLoss(NLLLoss):
    """NLL that has no memory for one of its calls, on one rank, in its forward or backward pass; notes the
    rows of each."""

    def __init__(self, rank: int, failing: int, way: str) -> None:
        self.rank, self.failing, self.way = rank, failing, way
        self.rows: list[int] = []

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: Tensor, **named: Any) -> Any:
        self.rows.append(data["input_ids"].shape[0])
        if dist.get_rank() == self.rank and len(self.rows) == self.failing:
            if self.way == "forward":
                _no_memory()
            next_token_logprobs.register_hook(_no_memory)
        return super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs, **named)


def _no_memory(*unused: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore lines")


def train(
    config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], failing: int, way: str
) -> dict[str, Any]:
    """Trains on all batches with a loss that has no memory once, on the last rank: the error, the rows of the
    loss's calls, weights."""
    worker, loss = (
        jobs.build(config, init_reference_model=False),
        HungryLoss(dist.get_world_size() - 1, failing, way),
    )
    found: dict[str, Any] = {"error": None}
    try:
        for batch in batches:
            worker.train(data=jobs.my_share(worker, batch), loss_fn=loss)
    except MicroBatchMemoryError as error:
        found["error"] = str(error)
    found["rows"] = loss.rows
    found["weights"] = jobs.full_weights(worker)
    worker.backend.close()
    return found


def test_a_row_without_room_ends_the_call_with_its_size(
    pool: WorkerPool, tiny_models: dict[str, Path]
) -> None:
    config, batch = policy_config(tiny_models["qwen2"], gbs=ROWS, mbs=1), make_batch(ROWS, 11)
    [found] = pool.run(1, train, config, [batch], 3, "forward")
    text, tokens = found["error"], int(batch["input_lengths"][2])
    assert text.startswith(
        f"out of memory in a training pass, at micro-batch 3 of 16: 1 rows, {tokens} tokens in 11 "
        "positions; peak "
    )
    figures = re.search(r"peak (\d+\.\d\d) GiB, limit (\d+\.\d\d) GiB", text)
    assert figures is not None and 0 < float(figures[1]) < float(figures[2])
    assert "CUDA out of memory. Tried to allocate 20.00 MiB.)" in text and "train_micro_batch_size" in text


@pytest.mark.parametrize("way", ["forward", "backward"])
@pytest.mark.parametrize("make", [policy_config, dtensor_config, fsdp1_config])
def test_no_weight_is_changed(
    pool: WorkerPool, tiny_models: dict[str, Path], make: Callable[..., dict[str, Any]], way: str
) -> None:
    config = make(tiny_models["qwen2"], gbs=ROWS, mbs=4)
    [whole], [found] = (
        pool.run(1, train, config, batches, 2, way) for batches in ([], [make_batch(ROWS, 11)])
    )
    assert "4 rows" in found["error"] and "micro-batch 2 of 4" in found["error"]
    assert found["rows"] == [4, 4]
    assert all(torch.equal(tensor, whole["weights"][name]) for name, tensor in found["weights"].items())


def score(config: Mapping[str, Any], batch: Mapping[str, Any]) -> tuple[str, Tensor, Tensor]:
    """The error where the second micro-batch of log-probabilities has no memory, and what the calls before
    and after it return."""
    worker, calls = jobs.build(config, init_reference_model=False), itertools.count(1)
    data, real = (
        jobs.dealt(worker, batch, "logprob").shards[worker.backend.groups.data_rank],
        LogprobHead.next_token_logprobs,
    )

    def hungry(*arguments: Any) -> Tensor:
        if next(calls) == 2:
            _no_memory()
        return real(*arguments)

    before = worker.get_logprobs(data=data)["logprobs"]
    with (
        mock.patch.object(LogprobHead, "next_token_logprobs", hungry),
        pytest.raises(MicroBatchMemoryError) as caught,
    ):
        worker.get_logprobs(data=data)
    after = worker.get_logprobs(data=data)["logprobs"]
    worker.backend.close()
    return str(caught.value), before, after


def test_log_probabilities_without_room_name_their_own_key(
    pool: WorkerPool, tiny_models: dict[str, Path]
) -> None:
    config = policy_config(tiny_models["qwen2"], gbs=ROWS, mbs=4, logprob_batch_size=8)
    [(text, before, after)] = pool.run(1, score, config, make_batch(ROWS, 11))
    assert (
        text.startswith("out of memory in a log-probability pass, at micro-batch 2 of 2: 8 rows, ")
        and "logprob_batch_size" in text
    )
    assert torch.equal(before, after)
