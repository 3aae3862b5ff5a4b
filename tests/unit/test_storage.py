"""Storage that fails for a moment, or for good, while checkpoints are looked at: that is no damage. And what
is said of space."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from converters.errors import ConversionError
from megarl.checkpoint import storage
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.manifest import verify
from megarl.checkpoint.storage import PAUSES_S, read_again, said_of_space, tree_bytes
from megarl.errors import StorageError, UnusableCheckpointError
from megarl.run.evaluate import weights_to_evaluate
from megarl.run.resume import CheckpointWriter, find_resume_point, report_changes
from megarl.watch.run_state import _checkpoint_state

TRIES = len(PAUSES_S) + 1


@pytest.fixture(autouse=True)
def no_pauses() -> Iterator[None]:
    with mock.patch.object(storage, "PAUSES_S", (0.0,) * (TRIES - 1)):
        yield


@contextmanager
def failing_opens(number: int, times: int, part: str = "") -> Iterator[Counter[str]]:
    """Opening a file whose path contains ``part`` fails with error ``number``, the first so many times for
    each file. Counts them."""
    real, seen = os.open, Counter[str]()

    def flaky(path: Any, *arguments: Any, **options: Any) -> int:
        if part in str(path):
            seen[Path(path).name] += 1
            if seen[Path(path).name] <= times:
                raise OSError(number, os.strerror(number), str(path))
        return real(path, *arguments, **options)

    with mock.patch.object(os, "open", flaky):
        yield seen


def written(directory: Path, *steps: int) -> CheckpointManager:
    manager = CheckpointManager({"checkpoint_dir": directory, "keep_top_k": 2})
    for step in steps:
        path = manager.init_tmp_checkpoint(step, {"step": step, "sampler": {"position": step}})
        (path / "weights").write_bytes(b"x" * (10 + step))
        manager.finalize_checkpoint(path)
    return manager


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_moment_without_storage_is_no_damage(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    manager = written(tmp_path, 1, 2)
    with failing_opens(number, TRIES - 1) as seen:
        assert manager.latest_and_damaged() == (tmp_path / "step_2", {})
    assert seen["weights"] == seen["manifest.json"] == TRIES
    assert "trying again in 0 s" in caplog.text and os.strerror(number) in caplog.text


@contextmanager
def failing_calls(name: str, part: str, times: int) -> Iterator[Counter[str]]:
    """The first so many calls of a function of ``os`` fail for each path that contains ``part``. Counts
    them."""
    real, seen = getattr(os, name), Counter[str]()

    def flaky(path: Any, *arguments: Any, **options: Any) -> Any:
        if part in str(path):
            seen[str(path)] += 1
            if seen[str(path)] <= times:
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **options)

    with mock.patch.object(os, name, flaky):
        yield seen


@pytest.mark.parametrize(("call", "part"), [("listdir", "checkpoints"), ("stat", "step_2")])
def test_a_listing_that_fails_for_a_moment_hides_no_checkpoint(tmp_path: Path, call: str, part: str) -> None:
    directory = tmp_path / "checkpoints"
    manager = written(directory, 1, 2)
    (directory / "tmp_step_3").mkdir()
    with failing_calls(call, part, TRIES - 1) as seen:
        assert [step for step, _ in manager.checkpoints()] == [2, 1] and max(seen.values()) >= TRIES
    with failing_calls(call, part, 1000), pytest.raises(StorageError, match="is not damaged") as caught:
        find_resume_point(manager, "auto")
    assert caught.value.exit_code == 1 and not isinstance(caught.value, UnusableCheckpointError)
    with failing_calls("listdir", "checkpoints", TRIES - 1):
        assert manager.unfinished() == [directory / "tmp_step_3"]
    assert CheckpointManager({"checkpoint_dir": tmp_path / "absent"}).checkpoints() == []
    (tmp_path / "file").touch()
    assert CheckpointManager({"checkpoint_dir": tmp_path / "file"}).checkpoints() == []
    (directory / "step_9").symlink_to(directory / "step_1")
    assert [step for step, _ in manager.checkpoints()] == [2, 1], "a link is none"


def test_a_configuration_that_cannot_be_read_is_a_fault_of_the_storage(tmp_path: Path) -> None:
    """And one that is damaged is not."""
    manager = CheckpointManager({"checkpoint_dir": tmp_path})
    config = {"checkpointing": {"accept_changes": []}, "seed": 1}
    manager.finalize_checkpoint(manager.init_tmp_checkpoint(1, {"step": 1, "sampler": {}}, config))
    start = find_resume_point(manager, "auto")
    real, failing = Path.read_text, [TRIES - 1]

    def flaky(self: Path, **options: Any) -> str:
        if self.name == "config.yaml" and failing[0]:
            failing[0] -= 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, **options)

    with mock.patch.object(Path, "read_text", flaky):
        report_changes(start, config)
        failing[0] = TRIES
        with pytest.raises(StorageError, match=r"config\.yaml cannot be read: Input/output error, 5 times"):
            report_changes(start, config)
    with failing_calls("stat", "config.yaml", 1000), pytest.raises(StorageError):
        report_changes(start, config)
    (tmp_path / "step_1" / "config.yaml").write_text("{")
    with pytest.raises(UnusableCheckpointError):
        report_changes(start, config)


def test_a_figure_that_cannot_be_read_is_not_absent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Without it, the best checkpoint would be the first to go."""
    manager = CheckpointManager({"checkpoint_dir": tmp_path, "metric_name": "reward", "keep_top_k": 1})
    for step, reward in ((1, 0.9), (2, 0.1)):
        manager.finalize_checkpoint(manager.init_tmp_checkpoint(step, {"step": step, "reward": reward}))
    path = manager.init_tmp_checkpoint(3, {"step": 3, "reward": 0.2})
    real, unreadable = Path.read_bytes, {"step_1"}

    def flaky(self: Path) -> bytes:
        if self.parent.name in unreadable and self.name == "training_info.json":
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self)

    with mock.patch.object(Path, "read_bytes", flaky):
        manager.finalize_checkpoint(path)
        unreadable |= {"step_2", "step_3"}
        with pytest.raises(StorageError):
            manager.has_metric()
        writer = CheckpointWriter(manager, {}, 1)
        writer.require_metric({"train/other": 1.0})
    assert "no checkpoint is removed this time" in caplog.text and "it is unknown whether" in caplog.text
    assert [step for step, _ in manager.checkpoints()] == [3, 2, 1]
    manager.remove_old_checkpoints()
    assert [step for step, _ in manager.checkpoints()] == [3, 1]


