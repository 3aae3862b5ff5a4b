"""Detection of losses, gradients and weights that are not finite. All ranks take the same action when a value
on any rank is not finite, and the optimizer step is skipped, so that no such value reaches a weight."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from megarl.config.policy import PolicyConfig
from megarl.errors import MegarlError, NonFiniteError
from megarl.models.engine.groups import ParallelGroups
from megarl.models.engine.heads import HeadOutput
from megarl.models.engine.microbatches import MicroBatch

logger = logging.getLogger(__name__)
# Maximum number of micro-batches or weights that a message lists.
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class NonFiniteMicroBatch:
    """A micro-batch in which a value that is not finite first appeared.

    Attributes:
        rank, place: global rank of the process, and its ranks in all groups (``ParallelGroups.coordinates``).
        data_rank: data-parallel replica of the process.
        micro_batch: index of the micro-batch among the replica's micro-batches of the global batch.
        rows: first row and the row after the last, counted over the replica's rows of the whole call.
        quantity: ``loss``; or ``gradient``, if the loss is finite but its gradient with respect to the
            log-probabilities is not.
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
    """A global batch whose optimizer step was skipped.

    Attributes:
        global_batch: index of the global batch in the call.
        loss, grad_norm: at least one of the two is not finite.
        seen: the faulty micro-batches, ordered by rank and micro-batch. Empty if all losses and their
            gradients with respect to the log-probabilities are finite, so the fault is in the backward pass
            of the model.
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
        """Return the batch as a dictionary of plain values."""
        return asdict(self)


@dataclass(slots=True)
class SkipLimit:
    """Counts consecutive skipped steps and raises at the limit (``policy.on_nonfinite`` and
    ``policy.max_consecutive_skips``).

    Attributes:
        raises: raise at the first skipped step.
        most: number of consecutive skipped steps at which to raise.
        in_a_row: number of consecutive skipped steps so far.
    """

    raises: bool
    most: int
    in_a_row: int = field(default=0, init=False)

    @classmethod
    def of(cls, policy: PolicyConfig) -> SkipLimit:
        """Read the limit from a policy section."""
        return cls(policy["on_nonfinite"] == "raise", policy["max_consecutive_skips"])

    def stepped(self) -> None:
        """Reset the counter after a step."""
        self.in_a_row = 0

    def skipped(self, batch: SkippedBatch) -> None:
        """Count and log a skipped step.

        Raises:
            NonFiniteError: ``policy.on_nonfinite`` does not allow skipping, or the limit is reached.
        """
        self.in_a_row += 1
        if self.raises:
            raise NonFiniteError(
                f"{batch}. No weight was changed by it. policy.on_nonfinite = 'raise'. Fix: look "
                "at those rows, or write skip to continue without such batches"
            )
        if self.in_a_row >= self.most:
            raise NonFiniteError(
                f"{self.in_a_row} optimizer steps in a row were skipped, "
                f"policy.max_consecutive_skips = {self.most}; the last: {batch}. No weight was "
                "changed by any of them. Fix: look at those rows; move the later checkpoints "
                "away, and continue from an earlier one with a smaller max_grad_norm; or start "
                "another run with a lower learning rate from exported weights"
            )
        if dist.get_rank() == 0:
            logger.warning("skipped an optimizer step: %s", batch)


def on_all_ranks(holds: bool, device: torch.device) -> bool:
    """Return whether ``holds`` is True on every rank. Collective; all-reduces one scalar."""
    # The minimum of the flags is 0 if any rank has 0.
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def find(
    outputs: Sequence[HeadOutput], micro_batches: Sequence[MicroBatch], first_row: int, groups: ParallelGroups
) -> tuple[NonFiniteMicroBatch, ...]:
    """Return the micro-batches of all ranks whose loss is not finite, or whose gradient with respect to the
    log-probabilities is not. Collective.

    Args:
        outputs: results of this rank's micro-batches, in order; empty unless this is the last pipeline stage.
        micro_batches: the micro-batches of these results.
        first_row: index of the first micro-batch's first row among the replica's rows of the whole call.
        groups: process groups of this process.
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
    # A collective of objects is slow, but this one runs only after a skipped step.
    dist.all_gather_object(everywhere, mine)
    return tuple(chain.from_iterable(everywhere))


def _first_fault(output: HeadOutput) -> str | None:
    # Each float() waits for the device. This runs only after a skipped step.
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
    """Raise on all ranks if any weight on any rank is not finite. Collective; all-reduces only one number if
    all weights are finite.

    Args:
        tensors: names and shards of this rank's weights.
        device: device for the collectives.
        consequence: beginning of the error message.
        kind: class of the error.

    Raises:
        MegarlError: a weight is not finite. The error is of class ``kind`` and names the first such weights
            of all ranks.
    """
    named = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    # Minimum and maximum reveal NaN and infinity in one pass, without a bool tensor of the weight's size.
    extremes = [torch.stack(torch.aminmax(tensor.detach())).float().to(device) for _, tensor in named]
    finite = torch.isfinite(torch.stack(extremes)).all(dim=1).tolist() if extremes else []
    if on_all_ranks(all(finite), device):
        return
    everywhere: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(
        everywhere, [name for (name, _), is_finite in zip(named, finite, strict=True) if not is_finite]
    )
    # List each name once, in order of the ranks, because replicas report the same names.
    names = list(dict.fromkeys(chain.from_iterable(everywhere)))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    raise kind(
        f"{consequence}: NaN or infinity in {', '.join(names[:_SHOWN])}{more}. Fix: continue from "
        "a checkpoint or a model whose weights are finite"
    )
