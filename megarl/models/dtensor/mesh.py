"""The device mesh: data, context and tensor parallel ranks, and the process groups that the engine needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug as tensor_debug

from megarl.errors import ConfigError
from megarl.models.engine.groups import ParallelGroups


@dataclass(frozen=True, slots=True)
class Meshes:
    """Parts of the device mesh.

    Attributes:
        sharding: the data and context parallel ranks as one dimension, over which ``fully_shard`` divides parameters and sums gradients.
        context, tensor: the context-parallel and the tensor-parallel ranks.
        groups: their process groups; the pipeline is a group of one.
    """

    sharding: DeviceMesh
    context: DeviceMesh
    tensor: DeviceMesh
    groups: ParallelGroups


def build_meshes(device_type: str, *, context: int, tensor: int, ring: bool = False) -> Meshes:
    """The mesh over all ranks, tensor parallel fastest, then context, then data parallel.

    Args:
        device_type: ``cpu`` or ``cuda``.
        context, tensor: sizes of these dimensions.
        ring: context-parallel ranks send keys and values round instead of gathering them.

    Raises:
        ConfigError: the ranks are no multiple of one copy of the model.
    """
    world, copy = dist.get_world_size(), context * tensor
    if world % copy:
        raise ConfigError(f"{world} ranks: not a multiple of context {context} x tensor {tensor} = {copy}; give a multiple of {copy} ranks")
    _forget_earlier_meshes()
    root = init_device_mesh(device_type, (1, world // copy, context, tensor), mesh_dim_names=("pp", "dp", "cp", "tp"))
    groups = ParallelGroups(
        tensor=root["tp"].get_group(),
        context=root["cp"].get_group(),
        data=root["dp"].get_group(),
        pipeline=root["pp"].get_group(),
        ring=ring,
    )
    sharding: Any = root["dp", "cp"]._flatten("dp_cp")
    return Meshes(sharding, root["cp"], root["tp"], groups)


def _forget_earlier_meshes() -> None:
    """DTensor remembers how it handled an operation together with the mesh; an equal mesh of groups that exist no more must not be met."""
    clear = getattr(tensor_debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()
