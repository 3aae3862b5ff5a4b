"""Colours, axes and curves that plots and reports share."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from megarl.errors import MegarlError
from megarl.observe.series import Series, running_mean, smoothing_window, thinned
from megarl.observe.timing import ENGINE_IDLE, ROLLOUT_WAIT, STEP_SECONDS, beside_training

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Each colour has a contrast of at least 3 to both a white and a dark page.
COLOURS = (
    "#4a6fa5",
    "#2a9d8f",
    "#b8860b",
    "#d9772b",
    "#d1495b",
    "#5b8c3e",
    "#8e6bb0",
    "#3a8fb7",
    "#c8649a",
    "#9c6b3f",
)
OTHER_COLOUR = "#8a9299"
GRID_COLOUR = "#dddddd"
STEP = f"timing/{STEP_SECONDS}"
TIMELINE_STEPS = 12
"""Number of last steps in the timeline; with more, a step would be only a few pixels wide."""
MOST_BARS = MOST_DOTS = 60
MOST_POINTS = 400
"""Maximum number of points that are plotted individually. Longer curves are binned, and show each bin's mean
and range."""


def draw_smoothed(axes: Axes, curve: Series, colour: str, label: str) -> None:
    """Draw a curve with faint raw values and a bold running mean. If it has more than ``MOST_POINTS`` values,
    draw the mean and range of bins instead."""
    if len(curve.steps) > MOST_POINTS:
        steps, means, lowest, highest = thinned(curve, MOST_POINTS)
        axes.fill_between(steps, lowest, highest, color=colour, alpha=0.22, linewidth=0.8)
        axes.plot(steps, means, color=colour, linewidth=1.6, label=f"{label} (mean and range)")
        return
    window = smoothing_window(len(curve.steps))
    if window == 1:
        axes.plot(
            curve.steps, curve.values, color=colour, linewidth=1.5, marker="o", markersize=5, label=label
        )
        return
    # In an SVG, a dot takes more bytes than the rest of its point, so long curves have none.
    dots = "." if len(curve.steps) <= MOST_DOTS else ""
    axes.plot(
        curve.steps,
        curve.values,
        color=colour,
        linewidth=0.8,
        marker=dots,
        markersize=4,
        alpha=0.5,
        label=label,
    )
    axes.plot(
        curve.steps,
        running_mean(curve.values, window),
        color=colour,
        linewidth=2.2,
        label=f"running mean of {window} steps",
    )


@contextmanager
def plain_text() -> Iterator[None]:
    """Disable math text inside the block. Matplotlib would typeset text between two dollar signs as a
    formula, and names of runs may contain them.

    Raises:
        MegarlError: matplotlib is not installed.
    """
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise MegarlError(
            f"plots need the package matplotlib, which cannot be imported ({error}). Fix: pip install "
            "matplotlib"
        ) from error
    with rc_context({"text.parse_math": False}):
        yield


def cycled_colours(count: int) -> list[str]:
    """Return ``count`` colours; the palette repeats if it is too short."""
    return [COLOURS[index % len(COLOURS)] for index in range(count)]


def marker_of(curve: Series) -> str:
    """Return matplotlib's marker for a curve: a dot if it has at most 30 points, else none."""
    return "o" if len(curve.steps) <= 30 else ""


def one_panel(title: str) -> tuple[Figure, Axes]:
    """Return a new figure with a single panel."""
    figure, panels = stacked_panels(title, 1)
    return figure, panels[0]


