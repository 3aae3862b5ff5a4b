"""Known faults of the losses: a formula with one thing in it that is not the paper's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megarl.parity.case import Case
from megarl.parity.faults.patching import Mutation, Patch, many_tokens, replacing

LOSSES = "megarl.algorithms.loss_functions"


def _with_data(loss: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patch:
    """The loss reads other data than it is given."""
    return replacing(
        f"{LOSSES}:{loss}",
        "__call__",
        lambda original: lambda self, data, *normalizers, **given: original(self, {**data, **change(dict(data))}, *normalizers, **given),
    )


def _built_with(**changes: Any) -> Patch:
    """The clipped policy gradient is built from other settings."""

    def make(original: Any) -> Any:
        def init(self: Any, config: Any) -> None:
            original(self, {**config, **changes})

        return init

    return replacing(f"{LOSSES}:ClippedPGLossFn", "__init__", make)


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
    return bool({"gspo", "gspo-token"} & case.loss_options) and many_tokens(case) and case.length >= 10 and case.global_batch >= 4


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
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, next_token_logprobs: torch.Tensor
    ) -> Any:
        rows = data["sample_mask"].sum().to(global_valid_seqs)
        tokens = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum().to(global_valid_toks)
        return original(self, data, rows, tokens, next_token_logprobs)

    return call


FAULTS: dict[str, Mutation] = {
    "ratio-to-generation": Mutation(
        "the ratio is to the log-probabilities of generation, not to those before the update",
        _has_ratios,
        _with_data("ClippedPGLossFn", lambda data: {"prev_logprobs": data["generation_logprobs"]}),
        "loss=pg masked=none",
    ),
    "ratio-not-clipped": Mutation(
        "the ratio is not clipped",
        lambda case: _has_ratios(case) and case.global_batch >= 4,
        replacing(f"{LOSSES}:ClippedPGLossFn", "_ratios", _not_clipped),
        "loss=pg masked=none",
    ),
    "importance-weights-left-out": Mutation(
        "tokens are not weighted by how likely they were where they were drawn",
        lambda case: _is_clipped(case, "is"),
        _built_with(use_importance_sampling_correction=False),
        "loss=pg+is masked=none",
    ),
    "importance-weights-not-bounded": Mutation(
        "importance weights are not truncated",
        lambda case: _is_clipped(case, "is") and bool({"tis", "icepop"} & case.loss_options) and case.global_batch >= 4,
        replacing(f"{LOSSES}:ClippedPGLossFn", "_bounded", lambda original: lambda self, weight, log_weights, mask: weight),
        "loss=pg+is+tis masked=none",
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
        lambda case: _is_clipped(case, "seq"),
        _built_with(token_level_loss=True),
        "loss=pg+seq masked=some",
    ),
    "divergence-pathwise": Mutation(
        "the gradient of the divergence lacks its score function's part",
        lambda case: _is_clipped(case, "kl"),
        _built_with(reference_policy_kl_gradient="pathwise"),
        "loss=pg+kl masked=none",
    ),
    "divergence-reversed": Mutation(
        "the divergence is that of the reference from the policy",
        lambda case: _is_clipped(case, "kl"),
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
        "loss=pg+gspo masked=none",
    ),
    "ratio-of-sequences-not-averaged": Mutation(
        "the ratio of a sequence is that of its whole probability, not the geometric mean of its tokens",
        _of_sequences,
        replacing(LOSSES, "_row_sums", lambda original: lambda values, mask, average: original(values, mask, average=False)),
        "loss=pg+gspo masked=none",
    ),
    "gradient-of-tokens-for-sequences": Mutation(
        "the ratio of a sequence has the gradients of its tokens",
        lambda case: "gspo" in case.loss_options and "cispo" not in case.loss_options and _of_sequences(case),
        _built_with(sequence_level_ratio_gradient="token"),
        "loss=pg+gspo masked=none",
    ),
    "gradient-of-sequences-for-tokens": Mutation(
        "the ratio of a token has the gradient of its sequence",
        lambda case: "gspo-token" in case.loss_options and _of_sequences(case),
        _built_with(sequence_level_ratio_gradient="sequence"),
        "loss=pg+gspo-token masked=none",
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
    "likelihood-of-the-prompt": Mutation(
        "the mask of tokens is off by one",
        lambda case: case.loss_kind == "nll" and case.masked == "some" and many_tokens(case),
        _with_data("NLLLoss", lambda data: {"token_mask": data["token_mask"].roll(1, dims=1)}),
        "loss=nll masked=some",
    ),
}
"""The faults by name."""
