"""Directories that dead runs have left: removed at the next start, and no other one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.distributed.leftovers import OWNER_FILE, keep, owned_directory, sweep

PROGRAM = """
import sys, time
from megarl.distributed.leftovers import owned_directory
print(owned_directory(sys.argv[1], "megarl-compiled-"), flush=True)
time.sleep(600)
"""


@pytest.fixture
def of_another(tmp_path: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Directory of another process, and the process."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
        process.kill()


def test_what_a_killed_process_left_goes_at_the_next_start(
    tmp_path: Path, of_another: tuple[Path, subprocess.Popen[str]]
) -> None:
    left, process = of_another
    (left / "deep").mkdir()
    (left / "deep" / "file").write_text("x")
    own = owned_directory(tmp_path)
    assert left.is_dir() and own.stat().st_mode & 0o777 == 0o700, "that of one that lives stays"
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = owned_directory(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([own, again])


def test_one_that_was_not_waited_for_has_ended(
    tmp_path: Path, of_another: tuple[Path, subprocess.Popen[str]]
) -> None:
    left, process = of_another
    process.send_signal(signal.SIGKILL)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert sweep(tmp_path) == [left]


@pytest.mark.parametrize(
    "change",
    [
        {"host": "another"},
        {"boot": "another"},
        {"processes": "pid:[1]"},
        {"process": "1"},
        {"process": None},
        {"host": None},
        {},
    ],
)
def test_what_may_belong_to_a_process_that_cannot_be_seen_stays(
    change: dict[str, Any], tmp_path: Path
) -> None:
    directory = owned_directory(tmp_path)
    owner = json.loads((directory / OWNER_FILE).read_text())
    # another process of this number
    written = {**owner, "started": 1, **change}
    (directory / OWNER_FILE).write_text(
        json.dumps({key: value for key, value in written.items() if value is not None})
    )
    assert sweep(tmp_path) == ([] if change else [directory])


def test_what_names_no_owner_or_is_another_user_s_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "megarl-old").mkdir()
    (tmp_path / "megarl-torn").mkdir()
    (tmp_path / "megarl-torn" / OWNER_FILE).write_text("{")
    directory = owned_directory(tmp_path)
    owner = {**json.loads((directory / OWNER_FILE).read_text()), "started": 1}
    (directory / OWNER_FILE).write_text(json.dumps(owner))
    (tmp_path / "megarl-link").symlink_to(directory)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert sweep(tmp_path) == []
    monkeypatch.undo()
    assert sweep(tmp_path) == [directory]


def test_what_a_process_of_ray_still_uses_stays(tmp_path: Path) -> None:
    directory = owned_directory(tmp_path)
    owner = {**json.loads((directory / OWNER_FILE).read_text()), "started": 1}
    (directory / OWNER_FILE).write_text(json.dumps(owner))
    command = ["/bin/sh", "-c", "echo ready; read line", f"--session-dir={directory}/ray"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        # a program that was just started has an empty command line for a moment
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        assert sweep(tmp_path) == []
        process.kill()
    assert sweep(tmp_path) == [directory]


def test_what_is_kept_on_purpose_stays(
    tmp_path: Path, of_another: tuple[Path, subprocess.Popen[str]]
) -> None:
    left, process = of_another
    keep(left)
    process.kill()
    process.wait()
    assert sweep(tmp_path) == [] and left.is_dir()
