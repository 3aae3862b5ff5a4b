"""Offload state of a worker: whether parameters, gradients and optimizer state are on the device or in host
memory.

A colocated inference engine needs the device between training steps. Each state says what is on the device;
every public method of a worker says which states it may be called in, so that a forgotten
``prepare_for_training`` is an error with a remedy and not a crash inside a kernel. What is in host memory
need not have left the device: where nobody else wants that, everything stays, and the states differ only in
what may be called. The reference policy is a copy of the first weights in host memory, swapped in for as long
as its log-probabilities are computed.
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
    """State of a model's memory: which parts are on the device at present."""

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
    """Keeps track of ``OffloadState`` and moves parts when it changes.

    Args:
        move: moves one part; called with the parts that really have to move, parameters first.
        has_optimizer: without one, training is no legal state.
    """

    def __init__(self, move: Callable[[Part, Place], None], has_optimizer: bool) -> None:
        self._move = move
        self._has_optimizer = has_optimizer
        self.offload_state = OffloadState.TRAINING if has_optimizer else OffloadState.INFERENCE
        # without an optimizer there are gradient buffers all the same, which nothing brings back
        self._there = set(_ON_DEVICE[self.offload_state])

    def enter(self, target: OffloadState, because: str, *, stays: bool = False) -> bool:
        """Move to ``target``.

        Args:
            target: the state.
            because: names the method that asked for it.
            stays: what ``target`` does not need stays where it is.

        Returns:
            Whether anything was moved.

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
        # What leaves goes first, for what comes may need its room; noted part by part, in case one fails.
        for part in leaving:
            self._move(part, "host")
            self._there.remove(part)
            if part in _ON_DEVICE[self.offload_state]:
                # At once: a failure after it must not leave a state that claims what has gone.
                self.offload_state = target
        for part in coming:
            self._move(part, "device")
            self._there.add(part)
        self.offload_state = target
        return bool(leaving or coming)

    def require(self, part: Part, method: str, remedy: str) -> None:
        """Refuse a call that needs ``part`` on the device when it is not there.

        Raises:
            StateError: with ``remedy``, the method that would bring it there.
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
    """Page-locked host memory for some tensors, made once and written again every time that they leave the
    device.

    Copies are queued and not waited for: whoever reads them on the host synchronises before. Few large pieces
    of memory, because torch rounds each that is page-locked up to a power of two.

    Args:
        runtime: decides whether the memory is page-locked.

    Attributes:
        copied: bytes that were copied to it so far.
    """

    def __init__(self, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        self._copies: list[torch.Tensor] = []
        self.copied = 0

    @torch.no_grad()
    def fill(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Copy all of ``tensors``; the copies, in their order. They have the memory of the last call's, where
        there are as many of the same shapes and types."""
        # Locking pages is slow, so the memory of the last time is kept as long as it fits.
        if [(copy.shape, copy.dtype) for copy in self._copies] != [
            (tensor.shape, tensor.dtype) for tensor in tensors
        ]:
            self._copies = self._made_for(tensors)
        for copy, tensor in zip(self._copies, tensors, strict=True):
            # A second offload without a return in between: the tensors are the copies themselves.
            if copy.data_ptr() != tensor.data_ptr():
                copy.copy_(tensor, non_blocking=True)
                self.copied += tensor.nbytes
        return list(self._copies)

    def take(self, each: Callable[[Callable[[torch.Tensor], torch.Tensor]], None]) -> None:
        """Put copies in the places of tensors.

        Args:
            each: calls what it is given with each tensor, in the same order every time, and puts the result
                in its place.
        """
        tensors: list[torch.Tensor] = []

        def note(tensor: torch.Tensor) -> torch.Tensor:
            tensors.append(tensor)
            return tensor

        each(note)
        copies = iter(self.fill(tensors))
        each(lambda _: next(copies))

    def _made_for(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Memory for all, the largest first, each where there is most room left."""
        sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
        # Filled up to a power of two, to which torch rounds page-locked memory, so that little is wasted.
        room = 1 << (max([_BLOCK, *sizes]) - 1).bit_length()
        free: list[tuple[int, int]] = []  # bytes taken of a block, and its number
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


# Share of a device's memory that stays free for the reference policy's pass where the present weights stay on
# the device.
_LEFT_FOR_A_PASS = 0.25


class ReferenceWeights:
    """This rank's shards of the reference policy.

    They are in page-locked memory and are never copied back. Meanwhile the present weights are in other
    memory of the device, where it has room for them and a pass; otherwise they go to host memory that is kept
    for it, and come back.

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
        """Inside, the model has the reference weights; afterwards the present ones again, to the bit,
        whatever happened inside. Within itself it does nothing."""
        if self._is_in:
            yield
            return
        backend.sync_parameters()
        present = self._kept(_parameters(backend))
        self._is_in = True
        try:
            # Inside try: a failure in the middle must still bring the present weights back.
            _write(backend, self._weights)
            yield
        finally:
            _write(backend, present)
            self._is_in = False

    def _kept(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Copies of the present weights."""
        if self._runtime.has_room(sum(weight.nbytes for weight in weights), _LEFT_FOR_A_PASS):
            return [weight.clone() for weight in weights]
        return self._present.fill(weights)


class BaseAsReference:
    """The reference policy of a model with adapters: the model without them. It takes no memory and no
    copies."""

    @contextlib.contextmanager
    def swapped_in(self, backend: Backend) -> Iterator[None]:
        """Inside, the model is its base. Within itself it does nothing."""
        with backend.without_adapters() or contextlib.nullcontext():
            yield


def _parameters(backend: Backend) -> list[torch.Tensor]:
    return [parameter.detach() for _, parameter in backend.parameters()]


@torch.no_grad()
def _write(backend: Backend, weights: Sequence[torch.Tensor]) -> None:
    """Write weights into the model, in the order of the device's queue, so that no copy overtakes a pass
    that is still to run."""
    for parameter, weight in zip(_parameters(backend), weights, strict=True):
        parameter.copy_(weight, non_blocking=True)
