"""Moves parts of a Megatron model between the device and host memory, so that another engine can use the device meanwhile."""

from __future__ import annotations

from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer

from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Part, Place


def move_part(
    model: DistributedDataParallel, optimizer: MegatronOptimizer | None, runtime: DeviceRuntime, part: Part, place: Place
) -> None:
    """Move ``part`` to ``place``. On a CPU both places are the same memory and nothing happens.

    Gradients are not kept: their buffer is freed on the way to the host and comes back zeroed.
    """
    if not runtime.is_cuda:
        return
    if part == "optimizer":
        if optimizer is not None:
            optimizer.offload_to_cpu() if place == "host" else optimizer.restore_from_cpu()
        return
    _move_buffers(model, place, parameters=part == "parameters")
    if part == "parameters":
        _move_loose_parameters(model, runtime, place)
    runtime.synchronize()


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
