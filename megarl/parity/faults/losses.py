"""Known faults of the clipped policy gradient: a formula with one thing in it that is not the paper's."""

from __future__ import annotations

from typing import Any

import torch

from megarl.algorithms.interfaces import LossType
from megarl.parity.batches import token_batch
from megarl.parity.case import Case
from megarl.parity.faults.first_step import CLEARLY, SEQUENCES, FirstStep, first_step_of
from megarl.parity.faults.patching import (
    Mutation,
    Patch,
    built_otherwise,
    in_several_micro_batches,
    normalised_by_micro_batch,
    replacing,
    with_data,
)
from megarl.parity.losses import bounds_of_weights

LOSSES = "megarl.algorithms.loss_functions"
POLICY_GRADIENT = f"{LOSSES}:ClippedPGLossFn"
_TRUNCATIONS = frozenset({"tis", "icepop", "seq-mask"})


def _built_with(**attributes: Any) -> Patch:
    return built_otherwise(POLICY_GRADIENT, **attributes)


def moves(case: Case, *options: str) -> bool:
    """Whether a case has a policy gradient with these options, and some tokens of its first step a gradient of the objective."""
    if case.loss_kind != "pg" or not set(options) <= case.loss_options or case.masked not in ("none", "some"):
        return False
    return case.length >= 5 and case.global_batch >= 2 and int(first_step_of(case).moving.sum()) >= 2


def _follows(case: Case, *options: str) -> bool:
    """Whether, besides, the objective of some tokens changes with their ratio."""
    return moves(case, *options) and int(first_step_of(case).following.sum()) >= 2


def _has_divergence(case: Case, *options: str) -> bool:
    """Whether, besides, the divergence of some tokens has a gradient."""
    return moves(case, "kl", *options) and int(first_step_of(case).diverging.sum()) >= 2


def _seen(case: Case, where: Any, *options: str) -> bool:
    """Whether some tokens of the first step of a policy gradient with these options are those that ``where`` says."""
    return moves(case, *options) and bool(where(first_step_of(case)).any())


def _weights_leave_their_bounds(step: FirstStep) -> torch.Tensor:
    """Tokens with an advantage whose importance weights are clearly out of the bounds of the case."""
    low, high = bounds_of_weights(step.case)
    outside = (step.judged_weights > CLEARLY * (high or torch.inf)) | (step.judged_weights < (low or 0.0) / CLEARLY)
    return outside & step.counted & (step.advantages.abs() > 0.1)


def _tokens_judged_otherwise(step: FirstStep) -> torch.Tensor:
    """Tokens that their own importance weight would leave out and that of their sequence does not, or the reverse."""
    low, high = bounds_of_weights(step.case)
    inside = [(weights >= (low or 0.0)) & (weights <= (high or torch.inf)) for weights in (step.weights, step.judged_weights)]
    return (inside[0] != inside[1]) & step.counted & (step.advantages.abs() > 0.1)


def _second_clip_is_reached(step: FirstStep) -> torch.Tensor:
    """Tokens of a bad answer whose ratio is clearly past the second clip."""
    bound = step.case.loss_number("dual") or torch.inf
    return step.judged & (step.advantages < -0.1) & (step.ratios > CLEARLY * bound)


def _clamp_of_ratios_is_reached(step: FirstStep) -> torch.Tensor:
    """Tokens whose objective is the ratio itself, clearly clamped."""
    clamp = step.case.loss_number("ratio-clamp") or torch.inf
    # what is clipped anyway is a ratio above 1 of a good answer, and one below of a bad one
    apart = -step.unclamped * torch.sign(step.advantages)
    return step.judged & (apart > clamp + 0.02)


def _clamp_of_differences_is_reached(step: FirstStep) -> torch.Tensor:
    return step.counted & (step.above.abs() > 0.02 + (step.case.loss_number("kl-input-clamp") or torch.inf))


def _clamp_of_estimates_is_reached(step: FirstStep) -> torch.Tensor:
    return step.counted & (step.estimates.abs() > CLEARLY * (step.case.loss_number("kl-output-clamp") or torch.inf))


def _several_advantages_in_a_sequence(step: FirstStep) -> torch.Tensor:
    """[B] bool, sequences whose tokens weigh differently in the objective."""
    weighed = step.advantages * step.moving
    most, least = (weighed.masked_fill(~step.counted, sign * torch.inf) for sign in (-1, 1))
    return most.amax(1) - least.amin(1) > 0.1


