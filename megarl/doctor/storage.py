"""Checks of a run's directory: complete files, seen by other processes and nodes, locks, free space."""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from converters.files.atomic import fsync_directory, write_bytes_durably
from megarl.config.places import nearest_directory
from megarl.doctor.check import Check, Room

ROOM = Room("storage")
GIB = 2**30
LEAST_FREE = 5 * GIB
CHECKPOINT_BYTES = 14
"""Bytes of a parameter in a checkpoint: bfloat16 weights, float32 copies, and Adam's two moments."""
NETWORKED = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "cifs",
    "smb",
    "weka",
    "afs",
    "gluster",
    "panfs",
    "orangefs",
    "9p",
    "virtiofs",
)
_SIZE = 1 << 20
# Run with -I, so that no module of the working directory takes the place of a standard one.
_READER = "import hashlib, sys; sys.stdout.write(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"


def check_storage(run_dir: Path) -> Iterator[Check]:
    """Try ``run_dir``, or the directory that it would be made in; nothing stays behind."""
    place = run_dir
    try:
        place = nearest_directory(_without_links(run_dir))
        yield check_file_system(place)
        yield judge_space(shutil.disk_usage(place).free)
        # a directory of its own: a run may be at work in this one
        trial = place / f".megarl-doctor-{secrets.token_hex(6)}"
        try:
            trial.mkdir()
            yield check_durable_write(trial)
            yield check_lock(trial)
        finally:
            shutil.rmtree(trial, ignore_errors=True)
    except (OSError, subprocess.TimeoutExpired) as error:
        fix = f"ls -ld {place}; id   (who may write there), or give another --run-dir"
        yield ROOM.failed("writing", f"{place}: {getattr(error, 'strerror', None) or error}", fix)


def _without_links(path: Path) -> Path:
    """Return the path by which the kernel knows it. Raises OSError for links in a circle, and for ``~``
    without a home directory."""
    try:
        return path.expanduser().resolve()
    except RuntimeError as error:
        raise OSError(str(error)) from error


def check_durable_write(directory: Path) -> Check:
    """Write, sync, rename, and let another process read: what every checkpoint goes through."""
    content = secrets.token_bytes(_SIZE)
    start = time.perf_counter()
    write_bytes_durably(directory / "unfinished", content)
    os.replace(directory / "unfinished", directory / "whole")
    fsync_directory(directory)
    seconds = time.perf_counter() - start
    command = [sys.executable, "-I", "-c", _READER, str(directory / "whole")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if answer.stdout != hashlib.sha256(content).hexdigest():
        fix = "mount the file system without client-side caching, or give another --run-dir"
        return ROOM.failed(
            "writing", f"another process read other bytes than were written to {directory.parent}", fix
        )
    return ROOM.ok(
        "writing", f"1 MiB written, synced, renamed in {seconds * 1e3:.0f} ms; another process read the same"
    )


def check_lock(directory: Path) -> Check:
    """Check whether the kernel keeps a second run out of the directory of a first."""
    with (directory / "lock").open("wb") as first, (directory / "lock").open("rb+") as second:
        # as a run does; lockf would let the second in, as its locks are those of a process
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = f"no locks here ({error.strerror}); two runs on different hosts could take one directory"
            return ROOM.warning("locks", found, "mount with locks (NFS: without nolock; Lustre: -o flock)")
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ROOM.ok("locks", "a second owner is kept out")
    return ROOM.warning(
        "locks", "a second owner was let in", "mount with locks (NFS: without nolock; Lustre: -o flock)"
    )


def judge_space(free: int) -> Check:
    """Check whether checkpoints find room; bytes."""
    found = (
        f"{free / GIB:.1f} GiB free: one checkpoint of {free / CHECKPOINT_BYTES / 1e9:.1f} billion parameters"
    )
    if free >= LEAST_FREE:
        return ROOM.ok("space", found)
    return ROOM.warning(
        "space",
        f"{found}; {LEAST_FREE // GIB} GiB are little",
        "df -h; give another --run-dir or a smaller keep_top_k",
    )


def check_file_system(place: Path) -> Check:
    """Return which file system it is; ``place`` without links. That other nodes see it too can only be seen
    from there."""
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    # Of several on one directory the last one counts: an automounter's own lies below what it has mounted.
    mount = max(reversed(mounts), key=lambda part: len(part.mountpoint), default=None)
    kind = mount.fstype if mount is not None else "unknown"
    where = f"{place} on {kind}"
    if any(kind.removeprefix("fuse.").startswith(name) for name in NETWORKED):
        return ROOM.ok(
            "file system",
            f"{where}, shared between hosts; on all nodes: srun megarl doctor --run-dir {place}",
        )
    return ROOM.ok(
        "file system", f"{where}, of this host alone: right for one node; several need a shared one"
    )
