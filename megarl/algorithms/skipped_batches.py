"""Handling of batches without an optimizer step: non-finite ones are stored for inspection, and empty ones
are left out."""

from __future__ import annotations

import json
import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.config.backend import generation_of
from megarl.config.environments import environments_of, rewards_of
from megarl.config.sections import RunConfig
from megarl.errors import BatchError, NonFiniteError

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.interfaces import LossFunction
    from megarl.config.plugins import Role
    from megarl.data.datasets import Example
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

DIRECTORY = "skipped"
"""Name of the directory of stored batches in the run directory."""

MOST_KEPT = 20

EMPTY_GLOBAL_BATCHES = "empty_global_batches"
"""Metric: number of global batches without a valid token in a step, if any. They are included in
``skipped_steps``."""


@dataclass(frozen=True, slots=True)
class SkippedBatches:
    """Calls the policy's training, and stores batches that could not be trained on.

    If a loss or gradient of step N is not finite, two files are written. ``step_N.json`` (for another role
    ``step_N_critic.json``) describes the first occurrence: rank, micro-batch and rows. ``step_N.safetensors``
    has all columns of these rows, and their indices as ``row``; if the rows are unknown, those of the whole
    global batch. If a step trains on its batch several times, the later files are named ``step_N_2`` and so
    on. At most ``MOST_KEPT`` batches are stored.

    Attributes:
        directory: directory of the files, created when needed; None stores nothing.
    """

    directory: Path | None = None
    # Number of files by name. A launch that repeats a step of an earlier launch overwrites its files.
    _kept: Counter[str] = field(default_factory=Counter, init=False)

    def train(
        self,
        policy: PolicyInterface,
        batch: BatchedDataDict[Any],
        loss_fn: LossFunction,
        step: int,
        records: Sequence[int],
        gbs: int | None = None,
        mbs: int | None = None,
        role: Role | None = None,
    ) -> dict[str, Any]:
        """Call ``policy.train``, and store the batch if it could not be trained on.

        Args:
            policy: the model to train.
            batch: batch of B rows.
            loss_fn: the loss.
            step: number of the step.
            records: [B], index of each row's record in the training data.
            gbs, mbs: rows per global batch and per micro-batch; None for the policy's configuration.
            role: role of the model, if it is not the actor.

        Raises:
            NonFiniteError: see ``Policy.train``. The batch is stored first.
        """
        name = f"step_{step}" if role is None else f"step_{step}_{role.name}"
        try:
            result = policy.train(batch, loss_fn, gbs=gbs, mbs=mbs)
        except NonFiniteError as error:
            self._keep(batch, error.skipped, step, records, name)
            raise
        if result.get("skipped"):
            self._keep(batch, result["skipped"], step, records, name)
        return result

    def _keep(
        self,
        batch: Mapping[str, object],
        skipped: Sequence[Mapping[str, Any]],
        step: int,
        records: Sequence[int],
        name: str,
    ) -> None:
        for found in skipped:
            figures = f"loss = {found['loss']}, gradient norm = {found['grad_norm']}"
            logger.warning(
                "step %d: no optimizer step was taken: %s; the weights are unchanged", step, figures
            )
        if self.directory is None or not skipped:
            return
        from safetensors import SafetensorError

        self._kept[name] += 1
        times = f"_{self._kept[name]}" if self._kept[name] > 1 else ""
        try:
            # The files are only for people, so a full disk must not end the run.
            self._write(self.directory / f"{name}{times}.json", batch, skipped, step, records)
        except (OSError, SafetensorError) as error:
            logger.warning(
                "the report and the rows of the skipped batch of step %d cannot be written to %s: %s",
                step,
                self.directory,
                error,
            )

    @staticmethod
    def _write(
        path: Path,
        batch: Mapping[str, object],
        skipped: Sequence[Mapping[str, Any]],
        step: int,
        records: Sequence[int],
    ) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Count files in the directory, so that a resumed run continues the count.
        if len(list(path.parent.glob("step_*.json"))) >= MOST_KEPT:
            return
        rows = sorted(set(chain.from_iterable(map(_rows, skipped))))
        report = {
            "step": step,
            "skipped": _plain(skipped),
            "rows": rows,
            "records": [records[row] for row in rows],
        }
        # NaN and infinity are not valid JSON; ``_plain`` has replaced them.
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        _write_rows(batch, rows, path.with_suffix(".safetensors"))
        logger.warning(
            "the report and the rows of the skipped batch are in %s and the .safetensors file next to it",
            path,
        )


def _rows(found: Mapping[str, Any]) -> list[int]:
    """Return the rows of the first occurrence or, if unknown, all rows of the global batch."""
    seen = [row for place in found["seen"] for row in place["rows"]]
    return seen or list(range(*found["rows"]))


def _write_rows(batch: Mapping[str, object], rows: Sequence[int], path: Path) -> None:
    import torch
    from safetensors.torch import save

    # safetensors rejects tensors that are not contiguous, as rows of a view may be.
    chosen = torch.tensor(rows, dtype=torch.int64)
    columns = {
        name: value[chosen].contiguous() for name, value in batch.items() if isinstance(value, torch.Tensor)
    }
    # Not save_file, which would make the file private.
    path.write_bytes(save({**columns, "row": chosen}))


