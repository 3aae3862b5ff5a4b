"""CUDA graphs of functions whose shapes are fixed: one launch replaces hundreds, which take the host longer
than the device computes.

A decoding step of a model of 1.5 billion parameters has 620 kernels that run for 5 ms; launched one by one
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
"""A function of tensors. All other memory that it reads and writes must stay at its address: parameters, a
cache, a position stored in a tensor. Python numbers keep their values of the recorded call, so that they must
follow from the key."""


class Capture(Protocol):
    """A recorder of the device work of a function."""

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function once, so that libraries can allocate what they need: handles, workspaces, compiled
        kernels, communicators."""

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record a function, which may or may not run meanwhile. Return a function that runs the recording,
        and the tensor that then holds its result."""


class CudaCapture:
    """A recorder of CUDA graphs, all in one memory pool: the graphs run one at a time, and a result is read
    before the next graph runs.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function once, as in ``Capture``, on the stream on which graphs are recorded, as torch
        requires."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record a function as a CUDA graph; see ``Capture``."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local" ignores what other threads do meanwhile, such as NCCL's watchdog, which queries
        # events.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@dataclass
class _Recorded:
    """A function at one key; ``replay`` and ``result`` are set once it is recorded."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None] | None = None
    result: torch.Tensor | None = None


@dataclass
class Graphs:
    """A runner of functions of fixed shapes. The first call of each key runs directly, which warms up; later
    calls run from a recording.

    Attributes:
        capture: the recorder; None runs every call directly.
        few_sizes: there should be few different shapes. It stays True after a recording has failed: the rows
            that leave a batch depend on it, and another rank of the model may still record, but all ranks
            must let the same rows leave.
    """

    capture: Capture | None = None
    few_sizes: bool = False
    _recorded: dict[Hashable, _Recorded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.few_sizes |= self.capture is not None

    def run(self, key: Hashable, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``function(*inputs)``.

        Args:
            key: key of everything that ``function`` depends on, except tensors' values; the shapes of
                ``inputs`` are added to it.
            function: see ``Function``.
            inputs: tensors that are copied to fixed memory.

        Returns:
            The result, which is valid until the next call with this key.
        """
        if self.capture is None:
            return function(*inputs)
        key = (key, *(tensor.shape for tensor in inputs))
        recorded = self._recorded.get(key)
        if recorded is None:
            # Record the graph with the addresses of clones, into which later inputs are copied.
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
                self.capture = None
                return function(*recorded.inputs)
        recorded.replay()
        assert recorded.result is not None, "recorded with its function"
        return recorded.result


# Errors of recordings in this process. After the first one, the process does not record again.
_failures: list[str] = []
_logged: set[str] = set()


def graphs_on(device: torch.device, refusal: str | None = None) -> Graphs:
    """Return the graphs of a device. They record nothing on a CPU, with a ``refusal`` (which is logged once),
    or after a recording has failed.

    Graphs hold addresses of parameters and of a cache. They are built for one call of generation and are
    discarded after it: between two calls parameters are offloaded and return to other addresses, and training
    needs the memory of the cache.
    """
    if device.type != "cuda":
        return Graphs()
    if refusal is not None and refusal not in _logged:
        _logged.add(refusal)
        logger.info("decoding without CUDA graphs, which is slower: %s", refusal)
    if refusal is not None:
        return Graphs()
    return Graphs(None if _failures else CudaCapture(device), few_sizes=True)
