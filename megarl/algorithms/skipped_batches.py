"""Keeps the batches after which no optimizer step was taken, so that somebody can look at them."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megarl.errors import NonFiniteError

if TYPE_CHECKING:
    from megarl.algorithms.algorithm import Role
    from megarl.algorithms.interfaces import LossFunction
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.interfaces import PolicyInterface

logger = logging.getLogger(__name__)

DIRECTORY = "skipped"
"""Below the run's directory."""

MOST_KEPT = 20


@dataclass(frozen=True, slots=True)
class SkippedBatches:
    """Trains, and keeps what could not be trained on.

    For a step with a loss or gradient that is not finite it writes ``step_N.json``, or ``step_N_critic.json`` of another role (what was
    seen first on which rank, in which micro-batch and rows) and ``step_N.safetensors`` beside it (those rows of the batch, all columns, and
    their numbers as ``row``; where nobody knows the rows, the whole global batch). The first twenty steps are kept.

    Attributes:
        directory: made when it is needed; None keeps nothing.
    """

    directory: Path | None = None

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
        """``policy.train``.

        Args:
            policy: what is trained.
            batch: [B] rows.
            loss_fn: the loss.
            step: number of the step.
            records: [B] index in the training data of the record that each row comes from.
            gbs, mbs: rows of a global batch and of a micro-batch; None for those of the policy's configuration.
            role: that the model plays, where it is not the actor.

        Raises:
            NonFiniteError: see ``Policy.train``; the batch is kept before.
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

    def _keep(self, batch: Mapping[str, Any], skipped: Sequence[Mapping[str, Any]], step: int, records: Sequence[int], name: str) -> None:
        for found in skipped:
            figures = f"loss = {found['loss']}, gradient norm = {found['grad_norm']}"
            logger.warning("step %d: no optimizer step was taken: %s; weights are as before", step, figures)
        if self.directory is None or not skipped:
            return
        from safetensors import SafetensorError

        try:
            self._write(self.directory / f"{name}.json", batch, skipped, step, records)
        except (OSError, SafetensorError) as error:
            logger.warning("what was seen in step %d, and the rows, cannot be kept in %s: %s", step, self.directory, error)

    @staticmethod
    def _write(path: Path, batch: Mapping[str, Any], skipped: Sequence[Mapping[str, Any]], step: int, records: Sequence[int]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if len(list(path.parent.glob("step_*.json"))) >= MOST_KEPT:
            return
        rows = sorted({row for found in skipped for row in _rows(found)})
        report = {"step": step, "skipped": _plain(skipped), "rows": rows, "records": [records[row] for row in rows]}
        path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        _write_rows(batch, rows, path.with_suffix(".safetensors"))
        logger.warning("what was seen, and the rows, are in %s and .safetensors beside it", path)


def _rows(found: Mapping[str, Any]) -> list[int]:
    """The rows in which it was seen first, or all of the global batch."""
    seen = [row for place in found["seen"] for row in place["rows"]]
    return seen or list(range(*found["rows"]))


def _write_rows(batch: Mapping[str, Any], rows: Sequence[int], path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    chosen = torch.tensor(rows, dtype=torch.int64)
    columns = {name: value[chosen].contiguous() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    save_file({**columns, "row": chosen}, path)


def _plain(value: Any) -> Any:
    """``value`` with numbers that JSON does not have as text."""
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
