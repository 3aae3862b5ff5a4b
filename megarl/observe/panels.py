"""Panels of a report as SVG: the metrics of each panel, and how they are plotted for one run or several."""

from __future__ import annotations

import colorsys
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

from megarl.observe.drawing import (
    COLOURS,
    GRID_COLOUR,
    MOST_POINTS,
    OTHER_COLOUR,
    STEP,
    cycled_colours,
    draw_phases,
    draw_smoothed,
    draw_timeline,
    finish_axes,
    marker_of,
    of_training,
    phase_names,
    phase_title,
    plain_text,
)
from megarl.observe.series import Series, running_mean, smoothing_window, thinned
from megarl.observe.step_line import ACCURACY_NAMES, LOSS_NAMES, REWARD_NAMES, THROUGHPUT_NAMES
from megarl.observe.timing import ENGINE_IDLE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

# With several runs the colour identifies the run, so the curves of a panel differ in line style.
_LINES = ("-", ":", "-.")

Runs = Mapping[str, Mapping[str, Series]]
"""Label of a run -> metric name -> curve."""
# Colours to replace in the SVG by CSS values that follow the page's light or dark theme.
_OF_PAGE = {"#000000": "currentColor", GRID_COLOUR: "var(--line)"}
# In inches, at 72 points per inch. A phone of 390 pixels leaves 320 for a plot, so there a point is one
# pixel.
_WIDTH, _HEIGHT, _LINE = 320 / 72, 200 / 72, 15 / 72
_STYLE: dict[str, object] = {
    "font.size": 11.5,
    "font.sans-serif": ["DejaVu Sans", "Verdana"],
    "savefig.facecolor": "none",
    "axes.facecolor": "none",
}
_RUN_COLOURS = (
    COLOURS[1],
    COLOURS[4],
    COLOURS[0],
    COLOURS[2],
    COLOURS[6],
    COLOURS[5],
    COLOURS[8],
    COLOURS[9],
)
_IDLE = f"timing/{ENGINE_IDLE}_s"
_RUN_LUMINANCES = (0.16, 0.27)
# Maximum number of characters that fit into a line of a plot.
_MOST_CHARACTERS = 44


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve of a panel.

    Attributes:
        metrics: names of the metric; the first that a run has is shown.
        name: label in the legend.
        sparse: has few values: plotted with markers, and dashed if several runs are compared.
        plain: plotted without a running mean.
    """

    metrics: tuple[str, ...]
    name: str
    sparse: bool = False
    plain: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """A plot with one or more curves.

    Attributes:
        title: title, and key in the result of ``draw_all``.
        unit: label of the vertical axis.
        curves: the curves.
        fraction: the vertical axis spans 0 to 1 if all values are in that range.
        from_zero: the vertical axis begins at 0 if no value is negative.
        zero_is_absent: a metric that is 0 at every step counts as not computed.
    """

    title: str
    unit: str
    curves: tuple[Curve, ...]
    fraction: bool = False
    from_zero: bool = False
    zero_is_absent: bool = False

    def shown(self, curve: Curve, series: Mapping[str, Series]) -> Series | None:
        """Return the series of the first of a curve's metrics that the run has, or None."""
        for name in curve.metrics:
            metric = series.get(name)
            if metric and (any(metric.values) if self.zero_is_absent else metric.steps):
                return metric
        return None

    def is_shown(self, series: Mapping[str, Series]) -> bool:
        """Return whether a run has at least one curve of the panel."""
        return any(self.shown(curve, series) for curve in self.curves)


