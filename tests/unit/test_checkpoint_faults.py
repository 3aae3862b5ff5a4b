"""Death or an I/O error at every write, sync, rename and deletion of a save must leave a checkpoint that
loads."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.manifest import verify
from megarl.errors import CheckpointError
from tests.tiers import sampled

OPERATIONS = ("write", "fsync", "rename", "replace", "mkdir", "unlink", "rmdir")


@contextmanager
def fault_at(number: int, fault: Callable[[], None]) -> Iterator[list[str]]:
    """Run ``fault`` in place of the ``number``-th disk operation (from 0); a write is half done by then.
    Yields the operations seen."""
    seen: list[str] = []
    counting = threading.Lock()
    real = {name: getattr(os, name) for name in OPERATIONS}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **keywords: Any) -> Any:
            with counting:
                seen.append(name)
                is_it = len(seen) - 1 == number
            if is_it:
                if name == "write":
                    real["write"](arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                fault()
            return real[name](*arguments, **keywords)

        return call

    try:
        for name in OPERATIONS:
            setattr(os, name, wrapped(name))
        yield seen
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def die() -> None:
    """What SIGKILL does: no clean-up of any kind."""
    os._exit(77)


def disk_full() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save(directory: Path, step: int, content: bytes) -> Path:
    manager = CheckpointManager(
        {"checkpoint_dir": directory, "metric_name": "reward", "higher_is_better": True, "keep_top_k": 1}
    )
    path = manager.init_tmp_checkpoint(step, {"step": step, "reward": float(step)}, {"seed": 7})
    try:
        (path / "weights").mkdir()
        (path / "weights" / "0.bin").write_bytes(content)
    except OSError:
        manager.discard_tmp_checkpoint(path)
        raise
    return manager.finalize_checkpoint(path)


def run_in_child(action: Callable[[], Any]) -> int:
    """Exit code of a forked child that ran ``action``."""
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def prepared(directory: Path) -> Path:
    """Checkpoints of steps 1 and 2, of which keep_top_k 1 will delete one or both."""
    shutil.rmtree(directory, ignore_errors=True)
    template = directory.with_name("template")
    if not template.exists():
        write_template(template)
    shutil.copytree(template, directory)
    return directory


def write_template(directory: Path) -> None:
    for step, content in ((1, b"one"), (2, b"two")):
        manager = CheckpointManager({"checkpoint_dir": directory})
        path = manager.init_tmp_checkpoint(step, {"step": step, "reward": float(step)})
        (path / "weights").mkdir()
        (path / "weights" / "0.bin").write_bytes(content)
        manager.finalize_checkpoint(path)


def loadable(directory: Path) -> tuple[int, bytes]:
    """Step and content of what a resuming run would load."""
    manager = CheckpointManager({"checkpoint_dir": directory})
    latest = manager.get_latest_checkpoint_path()
    assert latest is not None
    assert verify(latest) == []
    info = manager.load_training_info(latest)
    assert info is not None
    return info["step"], (latest / "weights" / "0.bin").read_bytes()


def count_operations(directory: Path, step: int) -> int:
    prepared(directory)
    with fault_at(-1, die) as seen:
        save(directory, step, b"new content")
    assert {"write", "fsync", "rename"} <= set(seen)
    return len(seen)


@sampled(1)
@pytest.mark.parametrize("step", [2, 3], ids=["step_saved_again", "new_step"])
def test_death_at_any_operation_leaves_a_loadable_checkpoint(tmp_path: Path, step: int) -> None:
    directory = tmp_path / "run"
    total = count_operations(directory, step)
    outcomes = set()
    for number in range(total):
        prepared(directory)

        def doomed(number: int = number) -> None:
            with fault_at(number, die):
                save(directory, step, b"new content")

        assert run_in_child(doomed) == 77
        found = loadable(directory)
        assert found in {(2, b"two"), (step, b"new content")}, number
        outcomes.add(found)
        with RunLock(directory) as lock:
            CheckpointManager({"checkpoint_dir": directory}, lock=lock)
        assert loadable(directory) == found
        assert [path.name for path in directory.iterdir() if not path.name.startswith("step_")] == [
            "run.lock"
        ]
        assert not list(directory.glob("*_replacement"))
        if number % 5 == 0:
            save(directory, 4, b"after the crash")
            assert loadable(directory) == (4, b"after the crash")
    assert outcomes == {(2, b"two"), (step, b"new content")}


@pytest.mark.parametrize("step", [2, 3], ids=["step_saved_again", "new_step"])
def test_full_disk_at_any_operation_is_loud_and_loses_nothing(tmp_path: Path, step: int) -> None:
    directory = tmp_path / "run"
    total = count_operations(directory, step)
    failed = 0
    for number in range(total):
        prepared(directory)
        try:
            with fault_at(number, disk_full):
                save(directory, step, b"new content")
        except (CheckpointError, OSError) as error:
            failed += 1
            assert "No space left on device" in str(error)
            assert isinstance(error, OSError) or "Earlier checkpoints are untouched" in str(error)
            assert loadable(directory) in {(2, b"two"), (step, b"new content")}
            assert not (directory / f"tmp_step_{step}").exists()
        else:
            assert loadable(directory) == (step, b"new content"), "a save that reports success is there"
        if number % 5 == 0:
            assert save(directory, 4, b"disk has room again").name == "step_4"
            assert loadable(directory) == (4, b"disk has room again")
    assert failed > total // 2


def test_old_checkpoint_is_deleted_only_after_the_new_one_stands(tmp_path: Path) -> None:
    directory = prepared(tmp_path / "run")
    with fault_at(-1, die) as seen:
        save(directory, 3, b"new content")
    assert [path.name for path in directory.iterdir()] == ["step_3"]
    first_rename = seen.index("rename")
    assert "unlink" not in seen[:first_rename] and "rmdir" not in seen[:first_rename]
    assert seen[first_rename + 1] == "fsync"
    assert (
        seen[first_rename:].count("rename") == 3
    )  # commit, and both old ones renamed away before they are deleted
