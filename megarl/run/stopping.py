"""Requests to stop a run by signal, file or time limit. The run finishes its step, saves, and exits with a
code that tells the launcher to start it again.

Ctrl-C has an exit code of its own, and a closing terminal acts like SIGTERM. Ray's processes do not receive
signals to the driver's process group (``megarl.distributed.ray_processes``). A signal to a whole Slurm job
would reach them, so a launcher can set ``MEGARL_ATTEMPT_DIR`` instead: a file ``stop_requested`` there stops
the run, and the run writes the step of its last committed checkpoint there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from converters.files.atomic import rename_surely, write_bytes_durably
from megarl import env
from megarl.run.time_left import TimeLeft

logger = logging.getLogger(__name__)

STOPPED = 75
"""Exit code of a run that was stopped and can be resumed; EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C. It differs from ``STOPPED`` even if the run was saved, so that a launcher does not
start it again."""

STOP_FILE = "stop_requested"
LAST_CHECKPOINT_FILE = "last_checkpoint"
# ``sbatch --signal=B:USR1@SECONDS`` sends SIGUSR1. A terminal that closes sends SIGHUP.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# Warn if a step plus a save takes more than this share of the time between the launcher's stop request and
# its kill.
_SAFE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Attempt:
    """Settings that a launcher has passed to this launch.

    Attributes:
        directory: directory for files between launcher and run; None without a launcher.
        notice_s: seconds between the launcher's stop request and the end of the job; None if unknown.
    """

    directory: Path | None = None
    notice_s: int | None = None

    def checkpoint_committed(self, step: int) -> None:
        """Report the newest checkpoint to the launcher, in the file ``last_checkpoint``. A failed write is
        only logged."""
        if self.directory is None:
            return
        temporary = self.directory / f".{LAST_CHECKPOINT_FILE}.tmp"
        try:
            write_bytes_durably(temporary, f"{step}\n".encode())
            rename_surely(temporary, self.directory / LAST_CHECKPOINT_FILE)
        except OSError as error:
            logger.warning(
                "the launcher was not notified of the checkpoint of step %d, and may not requeue the job: %s",
                step,
                error,
            )


def this_attempt() -> Attempt:
    """Read the launcher's settings from ``MEGARL_ATTEMPT_DIR`` and ``MEGARL_STOP_NOTICE_S``."""
    directory = env.text("MEGARL_ATTEMPT_DIR")
    return Attempt(
        None if directory is None else Path(directory), env.integer("MEGARL_STOP_NOTICE_S", 0) or None
    )


