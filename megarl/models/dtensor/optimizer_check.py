"""Whether torch can step an optimizer on divided parameters: not every operation of every optimizer knows DTensors, and some know them only
where all lie on one mesh. Found out while the worker is built, not after the first batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from megarl.errors import ConfigError, Violation
from megarl.models.huggingface.optimizer import OPTIMIZER, build_optimizer

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
