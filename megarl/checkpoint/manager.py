"""Checkpoints of one run: writing, committing, finding and pruning them.

A checkpoint is written to ``tmp_step_N``, gets a manifest, is synced to disk, and becomes ``step_N`` by a
single rename. Before that it does not exist for readers, and older checkpoints are not touched. Saving an
existing step again goes through ``step_N_replacement``, so that at every moment one of the two is complete.
Functions decide which checkpoints to keep, and the manager deletes the others. ``training_info.json`` records
the state of training: step, sampler state, metrics.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict

import yaml

from converters.files.atomic import commit_directory, json_bytes, write_bytes_durably
from megarl.checkpoint.atomic import TEMPORARY_PREFIX, remove_directory, remove_tree
from megarl.checkpoint.background import seal, tidy_memory
from megarl.checkpoint.lock import RunLock
from megarl.checkpoint.manifest import read_signing_key, sign_manifest, verify
from megarl.checkpoint.storage import is_real_directory, is_there, names_in, read_again, tree_bytes
from megarl.config.sections import CheckpointingConfig, RunConfig
from megarl.errors import CheckpointError, StorageError
from megarl.redaction import redacted

INFO_NAME = "training_info.json"


class TrainingInfo(TypedDict, total=False):
    """Content of ``training_info.json``: number of finished steps, position in the training data, and the
    metrics that rank checkpoints."""

    step: int
    sampler: Mapping[str, object]
    metrics: Mapping[str, float]


def plain_json(value: Any, where: str = "training_info") -> Any:
    """Return a copy of ``value`` that JSON stores unchanged; numpy and torch scalars become plain numbers.

    NaN and infinities become null with a warning, because a bad metric must not prevent the checkpoint.

    Raises:
        CheckpointError: a value has no JSON form, or a key is not a string; the message names its path.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    # numpy's float64 is a subclass of float; float(value) below converts it to a plain float.
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        logger.warning("%s = %s is not finite and is saved as null", where, value)
        return None
    if isinstance(value, Mapping):
        _refuse_other_keys(value, where)
        return {key: plain_json(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain_json(value.item(), where)
    raise CheckpointError(
        f"{where} is a {type(value).__name__}; only numbers, texts, lists and mappings are saved. Fix: "
        "convert it first"
    )


def read_info(checkpoint: Path) -> TrainingInfo:
    """Return the training info of a checkpoint.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    path = checkpoint / INFO_NAME
    try:
        info: TrainingInfo = json.loads(read_again(path.read_bytes, str(path)))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Fix: resume from another checkpoint"
        ) from error
    if not isinstance(info, dict):
        raise CheckpointError(
            f"{path} holds a {type(info).__name__}, not an object. Fix: resume from another checkpoint"
        )
    return info


def faults_of_checkpoint(path: Path, hashes: bool = True, key: bytes | None = None) -> list[str]:
    """Return the faults of a checkpoint: those that ``verify`` finds, and a step that is negative, not an
    integer, or different from the directory's name.

    A renamed or copied directory would otherwise be resumed from again and again; the signature covers the
    step but not the name.

    Raises:
        StorageError: the storage fails, so the faults are unknown.
    """
    problems = verify(path, hashes, key)
    if problems:
        return problems
    try:
        step = read_info(path).get("step")
    # A storage failure does not show that the checkpoint is damaged.
    except StorageError:
        raise
    except CheckpointError as error:
        return [str(error)]
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return [f"{INFO_NAME} says step = {step!r}, must be a whole number of at least 0"]
    named = _FINAL.fullmatch(path.name)
    if named is not None and int(named[1]) != step:
        return [
            (f"{INFO_NAME} says step = {step}: its directory was renamed, or is a copy of another checkpoint")
        ]
    return []


def metric_of(info: TrainingInfo, metric_name: str) -> float | None:
    """Return the metric by which a checkpoint is ranked, from the info or its ``metrics``; None if it is not
    a finite number."""
    nested = info.get("metrics")
    value = info.get(metric_name, nested.get(metric_name) if isinstance(nested, Mapping) else None)
    # Exclude bool, which is an int in Python.
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _refuse_other_keys(value: Mapping[Any, Any], where: str) -> None:
    for key in value:
        if not isinstance(key, str):
            raise CheckpointError(
                f"{where} has the key {key!r}; JSON keys are texts. Fix: write {str(key)!r}"
            )


def ranked_steps(metrics: Mapping[int, float | None], higher_is_better: bool) -> list[int]:
    """Return steps from best to worst.

    Args:
        metrics: metric of each step; None if the checkpoint has none.
        higher_is_better: a larger metric is better.

    Returns:
        Steps with a metric, best first and newer first among equals; then steps without a metric, newest
        first.
    """

    def badness(step: int) -> tuple[bool, float, int]:
        value = metrics[step]
        if value is None:
            return True, 0.0, -step
        # The key also orders equal metrics by age, so a single sort suffices.
        return False, -value if higher_is_better else value, -step

    return sorted(metrics, key=badness)


def steps_to_keep(
    metrics: Mapping[int, float | None],
    keep_top_k: int | None,
    higher_is_better: bool,
    keep_latest: bool = True,
) -> set[int]:
    """Return the best ``keep_top_k`` steps and, with ``keep_latest``, the latest one; all steps if
    ``keep_top_k`` is None. Always keeps at least one."""
    if keep_top_k is None:
        return set(metrics)
    kept = set(ranked_steps(metrics, higher_is_better)[:keep_top_k])
    if metrics and (keep_latest or not kept):
        # A killed run resumes from the latest checkpoint, whatever its metric.
        kept.add(max(metrics))
    return kept


logger = logging.getLogger(__name__)

CONFIG_NAME = "config.yaml"
_FINAL = re.compile(r"step_(0|[1-9]\d*)(_replacement)?")
_TEMPORARY = re.compile(rf"{TEMPORARY_PREFIX}(step_(0|[1-9]\d*)|deleted_step_.+)")


class CheckpointManager:
    """Writes, finds and prunes the checkpoints in ``checkpoint_dir``.

    A directory may have only one writer: hold a ``RunLock`` on the run directory while saving. Readers need
    no lock.

    Attributes:
        checkpoint_dir: absolute path.
        metric_name: key of ``training_info`` (or of its ``metrics``) that ranks checkpoints; None ranks by
            age.
        higher_is_better: a larger metric is better.
        keep_top_k: number of best checkpoints to keep in addition to the latest; None keeps all.
    """

    def __init__(
        self, config: CheckpointingConfig, lock: RunLock | None = None, verify_hashes: bool = True
    ) -> None:
        """Args:
            config: the ``checkpointing`` section: ``checkpoint_dir``, ``metric_name``, ``higher_is_better``,
                ``keep_top_k``, ``signing_key_file``.
            lock: lock of the run directory. If it is held, unfinished checkpoints of killed runs are removed
                now.
            verify_hashes: read every byte of a checkpoint to verify it; otherwise only sizes are compared.

        Raises:
            CheckpointError: ``keep_top_k`` is negative.
            ConfigError: the signing key cannot be used.
        """
        self.checkpoint_dir = Path(config["checkpoint_dir"]).absolute()
        self.metric_name = config.get("metric_name")
        self.higher_is_better = config.get("higher_is_better", True)
        self.keep_top_k = config.get("keep_top_k")
        if self.keep_top_k is not None and self.keep_top_k < 0:
            raise CheckpointError(
                f"checkpointing.keep_top_k = {self.keep_top_k}: must be at least 0. Fix: write null to keep "
                "all"
            )
        self._verify_hashes = verify_hashes
        self._key = read_signing_key(config.get("signing_key_file"))
        # Checkpoints that this process wrote and hashed itself need not be verified again.
        self._committed: set[Path] = set()
        self._has_told_of_missing = False
        if lock is not None and lock.held:
            self._tidy()

    def init_tmp_checkpoint(
        self, step: int, training_info: TrainingInfo, run_config: RunConfig | None = None
    ) -> Path:
        """Begin a checkpoint: create ``tmp_step_N`` with ``training_info.json`` and, if given,
        ``config.yaml``.

        Args:
            step: number of finished training steps.
            training_info: JSON values only; see ``plain_json``.
            run_config: the resolved configuration, saved with its secrets redacted.

        Returns:
            Absolute path to which weights and optimizer state are to be written.

        Raises:
            CheckpointError: the step is negative, the info has no JSON form, or the directory cannot be
                written.
        """
        if isinstance(step, bool) or not isinstance(step, int) or step < 0:
            raise CheckpointError(
                f"checkpoint step = {step!r}: must be a whole number of at least 0. Fix: pass the number of "
                "finished steps"
            )
        info = plain_json({**training_info, "step": step})
        temporary = self.checkpoint_dir / f"{TEMPORARY_PREFIX}step_{step}"
        try:
            self.checkpoint_dir.mkdir(parents=True, exist_ok=True)
            # A failed save of this step in this launch may have left it; those of killed launches were
            # removed at the start.
            if temporary.exists():
                remove_tree(temporary)
            temporary.mkdir()
            self.replace_info(temporary, info)
            if run_config is not None:
                text = yaml.safe_dump(redacted(run_config), sort_keys=False, allow_unicode=True)
                write_bytes_durably(temporary / CONFIG_NAME, text.encode(), private=True)
        except OSError as error:
            raise self._failed(temporary, error) from error
        return temporary

    def replace_info(self, checkpoint_path: Path, training_info: TrainingInfo) -> None:
        """Replace the ``training_info.json`` of an unfinished checkpoint; must precede hashing.

        Raises:
            OSError: the file cannot be written.
            CheckpointError: the info has no JSON form.
        """
        write_bytes_durably(checkpoint_path / INFO_NAME, json_bytes(plain_json(training_info)))

    def finalize_checkpoint(self, checkpoint_path: str | Path, *, is_sealed: bool = False) -> Path:
        """Commit an unfinished checkpoint after all workers have written it, then prune old checkpoints.

        Args:
            checkpoint_path: result of ``init_tmp_checkpoint``.
            is_sealed: its files are already on disk and its manifest is written (``Write.wait``).

        Returns:
            Its final path ``step_N``.

        Raises:
            CheckpointError: the path is not an unfinished checkpoint, or the commit failed. After a failed
                commit its files are removed; earlier checkpoints are unchanged.
        """
        temporary = Path(checkpoint_path).absolute()
        step = self._step_of_temporary(temporary)
        try:
            if not is_sealed:
                seal(temporary)
            if self._key is not None:
                # The manifest has a hash of every file, so its signature covers all of them.
                sign_manifest(temporary, self._key)
            final = self._commit(temporary, step)
        except (OSError, CheckpointError) as error:
            raise self._failed(temporary, error) from error
        self._committed.add(final)
        self.remove_old_checkpoints()
        return final

    def discard_tmp_checkpoint(self, checkpoint_path: str | Path) -> None:
        """Delete an unfinished checkpoint after a failed write, because the disk may be full.

        Raises:
            CheckpointError: the path is not an unfinished checkpoint.
        """
        temporary = Path(checkpoint_path).absolute()
        self._step_of_temporary(temporary)
        remove_tree(temporary)

    def bytes_of_latest(self) -> int | None:
        """Return the bytes of the newest checkpoint; None if there is none or the storage fails."""
        try:
            return next((tree_bytes(path) for _, path in self.checkpoints()), None)
        except StorageError:
            return None

    def remove_old_checkpoints(self, exclude_latest: bool = True) -> None:
        """Delete the checkpoints that ``steps_to_keep`` does not select.

        Nothing is deleted unless the newest complete checkpoint is verified. Damaged checkpoints are neither
        counted nor deleted, so that a person can inspect them.

        Args:
            exclude_latest: keep the latest checkpoint whatever its metric.
        """
        if self.keep_top_k is None:
            return
        try:
            self._remove_old(exclude_latest)
        except StorageError as error:
            logger.warning("no checkpoint is removed this time: %s", error)

    def _remove_old(self, exclude_latest: bool) -> None:
        # Verify names and sizes only: reading every byte of all checkpoints at each save would take longer
        # than the save.
        whole: dict[int, Path] = {}
        for step, path in self.checkpoints():
            # A replacement precedes the checkpoint that it replaces.
            if not self._verify(path, hashes=False) and step not in whole:
                whole[step] = path
        # Skip newest checkpoints that cannot be loaded, so that none of them is the reason to delete one that
        # can.
        while whole and not self._is_trusted(whole[max(whole)]):
            del whole[max(whole)]
        metrics = {step: self._metric(path) for step, path in whole.items()}
        self._warn_of_missing_metrics(metrics)
        kept = steps_to_keep(metrics, self.keep_top_k, self.higher_is_better, exclude_latest)
        for step in sorted(set(whole) - kept):
            if remove_directory(whole[step]):
                logger.info("removed checkpoint %s", whole[step])

    def get_latest_checkpoint_path(self) -> Path | None:
        """Return the complete checkpoint with the highest step, or None. Damaged ones are skipped with a
        warning."""
        return self.latest_and_damaged()[0]

    def latest_and_damaged(self) -> tuple[Path | None, dict[Path, list[str]]]:
        """Return the latest complete checkpoint, or None, and the faults of each later one. Each is read
        once."""
        damaged: dict[Path, list[str]] = {}
        return next(self._whole(self.checkpoints(), damaged), None), damaged

    def get_best_checkpoint_path(self) -> Path | None:
        """Return the complete checkpoint with the best metric, newer first among equals; the latest if none
        has the metric."""
        checkpoints = self.checkpoints()
        metrics: dict[int, float | None] = {}
        for step, path in checkpoints:
            # Prefer the replacement's metric; if it has none, use that of the checkpoint that it replaces.
            metrics[step] = self._metric(path) if metrics.get(step) is None else metrics[step]
        if self.metric_name is not None and set(metrics.values()) == {None}:
            logger.warning(
                "no checkpoint in %s has the metric %r; the latest counts as best",
                self.checkpoint_dir,
                self.metric_name,
            )
        ranked = ranked_steps(metrics, self.higher_is_better)
        # Try both directories of a step, so that a damaged replacement does not hide a complete checkpoint.
        return next(self._whole(sorted(checkpoints, key=lambda found: ranked.index(found[0]))), None)

    def load_training_info(self, checkpoint_path: str | Path | None = None) -> TrainingInfo | None:
        """Return the training info of a checkpoint, by default the latest complete one; None if there is
        none.

        Raises:
            CheckpointError: the given checkpoint has no readable training info.
        """
        path = Path(checkpoint_path) if checkpoint_path is not None else self.get_latest_checkpoint_path()
        return None if path is None else read_info(path)

    def unfinished(self) -> list[Path]:
        """Return the directories of uncommitted checkpoints, sorted by name.

        Raises:
            StorageError: the directory cannot be listed.
        """
        names = filter(_TEMPORARY.fullmatch, names_in(self.checkpoint_dir))
        return list(filter(is_real_directory, map(self.checkpoint_dir.joinpath, names)))

    def checkpoints(self) -> list[tuple[int, Path]]:
        """Return (step, directory) of every committed checkpoint, latest first; a replacement precedes the
        checkpoint that it replaces.

        Raises:
            StorageError: the directory cannot be listed.
        """
        found = []
        for name in names_in(self.checkpoint_dir):
            match, path = _FINAL.fullmatch(name), self.checkpoint_dir / name
            if match and is_real_directory(path):
                found.append((int(match[1]), bool(match[2]), path))
        return [(step, path) for step, _, path in sorted(found, reverse=True)]

    def _whole(
        self, checkpoints: list[tuple[int, Path]], damaged: dict[Path, list[str]] | None = None
    ) -> Iterator[Path]:
        """Yield the complete checkpoints; log the faults of the others and add them to ``damaged``."""
        for _, path in checkpoints:
            try:
                problems = self._verify(path)
            except StorageError as error:
                raise StorageError(
                    f"checkpoint {path}: {error}; or move it away to continue from an earlier one"
                ) from error
            if not problems:
                yield path
            else:
                if damaged is not None:
                    damaged[path] = problems
                logger.warning("checkpoint %s is damaged and skipped: %s", path, "; ".join(problems[:5]))

    def _verify(self, path: Path, hashes: bool = True) -> list[str]:
        """Return the faults of a checkpoint. Files are hashed only if this call and the manager both ask for
        it."""
        return faults_of_checkpoint(path, hashes and self._verify_hashes, self._key)

    def has_metric(self) -> bool:
        """Return whether any checkpoint has a value for ``metric_name``.

        Raises:
            StorageError: the checkpoints cannot be read.
        """
        return any(self._metric(path) is not None for _, path in self.checkpoints())

    def _metric(self, path: Path) -> float | None:
        if self.metric_name is None:
            return None
        try:
            return metric_of(read_info(path), self.metric_name)
        except StorageError:
            # Raise: a checkpoint that cannot be read now may have the best metric.
            raise
        except CheckpointError:
            return None

    def _warn_of_missing_metrics(self, metrics: Mapping[int, float | None]) -> None:
        missing = sorted(step for step, value in metrics.items() if value is None)
        if self.metric_name is not None and missing == [max(metrics, default=None)]:
            # A stop saves a step that is not validated.
            logger.info("step %d was not validated; it is kept as the newest checkpoint", *missing)
        elif self.metric_name is not None and missing and not self._has_told_of_missing:
            self._has_told_of_missing = True
            logger.warning(
                "checkpoints of steps %s have no metric %r (not validated); of these the newest are kept",
                missing,
                self.metric_name,
            )

    def _is_trusted(self, path: Path) -> bool:
        """Return whether older checkpoints may be deleted because ``path`` exists. One that this process
        committed was just hashed."""
        return path in self._committed or not self._verify(path)

    def _step_of_temporary(self, path: Path) -> int:
        match = _TEMPORARY.fullmatch(path.name)
        if (
            path.parent != self.checkpoint_dir
            or match is None
            or match[2] is None
            or not (path / INFO_NAME).is_file()
        ):
            raise CheckpointError(
                f"{path} is not a checkpoint begun in {self.checkpoint_dir}. Fix: pass the path that "
                "init_tmp_checkpoint returned, once"
            )
        return int(match[2])

    def _commit(self, temporary: Path, step: int) -> Path:
        final = self.checkpoint_dir / f"step_{step}"
        self._settle_replacement(step)
        if not is_there(final):
            commit_directory(temporary, final)
            return final
        # A rename cannot replace a directory that has content, so both exist for a moment under two names.
        commit_directory(temporary, _replacement_of(final))
        return self._settle_replacement(step)

    def _settle_replacement(self, step: int) -> Path:
        """Rename a replacement over the checkpoint that it replaces, and return the path of the step. Safe to
        repeat after a crash."""
        final = self.checkpoint_dir / f"step_{step}"
        replacement = _replacement_of(final)
        if not is_there(replacement):
            return final
        if is_there(final):
            # After a crash in between, the replacement counts only if it is complete.
            unwanted = replacement if self._verify(replacement, hashes=False) else final
            if not remove_directory(unwanted) or unwanted == replacement:
                return replacement if unwanted == final else final
        commit_directory(replacement, final)
        return final

    def _tidy(self) -> None:
        """Remove unfinished checkpoints of killed runs, on disk and in memory, and finish their
        replacements."""
        tidy_memory(self.checkpoint_dir)
        for path in self.unfinished():
            logger.warning("removing unfinished %s", path)
            remove_tree(path)
        for step in dict(self.checkpoints()):
            self._settle_replacement(step)

    def _failed(self, temporary: Path, error: Exception) -> CheckpointError:
        """Remove an unfinished checkpoint and return an error with the reason."""
        if temporary.exists():
            remove_tree(temporary)
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        return CheckpointError(
            f"checkpoint {temporary.name} could not be written to {self.checkpoint_dir}: {reason}. "
            "Earlier checkpoints are untouched. Fix: check free space and permissions there"
        )


def _replacement_of(final: Path) -> Path:
    return final.with_name(f"{final.name}_replacement")
