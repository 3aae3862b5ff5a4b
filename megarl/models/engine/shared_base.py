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

    def frozen(self) -> Mapping[str, torch.Tensor]:
        """Return all bytes of each storage that has only frozen parameters, uint8 [bytes], by the name of a
        parameter in it. Empty if they cannot be shared. Local."""

    def keep_frozen_in(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Read frozen parameters from host memory that has the same bytes as their own, and free their own.
        On a CUDA device, this memory becomes their host copy, which no offload writes again. Local.

        Args:
            memory: uint8 [bytes], by a name of ``frozen``; storages that it lacks stay as they are.
        """


class SharingWorker(WorkerState):
    """The methods of a worker by which models share one base."""

    # The block must live as long as another process may open it.
    _base: SharedBlock | None = None

    def share_base(self) -> dict[str, Any]:
        """Move the frozen weights into a shared block, and return its handle, and by name where each storage
        begins in it and its bytes. The parameters have to be on the device."""
        backend = cast(SharesFrozen, self.backend)
        frozen, places, end = backend.frozen(), {}, 0
        for name, memory in frozen.items():
            places[name] = end, memory.numel()
            end += -(-memory.numel() // _ALIGNMENT) * _ALIGNMENT
        self._base = SharedBlock.create(end)
        for name, memory in frozen.items():
            _at(self._base, places[name]).copy_(memory)
        self._keep(self._base, places)
        return {"memory": self._base.handle(), "places": places}

    def take_base(self, shared: Sequence[Mapping[str, Any]]) -> int:
        """Read frozen weights from the blocks that ``share_base`` made, and return their bytes.

        Weights that differ in any bit stay this model's own, and so do all of them if the block is on another
        node. The parameters have to be on the device.

        Args:
            shared: results of ``share_base``, by rank.
        """
        rank = dist.get_rank()
        places: Mapping[str, Sequence[int]] = shared[rank]["places"]
        try:
            block = SharedBlock.attach(shared[rank]["memory"])
        except RefitError as error:
            logger.warning("rank %d keeps a base of its own: %s", rank, error)
            return 0
        frozen = cast(SharesFrozen, self.backend).frozen()
        equal = {
            name: places[name]
            for name, memory in frozen.items()
            if name in places and torch.equal(memory.cpu(), _at(block, places[name]))
        }
        self._keep(block, equal)
        # The pages stay mapped; only the descriptor is closed.
        block.close()
        return sum(size for _, size in equal.values())

    def _keep(self, block: SharedBlock, places: Mapping[str, Sequence[int]]) -> None:
        self.runtime.lock_pages(block.bytes)
        memory = {name: _at(block, place) for name, place in places.items()}
        cast(SharesFrozen, self.backend).keep_frozen_in(memory)


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
