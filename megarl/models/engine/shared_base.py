"""One copy of the base weights for several models on a host: the weights that adapters do not change are in
memory that the workers of these models share.

PPO trains an adapter of the policy and an adapter of the value model on the same base model. Their workers
are separate processes, so each would have its own copy. Nothing writes to these weights after they are
loaded. So the first worker moves its weights into shared memory, and the other worker replaces its own by
them where both are bitwise equal.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, TypedDict, cast

import torch
import torch.distributed as dist

from megarl.errors import RefitError
from megarl.models.engine.worker_state import WorkerState
from megarl.weight_sync.ipc import BlockHandle, SharedBlock

logger = logging.getLogger(__name__)

# torch aligns its allocations to this many bytes, and kernels may rely on it.
_ALIGNMENT = 64


class SharesFrozen(Protocol):
    """A backend with adapters, whose frozen weights may be in shared memory."""

    def frozen(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return the tensors of each storage that contains only frozen parameters, by the name of one of its
        parameters. Empty if they cannot be shared. Local."""

    def keep_host_copy(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        """Use ``memory`` as the host copy of a frozen storage, for offloads from a GPU. Later offloads do not
        write the copy, because the weights never change. Only on a CUDA device. Local.

        Args:
            tensor: any tensor of the storage.
            memory: uint8 [bytes of the storage], with the same bytes.
        """


class SharedBase(TypedDict, total=False):
    """Frozen weights in shared memory: the handle of the memory, and offset and size in bytes of each storage
    by name. Empty if there is nothing to share, or not enough shared memory."""

    block: BlockHandle
    places: Mapping[str, Sequence[int]]


class SharingWorker(WorkerState):
    """Worker methods by which several models share one copy of the base weights."""

    # Keep the block open for as long as another process may attach to it.
    _block: SharedBlock | None = None

    def share_base(self) -> SharedBase:
        """Move the frozen weights into shared memory."""
        self.offload_states.require("parameters", "share_base", "prepare_for_lp_inference")
        frozen, places, end = cast(SharesFrozen, self.backend).frozen(), {}, 0
        for name, tensors in frozen.items():
            places[name] = end, tensors[0].untyped_storage().nbytes()
            end += -(-places[name][1] // _ALIGNMENT) * _ALIGNMENT
        if not end:
            return {}
        try:
            self._block = SharedBlock.create(end)
        except (OSError, RefitError) as error:
            logger.warning("each model holds a base of its own: %s", error.__cause__ or error)
            return {}
        self.runtime.lock_pages(self._block.bytes)
        for name, tensors in frozen.items():
            memory = _at(self._block, places[name])
            memory.copy_(bytes_of(tensors[0].untyped_storage()))
            # Free each storage before copying the next one, so that there are never two copies of the base.
            self._keep(tensors, memory)
        return {"block": self._block.handle(), "places": places}

    def take_base(self, shared: Sequence[SharedBase]) -> int:
        """Replace frozen weights by those in the memory of ``share_base``, and return their number of bytes.

        Weights that differ in any bit are not replaced; neither is any weight if the memory is on another
        node.

        Args:
            shared: results of ``share_base``, by rank.
        """
        self.offload_states.require("parameters", "take_base", "prepare_for_lp_inference")
        rank, taken = dist.get_rank(), 0
        if not shared[rank]:
            return 0
        places = shared[rank]["places"]
        try:
            block = SharedBlock.attach(shared[rank]["block"])
        except RefitError as error:
            logger.warning("rank %d holds a base of its own: %s", rank, error.__cause__ or error)
            return 0
        try:
            for name, tensors in cast(SharesFrozen, self.backend).frozen().items():
                # Compare bytes, not values: NaN differs from itself, and -0.0 equals 0.0.
                own = bytes_of(tensors[0].untyped_storage())
                if name not in places or not torch.equal(own.cpu(), memory := _at(block, places[name])):
                    continue
                if not taken:
                    self.runtime.lock_pages(block.bytes)
                self._keep(tensors, memory)
                taken += memory.numel()
        finally:
            # The pages that tensors view stay mapped after the file descriptor is closed.
            block.close()
        return taken

    def _keep(self, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Let all tensors of a storage use ``memory``; on a CUDA device, use it as their host copy."""
        if self.runtime.is_cuda:
            cast(SharesFrozen, self.backend).keep_host_copy(tensors[0], memory)
            return
        for tensor in tensors:
            # Replace the data and not the tensor, because modules, optimizers and FSDP refer to the tensor.
            tensor.data = moved_to(tensor, memory)


def _at(block: SharedBlock, place: Sequence[int]) -> torch.Tensor:
    begin, size = place
    return block.bytes[begin : begin + size]


def bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of a storage as a uint8 view."""
    # Compare and copy bytes, because tensors of several dtypes and shapes may share one storage.
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def moved_to(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor that views ``memory`` in the same way as ``tensor`` views its own storage.

    Args:
        tensor: any view of its storage.
        memory: uint8 [bytes of the storage], in host memory, aligned for the dtype.
    """
    offset = memory.storage_offset() // tensor.element_size() + tensor.storage_offset()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
