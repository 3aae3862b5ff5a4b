"""CUDA graphs of functions with fixed shapes. One launch replaces hundreds, which take the host longer than
the device needs to compute.

A decoding step of a model with 1.5 billion parameters has 620 kernels. They run for 5 ms; launched one by one
they take 72 ms.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., torch.Tensor]
"""A function of tensors that can be captured. All other memory that it reads or writes must stay at its
address: parameters, a KV cache, a position stored in a tensor. Python numbers keep the values that they had
during capture, so they must be determined by the key."""


class Capture(Protocol):
    """An interface that captures the device work of a function."""

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function once without capture, so that libraries allocate what they need: handles,
        workspaces, compiled kernels, communicators."""

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a function; its work may or may not be executed meanwhile. Return a function that replays
        the capture, and the tensor that contains the result after a replay."""


class CudaCapture:
    """Capture in CUDA graphs that share one memory pool. Sharing is safe because graphs run one at a time,
    and a result is read before the next graph runs.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function once on the capture stream, as torch requires; see ``Capture``."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Capture a function as a CUDA graph; see ``Capture``."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local" allows CUDA calls of other threads during capture: NCCL's watchdog queries events.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@dataclass
class _Recorded:
    """A function with fixed inputs, for one key. ``replay`` and ``result`` are None until it is captured."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None] | None = None
    result: torch.Tensor | None = None


@dataclass
class Graphs:
    """Runs functions of fixed shapes. For each key, the first call runs directly as a warm-up, the second
    captures, and later calls replay.

    Attributes:
        capture: captures functions; None runs every call directly.
        few_sizes: callers should use few different shapes. All ranks must remove the same rows from a batch,
            and this value decides which, so it stays True on a rank whose capture has failed: other ranks may
            still capture.
    """

    capture: Capture | None = None
    few_sizes: bool = False
    _recorded: dict[Hashable, _Recorded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.few_sizes |= self.capture is not None

    def run(self, key: Hashable, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``function(*inputs)``.

        Args:
            key: identifies everything that the work of ``function`` depends on, except the values of tensors.
                The shapes of ``inputs`` are added to it.
            function: see ``Function``.
            inputs: tensors; copied to memory with a fixed address before a replay.

        Returns:
            The result, valid until the next call with this key.
        """
        if self.capture is None:
            return function(*inputs)
        key = (key, *(tensor.shape for tensor in inputs))
        recorded = self._recorded.get(key)
        if recorded is None:
            # The graph will contain the addresses of these clones. Later inputs are copied into them.
            recorded = self._recorded[key] = _Recorded([tensor.clone() for tensor in inputs])
            return self.capture.warm_up(lambda: function(*recorded.inputs))
        for fixed, given in zip(recorded.inputs, inputs, strict=True):
            fixed.copy_(given)
        if recorded.replay is None:
            try:
                recorded.replay, recorded.result = self.capture.record(lambda: function(*recorded.inputs))
            except RuntimeError as error:
                _failures.append(str(error))
                logger.warning(
                    "decoding without CUDA graphs, which is slower: a step could not be recorded: %s", error
                )
                # Run directly from here on, but leave ``few_sizes`` as it is: all ranks must keep the same
                # rows in a batch, and other ranks may still capture.
                self.capture = None
                return function(*recorded.inputs)
        recorded.replay()
        assert recorded.result is not None, "recorded with its function"
        return recorded.result


# Errors of captures in this process. After the first error, it does not capture again.
_failures: list[str] = []
_logged: set[str] = set()


def graphs_on(device: torch.device, refusal: str | None = None) -> Graphs:
    """Return a ``Graphs`` for a device. It runs every call directly on a CPU, if ``refusal`` gives a reason
    (logged once), or after a capture has failed in this process.

    Use it for one generation call only. Graphs contain the addresses of parameters and KV cache, but between
    two calls the parameters are offloaded and return to other addresses, and training needs the memory of the
    cache.
    """
    if device.type != "cuda":
        return Graphs()
    if refusal is not None and refusal not in _logged:
        _logged.add(refusal)
        logger.info("decoding without CUDA graphs, which is slower: %s", refusal)
    if refusal is not None:
        return Graphs()
    return Graphs(None if _failures else CudaCapture(device), few_sizes=True)
