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
    return _is_clipped(case, *options) and not {"noratio", "onpolicy"} & case.loss_options


def _not_clipped(original: Any) -> Any:
    def ratios(self: Any, current: torch.Tensor, previous: torch.Tensor) -> Any:
        ratio, _ = original(self, current, previous)
        return ratio, ratio

    return ratios


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
    "ratio-without-gradient": Mutation(
        "a ratio of exactly 1 is a constant",
        lambda case: _is_clipped(case, "onpolicy") and "noratio" not in case.loss_options,
        replacing(
            f"{LOSSES}:ClippedPGLossFn", "_ratios", lambda original: lambda self, current, previous: original(self, current, current)
        ),
        "loss=pg+onpolicy masked=none",
    ),
    "importance-weights-left-out": Mutation(
        "tokens are not weighted by how likely they were where they were drawn",
        lambda case: _is_clipped(case, "is"),
        _built_with(use_importance_sampling_correction=False),
        "loss=pg+is masked=none",
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
            "calculate_kl_penalty_joschu2020",
            lambda original: lambda policy, reference, *bounds: original(reference, policy, *bounds),
        ),
        "loss=pg+kl masked=none",
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
