"""Moves parts of a Megatron model between the device and host memory, so that another engine can use the device meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Part, Place


def move_part(
    chunks: Sequence[DistributedDataParallel], optimizer: MegatronOptimizer | None, runtime: DeviceRuntime, part: Part, place: Place
) -> None:
    """Move ``part`` to ``place``. On a CPU both places are the same memory and nothing happens.

    Gradients are not kept: their buffer is freed on the way to the host and comes back zeroed.
    """
    if not runtime.is_cuda:
        return
    if part == "optimizer":
        if optimizer is not None:
            target = torch.device("cpu") if place == "host" else runtime.device
            move_optimizer(optimizer, lambda tensor: tensor.to(target))
        runtime.synchronize()
        return
    for chunk in chunks:
        _move_buffers(chunk, place, parameters=part == "parameters")
        if part == "parameters":
            _move_loose_parameters(chunk, runtime, place)
    runtime.synchronize()


def move_optimizer(optimizer: MegatronOptimizer, move: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Put optimizer state, and the float32 copies of half-precision parameters, where ``move`` puts a tensor.

    Without such copies (a float32 model, the precision-aware optimizer) what the optimizer updates are the model's parameters themselves,
    or views into their buffer. They go and come with the parameters; Megatron's own ``offload_to_cpu`` would take the model's weights
    along, or read a buffer that has been freed before.
    """
    for inner in getattr(optimizer, "chained_optimizers", [optimizer]):
        if getattr(inner, "is_stub_optimizer", False):
            continue
        if (inner.config.bf16 or inner.config.fp16) and not inner.config.use_precision_aware_optimizer:
            for group in inner.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.data = move(parameter.data)
        for state in inner.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor):
                    state[key] = move(value)


def _move_buffers(model: DistributedDataParallel, place: Place, *, parameters: bool) -> None:
    for buffer in model.buffers + model.expert_parallel_buffers:
        move = buffer.offload_to_cpu if place == "host" else buffer.reload_from_cpu
        move(move_params=parameters, move_grads=not parameters)


def _move_loose_parameters(model: DistributedDataParallel, runtime: DeviceRuntime, place: Place) -> None:
    """Parameters outside the buffers (all of them without the distributed optimizer) and module buffers."""
    buffered = {
        parameter
        for buffer in model.buffers + model.expert_parallel_buffers
        if buffer.param_data is not None
        for parameter in buffer.params
    }
    target = runtime.device if place == "device" else "cpu"
    for parameter in model.module.parameters():
        if parameter not in buffered:
            parameter.data = parameter.data.to(target, non_blocking=True)
