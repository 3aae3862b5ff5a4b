"""Distillation loss: KL between teacher and policy over the teacher's most likely tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor
from typing_extensions import TypedDict

from megarl.algorithms.interfaces import LossInputType, LossType
from megarl.algorithms.utils import masked_mean
from megarl.config.losses import DistillationLossConfig
from megarl.errors import BatchError
from megarl.key import defaults_of
from megarl.observe.metrics import Reduction

if TYPE_CHECKING:
    from megarl.distributed.batched_data_dict import BatchedDataDict

TOPK_LOGITS, TOPK_INDICES = "teacher_topk_logits", "teacher_topk_indices"

# Smallest probability of all other tokens that counts as nonzero, in units of epsilon: the rounding error of
# the sum of the K probabilities.
_LEAST_REST = 16


class DistillationLossDataDict(TypedDict):
    """Batch columns read by ``DistillationLossFn``. ``teacher_topk_logits`` and ``teacher_topk_indices`` [B,
    S, K] come from the teacher's ``Policy.get_topk_logits``; ``token_mask`` is [B, S], ``sample_mask``
    [B]."""

    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DistillationLossFn:
    """KL between the teacher's next-token distribution p and the policy's q, at tokens that the policy
    sampled (GKD, arXiv 2306.13649, with samples of the policy only).

    T is the set of the teacher's K most likely tokens. ``outside_topk`` defines the distributions P and Q
    that are compared::

        rest           P = (p_v for v in T, 1 - sum over T of p_v), and Q from q likewise
        renormalize    P = p_v / sum over T of p, Q = q_v / sum over T of q, for v in T

        forward        KL(P || Q) = sum P (log P - log Q)
        reverse        KL(Q || P) = sum Q (log Q - log P)
        mixed          mixed_kl_weight forward + (1 - mixed_kl_weight) reverse

    ``rest`` treats all other tokens as a single outcome. By the log-sum inequality, its KL is at most that
    over the vocabulary, grows with K, and equals it for K = vocabulary size. Its gradient also moves
    probability into and out of T. In float32 the probability of that outcome, 1 minus a sum, is accurate to
    about 1e-6; a smaller one is replaced by this bound, without a gradient. ``renormalize`` compares the
    distributions given that the token is in T, and has no gradient on the probability of T itself.

    The loss is the mean over the valid tokens of the global batch. As in GKD, the sampled tokens are treated
    as given: no gradient flows through their sampling. The temperature of both distributions is that of the
    policy's sampling.

    The metrics ``forward_kl`` and ``reverse_kl`` are the means of both KLs, whatever the loss is;
    ``teacher_mass`` and ``policy_mass`` are the mean probabilities of T.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    skips_masked = True
    scored_tokens = TOPK_INDICES
    metric_reductions: Mapping[str, Reduction] = MappingProxyType(
        dict.fromkeys(
            ("loss", "forward_kl", "reverse_kl", "teacher_mass", "policy_mass", "num_valid_samples"),
            Reduction.SUM,
        )
    )

    def __init__(self, cfg: DistillationLossConfig) -> None:
        cfg = cast("DistillationLossConfig", {**defaults_of(DistillationLossConfig), **cfg})
        self.kl_type = cfg["kl_type"]
        self.forward_weight = {"forward": 1.0, "reverse": 0.0, "mixed": cfg["mixed_kl_weight"]}[self.kl_type]
        self.has_rest = cfg["outside_topk"] == "rest"

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
        scored_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics, see ``LossFunction``. The data is a ``DistillationLossDataDict``.

        Args:
            scored_logprobs: [B, S-1, K], the policy's log-probabilities of the teacher's top-k tokens.

        Raises:
            BatchError: a column or ``scored_logprobs`` is missing, or a shape does not match.
        """
        scored = _checked(data, next_token_logprobs, scored_logprobs)
        mask = data["token_mask"][:, 1:].to(scored.dtype) * data["sample_mask"].to(scored.dtype).unsqueeze(-1)
        counts = (mask != 0).unsqueeze(-1)

        def mean(values: Tensor) -> Tensor:
            return masked_mean(values, mask, global_normalization_factor=global_valid_toks)

        # Mask first: the gradient of an infinity under a zero mask would be 0 times infinity.
        policy = torch.where(counts, scored, 0.0)
        teacher = torch.where(counts, data[TOPK_LOGITS][:, :-1].to(scored.dtype), 0.0).detach()
        of_policy, of_teacher = self._outcomes(policy), self._outcomes(teacher)
        forward, reverse = mean(_divergence(of_teacher, of_policy)), mean(_divergence(of_policy, of_teacher))
        loss = scored.new_zeros(())
        # Skip a KL of weight 0: it may be infinite, and 0 times infinity is NaN.
        if self.forward_weight > 0:
            loss = loss + self.forward_weight * forward
        if self.forward_weight < 1:
            loss = loss + (1 - self.forward_weight) * reverse
        metrics = {
            "loss": loss.detach(),
            "forward_kl": forward.detach(),
            "reverse_kl": reverse.detach(),
            "teacher_mass": mean(teacher.exp().sum(dim=-1)),
            "policy_mass": mean(policy.detach().exp().sum(dim=-1)),
            "num_valid_samples": data["sample_mask"].to(scored.dtype).sum(),
        }
        return loss, metrics

    def _outcomes(self, logarithms: Tensor) -> Tensor:
        """Convert log-probabilities of the K tokens, [..., K], to those of the outcomes. With ``rest`` there
        are K + 1 outcomes; the last one stands for all other tokens."""
        total = logarithms.logsumexp(dim=-1, keepdim=True)
        if not self.has_rest:
            return logarithms - total
        least = _LEAST_REST * torch.finfo(logarithms.dtype).eps
        return torch.cat([logarithms, _log_of_rest(total, least)], dim=-1)


def _log_of_rest(total: Tensor, least: float) -> Tensor:
    """Return log(1 - exp(total)), at least log(least), without a gradient at that bound.

    Two formulas are needed for accuracy (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012). If
    exp(total) is small, log1p is used: torch computes the derivative of expm1 as expm1 + 1, which keeps only
    four digits of a small exp(total) in float32. If the rest is near 0, expm1 is used, because log1p loses
    its digits there.
    """
    is_small = total < -math.log(2)
    # Both branches are evaluated, so the discarded one must have a finite gradient too.
    of_small = torch.log1p(-torch.where(is_small, total, -1.0).exp())
    of_large = (-torch.expm1(torch.where(is_small, -0.5, total))).clamp(min=least).log()
    return torch.where(is_small, of_small, of_large)


def _divergence(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one || other) of distributions [..., outcomes] given as log-probabilities. Outcomes that are
    impossible under ``one`` contribute 0."""
    can_be = one != -torch.inf
    one, other = torch.where(can_be, one, 0.0), torch.where(can_be, other, 0.0)
    return torch.where(can_be, one.exp() * (one - other), 0.0).sum(dim=-1)


