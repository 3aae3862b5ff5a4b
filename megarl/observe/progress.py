"""Progress of long work that has no steps, such as the phases of a start, or an export.

On a terminal the current phase is one live line; elsewhere a plain line is written every few seconds. Each
finished phase leaves one line with what was done and how long it took.
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
"""Seconds between two plain lines of a phase, if no terminal shows the phase live."""


class Phase:
    """One running phase.

    Args:
        title: a word or two.
        unit: the unit that is counted, in the plural; empty if nothing is counted.
        total: number of units in all; None if it is unknown.

    Attributes:
        rest_s: remaining seconds, if the caller knows better than an estimate from the mean pace.
    """

    def __init__(self, title: str, unit: str = "", total: int | None = None) -> None:
        self.title, self.unit, self.total = title, unit, total
        self.done = 0
        self.detail = ""
        self.begun = time.monotonic()
        self.rest_s: float | None = None

    def advance(self, number: int = 1) -> None:
        """Add ``number`` to the units done."""
        self.done += number

    def text(self) -> str:
        """Return title, count and detail, without the time."""
        counted = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        parts = [f"{counted} {self.unit}" if self.unit else "", self.detail]
        progress = ", ".join(filter(None, parts))
        return f"{self.title}: {progress}" if progress else self.title

    def time(self) -> str:
        """Return the elapsed time and, once some units are done, the estimated remaining time."""
        elapsed = time.monotonic() - self.begun
        rest_s = self.rest_s
        if rest_s is None and self.done:
            rest_s = elapsed / self.done * max((self.total or 0) - self.done, 0)
        return format_seconds(elapsed) + (f", ETA {format_seconds(rest_s)}" if rest_s else "")


class ProgressConsole:
    """Display of the running phases, which may be nested.

    Args:
        console: where to write; standard output if None.
        every_s: seconds between two plain lines.
    """

    def __init__(self, console: Console | None = None, every_s: float = EVERY_S) -> None:
        self._console = console or Console(highlight=False)
        self._every_s = every_s
        self._open: list[Phase] = []
        self._live: Progress | None = None
        self._is_closed = False

    def say(self, text: str, style: str = "dim") -> None:
        """Write one line."""
        if self._is_closed:
            return
        try:
            self._console.print(Text(text, style=style), soft_wrap=True)
        # rich responds to a closed pipe with SystemExit, but the run has to continue without an observer.
        except (OSError, SystemExit) as error:
            self._is_closed = True
            logger.warning("nothing more is shown, the console cannot be written: %s", error)

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, is_told: bool = True) -> Iterator[Phase]:
        """Show a phase while the context is active.

        Args:
            phase: the phase to show.
            is_told: leave a line about the phase at its end.
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
            # Make the display transient: what remains of a phase is the line that phase() writes at its end.
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.start()
        live = self._live
        task = live.add_task("", phase=phase)
        try:
            yield
        finally:
            # Ignore errors, because the terminal may be gone.
            with contextlib.suppress(OSError):
                live.remove_task(task)
                # The outermost phase started the live display, and therefore ends it.
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
            # Wait for the thread, so that no line follows the one that ends the phase.
            teller.join()

    def _tell(self, phase: Phase, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            # If phases are nested, only the innermost one reports.
            if self._open[-1:] == [phase]:
                self.say(f"{phase.text()} ... {phase.time()}")


class _PhaseText(ProgressColumn):
    """Column with the text of a phase at the time of drawing."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["phase"].text())


class _PhaseBar(ProgressColumn):
    """Column with the bar of a phase whose total is known; empty for any other phase."""

    def render(self, task: Task) -> RenderableType:
        phase: Phase = task.fields["phase"]
        return ProgressBar(phase.total, phase.done, width=24) if phase.total else ""


class _PhaseTime(ProgressColumn):
    """Column with the elapsed time of a phase, and its remaining time if that is known."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["phase"].time())


_shown: list[ProgressConsole] = []


@contextlib.contextmanager
def progress_shown(console: ProgressConsole) -> Iterator[ProgressConsole]:
    """Show the phases that begin inside the context. Outside of such a context, as in a library, nothing is
    shown."""
    _shown.append(console)
    try:
        yield console
    finally:
        _shown.remove(console)


@contextlib.contextmanager
def phase(title: str, unit: str = "", total: int | None = None, *, is_told: bool = True) -> Iterator[Phase]:
    """Show the context as a phase, if a console shows progress. The arguments are those of ``Phase`` and
    ``ProgressConsole.phase``."""
    if not _shown:
        yield Phase(title, unit, total)
        return
    with _shown[-1].phase(Phase(title, unit, total), is_told=is_told) as found:
        yield found


def note(text: str) -> None:
    """Write a line, if a console shows progress."""
    if _shown:
        _shown[-1].say(text)
