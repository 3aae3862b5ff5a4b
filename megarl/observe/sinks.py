"""Distribution of a step's metrics to all sinks, such that a failing sink cannot stop training."""

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
from megarl.config.sections import LoggerConfig
from megarl.errors import ConfigError
from megarl.import_path import load_object
from megarl.observe.metrics_file import FILE_NAME, MetricsFile, encoded
from megarl.observe.services import MlflowSink, TensorBoardSink, TrackioSink, WandbSink, flat
from megarl.redaction import redacted

logger = logging.getLogger(__name__)

_OWN_NAMES = ("step", "time")
_MOST_BYTES = 64 << 20
# Classes of sinks by their section of ``logger``.
_SERVICES: dict[str, type[WandbSink] | type[MlflowSink] | type[TrackioSink]] = {
    "wandb": WandbSink,
    "mlflow": MlflowSink,
    "trackio": TrackioSink,
}


class Sink(Protocol):
    """A destination of metric rows. Any method may raise; ``MetricSinks`` catches and reports it.

    A user-defined class, named in ``logger.sinks``, is constructed with ``(log_dir, run_config)``: a
    directory for its files, and the resolved configuration without secrets. Its methods are called by one
    thread, between the steps, which wait for them.
    """

    name: str

    def write(self, row: Mapping[str, Any]) -> None:
        """Write one row ``{"step", "time", name: int | float | bool | str | None}``."""

    def truncate_after(self, step: int) -> None:
        """Discard the rows of later steps."""

    def close(self) -> None:
        """Flush, and release all resources."""


class MetricsFileSink:
    """The sink that every run has: ``metrics.jsonl`` in the run directory."""

    name = FILE_NAME

    def __init__(self, run_dir: Path, most_bytes: int = _MOST_BYTES) -> None:
        """Args:
            run_dir: directory of the run.
            most_bytes: maximum number of bytes of rows that are queued while the file cannot be written, as
                on a full disk; beyond it the oldest rows are lost.

        Raises:
            OSError: the file cannot be opened.
        """
        self._file, self._most_bytes = MetricsFile(run_dir / FILE_NAME), most_bytes
        # Each waiting row is stored with its step.
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._cut_after: int | None = None
        self._was_full = False
        self._lost = 0

    def write(self, row: Mapping[str, Any]) -> None:
        """Append one row after the queued ones."""
        self._waiting.append((row["step"], encoded(row)))
        while sum(len(line) for _, line in self._waiting) > self._most_bytes and len(self._waiting) > 1:
            self._waiting.popleft()
            self._lost += 1
        self._write_waiting()

    def truncate_after(self, step: int) -> None:
        """Remove the rows of later steps, including queued ones. If this fails, it is done before the next
        row is written."""
        self._waiting = deque(each for each in self._waiting if each[0] <= step)
        # Take the earlier step of the two: rows that a previous call could not remove are still in the file.
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
        """Write the queued rows in order, each once, after any truncation that is still due.

        Raises:
            OSError: the file cannot be written; the message tells how many rows stay queued.
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
                # Remove the row only after it is written, so that it stays the first one after an error.
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
    """All sinks of a run. A failing sink is reported once, and reported again only after it has worked in
    between."""

    def __init__(self, sinks: list[Sink], clock: Callable[[], float] = time.time) -> None:
        """Args:
        sinks: sinks that get every row, in this order.
        clock: unix seconds for the ``time`` of a row.
        """
        self._sinks = list(sinks)
        self._clock = clock
        self._failing: set[str] = set()
        self._unusable: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int, prefix: str = "") -> None:
        """Write one row.

        Args:
            metrics: name to number, text, None, or a tensor or array of one element; nested mappings become
                ``outer/inner``. Anything else is left out, with one warning per name.
            step: number of the step.
            prefix: prefix of every name, joined by a slash; for example, ``train`` gives ``train/loss``.
        """
        row: dict[str, Any] = {"step": int(step), "time": self._clock()}
        for name, value in flat(metrics, prefix):
            if name in _OWN_NAMES:
                continue
            try:
                row[name] = _scalar(value)
            except (TypeError, ValueError) as error:
                if name not in self._unusable:
                    self._unusable.add(name)
                    logger.warning("metric %s is not logged: %s", name, error)
        for sink in self._sinks:
            # Pass a copy, because a sink may change it.
            self._guard(sink, "write", dict(row))

    def log_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Pass the samples of a step to the sinks that accept samples. Any thread may call this, even after
        the step has been logged.

        Args:
            kind: ``train`` or ``validation``.
            step: step of the run.
            samples: see ``megarl.rollout.sample_log``.
        """
        for sink in self._sinks:
            if isinstance(sink, WandbSink):
                self._guard(sink, "write_samples", kind, step, samples)

    def truncate_after(self, step: int) -> None:
        """Discard, on resume from the checkpoint of ``step``, the rows that an earlier launch logged for
        later steps."""
        for sink in self._sinks:
            self._guard(sink, "truncate_after", step)

    def close(self) -> None:
        """Close every sink; a second call does nothing."""
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
        # Catch SystemExit too, because a user's code may fail in any way and even exit.
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
    logger_config: LoggerConfig, run_dir: str | Path, run_config: Mapping[str, Any] | None = None
) -> MetricSinks:
    """Open the sinks that a ``logger`` section enables.

    Args:
        logger_config: a checked ``logger`` section. Its ``log_dir`` (default: the run directory) holds the
            files of all sinks except ``metrics.jsonl``, which is always written, in the run directory.
        run_dir: directory of the run; created if missing.
        run_config: the resolved configuration, which sinks get with its secrets redacted.

    Raises:
        ConfigError: the package of an enabled sink is not installed, or an import path leads to no sink.
    """
    directory = Path(run_dir)
    log_dir, config = Path(logger_config.get("log_dir") or directory), run_config or {}
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
            # Close the sinks that are already open, because no caller holds them yet.
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


def _own_sink(path: str, log_dir: Path, config: Mapping[str, Any]) -> Sink:
    """Build the user-defined sink at an import path; the path becomes its name if it has none."""
    sink: Any = load_object(path, "logger.sinks")(log_dir, redacted(config))
    if not isinstance(getattr(sink, "name", None), str):
        sink.name = path
    return cast(Sink, sink)


def _scalar(value: Any) -> int | float | bool | str | None:
    """Convert a value to a plain one; tensors and arrays of one element give that element.

    Raises:
        TypeError: the value is not, and does not contain, a single plain value.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        # Convert, because numpy's float64 is a subclass of Python's float.
        return float(value)
    item = getattr(value, "item", None)
    if item is None:
        raise TypeError(f"a {type(value).__name__} is not a number or text; log one number per name")
    try:
        return _scalar(item())
    except RuntimeError as error:
        raise TypeError(f"it has more than one element ({error})") from error
