"""Known faults of the losses: a formula with one thing in it that is not the paper's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from megarl.parity.batches import first_step, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.faults.patching import Mutation, Patch, many_tokens, replacing, replacing_for
from megarl.parity.losses import TRUNCATIONS, policy_gradient_settings

LOSSES = "megarl.algorithms.loss_functions"


def _with_data(loss: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """The loss reads other data than it is given."""
    return replacing(
        f"{LOSSES}:{loss}",
        "__call__",
        lambda original: lambda self, data, *normalizers, **given: original(self, {**data, **change(dict(data))}, *normalizers, **given),
    )


def _built_with(loss: str = "ClippedPGLossFn", **changes: Any) -> Patch:
    """A loss, the clipped policy gradient where nothing is said, is built from other settings."""

    def make(original: Any) -> Any:
        def init(self: Any, config: Any) -> None:
            original(self, {**config, **changes})

        return init

    return replacing(f"{LOSSES}:{loss}", "__init__", make)


CLEARLY = 1.02
"""How far past a bound a ratio or a weight has to be for the difference to be seen in a sum over tokens."""
_SEQUENCES = frozenset({"gspo", "gspo-token"})


@dataclass(frozen=True)
class _FirstStep:
    """What the first step of a policy gradient reads, up to rounding: it is drawn around the model's own log-probabilities, so that
    differences do not depend on the model.

    Attributes:
        counted: [B, S-1] bool, tokens that count.
        log_ratios: [B, S-1] logarithm of current by previous probability.
        log_weights: [B, S-1] logarithm of previous by generation probability.
        advantages: [B, S-1].
    """

    counted: torch.Tensor
    log_ratios: torch.Tensor
    log_weights: torch.Tensor
    advantages: torch.Tensor

    def of_level(self, logarithms: torch.Tensor, of_sequences: bool) -> torch.Tensor:
        """[B, S-1] what they are the logarithms of; of sequences, the geometric mean of their tokens that count."""
        if of_sequences:
            counts = self.counted.sum(1, keepdim=True).clamp(min=1)
            logarithms = ((logarithms * self.counted).sum(1, keepdim=True) / counts).expand_as(logarithms)
        return torch.exp(logarithms)


def _first_step(case: Case) -> _FirstStep:
    current = torch.zeros(case.total_rows, case.length)
    data = first_step(case, with_signals(case, token_batch(case), current))
    previous, generation = data.get("prev_logprobs", current[: case.global_batch]), data["generation_logprobs"]
    counted = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:] != 0
    return _FirstStep(counted, -previous[:, 1:], (previous - generation)[:, 1:], data["advantages"][:, 1:])


def _weights_leave_their_bounds(case: Case, *kinds: str) -> bool:
    """Whether weights of the first step are clearly out of the bounds of the case's truncation, which is one of ``kinds``."""
    if not _is_clipped(case, "is") or not set(kinds) & case.loss_options:
        return False
    _, high, low = next(TRUNCATIONS[kind] for kind in kinds if kind in case.loss_options)
    step = _first_step(case)
    of_sequences = bool({"seq-mask", *_SEQUENCES} & case.loss_options)
    weights = step.of_level(step.log_weights, of_sequences)
    outside = (weights > CLEARLY * high) | (weights < (low or 0.0) / CLEARLY)
    return bool((outside & step.counted).any())


def _second_clip_is_reached(case: Case) -> bool:
    """Whether the ratio of a token of a bad answer is clearly past the second clip, with ratios of tokens."""
    if not _has_ratios(case, "dual") or _SEQUENCES & case.loss_options:
        return False
    step, bound = _first_step(case), policy_gradient_settings(case)["ratio_clip_c"]
    assert bound is not None
    ratios = step.of_level(step.log_ratios, of_sequences=False)
    return bool(((step.advantages < -0.1) & (ratios > CLEARLY * bound) & step.counted).any())


