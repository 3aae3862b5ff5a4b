"""A checkpoint that one rank alone cannot write: all ranks learn of it, nothing is left behind, and they can
go on."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
from collections import Counter
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

from megarl.checkpoint import storage
from megarl.checkpoint.collective import appears_whole, failing_alike, failing_together
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.dtensor_jobs import dtensor_config
from tests.models import policy_config
from tests.tiers import sampled


def outcome_of(error: BaseException | None) -> tuple[str, str]:
    return ("no error", "") if error is None else (type(error).__name__, str(error))


def write_alone(directory: str, failing: int) -> list[Any]:
    """Every rank writes a file; rank ``failing`` cannot. Then all of them write again. What happened, and
    what is there afterwards."""
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
        assert kind == "CheckpointError" and message.startswith(
            f"rank {failing}: writing failed: FileNotFoundError"
        )
        assert after == []
        assert again[0] == "no error" and files == ["0", "1", "2", "it"]


def read_alone(directory: str, failing: int) -> list[tuple[str, str]]:
    """Rank ``failing`` finds no file to read. Then all of them go on. What happened."""
    error: BaseException | None = None
    try:
        with failing_alike():
            if dist.get_rank() == failing:
                (Path(directory) / "none").read_text()
    except Exception as caught:
        error = caught
    outcomes = [outcome_of(error)]
    dist.barrier()
    return outcomes


def test_an_error_of_any_class_reaches_the_others(pool: WorkerPool, tmp_path: Path) -> None:
    (own,), (others,) = pool.run(2, read_alone, str(tmp_path), 0)
    assert own[0] == "FileNotFoundError" and str(tmp_path / "none") in own[1]
    assert others == ("CheckpointError", f"rank 0: FileNotFoundError: {own[1]}")


def write_apart(root: str, places: list[str], failing: int) -> list[Any]:
    """Every rank writes a file to the directory of its place, together with those of the same one. Rank
    ``failing`` is in the way when its place gets its name. Then all of them write again."""
    rank = dist.get_rank()
    directory = Path(root) / places[rank] / "it"
    outcomes: list[Any] = []
    for attempt in range(2):
        error: BaseException | None = None
        try:
            with appears_whole(directory) as staging, failing_together("writing"):
                assert staging.is_dir()
                (staging / f"{rank}").write_text("here")
                if attempt == 0 and rank == failing:
                    (directory / "in the way").mkdir(parents=True)
        except Exception as caught:
            error = caught
        outcomes.append(outcome_of(error))
        dist.barrier()
        if attempt == 0 and rank == failing:
            (directory / "in the way").rmdir()
            directory.rmdir()
        dist.barrier()
        outcomes.append(
            sorted(path.relative_to(root).as_posix() for path in Path(root).rglob("*") if path.is_file())
        )
        dist.barrier()
    return outcomes


@pytest.mark.parametrize(("places", "failing"), [("aab", 2), ("aba", 2), ("abc", 0)])
def test_ranks_of_different_nodes_write_to_different_directories(
    pool: WorkerPool, tmp_path: Path, places: str, failing: int
) -> None:
    first = places.index(places[failing])
    for (kind, message), after, again, files in pool.run(
        3, write_apart, str(tmp_path), list(places), failing
    ):
        assert kind == "CheckpointError" and message.startswith(
            f"rank {first}: {tmp_path / places[failing] / 'it'} could not be written"
        )
        assert after == [], "what has its name already is taken back"
        assert again[0] == "no error" and files == sorted(
            f"{place}/it/{rank}" for rank, place in enumerate(places)
        )


@contextmanager
def small_files_only(limit: int) -> Iterator[None]:
    """Writing beyond so many bytes into any file fails, as on a full disk; also in processes that start
    meanwhile."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


def save_on_a_full_disk(
    kind: str, config: dict[str, Any], directory: str, failing: int, limit: int
) -> list[Any]:
    """A worker's checkpoint that rank ``failing`` has no room for, and a second one with room."""
    worker = jobs.build(config, init_reference_model=False)
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
def test_a_file_that_the_first_rank_writes_alone(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, file: str
) -> None:
    config = policy_config(tiny_models["qwen2"], tp=2)
    for (name, message), after, again, files in pool.run(
        2, save_without_room_for, config, str(tmp_path), file
    ):
        assert (
            name == "CheckpointError"
            and "No space left on device" in message
            and message.startswith("rank 0: writing")
        ), message
        assert after == []
        assert again[0] == "no error" and files == ["optimizer", "weights"]


_failing: dict[str, Any] = {}


def refuse_to_open(event: str, arguments: tuple[Any, ...]) -> None:
    """An audit hook, which stays in the process: opening a file for reading fails as ``_failing`` says."""
    if (
        event == "open"
        and _failing
        and isinstance(arguments[0], str | os.PathLike)
        and not arguments[2] & os.O_WRONLY
    ):
        fail_some("open", os.fspath(arguments[0]))


def fail_some(how: str, path: Any) -> None:
    if isinstance(path, str) and path.startswith(_failing["below"]) and path.endswith(_failing["part"]):
        _failing["seen"][how, path] += 1
        if _failing["seen"][how, path] <= _failing["times"]:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), path)


