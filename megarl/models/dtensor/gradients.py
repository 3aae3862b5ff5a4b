"""The norm of the whole model's gradient, and what clipping works on: this rank's pieces."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from megarl.models.dtensor.shards import block_of
from megarl.models.huggingface.optimizer import squared_norm


def local_gradients(parameters: Iterable[DTensor]) -> list[torch.Tensor]:
    """This rank's pieces of the gradients there are."""
    return [parameter.grad.to_local() for parameter in parameters if isinstance(parameter.grad, DTensor)]


@torch.no_grad()
def global_norm(parameters: Iterable[DTensor], tensor_rank: int, device: torch.device) -> float:
    """L2 norm of the gradient over all ranks, the same number on all of them.

    Each parameter counts once: of one that every tensor-parallel rank has as a whole, only the first rank's copy.

    Args:
        parameters: divided by ``fully_shard``.
        tensor_rank: of this process.
        device: where collectives work.
    """
    counted = [parameter for parameter in parameters if tensor_rank == 0 or block_of(parameter).tensor_dimension is not None]
    total = squared_norm(local_gradients(counted), device)
    dist.all_reduce(total)
    return float(total.sqrt())