def _clip_is_reached(case: Case) -> bool:
    """Whether the ratio of a token or a sequence is clearly past the bound that counts for its advantage; with CISPO, any bound."""
    if not _has_ratios(case):
        return False
    step, settings = _first_step(case), policy_gradient_settings(case)
    ratios = step.of_level(step.log_ratios, bool(_SEQUENCES & case.loss_options))
    above, below = ratios > CLEARLY * (1 + settings["ratio_clip_max"]), ratios < (1 - settings["ratio_clip_min"]) / CLEARLY
    if "cispo" in case.loss_options:
        reached = (above | below) & (step.advantages.abs() > 0.1)
    else:
        reached = (above & (step.advantages > 0.1)) | (below & (step.advantages < -0.1))
    return bool((reached & step.counted).any())


def _has_sequences_of_several_lengths(case: Case) -> bool:
    """Whether in some step sequences that count differ in the number of their tokens."""
    batch = token_batch(case)
    tokens, kept = (values.view(case.steps, -1) for values in (batch["token_mask"][:, 1:].sum(1), batch["sample_mask"] != 0))
    return any(len(set(of_step[counts].tolist())) > 1 for of_step, counts in zip(tokens, kept, strict=True))


def _is_clipped(case: Case, *options: str) -> bool:
    return case.loss_kind == "pg" and set(options) <= case.loss_options and many_tokens(case)


def _has_ratios(case: Case, *options: str) -> bool:
    return _is_clipped(case, *options) and not {"noratio", "forced"} & case.loss_options


def _not_clipped(original: Any) -> Any:
    def ratios(self: Any, current: torch.Tensor, previous: torch.Tensor, mask: torch.Tensor) -> Any:
        ratio, _ = original(self, current, previous, mask)
        return ratio, ratio

    return ratios


def _of_sequences(case: Case) -> bool:
    """Whether ratios are those of sequences, of which several surely have more than one token."""
    return bool(_SEQUENCES & case.loss_options) and many_tokens(case) and case.length >= 10 and case.global_batch >= 4


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


def _normalised_by_micro_batch(original: Any) -> Any:
    def call(
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, *scores: torch.Tensor, **named: Any
    ) -> Any:
        rows = data["sample_mask"].sum().to(global_valid_seqs)
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum().to(global_valid_toks)
        return original(self, data, rows, tokens, *scores, **named)

    return call


def _entropies_without_gradient(original: Any) -> Any:
    def call(self: Any, *given: Any, next_token_entropies: torch.Tensor | None = None, **others: Any) -> Any:
        entropies = None if next_token_entropies is None else next_token_entropies.detach()
        return original(self, *given, next_token_entropies=entropies, **others)

    return call


def _rejected_for_chosen(original: Any) -> Any:
    def call(
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, next_token_logprobs: torch.Tensor
    ) -> Any:
        turned = torch.arange(len(next_token_logprobs)).view(-1, 2).flip(1).flatten()
        swapped = {key: value[turned] for key, value in data.items() if isinstance(value, torch.Tensor)}
        return original(self, swapped, global_valid_seqs, global_valid_toks, next_token_logprobs[turned])

    return call


def has_entropies(case: Case) -> bool:
    """Whether the loss has an entropy bonus, of distributions that top-k and top-p leave whole: what these leave may be one token."""
    return _is_clipped(case, "entropy") and not case.filters


def _reference_with_gradient(original: Any) -> Any:
    def call(
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, next_token_logprobs: torch.Tensor
    ) -> Any:
        moves = torch.nn.functional.pad(next_token_logprobs - next_token_logprobs.detach(), (0, 1))
        moved = {**data, "reference_policy_logprobs": data["reference_policy_logprobs"] + moves}
        return original(self, moved, global_valid_seqs, global_valid_toks, next_token_logprobs)

    return call


def _compares(case: Case, *options: str) -> bool:
    """Whether answers are compared, and in every step a pair with tokens counts."""
    return case.loss_kind == "dpo" and set(options) <= case.loss_options and many_tokens(case)


def _has_pairs_of_long_answers(case: Case) -> bool:
    """Whether in every step a pair counts whose answers have several tokens each, and not equally many."""
    batch = token_batch(case)
    tokens = (batch["token_mask"][:, 1:].sum(1) * batch["sample_mask"]).view(case.steps, -1, 2)
    return bool(((tokens >= 2).all(2) & (tokens[..., 0] != tokens[..., 1])).any(1).all())