def _other_lengths_than(step: FirstStep, length: float | None) -> torch.Tensor:
    """[B] bool, sequences with a gradient that have another number of tokens."""
    return step.moving.any(1) & (step.counted.sum(1) != length)


def _has_sequences_of_several_lengths(case: Case) -> bool:
    """Whether in some step sequences that count differ in the number of their tokens."""
    batch = token_batch(case)
    tokens, kept = (values.view(case.steps, -1) for values in (batch["token_mask"][:, 1:].sum(1), batch["sample_mask"] != 0))
    return any(len(set(of_step[counts].tolist())) > 1 for of_step, counts in zip(tokens, kept, strict=True))


def _of_sequences(case: Case, *options: str) -> bool:
    """Whether ratios are those of sequences, of which several surely have more than one token."""
    return bool(SEQUENCES & case.loss_options) and case.length >= 10 and case.global_batch >= 4 and moves(case, *options)


def _not_clipped(original: Any) -> Any:
    def ratios(self: Any, current: torch.Tensor, previous: torch.Tensor, mask: torch.Tensor) -> Any:
        ratio, _ = original(self, current, previous, mask)
        return ratio, ratio

    return ratios


def _weights_of_tokens(original: Any) -> Any:
    def of_level(self: Any, log_ratios: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # of the two that it is asked for, ratios have a gradient and importance weights none
        result: torch.Tensor = original(self, log_ratios, mask) if log_ratios.requires_grad else log_ratios
        return result

    return of_level


def _ratio_to_generation(original: Any) -> Any:
    def call(self: Any, data: Any, *normalizers: torch.Tensor, **given: torch.Tensor) -> Any:
        ratios, generation = type(self)._ratios, data["generation_logprobs"][:, 1:]

        def to_generation(current: torch.Tensor, previous: torch.Tensor, mask: torch.Tensor) -> Any:
            return ratios(self, current, torch.where(mask != 0, generation, 0.0), mask)

        self._ratios = to_generation
        return original(self, data, *normalizers, **given)

    return call


def _weight_with_gradient(original: Any) -> Any:
    def objective(self: Any, advantages: torch.Tensor, ratio: torch.Tensor, clamped: torch.Tensor, current: torch.Tensor) -> Any:
        if not self.use_cispo:
            return original(self, advantages, ratio, clamped, current)
        return -advantages * clamped * current

    return objective


def _ratio_without_gradient(original: Any) -> Any:
    def ratios(self: Any, current: torch.Tensor, previous: torch.Tensor, mask: torch.Tensor) -> Any:
        ratio, clamped = original(self, current, previous, mask)
        # a loss without any gradient would end the worker
        return ratio.detach() + 0.0 * current, clamped.detach()

    return ratios


def _bounds_exchanged(original: Any) -> Any:
    def init(self: Any, *given: Any) -> None:
        original(self, *given)
        self.ratio_clip_min, self.ratio_clip_max = self.ratio_clip_max, self.ratio_clip_min

    return init


def _entropies_without_gradient(original: Any) -> Any:
    def call(self: Any, *given: Any, next_token_entropies: torch.Tensor | None = None, **others: Any) -> Any:
        entropies = None if next_token_entropies is None else next_token_entropies.detach()
        return original(self, *given, next_token_entropies=entropies, **others)

    return call


def _entropies_normalised_by_micro_batch(original: Any) -> Any:
    def call(
        self: Any,
        data: Any,
        sequences: torch.Tensor,
        tokens: torch.Tensor,
        *given: Any,
        next_token_entropies: torch.Tensor | None = None,
        **others: Any,
    ) -> Any:
        own = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        entropies = None if next_token_entropies is None else next_token_entropies * (tokens / own.clamp(min=1))
        return original(self, data, sequences, tokens, *given, next_token_entropies=entropies, **others)

    return call


def _divergence_without_gradient(original: Any) -> Any:
    def kl(self: Any, data: Any, current: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        divergence, is_clamped = original(self, data, current, *given)
        return divergence.detach() + 0.0 * current, is_clamped

    return kl


def _with_score_function(original: Any) -> Any:
    """The gradient of the divergence has the part of the score function, as if it had none."""

    def kl(self: Any, data: Any, current: torch.Tensor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        divergence, is_clamped = original(self, data, current, *given)
        return divergence * torch.exp(current - current.detach()), is_clamped

    return kl


def has_entropies(case: Case) -> bool:
    """Whether the loss has an entropy bonus, of distributions that top-k and top-p leave whole: what these leave may be one token."""
    return moves(case, "entropy") and not case.filters


def _with_means_over_tokens(original: Any) -> Any:
    def init(self: Any, *given: Any) -> None:
        original(self, *given)
        self.loss_type = LossType.TOKEN_LEVEL

    return init


_EACH_LOSS = (
    "loss=pg masked=none",
    "loss=pg+seq masked=none",
    "loss=pg+seq+constant masked=none",
    "loss=pg+seq+gspo masked=none",
    "loss=pg+seq+gspo-token masked=none",
)
"""Losses with ratios: over tokens, over sequences, Dr.GRPO, GSPO and GSPO-token."""

FAULTS: dict[str, Mutation] = {
    "ratio-to-generation": Mutation(
        "the ratio is to the log-probabilities of generation, not to those before the update",
        _follows,
        with_data(POLICY_GRADIENT, lambda data: {"prev_logprobs": data["generation_logprobs"]}),
        (*_EACH_LOSS, "loss=pg+cispo masked=none"),
    ),
    "ratio-not-clipped": Mutation(
        "the ratio is not clipped",
        lambda case: not {"noratio", "forced"} & case.loss_options and _seen(case, lambda step: step.clipped),
        replacing(POLICY_GRADIENT, "_ratios", _not_clipped),
        (*_EACH_LOSS, "loss=pg+cispo masked=none", "loss=pg+cispo+cliprange:1:0.28 masked=none"),
    ),
    "bounds-of-the-ratio-exchanged": Mutation(
        "the ratio is clipped as far below 1 as it should be above, and the reverse",
        # of bounds that are far enough apart, and of ratios far enough out for both
        lambda case: (
            case.loss_numbers("cliprange") in ((0.2, 0.28), (0.3, 0.5), (1.0, 0.28))
            and not {"noratio", "forced"} & case.loss_options
            and _seen(case, lambda step: step.clipped & ((step.unclamped > 0.41) | (step.unclamped < -0.7)))
        ),
        replacing(POLICY_GRADIENT, "__init__", _bounds_exchanged),
        ("loss=pg masked=none", "loss=pg+cispo masked=none"),
    ),
    "ratio-without-gradient": Mutation(
        "the ratio is a constant",
        lambda case: moves(case) and not {"noratio", "cispo"} & case.loss_options,
        replacing(POLICY_GRADIENT, "_ratios", _ratio_without_gradient),
        (*_EACH_LOSS, "loss=pg+forced masked=none"),
    ),
    "forced-ratio-to-generation": Mutation(
        "the ratio is to the log-probabilities of generation where it should be forced to 1",
        lambda case: moves(case, "forced") and "noratio" not in case.loss_options,
        replacing(POLICY_GRADIENT, "__call__", _ratio_to_generation),
        "loss=pg+forced masked=none",
    ),
    "second-clip-left-out": Mutation(
        "the objective of a bad answer has no bound",
        lambda case: _seen(case, _second_clip_is_reached, "dual"),
        _built_with(ratio_clip_c=None),
        # the mean of a sequence's logarithms is seldom as large
        ("loss=pg+dual:1.2 masked=none", "loss=pg+dual:1.2+seq masked=none"),
    ),
    "clamp-of-ratios-left-out": Mutation(
        "the logarithm of the ratio is not clamped",
        lambda case: (
            not {"noratio", "forced", "cispo", "dual"} & case.loss_options
            and case.loss_number("ratio-clamp") == 0.3
            and _seen(case, _clamp_of_ratios_is_reached)
        ),
        _built_with(log_ratio_bound=None),
        "loss=pg+ratio-clamp:0.3 masked=none",
    ),
    "importance-weights-left-out": Mutation(
        "tokens are not weighted by how likely they were where they were drawn",
        lambda case: moves(case, "is") and not _TRUNCATIONS & case.loss_options,
        _built_with(use_importance_sampling_correction=False),
        ("loss=pg+is masked=none", "loss=pg+is+seq+gspo masked=none", "loss=pg+is+cispo masked=none"),
    ),
    "importance-weights-not-bounded": Mutation(
        "importance weights are not truncated",
        lambda case: bool({"tis", "icepop"} & case.loss_options) and _seen(case, _weights_leave_their_bounds, "is"),
        replacing(POLICY_GRADIENT, "_bounded", lambda original: lambda self, weight, log_weights, mask: weight),
        ("loss=pg+is+tis masked=none", "loss=pg+is+icepop masked=none", "loss=pg+is+icepop:none:1.15 masked=none"),
    ),
    "sequences-not-bounded": Mutation(
        "sequences whose importance weights are out of bounds are kept",
        lambda case: _seen(case, _weights_leave_their_bounds, "is", "seq-mask"),
        replacing(POLICY_GRADIENT, "_bounded", lambda original: lambda self, weight, log_weights, mask: weight),
        ("loss=pg+is+seq-mask masked=none", "loss=pg+is+seq-mask:none:1.05 masked=none"),
    ),
    "importance-weights-of-tokens-for-sequences": Mutation(
        "each token has its own importance weight where that of its sequence should be",
        lambda case: _of_sequences(case, "is"),
        replacing(POLICY_GRADIENT, "_of_level", _weights_of_tokens),
        ("loss=pg+is+seq+gspo masked=none", "loss=pg+is+seq+gspo-token masked=none"),
    ),
    "tokens-left-out-for-sequences": Mutation(
        "tokens out of bounds are left out, not their whole sequences",
        lambda case: _seen(case, _tokens_judged_otherwise, "is", "seq-mask"),
        _built_with(truncation="icepop"),
        "loss=pg+is+seq-mask masked=none",
    ),
    "weights-clamped-for-left-out": Mutation(
        "importance weights out of bounds are those at the bound, not 0",
        lambda case: _seen(case, _weights_leave_their_bounds, "is", "icepop"),
        _built_with(truncation="tis"),
        "loss=pg+is+icepop masked=none",
    ),
    "mean-over-tokens-for-sequences": Mutation(
        "the mean over tokens stands where that over sequences should",
        lambda case: moves(case, "seq") and not {"constant", *SEQUENCES} & case.loss_options and _has_sequences_of_several_lengths(case),
        replacing(POLICY_GRADIENT, "__init__", _with_means_over_tokens),
        "loss=pg+seq masked=some",
    ),
    "constant-normaliser-left-out": Mutation(
        "the sum over a sequence is divided by the number of its tokens, not by the constant",
        lambda case: _seen(case, lambda step: _other_lengths_than(step, case.loss_number("constant")), "seq", "constant"),
        _built_with(sequence_normalizer=None),
        ("loss=pg+seq+constant masked=none", "loss=pg+seq+constant+cispo masked=none"),
    ),
    "loss-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens or sequences, not by those of the global batch",
        lambda case: moves(case) and in_several_micro_batches(case),
        replacing(POLICY_GRADIENT, "__call__", normalised_by_micro_batch),
        tuple(
            f"{line} batching=fixed micro=2"
            for line in (*_EACH_LOSS, "loss=pg+cispo masked=none", "loss=pg+forced masked=none", "loss=pg+noratio masked=none")
        ),
    ),
    "entropy-normalised-a-micro-batch": Mutation(
        "of the entropy bonus alone, a micro-batch is divided by its own tokens",
        lambda case: has_entropies(case) and in_several_micro_batches(case),
        replacing(POLICY_GRADIENT, "__call__", _entropies_normalised_by_micro_batch),
        "loss=pg+entropy batching=fixed micro=2 masked=none",
    ),
    "entropy-without-gradient": Mutation(
        "the entropy bonus is a constant",
        has_entropies,
        replacing(POLICY_GRADIENT, "__call__", _entropies_without_gradient),
        ("loss=pg+entropy masked=none", "loss=pg+entropy+seq masked=none"),
    ),
    "divergence-pathwise": Mutation(
        "the gradient of the divergence lacks its score function's part",
        lambda case: _has_divergence(case) and not {"k2", "pathwise"} & case.loss_options,
        _built_with(exact_kl_gradient=False),
        ("loss=pg+kl masked=none", "loss=pg+kl+k1 masked=none", "loss=pg+kl+approx masked=none"),
    ),
    "divergence-with-a-score-function": Mutation(
        "the gradient of the divergence has the score function's part where it should not",
        lambda case: _has_divergence(case) and bool({"k2", "pathwise"} & case.loss_options),
        replacing(POLICY_GRADIENT, "_kl", _with_score_function),
        ("loss=pg+kl+k2 masked=none", "loss=pg+kl+pathwise masked=none"),
    ),
    "divergence-without-gradient": Mutation(
        "the divergence is a constant",
        _has_divergence,
        replacing(POLICY_GRADIENT, "_kl", _divergence_without_gradient),
        tuple(f"loss=pg+kl{kind} masked=none" for kind in ("", "+k1", "+k2", "+pathwise", "+approx")),
    ),
    "divergence-reversed": Mutation(
        "the divergence is that of the reference from the policy",
        # the value and the gradient of k2 are those of both
        lambda case: _has_divergence(case) and "k2" not in case.loss_options,
        replacing(
            LOSSES,
            "calculate_kl",
            lambda original: lambda policy, reference, *settings: original(reference, policy, *settings),
        ),
        ("loss=pg+kl masked=none", "loss=pg+kl+k1 masked=none"),
    ),
    "divergence-of-another-kind": Mutation(
        "the divergence is estimated by k3, whatever was asked for",
        lambda case: _has_divergence(case) and bool({"k1", "k2"} & case.loss_options),
        _built_with(kl_type="k3"),
        ("loss=pg+kl+k1 masked=none", "loss=pg+kl+k2 masked=none"),
    ),
    "clamp-of-differences-left-out": Mutation(
        "the difference of log-probabilities in the divergence is not clamped",
        lambda case: (
            case.loss_number("kl-output-clamp") != 0.06
            and "in-reward" not in case.loss_options
            and _seen(case, _clamp_of_differences_is_reached, "kl", "kl-input-clamp")
        ),
        _built_with(kl_input_bound=None),
        "loss=pg+kl+kl-input-clamp:0.3 masked=none",
    ),
    "clamp-of-estimates-left-out": Mutation(
        "the divergence of a token is not clamped",
        lambda case: "in-reward" not in case.loss_options and _seen(case, _clamp_of_estimates_is_reached, "kl", "kl-output-clamp"),
        _built_with(kl_output_bound=None),
        tuple(f"loss=pg+kl{kind}+kl-output-clamp:0.06 masked=none" for kind in ("", "+k1", "+k2")),
    ),
    "ratio-of-tokens-for-sequences": Mutation(
        "each token has its own ratio where that of its sequence should be",
        _of_sequences,
        _built_with(sequence_level_ratios=False, ratio_has_token_gradient=False),
        ("loss=pg+seq+gspo masked=none", "loss=pg+seq+gspo-token masked=none"),
    ),
    "ratio-of-sequences-not-averaged": Mutation(
        "the ratio of a sequence is that of its whole probability, not the geometric mean of its tokens",
        _of_sequences,
        replacing(LOSSES, "_row_sums", lambda original: lambda values, mask, average: original(values, mask, average=False)),
        ("loss=pg+seq+gspo masked=none", "loss=pg+seq+gspo-token masked=none"),
    ),
    "gradient-of-tokens-for-sequences": Mutation(
        "the ratio of a sequence has the gradients of its tokens",
        lambda case: _of_sequences(case, "gspo") and _seen(case, _several_advantages_in_a_sequence),
        _built_with(ratio_has_token_gradient=True),
        "loss=pg+seq+gspo masked=none",
    ),
    "gradient-of-sequences-for-tokens": Mutation(
        "the ratio of a token has the gradient of its sequence",
        lambda case: _of_sequences(case, "gspo-token") and _seen(case, _several_advantages_in_a_sequence),
        _built_with(ratio_has_token_gradient=False),
        "loss=pg+seq+gspo-token masked=none",
    ),
    "cispo-weight-with-gradient": Mutation(
        "the clipped ratio that weighs the log-probability has a gradient of its own",
        lambda case: _follows(case, "cispo"),
        replacing(POLICY_GRADIENT, "_objective", _weight_with_gradient),
        ("loss=pg+cispo masked=none", "loss=pg+cispo+seq masked=none"),
    ),
    "advantages-negated": Mutation(
        "bad answers are reinforced",
        moves,
        with_data(POLICY_GRADIENT, lambda data: {"advantages": -data["advantages"]}),
        (*_EACH_LOSS, "loss=pg+cispo masked=none"),
    ),
}
"""The faults by name."""
