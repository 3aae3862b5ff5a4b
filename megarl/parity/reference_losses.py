"""Reference implementation of losses, computed row by row in float64 from the papers, without code of the
engine or the trainer.

All numbers come from the case. In three training steps a token may move beyond the trainer's default clamps,
so these losses apply the clamps as well. ``megarl.parity.reference_advantages`` computes advantages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.observe.metrics import FAR, MISMATCH_MAX, MISMATCH_MEAN, MISMATCH_SHARE, Reduction
from megarl.parity.case import PAIRED, Case
from megarl.parity.errors import BOUND, ROUNDING
from megarl.parity.losses import loss_weight

if TYPE_CHECKING:
    from megarl.parity.reference_advantages import Columns

_BOUNDED = frozenset({"tis", "icepop", "seq-mask"})
LEAST_REST = 16 * 2.0**-23
"""Smallest total probability of all other tokens that float32 can tell apart from 0."""


@dataclass(frozen=True)
class _Call:
    """Inputs of one loss call: the batch and its divisors, which are all above 0."""

    case: Case
    data: Columns
    sequences: float
    tokens: float
    pairs: float

    def rows(self) -> Iterator[tuple[int, Tensor]]:
        """Yield the index of each unmasked row and its target positions.

        Positions index the log-probabilities, whose first entry belongs to the second token.
        """
        for row in range(self.data["input_ids"].shape[0]):
            if float(self.data["sample_mask"][row]) != 0.0:
                yield row, self.data["token_mask"][row, 1:].nonzero().squeeze(1)

    def pairs_of_rows(self) -> Iterator[tuple[tuple[int, Tensor], tuple[int, Tensor]]]:
        """Yield (chosen, rejected) pairs of consecutive rows in which both rows are unmasked."""
        counted = dict(self.rows())
        for first in range(0, self.data["input_ids"].shape[0], 2):
            if first in counted and first + 1 in counted:
                yield (first, counted[first]), (first + 1, counted[first + 1])

    def at(self, key: str, row: int, places: Tensor) -> Tensor:
        """Return the float64 values of a batch column at target positions."""
        return self.data[key][row, 1:][places].double()

    @property
    def samples(self) -> float:
        """Number of responses in the batch that count."""
        return float(responses(self.data))

    def tokens_of_response(self, row: int, own: int) -> int:
        """Return the number of unmasked tokens of the whole response that this row is a segment of; ``own``
        if rows are not segments."""
        return int(self.data["response_tokens"][row]) if "response_tokens" in self.data else own


def responses(data: Columns) -> Fraction:
    """Return the number of responses in a batch that count.

    A segment counts as its share of the response's tokens; any other row counts as 1.
    """
    if "response_tokens" not in data:
        return Fraction(int(data["sample_mask"].sum()))
    total = Fraction(0)
    for row, counted in enumerate(data["sample_mask"].tolist()):
        own = int(data["token_mask"][row, 1:].sum()) if counted else 0
        # Fractions are exact, so that the segments of a response add up to 1.
        total += Fraction(own, max(int(data["response_tokens"][row]), 1))
    return total


Loss = tuple[Tensor, dict[str, float]]
"""A float64 loss and its metrics."""


@dataclass(frozen=True)
class ReferenceLoss:
    """Loss with the interface of the NeMo-RL policy API and the attributes that the trainer reads, computed
    in float64.

    Its inputs are log-probabilities [B, S-1] or values [B, S]. Some losses need a second input: entropies [B,
    S-1], or log-probabilities [B, S-1, K] of further tokens.
    """

    case: Case

    @property
    def needs_entropies(self) -> bool:
        """True if the loss needs the entropies of the sampling distributions."""
        return "entropy" in self.case.loss_options

    @property
    def scored_tokens(self) -> str | None:
        """Batch key of the further tokens whose log-probabilities the loss needs; None if it needs none."""
        return "teacher_topk_indices" if self.case.loss_kind == "distill" else None

    @property
    def rows_together(self) -> int:
        """Number of consecutive rows that must be in the same micro-batch."""
        return 2 if self.case.loss_kind in PAIRED else 1

    @property
    def metric_reductions(self) -> Mapping[str, Reduction]:
        """Reductions of the metrics that are minima or maxima; all others are sums."""
        extremes = {MISMATCH_MAX: Reduction.MAX}
        for name in ("probs_ratio", "probs_ratio_clamped"):
            extremes[f"{name}_min"] = Reduction.MIN
            extremes[f"{name}_max"] = Reduction.MAX
        return extremes

    def __call__(
        self,
        data: Columns,
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
        *scores: Tensor,
        **named: Tensor,
    ) -> Loss:
        """Return the float32 loss and its metrics."""
        compute, _ = _LOSSES[self.case.loss_kind]
        call, weight = (
            self._call(data, float(global_valid_seqs), float(global_valid_toks)),
            loss_weight(self.case),
        )
        loss, metrics = compute(call, *(values.double() for values in (*scores, *named.values())))
        return loss.float() * weight, {**metrics, "loss": float(loss.detach()) * weight}

    def rounded(self, data: Columns, sequences: float, tokens: float, *scores: Tensor) -> dict[str, float]:
        """Return, for each metric whose terms cancel within a token, the sum of the absolute terms.

        Rounding errors are proportional to these terms, not to their difference. The result includes the
        loss, which is computed from such metrics.
        """
        _, rounded = _LOSSES[self.case.loss_kind]
        return {} if rounded is None else rounded(self._call(data, sequences, tokens), *scores)

    def _call(self, data: Columns, sequences: float, tokens: float) -> _Call:
        # A batch without valid tokens has the loss 0; avoid 0 / 0.
        return _Call(self.case, data, *(max(count, 1e-8) for count in (sequences, tokens, sequences / 2)))


def reference_loss(case: Case) -> ReferenceLoss:
    """Return the loss of a case, implemented as its paper defines it."""
    return ReferenceLoss(case)


def _number(case: Case, option: str) -> float:
    """Return the number of an option; infinity if it has no bound."""
    number = case.loss_number(option)
    return float("inf") if number is None else number


def _bounds(case: Case, option: str) -> tuple[float, float]:
    """Return the lower and upper bound of an option; 0 and infinity if it has none."""
    low, high = case.loss_numbers(option)
    return 0.0 if low is None else low, float("inf") if high is None else high


def _negative_log_likelihood(call: _Call, logprobs: Tensor) -> Loss:
    # A batch without valid rows needs a loss of 0 that still has a gradient.
    total, count = 0.0 * logprobs.sum(), 0
    for row, places in call.rows():
        total = total - logprobs[row, places].sum()
        count += len(places)
    return total / call.tokens, {"num_unmasked_tokens": float(count), "num_valid_samples": call.samples}


def _rewards_of_pairs(call: _Call, logprobs: Tensor) -> Iterator[tuple[Tensor, Tensor, float, Tensor]]:
    """Yield the rewards of the chosen and the rejected response of each unmasked pair.

    They are followed by the size of the terms that cancel in the difference of the rewards, and by the
    log-probabilities of the chosen response.
    """
    # The batch stores the reference log-probabilities shifted by one, so column i belongs to the same token
    # here and in ``logprobs``.
    reference = call.data["reference_policy_logprobs"].double()
    for pair in call.pairs_of_rows():
        rewards, size = [], 0.0
        for row, places in pair:
            length = max(len(places), 1) if "mean" in call.case.loss_options else 1
            rewards.append((logprobs[row, places] - reference[row, places]).sum() / length)
            size += float(logprobs[row, places].detach().abs().sum()) / length
        yield rewards[0], rewards[1], size, logprobs[pair[0]]


def _undecided(margins: Sequence[tuple[float, float]], pairs: float) -> float:
    """Return the scale of an accuracy that rounding may change.

    Args:
        margins: margin of each pair, and the size of the terms that cancel in it.
        pairs: number of pairs.

    Returns:
        A scale so large that the error of an accuracy is within bounds if a rounding error of the terms flips
            the closest pair.
    """
    least = min((abs(margin) / size for margin, size in margins if size), default=math.inf)
    return 1 / pairs / max(least, 1e-12) * BOUND / ROUNDING


def _rounded_in_accuracy(call: _Call, logprobs: Tensor) -> dict[str, float]:
    pairs = _rewards_of_pairs(call, logprobs)
    return {
        "accuracy": _undecided(
            [(float(chosen - rejected), size) for chosen, rejected, size, _ in pairs], call.pairs
        )
    }


def _preference(call: _Call, logprobs: Tensor) -> Loss:
    """Compute the DPO loss (Rafailov et al., arXiv 2305.18290, equation 7) or the IPO loss (Azar et al.,
    arXiv 2310.12036, equation 17), plus the negative log-likelihood of the chosen responses."""
    case, options, beta = call.case, call.case.loss_options, _number(call.case, "beta")
    preference = likelihood = 0.0 * logprobs.sum()
    sums = dict.fromkeys(("accuracy", "rewards_chosen_mean", "rewards_rejected_mean"), 0.0)
    for chosen, rejected, _, spoken in _rewards_of_pairs(call, logprobs):
        if "ipo" in options:
            preference = preference + (chosen - rejected - 0.5 / beta) ** 2
        else:
            # -log(sigmoid(x)) = log(1 + exp(-x)).
            preference = preference + torch.log1p(torch.exp(-beta * (chosen - rejected)))
        likelihood = likelihood - spoken.sum() / (max(len(spoken), 1) if "sft-mean" in options else 1)
        better, worse = float(chosen.detach()), float(rejected.detach())
        for name, value in zip(sums, (float(better > worse), better, worse), strict=True):
            sums[name] += value / call.pairs
    metrics = {
        "sft_loss": float(likelihood.detach()) / call.pairs if "sft" in options else 0.0,
        "preference_loss": float(preference.detach()) / call.pairs,
        **sums,
        "num_valid_samples": call.samples / 2,
    }
    return (
        _number(case, "weight") * preference
        + (_number(case, "sft") if "sft" in options else 0.0) * likelihood
    ) / call.pairs, metrics


def _scores_of_pairs(call: _Call, values: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the scores of the chosen and the rejected response of each unmasked pair: the values of their
    last tokens."""
    lengths = call.data["input_lengths"]
    for (chosen, _), (rejected, _) in call.pairs_of_rows():
        yield values[chosen, int(lengths[chosen]) - 1], values[rejected, int(lengths[rejected]) - 1]


