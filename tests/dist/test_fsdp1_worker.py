"""What FSDP1PolicyWorker alone does: the rest of its contract, checkpoints that it refuses, precision, memory
while it is built."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import fsdp1_jobs, jobs, worker_jobs
from tests.dist.batches import make_batch
from tests.dist.fsdp1_jobs import fsdp1_config

BATCHES = [make_batch(rows=12, length=12, seed=seed) for seed in range(4)]


# checkpoints


class Boom:
    """What a hostile checkpoint would like to have unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, ("/proc/self/definitely-not-there", "w"))


def test_bad_checkpoints_are_refused(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path) -> None:
    config, other = fsdp1_config(tiny_models["llama"], gbs=12), fsdp1_config(tiny_models["qwen3"], gbs=12)
    pool.run(2, worker_jobs.train_and_save, config, BATCHES[:1], 0, tmp_path / "good")
    pool.run(2, worker_jobs.train_and_save, other, BATCHES[:2], 1, tmp_path / "other")
    empty, hostile, damaged = tmp_path / "empty", tmp_path / "hostile", tmp_path / "damaged"
    for directory in (empty, hostile, damaged):
        directory.mkdir()
    (hostile / ".metadata").write_bytes(pickle.dumps(Boom()))
    (damaged / ".metadata").write_bytes(b"nonsense")
    directories = [
        tmp_path / "good" / "weights",
        empty,
        hostile,
        damaged,
        tmp_path / "other" / "weights",
        tmp_path / "other" / "optimizer",
    ]
    for messages in pool.run(2, fsdp1_jobs.refused_loads, config, directories):
        assert all(
            message.startswith(("CheckpointError", "UnusableCheckpointError")) for message in messages
        ), messages
        assert "is not a checkpoint" in messages[0] and "is not a checkpoint" in messages[1]
        assert "_io.open" in messages[2] or "io.open" in messages[2]
        assert "damaged" in messages[4]
        assert "does not hold the weights of this model" in messages[6]
        assert "optimizer" in messages[9]


def test_checkpoints_are_never_overwritten(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    messages = pool.run(2, fsdp1_jobs.save_twice, fsdp1_config(tiny_models["llama"]), tmp_path / "checkpoint")
    assert all("never overwritten" in message for message in messages)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


# the rest of the contract


@pytest.mark.parametrize("world", [1, 2])
def test_small_methods(pool: WorkerPool, tiny_models: dict[str, Path], world: int) -> None:
    for rank, answers in enumerate(
        pool.run(world, fsdp1_jobs.small_methods, fsdp1_config(tiny_models["qwen2-tied"], gbs=12))
    ):
        assert (
            answers["repr"] == f"FSDP1PolicyWorker[rank={rank}]"
            and answers["alive"]
            and answers["same model"]
        )
        assert answers["info"]["world_size"] == world and len(answers["info"]["parameter_sample"]) == 1
        assert answers["other model"]
        refusal = (
            "BatchError: token_mask: Dim 1 must be the sequence dim, expected 4 as in input_ids, got "
            "torch.float32 [2, 5]"
        )
        assert answers["columns"] == [refusal, refusal]
        assert answers["traced"] == (rank == 0) and answers["stopped"] is None, (
            "only the ranks that were named record"
        )
        assert str(answers["trace"]).endswith("/profiles/steps_1_to_1_rank0.json") == (rank == 0)
        assert all(0.002 < spread < 0.03 for spread in answers["noise"].values()), answers["noise"]


def test_one_rank_computes_in_bfloat16_as_many_do(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    """One rank has no FSDP: its own half precision has to round where FSDP's does. The same micro-batches, so
    only float32 sums differ."""
    batch = make_batch(rows=12, length=12, seed=1)
    config = fsdp1_config(tiny_models["qwen2-tied"], precision="bfloat16", gbs=12)
    alone, together = (pool.run(world, jobs.train, config, [batch], NLLLoss())[0] for world in (1, 3))
    torch.testing.assert_close(alone["losses"], together["losses"], atol=0, rtol=1e-6)
    torch.testing.assert_close(alone["norms"], together["norms"], atol=0, rtol=1e-5)
    assert all(tensor.dtype == torch.bfloat16 for tensor in alone["weights"].values())
    exact = pool.run(2, jobs.train, {**config, "precision": "float32"}, [batch], NLLLoss())[0]
    assert exact["losses"] != alone["losses"]
    torch.testing.assert_close(exact["losses"], alone["losses"], atol=0.02, rtol=0.02)


def test_the_model_is_never_whole_on_a_rank_while_it_is_built(
    pool: WorkerPool, tiny_models: dict[str, Path]
) -> None:
    for result in pool.run(3, fsdp1_jobs.peak_of_build, fsdp1_config(tiny_models["llama"])):
        assert result["peak"] < result["total"] * 2 / 3
