"""A checkpoint directory that all ranks write together and that appears whole or not at all."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from megarl.checkpoint.atomic import fsync_tree
from megarl.errors import CheckpointError


@contextlib.contextmanager
def appears_whole(directory: Path) -> Iterator[Path]:
    """A staging directory on all ranks that becomes ``directory`` at the end, or vanishes when any rank fails before that.

    Everything is written beside it, synced to disk, and moved to its name by rank 0 alone. A collective over all ranks.

    Raises:
        CheckpointError: ``directory`` is not empty, or cannot be written.
    """
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


def random_state_file(rank: int) -> str:
    """Name of the file that holds the random-number states of a rank."""
    return f"rng_{rank:05d}.safetensors"