PANELS = (
    Panel(
        "Reward",
        "reward, accuracy (fraction)",
        (
            Curve(REWARD_NAMES, "reward of sampled responses"),
            Curve(ACCURACY_NAMES, "validation accuracy", True),
        ),
        fraction=True,
    ),
    Panel(
        "Loss",
        "loss",
        (Curve(LOSS_NAMES, "training loss"), Curve(("validation/loss",), "validation loss", True)),
    ),
    Panel(
        "Critic",
        "half the squared error",
        (Curve(("train/critic_loss",), "training loss of the critic"),),
        zero_is_absent=True,
    ),
    Panel(
        "Returns explained by the critic",
        "share of their variance",
        (Curve(("train/explained_variance",), "before the step"),),
        zero_is_absent=True,
    ),
    Panel(
        "KL from the reference policy",
        "nats a token",
        (Curve(("train/kl_penalty", "train/kl_in_reward"), "KL penalty, before its weight"),),
        zero_is_absent=True,
    ),
    Panel(
        "Entropy",
        "nats a token",
        (
            Curve(("train/approx_entropy",), "estimate for the policy"),
            Curve(("train/entropy",), "of the policy"),
        ),
        zero_is_absent=True,
    ),
    Panel(
        "Gradient norm",
        "L2 norm",
        (Curve(("train/grad_norm",), "gradient norm, before clipping"),),
        from_zero=True,
    ),
    Panel(
        "Length of responses",
        "tokens",
        (
            Curve(("train/generation_length",), "sampled responses"),
            Curve(("validation/generation_length",), "validation", True),
        ),
        from_zero=True,
    ),
    Panel(
        "Truncated responses",
        "fraction",
        (
            Curve(("train/truncated",), "sampled responses"),
            Curve(("validation/truncated",), "validation", True),
        ),
        from_zero=True,
    ),
    Panel(
        "Prompts left out by dynamic sampling",
        "fraction",
        (
            Curve(("train/dynamic_sampling_dropped",), "all"),
            Curve(("train/dynamic_sampling_all_right",), "always solved"),
            Curve(("train/dynamic_sampling_all_wrong",), "never solved"),
        ),
        fraction=True,
    ),
    Panel(
        "Generation against training",
        "probability ratio, 1 is equal",
        (Curve(("train/token_mult_prob_error",), "multiplicative error of a token"),),
        zero_is_absent=True,
    ),
    Panel(
        "Age of responses",
        "steps of training",
        (
            Curve(("train/rollout_age",), "oldest weights of a response"),
            Curve(("train/token_age",), "weights of a token"),
        ),
        from_zero=True,
        zero_is_absent=True,
    ),
    Panel(
        "Waiting groups of responses",
        "groups",
        (
            Curve(("train/rollouts_ready",), "complete"),
            Curve(("train/rollouts_running",), "under way"),
            Curve(("train/rollouts_dropped",), "dropped as too old"),
        ),
        from_zero=True,
        zero_is_absent=True,
    ),
    Panel(
        "Throughput",
        "tokens a second",
        (Curve(THROUGHPUT_NAMES, "tokens without padding"),),
        from_zero=True,
        zero_is_absent=True,
    ),
    Panel(
        "Model FLOP utilisation",
        "share of the devices' peak",
        (
            Curve(("performance/train_mfu",), "training"),
            Curve(("performance/logprobs_mfu",), "log-probabilities"),
            Curve(("performance/generation_mfu",), "generation"),
        ),
        from_zero=True,
        zero_is_absent=True,
    ),
    Panel(
        "Memory of the fullest rank",
        "GiB",
        (
            Curve(("performance/memory_gib",), "after the step", plain=True),
            Curve(("performance/peak_memory_gib",), "peak so far", plain=True),
        ),
        from_zero=True,
        zero_is_absent=True,
    ),
    Panel(
        "Learning rate", "learning rate", (Curve(("train/lr",), "learning rate", plain=True),), from_zero=True
    ),
)


@plain_text()
def draw_all(runs: Runs, restarts: Sequence[int] = ()) -> dict[str, str]:
    """Draw all plots of a report: each panel that has data, the time by phase and, for a single asynchronous
    run, the timeline of trainer and engines.

    Args:
        runs: one run, or several to compare.
        restarts: steps at which a single run was restarted; marked by vertical lines.

    Returns:
        Title -> SVG.

    Raises:
        MegarlError: matplotlib is not installed.
    """
    import matplotlib

    pictures: dict[str, str] = {}
    with matplotlib.rc_context(_STYLE):
        for panel in PANELS:
            if any(map(panel.is_shown, runs.values())):
                figure, axes = _figure()
                handles = draw_panel(axes, panel, runs)
                for number, step in enumerate(restarts):
                    line = axes.axvline(step, color="#888888", linewidth=1, linestyle=":", label="restart")
                    # All restarts share one legend entry.
                    handles += [line] if number == 0 else []
                finish_axes(axes, panel.unit)
                _set_legend(figure, handles, [str(handle.get_label()) for handle in handles])
                pictures[panel.title] = _svg(figure, panel.title)
        timed = {label: series for label, series in runs.items() if phase_names(series)}
        if timed:
            pictures["Time by phase"] = _draw_timing(timed)
        if len(runs) == 1:
            [series] = runs.values()
            if _IDLE in series:
                figure, axes = _figure(0.7 * _HEIGHT)
                _set_legend(figure, **draw_timeline(axes, series))
                pictures["Trainer and engines"] = _svg(figure, "timeline")
    return pictures