def _checked(data: BatchedDataDict, next_token_logprobs: Tensor, scored: Tensor | None) -> Tensor:
    """Return the policy's log-probabilities of the teacher's tokens, after checking that all shapes match.

    Raises:
        BatchError: they do not.
    """
    rows, predictions = next_token_logprobs.shape
    count = None if TOPK_LOGITS not in data or data[TOPK_LOGITS].ndim != 3 else data[TOPK_LOGITS].shape[2]
    expected = {
        "token_mask": (rows, predictions + 1),
        "sample_mask": (rows,),
        TOPK_LOGITS: (rows, predictions + 1, count),
    }
    for key, shape in expected.items():
        found = tuple(data[key].shape) if key in data else None
        if found != shape:
            raise BatchError(
                f"DistillationLossFn: {key!r} has the shape "
                f"{None if found is None else list(found)}, expected "
                f"{['K' if size is None else size for size in shape]} for log-probabilities "
                f"[{rows}, {predictions}]. Fix: give {key!r} the shape of Policy.get_topk_logits "
                "and input_ids"
            )
    if scored is None or tuple(scored.shape) != (rows, predictions, count):
        raise BatchError(
            "DistillationLossFn: scored_logprobs has the shape "
            f"{None if scored is None else list(scored.shape)}, expected "
            f"[{rows}, {predictions}, {count}]. Fix: pass the log-probabilities of {TOPK_INDICES}"
        )
    return scored
