"""Optimizer steps for optimizer state in host memory, with torch's fused Adam on the CPU.

Shards are processed in slices: the gradient is copied from the device, the CPU steps the slice, and the
weights are copied back. While the CPU steps one slice, the gradient of the next slice and the weights of the
previous slice are copied on a separate stream. Optimizer state is never copied. A gradient that was already
copied during the backward pass is read from the host; such shards are stepped in a thread, while the caller
does other work before it needs the weights.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from megarl.models.engine.low_precision_adam import Hyperparameters, Shard, StateSettings, step_slice
from megarl.models.engine.state_formats import BLOCK

SLICE = BLOCK * 2**10
"""Elements of a slice, enough for a copy between device and host to run at full speed."""
# Bytes of a page-locked block: a power of two, to which torch would round it up in any case.
_PINNED_BLOCK = 2**28
# One thread is enough for all optimizers of a process, because each step uses all cores. Python joins the
# thread at exit.
_THREAD = ThreadPoolExecutor(1, "host-adam")
# Alignment of each tensor in a block, in bytes.
_ALIGNMENT = 256


class HostMemory:
    """An allocator of page-locked memory from large blocks. torch alone would round each tensor's memory up
    to a power of two.

    Args:
        pin: lock the pages; False on a machine without a GPU.
    """

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._block = torch.empty(0, dtype=torch.uint8)

    def zeros_like(self, outline: torch.Tensor) -> torch.Tensor:
        """Allocate zeros with the shape and dtype of ``outline``, a tensor on the meta device."""
        size = -(-outline.nbytes // _ALIGNMENT) * _ALIGNMENT
        if size > self._block.numel():
            self._block = torch.zeros(max(size, _PINNED_BLOCK), dtype=torch.uint8, pin_memory=self._pin)
        taken, self._block = self._block[: outline.nbytes], self._block[size:]
        return taken.view(outline.dtype).view(outline.shape)


@dataclass(slots=True)
class _Buffers:
    """Page-locked buffers for one slice. The CUDA event ``copied`` is recorded after the last copy from or to
    them."""

    gradient: torch.Tensor
    weights: torch.Tensor
    copied: Any


class HostAdam:
    """Adam for shards whose moments and master weights are in host memory.

    Args:
        device: device of weights and gradients.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._is_cuda = device, device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._is_cuda else None
        # Three sets of buffers: one receives a gradient, one is being stepped, and one sends weights back.
        self._buffers = [self._made() for _ in range(3)]
        self._memory = HostMemory(pin=self._is_cuda)
        self._early: dict[torch.Tensor, torch.Tensor] = {}
        self._arrived: set[torch.Tensor] = set()
        self._stepping: Future[None] | None = None

    def _made(self) -> _Buffers:
        # Four bytes per element, enough for every dtype of gradients and weights.
        gradient, weights = (
            torch.empty(4 * SLICE, dtype=torch.uint8, pin_memory=self._is_cuda) for _ in range(2)
        )
        return _Buffers(gradient, weights, torch.cuda.Event() if self._is_cuda else None)

    def begin(self) -> None:
        """Make copies wait for the work that is queued on the device so far, which computes the gradients.
        Work that is queued between this call and ``step`` overlaps with the copies."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    @torch.no_grad()
    def copy_early(self, parameter: torch.Tensor, gradient: torch.Tensor, wait: Callable[[], object]) -> None:
        """Start copying the gradient of a shard to the host. It must not change before the next step.

        Args:
            parameter: parameter of the gradient.
            gradient: [n], the part of the gradient whose optimizer state is in host memory.
            wait: makes the current stream wait until the gradient has been reduced.
        """
        # Allocate once for all steps: locking pages takes longer than the copy.
        if parameter not in self._early:
            self._early[parameter] = self._memory.zeros_like(torch.empty_like(gradient, device="meta"))
        self.begin()
        with self._on_stream():
            # Wait on the copy stream, so that the copy waits for the reduction but the host does not.
            wait()
            self._early[parameter].copy_(gradient, non_blocking=True)
        self._arrived.add(parameter)

    def early(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the host copy of a parameter's gradient; None if ``copy_early`` was not called. The copy may
        still be in progress."""
        return self._early[parameter] if parameter in self._arrived else None

    def forget(self) -> None:
        """Discard the early gradients after a step. Device work that is queued later waits for pending
        copies, so it cannot overwrite a gradient that is still being copied."""
        self._arrived.clear()
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def start(self, shards: Sequence[tuple[Shard, Hyperparameters]], settings: StateSettings) -> None:
        """Step all shards, after ``begin``. Shards with early gradients are stepped in a thread: until
        ``finish``, their weights and optimizer state must not be used. Gradients may be used at once."""
        # Step the other shards now. Their gradients are on the device, and a refit that follows would free
        # them.
        self.step([each for each in shards if not each[0].is_early], settings)
        early = [each for each in shards if each[0].is_early]
        self._stepping = _THREAD.submit(self.step, early, settings)

    def finish(self) -> None:
        """Wait for the thread of ``start``. If it failed, raise its error, now and in every later call,
        because only part of the weights has been stepped."""
        if self._stepping is not None:
            self._stepping.result()
            self._stepping = None
            # Let the main stream wait for the last weights here, because the next forward pass reads them.
            self.forget()

    @torch.no_grad()
    def step(self, shards: Sequence[tuple[Shard, Hyperparameters]], settings: StateSettings) -> None:
        """Step all shards, after ``begin``. On return, the last weights may still be on their way to the
        device."""
        if self._is_cuda:
            # A new thread uses device 0 by default, where the copies would create a CUDA context.
            torch.cuda.set_device(self._device)
        slices = list(_slices(shards))
        for number, (shard, _, first, last) in enumerate(slices[:1]):
            self._fetch(number, shard, first, last)
        for number, (shard, parameters, first, last) in enumerate(slices):
            if number + 1 < len(slices):
                following, _, begin, end = slices[number + 1]
                self._fetch(number + 1, following, begin, end)
            buffers = self._buffers[number % len(self._buffers)]
            if self._is_cuda:
                buffers.copied.synchronize()
            gradient = _typed(buffers.gradient, shard.gradient.dtype, last - first)
            gradient = (shard.gradient[first:last] if shard.is_early else gradient).float()
            if parameters.gradient_factor != 1.0:
                gradient = gradient * parameters.gradient_factor
            assert shard.master is not None, "what is in host memory has master weights there"
            step_slice(shard, settings, parameters, first, last, shard.master[first:last], gradient)
            weights = _typed(buffers.weights, shard.weights.dtype, last - first).copy_(
                shard.master[first:last]
            )
            with self._on_stream():
                shard.weights[first:last].copy_(weights, non_blocking=True)
                self._record(buffers)

    def _fetch(self, number: int, shard: Shard, first: int, last: int) -> None:
        """Start copying the gradient of slice ``number`` to the host. Its buffers were last used three slices
        before: the CPU has stepped that slice, and its copies precede this one in the same stream."""
        buffers = self._buffers[number % len(self._buffers)]
        if self._is_cuda:
            # The CPU will write weights into these buffers, so their last copy must be complete.
            buffers.copied.synchronize()
        with self._on_stream():
            if not shard.is_early:
                _typed(buffers.gradient, shard.gradient.dtype, last - first).copy_(
                    shard.gradient[first:last], non_blocking=True
                )
            # Record the event even without a copy here: it also covers the copies of ``copy_early``.
            self._record(buffers)

    def _on_stream(self) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(self._stream) if self._is_cuda else contextlib.nullcontext()

    def _record(self, buffers: _Buffers) -> None:
        if self._stream is not None:
            buffers.copied.record(self._stream)


def _slices(
    shards: Sequence[tuple[Shard, Hyperparameters]],
) -> Iterator[tuple[Shard, Hyperparameters, int, int]]:
    for shard, parameters in shards:
        count = shard.weights.numel()
        for first in range(0, count, SLICE):
            yield shard, parameters, first, min(first + SLICE, count)


def _typed(buffer: torch.Tensor, dtype: torch.dtype, count: int) -> torch.Tensor:
    return buffer.view(dtype)[:count]
