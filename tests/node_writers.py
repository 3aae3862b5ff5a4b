"""The processes that bring checkpoints from the memory of nodes to the disk, as tests find them."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import psutil

from megarl.checkpoint import node_memory
from megarl.checkpoint.background import memory_of

LONGEST_S = 60.0
"""Far above what a loaded machine needs; who reaches it has hung."""


def writers(checkpoint_dir: Path) -> list[psutil.Process]:
    """The processes that write checkpoints of a directory, those that have left them to others not counted."""
    path, found = str(memory_of(checkpoint_dir)), []
    for each in psutil.process_iter(["cmdline", "status"]):
        command = each.info["cmdline"] or []
        if each.info["status"] != psutil.STATUS_ZOMBIE and node_memory.__name__ in " ".join(command[:-1]) and command[-1].startswith(path):
            found.append(each)
    return found


def writer_of(checkpoint_dir: Path, node: str) -> psutil.Process:
    """The process of a node, once it is nobody's child and listens."""
    end = threading.Event()
    for _ in range(int(LONGEST_S / 0.02)):
        found = [each for each in writers(checkpoint_dir) if each.cmdline()[-1] == str(memory_of(checkpoint_dir, node))]
        # it ignores the signals once it runs what it is for
        if len(found) == 1 and found[0].ppid() != os.getpid() and _ignores(found[0].pid, signal.SIGTERM):
            return found[0]
        end.wait(0.02)
    raise AssertionError(f"no process writes for {node}")


def _ignores(process: int, number: int) -> bool:
    [line] = [line for line in Path(f"/proc/{process}/status").read_text().splitlines() if line.startswith("SigIgn:")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def await_end(process: psutil.Process) -> None:
    """Wait until a process has ended, whether or not whoever took it over has asked for it."""
    pause = threading.Event()
    for _ in range(int(LONGEST_S / 0.02)):
        if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
            return
        pause.wait(0.02)
    raise AssertionError(f"process {process.pid} does not end")
