"""Checkpoints: a run that was saved and loaded, in any layout, goes on exactly as the undisturbed one for
several steps."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.algorithms.loss_functions import NLLLoss
from megarl.config.defaults import complete_policy
from megarl.config.memory_run import checkpoint_bytes
from megarl.config.model_facts import read_model_facts
from megarl.errors import CheckpointError
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.models import policy_config
from tests.tiers import newest_megatron, sampled, slow

BATCHES = [make_batch(rows=8, length=12, seed=seed) for seed in range(5)]
SAVED_AFTER = 2


def train_and_save(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Trains on all batches, saving after two of them; returns what came after."""
    worker = jobs.build(config, init_reference_model=False)
    measured = []
    for index, batch in enumerate(BATCHES):
        if index == SAVED_AFTER:
            worker.save_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
        result = worker.train(
            data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=NLLLoss()
        )
        measured.append(
            (float(result["global_loss"]), float(result["grad_norm"]), result["all_mb_metrics"]["lr"][-1])
        )
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return {"measured": measured[SAVED_AFTER:], "weights": weights}


def load_and_train(config: Mapping[str, Any], directory: Path, live: bool) -> dict[str, Any]:
    """Continues from a checkpoint, in a new worker or in one that has trained on something else before."""
    paths = (str(directory / "weights"), str(directory / "optimizer"))
    if live:
        worker = jobs.build(config, init_reference_model=False)
        worker.train(
            data=jobs.my_share(worker, make_batch(8, 9, seed=99), config["train_global_batch_size"]),
            loss_fn=NLLLoss(),
        )
        worker.load_checkpoint(*paths)
    else:
        worker = jobs.build(
            config, weights_path=paths[0], optimizer_path=paths[1], init_reference_model=False
        )
    measured = []
    for batch in BATCHES[SAVED_AFTER:]:
        result = worker.train(
            data=jobs.my_share(worker, batch, config["train_global_batch_size"]), loss_fn=NLLLoss()
        )
        measured.append(
            (float(result["global_loss"]), float(result["grad_norm"]), result["all_mb_metrics"]["lr"][-1])
        )
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return {"measured": measured, "weights": weights}


SAME = [
    ("tp2", 2, {"tp": 2}),
    ("pp2", 2, {"pp": 2, "first": 1, "last": 2}),
    ("dp2", 2, {}),
    ("dp2-plain", 2, {"distributed_optimizer": False}),
    ("dp2-many-buckets", 2, {"overlap": True, "bucket_size": 5000}),
    ("cp2", 2, {"cp": 2, "multiple": 4}),
    ("pp2-vpp2", 2, {"pp": 2, "vpp": 2}),
]


def model_for(tiny_models: dict[str, Path], family: str, *layouts: dict[str, Any]) -> Path:
    """An interleaved pipeline wants a number of layers that its chunks divide."""
    return tiny_models["qwen3-tied-four" if any("vpp" in layout for layout in layouts) else family]


@newest_megatron(live=[False])
@sampled(2)
@pytest.mark.parametrize("live", [False, True], ids=["new-worker", "live-worker"])
@pytest.mark.parametrize(("world", "changes"), [case[1:] for case in SAME], ids=[case[0] for case in SAME])
def test_resume_in_the_same_layout_is_exact(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    world: int,
    changes: dict[str, Any],
    live: bool,
) -> None:
    config = policy_config(model_for(tiny_models, "qwen2-tied", changes), **changes)
    undisturbed = pool.run(world, train_and_save, config, tmp_path)[0]
    resumed = pool.run(world, load_and_train, config, tmp_path, live)[0]
    assert resumed["measured"] == undisturbed["measured"]
    for name, tensor in undisturbed["weights"].items():
        assert torch.equal(resumed["weights"][name], tensor), name


@slow
@newest_megatron
@sampled(1)
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_resume_in_half_precision_is_exact(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, precision: str
) -> None:
    """The float32 master weights have to come back, not only what they round to."""
    config = policy_config(tiny_models["qwen3"], tp=2, precision=precision)
    undisturbed = pool.run(2, train_and_save, config, tmp_path)[0]
    resumed = pool.run(2, load_and_train, config, tmp_path, False)[0]
    assert resumed["measured"] == undisturbed["measured"]
    assert undisturbed["measured"][0][1] > 0


OTHER = [
    ("tp2-to-tp1", 2, {"tp": 2}, 1, {}),
    ("dp2-to-pp2", 2, {}, 2, {"pp": 2, "first": 2, "last": 1}),
    ("dp2-many-buckets-to-tp1", 2, {"overlap": True, "bucket_size": 3001}, 1, {}),
    ("vpp2-to-tp2", 2, {"pp": 2, "vpp": 2}, 2, {"tp": 2}),
    ("tp1-to-vpp2", 1, {}, 2, {"pp": 2, "vpp": 2}),
    ("cp2-to-dp2", 2, {"cp": 2, "multiple": 4}, 2, {}),
    ("pp2-to-tp2-dp2", 2, {"pp": 2, "first": 1, "last": 2}, 4, {"tp": 2}),
]


