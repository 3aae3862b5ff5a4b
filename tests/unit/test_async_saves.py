"""Checkpoints that are written while training goes on: the same files, one at a time, nothing lost at an end,
nothing left behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest

from megarl.checkpoint import background, node_memory
from megarl.checkpoint.background import free_memory, memory_of, take_memory
from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.manifest import MANIFEST_NAME, verify
from megarl.checkpoint.node_memory import NodeMemory, OwnMemory, OwnWrite
from megarl.errors import CheckpointError, DeadlineError
from megarl.run.run import run
from tests.node_writers import LONGEST_S, writer_of
from tests.unit.driver_runs import STEPS, Crash, PolicyMaker, comparable, make_config
from tests.unit.reference_policy import ReferencePolicy

STEPS_OF_RUN = ["step_1", "step_2", "step_3", "step_4"]


def config_of(run_dir: Path, model: str, data: str, asynchronous: bool = True) -> dict[str, Any]:
    config = make_config("sft", run_dir, model, data)
    config["checkpointing"] |= {"save_period": 1, "async_save": asynchronous}
    return config


def checkpoints(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir() if path.name != "run.lock")


@contextmanager
def watched_writes(before: Callable[[int], None] = lambda number: None) -> Iterator[list[OwnWrite]]:
    """The writes of a run; before each something is done, and no other one is alive then."""
    seen: list[OwnWrite] = []

    class Watched(OwnWrite):
        def __init__(self, *arguments: Any) -> None:
            assert all(write.has_ended() for write in seen), "at most one is in flight"
            before(len(seen) + 1)
            super().__init__(*arguments)
            seen.append(self)

    with mock.patch.object(node_memory, "OwnWrite", Watched):
        yield seen


def writer(run_dir: Path) -> psutil.Process:
    """The process that is to write a run's checkpoint, once it listens."""
    return writer_of(run_dir / "checkpoints", "")


@pytest.fixture(scope="module")
def synchronous(tmp_path_factory: pytest.TempPathFactory, model: str, data: str) -> Path:
    run_dir = tmp_path_factory.mktemp("synchronous")
    with watched_writes() as writes:
        assert run(config_of(run_dir, model, data, asynchronous=False), PolicyMaker()) == 0
    assert writes == []
    return run_dir


def files_of(checkpoint: Path) -> dict[str, bytes]:
    """All files but those that say how it was written."""
    own = {MANIFEST_NAME, "config.yaml"}
    paths = (path for path in checkpoint.rglob("*") if path.is_file() and path.name not in own)
    return {path.relative_to(checkpoint).as_posix(): path.read_bytes() for path in paths}


def test_the_files_are_the_same_to_the_last_byte(
    tmp_path: Path, model: str, data: str, synchronous: Path
) -> None:
    with watched_writes() as writes:
        assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert len(writes) == STEPS - 1, "the last one is waited for anyway"
    assert checkpoints(tmp_path) == checkpoints(synchronous) == STEPS_OF_RUN
    for name in STEPS_OF_RUN:
        there, here = (files_of(root / "checkpoints" / name) for root in (synchronous, tmp_path))
        assert len(here) > 4 and here == there
        assert verify(tmp_path / "checkpoints" / name) == []
    assert comparable(tmp_path) == comparable(synchronous)
    assert not memory_of(tmp_path / "checkpoints").exists()


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path, model: str, data: str) -> None:
    there: list[list[str]] = []
    stopped: list[psutil.Process] = []

    def stop_first(number: int) -> None:
        if number == 1:
            stopped.append(writer(tmp_path))
            stopped[0].suspend()

    def look(call: int) -> None:
        there.append(checkpoints(tmp_path))
        if call == 2:
            stopped[0].resume()

    with watched_writes(stop_first):
        assert run(config_of(tmp_path, model, data), PolicyMaker(at_call=look)) == 0
    assert there[1] == ["tmp_step_1"], "the second step began while the first checkpoint had no name yet"
    assert checkpoints(tmp_path) == STEPS_OF_RUN


