"""The sandbox of a program: separate namespaces, and a root file system with nothing but Python and system
libraries.

The root is an allow-list. It has the directories of Python and of the system's libraries, read-only; a
read-only ``/proc`` that shows only the program's own processes; the devices null, full, random and urandom;
and one size-limited in-memory file system for ``/tmp`` and ``/dev/shm``. There are no files of the run, its
user or other programs, and no sockets or other devices. The program has no capabilities and cannot gain any,
and a filter rejects system calls that it does not need (see ``system_calls``). If the run is root, the
program runs as user 65534.

Some systems (Ubuntu from 24.04 on, by AppArmor) grant namespaces only to certain programs, among them
bubblewrap. There bubblewrap creates the sandbox from the same lists. Our own sandbox is preferred, because
bubblewrap limits only the bytes of in-memory files and not their number. If the run is root, bubblewrap is
not used, because the program would keep access to root's files.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import socket
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from megarl.rollout.programs import system_calls

_SYSTEM = (
    "/usr/lib",
    "/usr/lib64",
    "/usr/lib32",
    "/usr/bin",
    "/usr/local/lib",
    "/usr/share/zoneinfo",
    "/lib",
    "/lib64",
    "/bin",
    "/nix/store",
    "/gnu/store",
    "/etc/ld.so.cache",
    "/etc/alternatives",
)
_OF_PYTHON = ("bin", "lib", "lib64", "pyvenv.cfg")
# /dev/zero is left out: a shared mapping of it counts only for processes that have touched it.
DEVICES = ("null", "full", "random", "urandom")
"""Devices in the sandbox's ``/dev``."""

_DEVICE_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
}

NOBODY = 65534
"""User and group id of a program inside the sandbox; if the run is root, also outside."""

WORK = "/tmp"
"""Initial working directory of a program in the sandbox."""

_WRITABLE = (WORK, "/dev/shm")

_OLD = "/.old"
_STORE = "/.store"
# Limit the number of files too: an empty file takes kernel memory, which the size of a tmpfs does not
# include.
_STORE_FILES = 4096

# Constants of mount.h, sched.h, prctl.h and capability.h.
_READ_ONLY, _NO_SET_USER, _NO_DEVICES, _NO_EXECUTION, _BIND, _RECURSIVE, _PRIVATE = (
    1,
    2,
    4,
    8,
    0x1000,
    0x4000,
    0x40000,
)
_DETACH = 2
_NEW_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_DROP_FROM_BOUNDING_SET, _SET_NO_NEW_PRIVILEGES = 24, 38
_CAPABILITY_VERSION_3 = 0x20080522
_CLONE_CALL = {"x86_64": 56, "aarch64": 220, "arm64": 220}
_PIVOT_ROOT_CALL = {"x86_64": 155, "aarch64": 41, "arm64": 41}
_MOUNT_SETATTR_CALL = 442
_CURRENT_DIRECTORY, _EVERYTHING_BELOW = -100, 0x8000


@dataclass(frozen=True, slots=True)
class Root:
    """Plan of the sandbox's root file system on this machine.

    Attributes:
        machine: name of the architecture.
        base: directory on which the root is mounted while it is built.
        places: (real path, path inside the root, whether it is a directory) of each bind mount.
        links: (path, target) of each symbolic link.
        changes_user: the program becomes user 65534 of the machine; otherwise it stays the user of the run.
    """

    machine: str
    base: str
    places: tuple[tuple[str, str, bool], ...]
    links: tuple[tuple[str, str], ...]
    changes_user: bool


