"""Read the settings of a run from ``config.yaml`` in its directory. A user may have edited the file, so
settings that are invalid count as absent."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import yaml

from megarl.config.algorithms import ORDER
from megarl.config.backend import enabled_backend
from megarl.config.policy import PolicyConfig
from megarl.config.sections import Config
from megarl.import_path import is_import_path

CONFIG_FILE = "config.yaml"
_CHECKPOINTS = "checkpoints"


@dataclass(frozen=True, slots=True)
class Configured:
    """Settings of a run that ``megarl status`` shows; None if the file does not contain them.

    Attributes:
        algorithm: name of the algorithm's section.
        model: model of the policy.
        backend: training backend of the policy.
        total_steps: ``max_num_steps``; a run may end earlier at the end of its epochs.
        checkpoint_dir: current directory of the checkpoints, also if the run directory was moved.
        signing_key_file: file with the key that signs the checkpoints.
    """

    algorithm: str | None
    model: str | None
    backend: str | None
    total_steps: int | None
    checkpoint_dir: Path
    signing_key_file: str | None = None


def read_configured(run_dir: Path) -> Configured:
    """Return the settings in a run directory's ``config.yaml``. They are all absent if the file is missing,
    damaged or not readable for this user.

    Raises:
        OSError: the file exists, but reading it failed for another reason.
    """
    config = _read(run_dir / CONFIG_FILE)
    policy = _section(config, "policy")
    algorithm = _text(config.get("algorithm"))
    section = algorithm or ""
    if is_import_path(section):
        # Do not import a custom algorithm only to find its section. It is the one section with steps that no
        # built-in algorithm has.
        own = (name for name in config if name not in ORDER and "max_num_steps" in _section(config, name))
        section = next(own, section.rpartition(":")[2])
    steps = _section(config, section).get("max_num_steps")
    checkpointing, configured_run = _section(config, "checkpointing"), _text(config.get("run_dir"))
    start, key = _start_directory(run_dir, configured_run), _text(checkpointing.get("signing_key_file"))
    return Configured(
        algorithm=section or None,
        model=_text(policy.get("model_name")),
        backend=_backend(policy) if policy else None,
        # bool is a subclass of int.
        total_steps=steps if isinstance(steps, int) and not isinstance(steps, bool) else None,
        checkpoint_dir=_checkpoint_dir(
            run_dir, configured_run, _text(checkpointing.get("checkpoint_dir")), start
        ),
        signing_key_file=None if key is None else str(start / key),
    )


def _start_directory(run_dir: Path, configured: str | None) -> Path:
    """Return the directory in which the run was started, relative to which its other paths are. It follows
    from a relative ``run_dir``; if that does not match, return the working directory."""
    place, below = os.path.abspath(run_dir), os.path.normpath(configured or os.pardir)
    above = place if below == os.curdir else place.removesuffix(f"/{below}")
    return Path(above or "/") if above != place or below == os.curdir else Path()


def _backend(policy: Config) -> str:
    # A missing section means that this backend is not enabled.
    sections = {
        name: {"enabled": False, **_section(policy, name)} for name in ("megatron_cfg", "dtensor_cfg")
    }
    return enabled_backend(cast(PolicyConfig, sections))


def _checkpoint_dir(run_dir: Path, configured_run: str | None, configured: str | None, start: Path) -> Path:
    """Return the current directory of the checkpoints. Checkpoints inside the run directory have moved with
    it."""
    if configured is None:
        return run_dir / _CHECKPOINTS
    if configured_run is not None and Path(configured).is_relative_to(configured_run):
        return run_dir / Path(configured).relative_to(configured_run)
    # The configured path is not below the configured ``run_dir``. If there are checkpoints in this directory,
    # they have been moved here.
    beside = run_dir / _CHECKPOINTS
    return beside if beside.is_dir() else start / configured


def _read(path: Path) -> Config:
    try:
        config = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, PermissionError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}


def _section(config: Config, name: str) -> Config:
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
