"""Ways out of the sandbox of a program: each is tried, inside and, to show that it would be one, outside.

A probe writes ``reached`` when it has got at something. The control runs the same text as a bare process,
without sandbox and limits; those that only root can do are skipped where the tests are not root.
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
from typing import Any

import pytest

from megarl.errors import RewardError
from megarl.rollout.programs import Limits, sandbox, system_calls
from megarl.rollout.programs.conversation import INSIDE
from megarl.rollout.programs.process import fault_of_isolation, file_of, python_command, running, text_in
from tests.tables import read_table
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(
    fault_of_isolation() is not None, reason=f"no sandbox here: {fault_of_isolation()}"
)
BUBBLEWRAP = shutil.which("bwrap") or ""
needs_bubblewrap = pytest.mark.skipif(
    not BUBBLEWRAP or bool(fault_of_isolation(BUBBLEWRAP)), reason="bubblewrap is not here, or may not"
)
MARK = f"megarl-escape-{os.getpid()}"
CALLS = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    given = (number, *arguments)
    return libc.syscall(*(ctypes.c_long(each) if isinstance(each, int) else each for each in given))
def numbers(**calls):
    return calls[os.uname().machine]
"""
DEVICES = [
    str(path)
    for path in Path("/dev").rglob("*")
    if path.name not in {"null", "full", "random", "urandom"}
    and (path.is_block_device() or path.is_char_device())
]

PROBES: dict[str, dict[str, Any]] = read_table("escapes.yaml")["probes"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, object]]:
    """Things to be reached: a secret, sockets that listen, a process with a secret in its environment and its
    command."""
    directory = tmp_path_factory.mktemp("machine")
    secret = directory / "secret"
    secret.write_text("secret")
    victim = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", MARK], env={"SECRET": MARK}
    )
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
    code = textwrap.indent(PROBES[name]["program"].format(**machine), "    ")
    start = f"import fcntl, mmap, socket, stat, struct, subprocess, threading, time\n{CALLS}kept = []\n"
    reach = "def reach():\n    print('reached', flush=True)\n    os._exit(0)\n"
    connect = (
        "def connect(family, address):\n    kept.append(socket.socket(family))\n    "
        "kept[-1].settimeout(5)\n    kept[-1].connect(address)\n    return 1\n"
    )
    return (
        f"{start}{reach}{connect}try:\n{code}\nexcept Exception as error:\n    print('refused', "
        "type(error).__name__, error)\n"
    )


def inside(code: str, limits: Limits | None = None) -> str:
    """What a program writes in the sandbox."""
    task = json.dumps(
        {
            "code": code,
            "packages": site.getsitepackages(),
            "function": "",
            "given_names": [],
            "given_modules": [],
        }
    )
    with file_of(task) as source, file_of() as given, file_of() as written:
        command = python_command(INSIDE, str(source.fileno()), "-1", "-1")
        with running(
            command, limits or Limits(20.0, memory_mb=768), given, written, (source.fileno(),)
        ) as started:
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
    if PROBES[name].get("root") and os.geteuid() != 0:
        pytest.skip("only root can do it")
    command = [sys.executable, "-c", probe(name, machine)]
    found = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, close_fds=False, check=False
    )
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
def test_without_its_filter_the_sandbox_has_holes(
    name: str, machine: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above see what the filter does, and not something else."""
    monkeypatch.setattr(sandbox, "close_system_calls", lambda *_: None)
    assert "reached" in inside(probe(name, machine))


@needs_bubblewrap
def test_what_bubblewrap_makes_is_read_only_bounded_and_without_rights() -> None:
    limits = Limits(20.0, file_mb=2, bubblewrap=BUBBLEWRAP)
    assert inside(
        "import os\nprint(sorted(os.listdir('/dev')), os.path.exists('/proc'), os.getpid())", limits
    ) == ("['full', 'null', 'random', 'shm', 'urandom'] False 1\n")
    for place in ("/", "/dev", "/usr", os.path.dirname(os.__file__)):
        assert (
            inside(f"try: open({place!r} + '/x', 'w')\nexcept OSError as error: print(error.errno)", limits)
            == f"{errno.EROFS}\n"
        )
    fill = "for each in range(9): open(f'/dev/shm/{each}', 'wb', buffering=0).write(bytes(1 << 18))\nprint(1)"
    assert (inside(fill, limits), inside(fill, Limits(20.0, file_mb=4, bubblewrap=BUBBLEWRAP))) == ("", "1\n")


@needs_bubblewrap
def test_bubblewrap_that_starts_nothing_says_why(tmp_path: Path) -> None:
    """As where a profile of the system lets it start but not make namespaces."""
    for script, said in (
        ("#!/bin/sh\necho no namespaces >&2\nexit 1", "no namespaces"),
        ("#!/bin/sh\nexit 3", "exit code 3"),
    ):
        fails = tmp_path / "bwrap"
        fails.write_text(script)
        fails.chmod(0o755)
        with pytest.raises(RewardError, match=said):
            inside("print(1)", Limits(20.0, bubblewrap=str(fails)))


def test_the_root_holds_python_and_libraries_alone() -> None:
    listing = (
        "import os\nprint(sorted(os.listdir('/')), sorted(os.listdir('/etc')), os.listdir('/tmp'), "
        "sorted(os.listdir('/dev')))"
    )
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
        command = python_command(
            "import sys; sys.stdin.read(); print('started', flush=True); __import__('time').sleep(600)"
        )
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
        (
            "x86_64",
            0xC000003E,
            {
                "read": 0,
                "memfd": 319,
                "socket": 41,
                "clone": 56,
                "mmap": 9,
                "fcntl": 72,
                "set": 54,
                "advise": 28,
            },
        ),
        (
            "aarch64",
            0xC00000B7,
            {
                "read": 63,
                "memfd": 279,
                "socket": 198,
                "clone": 220,
                "mmap": 222,
                "fcntl": 25,
                "set": 208,
                "advise": 233,
            },
        ),
    ],
)
def test_the_filter_on_both_architectures(machine: str, architecture: int, names: dict[str, int]) -> None:
    """Other architectures' calls, which a processor runs too, are refused, whatever their numbers mean
    here."""
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
    assert [verdict(call.mmap, 0, 4096, 3, flags) for flags in (0x22, 0x01, 0x02, 0x21)] == [allowed] * 3 + [
        refused
    ]
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
        libc.syscall(
            ctypes.c_long(number), ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(-1), ctypes.c_long(-1)
        )
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