def _bradley_terry(call: _Call, values: Tensor) -> Loss:
    """Compute the Bradley-Terry loss of Ouyang et al., arXiv 2203.02155, equation 1, for two responses per
    prompt."""
    total = 0.0 * values.sum()
    sums = dict.fromkeys(("accuracy", "margin", "rewards_chosen_mean", "rewards_rejected_mean"), 0.0)
    count = 0
    for chosen, rejected in _scores_of_pairs(call, values):
        total = total + torch.log1p(torch.exp(rejected - chosen))
        better, worse = float(chosen.detach()), float(rejected.detach())
        for name, value in zip(sums, (float(better > worse), better - worse, better, worse), strict=True):
            sums[name] += value / call.pairs
        count += 1
    return total / call.pairs, {**sums, "num_valid_samples": float(count)}


def _rounded_in_margins(call: _Call, values: Tensor) -> dict[str, float]:
    """Return sizes for the margin, in which scores cancel, and for the accuracy.

    An error of a score is relative to the score and exceeds the rounding error of the difference, so the size
    is larger than rounding alone requires.
    """
    margins, total = list[tuple[float, float]](), 0.0
    for chosen, rejected in _scores_of_pairs(call, values):
        size = float(chosen.abs() + rejected.abs())
        margins.append((float(chosen - rejected), size))
        total += size
    return {
        "margin": total / call.pairs * BOUND / ROUNDING,
        "accuracy": _undecided(margins, call.pairs),
    }


