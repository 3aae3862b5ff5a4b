"""Losses: clipped policy gradient, negative log-likelihood and direct preference optimisation.

Every loss takes next-token log-probabilities and divides by a global normaliser. Losses, gradients and
(unless ``metric_reductions`` declares otherwise) metrics of a global batch are therefore plain sums over
micro-batches and data-parallel ranks. Values under a zero mask never reach a loss or a gradient, even if they
are NaN. Shapes: B rows, S positions; data tensors [B, S] are sliced ``[:, 1:]`` to match the S - 1
predictions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from typing_extensions import TypedDict

from megarl.algorithms.interfaces import LossFunction, LossInputType, LossType
from megarl.algorithms.utils import calculate_kl, masked_mean
from megarl.config.losses import CLIPPED_PG, FUNCTION, ClippedPGLossConfig, DPOLossConfig
from megarl.config.rules.losses import faults_of_loss
from megarl.errors import BatchError, ConfigError, Violation
from megarl.import_path import load_object
from megarl.key import defaults_of
from megarl.observe.metrics import FAR, MISMATCH_MAX, MISMATCH_MEAN, MISMATCH_SHARE, Reduction

if TYPE_CHECKING:
    from megarl.distributed.batched_data_dict import BatchedDataDict

__all__ = [
    "ClippedPGLossConfig",
    "ClippedPGLossDataDict",
    "ClippedPGLossFn",
    "DPOLossConfig",
    "DPOLossDataDict",
    "DPOLossFn",
    "LossFunction",
    "NLLLoss",
]


class ClippedPGLossDataDict(TypedDict):
    """Batch columns read by ``ClippedPGLossFn``: [B, S] tensors, except ``sample_mask`` [B]."""

    input_ids: Tensor
    advantages: Tensor
    prev_logprobs: Tensor
    generation_logprobs: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


class DPOLossDataDict(TypedDict):
    """Batch columns read by ``DPOLossFn``. Rows alternate between chosen and rejected.
    ``reference_policy_logprobs`` [B, S] is rolled left by one position."""

    input_ids: Tensor
    reference_policy_logprobs: Tensor
    token_mask: Tensor
    sample_mask: Tensor


ENTROPY = "entropy"
"""Metric: mean over tokens of the entropy of the distribution from which a token is sampled, in nats."""
KL_CLAMPED = "kl_clamped_share"
"""Metric: share of tokens whose KL estimate, or the log-probability difference in it, was clamped."""
OUT_OF_BOUNDS = "is_oob_ratio"
"""Metric: share of tokens whose importance weight was out of bounds."""


class DualClipError(ConfigError, AssertionError):
    """``ratio_clip_c`` is out of range. Also an AssertionError, as the NeMo-RL policy API promises."""


class ClippedPGLossFn:
    """Clipped policy gradient loss: PPO, GRPO, DAPO's clip-higher, dual clip, GSPO, CISPO, Dr.GRPO and
    REINFORCE, with importance sampling correction, KL penalty and entropy bonus.
    ``megarl/algorithms/README.md`` lists each equation with its source.

    For a token with advantage A and ratio r = exp(current - previous)::

        clipped = max(-A r, -A clip(r, 1 - ratio_clip_min, 1 + ratio_clip_max))
        clipped = min(clipped, -A ratio_clip_c)    where A < 0, with ratio_clip_c
        clipped = -sg(clip(r, ...)) A current      with use_cispo, instead of both
        loss    = mean(w clipped) + mean(v beta k(current, reference)) - entropy_coef mean(entropy)
        w       = exp(previous - generation)       with use_importance_sampling_correction, else 1
        v       = sg(exp(current - generation))    with use_on_policy_kl_approximation, else 1

    sg stops the gradient, beta is ``reference_policy_kl_penalty``, and ``calculate_kl`` defines k. The first
    line is PPO (arXiv 1707.06347); with two different bounds it is DAPO (arXiv 2503.14476). The second line
    is the dual clip (arXiv 1912.09729), the third CISPO (arXiv 2506.13585, equation 4). ``disable_ppo_ratio``
    replaces r and its clipped form by the log-probability itself.

    Sequence-level ratios: with ``sequence_level_importance_ratios``, all tokens of a sequence have the ratio
    s = exp(mean over its tokens of current - previous) and the weight w = exp(mean of previous - generation)
    (GSPO, arXiv 2507.18071, equation 7). With ``sequence_level_ratio_gradient: token`` the ratio is sg(s)
    exp(current - sg(current)), so each token has its own gradient (GSPO-token, equation 14).

    Normalisation: with ``token_level_loss`` the mean is over the valid tokens of the global batch. Otherwise
    it is over the tokens of each row, then over the valid rows; ``sequence_normalizer`` replaces the number
    of a row's tokens (Dr.GRPO, arXiv 2503.20783). Rows that are segments of one response
    (``response_tokens``) count as one row in that mean, but a sequence-level ratio is that of a segment.

    Gradient of the KL penalty: the KL is an expectation over tokens that the policy itself samples. Its
    gradient is the gradient of k plus the score-function term, k times the gradient of the log-probability
    (arXiv 2506.09477, arXiv 2512.21852): ``reference_policy_kl_gradient: exact``. ``pathwise`` omits that
    term, as arXiv 2402.03300 and most trainers do. For k3, its expectation is the gradient of the KL only in
    the limit of equal policies. For k2, it is exactly that gradient.

    Clamps: the log ratio, of a token or a sequence, is clamped to +-``log_ratio_clamp_value`` and has no
    gradient beyond. d = reference - current is clamped to +-``kl_input_clamp_value``, and k to
    +-``kl_output_clamp_value``; null means no clamp. These two bound the size of the penalty and of its
    gradient, but never remove the gradient: a token far from the reference is still pulled back. The
    derivative with respect to a token's log-probability is v times -d for k1, k2 and k3 (the constant 1 of k1
    has expectation 0). For k3 with ``pathwise`` it is v (1 - exp(d)), at least -v (``kl_output_clamp_value``
    + d). ``kl_clamped_share`` is the share of tokens whose d or k a clamp changed.

    Bounds of w: ``truncated_importance_sampling_type`` bounds w to [0, ``_ratio``] or [``_ratio_min``,
    ``_ratio``]. ``tis`` takes min(w, bound) (truncated importance sampling). ``icepop`` sets a w out of
    bounds to 0 (arXiv 2510.18855). ``seq-mask-tis`` sets w to 0 for all tokens of a sequence whose exp(mean
    of previous - generation) is out of bounds, and keeps w elsewhere. ``is_oob_ratio`` is the share of tokens
    whose weight changed. Weights that are not finite count as 0, except that ``tis`` gives infinite ones the
    bound; ``nonfinite_importance_weights`` counts them.

    Entropy: the entropy is that of the full distribution from which a token is sampled, not an estimate from
    the sampled token. Given the tokens before it, the gradient is therefore exact and needs no weight. It is
    only computed if ``entropy_coef`` is above 0. The metric ``entropy`` is its mean over tokens.

    ``force_on_policy_ratio`` uses sg(current) as ``previous``, which the data then need not contain: r is
    exactly 1, and its gradient is that of the log-probability. Additional metrics then measure the distance
    of ``generation`` from it (see ``megarl.rollout.samples.mismatch_metrics``).

    ``use_kl_in_reward`` adds no KL penalty here: the algorithm subtracts the KL from the rewards
    (``kl_of_tokens``).

    Raises:
        ConfigError: ``ratio_clip_c`` is 1 or less, or settings contradict each other
            (``megarl.config.rules.losses.faults_of_loss``).
    """

    input_type = LossInputType.LOGPROB
    skips_masked = True
    metric_reductions: Mapping[str, Reduction] = MappingProxyType(
        {
            "loss": Reduction.SUM,
            "probs_ratio": Reduction.SUM,
            "probs_ratio_min": Reduction.MIN,
            "probs_ratio_max": Reduction.MAX,
            "probs_ratio_clamped": Reduction.SUM,
            "probs_ratio_clamped_min": Reduction.MIN,
            "probs_ratio_clamped_max": Reduction.MAX,
            "kl_penalty": Reduction.SUM,
            "token_mult_prob_error": Reduction.SUM,
            "sampling_importance_ratio": Reduction.SUM,
            "nonfinite_importance_weights": Reduction.SUM,
            "num_valid_samples": Reduction.SUM,
            "approx_entropy": Reduction.SUM,
        }
    )

    def __init__(self, cfg: ClippedPGLossConfig) -> None:
        cfg = cast("ClippedPGLossConfig", {**defaults_of(ClippedPGLossConfig), **cfg})
        clip_c = cfg["ratio_clip_c"]
        if clip_c is not None and not clip_c > 1:
            fix = "write a number above 1, or null for no dual clip"
            raise DualClipError([Violation("loss_fn.ratio_clip_c", clip_c, "must exceed 1", fix)])
        faults = list(faults_of_loss(cfg))
        if faults:
            raise ConfigError(faults)
        self.kl_penalty = cfg["reference_policy_kl_penalty"]
        self.kl_type = cfg["reference_policy_kl_type"]
        self.use_kl_in_reward = cfg["use_kl_in_reward"]
        self.ratio_clip_min = cfg["ratio_clip_min"]
        self.ratio_clip_max = cfg["ratio_clip_max"]
        self.ratio_clip_c = clip_c
        self.use_on_policy_kl_approximation = cfg["use_on_policy_kl_approximation"]
        self.use_importance_sampling_correction = cfg["use_importance_sampling_correction"]
        self.disable_ppo_ratio = cfg["disable_ppo_ratio"]
        self.force_on_policy_ratio = cfg["force_on_policy_ratio"]
        if self.force_on_policy_ratio:
            # A new mapping, because all losses share that of the class.
            mismatch = {
                MISMATCH_MEAN: Reduction.SUM,
                MISMATCH_MAX: Reduction.MAX,
                MISMATCH_SHARE: Reduction.SUM,
            }
            self.metric_reductions = {**self.metric_reductions, **mismatch}
        self.sequence_level_ratios = cfg["sequence_level_importance_ratios"]
        self.ratio_has_token_gradient = cfg["sequence_level_ratio_gradient"] == "token"
        self.truncation = cfg["truncated_importance_sampling_type"]
        # null and 0 mean no bound; infinity needs no extra branch.
        self.weight_max = cfg["truncated_importance_sampling_ratio"] or math.inf
        self.weight_min = cfg["truncated_importance_sampling_ratio_min"] or 0.0
        if self.truncation is not None:
            self.metric_reductions = {**self.metric_reductions, OUT_OF_BOUNDS: Reduction.SUM}
        self.entropy_coef = cfg["entropy_coef"]
        if self.needs_entropies:
            self.metric_reductions = {**self.metric_reductions, ENTROPY: Reduction.SUM}
        self.has_penalty = bool(self.kl_penalty) and not self.use_kl_in_reward
        if self.has_penalty:
            self.metric_reductions = {**self.metric_reductions, KL_CLAMPED: Reduction.SUM}
        self.use_cispo = cfg["use_cispo"]
        self.sequence_normalizer = cfg["sequence_normalizer"]
        # The pathwise gradient of k2 is already exact.
        self.exact_kl_gradient = cfg["reference_policy_kl_gradient"] == "exact" or self.kl_type == "k2"
        self.log_ratio_bound = cfg["log_ratio_clamp_value"]
        self.kl_input_bound = cfg["kl_input_clamp_value"]
        self.kl_output_bound = cfg["kl_output_clamp_value"]
        self.loss_type = LossType.TOKEN_LEVEL if cfg["token_level_loss"] else LossType.SEQUENCE_LEVEL

    @property
    def needs_entropies(self) -> bool:
        """True if the loss needs token entropies, see ``LossFunction``."""
        return self.entropy_coef > 0

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
        next_token_entropies: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics, see ``LossFunction``. The data is a ``ClippedPGLossDataDict``; reference
        log-probabilities are needed only with a KL penalty.

        Raises:
            BatchError: a column or the entropies are missing, or a shape does not match.
        """
        previous_key = [] if self.force_on_policy_ratio else ["prev_logprobs"]
        _check_batch(
            "ClippedPGLossFn", data, next_token_logprobs, ["advantages", *previous_key, "generation_logprobs"]
        )
        token_mask, sample_mask, mask = _masks(data, next_token_logprobs)
        tokens_of_response = (
            data.get("response_tokens") if self.sequence_normalizer is None else self.sequence_normalizer
        )

        # where, not a product: 0 times infinity is NaN.
        def visible(values: Tensor) -> Tensor:
            return torch.where(mask != 0, values, 0.0)

        def mean(values: Tensor) -> Tensor:
            if self.loss_type is LossType.TOKEN_LEVEL:
                return masked_mean(values, mask, global_normalization_factor=global_valid_toks)
            # token_mask, not mask: the second mean excludes the invalid rows.
            by_row = masked_mean(values, token_mask, dim=-1, global_normalization_factor=tokens_of_response)
            return masked_mean(by_row, sample_mask, global_normalization_factor=global_valid_seqs)

        def token_mean(values: Tensor) -> Tensor:
            return masked_mean(values.detach(), mask, global_normalization_factor=global_valid_toks)

        current = visible(next_token_logprobs)
        previous = current.detach() if self.force_on_policy_ratio else visible(data["prev_logprobs"][:, 1:])
        generation = visible(data["generation_logprobs"][:, 1:])

        ratio, clamped = self._ratios(current, previous, mask)
        # The correction is a constant weight, through which no gradient flows.
        drawn_apart = (previous - generation).detach()
        weight, finite = _importance_weight(self._of_level(drawn_apart, mask))
        bounded = self._bounded(weight, drawn_apart, mask)
        policy_values = self._objective(visible(data["advantages"][:, 1:]), ratio, clamped, current)
        loss = mean(bounded * policy_values if self.use_importance_sampling_correction else policy_values)
        penalty = loss.new_zeros(())
        of_penalty: dict[str, Tensor] = {}
        if self.has_penalty:
            divergence, kl_clamped = self._kl(data, current, generation, visible)
            penalty, of_penalty = mean(divergence), {KL_CLAMPED: token_mean(kl_clamped)}
        loss = loss + self.kl_penalty * penalty
        of_entropy = {}
        if self.needs_entropies:
            entropies = visible(_checked_entropies(next_token_entropies, next_token_logprobs))
            loss = loss - self.entropy_coef * mean(entropies)
            of_entropy = {ENTROPY: token_mean(entropies)}

        metrics = {
            "loss": loss.detach(),
            "probs_ratio": token_mean(ratio),
            "probs_ratio_min": _masked_extreme(ratio, mask, torch.amin, math.inf),
            "probs_ratio_max": _masked_extreme(ratio, mask, torch.amax, -math.inf),
            "probs_ratio_clamped": token_mean(clamped),
            "probs_ratio_clamped_min": _masked_extreme(clamped, mask, torch.amin, math.inf),
            "probs_ratio_clamped_max": _masked_extreme(clamped, mask, torch.amax, -math.inf),
            "kl_penalty": penalty.detach(),
            "token_mult_prob_error": token_mean(torch.exp((generation - previous).abs())),
            "sampling_importance_ratio": token_mean(weight),
            "nonfinite_importance_weights": (~finite & (mask != 0)).sum().to(loss.dtype),
            "num_valid_samples": _valid_responses(data, sample_mask, mask),
            # Importance-weighted, because the tokens were sampled by the generating policy.
            "approx_entropy": -token_mean(torch.exp(current - generation) * current),
            **of_penalty,
            **of_entropy,
        }
        if self.truncation is not None:
            metrics[OUT_OF_BOUNDS] = token_mean((bounded != weight).to(weight.dtype))
        if self.force_on_policy_ratio:
            difference = (generation - previous).abs()
            # NaN compares as smaller than every bound, and would count as no mismatch.
            difference = torch.where(difference.isnan(), math.inf, difference)
            metrics |= {
                MISMATCH_MEAN: token_mean(difference),
                MISMATCH_MAX: _masked_extreme(difference, mask, torch.amax, 0.0),
                MISMATCH_SHARE: token_mean((difference > FAR).to(difference.dtype)),
            }
        return loss, metrics

    def _of_level(self, log_ratios: Tensor, mask: Tensor) -> Tensor:
        """Return the token log ratios [B, S-1] unchanged. With sequence-level ratios, replace each by the
        mean of its sequence."""
        if not self.sequence_level_ratios:
            return log_ratios
        return _row_sums(log_ratios, mask, average=True)[:, None].expand_as(log_ratios)

    def _ratios(self, current: Tensor, previous: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the probability ratio and its clipped form, both [B, S-1]."""
        if self.disable_ppo_ratio:
            return current, current
        log_ratio = self._of_level(current - previous, mask)
        if self.ratio_has_token_gradient:
            # GSPO-token: the value of the sequence, but the gradient of the token.
            log_ratio = log_ratio.detach() + (current - current.detach())
        ratio = _finite_exp(_clamped(log_ratio, self.log_ratio_bound))
        return ratio, ratio.clamp(1.0 - self.ratio_clip_min, 1.0 + self.ratio_clip_max)

    def _bounded(self, weight: Tensor, log_weights: Tensor, mask: Tensor) -> Tensor:
        """Apply the configured bounds to importance weights [B, S-1].

        Args:
            weight: weights of tokens or sequences.
            log_weights: log weights of tokens.
            mask: [B, S-1].
        """
        if self.truncation is None:
            return weight
        if self.truncation == "tis":
            # Compare the ratio, not the weight: an infinite ratio has weight 0, but ``tis`` gives it the
            # bound.
            too_large = torch.exp(self._of_level(log_weights, mask)) > self.weight_max
            return torch.where(too_large, self.weight_max, weight)
        compared = weight
        if self.truncation == "seq-mask-tis":
            compared = torch.exp(_row_sums(log_weights, mask, average=True))[:, None]
        return torch.where((compared >= self.weight_min) & (compared <= self.weight_max), weight, 0.0)

    def _objective(self, advantages: Tensor, ratio: Tensor, clamped: Tensor, current: Tensor) -> Tensor:
        """Return the objective of each token, [B, S-1], to be minimised."""
        if self.use_cispo:
            # CISPO: the clipped ratio is a constant weight, so clipped tokens keep a gradient.
            return -advantages * clamped.detach() * current
        # PPO's pessimistic bound: the smaller objective is the larger loss.
        values = torch.maximum(-advantages * ratio, -advantages * clamped)
        if self.ratio_clip_c is None:
            return values
        # Only where A < 0, since there -A r is unbounded in the ratio (arXiv 1912.09729).
        return torch.where(advantages < 0, torch.minimum(values, -advantages * self.ratio_clip_c), values)

    def _kl(
        self, data: BatchedDataDict, current: Tensor, generation: Tensor, visible: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return the KL estimate of each token, without its coefficient, and 1 where a clamp changed it (else
        0); both [B, S-1]."""
        _check_batch(
            "ClippedPGLossFn with reference_policy_kl_penalty > 0",
            data,
            current,
            ["reference_policy_logprobs"],
        )
        constant, reference = current.detach(), visible(data["reference_policy_logprobs"][:, 1:])
        unclamped = calculate_kl(constant, reference, self.kl_type, self.kl_input_bound)
        estimate = _clamped(unclamped, self.kl_output_bound)
        is_clamped = _beyond(reference - constant, self.kl_input_bound) | _beyond(
            unclamped, self.kl_output_bound
        )
        weight, _ = _importance_weight(
            constant - (generation if self.use_on_policy_kl_approximation else constant)
        )
        # The gradient is explicit, because autograd would stop it at a clamp. An infinite gradient, of a
        # token that is impossible (-inf) for one policy, has no usable direction.
        slope = self._kl_slope(_clamped(reference - constant, self.kl_input_bound)).nan_to_num(
            posinf=0.0, neginf=0.0
        )
        # 0 in value, with the gradient of the log-probability.
        moving = torch.where(constant.isfinite(), current - constant, 0.0)
        return weight * (estimate + slope * moving), is_clamped.to(weight.dtype)

    def _kl_slope(self, difference: Tensor) -> Tensor:
        """Return the derivative of each token's KL estimate with respect to its log-probability.

        It includes the score-function term if the exact gradient is configured.

        Args:
            difference: the reference's log-probability minus the current policy's.
        """
        if self.exact_kl_gradient:
            return -difference
        # expm1 keeps digits of a small difference that 1 - exp(d) would lose.
        slope = -torch.expm1(difference)
        if self.kl_output_bound is None:
            return slope
        # 1 - exp(d) = -(k3 + d). Bound it like k3: a token that is hardly ever sampled would otherwise have a
        # gradient of exp(20).
        return torch.maximum(slope, -(self.kl_output_bound + difference.clamp(min=0.0)))


def policy_loss(cfg: ClippedPGLossConfig) -> Any:
    """Build the loss that ``loss_fn.function`` names: the clipped policy gradient, or a user-defined class.

    Raises:
        ConfigError: it cannot be imported.
    """
    name = cfg.get("function", CLIPPED_PG)
    return ClippedPGLossFn(cfg) if name == CLIPPED_PG else load_object(name, FUNCTION)(cfg)


def kl_of_tokens(cfg: ClippedPGLossConfig, data: Mapping[str, Tensor]) -> Tensor:
    """Return the KL estimate of each token before the update, [B, S], without its coefficient; 0 at tokens
    that do not count. With ``use_kl_in_reward`` it is subtracted from the rewards.

    Args:
        cfg: configuration of the estimator and its clamps.
        data: ``prev_logprobs``, ``reference_policy_logprobs``, ``token_mask`` [B, S] and ``sample_mask`` [B].
    """
    counts = (data["token_mask"] * data["sample_mask"].unsqueeze(1)) != 0
    previous = torch.where(counts, data["prev_logprobs"], 0.0)
    reference = torch.where(counts, data["reference_policy_logprobs"], 0.0)
    filled: dict[str, Any] = {**defaults_of(ClippedPGLossConfig), **cfg}
    bounds = filled["kl_input_clamp_value"], filled["kl_output_clamp_value"]
    return calculate_kl(previous, reference, filled["reference_policy_kl_type"], *bounds)


class NLLLoss:
    """Negative log-likelihood, ``-sum(logprob * mask) / global_valid_toks``."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInputType.LOGPROB
    skips_masked = True
    metric_reductions: Mapping[str, Reduction] = MappingProxyType(
        {"loss": Reduction.SUM, "num_unmasked_tokens": Reduction.SUM, "num_valid_samples": Reduction.SUM}
    )

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
        dpo_loss: bool = False,
        dpo_average_log_probs: bool = False,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics, see ``LossFunction``.

        Args:
            dpo_loss: return the unnormalised loss of each row, [B], instead of the scalar (also as the metric
                ``loss``).
            dpo_average_log_probs: with ``dpo_loss``, divide each row's loss by its number of valid tokens.

        Raises:
            BatchError: a column is missing, or a shape does not match.
        """
        _check_batch("NLLLoss", data, next_token_logprobs, [])
        _, sample_mask, mask = _masks(data, next_token_logprobs)
        if dpo_loss:
            loss = -_row_sums(next_token_logprobs, mask, average=dpo_average_log_probs)
        else:
            loss = -masked_mean(next_token_logprobs, mask, global_normalization_factor=global_valid_toks)
        metrics = {
            "loss": loss.detach(),
            "num_unmasked_tokens": mask.sum(),
            "num_valid_samples": sample_mask.sum(),
        }
        return loss, metrics


class DPOLossFn:
    """Direct preference optimisation (arXiv 2305.18290), plus an optional likelihood term on the chosen
    answers.

    The loss is ``preference_loss_weight * mean(f(R_chosen - R_rejected)) + sft_loss_weight * mean(-log
    p(chosen))``. R is the sum (or mean, if averaged) over a row's tokens of policy minus reference
    log-probability. f(m) is -log sigmoid(beta m) (equation 7), or (m - 1 / (2 beta))^2 for IPO (arXiv
    2310.12036, equation 17), with beta = ``reference_policy_kl_penalty``.

    Rows alternate between chosen and rejected, and a pair counts if both of its rows do. Means are over the
    pairs of the global batch: the normaliser is ``global_valid_seqs / 2``. ``accuracy`` is the share of pairs
    with R_chosen > R_rejected; equal rewards count as wrong. The reward metrics are those of R, without beta.
    """

    loss_type = LossType.SEQUENCE_LEVEL
    input_type = LossInputType.LOGPROB
    skips_masked = True
    rows_together = 2
    metric_reductions: Mapping[str, Reduction] = MappingProxyType(
        dict.fromkeys(
            (
                "loss",
                "sft_loss",
                "preference_loss",
                "accuracy",
                "rewards_chosen_mean",
                "rewards_rejected_mean",
                "num_valid_samples",
            ),
            Reduction.SUM,
        )
    )

    def __init__(self, cfg: DPOLossConfig) -> None:
        cfg = cast("DPOLossConfig", {**defaults_of(DPOLossConfig), **cfg})
        self.beta = cfg["reference_policy_kl_penalty"]
        self.is_ipo = cfg["preference_loss_type"] == "ipo"
        self.preference_loss_weight = cfg["preference_loss_weight"]
        self.sft_loss_weight = cfg["sft_loss_weight"]
        self.preference_average_log_probs = cfg["preference_average_log_probs"]
        self.sft_average_log_probs = cfg["sft_average_log_probs"]

    def __call__(
        self,
        data: BatchedDataDict,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        next_token_logprobs: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return loss and metrics, see ``LossFunction``. The data is a ``DPOLossDataDict``.

        Raises:
            BatchError: a column is missing, a shape does not match, or the number of rows is odd.
        """
        _check_batch("DPOLossFn", data, next_token_logprobs, ["reference_policy_logprobs"])
        _, sample_mask, mask = _masks(data, next_token_logprobs)
        if sample_mask.shape[0] % 2:
            raise BatchError(
                f"DPOLossFn: {sample_mask.shape[0]} rows, need an even number (chosen, rejected, ...). Fix: "
                "keep pairs together"
            )
        pair_mask = sample_mask[::2] * sample_mask[1::2]

        def pair_mean(values: Tensor) -> Tensor:
            return masked_mean(values, pair_mask, global_normalization_factor=global_valid_seqs / 2)

        # Mask invalid pairs here, because 0 times NaN would still reach the gradient.
        mask = mask * pair_mask.repeat_interleave(2)[:, None]
        # The reference is rolled left by one, so its first S - 1 columns match the predictions.
        difference = next_token_logprobs - data["reference_policy_logprobs"][:, :-1]
        rewards = _row_sums(difference, mask, average=self.preference_average_log_probs)
        chosen, rejected = rewards[::2], rewards[1::2]
        preference_loss = pair_mean(self._of_margins(chosen - rejected))
        loss = self.preference_loss_weight * preference_loss
        sft_loss = torch.zeros_like(loss)
        if self.sft_loss_weight > 0:
            sft_loss = pair_mean(
                -_row_sums(next_token_logprobs, mask, average=self.sft_average_log_probs)[::2]
            )
            loss = loss + self.sft_loss_weight * sft_loss
        metrics = {
            "loss": loss.detach(),
            "sft_loss": sft_loss.detach(),
            "preference_loss": preference_loss.detach(),
            "accuracy": pair_mean((chosen > rejected).to(loss.dtype)),
            "rewards_chosen_mean": pair_mean(chosen.detach()),
            "rewards_rejected_mean": pair_mean(rejected.detach()),
            "num_valid_samples": sample_mask.sum() / 2,
        }
        return loss, metrics

    def _of_margins(self, margins: Tensor) -> Tensor:
        """Return the loss f of each pair, [pairs], from R_chosen - R_rejected."""
        return (margins - 1 / (2 * self.beta)).square() if self.is_ipo else -logsigmoid(self.beta * margins)


def _check_batch(loss: str, data: BatchedDataDict, next_token_logprobs: Tensor, keys: Sequence[str]) -> None:
    """Check that a micro-batch has all columns, with shapes that match the log-probabilities.

    Raises:
        BatchError: it does not.
    """
    rows, predictions = next_token_logprobs.shape
    expected = {"sample_mask": (rows,), **dict.fromkeys(["token_mask", *keys], (rows, predictions + 1))}
    for key, shape in expected.items():
        if key not in data:
            raise BatchError(
                f"{loss} needs the key {key!r}; the batch has {sorted(data)}. Fix: add {key!r} "
                f"{list(shape)} to the batch"
            )
        found = tuple(data[key].shape)
        if found != shape:
            raise BatchError(
                f"{loss}: {key!r} has shape {list(found)}, expected {list(shape)} for log-probabilities "
                f"[{rows}, {predictions}]. "
                f"Fix: pad {key!r} like input_ids"
            )


def _checked_entropies(entropies: Tensor | None, next_token_logprobs: Tensor) -> Tensor:
    """Return the entropies after checking that they have the shape of the log-probabilities.

    Raises:
        BatchError: they do not.
    """
    found = None if entropies is None else list(entropies.shape)
    if entropies is None or entropies.shape != next_token_logprobs.shape:
        raise BatchError(
            f"ClippedPGLossFn with entropy_coef > 0: next_token_entropies has the shape {found}, "
            f"expected {list(next_token_logprobs.shape)}. Fix: pass the entropies that belong to "
            "the log-probabilities"
        )
    return entropies


def _masks(data: BatchedDataDict, next_token_logprobs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return token mask [B, S-1], sample mask [B] and their product [B, S-1], in the dtype of the
    log-probabilities."""
    token_mask = data["token_mask"][:, 1:].to(next_token_logprobs.dtype)
    sample_mask = data["sample_mask"].to(next_token_logprobs.dtype)
    return token_mask, sample_mask, token_mask * sample_mask.unsqueeze(-1)


def _valid_responses(data: Mapping[str, Tensor], sample_mask: Tensor, mask: Tensor) -> Tensor:
    """Return the number of valid responses, 0-d. A row that is a segment counts as its share of the
    response's tokens."""
    if "response_tokens" not in data:
        return sample_mask.sum()
    return (mask.sum(dim=1) / data["response_tokens"].clamp(min=1)).sum()


def _row_sums(values: Tensor, mask: Tensor, average: bool) -> Tensor:
    """Return the sum of each row's unmasked values, [B]. With ``average``, divide by their number; rows
    without any give 0."""
    sums = (torch.where(mask != 0, values, 0.0) * mask).sum(dim=-1)
    return sums / mask.sum(dim=-1).clamp(min=1.0) if average else sums


def _importance_weight(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return importance weights ``exp(log_ratio)``, 0 where not finite, and a bool mask of the finite
    ones."""
    weight = torch.exp(log_ratio)
    finite = weight.isfinite()
    return torch.where(finite, weight, 0.0), finite


def _finite_exp(logarithms: Tensor) -> Tensor:
    """Return ``exp(logarithms)``. Where it is infinite, return the largest finite number, without a
    gradient."""
    infinite = torch.exp(logarithms.detach()).isposinf()
    # Mask before exp: the gradient of a discarded infinity would be 0 times infinity.
    finite = torch.exp(torch.where(infinite, 0.0, logarithms))
    return torch.where(infinite, torch.finfo(logarithms.dtype).max, finite)


def _beyond(values: Tensor, bound: float | None) -> Tensor:
    return torch.zeros_like(values, dtype=torch.bool) if bound is None else values.abs() > bound


def _clamped(values: Tensor, bound: float | None) -> Tensor:
    return values if bound is None else values.clamp(-bound, bound)


def _masked_extreme(
    values: Tensor, mask: Tensor, reduce: Callable[[Tensor], Tensor], identity: float
) -> Tensor:
    """Return the smallest or largest unmasked value, or ``identity`` (an infinity) if there is none, so that
    later reductions ignore it."""
    filled = torch.where(mask != 0, values.detach(), identity)
    # amin and amax raise on an empty tensor.
    return reduce(filled) if filled.numel() else filled.new_full((), identity)
