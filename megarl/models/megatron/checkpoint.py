"""Checkpoints through Megatron-Core's dist-checkpointing: any layout reads what any other wrote.

A checkpoint directory appears whole or not at all: everything is written beside it, synced to disk, and moved to its name by rank 0 alone.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from safetensors.torch import load_file, save_file

from megarl.checkpoint.atomic import fsync_tree
from megarl.distributed.device import DeviceRuntime
from megarl.errors import CheckpointError
from megarl.models.megatron.cuda_redirect import cuda_literals
from megarl.models.megatron.optimizer import fused_style_adam
from megarl.models.megatron.optimizer_state import exact_offsets

SCHEDULE_FILE = "schedule.json"


def _metadata() -> dict[str, Any]:
    """How optimizer state is cut: so that any layout can read it. A fresh dict each time, because Megatron adds its process groups to
    it."""
    return {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}


def save_weights(model: DistributedDataParallel, directory: Path) -> None:
    """Write the weights to ``directory``. A collective over all ranks."""
    with _appears_whole(directory) as staging, cuda_literals():
        _save(model.module.sharded_state_dict(metadata=_metadata()), staging)


def load_weights(model: DistributedDataParallel, directory: Path) -> None:
    """Read weights that any layout wrote.

    Raises:
        CheckpointError: no such checkpoint, or it holds another model.
    """
    require(directory)
    with cuda_literals():
        loaded = _load(model.module.sharded_state_dict(metadata=_metadata()), directory, "weights")
        model.module.load_state_dict(loaded, strict=False)


def save_optimizer(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler | None,
    runtime: DeviceRuntime,
    directory: Path,
) -> None:
    """Write optimizer state, schedule and every rank's random-number states to ``directory``. A collective over all ranks."""
    with _appears_whole(directory) as staging, cuda_literals(), fused_style_adam(), exact_offsets():
        _initialize_state(optimizer)
        weights = model.module.sharded_state_dict(metadata=_metadata())
        _save(optimizer.sharded_state_dict(weights, metadata=_metadata()), staging)
        if dist.get_rank() == 0 and scheduler is not None:
            (staging / SCHEDULE_FILE).write_text(json.dumps(scheduler.state_dict()))
        save_file(runtime.rng_state(), staging / _rng_file(dist.get_rank()))


def load_optimizer(
    model: DistributedDataParallel,
    optimizer: MegatronOptimizer,
    scheduler: OptimizerParamScheduler | None,
    runtime: DeviceRuntime,
    directory: Path,
) -> None:
    """Read what :func:`save_optimizer` wrote. Random-number states come back where this rank existed when they were saved.

    Raises:
        CheckpointError: no such checkpoint, or it belongs to another model.
    """
    require(directory)
    with cuda_literals(), fused_style_adam(), exact_offsets():
        _initialize_state(optimizer)
        weights = model.module.sharded_state_dict(metadata=_metadata())
        wanted = optimizer.sharded_state_dict(weights, is_loading=True, metadata=_metadata())
        optimizer.load_state_dict(_load(wanted, directory, "optimizer state"))
    schedule = directory / SCHEDULE_FILE
    if scheduler is not None and schedule.exists():
        scheduler.num_steps = 0  # loading advances the schedule from where it stands
        scheduler.load_state_dict(json.loads(schedule.read_text()))
    rng = directory / _rng_file(dist.get_rank())
    if rng.exists():
        runtime.set_rng_state(load_file(rng))


def require(directory: Path) -> None:
    """Refuse a path that is no finished dist-checkpointing directory."""
    if not (directory / "metadata.json").is_file():
        raise CheckpointError(
            f"{directory} is not a checkpoint (no metadata.json there): give the directory that save_checkpoint was given"
        )


def _rng_file(rank: int) -> str:
    return f"rng_{rank:05d}.safetensors"


def _save(state: dict[str, Any], directory: Path) -> None:
    # Megatron would start a process that only hands results over, takes seconds to start, and outlives a rank that is killed.
    if filesystem_async._results_queue is None:
        filesystem_async._results_queue = queue.Queue()
    # one writer process a rank: more would only make more files
    dist_checkpointing.save(state, str(directory), TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1))


def _load(wanted: dict[str, Any], directory: Path, what: str) -> dict[str, Any]:
    """What ``directory`` holds for every entry of ``wanted``; a missing or a left-over tensor is an error, not a warning."""
    try:
        loaded, missing, unexpected = dist_checkpointing.load(wanted, str(directory), strict=StrictHandling.RETURN_ALL)
    except (CheckpointingException, KeyError, ValueError) as error:
        raise CheckpointError(f"{directory} does not hold the {what} of this model: {error}. Check model_name and the path") from error
    only_there, only_here = _tensor_keys(missing), _tensor_keys(unexpected)
    if only_there or only_here:
        raise CheckpointError(
            f"{directory} does not hold the {what} of this model: only in the checkpoint {only_there[:3]}, "
            f"only in the model {only_here[:3]} "
            f"({len(only_there)} and {len(only_here)} in all). Check model_name and the path"
        )
    return loaded


def _tensor_keys(keys: Iterable[str]) -> list[str]:
    """Names of tensors; the (empty) extra state of linear layers differs between layer specs and does not count."""
    return sorted(key for key in keys if not key.endswith("_extra_state"))


def _initialize_state(optimizer: MegatronOptimizer) -> None:
    """Give an optimizer that has not stepped yet its (zero) state, so that there is something to save or to fill."""
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if not getattr(inner, "is_stub_optimizer", False) and inner.init_state_fn is not None and not inner.optimizer.state:
            inner.init_state_fn(inner.optimizer, inner.config)


def _prepare(directory: Path, staging: Path) -> str | None:
    """Make an empty staging directory; what is in the way otherwise."""
    try:
        if directory.exists() and any(directory.iterdir()):
            return f"{directory} exists and is not empty: checkpoints are never overwritten; give a new path"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        return f"cannot write a checkpoint to {directory}: {error}; give a directory that this user may write"
    return None


@contextlib.contextmanager
def _appears_whole(directory: Path) -> Iterator[Path]:
    """A staging directory on all ranks that becomes ``directory`` at the end, or vanishes when any rank fails before that."""
    staging = directory.parent / f".{directory.name}.partial"
    first = dist.get_rank() == 0
    problem = [_prepare(directory, staging) if first else None]
    dist.broadcast_object_list(problem, src=0)
    if problem[0]:
        raise CheckpointError(problem[0])
    try:
        yield staging
    except BaseException:
        if first:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    dist.barrier()
    if first:
        fsync_tree(staging)
        if directory.exists():
            directory.rmdir()
        staging.rename(directory)
    dist.barrier()