def _rounded_in_returns(call: _Call, values: Tensor) -> dict[str, float]:
    """Return the size for the mean return: returns have both signs and may cancel in their mean."""
    size = 0.0
    for row, places in call.rows():
        size += float(call.at("returns", row, places).abs().sum())
    return {"returns_mean": size / call.tokens * BOUND / ROUNDING}


def _value_error(call: _Call, values: Tensor) -> Loss:
    """Compute the clipped value loss of PPO: half of the larger of two squared errors, of the value and of
    the value clipped around the old value."""
    clip = _number(call.case, "clip") if "clip" in call.case.loss_options else math.inf
    total = 0.0 * values.sum()
    sums = dict.fromkeys(("clipped_share", "values_mean", "returns_mean"), 0.0)
    for row, places in call.rows():
        # Among log-probabilities, the index of a target is that of the previous token among tokens.
        before, returns = call.at("prev_values", row, places), call.at("returns", row, places)
        numbers = zip(values[row, places], before.tolist(), returns.tolist(), strict=True)
        for value, old, target in numbers:
            error = (value - target) ** 2
            if abs(float(value.detach()) - old) > clip:
                bound = old + clip if float(value.detach()) > old else old - clip
                if (bound - target) ** 2 > float(error.detach()):
                    # A clipped value is constant. The product with 0 keeps the result in the graph.
                    error = 0.0 * error + (bound - target) ** 2
                    sums["clipped_share"] += 1 / call.tokens
            total = total + error / 2
            sums["values_mean"] += float(value.detach()) / call.tokens
            sums["returns_mean"] += target / call.tokens
    return total / call.tokens, {**sums, "num_valid_samples": call.samples}


