"""Files that earlier launches left in a run's directory, and the part of them that a launch keeps."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from megarl import env
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.storage import read_again
from megarl.config.nested import put
from megarl.config.sections import CheckpointingConfig, RunConfig
from megarl.errors import ConfigError, StorageError, Violation
from megarl.observe.launches import array_task, read_launches
from megarl.observe.metrics_file import FILE_NAME as METRICS_FILE

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
"""The resolved configuration of the newest launch, in the run's directory."""

_RECIPE = "recipe"


def kept_config(path: Path) -> Mapping[str, Any]:
    """Return the configuration that a launch or a checkpoint left in a file; empty if no file can be read."""
    try:
        found = yaml.safe_load(read_again(lambda: path.read_text(encoding="utf-8"), str(path)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, StorageError):
        # The code that needs the content of the file will report what is wrong with it.
        return {}
    return found if isinstance(found, Mapping) else {}


def require_same_recipe(config: RunConfig, run_dir: Path) -> None:
    """Refuse to write into the directory of a run that was started from another recipe.

    A directory in which no launch has trained yet belongs to no recipe.

    Raises:
        ConfigError: it belongs to another recipe, and ``checkpointing.accept_changes`` is false.
    """
    before, now = kept_config(run_dir / CONFIG_FILE).get(_RECIPE), config.get(_RECIPE)
    if (
        before in (None, now)
        or now is None
        or config["checkpointing"]["accept_changes"]
        or not _has_trained(config, run_dir)
    ):
        return
    bound = f"{run_dir} holds a run of the recipe {before!r}, which this run would resume and overwrite"
    fix = (
        f"give run_dir=runs/{now} or another directory, or checkpointing.accept_changes=true to "
        "continue with this recipe"
    )
    raise ConfigError([Violation(_RECIPE, now, bound, fix)])


def require_own_checkpoints(section: CheckpointingConfig, run_dir: Path) -> None:
    """Refuse to save into the directory of which ``run_dir`` is a copy.

    Raises:
        ConfigError: ``checkpointing.checkpoint_dir`` is in that directory.
    """
    original = kept_config(run_dir / CONFIG_FILE).get("run_dir")
    directory = Path(section["checkpoint_dir"]).absolute()
    if not isinstance(original, str) or directory.is_relative_to(run_dir):
        return
    # Two paths may lead to one directory, by a link.
    is_copy = Path(original).resolve() != run_dir.resolve()
    if is_copy and directory.is_relative_to(Path(original).absolute()):
        own = run_dir / directory.relative_to(Path(original).absolute())
        bound = f"{run_dir} is a copy of {original}, whose checkpoints this run would replace"
        key = "checkpointing.checkpoint_dir"
        raise ConfigError([Violation(key, str(directory), bound, f"give {key}={own}")])


def _has_trained(config: RunConfig, run_dir: Path) -> bool:
    metrics = run_dir / METRICS_FILE
    # An empty file does not count: a launch that fails in its first step leaves one.
    has_rows = metrics.is_file() and metrics.stat().st_size > 0
    return has_rows or any(Path(config["checkpointing"]["checkpoint_dir"]).glob("step_*"))


def with_own_run_resumed(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the configuration, with ``checkpointing.resume`` changed from never to auto if an earlier launch
    of this Slurm job, or of a job before it in its chain, began the run that is in the directory: all
    launches of a job have the same command line."""
    settings = config["checkpointing"]
    if not settings["enabled"] or settings["resume"] != "never":
        return config
    jobs = [array_task(job) or job for job in (env.text("MEGARL_CHAIN_BEFORE") or "").split()]
    this_job = env.text("SLURM_JOB_ID") if env.integer("SLURM_RESTART_COUNT", 0) > 0 else None
    if not jobs and this_job is None:
        return config
    # What was trained before the newest beginning belongs to another run, as does what another job began.
    launches = read_again(lambda: read_launches(run_dir), str(run_dir))
    begun = next((each for each in reversed(launches) if each.first_step == 0), None)
    if begun is None or (begun.job_id != this_job and (begun.array_task or begun.job_id) not in jobs):
        return config
    # The resume itself reads every byte, which takes minutes for a large model.
    path = CheckpointManager(settings, verify_hashes=False).get_latest_checkpoint_path()
    # Another run may have saved into the same checkpoint_dir.
    if (
        path is None
        or path.stat().st_mtime < begun.start
        or kept_config(path / CONFIG_FILE).get("run_dir") != config["run_dir"]
    ):
        return config
    logger.warning(
        "checkpointing.resume = never holds for the first launch of a job: this one continues from %s",
        path,
    )
    return put(config, "checkpointing.resume", "auto")


def keep_template_date(config: RunConfig, kept: Iterable[Path]) -> None:
    """Take the day that an earlier launch gave its chat template, so that a run's prompts stay the same. A
    configured day is kept.

    Args:
        config: of this launch; its section of the tokenizer gets the day.
        kept: configurations that earlier launches left; the first one with a day counts.
    """
    section = config["policy"]["tokenizer"]
    for path in kept if section.get("template_date") is None else ():
        date = ((kept_config(path).get("policy") or {}).get("tokenizer") or {}).get("template_date")
        if isinstance(date, str):
            section["template_date"] = date
            return


def kept_configs(config: RunConfig, run_dir: Path) -> list[Path]:
    """Return the configuration files of earlier launches that this launch continues; empty for a launch that
    starts over."""
    if config["checkpointing"]["resume"] == "never":
        return []
    steps = Path(config["checkpointing"]["checkpoint_dir"]).glob(f"step_*/{CONFIG_FILE}")
    return [run_dir / CONFIG_FILE, *sorted(steps, key=lambda path: path.stat().st_mtime, reverse=True)[:1]]
