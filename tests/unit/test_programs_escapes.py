"""Ways out of the sandbox of a program: each is tried, inside and, to show that it would be one, outside.

A probe writes ``reached`` when it has got at something. The control runs the same text as a bare process, without sandbox
and limits; those that only root can do are skipped where the tests are not root.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import shutil
import site
import socket
import stat
import struct
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from megarl.errors import RewardError
from megarl.rollout.programs import Limits, sandbox, system_calls
from megarl.rollout.programs.conversation import INSIDE
from megarl.rollout.programs.process import fault_of_isolation, file_of, python_command, running, text_in
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(fault_of_isolation() is not None, reason=f"no sandbox here: {fault_of_isolation()}")
BUBBLEWRAP = shutil.which("bwrap") or ""
needs_bubblewrap = pytest.mark.skipif(not BUBBLEWRAP or bool(fault_of_isolation(BUBBLEWRAP)), reason="bubblewrap is not here, or may not")
MARK = f"megarl-escape-{os.getpid()}"
CALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    return libc.syscall(*(ctypes.c_long(each) if isinstance(each, int) else each for each in (number, *arguments)))
def numbers(**calls):
    return calls[os.uname().machine]
"""
DEVICES = [
    str(path)
    for path in Path("/dev").rglob("*")
    if path.name not in {"null", "full", "random", "urandom"} and (path.is_block_device() or path.is_char_device())
]

