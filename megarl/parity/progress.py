"""Progress of the fuzzer: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from megarl.observe.step_line import format_seconds

LINE_SECONDS = 20.0


class CaseProgress:
    """Shows finished cases of ``total``. A context manager.

    Args:
        total: cases in all.
        console: where to write.
        what: what is counted, in a word.
        clock: monotonic seconds.
    """

    def __init__(self, total: int, console: Console, what: str = "cases", clock: Callable[[], float] = time.monotonic) -> None:
        self._total = total
        self._console = console
        self._what = what
        self._clock = clock
        self._done = self._failed = 0
        self._started = self._said = clock()
        self._bar: Progress | None = None

    def __enter__(self) -> CaseProgress:
        self._started = self._said = self._clock()
        if self._console.is_terminal:
            columns = (
                TextColumn(self._what),
                BarColumn(bar_width=None),
                MofNCompleteColumn(),
                TextColumn("{task.fields[failed]}"),
                TimeElapsedColumn(),
                TextColumn("ETA"),
                TimeRemainingColumn(),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, expand=True)
            self._bar.add_task("", total=self._total, failed="")
            self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, failed: bool) -> None:
        """One more is done."""
        self._done += 1
        self._failed += failed
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=self._done, failed=f"[red]{self._failed} failed[/]" if self._failed else "")
        elif self._clock() - self._said >= LINE_SECONDS:
            self._said = self._clock()
            self.say(self._line())

    def say(self, text: str, style: str | None = None) -> None:
        """A line of text, above the bar."""
        self._console.print(text, style=style, soft_wrap=True, highlight=False, markup=False)

    def _line(self) -> str:
        elapsed = self._clock() - self._started
        remaining = elapsed / self._done * (self._total - self._done)
        failed = f"  {self._failed} failed" if self._failed else ""
        return f"{self._done}/{self._total} {self._what}{failed}  {format_seconds(elapsed)}  ETA {format_seconds(remaining)}"
