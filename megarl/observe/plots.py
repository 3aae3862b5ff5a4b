"""Draws the curves of a run, and of several runs with different seeds, from their ``metrics.jsonl``."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import DataError, MegarlError
from megarl.observe.metrics_file import FILE_NAME, read_metrics
from megarl.observe.series import Series, collect_series, mean_over_runs, running_mean, smoothing_window

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_REWARD_COLOUR, _VALIDATION_COLOUR, _LOSS_COLOUR, _GRAD_COLOUR, _OTHER_COLOUR = "#2a9d8f", "#e76f51", "#264653", "#b5651d", "#c8c8c8"
_PHASE_COLOURS = ("#264653", "#2a9d8f", "#e9c46a", "#f4a261", "#e76f51", "#8ab17d", "#6d597a", "#457b9d", "#b56576", "#3d405b")
_REWARDS = ("train/reward", "train/reward_mean", "train/mean_reward")
_ACCURACIES = ("validation/accuracy", "validation/reward")
_MAX_BARS = 60


def plot_run(run_dir: str | Path) -> list[Path]:
    """Draw a run's curves into its directory.

    ``reward.png`` (reward of the samples and validation accuracy; only when the run logged one of them), ``loss.png`` (loss,
    validation loss, gradient norm) and ``timing.png`` (seconds of every phase, stacked); each only when there is something to
    draw. Several ``metrics*.jsonl`` in the directory are read as one run, a later step row winning. A directory without any
    whose children are runs is plotted child by child.

    Returns:
        The files written.

    Raises:
        DataError: no metrics file, or nothing in it to draw.
        MegarlError: matplotlib is not installed.
    """
    directory = Path(run_dir)
    files = sorted(directory.glob("metrics*.jsonl"))
    if not files:
        children = sorted({path.parent for path in directory.glob(f"*/{FILE_NAME}")})
        if not children:
            raise DataError(f"run directory {directory} holds no {FILE_NAME}. Fix: give the directory that a run wrote into")
        return [path for child in children for path in plot_run(child)]
    series = collect_series(row for file in files for row in read_metrics(file))
    name = directory.resolve().name
    drawn = {"reward.png": _draw_reward(series, name), "loss.png": _draw_loss(series, name), "timing.png": _draw_timing(series, name)}
    written = [_save(figure, directory / file) for file, figure in drawn.items() if figure is not None]
    if not written:
        raise DataError(f"{files[0]} holds no reward, loss or timing ({len(series)} other metrics). Fix: plot a training run")
    return written


def compare_runs(run_dirs: Sequence[str | Path], out_png: str | Path) -> Path:
    """Draw the validation accuracy (else the reward) of several seeds of one recipe, with their mean over common steps.

    Raises:
        DataError: no run is given, a run has no metrics file, or the runs do not share a metric to compare.
        MegarlError: matplotlib is not installed.
    """
    runs = {str(run_dir): collect_series(read_metrics(Path(run_dir) / FILE_NAME)) for run_dir in run_dirs}
    metric = next((name for name in _ACCURACIES + _REWARDS if runs and all(name in series for series in runs.values())), None)
    if metric is None:
        wanted = ", ".join(_ACCURACIES + _REWARDS)
        raise DataError(
            f"{len(runs)} runs share none of the metrics {wanted}. Fix: give at least one run, all of one recipe with validation on"
        )
    figure, axes = _figure(f"{metric} of {len(runs)} run{'s' if len(runs) != 1 else ''}")
    labels = _labels(list(runs))
    for colour, (run_dir, series) in zip(_cycled(len(runs)), runs.items(), strict=True):
        axes.plot(series[metric].steps, series[metric].values, color=colour, linewidth=1.4, alpha=0.75, label=labels[run_dir])
    mean = mean_over_runs([series[metric] for series in runs.values()])
    if len(runs) > 1 and mean.steps:
        axes.plot(mean.steps, mean.values, color="black", linewidth=2.6, marker=_marker(mean), label="mean over common steps")
    _finish_axes(axes, metric.split("/", 1)[1].replace("_", " ") + " (fraction)", legend=True)
    return _save(figure, Path(out_png))


def overlay_runs(run_dirs: Sequence[str | Path], metrics: Sequence[str], out_png: str | Path) -> Path:
    """Draw runs that should be equal over one another, a panel for each metric, broad lines below and narrow ones above.

    Raises:
        DataError: a run has no metrics file or lacks a metric.
        MegarlError: matplotlib is not installed.
    """
    runs = {str(run_dir): collect_series(read_metrics(Path(run_dir) / FILE_NAME)) for run_dir in run_dirs}
    for run_dir, series in runs.items():
        for metric in metrics:
            if metric not in series:
                raise DataError(f"{run_dir} has no metric {metric}. Fix: name one of {', '.join(sorted(series))}")
    figure, panels = _panels(f"{len(runs)} runs over one another", len(metrics))
    labels = _labels(list(runs))
    for metric, axes in zip(metrics, panels, strict=True):
        for index, (run_dir, series) in enumerate(runs.items()):
            width, style = 2.0 + 3.5 * (len(runs) - 1 - index), "-" if index == 0 else (0, (3 - index % 2, 1 + index))
            colour = _PHASE_COLOURS[(2 * index + 1) % len(_PHASE_COLOURS)]
            axes.plot(series[metric].steps, series[metric].values, color=colour, linewidth=width, linestyle=style, label=labels[run_dir])
        _finish_axes(axes, metric.split("/", 1)[1].replace("_", " "), legend=axes is panels[0], last=axes is panels[-1])
    return _save(figure, Path(out_png))


def _labels(run_dirs: Sequence[str | Path]) -> dict[str | Path, str]:
    """The shortest ends of the paths that tell the runs apart: ``grpo``, or ``seed-1/grpo`` where several are called ``grpo``."""
    parts = [Path(run_dir).resolve().parts for run_dir in run_dirs]
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = ["/".join(path[-length:]) for path in parts]
        if len(set(names)) == len(set(parts)):
            break
    return dict(zip(run_dirs, names, strict=True))


def _draw_reward(series: Mapping[str, Series], run_name: str) -> Figure | None:
    reward, accuracy = _first(series, _REWARDS), _first(series, _ACCURACIES)
    if reward is None and accuracy is None:
        return None
    figure, axes = _figure(f"Reward: {run_name}")
    if reward is not None:
        _draw_smoothed(axes, reward, _REWARD_COLOUR, "reward of sampled answers")
    if accuracy is not None:
        axes.plot(
            accuracy.steps, accuracy.values, color=_VALIDATION_COLOUR, linewidth=2, marker="o", markersize=5, label="validation accuracy"
        )
    drawn = [value for curve in (reward, accuracy) if curve is not None for value in curve.values]
    if min(drawn) >= 0 and max(drawn) <= 1:
        axes.set_ylim(-0.03, 1.03)
    _finish_axes(axes, "reward, accuracy (fraction)", legend=True)
    return figure


def _draw_loss(series: Mapping[str, Series], run_name: str) -> Figure | None:
    loss, validation, grad_norm = (series.get(name) for name in ("train/loss", "validation/loss", "train/grad_norm"))
    if loss is None and grad_norm is None and validation is None:
        return None
    two_panels = grad_norm is not None and (loss is not None or validation is not None)
    figure, panels = _panels(f"Loss: {run_name}", 2 if two_panels else 1)
    if loss is not None:
        _draw_smoothed(panels[0], loss, _LOSS_COLOUR, "training loss")
    if validation is not None:
        panels[0].plot(
            validation.steps, validation.values, color=_VALIDATION_COLOUR, linewidth=2, marker="o", markersize=5, label="validation loss"
        )
    if loss is not None or validation is not None:
        _finish_axes(panels[0], "loss", legend=True, last=not two_panels)
    if grad_norm is not None:
        _draw_smoothed(panels[-1], grad_norm, _GRAD_COLOUR, "gradient norm")
        _finish_axes(panels[-1], "gradient norm (L2)", legend=True)
    return figure


def _draw_timing(series: Mapping[str, Series], run_name: str) -> Figure | None:
    total = series.get("timing/step_s")
    phases = {name[len("timing/") : -2]: series[name] for name in series if _is_phase(name)}
    if not phases:
        return None
    steps = sorted({step for phase in phases.values() for step in phase.steps} | set(total.steps if total else ()))
    heights = {name: phase.on(steps) for name, phase in sorted(phases.items(), key=lambda item: -sum(item[1].values))}
    covered = [sum(column) for column in zip(*heights.values(), strict=True)]
    if total is not None:
        heights["other"] = [max(whole - part, 0.0) for whole, part in zip(total.on(steps), covered, strict=True)]
    figure, axes = _figure(f"Time of a step: {run_name}")
    colours = [*_cycled(len(phases)), _OTHER_COLOUR]
    group = -(-len(steps) // _MAX_BARS)
    centres = [_mean(steps[start : start + group]) for start in range(0, len(steps), group)]
    bottom = [0.0] * len(centres)
    for (name, seconds), colour in zip(heights.items(), colours, strict=False):
        bars = [_mean(seconds[start : start + group]) for start in range(0, len(steps), group)]
        axes.bar(centres, bars, bottom=bottom, width=_bar_width(centres), color=colour, label=f"{name} ({_mean(seconds):.3g} s)")
        bottom = [low + high for low, high in zip(bottom, bars, strict=True)]
    _finish_axes(axes, "seconds a step" + (f" (mean of {group} steps)" if group > 1 else ""))
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], title="phase (mean)", loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
    return figure


def _draw_smoothed(axes: Axes, curve: Series, colour: str, label: str) -> None:
    """Raw values faint, their running mean bold."""
    window = smoothing_window(len(curve.steps))
    if window == 1:
        axes.plot(curve.steps, curve.values, color=colour, linewidth=1.5, marker="o", markersize=5, label=label)
        return
    axes.plot(curve.steps, curve.values, color=colour, linewidth=0.7, marker=".", markersize=4, alpha=0.35, label=label)
    axes.plot(curve.steps, running_mean(curve.values, window), color=colour, linewidth=2.2, label=f"running mean of {window} steps")


def _is_phase(name: str) -> bool:
    return name.startswith("timing/") and name.endswith("_s") and name != "timing/step_s" and name.count("/") == 1


def _first(series: Mapping[str, Series], names: Iterable[str]) -> Series | None:
    return next((series[name] for name in names if name in series), None)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _bar_width(centres: Sequence[float]) -> float:
    gaps = [right - left for left, right in pairwise(centres)]
    return 0.9 * min(gaps) if gaps else 0.9


def _cycled(count: int) -> list[str]:
    return [_PHASE_COLOURS[index % len(_PHASE_COLOURS)] for index in range(count)]


def _marker(curve: Series) -> str:
    return "o" if len(curve.steps) <= 30 else ""


def _figure(title: str) -> tuple[Figure, Axes]:
    figure, panels = _panels(title, 1)
    return figure, panels[0]


def _panels(title: str, count: int) -> tuple[Figure, list[Axes]]:
    """A figure with ``count`` panels above each other that share the step axis. Needs no display: a Figure of its own draws by Agg."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MegarlError(f"plots need the package matplotlib, which cannot be imported ({error}). Fix: pip install matplotlib") from error
    figure = Figure(figsize=(9.0, 4.8 if count == 1 else 7.0), dpi=120, layout="constrained")
    grid: Any = figure.subplots(count, 1, sharex=True, squeeze=False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    return figure, list(grid[:, 0])


def _finish_axes(axes: Axes, y_label: str, legend: bool = False, last: bool = True) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_ylabel(y_label, fontsize=11)
    if last:
        axes.set_xlabel("training step", fontsize=11)
        low, high = axes.dataLim.intervalx
        if high - low < 1:
            axes.set_xlim((low + high) / 2 - 2, (low + high) / 2 + 2)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#dddddd", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if legend:
        axes.legend(frameon=False, fontsize=10, loc="best")


def _save(figure: Figure, path: Path) -> Path:
    """Write a PNG whole or not at all, so that a viewer never opens half a picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path