# What a program tries; names in braces are filled in. True: only root can do it outside.
PROBES: dict[str, tuple[str, bool]] = {
    # files
    "a file of the run": ("open({secret!r}).read() == 'secret' and reach()", False),
    "a file of the repository": ("open({repository!r}).read() and reach()", False),
    "users of the machine": ("open('/etc/passwd').read() and reach()", False),
    "logs of the machine": ("os.listdir('/var') and reach()", False),
    "a link to a file": ("os.symlink({secret!r}, {mark!r})\nopen({mark!r}).read() and reach()", False),
    "above its root": ("open('/' + '../' * 20 + {secret!r}).read() and reach()", False),
    "the root that was before": (
        "for top in ('.', *os.listdir('/')):\n    try: open(f'/{{top}}' + {secret!r}).read() and reach()\n    except OSError: pass",
        False,
    ),
    "root of its parent": ("open('/proc/{parent}/root' + {secret!r}).read() and reach()", True),
    "another root": (
        "os.mkdir({mark!r})\nos.chroot({mark!r})\nfor _ in range(20): os.chdir('..')\nos.chroot('.')\nopen({secret!r}).read() and reach()",
        True,
    ),
    "a handle of a file": (
        "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0), 136)\nwhere = ctypes.c_int()\n"
        "made = libc.name_to_handle_at(-100, {secret!r}.encode(), handle, ctypes.byref(where), 0)\n"
        "place = os.open('/', os.O_RDONLY)\n"
        "made == 0 and libc.open_by_handle_at(place, handle, 0) >= 0 and reach()",
        True,
    ),
    "to write to Python": ("open(os.__file__, 'r+b') and reach()", True),
    "to write to libraries": ("os.open('/usr/lib', os.O_TMPFILE | os.O_RDWR) and reach()", True),
    "to change its root": ("os.open('/', os.O_TMPFILE | os.O_RDWR) and reach()", True),
    # processes of the machine
    "environment of another process": (
        "for each in filter(str.isdecimal, os.listdir('/proc')):\n    "
        "try: found = open(f'/proc/{{each}}/environ', 'rb').read()\n"
        "    except OSError: continue\n    {mark!r}.encode() in found and reach()",
        True,
    ),
    "command of another process": (
        "for each in filter(str.isdecimal, os.listdir('/proc')):\n    "
        "try: found = open(f'/proc/{{each}}/cmdline', 'rb').read()\n"
        "    except OSError: continue\n    {mark!r}.encode() in found and reach()",
        False,
    ),
    "memory of its parent": ("open('/proc/{parent}/mem', 'rb') and reach()", True),
    "files of its parent": ("os.listdir('/proc/{parent}/fd') and reach()", True),
    "settings of the kernel": ("open('/proc/sys/kernel/core_pattern', 'r+') and reach()", True),
    "keys of the kernel": ("open('/proc/sysrq-trigger', 'w') and reach()", True),
    "memory of the kernel": ("open('/proc/kcore', 'rb') and reach()", True),
    "the machine's memory map": ("open('/proc/iomem').read() and reach()", False),
    "its own score": ("open('/proc/self/oom_score_adj', 'w').write('500') and reach()", False),
    "devices in sys": ("os.listdir('/sys') and reach()", False),
    "control groups": ("os.listdir('/sys/fs/cgroup') and reach()", False),
    # sockets
    "a socket in a directory": ("connect(socket.AF_UNIX, {path!r}) and reach()", False),
    "a socket with an abstract name": ("connect(socket.AF_UNIX, '\\0' + {mark!r}) and reach()", False),
    "TCP on loopback": ("connect(socket.AF_INET, ('127.0.0.1', {port})) and reach()", False),
    "UDP on loopback": ("socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port})) and reach()", False),
    "a socket to the host": ("socket.socket(socket.AF_VSOCK) and reach()", False),
    "netlink": ("socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) and reach()", False),
    "packets": ("socket.socket(socket.AF_PACKET, socket.SOCK_RAW) and reach()", True),
    "raw packets": ("socket.socket(socket.AF_INET, socket.SOCK_RAW, 1) and reach()", True),
    "the kernel's ciphers": ("socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET) and reach()", False),
    # devices
    "any device": (
        "for each in {devices!r}:\n    "
        "try: os.close(os.open(each, os.O_RDONLY | os.O_NONBLOCK))\n    "
        "except OSError: continue\n    reach()",
        True,
    ),
    "a block device of its own": ("os.mknod({mark!r}, 0o600 | stat.S_IFBLK, os.makedev(7, 0))\nreach()", True),
    "a character device of its own": ("os.mknod({mark!r}, 0o600 | stat.S_IFCHR, os.makedev(1, 1))\nreach()", True),
    "mode of the machine's null": ("os.chmod('/dev/null', 0o666)\nreach()", True),
    "mode of null by standard error": ("os.fchmod(2, 0o666)\nreach()", True),
    # memory that no limit counts
    "memory in a file without a name": ("os.memfd_create('x') and reach()", False),
    "secret memory": ("call(447, 0) >= 0 and reach()", False),
    "shared memory of System V": ("libc.shmget(0, 4096, 0o1600) >= 0 and reach()", False),
    "messages of System V": ("libc.msgget(0, 0o1600) >= 0 and reach()", False),
    "semaphores of System V": ("libc.semget(0, 1, 0o1600) >= 0 and reach()", False),
    "message queues": ("libc.mq_open(b'/' + {mark!r}.encode(), 0o302, 0o600, None) >= 0 and reach()", False),
    "shared memory without a file": ("mmap.mmap(-1, 4096) and reach()", False),
    "shared memory of a device": ("mmap.mmap(os.open('/dev/zero', os.O_RDWR), 4096) and reach()", False),
    "large pipes": ("fcntl.fcntl(os.pipe()[0], 1031, 1 << 18) and reach()", False),
    "large buffers of sockets": (
        "for _ in range(20):\n    pair = socket.socketpair()\n    kept.extend(pair)\n    for each in pair:\n"
        "        each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)\n        reach()",
        False,
    ),
    "pages given to a pipe": (
        "page = mmap.mmap(-1, 4096, mmap.MAP_PRIVATE)\nhere = ctypes.addressof(ctypes.c_char.from_buffer(page))\n"
        "libc.vmsplice(os.pipe()[1], struct.pack('PN', here, 4096), 1, 0) == 4096 and reach()",
        False,
    ),
    "memory moved to swap": ("mmap.mmap(-1, 4096, mmap.MAP_PRIVATE).madvise(21)\nreach()", False),
    "many timers": (
        "for _ in range(1000):\n    if libc.timer_create(1, None, ctypes.byref(ctypes.c_void_p())): break\nelse: reach()",
        False,
    ),
    "the machine's asynchronous reads": (
        "call(numbers(x86_64=206, aarch64=0), 1, ctypes.byref(ctypes.c_long())) == 0 and reach()",
        False,
    ),
    "notices of files": ("libc.inotify_init1(0) >= 0 and reach()", False),
    "large files in memory": (
        "for each in range(40):\n    file = open(f'/dev/shm/{mark}{{each}}', 'wb', buffering=0)\n    "
        "os.unlink(file.name)\n"
        "    kept.append(file)\n    file.write(bytes(1 << 20))\nreach()",
        False,
    ),
    "much memory": ("len(bytearray(1 << 30)) and reach()", False),
    "many processes": ("for _ in range(40):\n    if not os.fork(): time.sleep(0.4); os._exit(0)\ntime.sleep(0.2)\nreach()", False),
    "many threads": ("for _ in range(40): threading.Thread(target=time.sleep, args=(0.3,)).start()\ntime.sleep(0.1)\nreach()", False),
    # signals
    "a signal to its parent": ("os.kill({parent}, 0)\nreach()", False),
    "a signal to its supervisor": ("os.getppid() and (os.kill(os.getppid(), 0), reach())", False),
    "a signal to another process": ("os.kill({victim}, 0)\nreach()", False),
    "a signal to all": ("os.kill(-1, 0)\nreach()", False),
    # other processes' memory, mounts, namespaces
    "to trace": ("libc.ptrace(0, 0, 0, 0) == 0 and reach()", False),
    "to read memory of a process": (
        "here = ctypes.create_string_buffer(8)\npiece = struct.pack('PN', ctypes.addressof(here), 8)\n"
        "libc.process_vm_readv(os.getpid(), piece, 1, piece, 1, 0) == 8 and reach()",
        False,
    ),
    "to mount": (
        "os.mkdir({mark!r})\nlibc.mount(b'none', {mark!r}.encode(), b'tmpfs', 0, None) == 0 and (libc.umount({mark!r}.encode()), reach())",
        True,
    ),
    "to open a file system": ("call(430, b'tmpfs', 0) >= 0 and reach()", True),
    "to copy a tree of mounts": ("call(428, -100, b'/', 1) >= 0 and reach()", True),
    "namespaces of users": ("libc.unshare(0x10000000) == 0 and reach()", False),
    "namespaces of mounts": ("libc.unshare(0x20000) == 0 and reach()", True),
    "a process in new namespaces": (
        "child = call(numbers(x86_64=56, aarch64=220), 0x10000000 | 17, 0, 0, 0, 0)\nchild or os._exit(0)\nchild > 0 and reach()",
        False,
    ),
    "a process by a call that cannot be filtered": (
        "wanted = ctypes.create_string_buffer(struct.pack('8Q', 0x10000000, 0, 0, 0, 17, 0, 0, 0))\n"
        "child = call(435, wanted, 64)\nchild or os._exit(0)\nchild > 0 and reach()",
        False,
    ),
    "namespaces of another process": ("libc.setns(os.open('/proc/{parent}/ns/net', os.O_RDONLY), 0) == 0 and reach()", True),
    # rights
    "another user": ("os.setuid(0)\nreach()", True),
    "the right to be another user": ("os.setresuid(1, 1, 1)\nreach()", True),
    "a program that makes root": ("subprocess.run(['su', '-c', 'true'], stderr=-3).returncode == 0 and reach()", True),
    "capabilities": ("'CapBnd:\\t0000000000000000' in open('/proc/self/status').read() or reach()", False),
    "a higher priority": ("os.nice(-1)\nreach()", True),
    "name of the machine": ("socket.sethostname(socket.gethostname())\nreach()", True),
    "a key": ("call(numbers(x86_64=248, aarch64=217), b'user', {mark!r}.encode(), b'x', 1, -2) >= 0 and reach()", False),
    "a keyring": ("call(numbers(x86_64=250, aarch64=219), 0, -3, 0, 0, 0) >= 0 and reach()", False),
    # parts of the kernel
    "programs of the kernel": (
        "call(numbers(x86_64=321, aarch64=280), 0, struct.pack('4I', 2, 4, 4, 1) + bytes(56), 72) >= 0 and reach()",
        True,
    ),
    "counters of the processor": (
        "wanted = struct.pack('IIQ', 1, 112, 0) + bytes(96)\ncall(numbers(x86_64=298, aarch64=241), wanted, 0, -1, -1, 0) >= 0 and reach()",
        True,
    ),
    "rings of calls": ("call(425, 4, bytes(120)) >= 0 and reach()", False),
    "faults of pages": ("call(numbers(x86_64=323, aarch64=282), 1) >= 0 and reach()", True),
    "another personality": ("libc.personality(0xFFFFFFFF) >= 0 and reach()", False),
    # what it is given
    "environment of the run": ("{mark!r} in str(os.environ) and reach()", False),
    "descriptors of the run": (
        "for each in range(3, 64):\n    "
        "try: is_ours = os.readlink(f'/proc/self/fd/{{each}}') == {secret!r}\n    except OSError: continue\n"
        "    is_ours and reach()",
        False,
    ),
}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Things to be reached: a secret, sockets that listen, a process with a secret in its environment and its command."""
    directory = tmp_path_factory.mktemp("machine")
    secret = directory / "secret"
    secret.write_text("secret")
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", MARK], env={"SECRET": MARK})
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as by_path,
        socket.socket(socket.AF_UNIX) as by_name,
    ):
        by_path.bind(str(directory / "socket"))
        by_name.bind(f"\0{MARK}")
        for server in (by_path, by_name):
            server.listen(64)
        descriptor = os.open(secret, os.O_RDONLY)
        os.set_inheritable(descriptor, True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SECRET_OF_THE_RUN", MARK)
            yield {
                "secret": str(secret),
                "repository": __file__,
                "mark": MARK,
                "parent": os.getpid(),
                "victim": victim.pid,
                "path": str(directory / "socket"),
                "port": tcp.getsockname()[1],
                "devices": DEVICES,
            }
        os.close(descriptor)
    victim.kill()
    victim.wait()


def probe(name: str, machine: dict[str, object]) -> str:
    """The program of a probe."""
    code = textwrap.indent(PROBES[name][0].format(**machine), "    ")
    start = f"import fcntl, mmap, socket, stat, struct, subprocess, threading, time\n{CALLS}kept = []\n"
    reach = "def reach():\n    print('reached', flush=True)\n    os._exit(0)\n"
    connect = (
        "def connect(family, address):\n    kept.append(socket.socket(family))\n    "
        "kept[-1].settimeout(5)\n    kept[-1].connect(address)\n    return 1\n"
    )
    return f"{start}{reach}{connect}try:\n{code}\nexcept Exception as error:\n    print('refused', type(error).__name__, error)\n"


def inside(code: str, limits: Limits | None = None) -> str:
    """What a program writes in the sandbox."""
    task = json.dumps({"code": code, "packages": site.getsitepackages(), "function": "", "given_names": [], "given_modules": []})
    with file_of(task) as source, file_of() as given, file_of() as written:
        command = python_command(INSIDE, str(source.fileno()), "-1", "-1")
        with running(command, limits or Limits(20.0, memory_mb=768), given, written, (source.fileno(),)) as started:
            started.wait()
        return text_in(written)


@pytest.mark.parametrize("name", PROBES)
def test_nothing_is_reached_from_the_sandbox(name: str, machine: dict[str, object]) -> None:
    assert "reached" not in inside(probe(name, machine))


OTHERWISE = {
    "UDP on loopback": "the loopback of its own network is up, so that sending succeeds and reaches nobody",
    "mode of null by standard error": "standard error is a file made for this program",
}
if os.geteuid() == 0:
    OTHERWISE["mode of the machine's null"] = "the run is root, and then it does not take bubblewrap"


@needs_bubblewrap
@pytest.mark.parametrize("name", PROBES)
def test_nothing_is_reached_from_the_sandbox_of_bubblewrap(name: str, machine: dict[str, object]) -> None:
    if name in OTHERWISE:
        pytest.skip(OTHERWISE[name])
    assert "reached" not in inside(probe(name, machine), Limits(20.0, memory_mb=768, bubblewrap=BUBBLEWRAP))


ABSENT = {
    "a socket to the host",
    "secret memory",
    "the kernel's ciphers",
    "counters of the processor",
    "keys of the kernel",
    "memory of the kernel",
    "faults of pages",
    "rings of calls",
    "a key",
    "a keyring",
}
"""What not every kernel has."""


@sampled(8)
@pytest.mark.parametrize("name", PROBES)
def test_the_same_is_reached_outside(name: str, machine: dict[str, object], tmp_path: Path) -> None:
    """Each probe is able to find a hole: without sandbox it does."""
    if PROBES[name][1] and os.geteuid() != 0:
        pytest.skip("only root can do it")
    command = [sys.executable, "-c", probe(name, machine)]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, close_fds=False, check=False)
    if name in ABSENT and "reached" not in found.stdout:
        pytest.skip(f"this kernel has none: {found.stdout}{found.stderr}")
    assert "reached" in found.stdout, found.stderr


@sampled(4)
@pytest.mark.parametrize(
    "name",
    [
        "memory in a file without a name",
        "shared memory of System V",
        "messages of System V",
        "shared memory without a file",
        "large pipes",
        "large buffers of sockets",
        "pages given to a pipe",
        "memory moved to swap",
        "the machine's asynchronous reads",
        "notices of files",
        "netlink",
        "to trace",
        "namespaces of users",
        "a process in new namespaces",
        "rings of calls",
    ],
)
def test_without_its_filter_the_sandbox_has_holes(name: str, machine: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the tests above see what the filter does, and not something else."""
    monkeypatch.setattr(sandbox, "close_system_calls", lambda *_: None)
    assert "reached" in inside(probe(name, machine))


