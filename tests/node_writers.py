"""The processes that bring checkpoints from the memory of nodes to the disk, as tests find them."""

from __future__ import annotations

import signal
import threading
from pathlib import Path

import psutil

from megarl.checkpoint import node_memory
from megarl.checkpoint.background import memory_of

LONGEST_S = 60.0
"""Far above what a loaded machine needs; who reaches it has hung."""


def writers(checkpoint_dir: Path, node: str | None = None) -> list[psutil.Process]:
    """The processes that write checkpoints of a directory, of one node or of all, also those that have not
    yet left that to others."""
    path = memory_of(checkpoint_dir) if node is None else memory_of(checkpoint_dir, node)
    found = []
    for each in psutil.process_iter(["cmdline", "status"]):
        program, place = " ".join((each.info["cmdline"] or [""])[:-1]), (each.info["cmdline"] or [""])[-1]
        is_its = place == str(path) if node is not None else place.startswith(str(path))
        if is_its and node_memory.__name__ in program and each.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(each)
    return found


def writer_of(checkpoint_dir: Path, node: str) -> psutil.Process:
    """The process of a node, once it listens, which is when it ignores signals."""
    pause = threading.Event()
    for _ in range(int(LONGEST_S / 0.02)):
        for each in writers(checkpoint_dir, node):
            if _ignores(each.pid, signal.SIGTERM):
                return each
        pause.wait(0.02)
    raise AssertionError(f"no process writes for {node}")


def _ignores(process: int, number: int) -> bool:
    """False also where the process is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return False
    [line] = [line for line in lines if line.startswith("SigIgn:")]
    return bool(int(line.split()[1], 16) >> (number - 1) & 1)


def await_end(process: psutil.Process) -> None:
    """Wait until a process has ended, whether or not whoever took it over has asked for it."""
    pause = threading.Event()
    for _ in range(int(LONGEST_S / 0.02)):
        try:
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE:
                return
        except psutil.Error:
            return
        pause.wait(0.02)
    raise AssertionError(f"process {process.pid} does not end")
