"""Loads of checkpoints that fail: on all ranks alike, and until a load succeeds, no rank uses what may be a
mixture of two checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.checkpoint import collective
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import CheckpointError, StateError
from megarl.parity.pool import WorkerPool
from megarl.patched import patched
from tests.dist.batches import make_batch
from tests.dist.jobs import build
from tests.dist.test_checkpoint_payloads import CONFIGS
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled, slow

BATCH = make_batch(8, 9, seed=0)


def share_of(worker: Any) -> BatchedDataDict[Any]:
    """This rank's rows."""
    groups = worker.backend.groups
    return BatchedDataDict(BATCH).shard_by_batch_size(groups.data_size)[groups.data_rank]


def train_and_save(config: Mapping[str, Any], root: str) -> Tensor:
    """A checkpoint after one step, and log-probabilities under its weights."""
    worker = build(config, init_reference_model=False)
    worker.train(data=share_of(worker), loss_fn=NLLLoss())
    worker.save_checkpoint(f"{root}/weights", f"{root}/optimizer")
    logprobs: Tensor = worker.get_logprobs(data=share_of(worker))["logprobs"]
    worker.backend.close()
    return logprobs


def error_of(load: Callable[[], None]) -> str:
    """What a load says that fails."""
    try:
        load()
    except CheckpointError as error:
        return str(error)
    return ""


def after_a_failed_load(config: Mapping[str, Any], root: str) -> dict[str, Any]:
    """What a worker says and does when it has failed to load a damaged checkpoint, and when it has loaded the
    whole one."""
    worker = build(config, init_reference_model=True)
    share, empty = share_of(worker), BatchedDataDict[Any]({})
    version, before = (
        worker._weights_version,
        [tensor.detach().clone() for _, tensor in worker.backend.parameters()],
    )
    facts: dict[str, Any] = {"error": error_of(lambda: worker.load_checkpoint(f"{root}/damaged"))}
    facts["kept"] = [
        torch.equal(tensor, old) for (_, tensor), old in zip(worker.backend.parameters(), before, strict=True)
    ]
    facts["newer"] = worker._weights_version > version
    worker.prepare_for_lp_inference()
    worker.prepare_for_training()
    calls: dict[str, Callable[[], Any]] = {
        "train": lambda: worker.train(data=share, loss_fn=NLLLoss()),
        "evaluate": lambda: worker.train(data=share, loss_fn=NLLLoss(), eval_mode=True),
        "get_logprobs": lambda: worker.get_logprobs(data=share),
        "reference": lambda: worker.get_reference_policy_logprobs(data=share),
        "generate": lambda: worker.generate(data=empty),
        "save_checkpoint": lambda: worker.save_checkpoint(f"{root}/mixture"),
        "export_hf": lambda: worker.export_hf(f"{root}/mixture"),
        "begin_refit": worker.begin_refit,
        "handles": lambda: worker.get_part_ipc_handles(0, 1),
        "broadcast": lambda: next(iter(worker._weights_of_stage())),
    }
    refusals: dict[str, str] = {}
    for name, call in calls.items():
        try:
            call()
        except StateError as error:
            refusals[name] = str(error)
    facts["accepted"], facts["refusals"] = calls.keys() - refusals.keys(), refusals
    worker.load_checkpoint(f"{root}/weights", f"{root}/optimizer")
    facts["logprobs"] = worker.get_logprobs(data=share)["logprobs"]
    worker.train(data=share, loss_fn=NLLLoss())
    worker.backend.close()
    return facts