def _plain(value: Any) -> Any:
    """Replace numbers that JSON cannot represent by text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass(frozen=True, slots=True)
class Filled:
    """The global batches of a step that have a valid token.

    Attributes:
        batch: rows of these global batches, in order; if empty, there is nothing to train on.
        rows: their indices in the batch of the step.
        left_out: number of global batches that were left out.
    """

    batch: BatchedDataDict[Any]
    rows: Sequence[int]
    left_out: int

    def with_left_out(self, metrics: dict[str, float]) -> dict[str, float]:
        """Add the number of left-out global batches to training metrics."""
        if not self.left_out:
            return metrics
        skipped = metrics.get("skipped_steps", 0.0) + self.left_out
        return {**metrics, "skipped_steps": skipped, EMPTY_GLOBAL_BATCHES: float(self.left_out)}


def filled(batch: BatchedDataDict[Any], size: int) -> Filled:
    """Select the global batches, of ``size`` rows each, that have a valid token. On others, an optimizer step
    would change the weights by momentum and weight decay alone."""
    import torch

    from megarl.models.engine.microbatches import under_mask

    # A row's first token is not predicted. The rows of a global batch are adjacent.
    counts = under_mask(batch)[:, 1:].any(dim=1).view(-1, size).any(dim=1)
    rows = torch.arange(batch.size).view(-1, size)[counts].flatten().tolist()
    left_out = int((~counts).sum())
    return Filled(batch.select_indices(rows) if left_out else batch, rows, left_out)


@dataclass(slots=True)
class EmptySteps:
    """Reports steps without a valid token, and fails after too many in a row.

    Attributes:
        most: maximum number in a row (``policy.max_consecutive_skips``).
        section: name of the algorithm's section, for the message.
        in_a_row: current number in a row.
    """

    most: int
    section: str
    in_a_row: int = field(default=0, init=False)

    def look(self, batch: BatchedDataDict[Any], samples: BatchedDataDict[Any], step: int) -> None:
        """Check, before training, that a batch has a valid token.

        Args:
            batch: batch of the step, with its masks.
            samples: the same rows, with ``truncated`` and ``masked`` [B] bool.
            step: number of the step.

        Raises:
            BatchError: neither this batch nor those of the ``most`` - 1 steps before have one.
        """
        from megarl.models.engine.microbatches import under_mask

        if bool(under_mask(batch)[:, 1:].any()):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        cut, unscored, total = (
            int(samples["truncated"].sum()),
            int(samples["masked"].sum()),
            len(samples["truncated"]),
        )
        found = (
            f"step {step}: none of its {total} responses counts: {cut} were truncated, {unscored} could not "
            "be scored"
        )
        if self.in_a_row < self.most:
            logger.warning("%s. No optimizer step was taken", found)
            return
        fixes = []
        if cut:
            fixes.append(
                f"raise policy.generation.max_new_tokens, or write {self.section}.overlong_filtering: false"
            )
        if unscored or not cut:
            fixes.append("correct why the environment does not score responses, see the warnings before")
        raise BatchError(
            f"{found}. This happened in {self.in_a_row} steps in a row "
            f"(policy.max_consecutive_skips = {self.most}), in which no weight was changed. Fix: "
            f"{'; '.join(fixes)}"
        )


NO_SIGNAL_STEPS = (1, 5)
"""Steps that are checked. A run that does not learn should be noticed early; the first step alone may be
chance."""

_WHOLE_SOLUTIONS = ("####", "\\boxed")


def warn_of_no_signal(
    step: int,
    samples: Mapping[str, Tensor],
    advantages: Tensor,
    records: Sequence[Example],
    config: RunConfig,
) -> None:
    """At the steps ``NO_SIGNAL_STEPS``, warn if rewards do not distinguish any responses, so that the step
    has no gradient.

    This is the case if all advantages are 0. Some estimators give nonzero advantages anyway, so it also holds
    if all rewards are equal.

    Args:
        step: number of the step, from 1.
        samples: ``reward`` [B], ``masked`` [B] bool, ``truncated`` [B] bool, ``generation_lengths`` [B].
        advantages: [B, 1] or [B, S].
        records: [B], the record of each response.
        config: configuration of the run.
    """
    rewards = samples["reward"][~samples["masked"]]
    if step not in NO_SIGNAL_STEPS or not len(rewards):
        return
    if bool((advantages != 0).any()) and bool((rewards != rewards[0]).any()):
        return
    # Round, because a float32 reward of 0.1 would be shown as 0.10000000149.
    values = sorted({float(f"{value:.6g}") for value in rewards.tolist()})
    shown = ", ".join(f"{value:g}" for value in values[:3]) + (", ..." if len(values) > 3 else "")
    causes = "; ".join(likely_causes(samples, records, config)) or "none is known"
    logger.warning(
        "step %d: all rewards of every group are equal (%d responses, rewards %s), so this step "
        "has no gradient. Look at `megarl samples %s`. Likely cause: %s",
        step,
        len(rewards),
        shown,
        config["run_dir"],
        causes,
    )


def likely_causes(
    samples: Mapping[str, Tensor], records: Sequence[Example], config: RunConfig
) -> Iterator[str]:
    """Yield likely causes of equal rewards, found in the responses and the reference answers."""
    names = set()
    for key, section in environments_of(config["env"]).items():
        for reward in rewards_of(section, key).values():
            names.add(reward.get("reward"))
    marks = [mark for mark in _WHOLE_SOLUTIONS if any(mark in record.answer for record in records)]
    if "exact_match" in names and marks:
        yield (
            f"references have {' and '.join(map(repr, marks))}, and exact_match compares a "
            "response with the complete reference: use "
            f"env.reward={'gsm8k' if marks[0] == '####' else 'math'}"
        )
    generation = generation_of(config["policy"])
    if bool(samples["truncated"].all()):
        yield (
            "all responses were truncated at policy.generation.max_new_tokens = "
            f"{generation['max_new_tokens']}, none ended by one of the stop tokens "
            f"{generation['stop_token_ids']}: raise the limit, or check that the model knows the "
            "chat template"
        )
    elif int(samples["generation_lengths"].max()) <= 1:
        yield (
            "all responses are empty: the model ends its response at once, so check that it knows "
            "the chat template"
        )
