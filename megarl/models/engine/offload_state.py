"""Placement of a worker's parameters, gradients and optimizer state: on the device or in host memory.

A colocated rollout engine needs the device memory between training steps. Every public method of a worker
requires certain parts on the device, so a forgotten ``prepare_for_training`` is an error with advice, not a
crash inside a kernel. Parts that are not required may stay on the device: if no engine needs the memory,
nothing is moved, and the states differ only in the methods that may be called.

The reference policy is a copy of the initial weights in host memory. It is swapped in while its
log-probabilities are computed.
"""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

import torch

from megarl.distributed.device import DeviceRuntime
from megarl.errors import StateError
from megarl.models.engine.backend import Backend, Part, Place


class OffloadState(Enum):
    """Placement of a model's memory. The value describes it for messages."""

    TRAINING = "parameters, gradients and optimizer state on the device"
    INFERENCE = "parameters on the device, gradients and optimizer state not to be used, or in host memory"
    OFFLOADED = "everything in host memory"


_ON_DEVICE: dict[OffloadState, frozenset[Part]] = {
    OffloadState.TRAINING: frozenset({"parameters", "gradients", "optimizer"}),
    OffloadState.INFERENCE: frozenset({"parameters"}),
    OffloadState.OFFLOADED: frozenset(),
}
_PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
_LEGAL: dict[OffloadState, frozenset[OffloadState]] = {
    OffloadState.TRAINING: frozenset({OffloadState.TRAINING, OffloadState.INFERENCE, OffloadState.OFFLOADED}),
    OffloadState.INFERENCE: frozenset(
        {OffloadState.TRAINING, OffloadState.INFERENCE, OffloadState.OFFLOADED}
    ),
    OffloadState.OFFLOADED: frozenset(
        {OffloadState.TRAINING, OffloadState.INFERENCE, OffloadState.OFFLOADED}
    ),
}


class OffloadStates:
    """Tracks a worker's ``OffloadState``, and moves its parts (parameters, gradients, optimizer state) when
    it changes.

    Args:
        move: moves one part. Called only if the part must move; parameters come first.
        has_optimizer: False makes TRAINING an illegal state.
    """

    def __init__(self, move: Callable[[Part, Place], None], has_optimizer: bool) -> None:
        self._move = move
        self._has_optimizer = has_optimizer
        self.offload_state = OffloadState.TRAINING if has_optimizer else OffloadState.INFERENCE
        # Without an optimizer a backend still has gradient buffers. They are not tracked: once moved to the
        # host, no legal state would move them back.
        self._there = set(_ON_DEVICE[self.offload_state])

    def enter(self, target: OffloadState, because: str, *, stays: bool = False) -> bool:
        """Change the state to ``target``.

        Args:
            target: the new state.
            because: name of the method that requests it, for messages.
            stays: leave parts that ``target`` does not need where they are.

        Returns:
            True if any part was moved.

        Raises:
            StateError: this change of state is not allowed.
        """
        if target is OffloadState.TRAINING and not self._has_optimizer:
            raise StateError(
                f"{because}: this worker was built with init_optimizer=False and cannot train; build it "
                "with an optimizer"
            )
        if target not in _LEGAL[self.offload_state]:
            legal = ", ".join(sorted(state.name for state in _LEGAL[self.offload_state]))
            raise StateError(
                f"{because}: cannot go from {self.offload_state.name} to {target.name}; from here: {legal}"
            )
        wanted = _ON_DEVICE[target]
        leaving = [] if stays else [part for part in _PARTS if part in self._there - wanted]
        coming = [part for part in _PARTS if part in wanted - self._there]
        # Offload first, because the parts to load may need this memory. Record each move at once, in case a
        # later one fails.
        for part in leaving:
            self._move(part, "host")
            self._there.remove(part)
            if part in _ON_DEVICE[self.offload_state]:
                # Change the state at once: if a later move fails, it must not promise a part that has been
                # offloaded.
                self.offload_state = target
        for part in coming:
            self._move(part, "device")
            self._there.add(part)
        self.offload_state = target
        return bool(leaving or coming)

    def require(self, part: Part, method: str, remedy: str) -> None:
        """Check that ``part`` is on the device, where ``method`` needs it.

        Raises:
            StateError: it is not. The message names ``remedy``, the method that moves it there.
        """
        if part == "optimizer" and not self._has_optimizer:
            raise StateError(
                f"{method}(): this worker was built with init_optimizer=False and cannot train; build it "
                "with an optimizer"
            )
        if part not in _ON_DEVICE[self.offload_state]:
            raise StateError(
                f"{method}() needs {part} on the device, but the worker is {self.offload_state.name} "
                f"({self.offload_state.value}); call {remedy}() first"
            )


# Alignment of each tensor in a block, in bytes.
_ALIGNMENT = 256
# Minimum size of a block in bytes.
_BLOCK = 2**28


