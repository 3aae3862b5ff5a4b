"""Offload state of a worker: which of parameters, gradients and optimizer state are on the device, and which
are in host memory.

A colocated inference engine needs the device between training steps. Every public method of a worker requires
some of the states, so that a forgotten ``prepare_for_training`` is an error with a remedy and not a crash
inside a kernel. Parts that are not required on the device may still be there: if no engine needs the memory,
everything stays, and the states differ only in the methods that may be called. The reference policy is a copy
of the first weights in host memory, which is swapped in while its log-probabilities are computed.
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
    """State of a model's memory: the parts that are on the device at present."""

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
    """Tracker of the ``OffloadState``, which moves parts when the state changes.

    Args:
        move: moves one part; called only with parts that really have to move, parameters first.
        has_optimizer: without an optimizer, training is not a legal state.
    """

    def __init__(self, move: Callable[[Part, Place], None], has_optimizer: bool) -> None:
        self._move = move
        self._has_optimizer = has_optimizer
        self.offload_state = OffloadState.TRAINING if has_optimizer else OffloadState.INFERENCE
        # Without an optimizer a backend still has gradient buffers. They are not counted, because no state
        # would bring them back.
        self._there = set(_ON_DEVICE[self.offload_state])

    def enter(self, target: OffloadState, because: str, *, stays: bool = False) -> bool:
        """Enter the state ``target``.

        Args:
            target: the state.
            because: name of the method that requests it.
            stays: leave parts that ``target`` does not need where they are.

        Returns:
            True if any part was moved.

        Raises:
            StateError: the transition is not legal.
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
        # Move parts away first, because the parts that come may need their memory. Record each move at once,
        # in case a later one fails.
        for part in leaving:
            self._move(part, "host")
            self._there.remove(part)
            if part in _ON_DEVICE[self.offload_state]:
                # Change the state at once, so that after a later failure it does not claim a part that has
                # left.
                self.offload_state = target
        for part in coming:
            self._move(part, "device")
            self._there.add(part)
        self.offload_state = target
        return bool(leaving or coming)

    def require(self, part: Part, method: str, remedy: str) -> None:
        """Raise if ``part`` is not on the device, where a call needs it.

        Raises:
            StateError: the part is missing; names ``remedy``, the method that would move it to the device.
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


_ALIGNMENT = 256
_BLOCK = 2**28


class HostCopies:
    """Page-locked host memory for some tensors, allocated once and rewritten each time the tensors are
    offloaded.

    Copies are queued and not awaited: a reader on the host must synchronise first. The memory is a few large
    blocks, because torch rounds each page-locked block up to a power of two.

    Args:
        runtime: decides whether the memory is page-locked.

    Attributes:
        copied: bytes that were copied to this memory so far.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._copies: list[torch.Tensor] = []
        self.copied = 0

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy all ``tensors``, and return the copies in the same order. The last call's memory is reused if
        number, shapes and dtypes are the same."""
        # Keep the last call's memory while it fits, because locking pages is slow.
        if [(copy.shape, copy.dtype) for copy in self._copies] != [
            (tensor.shape, tensor.dtype) for tensor in tensors
        ]:
            self._copies = self._made_for(tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            # On a second offload without a return in between, the tensors are the copies themselves.
            if copy.data_ptr() != tensor.data_ptr():
                copy.copy_(tensor, non_blocking=True)
                self.copied += tensor.nbytes
        return list(self._copies)

    def take(self, each: Callable[[Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
        """Replace tensors by their copies.

        Args:
            each: applies its argument to each tensor, in the same order every time, and replaces the tensor
                by the result.
        """
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        each(note)
        copies = iter(self.fill(tensors))
        each(lambda _: next(copies))

    def _made_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Allocate memory for all ``tensors``, the largest first, each in the block with the most room
        left."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        # Size blocks to a power of two, to which torch rounds page-locked memory, so that little is wasted.
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


# Share of a device's memory that must stay free for the reference policy's pass if the present weights are
# kept on the device.
_LEFT_FOR_A_PASS = 0.25


class ReferenceWeights:
    """This rank's shards of the reference policy.

    The reference weights are in page-locked memory and are never copied back. While they are swapped in, the
    present weights stay in other memory of the device if it has room for them and a pass; otherwise they are
    copied to host memory that is kept for them.

    Args:
        backend: the model as it is now; its present weights become the reference.
        runtime: decides whether the copies are page-locked.
    """

    def __init__(self, backend: Backend, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._present = HostCopies(runtime)
        self._is_in = False
        backend.sync_parameters()
        self._weights = HostCopies(runtime).fill(_parameters(backend))

    @contextlib.contextmanager
    def swapped_in(self, backend: Backend) -> Iterator[None]:
        """Give the model the reference weights inside the context, and restore the present weights bit for
        bit afterwards, even after an error. A nested call does nothing."""
        if self._is_in:
            yield
            return
        backend.sync_parameters()
        present = self._kept(_parameters(backend))
        self._is_in = True
        try:
            # Write inside the try: a failure halfway must still restore the present weights.
            _write(backend, self._weights)
            yield
        finally:
            _write(backend, present)
            self._is_in = False

    def _kept(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the present weights."""
        if self._runtime.has_room(sum(weight.nbytes for weight in weights), _LEFT_FOR_A_PASS):
            return [weight.clone() for weight in weights]
        return self._present.fill(weights)


class BaseAsReference:
    """The reference policy of a model with adapters: the model without its adapters. It needs neither memory
    nor copies."""

    @contextlib.contextmanager
    def swapped_in(self, backend: Backend) -> Iterator[None]:
        """Let the model compute with its base weights inside the context. A nested call does nothing."""
        with backend.without_adapters() or contextlib.nullcontext():
            yield


def _parameters(backend: Backend) -> list[torch.Tensor]:
    return [parameter.detach() for _, parameter in backend.parameters()]


@torch.no_grad()
def _write(backend: Backend, weights: Sequence[torch.Tensor]) -> None:
    """Write ``weights`` into the model, in the order of the device's queue, so that no copy overtakes a pass
    that has yet to run."""
    for parameter, weight in zip(_parameters(backend), weights, strict=True):
        parameter.copy_(weight, non_blocking=True)
