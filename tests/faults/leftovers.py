"""What a run has left behind when its driver is gone: processes with their sockets, shared memory, files of
Ray and temporary ones.

Others work on the same machine at the same time. What belongs to a run is known by a variable that all its
processes inherit, and by a temporary directory of its own; a piece of shared memory counts where it is new
and no living process has it open or mapped.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

from megarl.checkpoint.background import memory_of

VARIABLE = "MEGARL_TEST_RUN"
SHARED_MEMORY = Path("/dev/shm")
PATIENCE_S = 30.0
"""That what ends by itself may take after the driver."""
_LOOK_S = 0.2
_UNFINISHED = re.compile(r"tmp_.*|\..*\.partial.*|\..*\.tmp|.*_replacement")
# the temporary directory is short, for the sockets of Ray are in it
_PARENT = "/tmp"


class Footprint:
    """Looks after a run what is there that was not there before; a context, at whose end its temporary
    directory is removed.

    Attributes:
        marker: value of ``VARIABLE`` in all its processes.
        directory: its temporary one.
        orders: where faults are ordered (``tests/faults/seam``).
    """

    def __init__(self) -> None:
        self.marker = secrets.token_hex(8)
        self._both = Path(tempfile.mkdtemp(prefix="f", dir=_PARENT))
        self.directory, self.orders = self._both / "t", self._both / "o"
        self.directory.mkdir()
        self.orders.mkdir()
        self._shared = set(SHARED_MEMORY.iterdir())

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of the run."""
        directory = str(self.directory)
        return {
            VARIABLE: self.marker,
            "TMPDIR": directory,
            "MEGARL_RAY_TEMP": directory,
            "MEGARL_TEST_FAULTS": str(self.orders),
        }

    def __enter__(self) -> Footprint:
        return self

    def __exit__(self, *unused: object) -> None:
        shutil.rmtree(self._both, ignore_errors=True)

    def processes(self) -> dict[int, str]:
        """Living processes of the run by number: command line and the ports that they listen on."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):
                if (
                    process.status() != psutil.STATUS_ZOMBIE
                    and process.environ().get(VARIABLE) == self.marker
                ):
                    ports = sorted(
                        each.laddr.port
                        for each in process.net_connections("inet")
                        if each.status == psutil.CONN_LISTEN
                    )
                    found[process.pid] = " ".join(process.cmdline())[:200] + (
                        f" listens on {ports}" if ports else ""
                    )
        return found

    def shared_memory(self, run_dir: Path) -> list[str]:
        """New files in shared memory that nobody holds, but for checkpoints of other runs that wait there."""
        checkpoints = memory_of((run_dir / "checkpoints").absolute()).name
        others = {
            path
            for path in SHARED_MEMORY.glob(f"{checkpoints.rpartition('-')[0]}-*")
            if not path.name.startswith(checkpoints)
        }
        new = {path for path in set(SHARED_MEMORY.iterdir()) - self._shared - others if _is_own(path)}
        return sorted(str(path) for path in new - _held()) if new else []

    def files(self, run_dir: Path) -> list[str]:
        """Files and directories in the temporary directory, and unfinished ones in the run's."""
        there = [str(path) for path in self.directory.iterdir()]
        if run_dir.is_dir():
            there += [str(path) for path in run_dir.rglob("*") if _UNFINISHED.fullmatch(path.name)]
        return sorted(there)

    def left(self, run_dir: Path, patience_s: float | None = None) -> list[str]:
        """What is still there after a while; empty for nothing."""
        looks: dict[str, Callable[[], object]] = {
            "processes": self.processes,
            "shared memory": lambda: self.shared_memory(run_dir),
            "files": lambda: self.files(run_dir),
        }
        end = time.monotonic() + (PATIENCE_S if patience_s is None else patience_s)
        while True:
            found = [f"{name}: {seen}" for name, look in looks.items() if (seen := look())]
            if not found or time.monotonic() > end:
                return found
            time.sleep(_LOOK_S)


def _is_own(path: Path) -> bool:
    try:
        return path.lstat().st_uid == os.getuid()
    except OSError:
        return False


def _held() -> set[Path]:
    """Files in shared memory that some process has open or mapped."""
    held: set[Path] = set()
    for process in Path("/proc").iterdir():
        if not process.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            held |= {
                Path(line.split(maxsplit=5)[5])
                for line in (process / "maps").read_text().splitlines()
                if " /dev/shm/" in line
            }
        with contextlib.suppress(OSError):
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    held.add(Path(os.readlink(descriptor)))
    return held
