"""Requests to stop a run, by signal, by file or by the clock: it finishes its step, saves, and exits with a
code
that says "start me again".

Ctrl-C is such a request too, with the exit code that shells know; a closing terminal counts like SIGTERM.
Signals to the driver's group do not reach Ray's processes (``megarl.distributed.ray_processes``).

A launcher that needs more than a signal sets ``MEGARL_ATTEMPT_DIR``: a file ``stop_requested`` there stops
the
run too, and the run writes there the step of the last checkpoint that it committed. A signal to a whole Slurm
job would end Ray's processes, whatever their group; a file reaches only the driver.
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
"""Exit code of a run that can continue: EX_TEMPFAIL of sysexits.h."""

INTERRUPTED = 128 + signal.SIGINT
"""Exit code after Ctrl-C, even if the run was saved: the user does not want another start."""

STOP_FILE = "stop_requested"
LAST_CHECKPOINT_FILE = "last_checkpoint"
# sbatch --signal=B:USR1@SECONDS sends SIGUSR1, and a terminal that closes sends SIGHUP.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A step and a save may take this share of the notice that a launcher gives, before the run warns that the
# notice may be too short.
_SAFE_SHARE = 0.8


@dataclass(frozen=True, slots=True)
class Attempt:
    """A launcher's settings for this start of the run.

    Attributes:
        directory: where launcher and run leave files for one another; None without a launcher.
        notice_s: seconds between the launcher's request to stop and the end of the machines; None if unknown.
    """

    directory: Path | None = None
    notice_s: int | None = None

    def checkpoint_committed(self, step: int) -> None:
        """Tell the launcher that another start would continue after ``step``. A failed write does not end the
        run."""
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
    """Return the launcher's settings from the environment: ``MEGARL_ATTEMPT_DIR`` and
    ``MEGARL_STOP_NOTICE_S``."""
    directory = env.text("MEGARL_ATTEMPT_DIR")
    return Attempt(
        None if directory is None else Path(directory), env.integer("MEGARL_STOP_NOTICE_S", 0) or None
    )


class StopRequest:
    """Requests to stop the run, from any source. The loop checks for one between steps; a signal outside of
    the loop ends the run at once."""

    def __init__(
        self, files: Sequence[Path] = (), notice_s: int | None = None, time_left: TimeLeft | None = None
    ) -> None:
        """Args:
        files: each is a request once it exists.
        notice_s: seconds that a launcher leaves between its request and the end.
        time_left: of this launch; a request once another step does not fit into it.
        """
        self._files = tuple(files)
        self._notice_s = notice_s
        self._time_left = time_left
        self._signal: signal.Signals | None = None
        self._looping = False
        self._ended_with: int | None = None
        # Look for terminals now: once a terminal is closed, its descriptor no longer shows that it was one.
        self._terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    @property
    def reason(self) -> str | None:
        """Source of the request, for example ``"SIGUSR1"`` or the path of a file; None without a request."""
        if self._signal is not None:
            return self._signal.name
        file = next((str(path) for path in self._files if path.exists()), None)
        return file or (None if self._time_left is None else self._time_left.reason)

    @property
    def exit_code(self) -> int:
        """Exit code of a run that was stopped by this request and saved."""
        return INTERRUPTED if self._signal is signal.SIGINT else STOPPED

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Defer the first signal inside the block: it only sets the request, which the block checks. A second
        signal ends the run at once."""
        self._looping = True
        try:
            yield
        finally:
            self._looping = False

    @contextmanager
    def keeping_exit_code(self) -> Iterator[None]:
        """Keep the intended exit code of whatever ends the block at once. Inside a call of Ray it would be 1,
        whatever was raised."""
        try:
            yield
        except SystemExit as error:
            if self._ended_with is None or error.code == self._ended_with:
                raise
            raise SystemExit(self._ended_with) from None

    def step_took(self, seconds: float) -> None:
        """Record the seconds of a step, with everything that belongs to it except its checkpoint."""
        if self._time_left is not None:
            self._time_left.took(step_s=seconds)

    def save_took(self, step_s: float, save_s: float) -> None:
        """Record the seconds of a step and of its save. Warn once if both hardly fit between a launcher's
        request and the end."""
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
        """Handle a signal."""
        if number == signal.SIGHUP:
            self._leave_terminals()
            if self._signal is not None:
                # A closing terminal causes several signals: the kernel and the shell each send one.
                return
        if not self._looping and self._signal is None:
            # Outside of the loop there is nothing to save: all progress is in the checkpoints already.
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
        _say(f"{self._signal.name}: stopping after this step; a second signal stops at once")

    def _end(self, code: int) -> NoReturn:
        self._ended_with = code
        raise SystemExit(code)

    def _leave_terminals(self) -> None:
        """Redirect output to a terminal to nowhere: the terminal is gone, and every write to it would be an
        error."""
        nowhere = os.open(os.devnull, os.O_RDWR)
        for descriptor in self._terminals:
            # Use dup2 instead of close: the next file that is opened would take a closed descriptor.
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

    def forget_files(self) -> None:
        """Remove the files: the request was handled, and must not stop the next start."""
        for path in self._files:
            path.unlink(missing_ok=True)


@contextmanager
def listening_for_stop(
    run_dir: Path, attempt: Attempt, time_left: TimeLeft | None = None
) -> Iterator[StopRequest]:
    """Yield a request that is set by SIGTERM, SIGUSR1, SIGINT, SIGHUP, the file ``stop_requested`` in the
    run's or the attempt's directory, or the end of the launch's time.

    A file in ``run_dir`` that is older than this start is ignored. The caller holds the run's lock. Signals
    are received only in the main thread, and only those that this process was not started to ignore, as by
    ``nohup``.
    """
    # Keep the attempt's file: a launcher may have requested a stop before this process was up.
    (run_dir / STOP_FILE).unlink(missing_ok=True)
    directories = [run_dir] if attempt.directory is None else [run_dir, attempt.directory]
    request = StopRequest([directory / STOP_FILE for directory in directories], attempt.notice_s, time_left)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # Signals that the caller ignores stay ignored, as nohup requires.
    heard = [each for each in _SIGNALS if signal.getsignal(each) is not signal.SIG_IGN]
    before = {each: signal.signal(each, request.receive) for each in heard}
    try:
        with request.keeping_exit_code():
            yield request
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _say(text: str) -> None:
    """Write a line to standard error, bypassing buffers and locks that the interrupted code may hold. If the
    reader is gone, nothing is written, because an error in a signal handler would end the step that the run
    is to finish."""
    with contextlib.suppress(OSError):
        os.write(2, f"megarl: {text}\n".encode())
