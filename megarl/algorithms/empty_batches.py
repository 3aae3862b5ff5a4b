"""Global batches in which nothing counts. An optimizer step after one would move weights by momentum and decay alone, so none is taken."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from megarl.errors import BatchError
from megarl.models.engine.microbatches import under_mask

if TYPE_CHECKING:
    from megarl.distributed.batched_data_dict import BatchedDataDict

logger = logging.getLogger(__name__)

EMPTY_GLOBAL_BATCHES = "empty_global_batches"
"""Metric: global batches of a step that were left out, where there were any; they are among its ``skipped_steps`` too."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The global batches of a step in which something counts.

    Attributes:
        batch: their rows, in their order; without any there is nothing to train on.
        rows: their numbers in the batch of the step.
        left_out: how many others there were.
    """

    batch: BatchedDataDict[Any]
    rows: Sequence[int]
    left_out: int

    def with_left_out(self, metrics: dict[str, float]) -> dict[str, float]:
        """The metrics of training with what was left out."""
        if not self.left_out:
            return metrics
        skipped = metrics.get("skipped_steps", 0.0) + self.left_out
        return {**metrics, "skipped_steps": skipped, EMPTY_GLOBAL_BATCHES: float(self.left_out)}


def filled(batch: BatchedDataDict[Any], size: int) -> Filled:
    """The global batches of ``size`` rows in which a token counts that has a log-probability."""
    counts = under_mask(batch)[:, 1:].any(dim=1).view(-1, size).any(dim=1)
    rows = torch.arange(batch.size).view(-1, size)[counts].flatten().tolist()
    left_out = int((~counts).sum())
    return Filled(batch.select_indices(rows) if left_out else batch, rows, left_out)


@dataclass(slots=True)
class EmptySteps:
    """Says which steps had nothing to train on, and ends a run that has had too many in a row.

    Attributes:
        most: that many in a row (``policy.max_consecutive_skips``).
        section: of the algorithm, for the message.
        in_a_row: so far.
    """

    most: int
    section: str
    in_a_row: int = field(default=0, init=False)

    def look(self, batch: BatchedDataDict[Any], samples: BatchedDataDict[Any], step: int) -> None:
        """Look at a batch before it is trained on.

        Args:
            batch: what a step would train on, with its masks.
            samples: the same rows, with ``truncated`` and ``masked`` [B] bool.
            step: its number.

        Raises:
            BatchError: nothing counts, as in the steps before.
        """
        if bool(under_mask(batch)[:, 1:].any()):
            self.in_a_row = 0
            return
        self.in_a_row += 1
        cut, unscored, total = int(samples["truncated"].sum()), int(samples["masked"].sum()), len(samples["truncated"])
        found = f"step {step}: none of its {total} answers counts: {cut} were cut off, {unscored} could not be scored"
        if self.in_a_row < self.most:
            logger.warning("%s. No optimizer step was taken", found)
            return
        raise BatchError(
            f"{found}. So it was in {self.in_a_row} steps in a row (policy.max_consecutive_skips = {self.most}), in which no weight was "
            f"changed. Fix: raise policy.generation.max_new_tokens, write {self.section}.overlong_filtering: false, or see why the "
            "environment does not score answers"
        )
