"""Console output of a run: one line per step and, on a terminal, a progress bar."""

from __future__ import annotations

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.text import Text

from megarl.observe.progress import Phase, ProgressConsole, phase
from megarl.observe.step_line import (
    EPISODES,
    REWARD_FAULTS,
    format_number,
    format_seconds,
    step_fields,
    throughput_line,
)

logger = logging.getLogger(__name__)

_PLAIN_WIDTH = 100
_ETA_WINDOW = 20
# The first step also compiles, allocates and connects, so exclude it from the throughput.
_STEADY_STEP = 2
_STYLES = {
    "progress": "bold",
    "loss": "cyan",
    "reward": "bold green",
    "fault": "bold yellow",
    "grad": "yellow",
    "time": "white",
    "phases": "dim",
    "throughput": "magenta",
    "eta": "bright_black",
}

# Every validation set logs a metric with this suffix, from which the sets' names are found.
_OF_A_SET = "/samples"


class TrainingConsole:
    """Console output of a run. On a terminal it shows coloured lines above a live progress bar; in a pipe or
    file it writes plain lines, whose optional parts are omitted beyond 100 columns.

    Use it as a context manager, or call ``start`` and ``finish``. If an exception ends the block, the
    terminal is restored.
    """

    def __init__(
        self,
        total_steps: int,
        title: str,
        quiet: bool = False,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Args:
        total_steps: number of the run's last step, also if the run is resumed.
        title: short description of what is trained.
        quiet: show nothing.
        console: output; None for standard output.
        clock: returns monotonic seconds."""
        self._total_steps = total_steps
        self._title = title
        self._quiet = quiet
        # By default rich colours every number in a line.
        self._console = console or Console(highlight=False)
        self._clock = clock
        self._recent_seconds: deque[float] = deque(maxlen=_ETA_WINDOW)
        self._started_at = self._last_step_at = clock()
        self._last_step: int | None = None
        self._steps = 0
        self._performance: dict[str, float] = {}
        self._first_step = 0
        self._finished = False
        self._under_way = ExitStack()
        self._phase: Phase | None = None

    def start(self, first_step: int = 0) -> None:
        """Show the title and, on a terminal, the progress bar.

        Args:
            first_step: number of steps that earlier launches have finished.
        """
        self._started_at = self._last_step_at = self._clock()
        self._first_step = first_step
        if self._quiet:
            return
        text = Text(self._title, style="bold")
        resumed = f", resumed after step {first_step}" if first_step else ""
        self._print(text.append(f"  {self._total_steps} steps{resumed}", style="dim"))
        if self._console.is_terminal:
            live = ProgressConsole(self._console).phase(
                Phase("training", "steps", self._total_steps), is_told=False
            )
            self._phase = self._under_way.enter_context(live)
            # Show no ETA until a step has been measured.
            self._phase.done, self._phase.rest_s = first_step, 0.0
        else:
            # In a pipe, show progress lines during the first step, which may take minutes.
            self._phase = self._under_way.enter_context(phase(f"step {first_step + 1}", is_told=False))

    def working_on(self, name: str) -> None:
        """Show the name of the running phase of a step; an empty name shows none."""
        if self._phase is not None:
            self._phase.detail = name

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the line of a finished step.

        Args:
            step: number of the step, from 1 to ``total_steps``.
            metrics: the step's row, with prefixes (``train/loss``, ``timing/step_s``). Missing metrics are
                omitted.
        """
        now = self._clock()
        self._recent_seconds.append(now - self._last_step_at)
        self._last_step_at, self._last_step = now, step
        self._steps += 1
        self._add_performance(metrics)
        # From now on the step lines show progress.
        if not self._console.is_terminal:
            self._under_way.close()
        if self._quiet:
            return
        # Use the median, because steps with a validation or a save take longer than the others.
        remaining_s = max(self._total_steps - step, 0) * statistics.median(self._recent_seconds)
        # A terminal shows the ETA in the progress bar.
        eta_in_line = remaining_s if not self._console.is_terminal and step < self._total_steps else None
        fields = step_fields(step, self._total_steps, metrics, eta_in_line, self._width())
        self._print(Text("  ").join(Text(text, style=_STYLES[kind]) for kind, text in fields))
        # Print the throughput once, early, so that a bad setup is seen long before the end.
        if self._steps == _STEADY_STEP:
            self._throughput("throughput", metrics)
        if self._phase is not None:
            self._phase.done, self._phase.rest_s = step, remaining_s

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the metrics of a validation, in the order of the mapping. With several validation sets, each
        set's metrics (``NAME/...``) get a line."""
        sets = [name.removesuffix(_OF_A_SET) for name in metrics if name.endswith(_OF_A_SET)]
        lines: dict[str, dict[str, str]] = {name: {} for name in ("", *sets)}
        for name, value in metrics.items():
            of_set = next((each for each in sets if name.startswith(f"{each}/")), "")
            bare = name.removeprefix(f"{of_set}/") if of_set else name
            # Show counts of faults only if there are any.
            if value or not (bare in REWARD_FAULTS or bare.startswith(EPISODES)):
                lines[of_set][bare] = _number(value)
        for of_set, numbers in lines.items():
            shown = "  ".join(f"{name} {number}" for name, number in numbers.items() if number)
            self._say(
                Text(f"  {of_set}" if of_set else f"validation after step {step}", style="bold blue").append(
                    f"  {shown}", style="blue"
                )
            )

    def stopped(self, text: str) -> None:
        """Remove the bar and print why the run stops early. ``finish`` then prints nothing."""
        self._finished = True
        self.stop_bar()
        self.note(text)

    def note(self, text: str) -> None:
        """Print a line, for example about an exported model."""
        self._say(Text(text, style="bright_black"))

    def finish(self) -> None:
        """Remove the progress bar, and print the mean throughput and the duration of the run. A second call
        does nothing."""
        self.stop_bar()
        if self._finished:
            return
        self._finished = True
        counted = self._steps - _STEADY_STEP + 1
        if counted > 1:
            self._throughput(
                f"mean of {counted} steps",
                {name: total / counted for name, total in self._performance.items()},
            )
        if self._last_step is None and self._first_step >= self._total_steps:
            self._say(
                Text(
                    f"already finished ({self._first_step} of {self._total_steps} steps); a larger "
                    "max_num_steps continues it",
                    style="bold",
                )
            )
            return
        reached = f"step {self._last_step}/{self._total_steps}" if self._last_step is not None else "no step"
        self._say(
            Text(f"finished: {reached} in {format_seconds(self._clock() - self._started_at)}", style="bold")
        )

    def _add_performance(self, metrics: Mapping[str, float]) -> None:
        """Sum up the throughput metrics, from the second step on."""
        if self._steps >= _STEADY_STEP:
            for name, value in metrics.items():
                if name.startswith("performance/"):
                    self._performance[name] = self._performance.get(name, 0.0) + value

    def _throughput(self, title: str, metrics: Mapping[str, float]) -> None:
        line = throughput_line(metrics)
        if line:
            self._say(Text(f"{title}: {line}", style="magenta"))

    def __enter__(self) -> TrainingConsole:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.finish()
        else:
            self.stop_bar()

    def _say(self, text: Text) -> None:
        if not self._quiet:
            self._print(text)

    def _print(self, text: Text) -> None:
        # With soft wrap a terminal may fold a long line, but a file gets it unbroken.
        try:
            self._console.print(text, soft_wrap=True)
        except (OSError, SystemExit) as error:
            # rich raises SystemExit when the pipe is closed (``megarl train ... | head``), but the run must
            # continue.
            self._quiet = True
            logger.warning("nothing more is shown, the console cannot be written: %s", error)

    def _width(self) -> int:
        return self._console.width if self._console.is_terminal else _PLAIN_WIDTH

    def stop_bar(self) -> None:
        """Remove the progress bar."""
        self._under_way.close()


def _number(value: Any) -> str:
    """Format a number compactly; return an empty string for other values."""
    if isinstance(value, int):
        return f"{value:,}"
    try:
        return "" if isinstance(value, str) else format_number(float(value))
    except (TypeError, ValueError, RuntimeError):
        return ""
