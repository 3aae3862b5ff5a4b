"""Progress display for long work without steps, such as the start of a run or an export.

A terminal shows the current phase as a live line; elsewhere a plain line is written every few seconds. At its
end each phase leaves one line with its result and duration.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task
from rich.progress_bar import ProgressBar
from rich.text import Text

from megarl.observe.step_line import format_seconds

logger = logging.getLogger(__name__)

EVERY_S = 5.0
"""Default seconds between two plain lines of a phase."""


class Phase:
    """A running phase. The caller updates ``done`` and ``detail``.

    Args:
        title: a word or two.
        unit: plural noun of what is counted; empty if nothing is.
        total: number of units; None if unknown.

    Attributes:
        rest_s: remaining seconds, if the caller has a better estimate than the mean pace.
    """

    def __init__(self, title: str, unit: str = "", total: int | None = None) -> None:
        self.title, self.unit, self.total = title, unit, total
        self.done = 0
        self.detail = ""
        self.begun = time.monotonic()
        self.rest_s: float | None = None

    def advance(self, number: int = 1) -> None:
        """Add to the number of finished units."""
        self.done += number

    def text(self) -> str:
        """Return title, count and detail, without times."""
        counted = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        parts = [f"{counted} {self.unit}" if self.unit else "", self.detail]
        progress = ", ".join(filter(None, parts))
        return f"{self.title}: {progress}" if progress else self.title

    def time(self) -> str:
        """Return the elapsed time and, once a unit is finished, the estimated remaining time."""
        elapsed = time.monotonic() - self.begun
        rest_s = self.rest_s
        if rest_s is None and self.done:
            # Extrapolate from the mean pace.
            rest_s = elapsed / self.done * max((self.total or 0) - self.done, 0)
        return format_seconds(elapsed) + (f", ETA {format_seconds(rest_s)}" if rest_s else "")


class ProgressConsole:
    """Shows the running phases, which may be nested.

    Args:
        console: output; None for standard output.
        every_s: seconds between two plain lines.
    """

    def __init__(self, console: Console | None = None, every_s: float = EVERY_S) -> None:
        self._console = console or Console(highlight=False)
        self._every_s = every_s
        self._open: list[Phase] = []
        self._live: Progress | None = None
        self._is_closed = False

    def say(self, text: str, style: str = "dim") -> None:
        """Write a line."""
        if self._is_closed:
            return
        try:
            self._console.print(Text(text, style=style), soft_wrap=True)
        # rich raises SystemExit when the pipe is closed, but the run must continue.
        except (OSError, SystemExit) as error:
            self._is_closed = True
            logger.warning("nothing more is shown, the console cannot be written: %s", error)

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, is_told: bool = True) -> Iterator[Phase]:
        """Show a phase during the block.

        Args:
            phase: the phase.
            is_told: write a line with the result and duration at the end.
        """
        self._open.append(phase)
        try:
            with self._live_line(phase) if self._console.is_terminal else self._plain_lines(phase):
                yield phase
        finally:
            self._open.pop()
        if is_told:
            self.say(f"{phase.text()}  {phase.time()}")

    @contextlib.contextmanager
    def _live_line(self, phase: Phase) -> Iterator[None]:
        if self._live is None:
            columns = SpinnerColumn(), _PhaseText(), _PhaseBar(), _PhaseTime()
            # Transient: only the final line that ``phase`` writes remains.
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.start()
        live = self._live
        task = live.add_task("", phase=phase)
        try:
            yield
        finally:
            # The terminal may be gone.
            with contextlib.suppress(OSError):
                live.remove_task(task)
                # Nested phases share the live display, so only the outermost one stops it.
                if len(self._open) == 1:
                    self._live = None
                    live.stop()

    @contextlib.contextmanager
    def _plain_lines(self, phase: Phase) -> Iterator[None]:
        ended = threading.Event()
        teller = threading.Thread(
            target=self._tell, args=(phase, ended), name=f"progress of {phase.title}", daemon=True
        )
        teller.start()
        try:
            yield
        finally:
            ended.set()
            # Join the thread, so that it writes no line after the final one.
            teller.join()

    def _tell(self, phase: Phase, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            # Only the innermost phase writes progress lines.
            if self._open[-1:] == [phase]:
                self.say(f"{phase.text()} ... {phase.time()}")


class _PhaseText(ProgressColumn):
    """Column with the current text of a phase."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["phase"].text())


class _PhaseBar(ProgressColumn):
    """Column with a progress bar; empty for a phase whose total is unknown."""

    def render(self, task: Task) -> RenderableType:
        phase: Phase = task.fields["phase"]
        return ProgressBar(phase.total, phase.done, width=24) if phase.total else ""


class _PhaseTime(ProgressColumn):
    """Column with the elapsed and remaining time."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["phase"].time())


_shown: list[ProgressConsole] = []


@contextlib.contextmanager
def progress_shown(console: ProgressConsole) -> Iterator[ProgressConsole]:
    """Show the phases that start inside the block. Without such a block, as when megarl is used as a library,
    phases are silent."""
    _shown.append(console)
    try:
        yield console
    finally:
        _shown.remove(console)


@contextlib.contextmanager
def phase(title: str, unit: str = "", total: int | None = None, *, is_told: bool = True) -> Iterator[Phase]:
    """Run the block as a phase, shown if a ``progress_shown`` block is active. Arguments as in ``Phase`` and
    ``ProgressConsole.phase``."""
    if not _shown:
        yield Phase(title, unit, total)
        return
    with _shown[-1].phase(Phase(title, unit, total), is_told=is_told) as found:
        yield found


def note(text: str) -> None:
    """Write a line if a ``progress_shown`` block is active."""
    if _shown:
        _shown[-1].say(text)
