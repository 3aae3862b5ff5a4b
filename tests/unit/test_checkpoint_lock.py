"""One live run a directory."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from megarl.checkpoint import lock as lock_module
from megarl.checkpoint.lock import LOCK_NAME, RunLock, read_owner
from megarl.errors import StateError

HOLDER = """
import sys
from megarl.checkpoint.lock import RunLock
lock = RunLock(sys.argv[1]).acquire()
print("held", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_run(directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lock until it is told to stop."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdin is not None
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def write_owner(directory: Path, **changes: Any) -> None:
    """A lock file as another run would have written it."""
    with RunLock(directory):
        owner = json.loads((directory / LOCK_NAME).read_text())
    (directory / LOCK_NAME).write_text(json.dumps({**owner, **changes}))


def test_lock_is_taken_given_back_and_taken_again(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "new" / "run")
    for _ in range(2):
        with lock as held:
            assert held is lock and lock.held
            assert lock.acquire() is lock
            assert json.loads(lock.path.read_text())["pid"] == os.getpid()
        assert not lock.held
        lock.release()
        assert lock.path.read_bytes() == b""


def test_second_live_run_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    with other_run(tmp_path) as process:
        lock = RunLock(tmp_path)
        with pytest.raises(
            StateError, match=rf"in use by process {process.pid} on host {socket.gethostname()}"
        ) as caught:
            lock.acquire()
        assert not lock.held
        assert str(lock.path) in str(caught.value) and "run_dir" in str(caught.value)
        with RunLock(tmp_path.parent / f"{tmp_path.name}-other"):
            pass


def test_second_lock_of_the_same_process_is_refused(tmp_path: Path) -> None:
    with RunLock(tmp_path), pytest.raises(StateError, match=f"process {os.getpid()} "):
        RunLock(tmp_path).acquire()


def test_killed_run_leaves_a_lock_that_is_taken_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with other_run(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        process.wait()
        with RunLock(tmp_path):
            assert f"taking over from process {process.pid}" in caplog.text
            assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()


def test_lock_goes_back_when_the_run_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), RunLock(tmp_path):
        raise RuntimeError
    with RunLock(tmp_path):
        pass


def test_the_lock_of_a_copied_directory_is_free_and_that_of_a_renamed_one_is_not(tmp_path: Path) -> None:
    run_dir, copy, renamed = tmp_path / "a", tmp_path / "b", tmp_path / "c"
    with other_run(run_dir) as process:
        shutil.copytree(run_dir, copy)
        assert read_owner(copy) is None
        with RunLock(copy), pytest.raises(StateError):
            RunLock(run_dir).acquire()
        run_dir.rename(renamed)
        owner = read_owner(renamed)
        assert owner is not None and owner.pid == process.pid


def test_a_file_that_was_removed_while_it_was_locked_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused launch removes its file; whoever had opened it before would hold what nobody sees."""
    lock, take = RunLock(tmp_path), lock_module._try_kernel_lock
    files = iter([True, False])

    def removed_before(descriptor: int) -> bool:
        if next(files):
            lock.path.unlink()
        return take(descriptor)

    monkeypatch.setattr(lock_module, "_try_kernel_lock", removed_before)
    with lock:
        lock.require_place()
        monkeypatch.undo()
        with pytest.raises(StateError, match=f"process {os.getpid()} "):
            RunLock(tmp_path).acquire()


def test_a_directory_that_was_removed_before_it_was_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused launch removes the directory that it has made."""
    lock, opened, made = RunLock(tmp_path / "runs" / "a"), os.open, iter([True, False])

    def removed_before(*words: Any) -> int:
        if next(made, False):
            lock.directory.rmdir()
            lock.directory.parent.rmdir()
        return opened(*words)

    monkeypatch.setattr(os, "open", removed_before)
    with lock:
        lock.require_place()


def test_a_file_that_is_always_another_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some file systems a file has another inode number each time."""
    numbers = itertools.count()
    monkeypatch.setattr(lock_module, "_file_at", lambda path: (0, next(numbers)))
    with pytest.raises(StateError, match="keep their inode numbers"):
        RunLock(tmp_path).acquire()


def test_live_owner_is_respected_where_kernel_locks_do_not_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(lock_module.errno.ENOTSUP, "not supported")

    monkeypatch.setattr(lock_module.fcntl, "flock", no_locks)
    with other_run(tmp_path) as process:
        with pytest.raises(StateError, match=f"process {process.pid} "):
            RunLock(tmp_path).acquire()
        process.kill()
        process.wait()
        with RunLock(tmp_path):
            pass


def test_kernel_lock_counts_more_than_a_written_owner_that_seems_dead(tmp_path: Path) -> None:
    """So it looks from another container on the same host, which cannot see the process."""
    with other_run(tmp_path):
        owner = json.loads((tmp_path / LOCK_NAME).read_text())
        (tmp_path / LOCK_NAME).write_text(json.dumps({**owner, "process_start": 1}))
        with pytest.raises(StateError, match="in use by process"):
            RunLock(tmp_path).acquire()


@pytest.mark.parametrize(
    ("changes", "free"),
    [
        ({}, False),
        ({"process_start": 1}, True),
        ({"boot_id": "an earlier boot"}, True),
        ({"host": "another-host"}, False),
        ({"host": "another-host", "boot_id": "other"}, False),
        ({"host": "another-host", "job_id": "4711", "job_restart": 0}, True),
        ({"host": "another-host", "job_id": "4711", "job_restart": 1}, False),
        ({"host": "another-host", "job_id": "4712", "job_restart": 0}, False),
        ({"pid": "not a number"}, True),
        ({"unknown": 1}, True),
    ],
)
def test_written_owner_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], free: bool
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "4711")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    write_owner(tmp_path, **changes)
    if free:
        with RunLock(tmp_path) as lock:
            assert lock.held
    else:
        with pytest.raises(StateError, match="in use by process"):
            RunLock(tmp_path).acquire()


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"pid": 3}'])
def test_half_written_lock_is_free(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    with RunLock(tmp_path) as lock:
        assert lock.held


def test_child_programs_do_not_inherit_the_lock(tmp_path: Path) -> None:
    with RunLock(tmp_path):
        program = "import sys; print('here', flush=True); sys.stdin.read()"
        pipe = subprocess.PIPE
        child = subprocess.Popen([sys.executable, "-c", program], stdin=pipe, stdout=pipe, close_fds=False)
    try:
        assert child.stdout is not None
        # the kernel lets the parent go on before it closes what the child does not inherit
        assert child.stdout.readline() == b"here\n"
        with RunLock(tmp_path):
            pass
    finally:
        child.communicate()
