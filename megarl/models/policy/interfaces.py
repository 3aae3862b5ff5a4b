"""Interfaces of policies: the abstract classes that algorithms know, and the shape of what they return."""

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
    """``logprobs``: float32 [B, S]; position i holds log p(token_i | tokens < i), column 0 is 0, padding is
    0."""

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """``reference_logprobs``: float32 [B, S], laid out as in ``LogprobOutputSpec``."""

    reference_logprobs: torch.Tensor


class TopkLogitsOutputSpec(TypedDict):
    """``topk_logits``: float32 [B, S, k], the largest first; position i holds those of the distribution of
    token i+1, as logarithms of probabilities: logits less what makes their exponentials add up to 1 over the
    whole vocabulary. ``topk_indices``: int64 [B, S, k], their tokens, of equally likely ones the lower first.
    Both are 0 where no token follows. ``logprobs``: as in ``LogprobOutputSpec``.

    The log-softmax over the k is the same as of NeMo-RL's ``get_topk_logits``, which gives the logits as they
    are.
    """

    topk_logits: torch.Tensor
    topk_indices: torch.Tensor
    logprobs: torch.Tensor


class ValueOutputSpec(TypedDict):
    """``values``: float32 [B, S]; position i holds what a model that scores says at token i, from all tokens
    up to it; padding is 0."""

    values: torch.Tensor


class ScoreOutputSpec(TypedDict):
    """``scores``: float32 [B]; what a model that scores says at the last token of each sequence."""

    scores: torch.Tensor


class PolicyInterface(ABC):
    """A language model that can be trained and asked for log-probabilities.

    ``data`` holds ``input_ids`` int64 [B, S] (right-padded) and ``input_lengths`` int64 [B]; ``train`` also
    wants ``sample_mask`` float [B].
    """

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Log-probabilities of the tokens of ``data`` under the current weights, in the order of ``data``.

        With ``skip_masked`` tokens whose ``token_mask`` [B, S] or ``sample_mask`` [B], where there is one, is
        0 are not computed and are 0.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Compute ``get_logprobs`` under the weights that the policy started with."""

    @abstractmethod
    def train(
        self,
        data: BatchedDataDict[Any],
        loss_fn: LossFunction,
        eval_mode: bool = False,
        gbs: int | None = None,
        mbs: int | None = None,
    ) -> dict[str, Any]:
        """One optimizer step for each global batch in ``data``.

        Args:
            data: [B, ...]; B is a multiple of the global batch size.
            loss_fn: the loss; divides by the global normaliser it is given.
            eval_mode: compute the loss and change nothing.
            gbs: global batch size in samples; None takes the configuration's.
            mbs: micro-batch size in samples a rank; None takes the configuration's.

        Returns:
            ``loss``: float tensor [number of global batches]; ``grad_norm``: None in ``eval_mode``;
            ``all_mb_metrics``: {name: list of numbers}.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Bring weights, gradients and optimizer state to the device and enter training mode."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """End a phase of training."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write weights and, when asked, optimizer state and tokenizer."""

    @abstractmethod
    def shutdown(self) -> bool:
        """End the workers. True when all ended cleanly."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can share its devices with a generation engine and hand its weights over."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join a process group of ``world_size`` ranks at ``ip``:``port``.

        Returns futures; the other side must join before they are awaited.
        """

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Make room for the generation engine's weights: optimizer state and gradients leave the device."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Weights leave the device too."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return what the generation engine must know of each weight before the first transfer, by name."""

    def prepare_info_for_collective(self) -> dict[str, Any] | None:
        """Older name of ``prepare_refit_info``."""
        return self.prepare_refit_info()

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Names of the weights in groups, each small enough for one transfer."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Handles of the weights ``keys``, by device id."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef[Any]]:
        """Send all weights over the group made by ``init_collective``. Returns futures."""
