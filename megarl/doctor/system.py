"""Processors, memory, shared memory and open files."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path

import psutil

from megarl.doctor.check import Check, Verdict

ROOM = "system"
GIB = 2**30
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED_MEMORY = 2 * GIB
"""One refit buffer, and a little for Ray's objects."""
LEAST_OPEN_FILES = 4096
"""Ray holds several sockets for every worker, each data loader and checkpoint shard further files."""


def check_system() -> Iterator[Check]:
    """All of them."""
    memory = psutil.virtual_memory()
    yield Check(ROOM, "processors", Verdict.OK, f"{len(os.sched_getaffinity(0))} of {os.cpu_count()} usable")
    yield Check(ROOM, "memory", Verdict.OK, f"{memory.available / GIB:.1f} GiB free of {memory.total / GIB:.1f} GiB")
    size = shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0
    yield judge_shared_memory(size)
    yield judge_open_files(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_shared_memory(size: int) -> Check:
    """Whether ``/dev/shm`` holds what workers on one host share; bytes."""
    found = f"{size / GIB:.2f} GiB"
    if size >= LEAST_SHARED_MEMORY:
        return Check(ROOM, str(SHARED_MEMORY), Verdict.OK, found)
    fix = f"mount -o remount,size=8G {SHARED_MEMORY}   (Docker: --shm-size=8g)"
    return Check(
        ROOM, str(SHARED_MEMORY), Verdict.WARNING, f"{found}, at least {LEAST_SHARED_MEMORY // GIB} GiB are wanted for refits and Ray", fix
    )


def judge_open_files(soft: int, hard: int) -> Check:
    """Whether a driver of many workers may open enough files."""
    infinite = resource.RLIM_INFINITY
    if soft == infinite or soft >= LEAST_OPEN_FILES:
        return Check(ROOM, "open files", Verdict.OK, "no limit" if soft == infinite else f"{soft:,}")
    reachable = 65536 if hard == infinite else min(hard, 65536)
    fix = f"ulimit -n {reachable}" if reachable >= LEAST_OPEN_FILES else "raise nofile in /etc/security/limits.conf, then log in again"
    return Check(ROOM, "open files", Verdict.WARNING, f"{soft:,}, at least {LEAST_OPEN_FILES:,} are wanted", fix)
