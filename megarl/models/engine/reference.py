"""The reference policy: a copy of the first weights in host memory, swapped in for as long as its log-probabilities are computed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megarl.distributed.device import DeviceRuntime
from megarl.models.engine.backend import Backend


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
