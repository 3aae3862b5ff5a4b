"""What a worker says of its process, its device and its model."""

from __future__ import annotations

import socket
from typing import Any

import torch
import torch.distributed as dist

from megarl import env
from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Backend


def device_info(backend: Backend, runtime: DeviceRuntime) -> dict[str, Any]:
    """Rank, device, memory figures (MiB) and one parameter as a sample."""
    name, parameter = next(iter(backend.parameters()))
    local_rank = env.integer("LOCAL_RANK", 0)
    figures = runtime.memory()
    return {
        "rank": dist.get_rank(),
        "world_size": dist.get_world_size(),
        "local_rank": local_rank,
        "local_device_id": runtime.device.index if runtime.is_cuda else None,
        "global_device_id": local_rank,
        "device_count": torch.cuda.device_count() if runtime.is_cuda else 0,
        "device_name": runtime.device_name,
        "host": socket.gethostname(),
        "memory_allocated_mb": figures.allocated_mb,
        "memory_reserved_mb": figures.reserved_mb,
        "peak_memory_allocated_mb": figures.peak_allocated_mb,
        "peak_memory_reserved_mb": figures.peak_reserved_mb,
        "parameter_sample": {name: {"device": str(parameter.device), "shape": list(parameter.shape), "dtype": str(parameter.dtype)}},
        "env_vars": {
            key: value for key, value in env.snapshot().items() if key.startswith("CUDA") or key in {"LOCAL_RANK", "RANK", "WORLD_SIZE"}
        },
    }
