"""Plots of a run's metrics, or of several runs with different seeds, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from converters.files.atomic import whole_file
from megarl.errors import DataError
from megarl.observe.drawing import (
    cycled_colours,
    draw_phases,
    finish_axes,
    marker_of,
    one_panel,
    phase_names,
    plain_text,
    run_labels,
    stacked_panels,
)
from megarl.observe.metrics_file import FILE_NAME, metrics_files, read_metrics, stream_metrics
from megarl.observe.panels import PANELS, draw_panel
from megarl.observe.series import collect_series, mean_over_runs
from megarl.observe.step_line import ACCURACY_NAMES, REWARD_NAMES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# File name -> (title, titles of its panels).
_PICTURES = {"reward.png": ("Reward", ("Reward",)), "loss.png": ("Loss", ("Loss", "Gradient norm"))}


@plain_text()
def plot_run(run_dir: str | Path) -> list[Path]:
    """Plot a run's metrics to PNG files in its directory.

    Writes ``reward.png`` (reward and validation accuracy), ``loss.png`` (losses and gradient norm) and
    ``timing.png`` (stacked seconds of the phases); plots without data are omitted. Several ``metrics*.jsonl``
    are merged, and later rows of a step win. If the directory is not a run but its subdirectories are, each
    of these is plotted.

    Returns:
        The written files.

    Raises:
        DataError: there is no metrics file, or it has nothing to plot.
        MegarlError: matplotlib is not installed.
    """
    directory = Path(run_dir)
    files = metrics_files(directory)
    if not files:
        # This may be a directory of several runs.
        children = sorted({path.parent for path in directory.glob(f"*/{FILE_NAME}")})
        if not children:
            raise DataError(
                f"run directory {directory} holds no {FILE_NAME}. Fix: give the directory that a run wrote "
                "into"
            )
        return list(chain.from_iterable(map(plot_run, children)))
    series = collect_series(chain.from_iterable(map(stream_metrics, files)))
    name = run_labels([directory])[directory]
    written = []
    for file, (title, parts) in _PICTURES.items():
        panels = [panel for panel in PANELS if panel.title in parts and panel.is_shown(series)]
        if panels:
            figure, grid = stacked_panels(f"{title}: {name}", len(panels))
            for panel, axes in zip(panels, grid, strict=True):
                draw_panel(axes, panel, {str(name): series})
                finish_axes(axes, panel.unit, legend=True, last=axes is grid[-1])
            written.append(_save(figure, directory / file))
    if phase_names(series):
        figure, axes = one_panel(f"Time of a step: {name}")
        axes.legend(**draw_phases(axes, series), loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False)
        written.append(_save(figure, directory / "timing.png"))
    if not written:
        raise DataError(
            f"{files[0]} holds no reward, loss or timing ({len(series)} other metrics). Fix: let the run "
            "finish a step of training"
        )
    return written


@plain_text()
def compare_runs(run_dirs: Sequence[str | Path], out_png: str | Path) -> Path:
    """Plot the validation accuracy (or else the reward) of runs with different seeds, and their mean at the
    steps that all runs have.

    Raises:
        DataError: there is no run, a run has no metrics file, or the runs have no such metric in common.
        MegarlError: matplotlib is not installed.
    """
    runs = {str(run_dir): collect_series(read_metrics(Path(run_dir) / FILE_NAME)) for run_dir in run_dirs}
    shared = set.intersection(*map(set, runs.values())) if runs else set()
    metric = next((name for name in ACCURACY_NAMES + REWARD_NAMES if name in shared), None)
    if metric is None:
        wanted = ", ".join(ACCURACY_NAMES + REWARD_NAMES)
        raise DataError(
            f"{len(runs)} runs share none of the metrics {wanted}. Fix: give at least one run, all of one "
            "recipe with validation on"
        )
    figure, axes = one_panel(f"{metric} of {len(runs)} run{'s' if len(runs) != 1 else ''}")
    labels = run_labels(list(runs))
    for colour, (run_dir, series) in zip(cycled_colours(len(runs)), runs.items(), strict=True):
        axes.plot(
            series[metric].steps,
            series[metric].values,
            color=colour,
            linewidth=1.4,
            alpha=0.75,
            label=labels[run_dir],
        )
    mean = mean_over_runs([series[metric] for series in runs.values()])
    # Runs with different validation intervals may have no common step.
    if len(runs) > 1 and mean.steps:
        axes.plot(
            mean.steps,
            mean.values,
            color="black",
            linewidth=2.6,
            marker=marker_of(mean),
            label="mean over common steps",
        )
    finish_axes(axes, metric.split("/", 1)[1].replace("_", " ") + " (fraction)", legend=True)
    return _save(figure, Path(out_png))


def _save(figure: Figure, path: Path) -> Path:
    """Write a PNG file atomically, so that a viewer never opens an incomplete one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        figure.savefig(file, format="png")
    return path
