"""Losses of values, for models that score (``LossInputType.VALUE``): a reward model's and a value model's.

The sources of the equations are in ``megarl/algorithms/README.md``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from megarl.algorithms.interfaces import LossInputType, LossType
from megarl.algorithms.utils import masked_mean
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import BatchError, ConfigError, Violation
from megarl.observe.metrics import Reduction


class PreferenceLoss:
    """Bradley-Terry loss: ``mean(-log sigmoid(r_chosen - r_rejected))``, where r is the model's score at the
    last token of an answer.

    Rows alternate chosen and rejected. The mean is over the pairs of the global batch: the normaliser is
    ``global_valid_seqs / 2``. A pair counts when both of its rows do. ``accuracy`` is the share of pairs
    whose chosen answer has the higher score (equal scores are not correct), ``margin`` the mean of ``r_chosen
    - r_rejected``.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.VALUE
    rows_together = 2
    metric_reductions: Mapping[str, Reduction] = MappingProxyType(
        dict.fromkeys(
            (
                "loss",
                "accuracy",
                "margin",
                "rewards_chosen_mean",
                "rewards_rejected_mean",
                "num_valid_samples",
            ),
            Reduction.SUM,
        )
    )

    def __call__(
        self, data: BatchedDataDict, global_valid_seqs: Tensor, global_valid_toks: Tensor, values: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics, see ``LossFunction``.

        Raises:
            BatchError: a key is missing, a shape does not fit, or the number of rows is odd.
        """
        _check("PreferenceLoss", data, values, {"sample_mask": 1, "input_lengths": 1})
        if values.shape[0] % 2:
            raise BatchError(
                f"PreferenceLoss: {values.shape[0]} rows, need an even number (chosen, rejected, ...). Fix: "
                "keep pairs together"
            )
        sample_mask = data["sample_mask"].to(values.dtype)
        pair_mask = sample_mask[::2] * sample_mask[1::2]

        def pair_mean(of_pairs: Tensor) -> Tensor:
            return masked_mean(of_pairs, pair_mask, global_normalization_factor=global_valid_seqs / 2)

        rewards = last_values(values, data["input_lengths"])
        # Mask before the loss: the gradient of a NaN that does not count would be 0 times NaN.
        rewards = torch.where(pair_mask.repeat_interleave(2) != 0, rewards, 0.0)
        chosen, rejected = rewards[::2], rewards[1::2]
        loss = pair_mean(-logsigmoid(chosen - rejected))
        metrics = {
            "loss": loss.detach(),
            "accuracy": pair_mean((chosen > rejected).to(loss.dtype)),
            "margin": pair_mean((chosen - rejected).detach()),
            "rewards_chosen_mean": pair_mean(chosen.detach()),
            "rewards_rejected_mean": pair_mean(rejected.detach()),
            "num_valid_samples": pair_mask.sum(),
        }
        return loss, metrics


class ValueLoss:
    """Half the mean squared error of a value model over the valid tokens of the global batch, with PPO's clip
    of values.

    For a token with return R, value v of the state before it, and v_0 that value when the batch was sampled::

        loss = 1/2 mean(max((v - R)^2, (v_0 + clip(v - v_0, -value_clip, value_clip) - R)^2))

    The value of the state before token t is the model's output at token t - 1. ``clipped_share`` is the share
    of tokens whose clipped error is the larger one, so that they have no gradient, or one towards the bound.

    Args:
        value_clip: largest change of a value that is rewarded; None for no clip.

    Raises:
        ConfigError: ``value_clip`` is not above 0.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.VALUE
    skips_masked = True
    metric_reductions: Mapping[str, Reduction] = MappingProxyType(
        dict.fromkeys(
            ("loss", "clipped_share", "values_mean", "returns_mean", "num_valid_samples"), Reduction.SUM
        )
    )

    def __init__(self, value_clip: float | None = None) -> None:
        if value_clip is not None and not value_clip > 0:
            raise ConfigError(
                [
                    Violation(
                        "value_clip",
                        value_clip,
                        "must be above 0",
                        "write a number above 0, or null for no clip",
                    )
                ]
            )
        self.value_clip = value_clip

    def __call__(
        self, data: BatchedDataDict, global_valid_seqs: Tensor, global_valid_toks: Tensor, values: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics, see ``LossFunction``. The data has ``returns`` and ``prev_values`` [B, S]:
        column t is of token t, and of the state before it.

        Raises:
            BatchError: a key is missing or a shape does not fit.
        """
        _check("ValueLoss", data, values, {"sample_mask": 1, "token_mask": 2, "returns": 2, "prev_values": 2})
        sample_mask = data["sample_mask"].to(values.dtype)
        mask = data["token_mask"][:, 1:].to(values.dtype) * sample_mask[:, None]

        # Use where instead of a product, because 0 times infinity is NaN.
        def visible(column: Tensor) -> Tensor:
            return torch.where(mask != 0, column, 0.0)

        def mean(of_tokens: Tensor) -> Tensor:
            return masked_mean(of_tokens, mask, global_normalization_factor=global_valid_toks)

        current, returns, previous = (
            visible(values[:, :-1]),
            visible(data["returns"][:, 1:]),
            visible(data["prev_values"][:, 1:]),
        )
        error = clipped = (current - returns).square()
        # This is the clip of OpenAI's PPO2.
        if self.value_clip is not None:
            moved = current - previous
            near = previous + moved.clamp(-self.value_clip, self.value_clip)
            # Within the clip both errors are the same number, which rounding would make two.
            clipped = torch.where(moved.abs() > self.value_clip, (near - returns).square(), error)
        loss = 0.5 * mean(torch.maximum(error, clipped))
        metrics = {
            "loss": loss.detach(),
            "clipped_share": mean((clipped > error).to(loss.dtype)),
            "values_mean": mean(current.detach()),
            "returns_mean": mean(returns),
            "num_valid_samples": sample_mask.sum(),
        }
        return loss, metrics


def last_values(values: Tensor, lengths: Tensor) -> Tensor:
    """Return [B]: from each row of ``values`` [B, S] the entry at its last token; ``lengths`` [B] int counts
    its tokens, at least 1. Differentiable."""
    return values.gather(1, lengths.long()[:, None] - 1).squeeze(1)


def _check(loss: str, data: BatchedDataDict, values: Tensor, keys: Mapping[str, int]) -> None:
    """Refuse a micro-batch that lacks one of the keys, each with its number of dimensions, or in which one
    has another shape."""
    for key, dimensions in keys.items():
        shape: Sequence[int] = values.shape[:dimensions]
        if key not in data:
            raise BatchError(
                f"{loss} needs the key {key!r}; the batch has {sorted(data)}. Fix: add {key!r} "
                f"{list(shape)} to the batch"
            )
        found = tuple(data[key].shape)
        if found != tuple(shape):
            raise BatchError(
                f"{loss}: {key!r} has shape {list(found)}, expected {list(shape)} for values "
                f"{list(values.shape)}. "
                f"Fix: pad {key!r} like input_ids"
            )
