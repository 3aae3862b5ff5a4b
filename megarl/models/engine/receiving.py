"""The receiving half of a refit: a worker that only generates, on its own ranks, receives the weights of the
trained policy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from converters.checkpoint.source import HuggingFaceSource
from megarl.weight_sync.broadcast import WeightListener
from megarl.weight_sync.manifest import Description, Manifest
from megarl.weight_sync.plan import checksum
from megarl.weight_sync.transfer_group import TransferGroup

if TYPE_CHECKING:
    from megarl.distributed.device import DeviceRuntime


class ArrivedWeights(HuggingFaceSource):
    """A Hugging Face checkpoint in memory.

    Args:
        directory: name of the checkpoint for messages.
        tensors: full weights by Hugging Face name.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.directory = directory
        self._tensors = tensors

    def names(self) -> list[str]:
        return sorted(self._tensors)

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype_name(self, name: str) -> str:
        return str(self._tensors[name].dtype)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> torch.Tensor:
        return self._tensors[name][slices or ()]


class TakesWeights(Protocol):
    """A backend that can receive weights: Megatron-Core, or DTensor for all policies of transformers."""

    def load_hf(self, source: HuggingFaceSource) -> None:
        """Load all parameters from full weights by Hugging Face name, as at the start. Collective."""
        ...

    def copied_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's parameters that are replicated over the tensor-parallel ranks. Local."""
        ...


class ReceivingWorker:
    """Worker methods that receive weights from a policy on other ranks; see ``RolloutEngine``."""

    backend: Any
    runtime: DeviceRuntime
    _listener: WeightListener | None = None

    def connect(self, weights: Description, address: Sequence[Any]) -> None:
        """Join the policy's process group. Collective over the policy's sending ranks and all engine ranks.

        Args:
            weights: result of the policy's ``prepare_refit_info``.
            address: ``[ip, port, world_size, first engine rank]`` of the group.

        Raises:
            RefitError: a rank is missing, or expects other weights or another group.
        """
        # Close an earlier connection: the policy left its group when it opened the rendezvous for this one.
        self._leave_policy()
        manifest = Manifest.from_description(weights)
        ip, port, world_size, first = address
        rank = first + torch.distributed.get_rank()
        group = TransferGroup(ip, port, world_size, rank, digest=manifest.digest, device=self.runtime.device)
        self._listener = WeightListener(group, manifest)

    def update_from_broadcast(self) -> int:
        """Receive all weights from the policy's process group, load them, and return their version.

        A full copy of the model stays in host memory until the last weight has arrived. One parameter may
        consist of several weights, and an interrupted refit must leave the old weights unchanged.

        Raises:
            RefitError: the policy is gone or aborted the refit, or another engine rank could not receive its
                weights.
        """
        assert self._listener is not None, "the driver connects engines before a refit"
        arrived: dict[str, torch.Tensor] = {}
        # Copy each tensor even on a CPU, because the next group of weights overwrites the receive buffer.
        version = self._listener.receive(
            lambda group: arrived.update((name, tensor.to("cpu", copy=True)) for name, tensor in group)
        )
        cast("TakesWeights", self.backend).load_hf(ArrivedWeights(Path("the policy's weights"), arrived))
        return version

    def weight_digests(self, first_rank_only: bool = False) -> dict[str, int]:
        """Return a checksum of each weight's bits, by Hugging Face name. Collective.

        With ``first_rank_only``, the other ranks return an empty dictionary. Without it, parameters whose
        copies differ between tensor-parallel ranks are added; see ``_differing_copies``.
        """
        found = {name: checksum(_words(tensor)) for name, tensor in self.backend.export_hf()}
        if first_rank_only:
            return {} if torch.distributed.get_rank() else found
        return {**found, **self._differing_copies()}

    def _differing_copies(self) -> dict[str, int]:
        """Return checksums of this rank's replicated parameters that differ from those of the first
        tensor-parallel rank. An export would not show such a difference."""
        groups = self.backend.groups
        own = {
            name: checksum(_words(tensor))
            for name, tensor in cast("TakesWeights", self.backend).copied_parameters()
        }
        everybody: list[dict[str, int]] = [{}] * groups.tensor_size
        torch.distributed.all_gather_object(everybody, own, group=groups.tensor)
        return {
            f"{name} of tensor-parallel rank {groups.tensor_rank}": own[name]
            for name in own
            if own[name] != everybody[0][name]
        }

    def is_alive(self) -> bool:
        """Return True: the process can still reply."""
        return True

    def _leave_policy(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, zero-padded to a multiple of 4."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 4))
