"""Context parallelism for callers that bring their own loop: buffers cut to this rank's part for as long as a block runs.

This is what ``torch.distributed.tensor.experimental.context_parallel`` offers, on the engine's attention, which works on any device and
under any tensor parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from megarl.errors import BatchError
from megarl.models.engine.attention import SequenceLayout
from megarl.models.engine.context import ContextShare
from megarl.models.huggingface.attention import default_layout

# as torch names them: all keys and values on every rank, or one rank's part after another
ROTATE_METHODS = (None, "allgather", "alltoall")


@contextlib.contextmanager
def context_parallel(
    mesh: DeviceMesh,
    buffers: Sequence[torch.Tensor],
    dimensions: Sequence[int],
    no_restore: Collection[torch.Tensor] = (),
    rotate_method: str | None = None,
) -> Iterator[None]:
    """Inside, every buffer holds this rank's part of it and the model's attention sees whole sequences all the same.

    Args:
        mesh: the context-parallel ranks.
        buffers: token ids, position ids and whatever else has a sequence dimension; changed in place.
        dimensions: the sequence dimension of each; its length is a multiple of twice the ranks.
        no_restore: buffers that may keep their part when the block ends.
        rotate_method: one of ``ROTATE_METHODS``; ``alltoall`` is ring attention.

    Raises:
        BatchError: not one dimension for each buffer, or a length that cannot be divided.
    """
    if len(buffers) != len(dimensions):
        raise BatchError(f"{len(buffers)} buffers and {len(dimensions)} sequence dimensions: give one for each")
    size = mesh.size()
    for buffer, dimension in zip(buffers, dimensions, strict=True):
        if buffer.shape[dimension] % (2 * size):
            raise BatchError(
                f"a buffer of shape {list(buffer.shape)}: dimension {dimension} must be a multiple of {2 * size} for {size} "
                "context-parallel ranks; pad it"
            )
    share = ContextShare(mesh.get_local_rank(), size, mesh.get_group(), rotate_method == "alltoall") if size > 1 else ContextShare()
    kept = {id(buffer) for buffer in no_restore}
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
    buffer.resize_(value.shape)
    buffer.copy_(value)
