"""The loss of distillation: the divergence of a policy from a teacher, over the teacher's most likely
tokens."""

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

# Smallest probability of all other tokens that is distinguished from 0, in units in the last place of 1: a
# sum of rounded probabilities may be off by this.
_LEAST_REST = 16


class DistillationLossDataDict(TypedDict):
    """The batch of ``DistillationLossFn``: ``teacher_topk_logits`` and ``teacher_topk_indices`` [B, S, K], as
    the teacher's ``Policy.get_topk_logits`` returns them; ``token_mask`` [B, S]; ``sample_mask`` [B]."""

    teacher_topk_logits: Tensor
    teacher_topk_indices: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DistillationLossFn:
    """Divergence between the teacher's distribution of a token, p, and the policy's, q, at tokens that the
    policy sampled (GKD, arXiv 2306.13649, on samples of the policy alone).

    With T the teacher's K most likely tokens, the divergence is over the distributions P and Q that
    ``outside_topk`` builds from p and q::

        rest           P = (p_v for v in T, 1 - sum over T of p_v), and Q from q likewise
        renormalize    P = p_v / sum over T of p, Q = q_v / sum over T of q, for v in T

        forward        KL(P || Q) = sum P (log P - log Q)
        reverse        KL(Q || P) = sum Q (log Q - log P)
        mixed          mixed_kl_weight forward + (1 - mixed_kl_weight) reverse

    With ``rest`` all other tokens are one outcome. By the log-sum inequality the divergence is at most that
    over the vocabulary, grows with K and equals it for K = vocabulary; its gradient also moves probability
    into T and out of it. The probability of that outcome is the difference of 1 and a sum, known to about
    1e-6 in float32; a smaller one is replaced by that bound, without a gradient. With ``renormalize`` the
    divergence is that of a token sampled given that it is in T, and has no gradient on the probability of T
    itself.

    The loss is the mean over the valid tokens of the global batch. The tokens count as given, as in
    supervised learning: their dependence on the policy has no gradient here (as in GKD). Both distributions
    have one temperature, that of the policy's sampling.

    ``forward_kl`` and ``reverse_kl`` are the means of both divergences whatever the loss is, ``teacher_mass``
    and ``policy_mass`` those of the probability of T.
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

        Raises:
            BatchError: a key or the policy's log-probabilities of the teacher's tokens are missing, or a
                shape does not fit.
        """
        scored = _checked(data, next_token_logprobs, scored_logprobs)
        mask = data["token_mask"][:, 1:].to(scored.dtype) * data["sample_mask"].to(scored.dtype).unsqueeze(-1)
        counts = (mask != 0).unsqueeze(-1)

        def mean(values: Tensor) -> Tensor:
            return masked_mean(values, mask, global_normalization_factor=global_valid_toks)

        # Mask before anything is computed: the gradient of an infinity that does not count would be 0 times
        # infinity.
        policy = torch.where(counts, scored, 0.0)
        teacher = torch.where(counts, data[TOPK_LOGITS][:, :-1].to(scored.dtype), 0.0).detach()
        of_policy, of_teacher = self._outcomes(policy), self._outcomes(teacher)
        forward, reverse = mean(_divergence(of_teacher, of_policy)), mean(_divergence(of_policy, of_teacher))
        loss = scored.new_zeros(())
        # Do not multiply by a weight of 0: the divergence that is only measured may be infinite, and 0 times
        # infinity is NaN.
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
        """Return the log-probabilities of the outcomes, [..., K] or [..., K + 1], from those of K tokens
        [..., K]. With ``rest`` all other tokens are outcome K + 1."""
        total = logarithms.logsumexp(dim=-1, keepdim=True)
        if not self.has_rest:
            return logarithms - total
        least = _LEAST_REST * torch.finfo(logarithms.dtype).eps
        return torch.cat([logarithms, _log_of_rest(total, least)], dim=-1)


def _log_of_rest(total: Tensor, least: float) -> Tensor:
    """Return log(1 - exp(total)), at least log(least), without a gradient at that bound.

    No single form is accurate everywhere (Maechler, "Accurately computing log(1 - exp(-|a|))", 2012): near a
    rest of 1 the logarithm is lost in the difference, and torch's derivative of expm1 is expm1 + 1, of which
    a small exp(total) keeps four digits in float32. Near a rest of 0 it is lost in log1p.
    """
    is_small = total < -math.log(2)
    # Both branches are computed, and the gradient of the discarded one is dropped only if it is finite.
    of_small = torch.log1p(-torch.where(is_small, total, -1.0).exp())
    of_large = (-torch.expm1(torch.where(is_small, -0.5, total))).clamp(min=least).log()
    return torch.where(is_small, of_small, of_large)


def _divergence(one: Tensor, other: Tensor) -> Tensor:
    """Return KL(one || other) of distributions [..., outcomes] given by their logarithms. Outcomes that
    ``one`` cannot have contribute nothing."""
    can_be = one != -torch.inf
    one, other = torch.where(can_be, one, 0.0), torch.where(can_be, other, 0.0)
    return torch.where(can_be, one.exp() * (one - other), 0.0).sum(dim=-1)


def _checked(data: BatchedDataDict, next_token_logprobs: Tensor, scored: Tensor | None) -> Tensor:
    """Return the policy's log-probabilities of the teacher's tokens, after checking that they fit the
    batch."""
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
