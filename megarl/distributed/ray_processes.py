"""Processes and directory of a local Ray. Its processes run in their own sessions, no other user can enter
its directory, and a keeper cleans up both after the driver."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megarl import env
from megarl.distributed import ray_keeper
from megarl.distributed.leftovers import PREFIX, keep, owned_directory

logger = logging.getLogger(__name__)

# Maximum bytes of the path. Ray creates Unix sockets below it, whose paths may have about 107 bytes.
LONGEST_DIRECTORY = 40
# Name of Ray's directory inside the private one. Ray makes its own directory accessible to all users.
_OF_RAY = "ray"
_FAREWELL_SECONDS = ray_keeper.GRACE_SECONDS + 5.0


class LocalRay:
    """The processes and the directory of this process's local Ray.

    Attributes:
        private: directory that only this user can enter; removed with Ray unless ``MEGARL_KEEP_RAY_FILES`` is
            set.
        directory: Ray's own directory, inside ``private``.
    """

    def __init__(self, log_dir: str | None) -> None:
        self.private = _private_directory(log_dir)
        self.directory = self.private / _OF_RAY
        self._keeper = _start_keeper()
        if env.flag("MEGARL_KEEP_RAY_FILES"):
            keep(self.private)
        else:
            self._tell(f"{ray_keeper.DIRECTORY} {self.private}")

    @contextlib.contextmanager
    def own_sessions(self, on_start: Callable[[subprocess.Popen[Any]], None]) -> Iterator[None]:
        """Start each process that Ray starts inside the block in a new session, report the session to the
        keeper, and pass the process to ``on_start``.

        A terminal sends its signals to a whole process group, and so do many launchers. They would end Ray's
        processes at once, so a run that wants to save first would have no workers left. Ray has no option for
        this, so its function that starts processes is replaced temporarily.
        """
        services: Any = importlib.import_module("ray._private.services")
        start = getattr(services, "ConsolePopen", None)
        if self._keeper is None or start is None:
            if self._keeper is not None:
                logger.warning(
                    "this version of Ray starts its processes differently: a signal to the "
                    "driver's group ends them too"
                )
            yield
            return

        def started(*arguments: Any, **options: Any) -> Any:
            process = start(*arguments, **{**options, "start_new_session": True})
            # The id of a new session is the id of the process that started it.
            self._tell(f"{ray_keeper.SESSION} {process.pid}")
            on_start(process)
            return process

        services.ConsolePopen = started
        try:
            yield
        finally:
            services.ConsolePopen = start

    def keep_files(self) -> None:
        """Do not remove the directory, so that a person can read Ray's logs after a failure."""
        keep(self.private)
        self._tell(ray_keeper.DIRECTORY)

    def end(self) -> None:
        """Let the keeper end the remaining processes of a Ray that was shut down, and remove its directory.
        Waits for the keeper."""
        if self._keeper is None:
            return
        self._tell(ray_keeper.DONE)
        keeper, self._keeper = self._keeper, None
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):
            keeper.stdin.close()
        try:
            keeper.wait(_FAREWELL_SECONDS)
        except subprocess.TimeoutExpired:
            logger.warning(
                "processes of Ray are still ending; its directory %s is removed after that", self.private
            )

    def _tell(self, line: str) -> None:
        if self._keeper is not None and self._keeper.stdin is not None:
            # Ignore errors, because without a keeper Ray still ends with its driver, only later.
            with contextlib.suppress(OSError):
                self._keeper.stdin.write(os.fsencode(f"{line}\n"))
                self._keeper.stdin.flush()


def _private_directory(log_dir: str | None) -> Path:
    """Create a directory with mode 0700 in ``log_dir`` or the directory for temporary files; in ``/tmp`` if
    the path would be too long for Unix sockets."""
    wanted = (
        [log_dir]
        if log_dir is not None
        else [env.text("MEGARL_RAY_TEMP"), env.text("RAY_TMPDIR"), tempfile.gettempdir()]
    )
    for path in filter(None, wanted):
        parent = str(Path(path).expanduser().absolute())
        # mkdtemp appends eight letters.
        if len(os.fsencode(os.path.join(parent, f"{PREFIX}12345678", _OF_RAY))) > LONGEST_DIRECTORY:
            logger.warning(
                "Ray's own files are not written below %s: that is longer than the %d bytes Ray can use",
                parent,
                LONGEST_DIRECTORY,
            )
            continue
        try:
            Path(parent).mkdir(parents=True, exist_ok=True)
            return owned_directory(parent)
        except OSError as error:
            logger.warning("Ray's own files are not written below %s: %s", parent, error)
    return owned_directory("/tmp")


def _start_keeper() -> subprocess.Popen[bytes] | None:
    """Start the keeper and return its process; None if this is not Linux."""
    if sys.platform != "linux":
        return None
    # With -I -S, Python ignores the user's environment and site packages, and starts in milliseconds.
    command = [sys.executable, "-I", "-S", os.path.abspath(ray_keeper.__file__), str(os.getpid())]
    # Do not keep the driver's output pipes or working directory in use after the driver has ended.
    nothing = subprocess.DEVNULL
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing, cwd="/", start_new_session=True
    )
