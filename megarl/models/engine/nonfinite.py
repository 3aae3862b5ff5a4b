"""Losses, gradients and weights that are not finite: found on any rank, acted on alike by all, and none of it
reaches a weight."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.policy import PolicyConfig
from megarl.errors import MegarlError, NonFiniteError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import HeadOutput
from megarl.models.engine.microbatches import MicroBatch

logger = logging.getLogger(__name__)
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class NonFiniteMicroBatch:
    """The micro-batch in which a value that is not finite was seen first.

    Attributes:
        rank, place: of the process, as a number and in coordinates.
        data_rank: its data-parallel replica.
        micro_batch: number of the micro-batch in the replica's part of the global batch.
        rows: first row and the one after the last, counted from the replica's first row of the whole call.
        quantity: ``loss``, or ``gradient`` for the gradient of a finite loss by the log-probabilities.
    """

    rank: int
    place: str
    data_rank: int
    micro_batch: int
    rows: tuple[int, int]
    quantity: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.place}), micro-batch {self.micro_batch}, in the {self.quantity}"


@dataclass(frozen=True, slots=True)
class SkippedBatch:
    """A global batch after which no optimizer step was taken.

    Attributes:
        global_batch: its number in the call.
        loss, grad_norm: of which at least one is not finite.
        seen: by rank and micro-batch; empty where every loss, and its gradient by the log-probabilities, was
            finite.
    """

    global_batch: int
    loss: float
    grad_norm: float
    seen: tuple[NonFiniteMicroBatch, ...]

    def __str__(self) -> str:
        places = "; ".join(map(str, self.seen[:_SHOWN])) or "in the backward pass through the model"
        more = f" and {len(self.seen) - _SHOWN} more" if len(self.seen) > _SHOWN else ""
        figures = f"loss = {self.loss}, gradient norm = {self.grad_norm}"
        return f"global batch {self.global_batch} of this call: {figures}; seen first: {places}{more}"

    def as_record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


@dataclass(slots=True)
class SkipLimit:
    """Counts global batches that cannot be trained on, and ends the run when there are too many in a row:
    ``policy.on_nonfinite`` and ``policy.max_consecutive_skips``.

    Attributes:
        raises: the first one ends the call.
        most: this many in a row end it.
        in_a_row: so far.
    """

    raises: bool
    most: int
    in_a_row: int = field(default=0, init=False)

    @classmethod
    def of(cls, policy: PolicyConfig) -> SkipLimit:
        """Read the settings of a policy's configuration."""
        return cls(policy["on_nonfinite"] == "raise", policy["max_consecutive_skips"])

    def stepped(self) -> None:
        """A step was taken."""
        self.in_a_row = 0

    def skipped(self, batch: SkippedBatch) -> None:
        """A step was not taken.

        Raises:
            NonFiniteError: that is not allowed, or happened too often.
        """
        self.in_a_row += 1
        if self.raises:
            raise NonFiniteError(
                f"{batch}. No weight was changed by it. policy.on_nonfinite = 'raise'. "
                "Fix: look at those rows, or write skip to go on without such a batch"
            )
        if self.in_a_row >= self.most:
            raise NonFiniteError(
                f"{self.in_a_row} optimizer steps in a row were skipped, policy.max_consecutive_skips = "
                f"{self.most}; the last: {batch}. "
                "No weight was changed by any. Fix: look at those rows; go on from an earlier checkpoint, "
                "with later ones moved away, and "
                "a smaller max_grad_norm; or start another run with a lower learning rate from exported "
                "weights"
            )
        if dist.get_rank() == 0:
            logger.warning("skipped an optimizer step: %s", batch)


def on_all_ranks(holds: bool, device: torch.device) -> bool:
    """Return whether something holds on every rank; one scalar over all ranks, so that all act alike."""
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def find(
    outputs: Sequence[HeadOutput], micro_batches: Sequence[MicroBatch], first_row: int, groups: ParallelGroups
) -> tuple[NonFiniteMicroBatch, ...]:
    """The micro-batches, on all ranks, whose loss or whose gradient by the log-probabilities is not finite.
    Collective.

    Args:
        outputs: of this rank's micro-batches in order; empty unless this is the last pipeline stage.
        micro_batches: what they were computed from.
        first_row: of the first of them, in the rows of this replica's whole call.
        groups: of this process.
    """
    mine, row = [], first_row
    for number, micro_batch in enumerate(micro_batches):
        rows = (row, row + micro_batch.size)
        row = rows[1]
        quantity = _first_fault(outputs[number]) if number < len(outputs) else None
        if quantity is not None:
            mine.append(
                NonFiniteMicroBatch(
                    dist.get_rank(), groups.coordinates(), groups.data_rank, number, rows, quantity
                )
            )
    everywhere: list[list[NonFiniteMicroBatch]] = [[] for _ in range(dist.get_world_size())]
    # After a refused step alone, so the slow collective of objects costs a normal step nothing.
    dist.all_gather_object(everywhere, mine)
    return tuple(found for rank in everywhere for found in rank)


def _first_fault(output: HeadOutput) -> str | None:
    # Asked only after a step was refused: each float() waits for the device.
    if output.loss is not None and not math.isfinite(float(output.loss.detach())):
        return "loss"
    return "gradient" if any(not math.isfinite(float(peak)) for peak in output.gradient_peaks) else None


@torch.no_grad()
def require_finite(
    tensors: Iterable[tuple[str, torch.Tensor]],
    device: torch.device,
    consequence: str,
    kind: type[MegarlError],
) -> None:
    """Refuse weights of which one is not finite, on all ranks alike. Collective; a single number travels
    where all are finite.

    Args:
        tensors: this rank's names and shards.
        device: where collectives work.
        consequence: opens the message.
        kind: of the error.

    Raises:
        MegarlError: as ``kind``, with the first names over all ranks.
    """
    named = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    # Smallest and largest show NaN and infinity in one pass, without a bool tensor of the weight's size.
    extremes = [torch.stack(torch.aminmax(tensor.detach())).float().to(device) for _, tensor in named]
    finite = torch.isfinite(torch.stack(extremes)).all(dim=1).tolist() if extremes else []
    if on_all_ranks(all(finite), device):
        return
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(
        everywhere, [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite]
    )
    # In order of the ranks and each once: replicas report the same names.
    names = list(dict.fromkeys(name for rank in everywhere for name in rank))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise kind(
        f"{consequence}: NaN or infinity in {', '.join(names[:_SHOWN])}{more}. "
        "Fix: go on from a checkpoint or a model whose weights are finite"
    )