@slow
@newest_megatron(backend=["megatron"])
@sampled(1)
@pytest.mark.parametrize("backend", CONFIGS)
def test_nobody_uses_what_a_failed_load_left(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    config = CONFIGS[backend](tiny_models["qwen3"])
    saved = pool.run(2, train_and_save, config, str(tmp_path))
    damaged = tmp_path / "damaged"
    shutil.copytree(tmp_path / "weights", damaged)
    file = max(damaged.rglob("*.distcp"), key=lambda path: path.name)
    os.truncate(file, file.stat().st_size * 3 // 4)
    ranks = pool.run(2, after_a_failed_load, config, str(tmp_path))
    for rank, logprobs in zip(ranks, saved, strict=True):
        assert str(damaged) in rank["error"] and rank["newer"]
        assert not rank["accepted"]
        for name, said in rank["refusals"].items():
            assert (
                f"loading the checkpoint {damaged} failed" in said and "Fix: call load_checkpoint()" in said
            ), (
                name,
                said,
            )
        assert torch.equal(rank["logprobs"], logprobs)
    if backend == "megatron":
        assert {kept for rank in ranks for kept in rank["kept"]} == {True, False}, (
            "the weights are not a mixture: damage less of the file"
        )
    assert not (tmp_path / "mixture").exists()


def load_where_one_host_sees_it(config: Mapping[str, Any], root: str) -> tuple[str, bool]:
    """The error, and whether the worker still has its version of the weights; it trains on."""
    worker = build(config, init_reference_model=False)
    version = worker._weights_version
    message = error_of(
        lambda: worker.load_checkpoint(f"{root}/{'weights' if dist.get_rank() == 0 else 'nowhere'}")
    )
    same = worker._weights_version == version
    worker.train(data=share_of(worker), loss_fn=NLLLoss())
    worker.backend.close()
    return message, same


@sampled(1)
@pytest.mark.parametrize("backend", CONFIGS)
def test_a_checkpoint_that_one_host_does_not_see_changes_nothing(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str
) -> None:
    config = CONFIGS[backend](tiny_models["qwen3"])
    pool.run(2, train_and_save, config, str(tmp_path))
    (seeing, first), (blind, second) = pool.run(2, load_where_one_host_sees_it, config, str(tmp_path))
    assert first and second
    assert "another rank cannot load it" in seeing and "nowhere is not a checkpoint" in blind


def load_with_a_fault(config: Mapping[str, Any], root: str, fault: str) -> str:
    """The error where one rank alone fails: in putting back the optimizer's state, or in reading its
    random-number states."""
    worker = build(config, init_reference_model=False)

    def fails(*_: Any) -> None:
        raise RuntimeError("made up")

    places = {
        "optimizer": [(worker.backend.optimizer, "load_state_dict", fails)],
        "random": [(collective, "load_file", fails)],
    }
    with patched(*(places[fault] if dist.get_rank() == 1 else [])):
        message = error_of(lambda: worker.load_checkpoint(f"{root}/weights", f"{root}/optimizer"))
    worker.backend.close()
    return message


@newest_megatron(backend=["megatron"])
@sampled(1)
@pytest.mark.parametrize(
    ("backend", "fault"), [("megatron", "optimizer"), *((backend, "random") for backend in CONFIGS)]
)
def test_what_one_rank_cannot_put_back_fails_on_all(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, backend: str, fault: str
) -> None:
    config = CONFIGS[backend](tiny_models["qwen3"])
    pool.run(2, train_and_save, config, str(tmp_path))
    first, second = pool.run(2, load_with_a_fault, config, str(tmp_path), fault)
    assert first == second and "rank 1: reading" in first and "RuntimeError: made up" in first


def load_error(config: Mapping[str, Any], directory: str) -> str:
    """What a load of weights says."""
    worker = build(config, init_reference_model=False)
    message = error_of(lambda: worker.load_checkpoint(directory))
    worker.backend.close()
    return message


@newest_megatron
def test_weights_that_one_stage_misses_are_named_on_all(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """The last stage alone has an output layer, and Megatron-Core tells that rank alone that the checkpoint
    of a tied model has none."""
    pool.run(2, train_and_save, policy_config(tiny_models["qwen2-tied"], tp=2), str(tmp_path))
    divided = policy_config(tiny_models["qwen2"], pp=2, first=1, last=2)
    first, second = pool.run(2, load_error, divided, str(tmp_path / "weights"))
    assert first == second and "only in the model ['output_layer.weight']" in first