@newest_megatron
@sampled(1)
@pytest.mark.parametrize(
    ("world", "changes", "new_world", "new_changes"),
    [case[1:] for case in OTHER],
    ids=[case[0] for case in OTHER],
)
def test_resume_in_another_layout(
    pool: WorkerPool,
    tiny_models: dict[str, Path],
    tmp_path: Path,
    world: int,
    changes: dict[str, Any],
    new_world: int,
    new_changes: dict[str, Any],
) -> None:
    model = model_for(tiny_models, "llama", changes, new_changes)
    undisturbed = pool.run(world, train_and_save, policy_config(model, **changes), tmp_path)[0]
    resumed = pool.run(new_world, load_and_train, policy_config(model, **new_changes), tmp_path, False)[0]
    torch.testing.assert_close(resumed["measured"], undisturbed["measured"], atol=1e-6, rtol=1e-5)
    for name, tensor in undisturbed["weights"].items():
        assert (resumed["weights"][name] - tensor).norm() < 1e-5 * tensor.norm(), name


def refuse(config: Mapping[str, Any], directory: Path) -> str:
    worker = jobs.build(config, init_reference_model=False)
    try:
        worker.load_checkpoint(str(directory))
    except CheckpointError as error:
        return str(error)
    finally:
        worker.backend.close()
    return ""


def save_twice(config: Mapping[str, Any], directory: Path) -> str:
    worker = jobs.build(config, init_reference_model=False)
    worker.save_checkpoint(str(directory))
    try:
        worker.save_checkpoint(str(directory))
    except CheckpointError as error:
        return str(error)
    finally:
        worker.backend.close()
    return ""


def test_what_is_no_checkpoint_is_refused(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    assert all(
        "is not a checkpoint" in message
        for message in pool.run(2, refuse, policy_config(tiny_models["llama"], tp=2), tmp_path)
    )


def test_a_checkpoint_of_another_model_is_refused(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    pool.run(1, train_and_save, policy_config(tiny_models["llama"]), tmp_path)
    message = pool.run(1, refuse, policy_config(tiny_models["qwen3"]), tmp_path / "weights")[0]
    assert "does not hold the weights of this model" in message


def test_checkpoints_are_never_overwritten(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    messages = pool.run(2, save_twice, policy_config(tiny_models["llama"], tp=2), tmp_path / "checkpoint")
    assert all("never overwritten" in message for message in messages)
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint"]


def load_twice(config: Mapping[str, Any], directory: Path) -> str:
    """Weights alone, then with them the optimizer's state."""
    worker = jobs.build(config, init_reference_model=False)
    worker.load_checkpoint(str(directory / "weights"))
    try:
        worker.load_checkpoint(str(directory / "weights"), str(directory / "optimizer"))
    except CheckpointError as error:
        return str(error)
    finally:
        worker.backend.close()
    return ""


def stored_bytes(directory: Path) -> int:
    """Of all tensors that a checkpoint holds."""
    stored = TorchDistCheckpoint(directory)
    return sum(torch.Size(stored.shape(key)).numel() * stored.dtype(key).itemsize for key in stored)


@sampled(1)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("distributed", [True, False])
def test_the_state_of_the_other_kind_of_optimizer(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, distributed: bool, precision: str
) -> None:
    model = tiny_models["qwen2-tied"]
    config = policy_config(model, distributed_optimizer=distributed, precision=precision)
    pool.run(2, train_and_save, config, tmp_path)
    facts = read_model_facts(str(model))
    assert facts is not None
    assert stored_bytes(tmp_path / "weights") + stored_bytes(tmp_path / "optimizer") == checkpoint_bytes(
        complete_policy(config), facts
    )
    other = policy_config(model, distributed_optimizer=not distributed, precision=precision)
    for message in pool.run(2, load_twice, other, tmp_path):
        assert (
            f"use_distributed_optimizer = {str(distributed).lower()}, but this one has "
            f"{str(not distributed).lower()}"
        ) in message
        assert "load only the weights" in message


@newest_megatron
def test_a_truncated_state_is_refused_on_all_ranks(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """Each rank reads its own share, and only one of them may meet the damage."""
    config = policy_config(tiny_models["qwen2-tied"])
    pool.run(2, train_and_save, config, tmp_path)
    _, file = sorted((tmp_path / "optimizer").glob("*.distcp"))
    os.truncate(file, file.stat().st_size * 3 // 4)
    first, second = pool.run(2, load_twice, config, tmp_path)
    assert (
        first == second
        and f"reading the optimizer state of {tmp_path / 'optimizer'} failed" in first
        and file.name in first
    )
