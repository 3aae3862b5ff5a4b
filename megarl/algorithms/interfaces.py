"""The protocol of losses, between an algorithm and the training engine that runs its micro-batches."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from enum import Enum
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from megarl.errors import ConfigError
from megarl.observe.metrics import Reduction

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.distributed.batched_data_dict import BatchedDataDict


class LossType(Enum):
    """Normaliser of a loss: the number of valid target tokens, or of valid sequences, in the global batch."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """Model output that the training engine passes to a loss: log-probabilities, or values of a scalar
    head."""

    LOGPROB = "logprob"
    VALUE = "value"


@runtime_checkable
class LossFunction(Protocol):
    """A loss over next-token log-probabilities.

    A loss divides by the global normaliser that it receives. So loss and gradient of a global batch are plain
    sums over micro-batches and data-parallel ranks.

    Attributes:
        loss_type: the normaliser in use. ``TOKEN_LEVEL`` needs ``token_mask`` in the data.
        input_type: ``LossInputType.LOGPROB``, or ``VALUE`` for a loss of a reward or value model. The latter
            is called with ``values`` instead of ``next_token_logprobs``: [B, S] float, column i is the
            model's value at token i, computed from all tokens up to it; 0 beyond ``input_lengths``.
        metric_reductions: how each metric is reduced over micro-batches and ranks.
        skips_masked: optional. True promises that no value under a zero ``token_mask`` or ``sample_mask``
            reaches the loss, a gradient or a metric. Log-probabilities are then not computed there, and are
            0.
        needs_entropies: optional. True requests the keyword argument ``next_token_entropies``, [B, S-1]
            float, differentiable: column i is the entropy, in nats, of the distribution from which token i+1
            is sampled, after temperature, top-k and top-p.
        scored_tokens: optional. The name of a column [B, S, K] of token ids. It requests the keyword argument
            ``scored_logprobs``, [B, S-1, K] float, differentiable: column i has the log-probabilities of
            these tokens under the distribution of token i+1. Sampling must then use no top-k or top-p.
            Parameters for both arguments need a default, because the check before the start calls without
            them.
    """

    loss_type: LossType
    input_type: LossInputType

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]: ...

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics of one micro-batch.

        Args:
            data: the micro-batch, tensors [B, S] and [B]. A token's value is in the token's own column, so
                column i of ``next_token_logprobs`` belongs to column i+1 here, as in
                ``advantages[:, 1:]``. For GRPO it has ``advantages`` and ``generation_logprobs``;
                ``prev_logprobs`` unless ``loss_fn.force_on_policy_ratio`` is true; and
                ``reference_policy_logprobs`` if ``loss_fn.reference_policy_kl_penalty`` is above 0. If rows
                are segments of responses, ``response_tokens`` [B] int64 is the number of valid tokens in all
                rows of the row's response.
            global_valid_seqs: 0-d, sum of ``sample_mask`` over the global batch; the segments of a response
                add up to 1.
            global_valid_toks: 0-d, sum of ``token_mask[:, 1:] * sample_mask[:, None]`` over the global batch.
            next_token_logprobs: [B, S-1] float, column i is log p(token_{i+1} | tokens up to i).

        Returns:
            The 0-d loss, and detached 0-d metric tensors. They must stay on the device, because a transfer to
            the host would synchronise in each micro-batch.
        """
        ...


def reads_values(loss_fn: object) -> bool:
    """Return whether a loss takes values (``LossInputType.VALUE``)."""
    # By value, so that a loss with the enum of another package, such as NeMo-RL's, works too.
    return getattr(getattr(loss_fn, "input_type", None), "value", None) == LossInputType.VALUE.value


def _name_of(loss_fn: object) -> str:
    return getattr(loss_fn, "__name__", "loss_fn") if inspect.isroutine(loss_fn) else type(loss_fn).__name__


def checked_result(loss_fn: object, found: Any) -> tuple[Tensor, Mapping[str, Any]]:
    """Return the loss and the metrics that a loss has returned. Megatron's schedule would report a loss of
    another shape as a fault of its own.

    Raises:
        ConfigError: it is not a tensor of one element and a mapping.
    """
    loss, metrics = found if isinstance(found, tuple | list) and len(found) == 2 else (found, None)
    if isinstance(metrics, Mapping) and hasattr(loss, "numel") and loss.numel() == 1:
        return loss, metrics
    what = f"a loss {[*loss.shape]}" if hasattr(loss, "shape") else f"{found!r:.60}"
    raise ConfigError(
        f"loss_fn = {_name_of(loss_fn)}: it returned {what}{' without metrics' * (metrics is None)}. Fix: "
        "return a 0-d tensor and a dictionary, as (losses * mask).sum() / global_valid_toks, {}"
    )


def check_loss(loss_fn: object, *, scores: bool = False) -> None:
    """Check, before workers are started, that an object can be called as a ``LossFunction``. A loss written
    for logits, for example, is rejected.

    Args:
        loss_fn: the loss.
        scores: the model has a scalar head and returns values instead of log-probabilities.

    Raises:
        ConfigError: it cannot; the message shows its parameters and the expected ones.
    """
    name = _name_of(loss_fn)
    if scores != reads_values(loss_fn):
        kinds = {True: "values, for a scoring model", False: "log-probabilities, for a language model"}
        fix = (
            "give a loss of values"
            if scores
            else "set policy.reward_model_cfg.enabled, or give a loss of log-probabilities"
        )
        raise ConfigError(
            f"loss_fn = {name}: it is a loss of {kinds[not scores]}, and this model gives {kinds[scores]}. "
            f"Fix: {fix}"
        )
    read = "values" if scores else "next_token_logprobs"
    wanted = f"(data, global_valid_seqs, global_valid_toks, {read})"
    if not callable(loss_fn):
        raise ConfigError(f"loss_fn = {loss_fn!r} cannot be called. Fix: give a loss {wanted}")
    try:
        signature = inspect.signature(loss_fn)
    except ValueError:  # a function that is not written in Python
        return
    try:
        # By keyword, so that a loss written for logits, whose parameter has another name, is rejected.
        signature.bind(None, None, None, **{read: None})
        known = {kind.value for kind in LossInputType}
        takes_logits = (
            getattr(getattr(loss_fn, "input_type", LossInputType.LOGPROB), "value", None) not in known
        )
    except TypeError:
        takes_logits = True
    if takes_logits:
        raise ConfigError(
            f"loss_fn = {name}{signature}: a loss is called as {wanted} and gets log-probabilities [B, S-1] "
            "float, not logits. "
            "Fix: take next_token_logprobs in place of logits; column i is log p(token i+1), with the "
            "temperature applied"
        )
