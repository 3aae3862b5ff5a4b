"""Seccomp filter: the Linux system calls that a model's program may not make.

Namespaces and the allow-listed root isolate files, processes and the network. The filter rejects the rest:
memory that no process or size-limited file system accounts for, socket families that no namespace confines,
new namespaces, and parts of the kernel that programs never need and that have had vulnerabilities.
"""

from __future__ import annotations

import ctypes
import errno
import struct
from functools import lru_cache

# For each machine name of ``uname``: its column in the tables below, and its architecture constant from
# audit.h.
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7), "arm64": (1, 0xC00000B7)}

_FIRST_X32_CALL = 0x40000000

# System call numbers on x86-64 and on 64-bit ARM; None if the architecture lacks the call.
_REFUSED: dict[str, tuple[int | None, int | None]] = {
    # Calls that allocate memory which neither a process limit nor a file system accounts for.
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "remap_file_pages": (216, 234),
    # Rejected, because pages in a pipe outlive their process, and a single byte may pin a huge page.
    "vmsplice": (278, 75),
    # Calls that create objects of which the machine or the user has only few.
    "io_setup": (206, 0),
    "inotify_init": (253, None),
    "inotify_init1": (294, 26),
    # Calls that access other processes.
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # Calls that change mounts and namespaces.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "unshare": (272, 97),
    "setns": (308, 268),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    # Calls that access keyrings, which belong to the user of the run.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # Calls into parts of the kernel with a history of vulnerabilities.
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "personality": (135, 92),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "modify_ldt": (154, None),
    "iopl": (172, None),
    "ioperm": (173, None),
    # Calls that change the machine.
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
}
_CLONE, _CLONE3, _SOCKET, _MMAP, _FCNTL = (56, 220), (435, 435), (41, 198), (9, 222), (72, 25)
_SET_SOCKET_OPTION, _ADVISE = (54, 208), (28, 233)

# All CLONE_NEW* flags of ``clone``.
_NEW_NAMESPACES = 0x7E020000

# AF_UNIX, AF_INET and AF_INET6, which a network namespace confines. AF_VSOCK, for example, reaches the host
# from any namespace.
_SOCKET_FAMILIES = (1, 2, 10)

# MAP_SHARED | MAP_ANONYMOUS: pages live as long as any mapping, but count only for processes that have
# touched them.
_SHARED_ANONYMOUS = 0x21

# F_SETPIPE_SZ: no limit accounts for the content of a pipe.
_SET_PIPE_SIZE = 1031

# SO_SNDBUF: no limit accounts for the content of a socket.
_SEND_BUFFER = 7

# MADV_PAGEOUT: memory that was moved to swap is not counted as resident.
_PAGE_OUT = 21

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _AND, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_NUMBER_OFFSET, _ARCHITECTURE_OFFSET, _ARGUMENTS_OFFSET = 0, 4, 16
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000


def fault_of_machine(machine: str) -> str | None:
    """Return why there is no filter for an architecture, or None if there is one."""
    return (
        None
        if machine in _ARCHITECTURES
        else f"there is no filter of system calls for the architecture {machine}"
    )


@lru_cache(maxsize=1)
def filter_program(machine: str) -> bytes:
    """Return the filter as classic BPF instructions.

    Args:
        machine: architecture as in ``os.uname().machine``, for which ``fault_of_machine`` returns None.
    """
    column, architecture = _ARCHITECTURES[machine]
    refuse = _instruction(_RETURN, _REFUSE | errno.EPERM)
    code = [_instruction(_LOAD, _ARCHITECTURE_OFFSET), _instruction(_EQUAL, architecture, 1, 0), refuse]
    code.append(_instruction(_LOAD, _NUMBER_OFFSET))
    # Reject x32 calls: they are the same calls under other numbers, which the table lacks.
    if machine == "x86_64":
        code += [_instruction(_AT_LEAST, _FIRST_X32_CALL, 0, 1), refuse]
    for numbers in _REFUSED.values():
        if numbers[column] is not None:
            code += [_instruction(_EQUAL, int(numbers[column] or 0), 0, 1), refuse]
    # Report clone3 as not implemented, so that libraries fall back to clone: its flags are in memory, which a
    # filter cannot read.
    code += [_instruction(_EQUAL, _CLONE3[column], 0, 1), _instruction(_RETURN, _REFUSE | errno.ENOSYS)]
    code += _on_argument(_CLONE[column], 0, [_instruction(_ANY_BIT, _NEW_NAMESPACES, 0, 1), refuse])
    # On a match, jump over the remaining families and the rejection.
    families = [
        _instruction(_EQUAL, family, len(_SOCKET_FAMILIES) - place, 0)
        for place, family in enumerate(_SOCKET_FAMILIES)
    ]
    code += _on_argument(_SOCKET[column], 0, [*families, refuse])
    shared = [_instruction(_AND, _SHARED_ANONYMOUS), _instruction(_EQUAL, _SHARED_ANONYMOUS, 0, 1), refuse]
    code += _on_argument(_MMAP[column], 3, shared)
    for numbers, argument, value in (
        (_FCNTL, 1, _SET_PIPE_SIZE),
        (_SET_SOCKET_OPTION, 2, _SEND_BUFFER),
        (_ADVISE, 2, _PAGE_OUT),
    ):
        code += _on_argument(numbers[column], argument, [_instruction(_EQUAL, value, 0, 1), refuse])
    return b"".join([*code, _instruction(_RETURN, _ALLOW)])


def _on_argument(number: int, argument: int, rules: list[bytes]) -> list[bytes]:
    """Return instructions that check the lower 32 bits of one argument of a system call, and allow the call
    unless a rule rejects it."""
    # Both architectures are little-endian: the lower half comes first.
    load = _instruction(_LOAD, _ARGUMENTS_OFFSET + 8 * argument)
    body = [load, *rules, _instruction(_RETURN, _ALLOW)]
    return [_instruction(_EQUAL, number, 0, len(body)), *body]


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def install(libc: ctypes.CDLL, program: bytes) -> None:
    """Install a filter for this process and all of its future children. The process must already have set "no
    new privileges".

    Raises:
        OSError: the kernel rejects the filter.
    """
    buffer = ctypes.create_string_buffer(program, len(program))
    # This is struct sock_fprog: the number of instructions, padding, and a pointer to them.
    header = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    set_seccomp, mode_filter = 22, 2
    if libc.prctl(set_seccomp, mode_filter, ctypes.c_char_p(header), 0, 0) == -1:
        raise OSError(ctypes.get_errno(), "seccomp")
