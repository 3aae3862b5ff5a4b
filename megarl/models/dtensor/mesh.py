"""The device mesh of data-, context- and tensor-parallel ranks, and the engine's process groups.

For users with their own training loop, ``context_parallel`` splits buffers over the context-parallel ranks
within a context. It corresponds to ``torch.distributed.tensor.experimental.context_parallel``, but uses the
engine's attention, which works on any device and with tensor parallelism.
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
    """Sub-meshes of the device mesh.

    Attributes:
        sharding: data- and context-parallel ranks as one dimension, over which ``fully_shard`` shards
            parameters and sums gradients.
        context, tensor: the context-parallel and the tensor-parallel ranks.
        groups: their process groups; the pipeline group has one rank.
    """

    sharding: DeviceMesh
    context: DeviceMesh
    tensor: DeviceMesh
    groups: ParallelGroups


def build_meshes(device_type: str, *, context: int, tensor: int, ring: bool = False) -> Meshes:
    """Build the mesh over all ranks. Tensor parallelism is the fastest dimension, then context, then data.

    Args:
        device_type: ``cpu`` or ``cuda``.
        context, tensor: sizes of these dimensions.
        ring: context-parallel ranks send keys and values in a ring instead of all-gathering them.

    Raises:
        ConfigError: the number of ranks is not a multiple of ``context * tensor``.
    """
    world, copy = dist.get_world_size(), context * tensor
    if world % copy:
        raise ConfigError(
            f"{world} ranks: not a multiple of context {context} x tensor {tensor} = {copy}; give a "
            f"multiple of {copy} ranks"
        )
    _forget_earlier_meshes()
    # The engine expects a pipeline group, so include a dimension of size 1.
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
    # Shard weights over context-parallel ranks too, which would otherwise hold replicas.
    sharding: Any = root["dp", "cp"]._flatten("dp_cp")
    return Meshes(sharding, root["cp"], root["tp"], groups)


def _forget_earlier_meshes() -> None:
    """Clear DTensor's cache of sharding decisions. It is keyed by mesh, and an equal earlier mesh may refer
    to destroyed process groups."""
    clear = getattr(tensor_debug, "_clear_sharding_prop_cache", None)
    if clear is not None:
        clear()


# torch's names: allgather gathers all keys and values on every rank; alltoall passes the ranks' parts around
# a ring.
ROTATE_METHODS = (None, "allgather", "alltoall")


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dimensions: Sequence[int],
    no_restore: Collection[torch.Tensor] = (),
    rotate_method: str | None = None,
) -> Iterator[None]:
    """Within the context, shrink every buffer to this context-parallel rank's part, while the model's
    attention still covers full sequences.

    Args:
        mesh: mesh of the context-parallel ranks.
        buffers: token ids, position ids and other tensors with a sequence dimension; changed in place.
        dimensions: sequence dimension of each buffer; its length must be a multiple of twice the number of
            ranks.
        no_restore: buffers that need not be restored on exit.
        rotate_method: one of ``ROTATE_METHODS``; ``alltoall`` is ring attention.

    Raises:
        BatchError: there are not as many dimensions as buffers, or a length cannot be split.
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
    # Compare by identity, because == on tensors compares elements.
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
    # In place, because the caller's own tensors must shrink.
    buffer.resize_(value.shape)
    buffer.copy_(value)
