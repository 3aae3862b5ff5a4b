"""A checkpoint that one rank alone cannot write: all ranks learn of it, nothing is left behind, and they can go on."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing import serialization
from megatron.core.dist_checkpointing.strategies import common, filesystem_async
from torch.distributed.checkpoint import filesystem as dcp_filesystem

from megarl.checkpoint import storage
from megarl.checkpoint.collective import appears_whole, failing_together
from tests.dist import dtensor_jobs, jobs
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.pool import WorkerPool
from tests.models import policy_config
from tests.tiers import sampled


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    return ("no error", "") if error is None else (type(error).__name__, str(error))


def write_alone(directory: str, failing: int) -> list[Any]:
    """Every rank writes a file; rank ``failing`` cannot. Then all of them write again. What happened, and what is there afterwards."""
    outcomes: list[Any] = []
    for attempt in range(2):
        error: BaseException | None = None
        try:
            with appears_whole(Path(directory)) as staging, failing_together("writing"):
                (staging / f"{dist.get_rank()}").write_text("here")
                if attempt == 0 and dist.get_rank() == failing:
                    (staging / "no" / "such").write_text("x")
        except Exception as caught:
            error = caught
        outcomes.append(outcome_of(error))
        dist.barrier()
        outcomes.append(sorted(path.name for path in Path(directory).parent.rglob("*")))
        dist.barrier()
    return outcomes


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_fails_alone_fails_all(pool: WorkerPool, tmp_path: Path, failing: int) -> None:
    for (kind, message), after, again, files in pool.run(3, write_alone, str(tmp_path / "it"), failing):
        assert kind == "CheckpointError" and message.startswith(f"rank {failing}: writing failed: FileNotFoundError")
        assert after == []
        assert again[0] == "no error" and files == ["0", "1", "2", "it"]


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """Writing beyond so many bytes into any file fails, as on a full disk; also in processes that start meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save_on_a_full_disk(kind: str, config: dict[str, Any], directory: str, failing: int, limit: int) -> list[Any]:
    """A worker's checkpoint that rank ``failing`` has no room for, and a second one with room."""
    worker = (jobs if kind == "megatron" else dtensor_jobs).build(config, init_reference_model=False)
    outcomes: list[Any] = []
    for room in (False, True):
        root = Path(directory) / str(room)
        error: BaseException | None = None
        try:
            if room or dist.get_rank() != failing:
                worker.save_checkpoint(str(root / "weights"), str(root / "optimizer"))
            else:
                with small_files_only(limit):
                    worker.save_checkpoint(str(root / "weights"), str(root / "optimizer"))
        except Exception as caught:
            error = caught
        outcomes.append(outcome_of(error))
        dist.barrier()
        outcomes.append(sorted(path.name for path in root.iterdir()))
    worker.backend.close()
    return outcomes


# what Megatron-Core's first rank writes alone, while its others go on without asking
ALONE: dict[str, tuple[Any, str]] = {
    ".metadata": (filesystem_async.FileSystemWriterAsync, "finish"),
    "metadata.json": (serialization, "save_config"),
}
# later versions have that with the tensors
if hasattr(common, "TorchCommonSaveStrategy"):
    ALONE["common.pt"] = (common.TorchCommonSaveStrategy, "save_common")


def save_without_room_for(config: dict[str, Any], directory: str, file: str) -> list[Any]:
    """A worker's checkpoint whose first rank has no room for one file, and a second one with room."""
    worker = jobs.build(config, init_reference_model=False)
    full = mock.patch.object(*ALONE[file], side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    outcomes: list[Any] = []
    for room in (False, True):
        root = Path(directory) / str(room)
        error: BaseException | None = None
        try:
            with full if not room and dist.get_rank() == 0 else nullcontext():
                worker.save_checkpoint(str(root / "weights"), str(root / "optimizer"))
        except Exception as caught:
            error = caught
        outcomes.append(outcome_of(error))
        dist.barrier()
        outcomes.append(sorted(path.name for path in root.iterdir()))
    worker.backend.close()
    return outcomes


@sampled(1)
@pytest.mark.parametrize("file", ALONE)
def test_a_file_that_the_first_rank_writes_alone(pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, file: str) -> None:
    config = policy_config(tiny_models["qwen2"], tp=2)
    for (name, message), after, again, files in pool.run(2, save_without_room_for, config, str(tmp_path), file):
        assert name == "CheckpointError" and "No space left on device" in message and message.startswith("rank 0: writing"), message
        assert after == []
        assert again[0] == "no error" and files == ["optimizer", "weights"]


@contextmanager
def failing_reads(times: int) -> Iterator[list[str]]:
    """The first so many times a file of tensors is opened for reading, the storage fails. Notes what was opened."""
    opened: list[str] = []
    create_stream = dcp_filesystem.FileSystem.create_stream

    def flaky(self: Any, path: Any, mode: str) -> Any:
        if mode == "rb":
            opened.append(str(path))
            if len(opened) <= times:
                raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return create_stream(self, path, mode)

    with mock.patch.object(dcp_filesystem.FileSystem, "create_stream", flaky), mock.patch.object(storage, "PAUSES_S", (0.0, 0.0)):
        yield opened


def load_over_failing_storage(kind: str, config: dict[str, Any], directory: str, times: int) -> tuple[tuple[str, str], bool, int]:
    """What a load comes to, on the last rank of which the storage fails; whether the weights are those saved, and how often it was read."""
    worker = (jobs if kind == "megatron" else dtensor_jobs).build(config, init_reference_model=False)
    worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
    saved = {name: tensor.clone() for name, tensor in worker.backend.export_hf()}
    worker._add_noise_to_weights()
    error: BaseException | None = None
    with failing_reads(times if dist.get_rank() == dist.get_world_size() - 1 else 0) as opened:
        try:
            worker.load_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
        except Exception as caught:
            error = caught
    same = all(torch.equal(tensor, saved[name]) for name, tensor in worker.backend.export_hf())
    worker.backend.close()
    return outcome_of(error), same, len(opened)


@sampled(2)
@pytest.mark.parametrize("kind", ["megatron", "dtensor"])
@pytest.mark.parametrize("times", [1, 3])
def test_a_read_that_fails_for_a_moment_is_tried_again(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, kind: str, times: int
) -> None:
    config = policy_config(tiny_models["qwen2"], tp=2) if kind == "megatron" else dtensor_config(tiny_models["qwen2"])
    outcomes = pool.run(2, load_over_failing_storage, kind, config, str(tmp_path), times)
    assert outcomes[1][2] >= min(times + 1, 3)
    for (name, message), same, _ in outcomes:
        if times == 1:
            assert name == "no error" and same, message
        else:
            assert name == "StorageError" and "Stale file handle, 3 times" in message and "damage" in message


# Megarl's own files hold some 5 kB a rank, the parts of weights and optimizer state more
@sampled(2)
@pytest.mark.parametrize("limit", [100, 12_000], ids=["nothing fits", "small files fit"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["megatron", "megatron-dp2", "dtensor"])
def test_a_full_disk_of_one_rank(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, kind: str, failing: int, limit: int
) -> None:
    model = tiny_models["qwen2"]
    config = dtensor_config(model) if kind == "dtensor" else policy_config(model, tp=2 if kind == "megatron" else 1)
    kind, _, _ = kind.partition("-")
    for (name, message), after, again, files in pool.run(2, save_on_a_full_disk, kind, config, str(tmp_path), failing, limit):
        assert name == "CheckpointError" and "weights" in message, message
        assert after == []
        assert again[0] == "no error" and files == ["optimizer", "weights"]
