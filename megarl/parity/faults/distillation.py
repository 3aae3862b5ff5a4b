"""Known faults of the most likely tokens, and of the divergence from a teacher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megarl.algorithms.distillation_loss import TOPK_INDICES, TOPK_LOGITS
from megarl.parity.case import Case
from megarl.parity.faults.patching import Mutation, Patch, many_tokens, replacing, sees_tokens

LOSS = "megarl.algorithms.distillation_loss"
ENGINE = "megarl.models.engine"


def _learns(case: Case, *options: str) -> bool:
    """Whether a policy learns from a teacher, at several tokens of every step."""
    return case.loss_kind == "distill" and set(options) <= case.loss_options and many_tokens(case)


def _is_asked(case: Case) -> bool:
    """Whether most likely tokens are asked for behind some token."""
    return case.likeliest > 0 and case.rows == 0 and sees_tokens(case)


def _with_data(change: Callable[[Any], dict[str, torch.Tensor]]) -> Patch:
    """The loss reads other data than it is given."""
    return replacing(
        f"{LOSS}:DistillationLossFn",
        "__call__",
        lambda original: lambda self, data, *given, **named: original(self, {**data, **change(data)}, *given, **named),
    )


def _of_own_tokens(original: Any) -> Any:
    def call(self: Any, data: Any, sequences: torch.Tensor, tokens: torch.Tensor, *given: torch.Tensor, **named: torch.Tensor) -> Any:
        own = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        return original(self, data, sequences, own, *given, **named)

    return call


def _alone(original: Any) -> Any:
    return lambda logits, tokens, shard, *rest: original(logits, tokens, replace(shard, group=None), *rest)


def _behind(original: Any) -> Any:
    return lambda self, rows: original(self, rows.roll(-1, dims=1))


def _gradient_off_the_target(original: Any) -> Any:
    """What the softmax takes from all columns for a further token comes off the target alone."""

    def gradient(
        logits: Any, targets: Any, shard: Any, temperature: Any, sums: Any, grad: Any, entropies: Any, further: Any = None, **rest: Any
    ) -> Any:
        if further is None:
            return original(logits, targets, shard, temperature, sums, grad, entropies, **rest)
        # whose weight is put on in its own column, and taken off in all
        return original(logits, targets, shard, temperature, sums, grad - further[1].sum(dim=1), entropies, further, **rest)

    return gradient


FAULTS: dict[str, Mutation] = {
    "likeliest-of-own-vocabulary": Mutation(
        "each tensor-parallel rank takes the most likely tokens of the vocabulary that it holds",
        lambda case: case.tp > 1 and _is_asked(case),
        replacing(f"{ENGINE}.topk", "_gathered", lambda original: lambda candidates, shard: candidates),
        "loss=distill tp=2 masked=none",
    ),
    "likeliest-at-another-temperature": Mutation(
        "the most likely tokens are scored without the temperature",
        lambda case: case.temperature != 1.0 and _is_asked(case),
        replacing(
            f"{ENGINE}.worker",
            "topk_of_batch",
            lambda original: lambda *given, sampling, **options: original(*given, sampling=replace(sampling, temperature=1.0), **options),
        ),
        "loss=distill temperature=0.7 masked=none",
    ),
    "teachers-tokens-of-other-ranks-left-out": Mutation(
        "logits of a teacher's tokens that another tensor-parallel rank holds count as 0",
        # an output layer that computes in chunks has the function under a name of its own
        lambda case: case.tp > 1 and case.chunk == 0 and _learns(case),
        replacing(f"{ENGINE}.logprobs", "score_further", _alone),
        "loss=distill tp=2 masked=none",
    ),
    "teachers-tokens-of-the-next-position": Mutation(
        "the policy is asked for the teacher's tokens of one position later",
        _learns,
        replacing(f"{ENGINE}.model_input:ModelInput", "of_tokens", _behind),
        "loss=distill masked=none",
    ),
    "teachers-columns-shifted": Mutation(
        "the teacher's log-probabilities are those of the token before",
        _learns,
        _with_data(lambda data: {TOPK_LOGITS: data[TOPK_LOGITS].roll(1, dims=1), TOPK_INDICES: data[TOPK_INDICES]}),
        "loss=distill masked=none",
    ),
    "divergence-the-other-way-round": Mutation(
        "the divergence is that of the teacher from the policy, and the reverse",
        _learns,
        replacing(LOSS, "_divergence", lambda original: lambda one, other: original(other, one)),
        "loss=distill masked=none",
    ),
    "other-tokens-left-out": Mutation(
        "the probability of all tokens that are not the teacher's is left out, and nothing is renormalised",
        lambda case: _learns(case) and "renorm" not in case.loss_options,
        replacing(f"{LOSS}:DistillationLossFn", "_outcomes", lambda original: lambda self, logarithms: logarithms),
        "loss=distill masked=none",
    ),
    "divergence-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens, not by those of the global batch",
        lambda case: _learns(case) and case.batching == "fixed" and case.micro >= 2,
        replacing(f"{LOSS}:DistillationLossFn", "__call__", _of_own_tokens),
        "loss=distill batching=fixed micro=2 masked=none",
    ),
    "teachers-gradient-off-the-sampled-token": Mutation(
        "what a teacher's token gains comes off the sampled token, not off all tokens",
        lambda case: _learns(case) and case.chunk == 0,
        replacing(f"{ENGINE}.logprobs", "gradient_of_logits", _gradient_off_the_target),
        "loss=distill masked=none",
    ),
}
"""The faults by name."""