@contextmanager
def failing_storage(below: str, part: str, times: int) -> Iterator[Counter[tuple[str, str]]]:
    """Of every file whose path begins and ends so, the first so many looks, and so many times that it is
    opened, fail. Counts them."""
    if not _hooked:
        _hooked.append(True)
        sys.addaudithook(refuse_to_open)
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int):
            fail_some("stat", os.fspath(path))
        return real(path, *arguments, **options)

    _failing.update(below=below, part=part, times=times, seen=Counter())
    try:
        with mock.patch.object(os, "stat", stat), mock.patch.object(storage, "PAUSES_S", (0.0, 0.0)):
            yield _failing["seen"]
    finally:
        _failing.clear()


_hooked: list[bool] = []


def load_over_failing_storage(
    kind: str, config: dict[str, Any], directory: str, cases: list[tuple[str, int]]
) -> list[tuple[tuple[str, str], bool, list[str]]]:
    """What a load comes to, on the last rank of which the storage fails; whether the weights are those saved,
    and what failed."""
    worker = jobs.build(config, init_reference_model=False)
    worker.save_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
    saved = {name: tensor.clone() for name, tensor in worker.backend.export_hf()}
    outcomes = []
    is_last = dist.get_rank() == dist.get_world_size() - 1
    for part, times in cases:
        if worker._unfinished_load is None:
            worker._add_noise_to_weights()
        error: BaseException | None = None
        with failing_storage(directory, part, times if is_last else 0) as seen:
            try:
                worker.load_checkpoint(f"{directory}/weights", f"{directory}/optimizer")
            except Exception as caught:
                error = caught
            failed = sorted({f"{how} {Path(path).name}" for how, path in seen})
        same = all(torch.equal(tensor, saved[name]) for name, tensor in worker.backend.export_hf())
        outcomes.append((outcome_of(error), same, failed))
    worker.backend.close()
    return outcomes


ALL_READ = {
    "megatron": ["metadata.json", "common.pt", ".metadata", "schedule.json", ".distcp"],
    "dtensor": [".metadata", "optimizer.pt", ".distcp"],
}
if not hasattr(common, "TorchCommonSaveStrategy"):
    ALL_READ["megatron"].remove("common.pt")


@sampled(1)
@pytest.mark.parametrize("kind", ALL_READ)
def test_a_read_that_fails_for_a_moment_is_tried_again_and_one_that_stays_broken_is_no_damage(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Of every file, whoever reads it: first a moment of each, then one for good after the other, and at last
    again a moment."""
    config = (
        policy_config(tiny_models["qwen2"], tp=2)
        if kind == "megatron"
        else dtensor_config(tiny_models["qwen2"])
    )
    cases = [("", 1), *[(part, 1000) for part in ALL_READ[kind]], ("", 1)]
    told = pool.run(2, load_over_failing_storage, kind, config, str(tmp_path), cases)
    modes = {path.stat().st_mode for path in tmp_path.rglob("*") if path.is_file()}
    assert len(modes) == 1, "all files may be read by the same users"
    for (part, times), *of_ranks in zip(cases, *told, strict=True):
        failed = of_ranks[1][2]
        assert not part or any(each.endswith(part) for each in failed), f"{part} was not read"
        if not part:
            assert all(
                any(f"{how} " in each and each.endswith(name) for each in failed)
                for how, name in LOOKED_AT[kind]
            ), failed
        for rank, ((name, message), same, _) in enumerate(of_ranks):
            if times == 1:
                assert name == "no error" and same, message
            elif rank == 0 and "another rank cannot load it" in message:
                assert name == "CheckpointError"
            else:
                assert (
                    name == "StorageError"
                    and "Stale file handle, 3 times" in message
                    and "is not damaged" in message
                ), f"{part}: {message}"


LOOKED_AT = {
    "megatron": [
        ("stat", "metadata.json"),
        ("open", "metadata.json"),
        ("stat", "schedule.json"),
        ("stat", "rng_00001.safetensors"),
    ],
    "dtensor": [("stat", ".metadata"), ("open", "optimizer.pt"), ("stat", "rng_00001.safetensors")],
}
"""Some of what the storage has to be asked for, or nothing would be shown."""


# Megarl's own files hold some 5 kB a rank, the parts of weights and optimizer state more; where the larger
# limit ends a file of Megatron's, torch by itself tells of another position than it thought
@sampled(2)
@pytest.mark.parametrize("limit", [100, 16_000], ids=["nothing fits", "small files fit"])
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("kind", ["megatron", "megatron-dp2", "dtensor"])
def test_a_full_disk_of_one_rank(
    pool: WorkerPool, tiny_models: dict[str, Path], tmp_path: Path, kind: str, failing: int, limit: int
) -> None:
    model = tiny_models["qwen2"]
    config = (
        dtensor_config(model)
        if kind == "dtensor"
        else policy_config(model, tp=2 if kind == "megatron" else 1)
    )
    kind, _, _ = kind.partition("-")
    for (name, message), after, again, files in pool.run(
        2, save_on_a_full_disk, kind, config, str(tmp_path), failing, limit
    ):
        assert name == "CheckpointError" and "weights" in message and "File too large" in message, message
        assert after == []
        assert again[0] == "no error" and files == ["optimizer", "weights"]