@lru_cache(maxsize=1)
def planned_root() -> Root:
    """Plan the root file system for this machine.

    Raises:
        OSError: this architecture is not supported.
    """
    machine = os.uname().machine
    fault = system_calls.fault_of_machine(machine)
    if fault is not None:
        raise OSError(fault)
    places: dict[str, tuple[str, str, bool]] = {}
    for path in (*_SYSTEM, *_paths_of_python()):
        real = os.path.realpath(path)
        # Bind the real path too: absolute links and Python's home may refer to it.
        for inside in (path, real):
            if os.path.exists(real) and not _is_covered(inside, places):
                places[inside] = (real, inside, os.path.isdir(real))
    links = tuple(
        (path, target) for path, target in _links_to(sys.executable) if not _is_covered(path, places)
    )
    changes_user = os.geteuid() == 0 and _is_mapped("uid_map") and _is_mapped("gid_map")
    return Root(machine, os.path.realpath(tempfile.gettempdir()), tuple(places.values()), links, changes_user)


def _paths_of_python() -> Iterator[str]:
    home = os.path.dirname(os.path.dirname(os.path.realpath(sys.executable)))
    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, home)):
        for name in _OF_PYTHON:
            yield os.path.join(prefix, name)
    yield from map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib"))


def _is_covered(path: str, places: Iterable[str]) -> bool:
    return any(path == place or path.startswith(f"{place}/") for place in places)


def _links_to(path: str) -> Iterator[tuple[str, str]]:
    """Yield the chain of symbolic links that leads to an executable."""
    while os.path.islink(path):
        target = os.readlink(path)
        yield path, target
        path = os.path.normpath(os.path.join(os.path.dirname(path), target))


def _is_mapped(file: str) -> bool:
    """Return whether user or group 65534 exists in this process's user namespace. Some containers have only
    one user."""
    for line in Path(f"/proc/self/{file}").read_text().splitlines():
        first, _, count = map(int, line.split())
        if first <= NOBODY < first + count:
            return True
    return False


def start_inside(root: Root) -> tuple[int, int]:
    """Fork into new namespaces.

    Returns:
        In the parent, the child's process id and a file descriptor, both for ``let_in``. In the child, 0 and
        a file descriptor for ``enter``.

    Raises:
        OSError: Linux grants no namespaces.
    """
    # Call clone directly, because os.fork takes no flags. Its other work is not needed: this process runs no
    # other Python thread, and the child soon calls exec. PyDLL keeps the interpreter lock.
    libc = ctypes.PyDLL(None, use_errno=True)
    wait_for, tell = os.pipe()
    zeros = [ctypes.c_long(0)] * 4
    child = libc.syscall(
        ctypes.c_long(_CLONE_CALL[root.machine]), ctypes.c_long(_NEW_NAMESPACES | signal.SIGCHLD), *zeros
    )
    if child == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"clone with namespaces: {os.strerror(number)}")
    os.close(wait_for if child else tell)
    return child, tell if child else wait_for


def let_in(root: Root, child: int, tell: int) -> None:
    """Map the user and group ids of the child's namespace, then let the child continue.

    Raises:
        OSError: Linux rejects the mapping.
    """
    user, group = os.geteuid(), os.getegid()
    if root.changes_user:
        # Map root as well: `enter` needs it for its mounts, and then changes to NOBODY.
        users = groups = f"0 0 1\n{NOBODY} {NOBODY} 1"
    else:
        users, groups = f"{NOBODY} {user} 1", f"{NOBODY} {group} 1"
        # The kernel requires this before an unprivileged user may map groups.
        _write(f"/proc/{child}/setgroups", "deny")
    _write(f"/proc/{child}/uid_map", users)
    _write(f"/proc/{child}/gid_map", groups)
    os.write(tell, b"1")
    os.close(tell)


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise OSError(error.errno, f"{path.rpartition('/')[2]}: {error.strerror}") from None


def enter(libc: ctypes.CDLL, root: Root, wait_for: int, store_mb: int) -> None:
    """Build the root file system and enter it, then drop all privileges.

    Args:
        libc: C library, loaded with ``use_errno``.
        root: plan of the root.
        wait_for: file descriptor from ``start_inside``.
        store_mb: size limit of ``/tmp`` and ``/dev/shm`` together, in MiB.

    Raises:
        OSError: Linux rejects one of the steps.
    """
    if os.read(wait_for, 1) != b"1":
        raise OSError("the supervisor is gone")
    os.close(wait_for)
    os.umask(0o022)
    _build(libc, root, store_mb)
    socket.sethostname("program")
    if root.changes_user:
        # Groups first, because a process that is no longer root cannot change them.
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
    _replace_standard_error()
    _give_up_rights(libc, root)
    os.chdir(WORK)