def _from_teacher(call: _Call, logprobs: Tensor, scored: Tensor) -> Loss:
    """Compute KL(teacher || policy), KL(policy || teacher), or a weighted sum of both, token by token from
    the definition.

    The outcomes are the teacher's top-k tokens and, without ``renorm``, one outcome for all other tokens.
    """
    share, total = _forward_share(call.case), 0.0 * scored.sum()
    sums = dict.fromkeys(("forward_kl", "reverse_kl", "teacher_mass", "policy_mass"), 0.0)
    for teacher, policy in _of_teacher_and_policy(call, scored):
        one, other = _outcomes(teacher, call.case), _outcomes(policy, call.case)
        forward, reverse = (one * torch.log(one / other)).sum(), (other * torch.log(other / one)).sum()
        total = total + share * forward + (1 - share) * reverse
        for name, value in zip(sums, (forward, reverse, teacher.sum(), policy.sum()), strict=True):
            sums[name] += float(value.detach()) / call.tokens
    return total / call.tokens, {**sums, "num_valid_samples": call.samples}


def _forward_share(case: Case) -> float:
    """Return the weight of the forward KL; the reverse KL has the rest."""
    return (
        1.0
        if "forward" in case.loss_options
        else _number(case, "mixed")
        if "mixed" in case.loss_options
        else 0.0
    )


def _has_rest(case: Case) -> bool:
    """Return True if the tokens outside the teacher's top k form one more outcome.

    If the top k are the whole vocabulary, that outcome would consist of rounding errors.
    """
    return "renorm" not in case.loss_options and case.likeliest < case.vocab


