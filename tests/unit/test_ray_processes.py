"""The processes and the directory of a local Ray: the keeper ends and removes them, and nothing else."""

from __future__ import annotations

import os
import select
import signal
import stat
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.distributed import ray_keeper, ray_processes
from megarl.distributed.ray_keeper import Kept, end, members
from megarl.distributed.ray_processes import LONGEST_DIRECTORY, LocalRay
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the keeper needs Linux")
WAIT = 30.0
# ignores what can be ignored, and has a child in a process group of its own
STUBBORN = """
import os, signal, subprocess, sys, time
for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(each, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "600"], process_group=0)
print(child.pid, flush=True)
time.sleep(600)
"""
Start = Callable[[str], subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts Python programs in sessions of their own, and kills what is left of them."""
    started: list[subprocess.Popen[str]] = []

    def program(text: str) -> subprocess.Popen[str]:
        started.append(
            subprocess.Popen(
                [sys.executable, "-c", text],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
        )
        return started[-1]

    yield program
    for process in started:
        for member in members([process.pid]):
            os.kill(member, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def ignores(process: int, number: signal.Signals) -> bool:
    [line] = [
        line
        for line in Path(f"/proc/{process}/status").read_text().splitlines()
        if line.startswith("SigIgn:")
    ]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a path that is short enough for Ray, where its files go."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as directory:
        monkeypatch.setenv("MEGARL_RAY_TEMP", directory)
        yield Path(directory)


def test_whole_sessions_end_and_others_do_not(start: Start, tmp_path: Path) -> None:
    stubborn, bystander = start(STUBBORN), start(STUBBORN)
    child, other = int(first_line(stubborn)), int(first_line(bystander))
    assert set(members([stubborn.pid])) == {stubborn.pid, child}
    directory = tmp_path / "directory"
    (directory / "deep").mkdir(parents=True)
    (directory / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "kept").write_text("")
    end(Kept({stubborn.pid}, str(directory)), grace_s=0.0)
    assert list(members([stubborn.pid])) == []
    assert set(members([bystander.pid])) == {bystander.pid, other}
    assert not directory.exists() and (tmp_path / "kept").exists()


def test_who_leaves_in_time_is_not_killed(start: Start) -> None:
    leaving = start("import sys; print(flush=True); sys.stdin.readline()")
    first_line(leaving)
    assert leaving.stdin is not None
    leaving.stdin.close()
    end(Kept({leaving.pid}), grace_s=WAIT)
    assert leaving.wait(WAIT) == 0


@sampled(1)
@pytest.mark.parametrize("way", ["killed, and a fork of it lives", "done"])
def test_the_keeper_hears_of_the_end_of_its_driver(way: str, start: Start, short: Path) -> None:
    """It is the driver's own doing, or its death; a process that the driver forked holds the pipe to the
    keeper open."""
    driver = start(
        "import os, subprocess, sys, time\n"
        "from megarl.distributed.ray_processes import LocalRay\n"
        "import ray._private.services as services\n"
        "ray = LocalRay(None)\n"
        "with ray.own_sessions(lambda process: None):\n"
        f"    stubborn = services.ConsolePopen([sys.executable, '-c', {STUBBORN!r}], "
        "stdout=subprocess.PIPE)\n"
        "stubborn.stdout.readline()\n"
        "ray.directory.mkdir()\n"
        "forked = 0\n"
        f"if {'fork' in way}:\n"
        "    forked = os.fork()\n"
        "    if not forked:\n"
        "        time.sleep(600)\n"
        "print(stubborn.pid, ray._keeper.pid, flush=True)\n"
        "sys.stdin.readline()\n"
        "ray.end()\n"
    )
    session, keeper = (int(word) for word in first_line(driver).split())
    assert os.getsid(session) == session and len(list(members([session]))) == 2
    [private] = short.iterdir()
    descriptor = os.pidfd_open(keeper)
    while not ignores(keeper, signal.SIGTERM):
        assert Path(f"/proc/{keeper}").exists()
    # what a terminal or a launcher sends to everybody
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(keeper, each)
    if way == "done":
        assert driver.stdin is not None
        driver.stdin.close()
        assert driver.wait(WAIT) == 0
    else:
        os.kill(driver.pid, signal.SIGKILL)
    poll = select.poll()
    poll.register(descriptor)
    assert poll.poll(1000 * WAIT), "the keeper did not end"
    assert list(members([session])) == [] and not private.exists()


def test_the_directory_is_this_user_s_alone(short: Path) -> None:
    local = LocalRay(None)
    try:
        assert stat.S_IMODE(local.private.stat().st_mode) == 0o700 and local.private.parent == short
        assert local.directory.parent == local.private
    finally:
        local.end()
    assert not local.private.exists()


def test_files_stay_where_somebody_wants_them(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = LocalRay(None)
    failed.keep_files()
    failed.end()
    monkeypatch.setenv("MEGARL_KEEP_RAY_FILES", "1")
    asked = LocalRay(str(short / "logs"))
    asked.end()
    assert failed.private.exists() and asked.private.parent == short / "logs" and asked.private.exists()


def test_a_path_that_is_too_long_for_sockets_is_not_taken(
    short: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MEGARL_RAY_TEMP", str(short / ("x" * LONGEST_DIRECTORY)))
    monkeypatch.delenv("RAY_TMPDIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short))
    directory = ray_processes._private_directory(None)
    assert directory.parent == short and "longer than the 40 bytes" in caplog.text
    assert len(os.fsencode(directory / "ray")) <= LONGEST_DIRECTORY


def test_ray_starts_its_processes_as_before_afterwards(
    short: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import ray._private.services as services

    before = services.ConsolePopen
    seen: list[Any] = []
    local = LocalRay(None)
    try:
        with pytest.raises(KeyError), local.own_sessions(seen.append):
            assert services.ConsolePopen is not before
            raise KeyError
        assert services.ConsolePopen is before
        monkeypatch.setitem(sys.modules, "ray._private.services", types.ModuleType("of another version"))
        with local.own_sessions(seen.append):
            pass
        assert "this version of Ray starts its processes differently" in caplog.text
    finally:
        local.end()


def test_lines_of_the_driver() -> None:
    kept = Kept()
    lines: list[Any] = ["session 12", "session 7", "directory /tmp/a b"]
    for line in lines:
        kept.take(line)
    assert kept == Kept({7, 12}, "/tmp/a b")
    kept.take(ray_keeper.DIRECTORY)
    assert kept.directory == ""