def _draw_timing(runs: Runs) -> str:
    if len(runs) == 1:
        figure, axes = _figure(1.2 * _HEIGHT)
        _set_legend(figure, **draw_phases(axes, next(iter(runs.values()))))
    else:
        figure, axes = _figure(0.7 + 0.55 * len(runs))
        _compare_phases(axes, runs)
        handles, labels = axes.get_legend_handles_labels()
        _set_legend(figure, handles, labels, title="phase")
    return _svg(figure, "phases")


def draw_panel(axes: Axes, panel: Panel, runs: Runs) -> list[Any]:
    """Draw a panel's curves for all runs, and return the handles of the legend. With several runs the legend
    shows only the line styles, because the page explains the colours."""
    drawn: list[float] = []
    kinds: dict[int, Line2D] = {}
    for run_colour, series in zip(run_colours(len(runs)), runs.values(), strict=True):
        for index, curve in enumerate(panel.curves):
            found = panel.shown(curve, series)
            if found is None:
                continue
            drawn += found.values
            if len(runs) > 1:
                kinds[index] = _draw_beside_others(axes, curve, found, run_colour, _LINES[index])
            else:
                _draw_alone(axes, curve, found, (COLOURS[1], COLOURS[4], COLOURS[0])[index])
    _set_limits(axes, panel, min(drawn), max(drawn))
    return list(map(_without_colour, kinds.values())) if kinds else axes.get_legend_handles_labels()[0]


def _set_limits(axes: Axes, panel: Panel, low: float, high: float) -> None:
    """Set the range and number format of the vertical axis.

    Args:
        axes: axes of the panel.
        panel: the panel.
        low: smallest value.
        high: largest value.
    """
    if panel.fraction and low >= 0 and high <= 1:
        # Lines at exactly 0 and 1 would be half hidden by the border.
        axes.set_ylim(-0.03, 1.03)
    elif panel.from_zero and low >= 0:
        axes.set_ylim(0, high * 1.08 or 1.0)
    elif high - low <= 1e-6 * max(abs(high), abs(low), 1e-6):
        # Around a constant, the axis would magnify rounding errors to a trend.
        margin = 0.05 * (abs(high) or 1.0)
        axes.set_ylim(low - margin, high + margin)
    if 0 < high < 1e-3 and low >= 0:
        axes.yaxis.set_major_formatter("{x:.2g}")
    elif high < 1000:
        axes.ticklabel_format(axis="y", useOffset=False)
    else:
        axes.yaxis.set_major_formatter("{x:,.0f}")


