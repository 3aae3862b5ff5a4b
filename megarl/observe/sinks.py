"""Send each step's metrics to all sinks. A failing sink does not stop training."""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from megarl.config.nested import at
from megarl.config.sections import LoggerConfig, RunConfig
from megarl.errors import ConfigError
from megarl.import_path import load_object
from megarl.observe.metrics_file import FILE_NAME, MetricRow, MetricsFile, encoded
from megarl.observe.services import OWN_NAMES, MlflowSink, TensorBoardSink, TrackioSink, WandbSink, flat
from megarl.redaction import redacted

logger = logging.getLogger(__name__)

_MOST_BYTES = 64 << 20
# Subsection of ``logger`` -> class of the sink.
_SERVICES: dict[str, type[WandbSink] | type[MlflowSink] | type[TrackioSink]] = {
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


class Sink(Protocol):
    """A destination for metric rows. Methods may raise any exception; ``MetricSinks`` catches and logs it.

    A custom class, named in ``logger.sinks``, is constructed with ``(log_dir, run_config)``: a directory for
    its files, and the resolved configuration with secrets redacted. Its methods are called in the main
    thread, and training waits for them.
    """

    name: str

    def write(self, row: MetricRow) -> None:
        """Write a row ``{"step", "time", name: int | float | bool | str | None}``."""

    def truncate_after(self, step: int) -> None:
        """Discard rows of later steps."""

    def close(self) -> None:
        """Flush, and release all resources."""


class MetricsFileSink:
    """The sink that every run has: ``metrics.jsonl`` in the run directory."""

    name = FILE_NAME

    def __init__(self, run_dir: Path, most_bytes: int = _MOST_BYTES) -> None:
        """Args:
            run_dir: the run directory.
            most_bytes: maximum size of the queue of rows while the file cannot be written, as on a full disk.
                Beyond it the oldest rows are lost.

        Raises:
            OSError: the file cannot be opened.
        """
        self._file, self._most_bytes = MetricsFile(run_dir / FILE_NAME), most_bytes
        # Queued rows: (step, encoded line).
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._cut_after: int | None = None
        self._was_full = False
        self._lost = 0

    def write(self, row: MetricRow) -> None:
        """Append a row, after any queued ones."""
        self._waiting.append((row["step"], encoded(row)))
        # Keep at least one row, even if it alone is larger than the bound.
        while sum(len(line) for _, line in self._waiting) > self._most_bytes and len(self._waiting) > 1:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def truncate_after(self, step: int) -> None:
        """Remove rows of later steps from the file and the queue. If that fails, it is retried before the
        next write."""
        self._waiting = deque(each for each in self._waiting if each[0] <= step)
        # An earlier call may have failed, so its step must be truncated too.
        self._cut_after = step if self._cut_after is None else min(self._cut_after, step)
        self._write_waiting()

    def close(self) -> None:
        """Try once more to write the queued rows, and close the file."""
        try:
            self._write_waiting()
        except OSError as error:
            logger.error("%d rows of %s are lost: %s", len(self._waiting), FILE_NAME, error)
        finally:
            self._file.close()

    def _write_waiting(self) -> None:
        """Do any outstanding truncation, then write the queued rows in order.

        Raises:
            OSError: the file cannot be written; the unwritten rows stay queued.
        """
        try:
            if self._cut_after is not None:
                dropped = self._file.truncate_after(self._cut_after)
                if dropped:
                    logger.info(
                        "%s: removed %d rows of steps after %d, they are computed again",
                        FILE_NAME,
                        dropped,
                        self._cut_after,
                    )
                self._cut_after = None
            while self._waiting:
                self._file.append_line(self._waiting[0][1])
                # Remove a row only after it is written, so that it stays queued after an error.
                self._waiting.popleft()
        except OSError as error:
            self._was_full = True
            kept = f"{len(self._waiting)} rows wait until it can be written"
            raise OSError(
                error.errno, f"{os.strerror(error.errno or 0)}; {kept}", str(self._file.path)
            ) from error
        if self._was_full:
            lost = (
                f"; {self._lost} older ones, of more than {self._most_bytes} bytes, are lost"
                if self._lost
                else ""
            )
            logger.warning("%s could be written again, with all rows that waited%s", FILE_NAME, lost)
            self._was_full, self._lost = False, 0


class MetricSinks:
    """All sinks of a run. An error of a sink is logged once, and again only after the sink has worked in
    between."""

    def __init__(self, sinks: list[Sink], clock: Callable[[], float] = time.time) -> None:
        """Args:
        sinks: sinks in the order in which they get a row.
        clock: returns unix seconds for a row's ``time``."""
        self._sinks = list(sinks)
        self._clock = clock
        self._failing: set[str] = set()
        self._unusable: set[str] = set()

    def log(self, metrics: Mapping[str, object], step: int, prefix: str = "") -> None:
        """Write a row to all sinks.

        Args:
            metrics: name -> number, string, None, or tensor or array with one element. Nested mappings become
                ``outer/inner``. Other values are omitted, with one warning per name.
            step: number of the training step.
            prefix: joined to every name by a slash: ``train`` gives ``train/loss``.
        """
        row: dict[str, Any] = {"step": int(step), "time": self._clock()}
        for name, value in flat(metrics, prefix):
            if name in OWN_NAMES:
                continue
            try:
                row[name] = _scalar(value)
            except (TypeError, ValueError) as error:
                if name not in self._unusable:
                    self._unusable.add(name)
                    logger.warning("metric %s is not logged: %s", name, error)
        for sink in self._sinks:
            # A custom sink may modify its row.
            self._guard(sink, "write", dict(row))

    def log_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, object]]) -> None:
        """Send the samples of a step to the sinks that support samples (W&B). May be called from any thread,
        and after the step's row.

        Args:
            kind: ``train`` or ``validation``.
            step: number of the training step.
            samples: see ``megarl.rollout.sample_log``.
        """
        for sink in self._sinks:
            if isinstance(sink, WandbSink):
                self._guard(sink, "write_samples", kind, step, samples)

    def truncate_after(self, step: int) -> None:
        """Discard the rows of steps after ``step``, which a resumed run repeats."""
        for sink in self._sinks:
            self._guard(sink, "truncate_after", step)

    def close(self) -> None:
        """Close all sinks. A second call does nothing."""
        sinks, self._sinks = self._sinks, []
        for sink in sinks:
            self._guard(sink, "close")

    def __enter__(self) -> MetricSinks:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _guard(self, sink: Sink, method: str, *arguments: Any) -> None:
        try:
            getattr(sink, method)(*arguments)
        # A custom sink may even exit.
        except (Exception, SystemExit) as error:
            if sink.name not in self._failing:
                self._failing.add(sink.name)
                logger.warning(
                    "%s failed in %s (%s: %s); training continues without it",
                    sink.name,
                    method,
                    type(error).__name__,
                    error,
                )
        else:
            self._failing.discard(sink.name)


