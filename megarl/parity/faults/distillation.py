"""Known faults of the most likely tokens, and of the divergence from a teacher."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megarl.algorithms.distillation_loss import TOPK_INDICES, TOPK_LOGITS
from megarl.parity.case import Case
from megarl.parity.faults.patching import (
    Mutation,
    built_otherwise,
    in_several_micro_batches,
    many_tokens,
    normalised_by_micro_batch,
    replacing,
    sees_tokens,
    with_data,
)

LOSS = "megarl.algorithms.distillation_loss"
ENGINE = "megarl.models.engine"


def _learns(case: Case, *options: str) -> bool:
    """Whether a policy learns from a teacher, at several tokens of every step."""
    return case.loss_kind == "distill" and set(options) <= case.loss_options and many_tokens(case)


def _is_asked(case: Case) -> bool:
    """Whether most likely tokens are asked for behind some token."""
    return case.likeliest > 0 and case.rows == 0 and sees_tokens(case)


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


def _weights_detached(original: Any) -> Any:
    """Of a sum of Q (log Q - log P) the factor Q is a constant, as if tokens had been drawn by it."""

    def divergence(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = original(one, other)
        by_weights: torch.Tensor = one.exp() * (one - other).detach()
        return found - (by_weights - by_weights.detach()).sum(-1)

    return divergence


def _rest_detached(original: Any) -> Any:
    def outcomes(self: Any, logarithms: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = original(self, logarithms)
        return torch.cat([found[..., :-1], found[..., -1:].detach()], dim=-1) if self.has_rest else found

    return outcomes


def _normaliser_detached(original: Any) -> Any:
    def outcomes(self: Any, logarithms: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = original(self, logarithms)
        return found if self.has_rest else found.detach() + (logarithms - logarithms.detach())

    return outcomes


def _mixed_the_other_way_round(original: Any) -> Any:
    def init(self: Any, *given: Any) -> None:
        original(self, *given)
        self.forward_weight = 1 - self.forward_weight

    return init


_EACH = tuple(f"loss=distill{options} masked=none" for options in ("", "+forward", "+mixed", "+renorm", "+renorm+forward"))

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
        with_data(
            f"{LOSS}:DistillationLossFn", lambda data: {TOPK_LOGITS: data[TOPK_LOGITS].roll(1, dims=1), TOPK_INDICES: data[TOPK_INDICES]}
        ),
        _EACH,
    ),
    "divergence-the-other-way-round": Mutation(
        "the divergence is that of the teacher from the policy, and the reverse",
        _learns,
        replacing(LOSS, "_divergence", lambda original: lambda one, other: original(other, one)),
        _EACH,
    ),
    "other-tokens-left-out": Mutation(
        "the probability of all tokens that are not the teacher's is left out, and nothing is renormalised",
        lambda case: _learns(case) and "renorm" not in case.loss_options,
        replacing(f"{LOSS}:DistillationLossFn", "_outcomes", lambda original: lambda self, logarithms: logarithms),
        tuple(line for line in _EACH if "renorm" not in line),
    ),
    "divergence-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens, not by those of the global batch",
        lambda case: _learns(case) and in_several_micro_batches(case),
        replacing(f"{LOSS}:DistillationLossFn", "__call__", normalised_by_micro_batch),
        tuple(f"{line} batching=fixed micro=2" for line in _EACH),
    ),
    "weights-of-the-divergence-detached": Mutation(
        "the policy's probabilities are constants where they weigh the divergence",
        # of the forward divergence they are the teacher's, which are constants
        lambda case: _learns(case) and "forward" not in case.loss_options,
        replacing(LOSS, "_divergence", _weights_detached),
        tuple(line for line in _EACH if "forward" not in line),
    ),
    "rest-of-the-divergence-detached": Mutation(
        "the probability of all tokens that are not the teacher's is a constant",
        lambda case: _learns(case) and "renorm" not in case.loss_options,
        replacing(f"{LOSS}:DistillationLossFn", "_outcomes", _rest_detached),
        tuple(line for line in _EACH if "renorm" not in line),
    ),
    "probability-of-the-teachers-tokens-detached": Mutation(
        "the probability of the teacher's tokens together, which each of them is divided by, is a constant",
        lambda case: _learns(case, "renorm"),
        replacing(f"{LOSS}:DistillationLossFn", "_outcomes", _normaliser_detached),
        tuple(line for line in _EACH if "renorm" in line),
    ),
    "tokens-outside-are-not-left-out": Mutation(
        "all other tokens are one outcome where they should be left out",
        lambda case: _learns(case, "renorm"),
        built_otherwise(f"{LOSS}:DistillationLossFn", has_rest=True),
        "loss=distill+renorm masked=none",
    ),
    "mixed-the-other-way-round": Mutation(
        "the weight of the forward divergence is that of the reverse one",
        lambda case: _learns(case, "mixed"),
        replacing(f"{LOSS}:DistillationLossFn", "__init__", _mixed_the_other_way_round),
        "loss=distill+mixed masked=none",
    ),
    "teachers-gradient-off-the-sampled-token": Mutation(
        "what a teacher's token gains comes off the sampled token, not off all tokens",
        # over the teacher's tokens alone, what they gain adds up to 0, whomever it comes off
        lambda case: _learns(case) and case.chunk == 0 and "renorm" not in case.loss_options,
        replacing(f"{ENGINE}.logprobs", "gradient_of_logits", _gradient_off_the_target),
        "loss=distill masked=none",
    ),
}
"""The faults by name."""