def test_a_failed_save_is_warned_of_where_the_storage_says_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    writer = CheckpointWriter(CheckpointManager({"checkpoint_dir": tmp_path}), {}, 1, most_failed=2)
    with failing_calls("listdir", str(tmp_path), 1000):
        writer._note_failure(3, OSError(errno.EIO, os.strerror(errno.EIO)), False)
    assert (
        "the checkpoint of step 3 could not be written" in caplog.text
        and "the newest checkpoint is unknown" in caplog.text
    )


def test_an_evaluation_of_what_cannot_be_read_is_no_fault_of_its_arguments(tmp_path: Path) -> None:
    written(tmp_path, 1)
    real = Path.read_bytes

    def flaky(self: Path) -> bytes:
        if self.name == "training_info.json":
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return real(self)

    with mock.patch.object(Path, "read_bytes", flaky), pytest.raises(StorageError):
        weights_to_evaluate(tmp_path / "step_1")


@pytest.mark.parametrize("part", ["step_2/weights", "step_2/manifest.json"])
def test_storage_that_stays_away_ends_the_start_and_no_older_checkpoint_is_taken(
    tmp_path: Path, part: str
) -> None:
    manager = written(tmp_path, 1, 2)
    with failing_opens(errno.EIO, TRIES, part), pytest.raises(StorageError, match="is not damaged") as caught:
        find_resume_point(manager, "auto")
    assert not isinstance(caught.value, UnusableCheckpointError)
    assert f"checkpoint {tmp_path / 'step_2'}: " in str(
        caught.value
    ) and "Input/output error, 5 times" in str(caught.value)
    with failing_opens(errno.EIO, TRIES, part):
        state = _checkpoint_state(2, tmp_path / "step_2", True, 0.0, None)
    assert state is not None and "Input/output error" in str(state.problems), "megarl status shows it"
    assert find_resume_point(manager, "auto").step == 2


