"""Known faults of losses of preferences, and of the negative log-likelihood."""

from __future__ import annotations

from typing import Any

import torch

from megarl.parity.batches import token_batch
from megarl.parity.case import Case
from megarl.parity.faults.patching import (
    Mutation,
    built_otherwise,
    in_several_micro_batches,
    many_tokens,
    normalised_by_micro_batch,
    replacing,
    with_data,
)

LOSSES = "megarl.algorithms.loss_functions"
PREFERENCES = f"{LOSSES}:DPOLossFn"
_BOTH = ("loss=dpo masked=none", "loss=dpo+ipo masked=none")


def _compares(case: Case, *options: str) -> bool:
    """Whether answers are compared, and in every step a pair with tokens counts."""
    return case.loss_kind == "dpo" and set(options) <= case.loss_options and many_tokens(case)


def _has_pairs_of_long_answers(case: Case) -> bool:
    """Whether in every step a pair counts whose answers have several tokens each, and not equally many."""
    batch = token_batch(case)
    tokens = (batch["token_mask"][:, 1:].sum(1) * batch["sample_mask"]).view(case.steps, -1, 2)
    return bool(((tokens >= 2).all(2) & (tokens[..., 0] != tokens[..., 1])).any(1).all())


def _rejected_for_chosen(original: Any) -> Any:
    def call(
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, next_token_logprobs: torch.Tensor
    ) -> Any:
        turned = torch.arange(len(next_token_logprobs)).view(-1, 2).flip(1).flatten()
        swapped = {key: value[turned] for key, value in data.items() if isinstance(value, torch.Tensor)}
        return original(self, swapped, global_valid_seqs, global_valid_toks, next_token_logprobs[turned])

    return call


def _reference_with_gradient(original: Any) -> Any:
    def call(
        self: Any, data: Any, global_valid_seqs: torch.Tensor, global_valid_toks: torch.Tensor, next_token_logprobs: torch.Tensor
    ) -> Any:
        moves = torch.nn.functional.pad(next_token_logprobs - next_token_logprobs.detach(), (0, 1))
        moved = {**data, "reference_policy_logprobs": data["reference_policy_logprobs"] + moves}
        return original(self, moved, global_valid_seqs, global_valid_toks, next_token_logprobs)

    return call


FAULTS: dict[str, Mutation] = {
    "preference-without-reference": Mutation(
        "rewards of preferences are not those above the reference's",
        _compares,
        with_data(PREFERENCES, lambda data: {"reference_policy_logprobs": torch.zeros_like(data["reference_policy_logprobs"])}),
        _BOTH,
    ),
    "rejected-for-chosen": Mutation(
        "the worse answer is preferred",
        _compares,
        replacing(PREFERENCES, "__call__", _rejected_for_chosen),
        _BOTH,
    ),
    "reference-with-gradient": Mutation(
        "the reference's log-probabilities move with the policy's: they are not detached",
        _compares,
        replacing(PREFERENCES, "__call__", _reference_with_gradient),
        _BOTH,
    ),
    "preference-normalised-a-micro-batch": Mutation(
        "the pairs of a micro-batch are divided by their own number, not by that of the global batch",
        lambda case: _compares(case) and in_several_micro_batches(case),
        replacing(PREFERENCES, "__call__", normalised_by_micro_batch),
        tuple(f"{line} batching=fixed micro=2" for line in (*_BOTH, "loss=dpo+mean masked=none")),
    ),
    "rewards-not-averaged": Mutation(
        "an answer's reward is the sum over its tokens where it should be their mean",
        lambda case: _compares(case, "mean") and _has_pairs_of_long_answers(case),
        built_otherwise(PREFERENCES, preference_average_log_probs=False),
        ("loss=dpo+mean masked=none", "loss=dpo+ipo+mean masked=none"),
    ),
    "likelihood-not-averaged": Mutation(
        "the likelihood of a chosen answer is the sum over its tokens where it should be their mean",
        lambda case: _compares(case, "sft", "sft-mean") and _has_pairs_of_long_answers(case),
        built_otherwise(PREFERENCES, sft_average_log_probs=False),
        "loss=dpo+sft+sft-mean masked=none",
    ),
    "sigmoid-for-ipo": Mutation(
        "the logarithm of DPO stands where IPO's square should",
        lambda case: _compares(case, "ipo"),
        built_otherwise(PREFERENCES, is_ipo=False),
        "loss=dpo+ipo masked=none",
    ),
    "beta-left-out": Mutation(
        "beta is 1, whatever was asked for",
        lambda case: _compares(case) and case.loss_number("beta") != 1.0,
        built_otherwise(PREFERENCES, beta=1.0),
        _BOTH,
    ),
    "weight-of-preferences-left-out": Mutation(
        "the preference loss counts once, whatever its weight",
        lambda case: _compares(case) and case.loss_number("weight") != 1.0,
        built_otherwise(PREFERENCES, preference_loss_weight=1.0),
        "loss=dpo+weight:0.5 masked=none",
    ),
    "likelihood-of-chosen-left-out": Mutation(
        "the likelihood of the chosen answers is not in the loss",
        lambda case: _compares(case, "sft"),
        built_otherwise(PREFERENCES, sft_loss_weight=0.0),
        ("loss=dpo+sft masked=none", "loss=dpo+ipo+sft masked=none"),
    ),
    "likelihood-of-the-prompt": Mutation(
        "the mask of tokens is off by one",
        lambda case: case.loss_kind == "nll" and case.masked == "some" and many_tokens(case),
        with_data(f"{LOSSES}:NLLLoss", lambda data: {"token_mask": data["token_mask"].roll(1, dims=1)}),
        "loss=nll masked=some",
    ),
    "likelihood-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens, not by those of the global batch",
        lambda case: case.loss_kind == "nll" and many_tokens(case) and in_several_micro_batches(case),
        replacing(f"{LOSSES}:NLLLoss", "__call__", normalised_by_micro_batch),
        "loss=nll batching=fixed micro=2 masked=none",
    ),
}
"""The faults by name."""
