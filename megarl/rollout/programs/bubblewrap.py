"""The sandbox of a program made by bubblewrap, where Linux does not let a process of the run make one.

Some machines grant namespaces only to programs that they name (Ubuntu from 24.04 on, by AppArmor), and
bubblewrap is one of those. It takes the same list of directories, devices and system calls as ``sandbox``. Our
own stays the first choice because bubblewrap cannot limit how many files a program makes in memory, only
their bytes, and because a program of a run that is root would keep root's files: there bubblewrap is not taken.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence

from megarl.rollout.programs.sandbox import DEVICES, NOBODY, WORK, Root

OWN_PROCESSES = 1
"""Processes of bubblewrap itself beside those of the program."""


def found_bubblewrap() -> str:
    """Return the path of bubblewrap, or an empty text where it is not installed or the run is root."""
    return "" if os.geteuid() == 0 else shutil.which("bwrap") or ""


def wrapped(bubblewrap: str, command: Sequence[str], root: Root, store_mb: int, filter_file: int, status_file: int) -> list[str]:
    """Return the command that runs a command in the sandbox.

    Args:
        bubblewrap: its path.
        command: what runs inside.
        root: what the root holds.
        store_mb: MB of all files in ``/tmp``, which is ``/dev/shm`` as well.
        filter_file: file descriptor of the filter of system calls, see ``system_calls.filter_program``.
        status_file: file descriptor that takes what became of the command, as lines of JSON.
    """
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "program"]
    arguments += ["--seccomp", str(filter_file), "--json-status-fd", str(status_file)]
    # before what may have to be mounted below it: Python may lie in a directory of temporary files
    arguments += ["--perms", "1777", "--size", str(store_mb << 20), "--tmpfs", WORK, "--symlink", WORK, "/dev/shm"]
    for real, inside, _ in root.places:
        arguments += ["--ro-bind", real, inside]
    for path, target in root.links:
        arguments += ["--symlink", target, path]
    for device in DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    # no /proc: bubblewrap's shows much of the machine, and a program that solves a task does not need one
    return [bubblewrap, *arguments, "--remount-ro", "/", "--chdir", WORK, "--", *command]
