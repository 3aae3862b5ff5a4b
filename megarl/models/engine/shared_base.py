"""One base for several models of a rank: the weights that adapters leave untouched are in memory that the
workers of these models share.

PPO trains an adapter of the policy and one of the critic, and both have the same base. Their workers are
separate processes, so that each would hold all of it. Nothing writes these weights after they are loaded;
therefore the first worker moves its own into a shared block, and others read them there if they are equal bit
for bit.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from megarl.errors import RefitError
from megarl.models.engine.worker_state import WorkerState
from megarl.weight_sync.ipc import SharedBlock

logger = logging.getLogger(__name__)

# Tensors of torch begin at multiples of this address, on which kernels may rely.
_ALIGNMENT = 64


class SharesFrozen(Protocol):
    """A backend with adapters, whose frozen weights may be in the memory of another process."""

    def frozen(self) -> dict[str, Sequence[torch.Tensor]]:
        """Return the tensors of each storage that has only frozen parameters, by the name of a parameter in
        it. Empty if they cannot be shared. Local."""

    def keep_host_copy(self, tensor: torch.Tensor, memory: torch.Tensor) -> None:
        """Take host memory as the copy of a frozen tensor's storage that offloads use, which they never write
        again. Only on a CUDA device. Local.

        Args:
            tensor: any tensor of the storage.
            memory: uint8 [bytes of the storage], with the same bytes.
        """


class SharingWorker(WorkerState):
    """The methods of a worker by which models share one base."""

    # The block must live as long as another process may open it.
    _block: SharedBlock | None = None

    def share_base(self) -> dict[str, Any]:
        """Move the frozen weights into a shared block. Return its handle, and by name where each storage
        begins in it and its bytes; an empty dictionary if there is nothing to share, or no memory for it."""
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
            # Free each storage before the next one is copied, so that there are never two bases.
            self._keep(tensors, memory)
        return {"block": self._block.handle(), "places": places}

    def take_base(self, shared: Sequence[Mapping[str, Any]]) -> int:
        """Read frozen weights from the blocks that ``share_base`` made, and return their bytes.

        Weights that differ in any bit stay this model's own, and so do all of them if the block is on another
        node.

        Args:
            shared: results of ``share_base``, by rank.
        """
        self.offload_states.require("parameters", "take_base", "prepare_for_lp_inference")
        rank, taken = dist.get_rank(), 0
        if not shared[rank]:
            return 0
        places: Mapping[str, Sequence[int]] = shared[rank]["places"]
        try:
            block = SharedBlock.attach(shared[rank]["block"])
        except RefitError as error:
            logger.warning("rank %d holds a base of its own: %s", rank, error.__cause__ or error)
            return 0
        try:
            for name, tensors in cast(SharesFrozen, self.backend).frozen().items():
                own = bytes_of(tensors[0].untyped_storage())
                if name not in places or not torch.equal(own.cpu(), memory := _at(block, places[name])):
                    continue
                if not taken:
                    self.runtime.lock_pages(block.bytes)
                self._keep(tensors, memory)
                taken += memory.numel()
        finally:
            # Pages that tensors view stay mapped without the descriptor.
            block.close()
        return taken

    def _keep(self, tensors: Sequence[torch.Tensor], memory: torch.Tensor) -> None:
        """Let all tensors of a storage read ``memory``, or on a CUDA device their host copy."""
        if self.runtime.is_cuda:
            cast(SharesFrozen, self.backend).keep_host_copy(tensors[0], memory)
            return
        for tensor in tensors:
            # Replace the memory of the tensor itself, to which modules, optimizers and FSDP refer.
            tensor.data = moved_to(tensor, memory)


def _at(block: SharedBlock, place: Sequence[int]) -> torch.Tensor:
    begin, size = place
    return block.bytes[begin : begin + size]


def bytes_of(memory: torch.UntypedStorage) -> torch.Tensor:
    """Return a view of all bytes of a storage, uint8."""
    # View bytes, because tensors of several dtypes and shapes may share one storage.
    return torch.empty(0, dtype=torch.uint8, device=memory.device).set_(memory)


def moved_to(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a tensor that views ``memory`` as ``tensor`` views its own storage.

    Args:
        tensor: any view of its storage.
        memory: uint8 [bytes of the storage], in host memory, aligned for the dtype.
    """
    offset = memory.storage_offset() // tensor.element_size() + tensor.storage_offset()
    empty = torch.empty(0, dtype=tensor.dtype)
    return empty.set_(memory.untyped_storage(), offset, tensor.size(), tensor.stride())