class StopRequest:
    """The state of stop requests from signals, files and the time limit. The training loop reads it between
    steps; a signal outside of the loop ends the run at once."""

    def __init__(
        self, files: Sequence[Path] = (), notice_s: int | None = None, time_left: TimeLeft | None = None
    ) -> None:
        """Args:
        files: a stop is requested when one of these files exists.
        notice_s: seconds between a launcher's stop request and the end of the job.
        time_left: the launch's time limit; it requests a stop when another step does not fit."""
        self._files = tuple(files)
        self._notice_s = notice_s
        self._time_left = time_left
        self._signal: signal.Signals | None = None
        self._looping = False
        self.last_step: int | None = None
        """The step after which a stop that is requested now ends the run; None before the first step."""
        self._ended_with: int | None = None
        # After a terminal is closed, ``isatty`` returns False for its descriptor, so look now.
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    @property
    def reason(self) -> str | None:
        """Source of the request: a signal's name, a file's path, or a text about the time limit. None without
        a request."""
        if self._signal is not None:
            return self._signal.name
        file = next((str(path) for path in self._files if path.exists()), None)
        return file or (None if self._time_left is None else self._time_left.reason)

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was stopped and saved."""
        return INTERRUPTED if self._signal is signal.SIGINT else STOPPED

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Inside the block, let the first signal only set the request. A second signal ends the run at
        once."""
        self._looping = True
        try:
            yield
        finally:
            self._looping = False

    @contextmanager
    def keeping_exit_code(self) -> Iterator[None]:
        """Restore the exit code of a ``SystemExit`` that a signal raised. If the signal arrives inside a Ray
        call, Ray changes the code to 1."""
        try:
            yield
        except SystemExit as error:
            if self._ended_with is None or error.code == self._ended_with:
                raise
            raise SystemExit(self._ended_with) from None

    def step_took(self, seconds: float) -> None:
        """Record the duration of a step in seconds, including its validation but not its checkpoint."""
        if self._time_left is not None:
            self._time_left.took(step_s=seconds)

    def save_took(self, step_s: float, save_s: float) -> None:
        """Record the durations of a step and its save in seconds. Warn once if both hardly fit between a
        launcher's stop request and the end of the job."""
        if self._time_left is not None:
            self._time_left.took(save_s=save_s)
        if self._notice_s is None or step_s + save_s <= _SAFE_SHARE * self._notice_s:
            return
        logger.warning(
            "a step and a save took %.1f s + %.1f s, and this job is told to stop only %d s before its end "
            "(MEGARL_STOP_NOTICE_S): "
            "a stop may come too late and lose the step. Fix: submit with --signal=B:USR1@%d and "
            "MEGARL_STOP_NOTICE_S=%d",
            step_s,
            save_s,
            self._notice_s,
            *[int(2 * (step_s + save_s)) + 60] * 2,
        )
        self._notice_s = None

    def receive(self, number: int, frame: object) -> None:
        """Handle a signal; installed with ``signal.signal``."""
        if number == signal.SIGHUP:
            self._leave_terminals()
            if self._signal is not None:
                # A closing terminal causes two SIGHUPs, one from the kernel and one from the shell.
                return
        if not self._looping and self._signal is None:
            # Outside of the loop there is no unsaved progress, so end at once.
            _say(f"{signal.Signals(number).name}: stopping at once, outside of the training loop")
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            self._end(STOPPED)
        if self._signal is not None:
            _say(
                f"{signal.Signals(number).name} after {self._signal.name}: stopping at once, what came "
                "after the last checkpoint is lost"
            )
            self._end(128 + number)
        self._signal = signal.Signals(number)
        when = "before the first step" if self.last_step is None else f"after step {self.last_step}"
        _say(f"{self._signal.name}: stopping {when}; a second signal stops at once")

    def _end(self, code: int) -> NoReturn:
        self._ended_with = code
        raise SystemExit(code)

    def _leave_terminals(self) -> None:
        """Redirect output that goes to a terminal to /dev/null, because writing to a closed terminal
        fails."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._terminals:
            # A closed descriptor's number would be reused by the next opened file, so use dup2.
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def forget_files(self) -> None:
        """Delete the request files, so that they do not stop the next launch."""
        for path in self._files:
            path.unlink(missing_ok=True)


@contextmanager
def listening_for_stop(
    run_dir: Path, attempt: Attempt, time_left: TimeLeft | None = None
) -> Iterator[StopRequest]:
    """Yield a ``StopRequest`` that is set by SIGTERM, SIGUSR1, SIGINT or SIGHUP, by a file ``stop_requested``
    in the run directory or the attempt's directory, or by the time limit.

    A file in ``run_dir`` from an earlier launch is deleted first. The caller must hold the run's lock.
    Signals are handled only in the main thread, and only if the process does not ignore them (``nohup``
    ignores SIGHUP).
    """
    # Keep a file in the attempt's directory, because the launcher may have requested the stop before this
    # process started.
    (run_dir / STOP_FILE).unlink(missing_ok=True)
    directories = [run_dir] if attempt.directory is None else [run_dir, attempt.directory]
    request = StopRequest([directory / STOP_FILE for directory in directories], attempt.notice_s, time_left)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # Signals that the parent process ignores stay ignored, as ``nohup`` requires.
    heard = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, request.receive) for each in heard}
    try:
        with request.keeping_exit_code():
            yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _say(text: str) -> None:
    """Write a line directly to standard error. The interrupted code may hold the locks of buffered streams. A
    write error is ignored, because an exception in a signal handler would end the step."""
    with contextlib.suppress(OSError):
        os.write(2, f"megarl: {text}\n".encode())
