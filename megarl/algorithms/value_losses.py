"""Losses of models with a scalar head (``LossInputType.VALUE``): reward models and value models.

``megarl/algorithms/README.md`` lists the sources of the equations.
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
    """Bradley-Terry loss of a reward model: ``mean(-log sigmoid(r_chosen - r_rejected))``, where r is the
    score at the last token of an answer.

    Rows alternate between chosen and rejected, and a pair counts if both of its rows do. The mean is over the
    pairs of the global batch: the normaliser is ``global_valid_seqs / 2``. ``accuracy`` is the share of pairs
    in which the chosen answer has the higher score (equal scores count as wrong); ``margin`` is the mean of
    ``r_chosen - r_rejected``.
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
            BatchError: a column is missing, a shape does not match, or the number of rows is odd.
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
        # Mask first: the gradient of a NaN under a zero mask would be 0 times NaN.
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
    """Half the mean squared error of a value model over the valid tokens of the global batch, with PPO's
    value clipping.

    For a token with return R, value v of the state before it, and v_0 the value at sampling time::

        loss = 1/2 mean(max((v - R)^2, (v_0 + clip(v - v_0, -value_clip, value_clip) - R)^2))

    The value of the state before token t is the model's output at token t - 1. ``clipped_share`` is the share
    of tokens whose clipped error is the larger one. Their gradient is 0, so the value is not moved further
    from v_0.

    Args:
        value_clip: maximum change of a value since sampling; None for no clipping.

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
        """Return loss and metrics, see ``LossFunction``. The data has ``returns`` and ``prev_values``, [B,
        S]; column t is the return of token t, and the value of the state before it.

        Raises:
            BatchError: a column is missing, or a shape does not match.
        """
        _check("ValueLoss", data, values, {"sample_mask": 1, "token_mask": 2, "returns": 2, "prev_values": 2})
        sample_mask = data["sample_mask"].to(values.dtype)
        mask = data["token_mask"][:, 1:].to(values.dtype) * sample_mask[:, None]

        # where, not a product: 0 times infinity is NaN.
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
        # Value clipping as in OpenAI's PPO2.
        if self.value_clip is not None:
            moved = current - previous
            near = previous + moved.clamp(-self.value_clip, self.value_clip)
            # Within the clip both errors are equal in theory, but not after rounding.
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
    """Return the value at the last token of each row, [B], from ``values`` [B, S]. ``lengths`` [B] int is the
    number of tokens per row, at least 1. Differentiable."""
    return values.gather(1, lengths.long()[:, None] - 1).squeeze(1)


def _check(loss: str, data: BatchedDataDict, values: Tensor, keys: Mapping[str, int]) -> None:
    """Check that a micro-batch has the given columns, with shapes that match the values. ``keys`` maps each
    to its number of dimensions.

    Raises:
        BatchError: it does not.
    """
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