def _whitened_by_rank(original: Any, case: Case) -> Any:
    def by_rank(values: torch.Tensor, mask: torch.Tensor) -> Any:
        shares = zip(values.chunk(case.dp), mask.chunk(case.dp), strict=True)
        return torch.cat([original(share, of_share) for share, of_share in shares])

    return by_rank


def _of_several(case: Case, *kinds: str) -> bool:
    """Whether advantages are made of the rewards of several answers that count."""
    return case.advantages in kinds and case.masked == "none" and case.global_batch >= 6 and case.length >= 8


FAULTS: dict[str, Mutation] = {
    "whitened-by-rank": Mutation(
        "advantages are whitened over the rows of a data-parallel rank",
        lambda case: _of_several(case, "reinforce", "gdpo") and case.dp >= 2,
        replacing_for("megarl.algorithms.advantages", "whitened", _whitened_by_rank),
        "loss=pg advantages=reinforce masked=none dp=2",
    ),
    "answers-of-all-prompts-compared": Mutation(
        "an answer is compared with those of all prompts",
        lambda case: _of_several(case, "grpo", "rloo", "gdpo", "reinforce-baseline"),
        replacing(
            "megarl.algorithms.advantages",
            "_groups",
            lambda original: lambda prompts, rewards, valid_mask: torch.zeros_like(original(prompts, rewards, valid_mask)),
        ),
        "loss=pg advantages=rloo masked=none",
    ),
    "divergence-of-one-token-in-the-return": Mutation(
        "the return of a token has its own divergence alone, not that of the later ones",
        lambda case: _of_several(case, "reinforce", "reinforce-baseline"),
        replacing("megarl.algorithms.advantages", "_to_the_end", lambda original: lambda penalties: penalties),
        "loss=pg advantages=reinforce masked=none",
    ),
    "ratio-to-generation": Mutation(
        "the ratio is to the log-probabilities of generation, not to those before the update",
        _has_ratios,
        _with_data("ClippedPGLossFn", lambda data: {"prev_logprobs": data["generation_logprobs"]}),
        "loss=pg masked=none",
    ),
    "ratio-not-clipped": Mutation(
        "the ratio is not clipped",
        _clip_is_reached,
        replacing(f"{LOSSES}:ClippedPGLossFn", "_ratios", _not_clipped),
        "loss=pg masked=none",
    ),
    "importance-weights-left-out": Mutation(
        "tokens are not weighted by how likely they were where they were drawn",
        lambda case: _is_clipped(case, "is") and not TRUNCATIONS.keys() & case.loss_options,
        _built_with(use_importance_sampling_correction=False),
        "loss=pg+is masked=none",
    ),
    "importance-weights-not-bounded": Mutation(
        "importance weights are not truncated",
        lambda case: _weights_leave_their_bounds(case, "tis", "icepop"),
        replacing(f"{LOSSES}:ClippedPGLossFn", "_bounded", lambda original: lambda self, weight, log_weights, mask: weight),
        "loss=pg+is+tis masked=none",
    ),
    "sequences-not-bounded": Mutation(
        "sequences whose importance weights are out of bounds are kept",
        lambda case: _weights_leave_their_bounds(case, "seq-mask"),
        replacing(f"{LOSSES}:ClippedPGLossFn", "_bounded", lambda original: lambda self, weight, log_weights, mask: weight),
        "loss=pg+is+seq-mask masked=none",
    ),
    "importance-weights-of-tokens-for-sequences": Mutation(
        "each token has its own importance weight where that of its sequence should be",
        lambda case: _is_clipped(case, "is") and _of_sequences(case),
        replacing(f"{LOSSES}:ClippedPGLossFn", "_of_level", _weights_of_tokens),
        "loss=pg+is+seq+gspo masked=none",
    ),
    "forced-ratio-to-generation": Mutation(
        "the ratio is to the log-probabilities of generation where it should be forced to 1",
        # where importance weights leave tokens or sequences out, they may leave out all
        lambda case: _is_clipped(case, "forced") and not {"noratio", "icepop", "seq-mask"} & case.loss_options,
        replacing(f"{LOSSES}:ClippedPGLossFn", "__call__", _ratio_to_generation),
        "loss=pg+forced masked=none",
    ),
    "second-clip-left-out": Mutation(
        "the objective of a bad answer has no bound",
        _second_clip_is_reached,
        _built_with(ratio_clip_c=None),
        "loss=pg+dual masked=none",
    ),
    "tokens-left-out-for-sequences": Mutation(
        "tokens out of bounds are left out, not their whole sequences",
        lambda case: _is_clipped(case, "is", "seq-mask") and case.global_batch >= 4,
        _built_with(truncated_importance_sampling_type="icepop"),
        "loss=pg+is+seq-mask masked=none",
    ),
    "weights-clamped-for-left-out": Mutation(
        "importance weights out of bounds are those at the bound, not 0",
        lambda case: _is_clipped(case, "is", "icepop") and case.global_batch >= 4,
        _built_with(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio_min=None),
        "loss=pg+is+icepop masked=none",
    ),
    "mean-over-tokens-for-sequences": Mutation(
        "the mean over tokens stands where that over sequences should",
        lambda case: (
            _is_clipped(case, "seq") and not {"constant", *_SEQUENCES} & case.loss_options and _has_sequences_of_several_lengths(case)
        ),
        _built_with(token_level_loss=True),
        "loss=pg+seq masked=some",
    ),
    "divergence-pathwise": Mutation(
        "the gradient of the divergence lacks its score function's part",
        lambda case: _is_clipped(case, "kl") and not {"k1", "k2"} & case.loss_options,
        _built_with(reference_policy_kl_gradient="pathwise"),
        "loss=pg+kl masked=none",
    ),
    "divergence-reversed": Mutation(
        "the divergence is that of the reference from the policy",
        # the value of k2 is that of both
        lambda case: _is_clipped(case, "kl") and "k2" not in case.loss_options,
        replacing(
            LOSSES,
            "calculate_kl",
            lambda original: lambda policy, reference, *settings: original(reference, policy, *settings),
        ),
        "loss=pg+kl masked=none",
    ),
    "ratio-of-tokens-for-sequences": Mutation(
        "each token has its own ratio where that of its sequence should be",
        _of_sequences,
        _built_with(sequence_level_importance_ratios=False, sequence_level_ratio_gradient="sequence"),
        "loss=pg+seq+gspo masked=none",
    ),
    "ratio-of-sequences-not-averaged": Mutation(
        "the ratio of a sequence is that of its whole probability, not the geometric mean of its tokens",
        _of_sequences,
        replacing(LOSSES, "_row_sums", lambda original: lambda values, mask, average: original(values, mask, average=False)),
        "loss=pg+seq+gspo masked=none",
    ),
    "gradient-of-tokens-for-sequences": Mutation(
        "the ratio of a sequence has the gradients of its tokens",
        lambda case: "gspo" in case.loss_options and _of_sequences(case),
        _built_with(sequence_level_ratio_gradient="token"),
        "loss=pg+seq+gspo masked=none",
    ),
    "gradient-of-sequences-for-tokens": Mutation(
        "the ratio of a token has the gradient of its sequence",
        lambda case: "gspo-token" in case.loss_options and _of_sequences(case),
        _built_with(sequence_level_ratio_gradient="sequence"),
        "loss=pg+seq+gspo-token masked=none",
    ),
    "cispo-weight-with-gradient": Mutation(
        "the clipped ratio that weighs the log-probability has a gradient of its own",
        lambda case: _has_ratios(case, "cispo"),
        replacing(f"{LOSSES}:ClippedPGLossFn", "_objective", _weight_with_gradient),
        "loss=pg+cispo masked=none",
    ),
    "ratio-without-gradient": Mutation(
        "the ratio is a constant",
        lambda case: _is_clipped(case) and not {"noratio", "cispo"} & case.loss_options,
        replacing(f"{LOSSES}:ClippedPGLossFn", "_ratios", _ratio_without_gradient),
        "loss=pg masked=none",
    ),
    "constant-normaliser-left-out": Mutation(
        "the sum over a sequence is divided by the number of its tokens, not by the constant",
        lambda case: _is_clipped(case, "seq", "constant"),
        _built_with(sequence_normalizer=None),
        "loss=pg+seq+constant masked=none",
    ),
    "loss-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens or sequences, not by those of the global batch",
        lambda case: _is_clipped(case) and case.batching == "fixed" and case.micro >= 2,
        replacing(f"{LOSSES}:ClippedPGLossFn", "__call__", _normalised_by_micro_batch),
        "loss=pg batching=fixed micro=2 masked=none",
    ),
    "divergence-of-another-kind": Mutation(
        "the divergence is estimated by k3, whatever was asked for",
        lambda case: _is_clipped(case, "kl") and bool({"k1", "k2"} & case.loss_options),
        _built_with(reference_policy_kl_type="k3"),
        "loss=pg+kl+k1 masked=none",
    ),
    "entropy-without-gradient": Mutation(
        "the entropy bonus is a constant",
        has_entropies,
        replacing(f"{LOSSES}:ClippedPGLossFn", "__call__", _entropies_without_gradient),
        "loss=pg+entropy masked=none",
    ),
    "advantages-negated": Mutation(
        "bad answers are reinforced",
        _is_clipped,
        _with_data("ClippedPGLossFn", lambda data: {"advantages": -data["advantages"]}),
        "loss=pg",
    ),
    "preference-without-reference": Mutation(
        "rewards of preferences are not those above the reference's",
        lambda case: case.loss_kind == "dpo" and many_tokens(case),
        _with_data("DPOLossFn", lambda data: {"reference_policy_logprobs": torch.zeros_like(data["reference_policy_logprobs"])}),
        "loss=dpo masked=none",
    ),
    "rejected-for-chosen": Mutation(
        "the worse answer is preferred",
        _compares,
        replacing(f"{LOSSES}:DPOLossFn", "__call__", _rejected_for_chosen),
        "loss=dpo masked=none",
    ),
    "reference-with-gradient": Mutation(
        "the reference's log-probabilities move with the policy's: they are not detached",
        _compares,
        replacing(f"{LOSSES}:DPOLossFn", "__call__", _reference_with_gradient),
        "loss=dpo masked=none",
    ),
    "preference-normalised-a-micro-batch": Mutation(
        "the pairs of a micro-batch are divided by their own number, not by that of the global batch",
        lambda case: _compares(case) and case.batching == "fixed" and case.micro >= 2,
        replacing(f"{LOSSES}:DPOLossFn", "__call__", _normalised_by_micro_batch),
        "loss=dpo batching=fixed micro=2 masked=none",
    ),
    "rewards-not-averaged": Mutation(
        "an answer's reward is the sum over its tokens where it should be their mean",
        lambda case: _compares(case, "mean") and _has_pairs_of_long_answers(case),
        _built_with("DPOLossFn", preference_average_log_probs=False),
        "loss=dpo+mean masked=none",
    ),
    "sigmoid-for-ipo": Mutation(
        "the logarithm of DPO stands where IPO's square should",
        lambda case: _compares(case, "ipo"),
        _built_with("DPOLossFn", preference_loss_type="sigmoid"),
        "loss=dpo+ipo masked=none",
    ),
    "likelihood-of-chosen-left-out": Mutation(
        "the likelihood of the chosen answers is not in the loss",
        lambda case: _compares(case, "sft"),
        _built_with("DPOLossFn", sft_loss_weight=0.0),
        "loss=dpo+sft masked=none",
    ),
    "likelihood-of-the-prompt": Mutation(
        "the mask of tokens is off by one",
        lambda case: case.loss_kind == "nll" and case.masked == "some" and many_tokens(case),
        _with_data("NLLLoss", lambda data: {"token_mask": data["token_mask"].roll(1, dims=1)}),
        "loss=nll masked=some",
    ),
}
"""The faults by name."""
