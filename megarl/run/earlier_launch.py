"""Decide from the files in a run directory what a new launch takes over from earlier launches, and what it
must not overwrite."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import yaml

from megarl import env
from megarl.checkpoint.manager import CheckpointManager
from megarl.checkpoint.storage import read_again
from megarl.config.nested import put
from megarl.config.sections import CheckpointingConfig, Config, RunConfig
from megarl.errors import ConfigError, StorageError, Violation
from megarl.observe.launches import array_task, read_launches
from megarl.observe.metrics_file import FILE_NAME as METRICS_FILE

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.yaml"
"""Name of the file in the run directory with the resolved configuration of the newest launch."""

_RECIPE = "recipe"


def kept_config(path: Path) -> Config:
    """Return the configuration that an earlier launch saved in a file; empty if the file is missing or
    unreadable."""
    try:
        found = yaml.safe_load(read_again(lambda: path.read_text(encoding="utf-8"), str(path)))
    except (OSError, ValueError, RecursionError, yaml.YAMLError, StorageError):
        # Whoever needs the content reports the error; here a missing configuration only means that there is
        # nothing to compare.
        return {}
    return found if isinstance(found, dict) else {}


def require_same_recipe(config: RunConfig, run_dir: Path) -> None:
    """Reject a run directory that contains a run of another recipe, unless that run has not trained a step.

    Raises:
        ConfigError: the recipes differ, and ``checkpointing.accept_changes`` is false.
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
    """Reject a ``checkpoint_dir`` inside the original run, if ``run_dir`` is a copy of another run's
    directory.

    Raises:
        ConfigError: the run would replace the original run's checkpoints.
    """
    original = kept_config(run_dir / CONFIG_FILE).get("run_dir")
    directory = Path(section["checkpoint_dir"]).absolute()
    if not isinstance(original, str) or directory.is_relative_to(run_dir):
        return
    # A symlink may give one directory two paths, so compare resolved paths.
    is_copy = Path(original).resolve() != run_dir.resolve()
    if is_copy and directory.is_relative_to(Path(original).absolute()):
        own = run_dir / directory.relative_to(Path(original).absolute())
        bound = f"{run_dir} is a copy of {original}, whose checkpoints this run would replace"
        key = "checkpointing.checkpoint_dir"
        raise ConfigError([Violation(key, str(directory), bound, f"give {key}={own}")])


def _has_trained(config: RunConfig, run_dir: Path) -> bool:
    metrics = run_dir / METRICS_FILE
    # A launch that fails in its first step leaves an empty file.
    has_rows = metrics.is_file() and metrics.stat().st_size > 0
    return has_rows or any(Path(config["checkpointing"]["checkpoint_dir"]).glob("step_*"))


def with_own_run_resumed(config: RunConfig, run_dir: Path) -> RunConfig:
    """Return the configuration, with ``checkpointing.resume`` changed from never to auto for a later launch
    of the same job.

    All launches of a Slurm job, and of a chain of jobs, have the same command line. With ``never``, a
    requeued launch would discard the job's own progress. It resumes only if an earlier launch of this job, or
    of a job before it in the chain, started the run in this directory from step 0.
    """
    settings = config["checkpointing"]
    if not settings["enabled"] or settings["resume"] != "never":
        return config
    jobs = [array_task(job) or job for job in (env.text("MEGARL_CHAIN_BEFORE") or "").split()]
    this_job = env.text("SLURM_JOB_ID") if env.integer("SLURM_RESTART_COUNT", 0) > 0 else None
    if not jobs and this_job is None:
        return config
    # Only the newest launch from step 0 counts, because steps before it belong to an earlier run.
    launches = read_again(lambda: read_launches(run_dir), str(run_dir))
    begun = next((each for each in reversed(launches) if each.first_step == 0), None)
    if begun is None or (begun.job_id != this_job and (begun.array_task or begun.job_id) not in jobs):
        return config
    # Skip the hashes here: the resume verifies them, which takes minutes for a large model.
    path = CheckpointManager(settings, verify_hashes=False).get_latest_checkpoint_path()
    # The checkpoint must be newer than the launch and name this run directory, because another run may use
    # the same ``checkpoint_dir``.
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
    """Set the date for the chat template to the one that an earlier launch used, so that a run's prompts stay
    the same. A date in the configuration takes precedence.

    Args:
        config: configuration of this launch; ``policy.tokenizer.template_date`` is set in place.
        kept: configuration files of earlier launches; the first that contains a date decides.
    """
    section = config["policy"]["tokenizer"]
    for path in kept if section.get("template_date") is None else ():
        date = ((kept_config(path).get("policy") or {}).get("tokenizer") or {}).get("template_date")
        if isinstance(date, str):
            section["template_date"] = date
            return


def kept_configs(config: RunConfig, run_dir: Path) -> list[Path]:
    """Return the saved configuration files of the run that this launch continues: in the run directory, then
    in the newest checkpoint. Empty with ``resume: never``."""
    if config["checkpointing"]["resume"] == "never":
        return []
    steps = Path(config["checkpointing"]["checkpoint_dir"]).glob(f"step_*/{CONFIG_FILE}")
    return [run_dir / CONFIG_FILE, *sorted(steps, key=lambda path: path.stat().st_mtime, reverse=True)[:1]]