@needs_bubblewrap
def test_what_bubblewrap_makes_is_read_only_bounded_and_without_rights() -> None:
    limits = Limits(20.0, file_mb=2, bubblewrap=BUBBLEWRAP)
    assert inside("import os\nprint(sorted(os.listdir('/dev')), os.path.exists('/proc'), os.getpid())", limits) == (
        "['full', 'null', 'random', 'shm', 'urandom'] False 1\n"
    )
    for place in ("/", "/dev", "/usr", os.path.dirname(os.__file__)):
        assert inside(f"try: open({place!r} + '/x', 'w')\nexcept OSError as error: print(error.errno)", limits) == f"{errno.EROFS}\n"
    fill = "for each in range(9): open(f'/dev/shm/{each}', 'wb', buffering=0).write(bytes(1 << 18))\nprint(1)"
    assert (inside(fill, limits), inside(fill, Limits(20.0, file_mb=4, bubblewrap=BUBBLEWRAP))) == ("", "1\n")


@needs_bubblewrap
def test_bubblewrap_that_starts_nothing_says_why(tmp_path: Path) -> None:
    """As where a profile of the system lets it start but not make namespaces."""
    for script, said in (("#!/bin/sh\necho no namespaces >&2\nexit 1", "no namespaces"), ("#!/bin/sh\nexit 3", "exit code 3")):
        fails = tmp_path / "bwrap"
        fails.write_text(script)
        fails.chmod(0o755)
        with pytest.raises(RewardError, match=said):
            inside("print(1)", Limits(20.0, bubblewrap=str(fails)))


