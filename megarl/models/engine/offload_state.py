"""Offload state of a worker: whether parameters, gradients and optimizer state are on the device or in host memory.

A colocated inference engine needs the device between training steps. Each state says what is on the device; every public method of a
worker says which states it may be called in, so that a forgotten ``prepare_for_training`` is an error with a remedy and not a crash
inside a kernel. The reference policy is a copy of the first weights in host memory, swapped in for as long as its log-probabilities are
computed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from enum import Enum

import torch

from megarl.distributed.device import DeviceRuntime
from megarl.errors import StateError
from megarl.models.engine.backend import Backend, Part, Place


class OffloadState(Enum):
    """Offload state: what is on the device."""

    TRAINING = "parameters, gradients and optimizer state on the device"
    INFERENCE = "parameters on the device, gradients and optimizer state in host memory"
    OFFLOADED = "everything in host memory"


_ON_DEVICE: dict[OffloadState, frozenset[Part]] = {
    OffloadState.TRAINING: frozenset({"parameters", "gradients", "optimizer"}),
    OffloadState.INFERENCE: frozenset({"parameters"}),
    OffloadState.OFFLOADED: frozenset(),
}
_PARTS: tuple[Part, ...] = ("parameters", "gradients", "optimizer")
_LEGAL: dict[OffloadState, frozenset[OffloadState]] = {
    OffloadState.TRAINING: frozenset({OffloadState.TRAINING, OffloadState.INFERENCE, OffloadState.OFFLOADED}),
    OffloadState.INFERENCE: frozenset({OffloadState.TRAINING, OffloadState.INFERENCE, OffloadState.OFFLOADED}),
    OffloadState.OFFLOADED: frozenset({OffloadState.TRAINING, OffloadState.INFERENCE, OffloadState.OFFLOADED}),
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

    def enter(self, target: OffloadState, because: str) -> None:
        """Move to ``target``.

        Raises:
            StateError: the transition is not legal; ``because`` names the method that asked for it.
        """
        if target is OffloadState.TRAINING and not self._has_optimizer:
            raise StateError(f"{because}: this worker was built with init_optimizer=False and cannot train; build it with an optimizer")
        if target not in _LEGAL[self.offload_state]:
            legal = ", ".join(sorted(state.name for state in _LEGAL[self.offload_state]))
            raise StateError(f"{because}: cannot go from {self.offload_state.name} to {target.name}; from here: {legal}")
        before, after = _ON_DEVICE[self.offload_state], _ON_DEVICE[target]
        for part in _PARTS:
            if part in before - after:
                self._move(part, "host")
        for part in _PARTS:
            if part in after - before:
                self._move(part, "device")
        self.offload_state = target

    def require(self, part: Part, method: str, remedy: str) -> None:
        """Refuse a call that needs ``part`` on the device when it is not there.

        Raises:
            StateError: with ``remedy``, the method that would bring it there.
        """
        if part == "optimizer" and not self._has_optimizer:
            raise StateError(f"{method}(): this worker was built with init_optimizer=False and cannot train; build it with an optimizer")
        if part not in _ON_DEVICE[self.offload_state]:
            raise StateError(
                f"{method}() needs {part} on the device, but the worker is {self.offload_state.name} "
                f"({self.offload_state.value}); call {remedy}() first"
            )


class ReferenceWeights:
    """This rank's shards of the reference policy.

    Args:
        backend: the model as it is now; its present weights become the reference.
        runtime: decides whether the copy is page-locked.
    """

    def __init__(self, backend: Backend, runtime: DeviceRuntime) -> None:
        self._runtime = runtime
        backend.sync_parameters()
        self._weights = self._copy(backend)

    def _copy(self, backend: Backend) -> dict[str, torch.Tensor]:
        return {name: self._runtime.pin(parameter.detach().to("cpu", copy=True)) for name, parameter in backend.parameters()}

    @contextlib.contextmanager
    def swapped_in(self, backend: Backend) -> Iterator[None]:
        """Inside, the model has the reference weights; afterwards the present ones again, to the bit, whatever happened inside."""
        backend.sync_parameters()
        present = self._copy(backend)
        try:
            _write(backend, self._weights)
            yield
        finally:
            _write(backend, present)


@torch.no_grad()
def _write(backend: Backend, weights: dict[str, torch.Tensor]) -> None:
    for name, parameter in backend.parameters():
        parameter.copy_(weights[name])
