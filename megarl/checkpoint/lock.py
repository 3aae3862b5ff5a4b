"""A lock that keeps a second live run out of a run directory.

The owner holds a kernel lock (``flock``) on the lock file and writes its identity into it. The kernel
releases the lock when the process dies for any reason, so on one host a dead owner never blocks. Where kernel
locks have no effect (another host, a file system without locks), the identity in the file decides.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from megarl import env
from megarl.errors import StateError

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
_NO_KERNEL_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK, errno.EINVAL)
_TRIES = 100


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that holds a lock.

    Attributes:
        pid: process id on ``host``.
        host: host name.
        boot_id: the kernel's boot id; a different one means that the process is gone.
        process_start: start time of the process in clock ticks since boot (field 22 of ``/proc/PID/stat``),
            which reveals a reused pid.
        job_id: Slurm job id; empty without Slurm.
        job_restart: how often Slurm had requeued the job.
        directory: absolute path of the run directory; empty in locks of earlier versions.
    """

    pid: int
    host: str
    boot_id: str
    process_start: int
    job_id: str
    job_restart: int
    directory: str = ""

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host}" + (
            f" (Slurm job {self.job_id})" if self.job_id else ""
        )


def read_owner(directory: Path) -> Owner | None:
    """Return the process that holds the lock of a run directory, or that died holding it; None if there is
    none. Takes no lock, so a run is never hindered.

    Raises:
        OSError: the lock file exists but cannot be read, so it is unknown whether a run is live.
    """
    try:
        descriptor = os.open(directory / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return _read_owner(descriptor, directory)
    finally:
        os.close(descriptor)


def has_ended(owner: Owner) -> bool | None:
    """Return whether a process has ended; None if it is on another host, where this cannot be checked."""
    if _is_gone(owner):
        return True
    return False if owner.host == _this_process().host else None


class RunLock:
    """Exclusive right to write to a run directory.

    Use it as a context manager, or call ``acquire`` and ``release``.
    """

    def __init__(self, directory: str | Path) -> None:
        """Args:
        directory: the run directory; created if missing."""
        self.directory = Path(directory)
        self.path = self.directory / LOCK_NAME
        self._descriptor = -1

    @property
    def held(self) -> bool:
        """True if this object holds the lock."""
        return self._descriptor >= 0

    def acquire(self) -> RunLock:
        """Take the lock; an owner that is certainly dead does not prevent it.

        An owner is certainly dead if the kernel of this host reports its end, or if it is an earlier start of
        this Slurm job.

        Raises:
            StateError: a live run holds the lock, or a run on another host whose state is unknown; the
                message names its process and host.
        """
        if self.held:
            return self
        descriptor = self._locked()
        try:
            owner = _read_owner(descriptor, self.directory)
            if owner is not None and not _is_gone(owner):
                raise StateError(self._refusal(owner))
            if owner is not None:
                logger.warning("%s: taking over from %s, which ended without releasing it", self.path, owner)
            # Write the owner only with the kernel lock held: of two processes that start at once, only one
            # gets here.
            place = os.path.abspath(self.directory)
            _write_owner(descriptor, {**asdict(_this_process()), "directory": place})
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return self

    def _locked(self) -> int:
        """Open the lock file and take its kernel lock."""
        failure: OSError | None = None
        for _ in range(_TRIES):
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                # No O_TRUNC: the content names the current owner.
                descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            except FileNotFoundError as error:
                # A rejected launch removed the directory that it had created, or no directory can be created
                # there.
                failure = error
                continue
            is_locked = False
            try:
                if not _try_kernel_lock(descriptor):
                    raise StateError(self._refusal(_read_owner(descriptor, self.directory)))
                # A rejected launch may have removed the file since it was opened; another launch would then
                # lock a new file.
                is_locked = _file_at(self.path) == _identity(os.fstat(descriptor))
            finally:
                if not is_locked:
                    os.close(descriptor)
            if is_locked:
                return descriptor
        raise failure or StateError(
            f"{self.path} was another file each of {_TRIES} times that it was locked. Fix: find out "
            "who removes it, or give a run_dir on a file system whose files keep their inode numbers"
        )

    def require_place(self) -> None:
        """Check that the run directory is still where the lock was taken. Call it before writing: files
        written after the directory was removed would be lost silently, and another run may start there.

        Raises:
            StateError: the directory or the lock file was removed, renamed or replaced.
        """
        if not self.held or _file_at(self.path) == _identity(os.fstat(self._descriptor)):
            return
        there = "its file run.lock is another one" if self.directory.is_dir() else "it no longer exists"
        raise StateError(
            f"run directory {self.directory} was removed, renamed or replaced while the run wrote "
            f"into it: {there}. The run ends before it writes more. Fix: find out who did that; "
            "move the directory back, and start the run again"
        )

    def release(self) -> None:
        """Release the lock; a second call does nothing. The empty file stays, because removing it could give
        the lock to two runs."""
        if not self.held:
            return
        descriptor, self._descriptor = self._descriptor, -1
        try:
            os.ftruncate(descriptor, 0)
        except OSError as error:
            logger.warning("%s cannot be emptied: %s", self.path, error)
        finally:
            os.close(descriptor)

    def __enter__(self) -> RunLock:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _refusal(self, owner: Owner | None) -> str:
        return (
            f"run directory {self.directory} is in use by {owner or 'another process'}; one run a directory. "
            f"Fix: wait for it, stop it, choose another run_dir, or remove {self.path} when that process is "
            "certainly dead"
        )


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return device and inode of a file; None if it does not exist."""
    try:
        return _identity(path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _try_kernel_lock(descriptor: int) -> bool:
    """Take the kernel lock; return False if another process holds it.

    On a file system without locks return True; the owner written in the file then decides.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_KERNEL_LOCKS:
            raise
        logger.debug("no kernel locks here: %s", error)
    return True


def _is_gone(owner: Owner) -> bool:
    """Return whether ``owner`` has certainly ended."""
    here = _this_process()
    # Slurm restarts a job only after all processes of the previous attempt are gone.
    if owner.job_id and owner.job_id == here.job_id and owner.job_restart < here.job_restart:
        return True
    if owner.host != here.host:
        return False
    # After a reboot process ids are assigned from the beginning.
    if owner.boot_id != here.boot_id:
        return True
    # The same process id with another start time is another process.
    start = _process_start(owner.pid)
    return start is None or start != owner.process_start


def _this_process() -> Owner:
    return Owner(
        pid=os.getpid(),
        host=socket.gethostname(),
        boot_id=_boot_id(),
        process_start=_process_start(os.getpid()) or 0,
        job_id=env.text("SLURM_JOB_ID") or "",
        job_restart=env.integer("SLURM_RESTART_COUNT", 0),
    )


def _boot_id() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _process_start(pid: int) -> int | None:
    """Return the start time of a live process in clock ticks since boot. None if it has ended or is a zombie;
    0 if /proc cannot be read."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    try:
        # Split after the last parenthesis: the program's name is in parentheses and may contain spaces and
        # parentheses.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ("Z", "X") else int(fields[19])
    except (OSError, IndexError, ValueError):
        return 0


def _read_owner(descriptor: int, directory: Path) -> Owner | None:
    """Return the owner in the lock file. None if the file is empty, was left half-written by a crash, or was
    copied from another run directory."""
    content = os.pread(descriptor, 4096, 0)
    try:
        owner = Owner(**json.loads(content))
    except (ValueError, TypeError, RecursionError):
        return None
    is_valid = isinstance(owner.pid, int) and isinstance(owner.job_restart, int)
    return owner if is_valid and not _is_copy(content, owner, directory) else None


def _is_copy(content: bytes, owner: Owner, directory: Path) -> bool:
    """Return whether the lock file was copied from another directory, which still has it. A renamed directory
    leaves no such file."""
    try:
        original = Path(owner.directory) / LOCK_NAME
        here = directory / LOCK_NAME
        return bool(owner.directory) and not original.samefile(here) and original.read_bytes() == content
    except (OSError, TypeError, ValueError):
        return False


def _write_owner(descriptor: int, fields: dict[str, int | str]) -> None:
    content = json.dumps(fields).encode()
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, content, 0)
    os.fsync(descriptor)