def test_the_root_holds_python_and_libraries_alone() -> None:
    listing = "import os\nprint(sorted(os.listdir('/')), sorted(os.listdir('/etc')), os.listdir('/tmp'), sorted(os.listdir('/dev')))"
    top, etc, work, devices = eval(inside(listing).replace("] [", "], ["))
    python = {Path(each[1]).parts[1] for each in sandbox.planned_root().places}
    assert set(top) == {"proc", "tmp", "dev", "etc"} | python
    assert set(etc) <= {"ld.so.cache", "alternatives"} and work == []
    assert devices == ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom"]


def test_who_it_is_inside() -> None:
    """Another user, not the run's, where the run is root; no capability, in no set."""
    status = inside("print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t") for line in status.strip().splitlines() if ":\t" in line)
    assert fields["Uid"].split() == [str(sandbox.NOBODY)] * 4
    assert {fields[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
    with file_of() as given, file_of() as written:
        command = python_command("import sys; sys.stdin.read(); print('started', flush=True); __import__('time').sleep(600)")
        with running(command, Limits(60.0), given, written) as started:
            while b"started" not in text_in(written).encode():
                assert started.poll() is None
            [child] = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
            owner = Path(f"/proc/{child}").stat().st_uid
    assert owner == (sandbox.NOBODY if sandbox.planned_root().changes_user else os.geteuid())


def test_one_limit_holds_for_all_its_files() -> None:
    fill = (
        "for place in ('/tmp', '/dev/shm'):\n    "
        "for each in range(5): open(f'{place}/{each}', 'wb', buffering=0).write(bytes(1 << 18))\nprint(1)"
    )
    assert inside(fill, Limits(20.0, file_mb=4)) == "1\n"
    assert inside(fill, Limits(20.0, file_mb=2)) == ""


def verdict_of(program: bytes, architecture: int, number: int, arguments: tuple[int, ...] = ()) -> int:
    """What a filter returns: a machine for the few instructions that filters are made of."""
    data = struct.pack("=IIQ6Q", number, architecture, 0, *(*arguments, *[0] * 6)[:6])
    code = [struct.unpack_from("=HBBI", program, place) for place in range(0, len(program), 8)]
    place = value = 0
    while True:
        kind, if_true, if_false, operand = code[place]
        place += 1
        match kind:
            case 0x20:
                [value] = struct.unpack_from("=I", data, operand)
            case 0x54:
                value &= operand
            case 0x06:
                return operand
            case _:
                holds = {0x15: value == operand, 0x35: value >= operand, 0x45: bool(value & operand)}[kind]
                place += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "architecture", "names"),
    [
        ("x86_64", 0xC000003E, {"read": 0, "memfd": 319, "socket": 41, "clone": 56, "mmap": 9, "fcntl": 72, "set": 54, "advise": 28}),
        (
            "aarch64",
            0xC00000B7,
            {"read": 63, "memfd": 279, "socket": 198, "clone": 220, "mmap": 222, "fcntl": 25, "set": 208, "advise": 233},
        ),
    ],
)
def test_the_filter_on_both_architectures(machine: str, architecture: int, names: dict[str, int]) -> None:
    """Other architectures' calls, which a processor runs too, are refused, whatever their numbers mean here."""
    program = system_calls.filter_program.__wrapped__(machine)
    call = SimpleNamespace(**names)
    allowed, refused, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS

    def verdict(number: int, *arguments: int) -> int:
        return verdict_of(program, architecture, number, arguments)

    assert verdict(call.read) == allowed and verdict(call.memfd) == refused and verdict(435) == unknown
    assert verdict_of(program, 0x40000003, call.read) == refused
    assert verdict(call.read | 0x40000000) == (refused if machine == "x86_64" else allowed)
    families = [family for family in range(64) if verdict(call.socket, family) == allowed]
    assert families == [1, 2, 10]
    assert verdict(call.clone, 0x3D0F00) == allowed and verdict(call.clone, 17) == allowed
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000):
        assert verdict(call.clone, 17 | flag) == refused
    assert [verdict(call.mmap, 0, 4096, 3, flags) for flags in (0x22, 0x01, 0x02, 0x21)] == [allowed] * 3 + [refused]
    assert verdict(call.fcntl, 3, 1031) == refused and verdict(call.fcntl, 3, 1) == allowed
    assert verdict(call.fcntl, 1031, 1) == allowed
    assert verdict(call.set, 3, 1, 7) == refused and verdict(call.set, 3, 1, 2) == allowed
    assert verdict(call.advise, 4096, 4096, 21) == refused and verdict(call.advise, 4096, 4096, 14) == allowed