def _of_teacher_and_policy(call: _Call, scored: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for each target token the probabilities [K] of the teacher's top-k tokens, under the teacher and
    under the policy."""
    for row, places in call.rows():
        # The teacher's logits for a token are in the column of the previous token.
        yield from zip(
            call.data["teacher_topk_logits"][row, places].double().exp(),
            scored[row, places].double().exp(),
            strict=True,
        )


def _outcomes(probabilities: Tensor, case: Case) -> Tensor:
    """Return the probabilities with one more outcome for all other tokens, or normalised to sum 1 if the loss
    has no such outcome.

    The additional probability is at least 16 units in the last place of 1, the smallest that float32 can tell
    apart from 0.
    """
    if not _has_rest(case):
        return probabilities / probabilities.sum()
    return torch.cat([probabilities, (1 - probabilities.sum())[None].clamp(min=LEAST_REST)])


def _rounded_in_rest(call: _Call, logprobs: Tensor, scored: Tensor) -> dict[str, float]:
    """Return the factor by which errors in the probability of all other tokens (1 minus a sum, for teacher
    and policy) change a KL."""
    sizes, share = {"forward_kl": 0.0, "reverse_kl": 0.0}, _forward_share(call.case)
    for teacher, policy in _of_teacher_and_policy(call, scored) if _has_rest(call.case) else ():
        one, other = float(_outcomes(teacher, call.case)[-1]), float(_outcomes(policy, call.case)[-1])
        apart = abs(math.log(one / other))
        sizes["forward_kl"] += (apart + 1 + one / other) / call.tokens
        sizes["reverse_kl"] += (apart + 1 + other / one) / call.tokens
    return {
        **sizes,
        "loss": loss_weight(call.case) * (share * sizes["forward_kl"] + (1 - share) * sizes["reverse_kl"]),
    }


def _policy_gradient(call: _Call, logprobs: Tensor, entropies: Tensor | None = None) -> Loss:
    """Compute the policy-gradient loss of PPO (arXiv 1707.06347, equation 7) with separate lower and upper
    clip bounds (2503.14476, equation 8) and a bound for negative advantages (1912.09729, equation 4).

    Options: sequence-level ratios (2507.18071, equations 7 and 14), CISPO (2506.13585, equation 4), the
    constant normaliser of Dr.GRPO (2503.20783), and a KL penalty whose gradient has the score-function term
    (2506.09477).
    """
    case, options, tokens = call.case, call.case.loss_options, call.tokens
    in_loss = "kl" in options and "in-reward" not in options
    low, high = _bounds(case, "cliprange")
    total = penalty = bonus = 0.0 * logprobs.sum()
    sums = dict.fromkeys(
        (
            "probs_ratio",
            "probs_ratio_clamped",
            "token_mult_prob_error",
            "sampling_importance_ratio",
            "approx_entropy",
        ),
        0.0,
    )
    sums |= dict.fromkeys(["entropy"] * (entropies is not None) + ["kl_clamped_share"] * in_loss, 0.0)
    ratios, bounded, apart, out_of_bounds = [], [], [], 0.0
    for row, places in call.rows():
        if not len(places):
            continue
        current = logprobs[row, places]
        advantage = call.at("advantages", row, places)
        generation = call.at("generation_logprobs", row, places)
        previous = current.detach() if "forced" in options else call.at("prev_logprobs", row, places)
        ratio = _ratio(current, previous, case)
        clipped = ratio if "noratio" in options else torch.clip(ratio, 1 - low, 1 + high)
        objective = _objective(advantage, ratio, clipped, current, case)
        correction = torch.exp(_of_level(previous - generation, options))
        within = _within_bounds(correction, previous - generation, case)
        if "is" in options:
            objective = objective * within
        share = _share(call.tokens_of_response(row, len(places)), call)
        total = total - share * objective.sum()
        if in_loss:
            reference = call.at("reference_policy_logprobs", row, places)
            penalty = penalty + share * _divergence(current, reference, generation, case)
            sums["kl_clamped_share"] += _clamped_share(current, reference, case) / tokens
        if entropies is not None:
            bonus = bonus + share * entropies[row, places].sum()
            sums["entropy"] += float(entropies[row, places].detach().sum()) / tokens
        told = current.detach()
        ratios.append(ratio.detach())
        bounded.append(clipped.detach())
        apart.append((generation - previous).abs())
        sums["probs_ratio"] += float(ratios[-1].sum()) / tokens
        sums["probs_ratio_clamped"] += float(bounded[-1].sum()) / tokens
        sums["token_mult_prob_error"] += float(torch.exp(apart[-1]).sum()) / tokens
        sums["sampling_importance_ratio"] += float(correction.sum()) / tokens
        out_of_bounds += float((within != correction).sum()) / tokens
        sums["approx_entropy"] -= float((torch.exp(told - generation) * told).sum()) / tokens
    metrics = {
        **sums,
        **_extremes("probs_ratio", ratios),
        **_extremes("probs_ratio_clamped", bounded),
        "kl_penalty": float(penalty.detach()),
        "nonfinite_importance_weights": 0.0,
        "num_valid_samples": call.samples,
        **({"is_oob_ratio": out_of_bounds} if _BOUNDED & options else {}),
        **(_mismatch(apart, tokens) if "forced" in options else {}),
    }
    return total + _number(case, "kl") * penalty - _number(case, "entropy") * bonus, metrics


def _ratio(current: Tensor, previous: Tensor, case: Case) -> Tensor:
    """Return the probability ratio of each token of a sequence, or the quantity that an option uses
    instead."""
    options, clamp = case.loss_options, _number(case, "ratio-clamp")
    if "noratio" in options:
        return current
    if "gspo-token" in options:
        # In equation 14, sg(s) pi / sg(pi) has the value s and the derivative s with respect to log pi. A
        # clamped s is a constant, so its derivative is 0.
        with torch.no_grad():
            logarithm = (current - previous).mean()
            value = torch.exp(torch.clip(logarithm, -clamp, clamp))
            slope = value * (logarithm.abs() <= clamp)
        return value + slope * (current - current.detach())
    exponent = _of_level(current - previous, options)
    return torch.exp(torch.clip(exponent, -clamp, clamp))


def _of_level(logarithms: Tensor, options: Any) -> Tensor:
    """Return the log-ratios of a sequence's tokens. For sequence-level losses every token gets their mean
    over the sequence, which is the logarithm of the geometric mean of the ratios."""
    if not {"gspo", "gspo-token"} & options:
        return logarithms
    return (logarithms.sum() / len(logarithms)).repeat(len(logarithms))


def _within_bounds(weights: Tensor, logarithms: Tensor, case: Case) -> Tensor:
    """Return the importance weights of a sequence, truncated (``tis``) or set to 0 if out of bounds
    (``icepop``, ``seq-mask``).

    ``logarithms`` are the log-weights of the individual tokens.
    """
    options = case.loss_options
    if "tis" in options:
        return torch.minimum(weights, torch.full_like(weights, _number(case, "tis")))
    if "icepop" in options:
        low, high = _bounds(case, "icepop")
        return weights.where((low <= weights) & (weights <= high), 0.0)
    if "seq-mask" in options:
        low, high = _bounds(case, "seq-mask")
        return weights * float(low <= float(torch.exp(logarithms.mean())) <= high)
    return weights


def _objective(advantage: Tensor, ratio: Tensor, clipped: Tensor, current: Tensor, case: Case) -> Tensor:
    """Return the objective of each token of a sequence, which training maximises."""
    if "cispo" in case.loss_options:
        # The ratio is only a weight here, so tokens with a clipped ratio keep their gradient.
        return clipped.detach() * advantage * current
    objective = torch.minimum(ratio * advantage, clipped * advantage)
    if "dual" not in case.loss_options:
        return objective
    return torch.where(advantage < 0, torch.maximum(objective, _number(case, "dual") * advantage), objective)


def _share(length: int, call: _Call) -> float:
    """Return the weight of one token in the loss, for a response with ``length`` tokens."""
    if "seq" not in call.case.loss_options:
        return 1 / call.tokens
    return 1 / (
        (_number(call.case, "constant") if "constant" in call.case.loss_options else length) * call.sequences
    )


def _divergence(current: Tensor, reference: Tensor, generation: Tensor, case: Case) -> Tensor:
    """Return the KL penalty summed over the tokens of a sequence; with ``approx``, each is weighted by
    current / sampling probability.

    The gradient is written out by hand. In expectation it is log(current / reference) times the gradient of
    the log-probability, whichever estimator gives the value. Clamps limit this factor, without setting the
    gradient to 0.
    """
    options, most, bound = (
        case.loss_options,
        _number(case, "kl-input-clamp"),
        _number(case, "kl-output-clamp"),
    )
    with torch.no_grad():
        weight = torch.exp(current - generation) if "approx" in options else torch.ones_like(current)
        above = torch.clip(current - reference, -most, most)
        estimate = _estimate(above, options)
        slope = above
        if "pathwise" in options:
            slope = torch.maximum(1 - torch.exp(-above), -(bound + torch.relu(-above)))
        value = (weight * torch.clip(estimate, -bound, bound)).sum()
    moving = (weight * slope * current).sum()
    # This expression has the value of the first term and the gradient of the second.
    return value + moving - moving.detach()


def _estimate(above: Tensor, options: Any) -> Tensor:
    """Return the KL estimate of each token from ``above``, its log-ratio to the reference policy."""
    if "k1" in options:
        return above
    return above**2 / 2 if "k2" in options else torch.exp(-above) + above - 1


def _clamped_share(current: Tensor, reference: Tensor, case: Case) -> float:
    """Return the number of tokens in a sequence that exceed a KL clamp."""
    most, bound = _number(case, "kl-input-clamp"), _number(case, "kl-output-clamp")
    above = current.detach() - reference
    past = (above.abs() > most) | (_estimate(torch.clip(above, -most, most), case.loss_options).abs() > bound)
    return float(past.sum())


def _rounded_in_divergence(
    call: _Call, logprobs: Tensor, entropies: Tensor | None = None
) -> dict[str, float]:
    """Return the size of the terms of k3, exp(d) - d - 1, weighted as in the loss.

    Near d = 0 these terms cancel to d^2 / 2. k1 and k2 need no such size: an error of d is an error of the
    log-probabilities, which already count.
    """
    case, options = call.case, call.case.loss_options
    most, bound = _number(case, "kl-input-clamp"), _number(case, "kl-output-clamp")
    if "kl" not in options or {"k1", "k2"} & options:
        return {}
    size = 0.0
    for row, places in call.rows():
        if not len(places):
            continue
        current = logprobs[row, places].double()
        reference = call.at("reference_policy_logprobs", row, places)
        generation = call.at("generation_logprobs", row, places)
        difference = torch.clip(reference - current, -most, most)
        weight = torch.exp(current - generation) if "approx" in options else torch.ones_like(current)
        # A clamped term is constant, so nothing cancels in it.
        terms = weight * (torch.exp(difference) + difference.abs() + 1)
        size += _share(len(places), call) * float(terms[difference.exp() - difference - 1 <= bound].sum())
    return {"kl_penalty": size, "loss": loss_weight(case) * _number(case, "kl") * size}


def _mismatch(apart: list[Tensor], tokens: float) -> dict[str, float]:
    """Return metrics of the difference between the sampling log-probabilities and the current ones."""
    joined = torch.cat(apart) if apart else torch.zeros(0)
    return {
        MISMATCH_MEAN: float(joined.sum()) / tokens,
        MISMATCH_MAX: float(joined.max()) if len(joined) else 0.0,
        MISMATCH_SHARE: float((joined > FAR).sum()) / tokens,
    }


def _extremes(name: str, values: list[Tensor]) -> dict[str, float]:
    joined = torch.cat(values) if values else torch.zeros(0)
    if not joined.numel():
        return {f"{name}_min": float("inf"), f"{name}_max": float("-inf")}
    return {f"{name}_min": float(joined.min()), f"{name}_max": float(joined.max())}


# Kind -> (loss, function that returns the sizes of terms that cancel in its metrics).
_LOSSES: Mapping[str, tuple[Callable[..., Loss], Callable[..., dict[str, float]] | None]] = {
    "nll": (_negative_log_likelihood, None),
    "rm": (_bradley_terry, _rounded_in_margins),
    "value": (_value_error, _rounded_in_returns),
    "distill": (_from_teacher, _rounded_in_rest),
    "dpo": (_preference, _rounded_in_accuracy),
    "pg": (_policy_gradient, _rounded_in_divergence),
}