def stacked_panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    """Return a figure with ``count`` panels, one below the other, that share the step axis. The figure needs
    no display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 4.8 if count == 1 else 7.0), dpi=120, layout="constrained")
    grid: Any = figure.subplots(count, 1, sharex=True, squeeze=False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure, list(grid[:, 0])


def finish_axes(axes: Axes, y_label: str, legend: bool = False, last: bool = True) -> None:
    """Set a panel's label, grid and legend; the ``last`` panel also gets the label of the step axis."""
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(y_label, fontsize=11)
    if last:
        axes.set_xlabel("training step", fontsize=11)
        low, high = axes.dataLim.intervalx
        # Around a single step, matplotlib would choose fractional ticks, so widen the axis.
        if high - low < 1:
            axes.set_xlim((low + high) / 2 - 2, (low + high) / 2 + 2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.grid(axis="y", color=GRID_COLOUR, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        # More than six names would cover the curves, so put the legend to the right of the axes.
        place: Any = (1, 0) if len(axes.lines) > 6 else "best"
        axes.legend(frameon=False, fontsize=10, loc=place)


def run_labels(run_dirs: Sequence[str | Path]) -> dict[str | Path, str]:
    """Return the shortest path suffix that distinguishes each run: ``grpo``, or ``seed-1/grpo`` if several
    directories are called ``grpo``.

    Labels do not begin with an underscore, because matplotlib omits such names from legends. Bytes that are
    not UTF-8 are replaced.
    """
    parts = [Path(run_dir).resolve().parts for run_dir in run_dirs]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = [os.fsencode("/".join(path[-length:])).decode(errors="replace") for path in parts]
        # Compare with the number of distinct paths: a run that is given twice has the same label at any
        # length.
        if len(set(names)) == len(set(parts)) and not any(name.startswith("_") for name in names):
            break
    return dict(zip(run_dirs, names, strict=True))


def phase_names(series: Mapping[str, Series]) -> list[str]:
    """Return the timing metrics of the top-level phases that make up a step's duration, longest first."""
    seconds: dict[str, float] = {}
    for name, curve in series.items():
        if name.startswith("timing/") and name.endswith("_s") and name.count("/") == 1 and name != STEP:
            seconds[name.removeprefix("timing/").removesuffix("_s")] = sum(curve.values)
    for name in beside_training(seconds):
        seconds.pop(name, None)
    return [f"timing/{name}_s" for name in sorted(seconds, key=lambda name: -seconds[name])]


def of_training(curve: Series) -> Series:
    """Return a curve without step 0, whose row contains only the validation before training. A curve that has
    only step 0 is returned unchanged."""
    first = next((index for index, step in enumerate(curve.steps) if step > 0), 0)
    return Series(curve.steps[first:], curve.values[first:])


def phase_title(name: str) -> str:
    """Return the phase's name in words, from a metric such as ``timing/reference_logprobs_s``."""
    return name.removeprefix("timing/").removesuffix("_s").replace("_", " ")


class Legend(TypedDict):
    """Keyword arguments for ``axes.legend`` or ``figure.legend``."""

    handles: list[Any]
    labels: list[str]
    title: str


def draw_phases(axes: Axes, series: Mapping[str, Series]) -> Legend:
    """Draw the seconds of each phase per step as stacked bars; more than 60 steps are grouped. ``other`` is
    the time outside of all phases.
    """
    total, phases = series.get(STEP), {phase_title(name): series[name] for name in phase_names(series)}
    steps = sorted(set(total.steps if total else ()).union(*(phase.steps for phase in phases.values())))
    heights = {name: phase.on(steps) for name, phase in phases.items()}
    covered = list(map(sum, zip(*heights.values(), strict=True)))
    if total is not None:
        heights["other"] = [
            max(whole - part, 0.0) for whole, part in zip(total.on(steps), covered, strict=True)
        ]
    # Round up, so that there are at most MOST_BARS groups.
    group = -(-len(steps) // MOST_BARS)

    def group_means(values: Sequence[float]) -> list[float]:
        return [_mean(values[start : start + group]) for start in range(0, len(steps), group)]

    # Skip step 0 in the means, because its row is a validation before training.
    trained = next((index for index, step in enumerate(steps) if step > 0), 0)
    centres = group_means(steps)
    bottom = [0.0] * len(centres)
    for (name, seconds), colour in zip(
        heights.items(), [*cycled_colours(len(phases)), OTHER_COLOUR], strict=False
    ):
        bars = group_means(seconds)
        axes.bar(
            centres,
            bars,
            bottom=bottom,
            width=0.9 * min((right - left for left, right in pairwise(centres)), default=1.0),
            color=colour,
            label=f"{name} ({_mean(seconds[trained:]):.3g} s)",
        )
        bottom = [low + high for low, high in zip(bottom, bars, strict=True)]
    finish_axes(axes, "seconds a step" + (f" (mean of {group} steps)" if group > 1 else ""))
    handles, names = axes.get_legend_handles_labels()
    # Reverse the legend, because the last bar of a stack is on top.
    return {"handles": handles[::-1], "labels": names[::-1], "title": "phase (mean)"}


def draw_timeline(axes: Axes, series: Mapping[str, Series]) -> Legend:
    """Draw when the trainer and the engines of an asynchronous run were busy, over the last 12 steps. The
    time axis counts seconds from the start of these steps.

    With the ``ready_first`` schedule, the trainer waits for complete groups at the start of a step. Otherwise
    it waits at the end. Engines always wait at the end.
    """
    steps = series[STEP].steps[-TIMELINE_STEPS:]
    nothing = Series((), ())
    whole = series[STEP].on(steps)
    wait = series.get(f"timing/{ROLLOUT_WAIT}_s", nothing).on(steps)
    idle = series.get(f"timing/{ENGINE_IDLE}_s", nothing).on(steps)
    begins = [0.0, *accumulate(whole[:-1])]
    # Only runs that train first on the groups that are complete first log this metric.
    waits_first = "train/rollouts_ready" in series
    for row, (who, pauses) in enumerate((("engines", idle), ("trainer", wait))):
        bars = []
        for begin, total, pause in zip(begins, whole, pauses, strict=True):
            work = max(total - pause, 0.0)
            delay = total - work if waits_first and who == "trainer" else 0.0
            bars.append((begin + delay, work))
        share = sum(work for _, work in bars) / sum(whole) if sum(whole) else 0.0
        axes.broken_barh(
            bars, (row + 0.15, 0.7), color=COLOURS[row], label=f"{who} ({share:.0%} of the time)"
        )
    for begin in begins:
        axes.axvline(begin, color=GRID_COLOUR, linewidth=1)
    axes.set_yticks([0.5, 1.5], ["engines", "trainer"])
    axes.set_xlim(0, sum(whole))
    axes.set_xlabel(f"seconds, steps {steps[0]} to {steps[-1]}")
    handles, names = axes.get_legend_handles_labels()
    return {"handles": handles[::-1], "labels": names[::-1], "title": "works"}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
