"""CUDA graphs of functions whose shapes are fixed: one launch in the place of hundreds, which take a host
longer than the device computes.

A decoding step of a model of 1.5 billion parameters has 620 kernels that run for 5 ms; launched one by one
they take 72.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch

logger = logging.getLogger(__name__)

Function: TypeAlias = Callable[..., torch.Tensor]
"""Of tensors. All else that it reads and writes has to stay where it is: parameters, a cache, a position that
is a tensor. Python's numbers are those of the call that is recorded, so that they have to follow from the
key."""


class Capture(Protocol):
    """Records the device work of a function."""

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Run a function once, whose libraries get what they need there: handles, workspaces, compiled
        kernels, communicators."""

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """Record a function, which may be run or not; return what runs it, and the tensor that its result
        then is in."""


class CudaCapture:
    """Records CUDA graphs, all of them in one pool of memory: they are run one at a time, and a result is
    read before the next one.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], torch.Tensor]) -> torch.Tensor:
        """See ``Capture``; on the stream that graphs are recorded on, as torch wants it."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            result = function()
        current.wait_stream(self._stream)
        return result

    def record(self, function: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
        """See ``Capture``."""
        graph = torch.cuda.CUDAGraph()
        # what other threads do, as NCCL's watchdog, who asks for events, is no part of it
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return graph.replay, result


@dataclass
class _Recorded:
    """A function at one key; ``replay`` and ``result`` once it is recorded."""

    inputs: list[torch.Tensor]
    replay: Callable[[], None] | None = None
    result: torch.Tensor | None = None


@dataclass
class Graphs:
    """Runs functions of fixed shapes: each key's first call as it is, which warms up, later ones from a
    recording.

    Attributes:
        capture: records; None runs every call as it is.
        few_sizes: shapes had better be few. It stays so after a recording has failed: what leaves a batch
            depends on it, and the ranks of a model, of which another may go on recording, have to let the
            same rows leave.
    """

    capture: Capture | None = None
    few_sizes: bool = False
    _recorded: dict[Hashable, _Recorded] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.few_sizes |= self.capture is not None

    def run(self, key: Hashable, function: Function, *inputs: torch.Tensor) -> torch.Tensor:
        """Return ``function(*inputs)``.

        Args:
            key: of all that ``function`` depends on but for tensors' values; shapes of ``inputs`` are added
                to it.
            function: see ``Function``.
            inputs: are copied to tensors that stay.

        Returns:
            The result, which holds until the next call with this key.
        """
        if self.capture is None:
            return function(*inputs)
        key = (key, *(tensor.shape for tensor in inputs))
        recorded = self._recorded.get(key)
        if recorded is None:
            # Clones, whose addresses the graph has; later inputs are copied into them.
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


# Errors of recordings in this process, which does not try again.
_failures: list[str] = []
_logged: set[str] = set()


def graphs_on(device: torch.device, refusal: str | None = None) -> Graphs:
    """Graphs of a device; without recording on a CPU, where there is a ``refusal``, which is logged once, and
    after a recording has failed.

    Graphs have addresses of parameters and of a cache. They are made for one call of generation and go with
    it: between two calls parameters leave the device and come back elsewhere, and training needs the memory
    of the cache.
    """
    if device.type != "cuda":
        return Graphs()
    if refusal is not None and refusal not in _logged:
        _logged.add(refusal)
        logger.info("decoding without CUDA graphs, which is slower: %s", refusal)
    if refusal is not None:
        return Graphs()
    return Graphs(None if _failures else CudaCapture(device), few_sizes=True)
