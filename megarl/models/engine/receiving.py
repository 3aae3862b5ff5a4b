"""The receiving half of a refit: a worker that only generates, on ranks of its own, takes the weights of the
policy that is trained."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from converters.checkpoint.source import HuggingFaceSource
from megarl.weight_sync.broadcast import WeightListener
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.plan import checksum
from megarl.weight_sync.transfer_group import TransferGroup

if TYPE_CHECKING:
    from megarl.distributed.device import DeviceRuntime


class ArrivedWeights(HuggingFaceSource):
    """A Hugging Face checkpoint in memory.

    Args:
        directory: what messages call it.
        tensors: whole weights by their names.
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
    """A backend that engines run on: Megatron, or DTensor for all policies of transformers."""

    def load_hf(self, source: HuggingFaceSource) -> None:
        """Fill all parameters from whole weights by their Hugging Face names, as at the start. A
        collective."""
        ...

    def copied_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's parameters that every tensor-parallel rank has a copy of. Local."""
        ...


class ReceivingWorker:
    """Methods by which a worker gets its weights from a policy elsewhere; see ``RolloutEngine``."""

    backend: Any
    runtime: DeviceRuntime
    _listener: WeightListener | None = None

    def connect(self, weights: Mapping[str, Any], address: Sequence[Any]) -> None:
        """Join the policy's group. A collective of the policy's sending ranks and all engine ranks.

        Args:
            weights: the policy's ``prepare_refit_info``.
            address: ``[ip, port, world_size, rank of the engines' first rank]`` of the group.

        Raises:
            RefitError: somebody is missing, or expects something else.
        """
        self._leave_policy()
        manifest = Manifest.from_description(weights)
        ip, port, world_size, first = address
        rank = first + torch.distributed.get_rank()
        group = TransferGroup(ip, port, world_size, rank, digest=manifest.digest, device=self.runtime.device)
        self._listener = WeightListener(group, manifest)

    def update_from_broadcast(self) -> int:
        """Take all weights from the policy's group; their version. They wait in host memory, a whole model of
        them, until the last one is there: a parameter of this layout may be made of several, and a refit that
        breaks off must leave the old ones.

        Raises:
            RefitError: the policy is gone, gave the refit up, or another engine rank could not take its
                weights.
        """
        assert self._listener is not None, "the driver connects engines before a refit"
        arrived: dict[str, torch.Tensor] = {}
        # on a CPU the group's buffer is host memory too, and is written again by the next group
        version = self._listener.receive(
            lambda group: arrived.update((name, tensor.to("cpu", copy=True)) for name, tensor in group)
        )
        cast("TakesWeights", self.backend).load_hf(ArrivedWeights(Path("the policy's weights"), arrived))
        return version

    def weight_digests(self, first_rank_only: bool = False) -> dict[str, int]:
        """A number of the bits of each weight by its Hugging Face name, of this rank's copy of the model;
        with ``first_rank_only`` empty on the others. Engines add what ``_differing_copies`` finds. A
        collective."""
        found = {name: checksum(_words(tensor)) for name, tensor in self.backend.export_hf()}
        if first_rank_only:
            return {} if torch.distributed.get_rank() else found
        return {**found, **self._differing_copies()}

    def _differing_copies(self) -> dict[str, int]:
        """Digests of this rank's copies that differ from the first tensor-parallel rank's, of which an export
        would not show them."""
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
        """Return whether this process answers: True, where it does."""
        return True

    def _leave_policy(self) -> None:
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.close()


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor, with zeros behind them up to a multiple of 4."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    return torch.nn.functional.pad(flat, (0, -len(flat) % 4))