def close_system_calls(libc: ctypes.CDLL, root: Root) -> None:
    """Install the system call filter.

    Raises:
        OSError: the kernel rejects the filter.
    """
    system_calls.install(libc, system_calls.filter_program(root.machine))


def _build(libc: ctypes.CDLL, root: Root, store_mb: int) -> None:
    # Make the tree private first: mounts in a shared tree would propagate out of the namespace.
    _mount(libc, "none", "/", None, _RECURSIVE | _PRIVATE)
    # pivot_root needs a mount point, and an empty file system cannot expose a file by oversight.
    _mount(libc, "none", root.base, "tmpfs", _NO_SET_USER | _NO_DEVICES, "size=4m,nr_inodes=4096,mode=755")
    os.mkdir(root.base + _OLD)
    pivot = ctypes.c_long(_PIVOT_ROOT_CALL[root.machine])
    _checked(libc.syscall(pivot, root.base.encode(), (root.base + _OLD).encode()), "pivot_root")
    # The working directory is still in the old root.
    os.chdir("/")
    # Before the binds, because Python may be installed below a temporary directory.
    _mount_store(libc, store_mb)
    for real, inside, is_directory in root.places:
        _bind(libc, _OLD + real, inside, is_directory)
    for path, target in root.links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    for device in DEVICES:
        _bind(libc, f"{_OLD}/dev/{device}", f"/dev/{device}", False)
    for name, target in _DEVICE_LINKS.items():
        os.symlink(target, f"/dev/{name}")
    _mount_proc(libc)
    # Detach instead of unmount: this process's libraries are still open in the old root.
    _checked(libc.umount2(_OLD.encode(), _DETACH), "umount the old root")
    os.rmdir(_OLD)
    # mount_setattr instead of a remount: one call changes all mounts below and keeps their other flags.
    _set_attributes(libc, "/", _EVERYTHING_BELOW, _READ_ONLY | _NO_SET_USER, 0)
    for path in _WRITABLE:
        _set_attributes(libc, path, 0, 0, _READ_ONLY)


def _mount_store(libc: ctypes.CDLL, store_mb: int) -> None:
    """Mount one tmpfs at both writable paths, so that one size limit covers both."""
    os.mkdir(_STORE)
    options = f"size={store_mb}m,nr_inodes={_STORE_FILES},mode=755"
    _mount(libc, "none", _STORE, "tmpfs", _NO_SET_USER | _NO_DEVICES, options)
    for path in _WRITABLE:
        for each in (path, _STORE + path):
            os.makedirs(each)
        # chmod, because makedirs applies the umask.
        os.chmod(_STORE + path, 0o1777)
        _mount(libc, _STORE + path, path, None, _BIND)
    # The two binds keep the file system alive; the original mount would be a third way into it.
    _checked(libc.umount2(_STORE.encode(), _DETACH), "umount the store")
    os.rmdir(_STORE)


