"""Gradients of a divided model: their norm over all ranks, clipping, loss scaling, and which optimizers can step them.

Dynamic loss scaling is for float16: losses are multiplied on their way backward, so that small gradients do not vanish. Not every operation
of every optimizer knows DTensors, and some know them only where all lie on one mesh; that is found out while the worker is built.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from megarl.errors import ConfigError, Violation
from megarl.models.dtensor.shards import block_of
from megarl.models.huggingface.optimizer import OPTIMIZER, build_optimizer, squared_norm


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


# where torch's own scaler starts; how fast it grows and falls is torch's too
INITIAL = 2.0**16
GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000


@dataclass(slots=True)
class LossScale:
    """The present factor.

    Attributes:
        factor: of every loss; 1 throughout without scaling.
        dynamic: False for the wide exponents of float32 and bfloat16.
        clean_steps: steps without overflow since the factor last changed.
    """

    factor: float = 1.0
    dynamic: bool = False
    clean_steps: int = 0

    @classmethod
    def for_float16(cls) -> LossScale:
        """A factor that follows the gradients."""
        return cls(INITIAL, dynamic=True)

    def accepts(self, norm: float) -> bool:
        """Whether a step with gradients of this norm may be taken, and the factor of the next one. All ranks give the same norm."""
        if not self.dynamic:
            return True
        if not math.isfinite(norm):
            self.factor, self.clean_steps = max(1.0, self.factor * BACKOFF), 0
            return False
        self.clean_steps += 1
        if self.clean_steps == INTERVAL:
            self.factor, self.clean_steps = self.factor * GROWTH, 0
        return True


STEPS = 2  # the first makes the state, the second reads it


def refuse_optimizer_without_steps(policy: Mapping[str, Any], parameters: Mapping[str, DTensor]) -> None:
    """Take steps on stand-ins: of every way in which a parameter is divided, the smallest. A collective over all ranks.

    Raises:
        ConfigError: torch fails; or as ``build_optimizer`` does.
    """
    smallest: dict[Any, DTensor] = {}
    for parameter in parameters.values():
        way = (parameter.device_mesh, parameter.placements, parameter.ndim)
        if parameter.requires_grad and (way not in smallest or parameter.numel() < smallest[way].numel()):
            smallest[way] = parameter
    stand_ins = [nn.Parameter(torch.ones_like(parameter.detach())) for parameter in smallest.values()]
    optimizer = build_optimizer(policy, ((str(number), parameter) for number, parameter in enumerate(stand_ins)))
    for stand_in in stand_ins:
        stand_in.grad = torch.ones_like(stand_in.detach())
    try:
        for _ in range(STEPS):
            optimizer.step()
    except Exception as error:
        # an operation that does not know DTensors may say so by any class of error
        reason = f"its step fails on parameters that DTensor divides ({type(error).__name__}: {str(error).splitlines()[0]})"
        fix = "leave out fused and foreach, or write name: torch.optim.AdamW"
        raise ConfigError([Violation(OPTIMIZER, dict(policy["optimizer"]), reason, fix)]) from error
