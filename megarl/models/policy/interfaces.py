"""Interfaces of policies: the abstract classes that algorithms use, and the types of their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

from typing_extensions import TypedDict

if TYPE_CHECKING:
    import ray
    import torch

    from megarl.algorithms.interfaces import LossFunction
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.interfaces import GenerationDatumSpec


class LogprobOutputSpec(TypedDict):
    """Log-probabilities. ``logprobs``: float32 [B, S]; position i holds log p(token_i | tokens < i), and is 0
    in column 0 and in padding."""

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """Log-probabilities under the reference policy. ``reference_logprobs``: float32 [B, S], as in
    ``LogprobOutputSpec``."""

    reference_logprobs: torch.Tensor


class TopkLogitsOutputSpec(TypedDict):
    """The k largest logits of each position. ``topk_logits``: float32 [B, S, k], the largest first. Position
    i holds those of the distribution of token i+1, as log-probabilities: logits normalised over the whole
    vocabulary. ``topk_indices``: int64 [B, S, k], their tokens; among equally likely ones the lower first.
    Both are 0 if no token follows. ``logprobs``: as in ``LogprobOutputSpec``.

    The log-softmax over the k is the same as with NeMo-RL's ``get_topk_logits``, which returns unnormalised
    logits.
    """

    topk_logits: torch.Tensor
    topk_indices: torch.Tensor
    logprobs: torch.Tensor


class ValueOutputSpec(TypedDict):
    """Values from a scoring model. ``values``: float32 [B, S]; position i holds the output at token i,
    computed from all tokens up to it; padding is 0."""

    values: torch.Tensor


class ScoreOutputSpec(TypedDict):
    """Scores from a scoring model. ``scores``: float32 [B], the output at the last token of each sequence."""

    scores: torch.Tensor


class PolicyInterface(ABC):
    """A language model that can be trained and that computes log-probabilities.

    ``data`` holds ``input_ids`` int64 [B, S] (right-padded) and ``input_lengths`` int64 [B]; ``train`` also
    needs ``sample_mask`` float [B].
    """

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Compute log-probabilities of the tokens of ``data`` under the current weights, in the order of
        ``data``.

        With ``skip_masked``, tokens whose ``token_mask`` [B, S] or ``sample_mask`` [B] (if present) is 0 are
        not computed, and their result is 0.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Compute ``get_logprobs`` under the policy's initial weights."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """Take one optimizer step for each global batch in ``data``.

        Args:
            data: [B, ...]; B is a multiple of the global batch size.
            loss_fn: the loss; divides by the global normaliser that is passed to it.
            eval_mode: compute the loss without changing anything.
            gbs: global batch size in samples; None for the configuration's.
            mbs: micro-batch size in samples per rank; None for the configuration's.

        Returns:
            ``loss``: float tensor [number of global batches]; ``grad_norm``: None in ``eval_mode``;
            ``all_mb_metrics``: {name: list of numbers}.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Move weights, gradients and optimizer state to the device, and enter training mode."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """Mark the end of a training phase, after which an implementation may release what only training
        needs."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write weights and, if requested, optimizer state and tokenizer."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Shut down the workers. Return True if all ended cleanly."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can share its devices with a generation engine and send it its weights."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join a process group of ``world_size`` ranks at ``ip``:``port``.

        Returns futures. The other side must join before they are awaited.
        """

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Offload optimizer state and gradients, to make room for the generation engine's weights."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Offload the weights too."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return, by name, the information about each weight that the generation engine needs before the
        first transfer."""

    def prepare_info_for_collective(self) -> dict[str, Any] | None:
        """Call ``prepare_refit_info``; this is its older name."""
        return self.prepare_refit_info()

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Return the names of the weights in groups, each small enough for one transfer."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Return handles of the weights ``keys``, by device id."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef[Any]]:
        """Send all weights over the group of ``init_collective``. Return futures."""
