"""Metric sinks of external services: TensorBoard, Weights & Biases, MLflow and Trackio. A library is imported
only if its sink is enabled."""

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

from megarl.config.sections import MlflowConfig, RunConfig, TensorboardConfig, TrackioConfig, WandbConfig
from megarl.errors import ConfigError, Violation
from megarl.observe.metrics_file import MetricRow
from megarl.redaction import redacted

logger = logging.getLogger(__name__)

_WANDB_ID_FILE, _MLFLOW_ID_FILE, _TRACKIO_ID_FILE = "wandb_run_id", "mlflow_run_id", "trackio_run_id"
OWN_NAMES = ("step", "time")
# MLflow's limits on the parameters and metrics in one request, and the seconds to wait at the end of a run
# for a server that does not accept the last rows.
_MOST_PARAMS = 100
_MOST_METRICS = 1000
_LAST_ROWS_S = 60.0


class TensorBoardSink:
    """Writes metrics as TensorBoard event files."""

    name = "TensorBoard"

    def __init__(self, settings: TensorboardConfig, log_dir: Path) -> None:
        """Args:
            settings: keyword arguments of ``SummaryWriter``; null means not given. ``log_dir`` in it takes
                precedence over the argument.
            log_dir: parent directory of the event files.

        Raises:
            ConfigError: TensorBoard is not installed.
        """
        module = _import("torch.utils.tensorboard", "logger.tensorboard_enabled", "tensorboard")
        self._writer_class = module.SummaryWriter
        self._settings = {"log_dir": str(log_dir / "tensorboard"), **_without_nulls(settings)}
        self._writer: Any = None
        self._purge_step: int | None = None

    def write(self, row: MetricRow) -> None:
        """Write the numbers of a row; strings are omitted."""
        if self._writer is None:
            # The steps to purge are known only after ``truncate_after``, so create the writer at the first
            # row.
            self._writer = self._writer_class(**self._settings, purge_step=self._purge_step)
        for name, value in row.items():
            if name not in OWN_NAMES and isinstance(value, int | float):
                self._writer.add_scalar(name, value, global_step=row["step"], walltime=row["time"])
        # A killed run would lose the rows in the buffer.
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide the points of later steps from an earlier launch."""
        self.close()
        self._writer, self._purge_step = None, step + 1

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class _RunSink:
    """Base class for services whose client object has ``log`` and ``finish``. The service decides what
    happens to rows of a step that it already has."""

    _run: Any

    def write(self, row: MetricRow) -> None:
        """Log a row."""
        self._run.log({name: value for name, value in row.items() if name not in OWN_NAMES}, step=row["step"])

    def truncate_after(self, step: int) -> None:
        """Do nothing: W&B ignores rows of steps that it already has, and Trackio cannot delete rows."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