def _bind(libc: ctypes.CDLL, source: str, inside: str, is_directory: bool) -> None:
    if is_directory:
        os.makedirs(inside, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(inside), exist_ok=True)
        os.close(os.open(inside, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    # Bind submounts too: a user namespace may not uncover what such a mount hides.
    _mount(libc, source, inside, None, _BIND | _RECURSIVE)


def _mount_proc(libc: ctypes.CDLL) -> None:
    """Mount a ``/proc`` that shows only the program's own processes. Containers that hide parts of ``/proc``
    do not permit this; the sandbox then has no ``/proc``."""
    flags = _READ_ONLY | _NO_SET_USER | _NO_DEVICES | _NO_EXECUTION
    os.makedirs("/proc", exist_ok=True)
    with contextlib.suppress(OSError):
        _mount(libc, "none", "/proc", "proc", flags, "subset=pid")


def _set_attributes(libc: ctypes.CDLL, path: str, flags: int, on: int, off: int) -> None:
    """Set the mount attributes ``on`` and clear ``off``, without changing others. The flag
    ``_EVERYTHING_BELOW`` includes all mounts below the path."""
    attributes = (ctypes.c_uint64 * 4)(on, off, 0, 0)
    call = ctypes.c_long(_MOUNT_SETATTR_CALL)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    result = libc.syscall(call, _CURRENT_DIRECTORY, path.encode(), flags, ctypes.byref(attributes), size)
    _checked(result, "mount_setattr")


def _mount(
    libc: ctypes.CDLL, source: str, target: str, kind: str | None, flags: int, options: str = ""
) -> None:
    kind_name = None if kind is None else kind.encode()
    result = libc.mount(
        source.encode(), target.encode(), kind_name, ctypes.c_ulong(flags), options.encode() or None
    )
    _checked(result, f"mount {target}")


def _replace_standard_error() -> None:
    """Reopen standard error as the sandbox's ``/dev/null``. Through a descriptor of the machine's own
    ``/dev/null``, the owner of that file could change its mode."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    os.dup2(null, 2)
    os.close(null)


def _give_up_rights(libc: ctypes.CDLL, root: Root) -> None:
    capability = 0
    # The number of capabilities depends on the kernel, so loop until it reports an unknown one.
    while libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0) == 0:
        capability += 1
    if root.changes_user:
        os.setresuid(NOBODY, NOBODY, NOBODY)
    header, nothing = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    _checked(libc.capset(ctypes.byref(header), ctypes.byref(nothing)), "capset")
    # Without this flag the kernel accepts a system call filter only from root.
    _checked(libc.prctl(_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")


def _checked(result: int, what: str) -> None:
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


BUBBLEWRAPS_PROCESSES = 1
"""Number of bubblewrap's own processes, which do not count as the program's."""


def found_bubblewrap() -> str:
    """Return the path of bubblewrap. Empty if it is not installed, or if the run is root."""
    return "" if os.geteuid() == 0 else shutil.which("bwrap") or ""


def with_bubblewrap(
    bubblewrap: str, command: Sequence[str], root: Root, store_mb: int, filter_file: int, status_file: int
) -> list[str]:
    """Return the bubblewrap command that runs another command in the sandbox.

    Args:
        bubblewrap: path of bubblewrap.
        command: the command to run inside.
        root: plan of the root.
        store_mb: size limit of ``/tmp`` in MiB; ``/dev/shm`` is a link to it.
        filter_file: file descriptor of the system call filter, see ``system_calls.filter_program``.
        status_file: file descriptor to which bubblewrap writes the command's status as JSON lines.
    """
    # --as-pid-1, because bubblewrap would otherwise run another process inside, which BUBBLEWRAPS_PROCESSES
    # does not count.
    arguments = ["--unshare-all", "--die-with-parent", "--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    arguments += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "program"]
    arguments += ["--seccomp", str(filter_file), "--json-status-fd", str(status_file)]
    # Before the binds, because Python may be installed below a temporary directory.
    arguments += [
        "--perms",
        "1777",
        "--size",
        str(store_mb << 20),
        "--tmpfs",
        WORK,
        "--symlink",
        WORK,
        "/dev/shm",
    ]
    for real, inside, _ in root.places:
        arguments += ["--ro-bind", real, inside]
    for path, target in root.links:
        arguments += ["--symlink", target, path]
    for device in DEVICES:
        arguments += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    # No /proc: bubblewrap's shows much of the machine, and solving a task does not need it.
    return [bubblewrap, *arguments, "--remount-ro", "/", "--chdir", WORK, "--", *command]
