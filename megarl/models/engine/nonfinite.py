"""Detection of losses, gradients and weights that are not finite. All ranks react alike to such a value on
any rank, and none of these values reaches a weight."""

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
_SHOWN = 4


@dataclass(frozen=True, slots=True)
class NonFiniteMicroBatch:
    """The micro-batch in which a value that is not finite first appeared.

    Attributes:
        rank, place: the process, as a number and as coordinates.
        data_rank: the process's data-parallel replica.
        micro_batch: number of the micro-batch in the replica's part of the global batch.
        rows: first row and the one after the last, counted from the replica's first row of the whole call.
        quantity: ``loss``, or ``gradient`` for the gradient of a finite loss with respect to the
            log-probabilities.
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
        loss, grad_norm: at least one of the two is not finite.
        seen: the faulty micro-batches in order of rank and micro-batch; empty if every loss, and its gradient
            with respect to the log-probabilities, was finite.
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
    """Counter of global batches that cannot be trained on, which ends the run after too many in a row:
    ``policy.on_nonfinite`` and ``policy.max_consecutive_skips``.

    Attributes:
        raises: the first such batch ends the call.
        most: number of such batches in a row that ends the call.
        in_a_row: number of such batches in a row so far.
    """

    raises: bool
    most: int
    in_a_row: int = field(default=0, init=False)

    @classmethod
    def of(cls, policy: PolicyConfig) -> SkipLimit:
        """Read the settings of a policy's configuration."""
        return cls(policy["on_nonfinite"] == "raise", policy["max_consecutive_skips"])

    def stepped(self) -> None:
        """Reset the counter, because a step was taken."""
        self.in_a_row = 0

    def skipped(self, batch: SkippedBatch) -> None:
        """Count a step that was not taken.

        Raises:
            NonFiniteError: skipping is not allowed, or has happened too often in a row.
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
    """Return whether ``holds`` is True on every rank, so that all ranks act alike. A collective of one
    scalar."""
    flag = torch.tensor([int(holds)], device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def find(
    outputs: Sequence[HeadOutput], micro_batches: Sequence[MicroBatch], first_row: int, groups: ParallelGroups
) -> tuple[NonFiniteMicroBatch, ...]:
    """Return the micro-batches on all ranks whose loss, or whose gradient with respect to the
    log-probabilities, is not finite. Collective.

    Args:
        outputs: results of this rank's micro-batches in order; empty unless this is the last pipeline stage.
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
    # This slow collective of objects runs only after a refused step, so that it costs a normal step nothing.
    dist.all_gather_object(everywhere, mine)
    return tuple(chain.from_iterable(everywhere))


def _first_fault(output: HeadOutput) -> str | None:
    # This runs only after a refused step, because each float() waits for the device.
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
    """Raise on all ranks if any weight is not finite. Collective; only one number is exchanged if all weights
    are finite.

    Args:
        tensors: this rank's names and shards.
        device: device of the collectives.
        consequence: beginning of the message.
        kind: class of the error.

    Raises:
        MegarlError: a weight is not finite; the error has class ``kind`` and names the first such weights
            over all ranks.
    """
    named = [(name, tensor) for name, tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    # Minimum and maximum show NaN and infinity in one pass, without a bool tensor of the weight's size.
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
