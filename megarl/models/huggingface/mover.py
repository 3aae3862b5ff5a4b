"""Moves a sharded model and its optimizer state between device and host memory, so that another process can
use the device in between."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from megarl.models.huggingface.loading import is_tied, tie


def move_model(model: Any, device: torch.device) -> Any:
    """Move parameters and buffers to ``device`` and return the model."""
    # Tie the weights again: Module.to() may create a separate parameter for each module.
    tied = is_tied(model)
    model.to(device)
    if tied:
        tie(model)
    return move_buffers(model, device)


def move_buffers(model: Any, device: torch.device) -> Any:
    """Move buffers to ``device`` and return the model."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    return model


def move_optimizer(optimizer: torch.optim.Optimizer, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Replace this rank's shards of state tensors by the result of ``move``. Scalars stay, because the
    optimizer expects them in place."""
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, DTensor) and value.ndim > 0:
                state[key] = _with_local(value, move(value.to_local()))
            elif isinstance(value, torch.Tensor) and value.ndim > 0:
                state[key] = move(value)


def _with_local(tensor: DTensor, local: torch.Tensor) -> DTensor:
    """Return ``tensor`` with another local shard. ``DTensor.from_local`` would move the shard to the mesh's
    device."""
    inner, context = tensor.__tensor_flatten__()
    parts = {**{name: getattr(tensor, name) for name in inner}, "_local_tensor": local}
    return DTensor.__tensor_unflatten__(parts, context, tensor.shape, tensor.stride())