def test_other_errors_are_raised_at_once(tmp_path: Path) -> None:
    written(tmp_path, 1)
    with failing_opens(errno.EACCES, 1, "weights") as seen:
        assert verify(tmp_path / "step_1") == [f"weights cannot be read: {os.strerror(errno.EACCES)}"]
    assert seen["weights"] == 1


def test_old_checkpoints_stay_where_the_storage_does_not_say_what_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = written(tmp_path, 1, 2)
    path = manager.init_tmp_checkpoint(3, {"step": 3})
    real, stats = Path.lstat, []

    def flaky(self: Path) -> os.stat_result:
        if self == tmp_path / "step_1" / "weights":
            stats.append(self)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self)

    with mock.patch.object(Path, "lstat", flaky):
        assert manager.finalize_checkpoint(path) == tmp_path / "step_3"
    assert len(stats) == TRIES and "no checkpoint is removed this time" in caplog.text
    assert [step for step, _ in manager.checkpoints()] == [3, 2, 1]
    manager.remove_old_checkpoints()
    assert [step for step, _ in manager.checkpoints()] == [3, 2]


def test_a_replaced_checkpoint_has_to_be_readable_before_others_are_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    manager = written(tmp_path, 1, 2)
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_2_replacement")
    manager.keep_top_k = 1
    with failing_opens(errno.EIO, TRIES, "step_2/manifest.json"):
        manager.remove_old_checkpoints()
    assert "no checkpoint is removed this time" in caplog.text
    assert (tmp_path / "step_1").exists()


def test_a_cause_counts_too_and_a_second_look_does_not_multiply() -> None:
    calls: list[int] = []

    def wrapped() -> None:
        calls.append(1)
        try:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        except OSError as error:
            raise ConversionError("it cannot be read", "fetch it") from error

    with pytest.raises(StorageError, match=r"^inner cannot be read: Stale"):
        read_again(lambda: read_again(wrapped, "inner"), "outer")
    assert len(calls) == TRIES


def no_error() -> BaseException:
    return OSError("something else")


@pytest.mark.parametrize(
    ("needed", "error", "said"),
    [
        (lambda free: 2 * free, no_error, True),
        (lambda free: free // 2, no_error, False),
        (lambda free: 0, lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (lambda free: 0, lambda: RuntimeError(f"rank 3: {os.strerror(errno.EDQUOT)}"), True),
    ],
)
def test_no_space_is_said_with_what_is_needed_and_what_is_free(
    tmp_path: Path, needed: Callable[[int], int], error: Callable[[], BaseException], said: bool
) -> None:
    free = shutil.disk_usage(tmp_path).free
    text = said_of_space(tmp_path, needed(free), error())
    assert bool(text) == said
    if said:
        assert text.startswith("no space: a checkpoint takes about ") and f" are free in {tmp_path}" in text
        assert ("quota" in text) == (needed(free) < free)


def test_bytes_of_a_tree(tmp_path: Path) -> None:
    assert tree_bytes(tmp_path / "absent") == 0
    manager = written(tmp_path, 1)
    everything = [path.stat().st_size for path in (tmp_path / "step_1").rglob("*") if path.is_file()]
    assert manager.bytes_of_latest() == tree_bytes(tmp_path / "step_1") == sum(everything) > 11


def test_there_is_no_latest() -> None:
    assert CheckpointManager({"checkpoint_dir": "/nonexistent"}).bytes_of_latest() is None
