"""Results of a run for scripts and notebooks: metrics, samples, model, checkpoints and plots."""

from __future__ import annotations

import html
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import DataError

if TYPE_CHECKING:
    from megarl.config.sections import Config
    from megarl.observe.sample_files import Sample

_PREFIXES = ("train/", "validation/", "timing/", "performance/")
_SHOWN = (
    "train/loss",
    "train/reward",
    "train/grad_norm",
    "validation/accuracy",
    "validation/loss",
    "timing/step_s",
)
_ROWS = 10


class Metrics(dict[str, list[Any]]):
    """Metrics of a run: name -> list with one value per step, None where a step has no value.

    ``metrics["reward"]`` is short for ``metrics["train/reward"]``, or else for the validation metric of that
    name. ``pandas.DataFrame(metrics)`` makes a table.
    """

    def __missing__(self, name: str) -> list[Any]:
        for prefix in _PREFIXES:
            if prefix + name in self:
                return self[prefix + name]
        raise KeyError(f"{name!r}; there are {', '.join(self)}")

    def _table(self) -> list[list[str]]:
        """Return the table cells of the main metrics: a header row, then the last 10 steps."""
        names = ["step", *(name for name in _SHOWN if name in self)] if "step" in self else []
        columns = [list(map(_number, self[name])) for name in names]
        rows = list(map(list, zip(*columns, strict=True)))
        return [[name.partition("/")[2] or name for name in names], *rows[-_ROWS:]]

    def __repr__(self) -> str:
        table = self._table()
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)) for row in table]
        return "\n".join([*lines, f"{len(self.get('step', []))} steps, {len(self)} columns"])

    def _repr_html_(self) -> str:
        table = ""
        for number, row in enumerate(self._table()):
            tag = "td" if number else "th"
            table += "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in row) + "</tr>"
        return f"<table>{table}</table><p>{len(self.get('step', []))} steps, {len(self)} columns</p>"


class Picture(os.PathLike[str]):
    """An image file that a notebook displays."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Picture({str(self.path)!r})"

    def _repr_png_(self) -> bytes:
        return self.path.read_bytes()


class Run:
    """A run directory. Can be read during and after training, and also if ``megarl train`` started the run.

    Args:
        directory: the run directory.

    Raises:
        DataError: the directory contains no run.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        from megarl.watch.run_state import require_run

        self.directory = Path(directory)
        require_run(self.directory)

    def __repr__(self) -> str:
        return f"megarl.Run({str(self.directory)!r})"

    @property
    def metrics(self) -> Metrics:
        """All logged metrics of all steps; see ``Metrics``."""
        from megarl.observe.metrics_file import FILE_NAME, stream_metrics
        from megarl.observe.series import collect_series

        series = collect_series(stream_metrics(self.directory / FILE_NAME))
        all_steps = set[int]()
        for each in series.values():
            all_steps.update(each.steps)
        steps = sorted(all_steps)
        columns: dict[str, list[Any]] = {"step": steps}
        for name, each in series.items():
            known = dict(zip(each.steps, each.values, strict=True))
            columns[name] = list(map(known.get, steps))
        return Metrics(columns)

    def samples(self, step: int | None = None, *, validation: bool = False) -> list[Sample]:
        """Return the prompts, responses and rewards that ``logger.samples`` saved for a step.

        Args:
            step: training step; None for the newest step with samples.
            validation: return validation samples instead of training samples.

        Raises:
            DataError: no samples of this step are saved.
        """
        from megarl.observe.sample_files import DIRECTORY, TRAIN, VALIDATION, list_samples, read_samples

        files = dict(list_samples(self.directory / DIRECTORY, VALIDATION if validation else TRAIN))
        chosen = max(files, default=None) if step is None else step
        if chosen is None or chosen not in files:
            steps = ", ".join(map(str, files)) or "no step"
            raise DataError(
                f"step = {step}: there are samples of {steps} in {self.directory / DIRECTORY}. Fix: ask for "
                "one of these"
            )
        return read_samples(files[chosen])

    @property
    def model_dir(self) -> Path:
        """Directory of the newest exported Hugging Face model.

        Raises:
            DataError: the run has not exported a model yet; it does so at its end.
        """
        return self._newest("hf", "an unfinished run exports no model; finish the run, or use checkpoint")

    @property
    def checkpoint(self) -> Path:
        """Directory ``step_N`` of the newest checkpoint.

        Raises:
            DataError: there is no checkpoint yet.
        """
        return self._newest(
            "checkpoints", "checkpoints are written every checkpointing.save_period steps and at the end"
        )

    @property
    def config(self) -> Config:
        """The resolved configuration of the newest launch."""
        from megarl.run.earlier_launch import CONFIG_FILE, kept_config

        return kept_config(self.directory / CONFIG_FILE)

    def plot(self) -> Picture:
        """Write plots of the metrics and the page ``report.html`` into the run directory. Return the first
        plot, which a notebook displays.

        Raises:
            DataError: no metrics have been logged yet.
            MegarlError: matplotlib is not installed.
        """
        from megarl.observe.plots import plot_run
        from megarl.watch.report import REPORT, write_report

        pictures = plot_run(self.directory)
        write_report([self.directory], self.directory / REPORT)
        return Picture(pictures[0])

    def _newest(self, kind: str, fix: str) -> Path:
        found: list[tuple[int, Path]] = []
        for path in (self.directory / kind).glob("step_*"):
            number = path.name[5:]
            # Checkpoints that are still being written have another name than step_N.
            if number.isdecimal():
                found.append((int(number), path))
        if not found:
            raise DataError(f"{self.directory} has no {kind}/step_N. Fix: {fix}")
        return max(found)[1]


def new_directory(name: str) -> Path:
    """Create and return ``runs/NAME-N``, with the lowest N from 1 that is free."""
    for number in itertools.count(1):
        path = Path("runs") / f"{name}-{number}"
        path.parent.mkdir(exist_ok=True)
        # Creating the directory is atomic, so two simultaneous calls get different directories.
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError("numbers do not end")


def _number(value: Any) -> str:
    return "" if value is None else str(value) if isinstance(value, int) else f"{value:.4g}"