def open_sinks(
    logger_config: LoggerConfig, run_dir: str | Path, run_config: RunConfig | None = None
) -> MetricSinks:
    """Open the sinks that a ``logger`` section enables. A sink that cannot be opened is skipped with a
    warning.

    Args:
        logger_config: checked ``logger`` section. ``log_dir`` (default: the run directory) is the directory
            for the files of all sinks, except ``metrics.jsonl``, which is always in the run directory.
        run_dir: the run directory; created if missing.
        run_config: resolved configuration; sinks get it with secrets redacted.

    Raises:
        ConfigError: the package of an enabled sink is not installed, or a custom sink cannot be imported.
    """
    directory = Path(run_dir)
    log_dir = Path(logger_config.get("log_dir") or directory)
    config: Any = run_config or {}
    # Build the sinks one by one below, because each may fail on its own.
    builders: list[tuple[str, Callable[[], Sink]]] = [(FILE_NAME, lambda: MetricsFileSink(directory))]
    if logger_config.get("tensorboard_enabled"):
        builders.append(
            (TensorBoardSink.name, lambda: TensorBoardSink(logger_config.get("tensorboard") or {}, log_dir))
        )
    for service, kind in _SERVICES.items():
        if at(logger_config, f"{service}_enabled"):
            settings: Any = at(logger_config, service) or {}
            builders.append((kind.name, partial(kind, settings, log_dir, config)))
    for path in logger_config.get("sinks") or ():
        builders.append((path, partial(_own_sink, path, log_dir, config)))
    sinks: list[Sink] = []
    for name, build in builders:
        try:
            sinks.append(build())
        except ConfigError:
            # The caller does not get the sinks that are open already, so close them here.
            MetricSinks(sinks).close()
            raise
        except (Exception, SystemExit) as error:
            logger.warning(
                "%s cannot be opened (%s: %s); training continues without it",
                name,
                type(error).__name__,
                error,
            )
    return MetricSinks(sinks)


def _own_sink(path: str, log_dir: Path, config: RunConfig) -> Sink:
    """Build the custom sink at an import path. If it has no ``name``, the path becomes its name."""
    sink: Any = load_object(path, "logger.sinks")(log_dir, redacted(config))
    if not isinstance(getattr(sink, "name", None), str):
        sink.name = path
    return cast(Sink, sink)


def _scalar(value: Any) -> int | float | bool | str | None:
    """Convert a value to a plain type; tensors and arrays with one element give that element.

    Raises:
        TypeError: the value is not a single number or string.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # numpy's float64 is a subclass of float.
        return float(value)
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a {type(value).__name__} is not a number or text; log one number per name")
    try:
        return _scalar(item())
    except RuntimeError as error:
        raise TypeError(f"it has more than one element ({error})") from error