class WandbSink(_RunSink):
    """Sends metrics and samples to Weights & Biases. A resumed run continues the same W&B run."""

    name = "Weights & Biases"

    def __init__(self, settings: WandbConfig, log_dir: Path, run_config: RunConfig) -> None:
        """Args:
            settings: keyword arguments of ``wandb.init`` (``project``, ``name``, ...); null means not given.
            log_dir: directory for W&B's files and for a file with the id of the W&B run.
            run_config: resolved configuration; sent with its secrets redacted.

        Raises:
            ConfigError: W&B is not installed.
        """
        module = _import("wandb", "logger.wandb_enabled", "wandb")
        log_dir.mkdir(parents=True, exist_ok=True)
        # "allow" continues the W&B run with this id, or creates it.
        identity = {"id": _remembered_id(log_dir / _WANDB_ID_FILE), "resume": "allow"}
        # Keep the module for ``write_samples``.
        self._module = module
        self._run = module.init(
            **{"dir": str(log_dir), **identity, **_without_nulls(settings)}, config=redacted(run_config)
        )

    def write_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send the samples of a step as a table ``samples/KIND``, without token ids. The parts of a reward
        become columns ``reward/NAME``.

        The table is attached to W&B's current step, and its column ``step`` has the samples' step: W&B does
        not accept data for an earlier step.
        """
        rows = list(map(_as_columns, samples))
        columns = list(dict.fromkeys(itertools.chain.from_iterable(rows)))
        data = [list(map(row.get, columns)) for row in rows]
        # Infinite numbers are stored as strings, so a column may have both types.
        table = self._module.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({f"samples/{kind}": table}, commit=False)


class MlflowSink:
    """Sends metrics to MLflow. A resumed run continues the same MLflow run.

    A thread sends them, because MLflow's client retries for minutes if the server does not respond.
    """

    name = "MLflow"

    def __init__(self, settings: MlflowConfig, log_dir: Path, run_config: RunConfig) -> None:
        """Args:
            settings: ``experiment_name``, ``run_name`` and ``tracking_uri``; null means not given.
            log_dir: directory for a file with the id of the MLflow run.
            run_config: resolved configuration; sent as parameters, with its secrets redacted, when the MLflow
                run is created.

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

    def write(self, row: MetricRow) -> None:
        """Queue the numbers of a row for sending; MLflow metrics cannot be strings.

        Raises:
            Exception: an earlier row could not be sent.
        """
        milliseconds, step = int(row["time"] * 1000), row["step"]
        metrics = []
        for name, value in row.items():
            if name not in OWN_NAMES and isinstance(value, int | float):
                metrics.append(self._entities.Metric(name, float(value), milliseconds, step))
        for first in range(0, len(metrics), _MOST_METRICS):
            part = metrics[first : first + _MOST_METRICS]
            self._calls.put(functools.partial(self._client.log_batch, self._run_id, metrics=part))
        self._calls.raise_fault()

    def truncate_after(self, step: int) -> None:
        """Do nothing: MLflow cannot delete points. It shows the later point of a repeated step."""

    def close(self) -> None:
        """Send the remaining rows, and mark the MLflow run as finished."""
        # Queue this after the rows, because MLflow shows a finished run as complete.
        self._calls.put(lambda: self._client.set_terminated(self._run_id))
        self._calls.finish(_LAST_ROWS_S)
        self._calls.raise_fault()

    def _same_run(self, path: Path) -> str | None:
        """Reopen the MLflow run of an earlier launch, and return its id. Return None if there is none, or
        MLflow has deleted it."""
        run_id = path.read_text().strip() if path.exists() else ""
        if not run_id:
            return None
        try:
            self._client.update_run(run_id, status="RUNNING")
        except Exception as error:
            # Create a new MLflow run only if this one was deleted. An unreachable server must not lead to a
            # second one.
            if getattr(error, "error_code", None) != "RESOURCE_DOES_NOT_EXIST":
                raise
            logger.warning("MLflow no longer has run %s; a new one is created", run_id)
            return None
        return run_id

    def _new_run(self, settings: MlflowConfig, log_dir: Path, run_config: RunConfig) -> str:
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
        # MLflow limits the parameters of one request.
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
        return run_id


class TrackioSink(_RunSink):
    """Passes metrics to Trackio, whose own thread sends them. A resumed run continues the same Trackio
    run."""

    name = "Trackio"

    def __init__(self, settings: TrackioConfig, log_dir: Path, run_config: RunConfig) -> None:
        """Args:
            settings: keyword arguments of ``trackio.init`` (``project``, ``name``, ...); null means not
                given.
            log_dir: directory for a file with the random suffix of the Trackio run's name.
            run_config: resolved configuration; sent with its secrets redacted.

        Raises:
            ConfigError: Trackio is not installed.
        """
        module = _import("trackio", "logger.trackio_enabled", "trackio")
        log_dir.mkdir(parents=True, exist_ok=True)
        # Trackio resumes by name. A random suffix keeps it from continuing another run of the same name.
        name = "-".join([*filter(None, [settings.get("name")]), _remembered_id(log_dir / _TRACKIO_ID_FILE)])
        self._run = module.init(
            **_without_nulls(settings) | {"name": name, "resume": "allow", "config": redacted(run_config)}
        )


class _InOrder:
    """A thread that makes queued calls in order. It stores the first exception, which ``raise_fault``
    raises."""

    def __init__(self, name: str) -> None:
        self._waiting: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._fault: Exception | None = None
        # A daemon thread cannot keep the process alive when the server hangs.
        self._thread = threading.Thread(target=self._make, name=name, daemon=True)
        self._thread.start()

    def put(self, call: Callable[[], Any]) -> None:
        self._waiting.put(call)

    def raise_fault(self) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            raise fault

    def finish(self, patience_s: float) -> None:
        """Wait until all queued calls are done.

        Raises:
            TimeoutError: they take longer than ``patience_s`` seconds.
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
    """Yield (name, value) for all leaves of nested mappings; names are joined by ``separator``."""
    for name, value in nested.items():
        path = f"{prefix}{separator}{name}" if prefix else name
        if isinstance(value, Mapping):
            yield from flat(value, path, separator)
        else:
            yield path, value


def _as_columns(sample: Mapping[str, Any]) -> dict[str, object]:
    plain = {name: value for name, value in sample.items() if not isinstance(value, Mapping | list)}
    return {**plain, **{f"reward/{name}": value for name, value in sample["rewards"].items()}}


def _without_nulls(settings: WandbConfig | TensorboardConfig | TrackioConfig) -> dict[str, object]:
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
