"""Python stacks of workers that hang, taken from outside: what the operator needs when a call passed its deadline.

Each worker opens an unnamed file and lets ``faulthandler`` write all its threads' stacks there on SIGUSR2, which works also while the
process waits in C++ code. A task on the worker's node sends the signal and reads the file through ``/proc``; nothing is left on disk.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

logger = logging.getLogger(__name__)

_READ_WAIT_S = 2.0
_LONGEST_STACK = 6000


@dataclass(frozen=True, slots=True)
class StackFile:
    """An open, unnamed file of a process on a Linux host."""

    process_id: int
    descriptor: int


# faulthandler writes to a bare descriptor: the file object must live as long as the process.
_kept_files: list[IO[bytes]] = []


def open_stack_file() -> StackFile | None:
    """Prepare this process; None where the platform has no ``/proc`` (stacks are then simply not reported)."""
    if not sys.platform.startswith("linux"):
        return None
    if not _kept_files:
        # Buffering would hide what the signal handler writes.
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)
        _kept_files.append(file)
    return StackFile(os.getpid(), _kept_files[0].fileno())


def read_stack(stack_file: StackFile) -> str:
    """Signal one process of this host and return what it wrote, at most 6000 characters; ``""`` when it is gone."""
    path = f"/proc/{stack_file.process_id}/fd/{stack_file.descriptor}"
    with contextlib.suppress(OSError):
        before = os.stat(path).st_size
        os.kill(stack_file.process_id, signal.SIGUSR2)
        deadline, size = time.monotonic() + _READ_WAIT_S, before
        while time.monotonic() < deadline:
            time.sleep(0.02)
            now = os.stat(path).st_size
            if now == size and now > before:
                break
            size = now
        with open(path, "rb") as file:
            file.seek(before)
            return file.read().decode(errors="replace")[-_LONGEST_STACK:]
    return ""


def collect_stacks(places: Sequence[tuple[str, StackFile | None]], timeout_s: float = 20.0) -> list[str]:
    """Stacks of workers by (Ray node id, file); ``""`` for every one that cannot be had in time. Never raises."""
    task = ray.remote(read_stack)
    references = {}
    for index, (node_id, stack_file) in enumerate(places):
        if stack_file is not None:
            where = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            references[task.options(num_cpus=0, max_retries=0, scheduling_strategy=where).remote(stack_file)] = index
    stacks = [""] * len(places)
    if not references:
        return stacks
    done, _ = ray.wait(list(references), num_returns=len(references), timeout=timeout_s)
    for reference in done:
        try:
            stacks[references[reference]] = ray.get(reference)
        except ray.exceptions.RayError as error:
            logger.warning("no stack of worker %d: %s", references[reference], error)
    return stacks