class HostCopies:
    """Host memory for copies of a set of tensors. It is page-locked and allocated once, and rewritten at
    every offload.

    Copies are asynchronous, so the host must synchronize before it reads them. The memory is allocated in a
    few large blocks, because torch rounds each page-locked allocation up to a power of two.

    Args:
        runtime: page-locks the memory if its device is a GPU.

    Attributes:
        copied: number of bytes copied to this memory so far.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._copies: list[torch.Tensor] = []
        self.copied = 0

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy ``tensors`` to host memory, and return the copies in the same order. The memory of the last
        call is reused if number, shapes and dtypes are equal."""
        # Reuse the memory of the last call if possible, because locking pages is slow.
        if [(copy.shape, copy.dtype) for copy in self._copies] != [
            (tensor.shape, tensor.dtype) for tensor in tensors
        ]:
            self._copies = self._made_for(tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            # If the tensors were not moved back since the last offload, they are these copies.
            if copy.data_ptr() != tensor.data_ptr():
                copy.copy_(tensor, non_blocking=True)
                self.copied += tensor.nbytes
        return list(self._copies)

    def take(self, each: Callable[[Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
        """Replace tensors by copies in host memory.

        Args:
            each: applies a function to each tensor and replaces the tensor by the result. Must visit the
                tensors in the same order in every call.
        """
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        each(note)
        copies = iter(self.fill(tensors))
        each(lambda _: next(copies))

    def _made_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocate memory for all ``tensors``. The largest come first, each in the block with the most free
        bytes."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        # torch rounds page-locked memory up to a power of two, so a block of that size wastes little.
        room = 1 << (max([_BLOCK, *sizes]) - 1).bit_length()
        free: list[tuple[int, int]] = []  # pairs of a block's used bytes and its number
        places: dict[int, tuple[int, int]] = {}
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            if not free or free[0][0] + sizes[index] > room:
                heapq.heappush(free, (0, len(free)))
            taken, block = heapq.heappop(free)
            places[index] = (block, taken)
            heapq.heappush(free, (taken + sizes[index], block))
        blocks = {number: self._block(taken) for taken, number in free}
        return [
            blocks[places[index][0]][places[index][1] :][: tensor.nbytes]
            .view(tensor.dtype)
            .view(tensor.shape)
            for index, tensor in enumerate(tensors)
        ]

    def _block(self, size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._runtime.is_cuda)


# Fraction of the device memory that must remain free for the reference policy's forward pass, if the policy's
# own weights are to stay on the device meanwhile.
_LEFT_FOR_A_PASS = 0.25


class ReferenceWeights:
    """This rank's shards of the reference policy's weights.

    They are in page-locked host memory. While they are swapped in, the policy's own weights are kept in other
    device memory if it has room for them and for a forward pass, otherwise in host memory.

    Args:
        backend: the model, whose current weights become the reference.
        runtime: page-locks the memory if its device is a GPU.
    """

    def __init__(self, backend: Backend, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._present = HostCopies(runtime)
        self._is_in = False
        backend.sync_parameters()
        self._weights = HostCopies(runtime).fill(_parameters(backend))

    @contextlib.contextmanager
    def swapped_in(self, backend: Backend) -> Iterator[None]:
        """Swap the reference weights into the model inside the context. Afterwards, even after an error, the
        policy's weights are restored bit for bit. A nested call does nothing."""
        if self._is_in:
            yield
            return
        backend.sync_parameters()
        present = self._kept(_parameters(backend))
        self._is_in = True
        try:
            # Inside the try block: if this write fails halfway, the policy's weights must still be restored.
            _write(backend, self._weights)
            yield
        finally:
            _write(backend, present)
            self._is_in = False

    def _kept(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copy the policy's weights, on the device if it has room, otherwise to host memory."""
        if self._runtime.has_room(sum(weight.nbytes for weight in weights), _LEFT_FOR_A_PASS):
            return [weight.clone() for weight in weights]
        return self._present.fill(weights)


class BaseAsReference:
    """The reference policy of a model with adapters: the base model. It needs no copy of any weight."""

    @contextlib.contextmanager
    def swapped_in(self, backend: Backend) -> Iterator[None]:
        """Turn the adapters off inside the context. A nested call does nothing."""
        with backend.without_adapters() or contextlib.nullcontext():
            yield


def _parameters(backend: Backend) -> list[torch.Tensor]:
    return [parameter.detach() for _, parameter in backend.parameters()]


@torch.no_grad()
def _write(backend: Backend, weights: Sequence[torch.Tensor]) -> None:
    """Write ``weights`` into the model. The copies are queued on the device, so they run after forward passes
    that are still queued there."""
    for parameter, weight in zip(_parameters(backend), weights, strict=True):
        parameter.copy_(weight, non_blocking=True)
