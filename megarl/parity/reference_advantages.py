"""Reference implementation of advantages, computed row by row or token by token from the papers, without code
of the driver.

GRPO (arXiv 2402.03300), RLOO (2402.14740), GDPO (2601.05242), REINFORCE++ (2501.03262), generalized advantage
estimation (1506.02438, equation 16), and MOPD for a teacher (2601.02780, equation 8).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.parity.case import Case
from megarl.parity.options import numbers_of

PART_WEIGHTS = {"one": 0.6, "other": 0.02}
"""Weight of each reward component (GDPO)."""
Columns = Mapping[str, Tensor]


def reference_signals(case: Case, data: Columns) -> dict[str, Tensor]:
    """Return the training signals of one call, computed from rewards, values or the teacher's
    log-probabilities.

    These are ``advantages`` [B, S], or ``prev_values`` and ``returns`` [B, S] for a value loss; all float32.
    """
    # Compute in float64, so that rounding errors of the reference do not count against the driver.
    found = torch.zeros(data["token_mask"].shape, dtype=torch.float64)
    if case.advantages_kind == "gae":
        return _generalized(case, data)
    if case.advantages_kind == "teacher":
        for row, places in _answers(data).items():
            apart = data["teacher_logprobs"][row].double() - data["prev_logprobs"][row].double()
            found[row, places] = apart[places]
    elif case.advantages_kind.startswith("reinforce"):
        _of_returns(case, data, found)
    else:
        compared = _of_groups(case, data)
        for row in _answers(data):
            found[row] = compared[row]
    return {"advantages": _between(case, found).float()}


def _answers(data: Columns, which: str = "sample_mask") -> dict[int, list[int]]:
    """Return the positions of response tokens for each row that is trained on; with ``which="rewarded"``, for
    each row that has a reward."""
    places: dict[int, list[int]] = {}
    for row, counts in enumerate(data[which]):
        if float(counts) != 0:
            places[row] = data["token_mask"][row].nonzero().squeeze(1).tolist()
    return places


def _penalties(case: Case, data: Columns, row: int, places: Sequence[int]) -> dict[int, float]:
    """Return the KL penalty that ``in-reward`` subtracts from the reward of each token: the coefficient times
    the k1 estimate, with the clamps of the loss."""
    if not case.takes_divergence_from_rewards:
        return dict.fromkeys(places, 0.0)
    bounds = case.loss_number("kl-input-clamp"), case.loss_number("kl-output-clamp")
    weight, found = case.loss_number("kl"), {}
    assert weight is not None
    for place in places:
        apart = float(data["prev_logprobs"][row, place]) - float(
            data["reference_policy_logprobs"][row, place]
        )
        for bound in bounds:
            if bound is not None:
                apart = max(-bound, min(bound, apart))
        found[place] = weight * apart
    return found


def _between(case: Case, advantages: Tensor) -> Tensor:
    if "clip" not in case.advantages_options:
        return advantages
    low, high = _numbers(case, "clip")
    return advantages.clamp(-math.inf if low is None else low, math.inf if high is None else high)


def _numbers(case: Case, option: str) -> tuple[float | None, ...]:
    return numbers_of(case.advantages, option)


def _of_groups(case: Case, data: Columns) -> dict[int, float]:
    """Return one advantage for each row with a reward. Rows without a loss still count in the baselines."""
    answers, options = _answers(data, "rewarded"), case.advantages_options
    if case.advantages_kind == "gdpo":
        total = dict.fromkeys(answers, 0.0)
        for name, weight in PART_WEIGHTS.items():
            rewards = {row: float(data[f"reward/{name}"][row]) for row in answers}
            for row, advantage in _compared(rewards, data, options).items():
                total[row] += weight * advantage
        return dict(zip(total, _standardised(list(total.values())), strict=True))
    rewards = {
        row: float(data["reward"][row]) - sum(_penalties(case, data, row, places).values())
        for row, places in answers.items()
    }
    return _compared(rewards, data, options if case.advantages_kind == "grpo" else {"raw"})


def _compared(rewards: Mapping[int, float], data: Columns, options: Any) -> dict[int, float]:
    """Return each row's reward minus a baseline, which is the mean reward of the other responses to its
    prompt (with ``plain``, of all of them).

    Unless the options include ``raw``, the difference is divided by the standard deviation of the prompt's
    rewards.
    """
    values = {}
    for row in rewards:
        peers = [rewards[other] for other in rewards if data["prompt"][other] == data["prompt"][row]]
        mean, count = sum(peers) / len(peers), len(peers)
        # A single response has no others to compare with; with the mean as baseline its advantage is 0.
        baseline = mean if "plain" in options or count == 1 else (sum(peers) - rewards[row]) / (count - 1)
        squares = sum((peer - mean) ** 2 for peer in peers)
        deviation = (squares / max(count - ("sample" in options), 1)) ** 0.5
        above = rewards[row] - baseline
        values[row] = above if "raw" in options else above / deviation if deviation else 0.0
    return values


def _of_returns(case: Case, data: Columns, found: Tensor) -> None:
    """Write REINFORCE++ advantages into ``found``: the reward minus the KL penalties of this token and of all
    later ones, whitened over all tokens.

    ``reinforce-baseline`` first subtracts the mean reward of the prompt.
    """
    places_of, returns = [], []
    for row, places in _answers(data).items():
        reward, penalties = float(data["reward"][row]), _penalties(case, data, row, places)
        if case.advantages_kind == "reinforce-baseline":
            peers = [
                float(data["reward"][other])
                for other in _answers(data, "rewarded")
                if data["prompt"][other] == data["prompt"][row]
            ]
            reward -= sum(peers) / len(peers)
        for place in places:
            places_of.append((row, place))
            returns.append(reward - sum(penalties[later] for later in places if later >= place))
    for (row, place), value in zip(places_of, _standardised(returns), strict=True):
        found[row, place] = value


def _generalized(case: Case, data: Columns) -> dict[str, Tensor]:
    """Compute equation 16 of generalized advantage estimation literally: each advantage is the discounted sum
    of all later temporal-difference errors."""
    advantages = torch.zeros(data["token_mask"].shape, dtype=torch.float64)
    before, returns = torch.zeros_like(advantages), torch.zeros_like(advantages)
    (gamma,), (trace,) = _numbers(case, "gamma"), _numbers(case, "lambda")
    assert gamma is not None and trace is not None
    for row, places in _answers(data).items():
        if not places:
            continue
        said = data["values"][row].double()
        # The value of the state before a token is the output at the previous position.
        values = [float(said[place - 1]) if place else 0.0 for place in places]
        cut = "bootstrap" in case.advantages_options and bool(data["truncated"][row])
        # A truncated response would go on, so with ``bootstrap`` its last value stands for the missing rest.
        following = [*values[1:], float(said[int(data["input_lengths"][row]) - 1]) if cut else 0.0]
        penalties, errors = _penalties(case, data, row, places), list[float]()
        for place, value, after in zip(places, values, following, strict=True):
            reward = -penalties[place]
            if place == places[-1]:
                reward += float(data["reward"][row])
            errors.append(reward + gamma * after - value)
        for number, place in enumerate(places):
            later = enumerate(errors[number:])
            advantages[row, place] = sum((gamma * trace) ** distance * error for distance, error in later)
            before[row, place] = values[number]
            returns[row, place] = advantages[row, place] + values[number]
    if case.loss_kind == "value":
        return {"prev_values": before.float(), "returns": returns.float()}
    if "white" in case.advantages_options:
        counted = (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]
        whitened = _standardised(advantages[counted].tolist())
        advantages[counted] = torch.tensor(whitened, dtype=torch.float64)
    return {"advantages": advantages.float()}


def _standardised(values: list[float]) -> list[float]:
    """Return the values minus their mean, divided by their standard deviation; zeros if all values are
    equal."""
    mean = sum(values) / max(len(values), 1)
    deviation = (sum((value - mean) ** 2 for value in values) / max(len(values), 1)) ** 0.5
    # Equal values may differ by rounding; do not divide by that deviation.
    return [(value - mean) / deviation if deviation > 1e-6 * max(1.0, abs(mean)) else 0.0 for value in values]
