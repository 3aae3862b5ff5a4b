"""Checkpoint directories that all ranks write together and that are either complete or absent."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file, save

from converters.files.atomic import fsync_tree, rename_surely
from megarl.checkpoint.storage import is_file, read_again
from megarl.distributed.device import DeviceRuntime
from megarl.errors import CheckpointError, MegarlError, StorageError, UnusableCheckpointError


@contextlib.contextmanager
def appears_whole(directory: Path) -> Iterator[Path]:
    """Yield a staging directory on all ranks. On a normal exit it is renamed to ``directory``; if any rank
    fails, it is removed. Collective over all ranks.

    Files are written to the staging directory next to ``directory`` and synced to disk; rank 0 alone renames
    it. Ranks may pass different directories, such as one per node in shared memory; then the first rank of
    each directory does what rank 0 does otherwise.

    An exception leaves the context at once, without an agreement: another rank may be in a collective of the
    context, where it could not take part. Wrap work that each rank does by itself in ``failing_together``.

    Raises:
        CheckpointError: on all ranks, if ``directory`` is not empty or cannot be written.
    """
    # In the same parent directory, because a rename is atomic only within one file system.
    staging = directory.parent / f".{directory.name}.partial"
    # The lowest of the ranks that pass the same path prepares and publishes it.
    first = gather_objects(str(directory)).index(str(directory)) == dist.get_rank()
    _agree(_prepare(directory, staging) if first else None)
    try:
        yield staging
        # Wait for all ranks, because the first rank renames the files of all of them.
        dist.barrier()
        _publish_together(directory, staging, first)
    except BaseException:
        if first:
            shutil.rmtree(staging, ignore_errors=True)
        raise


@contextlib.contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Within the context, run work that each rank does by itself; a failure on one rank is raised on all.
    Collective over all ranks at the end; the work must contain no collectives.

    Args:
        what: the work, for the message, such as ``writing random-number states to DIRECTORY``.

    Raises:
        CheckpointError: on all ranks if any failed; the message names the first one. On that rank the
            exception's cause is the original error.
        StorageError: the same, if the first rank's failure was one of the storage.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        problem = None if failure is None else f"{what} failed: {type(failure).__name__}: {failure}"
        _agree(problem, StorageError if isinstance(failure, StorageError) else CheckpointError)
    except CheckpointError as agreed:
        raise agreed from failure


@contextlib.contextmanager
def failing_alike() -> Iterator[None]:
    """Within the context, run work whose error on one rank is raised with the same class on all. Collective
    over all ranks at the end; collectives in the work must end on all ranks.

    Raises:
        CheckpointError: another rank failed; a subclass if that rank raised it.
        Exception: this rank's own error, unchanged.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        # Catch every class of error: if this rank left here, the others would wait for it.
        failure = error
    kind = next((kind for kind in _KINDS if isinstance(failure, kind)), CheckpointError)
    text = str(failure) if isinstance(failure, MegarlError) else f"{type(failure).__name__}: {failure}"
    everywhere = gather_objects(None if failure is None else (_KINDS.index(kind), text))
    if failure is not None:
        raise failure
    for rank, found in enumerate(everywhere):
        if found is not None:
            raise _KINDS[found[0]](f"rank {rank}: {found[1]}")


# From narrowest to widest, because the first matching class is raised.
_KINDS = (UnusableCheckpointError, StorageError, CheckpointError)


def _agree(problem: str | None, kind: type[CheckpointError] = CheckpointError) -> None:
    """Raise on all ranks if any rank has a problem; the message names the first one. Collective over all
    ranks."""
    problems = gather_objects((problem, issubclass(kind, StorageError)))
    for rank, (text, of_storage) in enumerate(problems):
        if text is not None:
            raise (StorageError if of_storage else CheckpointError)(f"rank {rank}: {text}")


def _prepare(directory: Path, staging: Path) -> str | None:
    """Create an empty staging directory; return the reason if that fails."""
    try:
        if directory.exists() and any(directory.iterdir()):
            return f"{directory} exists and is not empty: checkpoints are never overwritten; give a new path"
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)
    except OSError as error:
        return f"cannot write a checkpoint to {directory}: {error}; give a directory that this user may write"
    return None


def _publish_together(directory: Path, staging: Path, first: bool) -> None:
    """Rename all staging directories to their final names, or none. Collective over all ranks."""
    problem = _publish(directory, staging) if first else None
    try:
        _agree(problem)
    except CheckpointError:
        if first and problem is None:
            # Another directory could not be renamed, so remove this one.
            shutil.rmtree(directory, ignore_errors=True)
        raise


def _publish(directory: Path, staging: Path) -> str | None:
    """Sync the staging directory to disk and rename it to its final name; return the reason if that fails."""
    try:
        fsync_tree(staging)
        if directory.exists():
            # The user may have created an empty directory. rmdir fails, with the reason, if the directory has
            # content by now.
            directory.rmdir()
        rename_surely(staging, directory)
    except OSError as error:
        return f"{directory} could not be written: {error}; check free space and permissions there"
    return None


def gather_objects(own: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the object of each rank of a group, or of all ranks, in the order of the ranks. A collective
    over them."""
    gathered = [own] * dist.get_world_size(group)
    # Skip groups of one rank, for which NCCL would otherwise make a communicator.
    if len(gathered) > 1:
        dist.all_gather_object(gathered, own, group=group)
    return gathered


def write_random_state(directory: Path, runtime: DeviceRuntime) -> None:
    """Write this rank's random-number states to a file of its own: another layout could not use them."""
    # save_file would make the file private: a colleague could not go on with the run.
    _random_state_file(directory).write_bytes(save(runtime.rng_state()))


def restore_random_state(directory: Path, runtime: DeviceRuntime) -> None:
    """Restore this rank's random-number states if it existed when they were saved."""
    file = _random_state_file(directory)
    if is_file(file):
        runtime.set_rng_state(read_again(lambda: load_file(file), str(file)))


def _random_state_file(directory: Path) -> Path:
    return directory / f"rng_{dist.get_rank():05d}.safetensors"