def test_an_architecture_without_a_filter_is_named() -> None:
    assert "riscv64" in str(system_calls.fault_of_machine("riscv64"))
    assert system_calls.fault_of_machine(os.uname().machine) is None


def test_the_numbers_are_this_machines() -> None:
    """One call of each kind, by its number, is known to the kernel: none says that there is no such call."""
    if os.uname().machine != "x86_64":
        pytest.skip("numbers of x86-64")
    libc = ctypes.CDLL(None, use_errno=True)
    for name in ("memfd_create", "shmget", "msgget", "semget"):
        number = system_calls._REFUSED[name][0]
        assert number is not None
        libc.syscall(ctypes.c_long(number), ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(-1))
        assert ctypes.get_errno() != errno.ENOSYS, name


def test_a_program_that_forks_twice_is_gone_with_its_test() -> None:
    code = (
        "import os, signal, time\nfor number in (1, 2, 15): signal.signal(number, signal.SIG_IGN)\n"
        f"if not os.fork():\n    os.setsid()\n    if not os.fork():\n        open('{MARK}', 'w')\n"
        f"        import ctypes\n        ctypes.CDLL(None).prctl(15, b'{MARK[:8]}-twice')\n        "
        f"time.sleep(600)\n    os._exit(0)\n"
        f"while not os.path.exists('{MARK}'): pass\nprint(1)"
    )
    assert inside(code) == "1\n"
    names = [path.read_text() for path in Path("/proc").glob("[0-9]*/comm") if path.exists()]
    assert not any("-twice" in name for name in names)


def test_devices_are_there_to_be_found() -> None:
    assert any(stat.S_ISCHR(os.stat(each).st_mode) for each in DEVICES)
