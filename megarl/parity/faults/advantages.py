"""Known faults of what a driver makes of a step: advantages of rewards, of values, and of a teacher's log-probabilities."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from megarl.parity.batches import first_step, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.faults.losses import POLICY_GRADIENT, moves
from megarl.parity.faults.patching import Mutation, Patch, built_otherwise, replacing, replacing_for

ADVANTAGES = "megarl.algorithms.advantages"
DISTILLATION = "megarl.algorithms.distillation:Distillation"


def _made(case: Case, *kinds: str, clipped: bool = False) -> bool:
    """Whether advantages, or returns, are made of several answers that count, and then read by tokens with a gradient; clipped ones, which
    may be the same whatever they were before, where they are asked for."""
    if "clip" in case.advantages_options and not clipped:
        return False
    if case.advantages_kind not in kinds or case.masked != "none" or case.global_batch < 6 or case.length < 8:
        return False
    return case.loss_kind == "value" or moves(case)


def _has(case: Case, *options: str) -> bool:
    return set(options) <= case.advantages_options


def _made_by(case: Case) -> torch.Tensor:
    """[B, S-1] what is made of the first step of a policy gradient, 0 where nothing counts; it depends on no model."""
    data = first_step(case, with_signals(case, token_batch(case), torch.zeros(case.total_rows, case.length)))
    return (data["advantages"] * data["token_mask"] * data["sample_mask"][:, None])[:, 1:]


def _otherwise(change: Callable[[Case], Case]) -> Callable[[Case], bool]:
    """Whether what is made of a case is clearly something else than of a changed case."""

    def differs(case: Case) -> bool:
        return bool((_made_by(case) - _made_by(change(case))).abs().max() > 1e-2)

    return differs


def _without(option: str) -> Callable[[Case], Case]:
    def change(case: Case) -> Case:
        kind, *words = case.advantages.split("+")
        return replace(case, advantages="+".join([kind, *(word for word in words if word.partition(":")[0] != option)]))

    return change


def _whitened_by_rank(original: Any, case: Case) -> Any:
    def by_rank(values: torch.Tensor, mask: torch.Tensor) -> Any:
        shares = zip(values.chunk(case.dp), mask.chunk(case.dp), strict=True)
        return torch.cat([original(share, of_share) for share, of_share in shares])

    return by_rank


def _compared_in_sum(original: Any) -> Any:
    """One reward, the sum of all, in the place of each by itself."""

    def advantages(prompts: Any, parts: Any, weights: Any, *settings: Any) -> Any:
        total = sum(weights.get(name, 1.0) * values for name, values in parts.items())
        return original(prompts, {"all": total, "none": torch.zeros_like(total)}, {}, *settings)

    return advantages


def _with_settings(name: str, **changes: Any) -> Patch:
    """A function of advantages is called with other settings, each by its name."""

    def make(original: Any) -> Any:
        signature = inspect.signature(original)

        def call(*given: Any, **named: Any) -> Any:
            bound = signature.bind(*given, **named)
            bound.arguments.update(changes)
            return original(*bound.args, **bound.kwargs)

        return call

    return replacing(ADVANTAGES, name, make)


def _at_every_token(original: Any) -> Any:
    def rewards(rewards: torch.Tensor, mask: torch.Tensor, token_penalties: Any = None) -> torch.Tensor:
        found: torch.Tensor = original(rewards, mask, token_penalties)
        found = found + torch.where(mask != 0, rewards.double()[:, None], 0.0) - original(rewards, mask)
        return found

    return rewards


def _from_policy_to_teacher(original: Any) -> Any:
    def advantages(self: Any, batch: Any, teacher_logprobs: torch.Tensor) -> Any:
        turned = {**batch, "prev_logprobs": teacher_logprobs}
        return original(self, turned, batch["prev_logprobs"])

    return advantages


def _some_are(case: Case, *, cut_off: bool) -> bool:
    """Whether in the first step answers with tokens are cut off, or are not."""
    data = first_step(case, with_signals(case, token_batch(case), torch.zeros(case.total_rows, case.length)))
    answers = (data["token_mask"][:, 1:].sum(1) > 0) & (data["sample_mask"] != 0)
    return bool((answers & (data["truncated"] == cut_off)).any())


def _all_cut_off(original: Any) -> Any:
    def advantages(self: Any, samples: Any, batch: Any) -> Any:
        return original(self, {**samples, "truncated": torch.ones_like(samples["truncated"])}, batch)

    return advantages


_VALUES = ("loss=pg advantages=gae masked=none", "loss=value advantages=gae masked=none")
"""Advantages for an actor, returns for a critic."""

FAULTS: dict[str, Mutation] = {
    "whitened-by-rank": Mutation(
        "advantages are whitened over the rows of a data-parallel rank",
        lambda case: (
            (
                _made(case, "reinforce", "reinforce-baseline", "gdpo")
                or (_made(case, "gae") and _has(case, "white") and case.loss_kind == "pg")
            )
            and case.dp >= 2
        ),
        replacing_for(ADVANTAGES, "whitened", _whitened_by_rank),
        tuple(f"loss=pg advantages={kind} masked=none dp=2" for kind in ("reinforce", "reinforce-baseline", "gdpo", "gae+white")),
    ),
    "answers-of-all-prompts-compared": Mutation(
        "an answer is compared with those of all prompts",
        lambda case: _made(case, "grpo", "rloo", "gdpo", "reinforce-baseline"),
        replacing(
            ADVANTAGES,
            "_groups",
            lambda original: lambda prompts, rewards, valid_mask: torch.zeros_like(original(prompts, rewards, valid_mask)),
        ),
        tuple(f"loss=pg advantages={kind} masked=none" for kind in ("grpo", "rloo", "gdpo", "reinforce-baseline")),
    ),
    "own-reward-in-the-baseline": Mutation(
        "the baseline of an answer is the mean of all answers to its prompt, its own among them",
        # GDPO whitens the factor of n / (n - 1) away that this is
        lambda case: _made(case, "grpo", "rloo") and not _has(case, "plain"),
        _with_settings("group_advantages", leave_one_out_baseline=False),
        ("loss=pg advantages=rloo masked=none", "loss=pg advantages=grpo masked=none"),
    ),
    "own-reward-not-in-the-baseline": Mutation(
        "the baseline of an answer is the mean of the others where it should be that of all",
        lambda case: _made(case, "grpo") and _has(case, "plain"),
        _with_settings("group_advantages", leave_one_out_baseline=True),
        "loss=pg advantages=grpo+plain masked=none",
    ),
    "rewards-divided-by-deviations": Mutation(
        "advantages are divided by the deviation of their group where they should not be",
        lambda case: _made(case, "grpo", "gdpo") and _has(case, "raw"),
        _with_settings("group_advantages", normalize_rewards=True),
        ("loss=pg advantages=grpo+raw masked=none", "loss=pg advantages=gdpo+raw masked=none"),
    ),
    "deviations-of-the-population": Mutation(
        "the deviation of a group is that of a population where it should be that of a sample",
        lambda case: _made(case, "grpo") and _has(case, "sample"),
        _with_settings("group_advantages", std="population"),
        "loss=pg advantages=grpo+sample masked=none",
    ),
    "rewards-summed-before-they-are-compared": Mutation(
        "GDPO's rewards are summed, and the sum is compared",
        # where nothing is divided by deviations, the sum of the comparisons is the comparison of the sum
        lambda case: _made(case, "gdpo") and not _has(case, "raw"),
        replacing(ADVANTAGES, "gdpo_advantages", _compared_in_sum),
        "loss=pg advantages=gdpo masked=none",
    ),
    "clip-of-advantages-left-out": Mutation(
        "advantages are not clipped",
        lambda case: (
            _made(case, "grpo", "rloo", "gdpo", "reinforce", "reinforce-baseline", "teacher", clipped=True)
            and _has(case, "clip")
            and _otherwise(_without("clip"))(case)
        ),
        replacing(ADVANTAGES, "clipped", lambda original: lambda advantages, low, high: advantages),
        ("loss=pg advantages=grpo+clip masked=none", "loss=pg advantages=teacher+clip masked=none"),
    ),
    "divergence-of-one-token-in-the-return": Mutation(
        "the return of a token has its own divergence alone, not that of the later ones",
        lambda case: _made(case, "reinforce", "reinforce-baseline") and case.takes_divergence_from_rewards,
        replacing(ADVANTAGES, "_to_the_end", lambda original: lambda penalties: penalties),
        "loss=pg+kl+k1+in-reward advantages=reinforce masked=none",
    ),
    "divergence-in-the-loss-for-the-reward": Mutation(
        "the divergence is in the loss where it should be taken from the rewards",
        lambda case: _made(case, "grpo", "rloo", "reinforce", "reinforce-baseline", "gae") and case.takes_divergence_from_rewards,
        built_otherwise(POLICY_GRADIENT, use_kl_in_reward=False),
        tuple(f"loss=pg+kl+k1+in-reward advantages={kind} masked=none" for kind in ("grpo", "reinforce", "gae")),
    ),
    "value-of-the-next-state-left-out": Mutation(
        "the error of a value does not have the value of the state behind the token",
        lambda case: _made(case, "gae"),
        _with_settings("generalized_advantages", discount=0.0),
        _VALUES,
    ),
    "rewards-to-the-end-for-lambda": Mutation(
        "advantages are those of lambda = 1",
        lambda case: _made(case, "gae") and "lambda:1" not in case.advantages,
        _with_settings("generalized_advantages", gae_lambda=1.0),
        _VALUES,
    ),
    "reward-at-every-token": Mutation(
        "the reward of an answer stands at each of its tokens",
        lambda case: _made(case, "gae"),
        replacing(ADVANTAGES, "rewards_of_tokens", _at_every_token),
        _VALUES,
    ),
    "state-behind-the-token": Mutation(
        "the value of the state before a token is what the critic says behind it",
        lambda case: _made(case, "gae"),
        replacing(ADVANTAGES, "values_before", lambda original: lambda values: values),
        _VALUES,
    ),
    "cut-off-is-ended": Mutation(
        "the state behind an answer that was cut off is worth nothing where it should be worth what the critic says",
        lambda case: _made(case, "gae") and _has(case, "bootstrap") and _some_are(case, cut_off=True),
        _with_settings("generalized_advantages", after_end=None),
        tuple(line.replace("gae", "gae+bootstrap") for line in _VALUES),
    ),
    "ended-is-cut-off": Mutation(
        "the state behind every answer is worth what the critic says, also where it ended",
        lambda case: _made(case, "gae") and _has(case, "bootstrap") and _some_are(case, cut_off=False),
        replacing("megarl.algorithms.ppo:PPO", "_advantages", _all_cut_off),
        tuple(line.replace("gae", "gae+bootstrap") for line in _VALUES),
    ),
    "teacher-and-policy-exchanged": Mutation(
        "the advantage of a token is how much more likely the policy finds it than the teacher",
        lambda case: _made(case, "teacher"),
        replacing(DISTILLATION, "_advantages", _from_policy_to_teacher),
        "loss=pg advantages=teacher masked=none",
    ),
}
"""The faults by name."""