def _set_legend(
    figure: Figure, handles: Sequence[Any], labels: Sequence[str], title: str | None = None
) -> None:
    """Add a legend above the axes, where it cannot cover a curve, and enlarge the figure accordingly. Short
    labels are put into two columns."""
    half = -(-len(labels) // 2)
    width = max(map(len, labels[:half]), default=0) + max(map(len, labels[half:]), default=0)
    columns = 2 if title and width < _MOST_CHARACTERS - 4 else 1
    rows = (half if columns == 2 else len(labels)) + bool(title)
    figure.set_figheight(figure.get_figheight() + _LINE * rows)
    spaces = {
        "labelspacing": 0.2,
        "columnspacing": 0.8,
        "handlelength": 1.2,
        "handletextpad": 0.6,
        "borderaxespad": 0.1,
    }
    figure.legend(
        handles,
        labels,
        title=title,
        ncols=columns,
        loc="outside upper left",
        frameon=False,
        fontsize=11,
        **spaces,
    )


def _draw_alone(axes: Axes, curve: Curve, series: Series, colour: str) -> None:
    if not curve.sparse and not curve.plain:
        draw_smoothed(axes, series, colour, curve.name)
        return
    steps, values = _few_points(series)
    axes.plot(
        steps,
        values,
        color=colour,
        linewidth=1.8,
        marker=_marker(curve, series),
        markersize=4,
        label=curve.name,
    )


def _draw_beside_others(
    axes: Axes, curve: Curve, series: Series, colour: str, solid_or_broken: str
) -> Line2D:
    """Draw a curve of one of several runs, and return its line.

    Args:
        axes: axes of the panel.
        curve: how to draw it.
        series: its values.
        colour: identifies the run.
        solid_or_broken: line style that identifies the curve.
    """
    steps, values = _few_points(series)
    label, window = curve.name, 1 if curve.sparse or curve.plain else smoothing_window(len(values))
    if len(values) < len(series.values):
        label += " (mean)"
    elif window > 1:
        values, label = running_mean(values, window), f"{label} (running mean)"
    style = "--" if curve.sparse else solid_or_broken
    marker = _marker(curve, series)
    (line,) = axes.plot(
        steps, values, color=colour, linewidth=1.8, linestyle=style, marker=marker, markersize=4, label=label
    )
    return line


def _few_points(series: Series) -> tuple[Sequence[float], Sequence[float]]:
    """Return the steps and values of a curve; a long curve is reduced to the means of bins."""
    if len(series.steps) <= MOST_POINTS:
        return series.steps, series.values
    steps, values, *_ = thinned(series, MOST_POINTS)
    return steps, values


def _marker(curve: Curve, series: Series) -> str | None:
    return marker_of(series) or None if curve.sparse or len(series.steps) < 10 else None


def _without_colour(line: Line2D) -> Line2D:
    from matplotlib.lines import Line2D

    style = {"linestyle": line.get_linestyle(), "marker": line.get_marker(), "label": line.get_label()}
    return Line2D([], [], color="#000000", markersize=4, **style)


def _compare_phases(axes: Axes, runs: Runs) -> None:
    """Draw one bar per run, stacked from the mean seconds of each phase."""
    runs = {
        label: {name: of_training(curve) for name, curve in series.items()} for label, series in runs.items()
    }
    names = list(dict.fromkeys(chain.from_iterable(map(phase_names, runs.values()))))
    positions = range(len(runs))
    # Divide by the number of steps, so that runs of different lengths are comparable.
    counts = list[int]()
    for series in runs.values():
        # Without the step's total, the longest phase gives the number of steps.
        counted = [STEP] if STEP in series else phase_names(series)
        counts.append(max(len(series[name].steps) for name in counted))
    left = [0.0] * len(runs)
    for colour, name in zip(cycled_colours(len(names)), names, strict=True):
        widths = [
            sum(series[name].values) / count if name in series else 0.0
            for series, count in zip(runs.values(), counts, strict=True)
        ]
        axes.barh(positions, widths, left=left, color=colour, height=0.5, label=phase_title(name))
        left = [start + width for start, width in zip(left, widths, strict=True)]
    whole = [
        sum(series[STEP].values) / count if STEP in series else end
        for series, count, end in zip(runs.values(), counts, left, strict=True)
    ]
    rest = [max(total - end, 0.0) for total, end in zip(whole, left, strict=True)]
    axes.barh(positions, rest, left=left, color=OTHER_COLOUR, height=0.5, label="other")
    for position, total in zip(positions, whole, strict=True):
        axes.annotate(
            f"{total:.3g} s", (total, position), xytext=(5, 0), textcoords="offset points", va="center"
        )
    # Above the bars, a name of any length fits.
    for position, name in zip(positions, runs, strict=True):
        # A long name would shrink the axes if it took part in the layout.
        shown = name if len(name) <= _MOST_CHARACTERS else f"\u2026{name[1 - _MOST_CHARACTERS :]}"
        axes.annotate(shown, (0, position - 0.32), xytext=(1, 2), textcoords="offset points").set_in_layout(
            False
        )
    axes.set_yticks([])
    axes.set_ylim(len(runs) - 0.5, -0.8)
    axes.set_xlabel("seconds a step, mean of all steps", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.12)


def run_colours(count: int) -> list[str]:
    """Return a colour for each run. For more runs than named colours, hues are spread evenly and alternate
    between dark and light."""
    if count <= len(_RUN_COLOURS):
        return list(_RUN_COLOURS[:count])
    return [_colour_of_luminance(index / count, _RUN_LUMINANCES[index % 2]) for index in range(count)]


def _colour_of_luminance(hue: float, luminance: float) -> str:
    """Return the hex colour with a hue in [0, 1) and the given relative luminance (WCAG 2), so that it is
    visible on light and dark pages."""
    shades = (colorsys.hls_to_rgb(hue, percent / 100, 0.6) for percent in range(100))
    nearest = min(shades, key=lambda shade: abs(relative_luminance(shade) - luminance))
    return "#" + "".join(f"{round(255 * part):02x}" for part in nearest)


def relative_luminance(shade: tuple[float, float, float]) -> float:
    """Return the relative luminance of an sRGB colour with components in [0, 1], as defined by WCAG 2."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in shade]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _figure(height: float = _HEIGHT) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element for a page: theme colours, selectable text, and no XML prologue.

    Args:
        figure: the figure.
        title: makes the ids of the SVG unique within the page.
    """
    import matplotlib

    buffer = io.StringIO()
    # matplotlib's ids depend on a salt. The default is random, so output would differ each time; a constant
    # would give two plots the same ids.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": title}):
        # Omit date and version, so that equal curves give equal bytes.
        figure.savefig(
            buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    text = buffer.getvalue()
    for ours, of_page in _OF_PAGE.items():
        text = text.replace(ours, of_page)
    return text[text.index("<svg") :]
