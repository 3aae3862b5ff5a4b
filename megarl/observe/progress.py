"""Progress of what takes long and has no steps: the phases of a start, exports.

On a terminal the phase under way is one live line; elsewhere it is a plain line every few seconds. Each phase
leaves one line that says what was done and how long it took.
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
"""Seconds between two lines of a phase where no terminal shows it live."""


class Phase:
    """One phase under way.

    Args:
        title: in a word or two.
        unit: what is counted, in the plural; empty where nothing is.
        total: how many there will be; None where nobody knows.

    Attributes:
        rest_s: seconds that are left, where whoever counts knows better than by the mean pace.
    """

    def __init__(self, title: str, unit: str = "", total: int | None = None) -> None:
        self.title, self.unit, self.total = title, unit, total
        self.done = 0
        self.detail = ""
        self.begun = time.monotonic()
        self.rest_s: float | None = None

    def advance(self, number: int = 1) -> None:
        """Count what has been done."""
        self.done += number

    def text(self) -> str:
        """Return title, count and detail, without the time."""
        counted = f"{self.done:,}" if self.total is None else f"{self.done:,} of {self.total:,}"
        parts = [f"{counted} {self.unit}" if self.unit else "", self.detail]
        said = ", ".join(part for part in parts if part)
        return f"{self.title}: {said}" if said else self.title

    def time(self) -> str:
        """Return the time so far and, once a part of all is done, what the rest takes at that pace."""
        elapsed = time.monotonic() - self.begun
        rest_s = self.rest_s
        if rest_s is None and self.done:
            rest_s = elapsed / self.done * max((self.total or 0) - self.done, 0)
        return format_seconds(elapsed) + (f", ETA {format_seconds(rest_s)}" if rest_s else "")


class ProgressConsole:
    """Shows the phases that are under way, of which one may contain another.

    Args:
        console: where to write; standard output when None.
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
        # rich answers a closed pipe with SystemExit; nobody watching is no reason to stop
        except (OSError, SystemExit) as error:
            self._is_closed = True
            logger.warning("nothing more is shown, the console cannot be written: %s", error)

    @contextlib.contextmanager
    def phase(self, phase: Phase, *, is_told: bool = True) -> Iterator[Phase]:
        """Show a phase while the block runs.

        Args:
            phase: that is shown.
            is_told: leave a line of it in the end.
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
            # Transient: what stays of a phase is the line that phase() writes in the end.
            self._live = Progress(*columns, console=self._console, transient=True)
            self._live.start()
        live = self._live
        task = live.add_task("", phase=phase)
        try:
            yield
        finally:
            # the terminal may be gone
            with contextlib.suppress(OSError):
                live.remove_task(task)
                # The outermost phase is the one that began the live display.
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
            # No line may come after the one that ends the phase.
            teller.join()

    def _tell(self, phase: Phase, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            # the inner one of two speaks
            if self._open[-1:] == [phase]:
                self.say(f"{phase.text()} ... {phase.time()}")


class _PhaseText(ProgressColumn):
    """Text of a phase, as it is when the line is drawn."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["phase"].text())


class _PhaseBar(ProgressColumn):
    """Bar of a phase whose end is known; nothing for any other."""

    def render(self, task: Task) -> RenderableType:
        phase: Phase = task.fields["phase"]
        return ProgressBar(phase.total, phase.done, width=24) if phase.total else ""


class _PhaseTime(ProgressColumn):
    """Time of a phase, and what is left of it where that is known."""

    def render(self, task: Task) -> Text:
        return Text(task.fields["phase"].time())


_shown: list[ProgressConsole] = []


@contextlib.contextmanager
def progress_shown(console: ProgressConsole) -> Iterator[ProgressConsole]:
    """Show phases that begin inside the block; outside of any such block, as in a library, nothing is
    shown."""
    _shown.append(console)
    try:
        yield console
    finally:
        _shown.remove(console)


@contextlib.contextmanager
def phase(title: str, unit: str = "", total: int | None = None, *, is_told: bool = True) -> Iterator[Phase]:
    """Show what the block does, if anybody watches. Arguments as of ``Phase`` and
    ``ProgressConsole.phase``."""
    if not _shown:
        yield Phase(title, unit, total)
        return
    with _shown[-1].phase(Phase(title, unit, total), is_told=is_told) as found:
        yield found


def note(text: str) -> None:
    """Write a line of progress, if anybody watches."""
    if _shown:
        _shown[-1].say(text)
