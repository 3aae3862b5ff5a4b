"""Sinks other than the metrics file: TensorBoard, Weights & Biases, MLflow and Trackio. Each library is
imported only if its sink is enabled."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.config.sections import MlflowConfig, TensorboardConfig, TrackioConfig, WandbConfig
from megarl.errors import ConfigError, Violation
from megarl.redaction import redacted

logger = logging.getLogger(__name__)

_WANDB_ID_FILE, _MLFLOW_ID_FILE, _TRACKIO_ID_FILE = "wandb_run_id", "mlflow_run_id", "trackio_run_id"
_OWN_NAMES = ("step", "time")
# Maximum number of parameters, and of metrics, in a request, and of seconds for which the end of a run waits
# for a server that does not accept the last rows.
_MOST_PARAMS = 100
_MOST_METRICS = 1000
_LAST_ROWS_S = 60.0


class TensorBoardSink:
    """Sink that writes scalars as TensorBoard event files."""

    name = "TensorBoard"

    def __init__(self, settings: TensorboardConfig, log_dir: Path) -> None:
        """Args:
            settings: keyword arguments of ``SummaryWriter``, where null means absent; its ``log_dir``
                overrides the argument.
            log_dir: directory of the event files.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        module = _import("torch.utils.tensorboard", "logger.tensorboard_enabled", "tensorboard")
        self._writer_class = module.SummaryWriter
        self._settings = {"log_dir": str(log_dir / "tensorboard"), **_without_nulls(settings)}
        self._writer: Any = None
        self._purge_step: int | None = None

    def write(self, row: Mapping[str, Any]) -> None:
        """Write every number of the row; texts are left out."""
        if self._writer is None:
            # Create the writer at the first row, when the steps that a resumed run repeats are known.
            self._writer = self._writer_class(**self._settings, purge_step=self._purge_step)
        for name, value in row.items():
            if name not in _OWN_NAMES and isinstance(value, int | float):
                self._writer.add_scalar(name, value, global_step=row["step"], walltime=row["time"])
        # Flush every row, because a killed run would lose those in the writer's buffer.
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide the points of later steps that an earlier launch wrote."""
        self.close()
        self._writer, self._purge_step = None, step + 1

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class _RunSink:
    """Base of sinks that log rows to a run of a service. The service decides whether it ignores or keeps rows
    of steps that it already has."""

    _run: Any

    def write(self, row: Mapping[str, Any]) -> None:
        """Log one row."""
        self._run.log(
            {name: value for name, value in row.items() if name not in _OWN_NAMES}, step=row["step"]
        )

    def truncate_after(self, step: int) -> None:
        """Do nothing: W&B ignores steps that it already has, and Trackio cannot delete rows."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class WandbSink(_RunSink):
    """Sink that sends rows to Weights & Biases; a resumed run continues the same W&B run."""

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, log_dir: Path, run_config: Mapping[str, Any]) -> None:
        """Args:
            settings: keyword arguments of ``wandb.init`` (``project``, ``name``, ...), where null means
                absent.
            log_dir: directory of W&B's files and of the W&B run's id, which megarl stores.
            run_config: the resolved configuration; its secrets are redacted before it is sent.

        Raises:
            ConfigError: W&B is not installed.
        """
        module = _import("wandb", "logger.wandb_enabled", "wandb")
        log_dir.mkdir(parents=True, exist_ok=True)
        # "allow" continues the run with this id if W&B knows one, and creates it otherwise.
        identity = {"id": _remembered_id(log_dir / _WANDB_ID_FILE), "resume": "allow"}
        self._module = module
        self._run = module.init(
            **{"dir": str(log_dir), **identity, **_without_nulls(settings)}, config=redacted(run_config)
        )

    def write_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send the samples of a step as a table ``samples/KIND``, with the step in its column ``step``.

        The table is attached to W&B's current row, since the row of its own step may be gone already, and W&B
        accepts no earlier step. Token ids are not sent; the parts of a reward are columns ``reward/NAME``.
        """
        rows = list(map(_as_columns, samples))
        columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        data = [list(map(row.get, columns)) for row in rows]
        # Allow mixed types, because an infinite number is written as text.
        table = self._module.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({f"samples/{kind}": table}, commit=False)


class MlflowSink:
    """Sink that sends numbers to MLflow; a resumed run continues the same MLflow run.

    A thread sends them, because MLflow's client retries an unresponsive server for minutes, and a step must
    not wait for that.
    """

    name = "MLflow"

    def __init__(self, settings: MlflowConfig, log_dir: Path, run_config: Mapping[str, Any]) -> None:
        """Args:
            settings: ``experiment_name``, and ``run_name`` and ``tracking_uri``, where null means absent.
            log_dir: directory in which megarl stores the id of the MLflow run.
            run_config: the resolved configuration, which is sent as parameters when the MLflow run is
                created; its secrets are redacted.

        Raises:
            ConfigError: MLflow is not installed.
        """
        module = _import("mlflow", "logger.mlflow_enabled", "mlflow")
        self._client = module.MlflowClient(tracking_uri=settings.get("tracking_uri"))
        self._entities = module.entities
        logger.info("connecting to MLflow")
        self._run_id = self._same_run(log_dir / _MLFLOW_ID_FILE) or self._new_run(
            settings, log_dir, run_config
        )
        self._calls = _InOrder("megarl-mlflow")

    def write(self, row: Mapping[str, Any]) -> None:
        """Queue every number of the row for sending; MLflow accepts no texts as metrics.

        Raises:
            Exception: an earlier row could not be sent.
        """
        milliseconds, step = int(row["time"] * 1000), row["step"]
        metrics = []
        for name, value in row.items():
            if name not in _OWN_NAMES and isinstance(value, int | float):
                metrics.append(self._entities.Metric(name, float(value), milliseconds, step))
        for first in range(0, len(metrics), _MOST_METRICS):
            part = metrics[first : first + _MOST_METRICS]
            self._calls.put(functools.partial(self._client.log_batch, self._run_id, metrics=part))
        self._calls.raise_fault()

    def truncate_after(self, step: int) -> None:
        """Do nothing: MLflow cannot remove points, and shows the later one of a repeated step."""

    def close(self) -> None:
        """Send the last rows, and mark the MLflow run as ended."""
        self._calls.put(lambda: self._client.set_terminated(self._run_id))
        self._calls.finish(_LAST_ROWS_S)
        self._calls.raise_fault()

    def _same_run(self, path: Path) -> str | None:
        """Return the id of the MLflow run that an earlier launch created, and mark that run as running.
        Return None if there was no earlier launch, or MLflow no longer has its run."""
        run_id = path.read_text().strip() if path.exists() else ""
        if not run_id:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except Exception as error:
            # Make a new run only for this reply: an unreachable server must not lead to a second run.
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow no longer has run %s; a new one is created", run_id)
            return None
        return run_id

    def _new_run(self, settings: MlflowConfig, log_dir: Path, run_config: Mapping[str, Any]) -> str:
        name = settings["experiment_name"]
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = (
            experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        )
        run_id = str(self._client.create_run(experiment_id, run_name=settings.get("run_name")).info.run_id)
        log_dir.mkdir(parents=True, exist_ok=True)
        (log_dir / _MLFLOW_ID_FILE).write_text(run_id + "\n")
        params = [
            self._entities.Param(key, str(value)) for key, value in flat(redacted(run_config), separator=".")
        ]
        # Send the parameters in parts, because MLflow refuses more of them in one batch.
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id


class TrackioSink(_RunSink):
    """Sink that gives rows to Trackio, whose own thread sends them; a resumed run continues the same Trackio
    run."""

    name = "Trackio"

    def __init__(self, settings: TrackioConfig, log_dir: Path, run_config: Mapping[str, Any]) -> None:
        """Args:
            settings: keyword arguments of ``trackio.init`` (``project``, ``name``, ...), where null means
                absent.
            log_dir: directory in which megarl stores the random suffix of the Trackio run's name.
            run_config: the resolved configuration; its secrets are redacted.

        Raises:
            ConfigError: Trackio is not installed.
        """
        module = _import("trackio", "logger.trackio_enabled", "trackio")
        log_dir.mkdir(parents=True, exist_ok=True)
        # Add an id to the name: Trackio resumes by name, and must not continue another run with the same
        # name.
        name = "-".join([*filter(None, [settings.get("name")]), _remembered_id(log_dir / _TRACKIO_ID_FILE)])
        self._run = module.init(
            **_without_nulls(settings) | {"name": name, "resume": "allow", "config": redacted(run_config)}
        )


class _InOrder:
    """A thread that makes calls one after another. It keeps the first exception until ``raise_fault`` raises
    it."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._fault: Exception | None = None
        # Use a daemon thread, so that a server that never answers does not keep the process alive.
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], Any]) -> None:
        self._waiting.put(call)

    def raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def finish(self, patience_s: float) -> None:
        """Wait until all calls have been made.

        Raises:
            TimeoutError: the calls take longer than ``patience_s``.
        """
        self._waiting.put(None)
        self._thread.join(patience_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._waiting.qsize()} calls were not finished in {patience_s:g} s")

    def _make(self) -> None:
        while (call := self._waiting.get()) is not None:
            try:
                call()
            except Exception as error:
                self._fault = self._fault or error


def flat(nested: Mapping[str, Any], prefix: str = "", separator: str = "/") -> Iterator[tuple[str, Any]]:
    """Yield the leaf values of nested mappings, each with its names joined by ``separator``."""
    for name, value in nested.items():
        path = f"{prefix}{separator}{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from flat(value, path, separator)
        else:
            yield path, value


def _as_columns(sample: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in sample.items() if not isinstance(value, Mapping | list)}
    return {**plain, **{f"reward/{name}": value for name, value in sample["rewards"].items()}}


def _without_nulls(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if value is not None}


def _remembered_id(path: Path) -> str:
    if path.exists() and (known := path.read_text().strip()):
        return known
    fresh = secrets.token_hex(4)
    path.write_text(fresh + "\n")
    return fresh


def _import(module: str, key: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        bound = f"needs the package {package}, which cannot be imported ({error})"
        raise ConfigError(
            [Violation(key, True, bound, f"pip install {package}, or set {key}=false")]
        ) from error
