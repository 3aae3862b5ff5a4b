"""The engine's side of a colocated refit: finds the weights by their handle, checks them, and knows which version is whole."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megarl.errors import RefitError
from megarl.weight_sync.arena import ArenaReader
from megarl.weight_sync.checksum import checksum
from megarl.weight_sync.layout import Group
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.shared_memory import host_identity


class WeightReceiver:
    """Reads what a ``WeightSender`` publishes.

    Args:
        manifest: from the policy's refit info.
        device: where this rank of the engine computes.

    Attributes:
        version: of the weights that are whole; None before the first refit and from the first group of one to its last.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest = manifest
        self.version: int | None = None
        self._device = device
        self._arena: ArenaReader | None = None
        self._token: object = None
        self._round: tuple[object, int] | None = None
        self._next = 0
        self._views: dict[tuple[int, int, int], list[tuple[str, torch.Tensor]]] = {}

    @contextlib.contextmanager
    def group(self, payload: Mapping[str, Any]) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The weights of one group, to be loaded inside the context; they lie in the policy's buffer and must not be kept or written.

        Leaving the context without an error acknowledges the group. Leaving it with one gives the refit up: the version stays None.

        Raises:
            RefitError: the handle is an old one, of another model, out of order, or its bytes are not those that were sent.
        """
        self.version = None
        try:
            arena, group = self._expected(payload)
            where = payload["slot"], payload["round"], payload["first"]
            buffer = arena.read(*where)
            if payload["checksum"] is not None and checksum(buffer[: group.nbytes]) != payload["checksum"]:
                first = self.manifest.tensors[group.first].name
                raise RefitError(f"the weights from {first} on have another checksum than the policy's: start a new refit")
            yield self._views_of(payload["slot"], group, buffer)
            arena.check(*where)
        except BaseException:
            self._round = None
            raise
        arena.acknowledge(payload["round"], payload["first"])
        self._next = group.stop
        if self._next == len(self.manifest.tensors):
            self._round = None
            self.version = int(payload["version"])

    def _expected(self, payload: Mapping[str, Any]) -> tuple[ArenaReader, Group]:
        """The arena and the group, if it is the one that comes next."""
        if payload["manifest"] != self.manifest.digest:
            raise RefitError("the policy's weights have other names, shapes or dtypes than its refit info: call prepare_refit_info() anew")
        token = payload["arena"]["memory"]["token"]
        if payload["first"] == 0:
            self._round, self._next = (token, payload["round"]), 0
        # a policy that needs a larger arena goes on in a new one
        if self._round is None or self._round[1] != payload["round"] or payload["first"] != self._next:
            expected = "the first group of a refit" if self._round is None else f"weight {self._next} of refit {self._round[1]}"
            raise RefitError(f"weight {payload['first']} of refit {payload['round']} came where {expected} was next: start a new refit")
        if self._arena is None or token != self._token:
            if self._arena is not None:
                self._arena.close()
                self._arena = None
            self._views.clear()
            self._arena, self._token = ArenaReader(payload["arena"], self._device), token
        return self._arena, self.manifest.group(payload["first"], payload["count"])

    def _views_of(self, slot: int, group: Group, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """The group's weights, made once: tens of thousands of new tensors cost a refit more in the garbage collector than in torch."""
        key = (slot, group.first, group.stop)
        if key not in self._views:
            self._views[key] = self.manifest.named_views(group, buffer)
        return self._views[key]

    def close(self) -> None:
        """Let go of the policy's memory."""
        self.version = None
        self._round = None
        self._views.clear()
        if self._arena is not None:
            self._arena.close()
            self._arena = None


def payload_for(handles: Mapping[str, Mapping[str, Any]], device: str) -> Mapping[str, Any]:
    """The payload that a rank of the engine reads: that of its own device, or on a CPU that of its host.

    Args:
        handles: what the policy's ``get_weights_ipc_handles`` returned.
        device: identity of the engine rank's device.

    Raises:
        RefitError: there is none.
    """
    if device in handles:
        return handles[device]
    here = host_identity()
    for payload in handles.values():
        if payload["arena"]["device"] is None and payload["arena"]["memory"]["host"] == here:
            return payload
    devices = ", ".join(sorted(handles)) or "none"
    raise RefitError(f"no rank of the policy shares {device} (they are on {devices}): place both on the same devices")