def test_a_writer_that_dies_is_a_save_that_failed(
    tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    def kill_second(number: int) -> None:
        if number == 2:
            writer(tmp_path).kill()

    with watched_writes(kill_second):
        assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert checkpoints(tmp_path) == ["step_1", "step_3", "step_4"]
    [said] = [record.message for record in caplog.records if "could not be written" in record.message]
    assert (
        "checkpoint of step 2" in said
        and "its writer process was killed" in said
        and "step_1 is the newest one" in said
    )
    assert not memory_of(tmp_path / "checkpoints").exists()


def test_a_run_that_fails_waits_for_the_checkpoint_that_it_has(
    tmp_path: Path, model: str, data: str, synchronous: Path
) -> None:
    with pytest.raises(Crash):
        run(config_of(tmp_path, model, data), PolicyMaker(2))
    assert checkpoints(tmp_path) == ["step_1", "step_2"]
    assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert comparable(tmp_path) == comparable(synchronous)


def test_a_run_that_is_to_end_at_once_leaves_nothing_half_done(tmp_path: Path, model: str, data: str) -> None:
    def end_at_once(call: int) -> None:
        if call == 2:
            raise SystemExit(143)

    with watched_writes(lambda number: writer(tmp_path).suspend()) as writes, pytest.raises(SystemExit):
        run(config_of(tmp_path, model, data), PolicyMaker(at_call=end_at_once))
    assert checkpoints(tmp_path) == [] and not memory_of(tmp_path / "checkpoints").exists()
    assert writes[0].has_ended()


def test_without_room_in_memory_it_is_written_as_without(tmp_path: Path, model: str, data: str) -> None:
    full = mock.patch.object(background, "available_bytes", return_value=1)
    with full, watched_writes() as writes:
        assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert writes == [] and checkpoints(tmp_path) == STEPS_OF_RUN


def test_memory_of_a_killed_launch_goes_at_the_start_and_that_of_another_user_is_left(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    directory.mkdir()
    memory = take_memory(directory, 100)
    assert memory is not None and memory.stat().st_mode & 0o777 == 0o700
    (memory / "left").write_bytes(b"x")
    with RunLock(directory) as lock:
        CheckpointManager({"checkpoint_dir": directory}, lock=lock)
    assert not memory.exists()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    memory.symlink_to(elsewhere)
    try:
        assert take_memory(directory, 100) is None
    finally:
        memory.unlink()
    assert elsewhere.is_dir()


class SaveMaker(PolicyMaker):
    """Makes policies that do something in the place of some saves.

    Args:
        instead: given the number of a save, from 1, and the path of the weights; whether it is not to save.
    """

    def __init__(self, instead: Callable[[int, Path], bool]) -> None:
        super().__init__()
        self.instead, self.saves = instead, 0

    def __call__(self, *arguments: Any, **options: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments, **options)
        save = policy.save_checkpoint

        def save_or_not(weights_path: str, **paths: str) -> None:
            self.saves += 1
            if not self.instead(self.saves, Path(weights_path)):
                save(weights_path, **paths)

        policy.save_checkpoint = save_or_not  # type: ignore[method-assign]
        return policy


def test_what_has_no_room_in_memory_after_all_is_written_at_once(
    tmp_path: Path, model: str, data: str, synchronous: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An estimate that was too small comes to light when the workers write."""
    paths: list[Path] = []

    def has_no_room(number: int, weights: Path) -> bool:
        paths.append(weights)
        if number == 2:
            weights.mkdir(parents=True)
            (weights / "half").write_bytes(b"x")
            raise CheckpointError("No space left on device")
        return False

    with watched_writes() as writes:
        assert run(config_of(tmp_path, model, data), SaveMaker(has_no_room)) == 0
    memory, disk = memory_of(tmp_path / "checkpoints"), tmp_path / "checkpoints"
    assert [path.parents[1] for path in paths] == [
        memory,
        memory,
        disk / "tmp_step_2",
        memory,
        disk / "tmp_step_4",
    ]
    assert len(writes) == 2 and checkpoints(tmp_path) == STEPS_OF_RUN
    assert files_of(disk / "step_2") == files_of(synchronous / "checkpoints" / "step_2")
    assert "is written to the disk at once: No space left on device" in caplog.text and not memory.exists()


def test_memory_that_cannot_be_opened_costs_no_checkpoint(
    tmp_path: Path, model: str, data: str, synchronous: Path, caplog: pytest.LogCaptureFixture
) -> None:
    refused = CheckpointError("cannot be opened: Permission denied")
    with mock.patch.object(NodeMemory, "hold", side_effect=refused), watched_writes() as writes:
        assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert writes == [] and checkpoints(tmp_path) == STEPS_OF_RUN
    assert "is written to the disk at once: cannot be opened: Permission denied" in caplog.text
    assert (
        comparable(tmp_path) == comparable(synchronous) and not memory_of(tmp_path / "checkpoints").exists()
    )


def test_memory_that_ranks_keep_is_not_needed_once_more(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    with mock.patch.object(background, "available_bytes", return_value=500):
        assert take_memory(tmp_path, 900) is None and take_memory(tmp_path, 900, kept_bytes=600) is None
        assert (
            take_memory(tmp_path, 900, kept_bytes=900) is not None and take_memory(tmp_path, 400) is not None
        )
    free_memory(tmp_path)


def test_a_run_that_ends_while_the_workers_write_leaves_nothing_in_memory(
    tmp_path: Path, model: str, data: str
) -> None:
    def end_at_once(number: int, weights: Path) -> bool:
        if number == 2:
            weights.mkdir(parents=True)
            raise SystemExit(143)
        return False

    with pytest.raises(SystemExit):
        run(config_of(tmp_path, model, data), SaveMaker(end_at_once))
    assert not memory_of(tmp_path / "checkpoints").exists()


def test_workers_that_stand_still_in_a_save_are_not_asked_for_another(
    tmp_path: Path, model: str, data: str
) -> None:
    def hang(number: int, weights: Path) -> bool:
        if number == 2:
            weights.mkdir(parents=True)
            raise DeadlineError("save_checkpoint: 1 of 2 workers do not answer")
        return False

    saves = SaveMaker(hang)
    with pytest.raises(DeadlineError, match="1 of 2 workers"):
        run(config_of(tmp_path, model, data), saves)
    assert (
        saves.saves == 2
        and "step_1" in checkpoints(tmp_path)
        and not memory_of(tmp_path / "checkpoints").exists()
    )


def test_ranks_that_write_to_another_memory_are_told_of(
    tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert run(config_of(tmp_path, model, data), SaveMaker(lambda number, weights: number == 1)) == 0
    assert (
        checkpoints(tmp_path) == STEPS_OF_RUN[1:] and "no rank has written a file to /dev/shm" in caplog.text
    )


def test_a_process_that_cannot_be_started_costs_no_checkpoint(
    tmp_path: Path, model: str, data: str, caplog: pytest.LogCaptureFixture
) -> None:
    refused = mock.patch.object(
        node_memory, "Writer", side_effect=BlockingIOError("Resource temporarily unavailable")
    )
    with refused, watched_writes() as writes:
        assert run(config_of(tmp_path, model, data), PolicyMaker()) == 0
    assert writes == [] and checkpoints(tmp_path) == STEPS_OF_RUN
    assert "its writer process cannot be started (Resource temporarily unavailable)" in caplog.text
    assert not memory_of(tmp_path / "checkpoints").exists()


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[tuple[OwnMemory, Path, Path]]:
    """Memory with files in it, the directory there, and that of a begun checkpoint."""
    memory, target = OwnMemory(tmp_path), tmp_path / "tmp_step_1"
    assert memory.take(1)
    source = memory.directories("actor")
    (source / "policy" / "weights").mkdir(parents=True)
    for name in ("a", "b"):
        (source / "policy" / "weights" / name).write_bytes(name.encode() * 1000)
    (target / "policy" / "weights").mkdir(parents=True)
    yield memory, source, target
    memory.free()


def test_a_full_disk_is_told_by_the_writer(begun: tuple[OwnMemory, Path, Path]) -> None:
    memory, source, target = begun
    (target / "policy" / "weights" / "b").symlink_to("/dev/full")
    with pytest.raises(
        CheckpointError, match="tmp_step_1 could not be written: OSError: No space left on device"
    ):
        memory.write(target).wait(LONGEST_S)
    assert not source.exists()


def test_a_writer_that_takes_too_long_is_ended(begun: tuple[OwnMemory, Path, Path]) -> None:
    memory, source, target = begun
    process = writer_of(target.parent, "")
    process.suspend()
    write = memory.write(target)
    with pytest.raises(CheckpointError, match=r"not written within 0\.1 s"):
        write.wait(0.1)
    assert write.has_ended() and not source.exists() and not process.is_running(), (
        "and nobody has to ask for its end"
    )


def test_a_process_that_does_not_answer_is_not_waited_for(begun: tuple[OwnMemory, Path, Path]) -> None:
    memory, _, target = begun
    writer_of(target.parent, "").suspend()
    with (
        mock.patch.object(node_memory, "_HOLD_S", 0.1),
        pytest.raises(CheckpointError, match=r"does not respond within 0\.1 s"),
    ):
        memory.hold()
