"""Abstract classes through which algorithms use a policy, and the types of its results."""

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
    """Log-probabilities of the tokens of a batch.

    ``logprobs`` is float32 [B, S]. Position i contains log p(token_i | tokens < i); column 0 and padding are
    0.
    """

    logprobs: torch.Tensor


class ReferenceLogprobOutputSpec(TypedDict):
    """Log-probabilities under the reference policy: ``reference_logprobs``, float32 [B, S], laid out like
    ``LogprobOutputSpec.logprobs``."""

    reference_logprobs: torch.Tensor


class TopkLogitsOutputSpec(TypedDict):
    """The k most likely next tokens at each position.

    ``topk_logits`` is float32 [B, S, k], in descending order. Position i describes the distribution of token
    i+1. The values are log-probabilities, normalized over the whole vocabulary. NeMo-RL's ``get_topk_logits``
    returns unnormalized logits instead; a log-softmax over the k values gives the same result for both.
    ``topk_indices`` is int64 [B, S, k], the token ids; of equally likely tokens, the lower id comes first.
    Both are 0 at positions without a next token. ``logprobs`` is that of ``LogprobOutputSpec``.
    """

    topk_logits: torch.Tensor
    topk_indices: torch.Tensor
    logprobs: torch.Tensor


class ValueOutputSpec(TypedDict):
    """Per-token outputs of a reward or value model.

    ``values`` is float32 [B, S]. Position i contains the scalar output at token i, which depends on tokens up
    to and including i; padding is 0.
    """

    values: torch.Tensor


class ScoreOutputSpec(TypedDict):
    """One score per sequence from a reward or value model: ``scores``, float32 [B], is the output at the last
    token."""

    scores: torch.Tensor


class PolicyInterface(ABC):
    """A language model that can be trained and that computes log-probabilities.

    Every batch ``data`` contains ``input_ids`` int64 [B, S] (right-padded) and ``input_lengths`` int64 [B];
    ``train`` also needs ``sample_mask`` float [B].
    """

    @abstractmethod
    def get_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[LogprobOutputSpec]:
        """Compute log-probabilities of the tokens of ``data`` under the current weights. Rows keep their
        order.

        With ``skip_masked``, a token whose ``token_mask`` [B, S] or ``sample_mask`` [B] (if present) is 0 is
        skipped, and its result is 0.
        """

    @abstractmethod
    def get_reference_policy_logprobs(
        self, data: BatchedDataDict[GenerationDatumSpec], *, skip_masked: bool = False
    ) -> BatchedDataDict[ReferenceLogprobOutputSpec]:
        """Compute log-probabilities under the reference policy (the initial weights); see
        ``get_logprobs``."""

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
            data: columns [B, ...]; B is a multiple of the global batch size.
            loss_fn: the loss. It divides by the global normalizer that it receives as an argument.
            eval_mode: compute the loss without gradients or an optimizer step.
            gbs: global batch size in samples; None for the configured size.
            mbs: micro-batch size in samples per rank; None for the configured size.

        Returns:
            ``loss``: float tensor [number of global batches]; ``grad_norm``: None in ``eval_mode``;
            ``all_mb_metrics``: {metric name: list of numbers}.
        """

    @abstractmethod
    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """Move weights, gradients and optimizer state to the device, and enter training mode."""

    @abstractmethod
    def finish_training(self, *args: Any, **kwargs: Any) -> None:
        """End a training phase. An implementation may release the memory that only training needs."""

    @abstractmethod
    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write the weights and, if requested, the optimizer state and the tokenizer."""

    @abstractmethod
    def shutdown(self) -> bool:
        """Shut down the workers. Return True if all of them exited cleanly."""


class ColocatablePolicyInterface(PolicyInterface):
    """A policy that can share its devices with a generation engine and can send its weights to one."""

    @abstractmethod
    def init_collective(self, ip: str, port: int, world_size: int) -> list[ray.ObjectRef[Any]]:
        """Join the process group of ``world_size`` ranks at ``ip``:``port`` over which weights are broadcast.

        Returns futures. Start the engines' ``init_collective`` before awaiting these, because the call
        completes only when all ranks have joined.
        """

    @abstractmethod
    def offload_before_refit(self) -> None:
        """Offload optimizer state and gradients, to free device memory for the generation engine's
        weights."""

    @abstractmethod
    def offload_after_refit(self) -> None:
        """Offload the weights too, which are no longer needed on the device once the engine has its copy."""

    @abstractmethod
    def prepare_refit_info(self) -> dict[str, Any] | None:
        """Return, for each weight name, the metadata that the generation engine needs before the first
        refit."""

    def prepare_info_for_collective(self) -> dict[str, Any] | None:
        """Call ``prepare_refit_info``, for callers that use this older name."""
        return self.prepare_refit_info()

    @abstractmethod
    def prepare_weights_for_ipc(self, *args: Any, **kwargs: Any) -> list[list[str]]:
        """Begin a refit. Return the names of the weights in groups, each small enough for one transfer."""

    @abstractmethod
    def get_weights_ipc_handles(self, keys: list[str]) -> dict[str, Any]:
        """Return the IPC handles of the weights named ``keys``, by device id."""

    @abstractmethod
    def broadcast_weights_for_collective(self) -> list[ray.ObjectRef[Any]]:
        """Broadcast all weights over the process group of ``init_collective``. Return futures."""
