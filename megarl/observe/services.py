"""Sinks other than the metrics file: TensorBoard and Weights & Biases, each imported only when it is switched on."""

from __future__ import annotations

import importlib
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from megarl.errors import ConfigError, Violation
from megarl.redaction import redacted

_WANDB_ID_FILE = "wandb_run_id"


class TensorBoardSink:
    """Writes scalars as TensorBoard event files."""

    name = "TensorBoard"

    def __init__(self, settings: Mapping[str, Any], log_dir: Path) -> None:
        """Args:
            settings: keyword arguments of ``SummaryWriter``, null meaning absent; ``log_dir`` in it wins over the argument.
            log_dir: where the event files go.

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
            self._writer = self._writer_class(**self._settings, purge_step=self._purge_step)
        for name, value in row.items():
            if name not in ("step", "time") and isinstance(value, int | float):
                self._writer.add_scalar(name, value, global_step=row["step"], walltime=row["time"])
        self._writer.flush()

    def truncate_after(self, step: int) -> None:
        """Make TensorBoard hide points of later steps that an earlier launch wrote."""
        self.close()
        self._writer, self._purge_step = None, step + 1

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()


class WandbSink:
    """Sends rows to Weights & Biases; a resumed run goes on in the same W&B run."""

    name = "Weights & Biases"

    def __init__(self, settings: Mapping[str, Any], log_dir: Path, run_config: Mapping[str, Any]) -> None:
        """Args:
            settings: keyword arguments of ``wandb.init`` (``project``, ``name``, ...), null meaning absent.
            log_dir: where W&B keeps its files and megarl the id of the W&B run.
            run_config: the resolved configuration; secrets in it are hidden before it is sent.

        Raises:
            ConfigError: W&B is not installed.
        """
        module = _import("wandb", "logger.wandb_enabled", "wandb")
        log_dir.mkdir(parents=True, exist_ok=True)
        identity = {"id": _remembered_id(log_dir / _WANDB_ID_FILE), "resume": "allow"}
        self._module = module
        self._run = module.init(**{"dir": str(log_dir), **identity, **_without_nulls(settings)}, config=redacted(run_config))

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row."""
        self._run.log({name: value for name, value in row.items() if name not in ("step", "time")}, step=row["step"])

    def write_samples(self, kind: str, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Send the samples of a step as a table, ``samples/KIND``, whose column ``step`` says which.

        It goes with the row that W&B has at hand, since it may come when that of its own step is gone, and W&B takes no earlier step.
        Token ids stay here; the parts of a reward are columns ``reward/NAME``.
        """
        rows = [_as_columns(sample) for sample in samples]
        columns = list(dict.fromkeys(name for row in rows for name in row))
        data = [[row.get(name) for name in columns] for row in rows]
        # a number that is infinite is a text
        table = self._module.Table(columns=columns, data=data, allow_mixed_types=True)
        self._run.log({f"samples/{kind}": table}, commit=False)

    def truncate_after(self, step: int) -> None:
        """Nothing to do: W&B itself ignores a step that it already has."""

    def close(self) -> None:
        """Finish the upload."""
        self._run.finish()


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
        raise ConfigError([Violation(key, True, bound, f"pip install {package}, or set {key}=false")]) from error
