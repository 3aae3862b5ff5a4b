"""Check the storage of a run directory: durable writes, whether hosts share it, file locks, free space."""

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
"""Bytes per parameter in a checkpoint: bfloat16 weights, float32 master weights, and two Adam moments."""
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
# Run with -I, so that no file in the working directory shadows a standard module.
_READER = "import hashlib, sys; sys.stdout.write(hashlib.sha256(open(sys.argv[1], 'rb').read()).hexdigest())"


def check_storage(run_dir: Path) -> Iterator[Check]:
    """Check ``run_dir``, or the existing directory in which it would be created. Temporary files are
    removed."""
    place = run_dir
    try:
        place = nearest_directory(_without_links(run_dir))
        yield check_file_system(place)
        yield judge_space(shutil.disk_usage(place).free)
        # A run may be using ``run_dir``, so write to a new directory.
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
    """Return a path with symlinks and ``~`` resolved.

    Raises:
        OSError: symlinks form a loop, or there is no home directory.
    """
    try:
        return path.expanduser().resolve()
    except RuntimeError as error:
        raise OSError(str(error)) from error


def check_durable_write(directory: Path) -> Check:
    """Check the write that every checkpoint uses: write, fsync, rename, and read by another process."""
    content = secrets.token_bytes(_SIZE)
    start = time.perf_counter()
    write_bytes_durably(directory / "unfinished", content)
    os.replace(directory / "unfinished", directory / "whole")
    # Without this, a crash may undo the rename.
    fsync_directory(directory)
    seconds = time.perf_counter() - start
    # -I ignores PYTHON variables and the current directory, where a file could shadow a module of Python.
    command = [sys.executable, "-I", "-c", _READER, str(directory / "whole")]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    if answer.stdout != hashlib.sha256(content).hexdigest():
        fix = "mount the file system without client-side caching, or give another --run-dir"
        return ROOM.failed(
            "writing", f"another process read different bytes than were written to {directory.parent}", fix
        )
    return ROOM.ok(
        "writing", f"1 MiB written, synced, renamed in {seconds * 1e3:.0f} ms; another process read the same"
    )


def check_lock(directory: Path) -> Check:
    """Check that a file lock keeps a second run out of a run directory."""
    with (directory / "lock").open("wb") as first, (directory / "lock").open("rb+") as second:
        # Use flock, as runs do. A lockf lock belongs to the process, so a second one in this process would
        # succeed.
        try:
            fcntl.flock(first, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            found = (
                f"no locks here ({error.strerror}); two runs on different hosts could use the same directory"
            )
            return ROOM.warning("locks", found, "mount with locks (NFS: without nolock; Lustre: -o flock)")
        try:
            fcntl.flock(second, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return ROOM.ok("locks", "a second owner is refused")
    return ROOM.warning(
        "locks", "a second owner was accepted", "mount with locks (NFS: without nolock; Lustre: -o flock)"
    )


def judge_space(free: int) -> Check:
    """Report the free space, and warn if less than ``LEAST_FREE`` bytes are free.

    Args:
        free: free bytes.
    """
    found = (
        f"{free / GIB:.1f} GiB free: one checkpoint of {free / CHECKPOINT_BYTES / 1e9:.1f} billion parameters"
    )
    if free >= LEAST_FREE:
        return ROOM.ok("space", found)
    return ROOM.warning(
        "space",
        f"{found}; at least {LEAST_FREE // GIB} GiB are recommended",
        "df -h; give another --run-dir or a smaller keep_top_k",
    )


def check_file_system(place: Path) -> Check:
    """Report the type of a file system, and whether it is one that hosts can share. Whether other nodes have
    mounted it can only be checked there.

    Args:
        place: path without symlinks.
    """
    mounts = [part for part in psutil.disk_partitions(all=True) if place.is_relative_to(part.mountpoint)]
    # If two mounts have the same mount point, the later one counts: an automounter's own mount comes before
    # the file system that it mounts.
    mount = max(reversed(mounts), key=lambda part: len(part.mountpoint), default=None)
    kind = mount.fstype if mount is not None else "unknown"
    where = f"{place} on {kind}"
    if any(kind.removeprefix("fuse.").startswith(name) for name in NETWORKED):
        return ROOM.ok(
            "file system",
            f"{where}, shared between hosts; on all nodes: srun megarl doctor --run-dir {place}",
        )
    return ROOM.ok(
        "file system", f"{where}, only on this host: enough for one node; several nodes need a shared one"
    )
