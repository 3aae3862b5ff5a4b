"""The device mesh: data, context and tensor parallel ranks, and the process groups that the engine needs.

For callers with their own training loop, ``context_parallel`` reduces buffers to this rank's part inside a
block. It offers what ``torch.distributed.tensor.experimental.context_parallel`` does, with the engine's
attention, which works on any device and with any tensor parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import debug as tensor_debug

from megarl.errors import BatchError, ConfigError
from megarl.models.engine.attention import SequenceLayout
from megarl.models.engine.context import ContextShare
from megarl.models.engine.groups import ParallelGroups
from megarl.models.huggingface.attention import default_layout


@dataclass(frozen=True, slots=True)
class Meshes:
    """Parts of the device mesh.

    Attributes:
        sharding: mesh of the data and context parallel ranks as one dimension, over which ``fully_shard``
            divides parameters and sums gradients.
        context, tensor: meshes of the context-parallel and the tensor-parallel ranks.
        groups: their process groups; the pipeline is a group of one rank.
    """

    sharding: DeviceMesh
    context: DeviceMesh
    tensor: DeviceMesh
    groups: ParallelGroups


def build_meshes(device_type: str, *, context: int, tensor: int, ring: bool = False) -> Meshes:
    """Build the mesh over all ranks, with tensor parallelism as the fastest dimension, then context, then
    data.

    Args:
        device_type: ``cpu`` or ``cuda``.
        context, tensor: sizes of these dimensions.
        ring: context-parallel ranks pass keys and values around a ring instead of gathering them.

    Raises:
        ConfigError: the number of ranks is not a multiple of the ranks of one copy of the model.
    """
    world, copy = dist.get_world_size(), context * tensor
    if world % copy:
        raise ConfigError(
            f"{world} ranks: not a multiple of context {context} x tensor {tensor} = {copy}; give a "
            f"multiple of {copy} ranks"
        )
    _forget_earlier_meshes()
    # Include a pipeline dimension of 1, so that the groups have the form that the engine expects.
    root = init_device_mesh(
        device_type, (1, world // copy, context, tensor), mesh_dim_names=("pp", "dp", "cp", "tp")
    )
    groups = ParallelGroups(
        tensor=root["tp"].get_group(),
        context=root["cp"].get_group(),
        data=root["dp"].get_group(),
        pipeline=root["pp"].get_group(),
        ring=ring,
    )
    # Divide weights over context-parallel ranks too, because these hold copies of them, and dividing saves
    # memory.
    sharding: Any = root["dp", "cp"]._flatten("dp_cp")
    return Meshes(sharding, root["cp"], root["tp"], groups)


def _forget_earlier_meshes() -> None:
    """Clear DTensor's cache of sharding decisions. Its key is the mesh, and an equal earlier mesh may have
    process groups that were destroyed."""
    clear = getattr(tensor_debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


# torch's names: allgather puts all keys and values on every rank, and alltoall passes one rank's part after
# another.
ROTATE_METHODS = (None, "allgather", "alltoall")


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dimensions: Sequence[int],
    no_restore: Collection[torch.Tensor] = (),
    rotate_method: str | None = None,
) -> Iterator[None]:
    """Reduce every buffer to this rank's part inside the block, while the model's attention still sees whole
    sequences.

    Args:
        mesh: mesh of the context-parallel ranks.
        buffers: token ids, position ids and any other tensors with a sequence dimension; changed in place.
        dimensions: sequence dimension of each buffer; its length is a multiple of twice the number of ranks.
        no_restore: buffers that may keep their part when the block ends.
        rotate_method: one of ``ROTATE_METHODS``; ``alltoall`` is ring attention.

    Raises:
        BatchError: buffers and dimensions differ in number, or a length cannot be divided.
    """
    if len(buffers) != len(dimensions):
        raise BatchError(
            f"{len(buffers)} buffers and {len(dimensions)} sequence dimensions: give one for each"
        )
    size = mesh.size()
    for buffer, dimension in zip(buffers, dimensions, strict=True):
        if buffer.shape[dimension] % (2 * size):
            raise BatchError(
                f"a buffer of shape {list(buffer.shape)}: dimension {dimension} must be a multiple of "
                f"{2 * size} for {size} "
                "context-parallel ranks; pad it"
            )
    share = (
        ContextShare(mesh.get_local_rank(), size, mesh.get_group(), rotate_method == "alltoall")
        if size > 1
        else ContextShare()
    )
    # Compare by identity, because == of tensors compares their elements.
    kept = set(map(id, no_restore))
    whole = [None if id(buffer) in kept else buffer.clone() for buffer in buffers]
    for buffer, dimension in zip(buffers, dimensions, strict=True):
        part = buffer.index_select(dimension, share.index((0, buffer.shape[dimension]), buffer.device))
        _replace(buffer, part)
    try:
        with default_layout(SequenceLayout(None, share)):
            yield
    finally:
        for buffer, original in zip(buffers, whole, strict=True):
            if original is not None:
                _replace(buffer, original)


@torch.no_grad()
def _replace(buffer: torch.Tensor, value: torch.Tensor) -> None:
    # Change the buffer in place, because the caller's own tensors have to become the parts.
    buffer.resize_(value.shape)
    buffer.copy_(value)
