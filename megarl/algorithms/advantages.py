"""Advantages: how much better a response, or a token of it, is than others. They are computed from all
samples of
a step at once, so on the driver."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from megarl.config.losses import ESTIMATOR, ESTIMATORS
from megarl.errors import BatchError
from megarl.import_path import load_object

PART = "reward/"
"""Prefix of the names of columns and metrics of the parts of a reward."""
# Bound below which rewards count as equal: relative to the mean, some twenty units in the last place of a
# float32 reward; absolute, the rounding that is left when parts of size 1 cancel.
_ROUNDING = 1e-6


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the mean and the standard deviation of the rewards of responses to the same prompt.

    Rows with equal prompts form a group. Only valid rows count. With ``leave_one_out_baseline`` a row's own
    reward is left out of its baseline and deviation, which makes the baseline independent of the row's action
    (Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019). A row that no other
    (leave-one-out) or no (plain mean) valid row can be compared with gets its own reward as the baseline, so
    that its advantage is 0, and deviation 0.

    Args:
        prompts: [B, P] int, padded in the same way within a group.
        rewards: [B] float.
        valid_mask: [B], 1 for rows that count.
        leave_one_out_baseline: see above.

    Returns:
        (baseline, std), both [B] in the dtype of the rewards; std is the population deviation (divided by n).

    Raises:
        BatchError: the shapes do not fit.
    """
    return _baseline_and_std(
        _groups(prompts, rewards, valid_mask), rewards, valid_mask, leave_one_out_baseline
    )


def _baseline_and_std(
    group: Tensor, rewards: Tensor, valid_mask: Tensor, leave_one_out_baseline: bool
) -> tuple[Tensor, Tensor]:
    """Return the result of ``calculate_baseline_and_std_per_prompt``, given the number of each row's group,
    [B] int64."""
    # Compute in float64 throughout, because the result is divided by differences of nearly equal rewards.
    valid = (valid_mask != 0).double()
    # Use where instead of a product: the reward of an invalid row may be NaN.
    values = torch.where(valid != 0, rewards.double(), 0.0)

    count = _group_sums(valid, group)
    # Sums of squares of centred values keep the digits that squares of large rewards would lose.
    centre = _group_sums(values, group) / count.clamp(min=1)
    centred = (values - centre) * valid
    own_count, own = (
        (valid, centred) if leave_one_out_baseline else (torch.zeros_like(valid), torch.zeros_like(centred))
    )
    # Rows without others are divided by 1 here, and get their own reward as the baseline below.
    others = count - own_count
    mean = (_group_sums(centred, group) - own) / others.clamp(min=1)
    mean_square = (_group_sums(centred.square(), group) - own.square()) / others.clamp(min=1)
    std = (mean_square - mean.square()).clamp(min=0).sqrt()

    compared = others > 0
    baseline = torch.where(compared, (mean + centre).to(rewards.dtype), rewards)
    return baseline, torch.where(compared, std, 0.0).to(rewards.dtype)


def group_advantages(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool,
    normalize_rewards: bool,
    std: Literal["population", "sample"] = "population",
) -> Tensor:
    """Return each reward minus its group's baseline, [B], optionally divided by the group's standard
    deviation (GRPO, arXiv 2402.03300).

    The deviation is that of the whole group even when the baseline leaves the row out: with n responses no
    advantage then exceeds n / sqrt(n - 1), whereas the deviation of the others is 0 whenever they agree.
    Groups whose rewards differ by rounding only, and invalid rows, get 0. ``std`` divides the squares by n
    (``population``) or by n - 1 (``sample``).
    """
    group = _groups(prompts, rewards, valid_mask)
    baseline, _ = _baseline_and_std(group, rewards, valid_mask, leave_one_out_baseline)
    group_mean, deviation = _baseline_and_std(group, rewards, valid_mask, leave_one_out_baseline=False)
    # The rewards of a group that agrees may differ from their mean by rounding only; dividing that by itself
    # would turn noise into an advantage.
    agreed = _agreed(deviation, group_mean)
    # Mask by torch.where instead of a product: the reward of an invalid row may be NaN, and NaN * 0 is NaN.
    advantages = torch.where(valid_mask == 0, 0.0, rewards - baseline)
    if not normalize_rewards:
        return advantages
    if std == "sample":
        count = _group_sums((valid_mask != 0).to(rewards.dtype), group)
        deviation = deviation * (count / (count - 1).clamp(min=1)).sqrt()
    return torch.where(agreed, 0.0, advantages / torch.where(agreed, 1.0, deviation))


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """The input of an advantage estimator: all samples of a step, B responses of S positions with their
    prompts.

    Attributes:
        settings: a ``GRPOConfig``; ``settings["adv_estimator"]["options"]`` has the keys of a custom
            estimator.
        groups: [B] int64, the same number for responses to the same prompt.
        rewards: [B] float.
        compared: [B], 1 for responses whose reward counts in the statistics of their group, 0 if masked; a
            response that counts may still be left out of training, and then has 0 in ``mask``.
        mask: [B, S], 1 for tokens that are trained on: sampled by the policy, in responses that count.
        penalties: [B, S] float, subtracted from the rewards, 0 at tokens that do not count; None for none.
        parts: [B] float of each of several rewards by name, without its weight; NaN for a response that has
            no such reward.
        weights: of the parts, by name.
    """

    settings: Mapping[str, Any]
    groups: Tensor
    rewards: Tensor
    compared: Tensor
    mask: Tensor
    penalties: Tensor | None
    parts: Mapping[str, Tensor]
    weights: Mapping[str, float]

    @property
    def net_rewards(self) -> Tensor:
        """Rewards [B] minus the penalties of all tokens."""
        return self.rewards if self.penalties is None else self.rewards - self.penalties.sum(dim=1)


Estimator: TypeAlias = Callable[[AdvantageInputs], Tensor]
"""A function that returns advantages [B] of responses, or [B, S] of tokens. Those of samples that are not
trained on are set to 0 afterwards."""


def estimated_advantages(
    settings: Mapping[str, Any],
    samples: Mapping[str, Any],
    sample_mask: Tensor,
    token_penalties: Tensor | None = None,
    reward_weights: Mapping[str, float] | None = None,
    estimator: Estimator | None = None,
) -> Tensor:
    """Return the advantages of a step's samples, [B, 1], or [B, S] if they differ within a response, in the
    dtype of the rewards; 0 where nothing counts.

    Args:
        settings: a ``GRPOConfig``: ``adv_estimator`` and the keys that it reads.
        samples: all samples of the step, see ``megarl.rollout.collector.Rollouts``.
        sample_mask: [B], 1 for rows that are trained on. Other rows of ``samples`` count only in their
            groups.
        token_penalties: [B, S] float, subtracted from the rewards, 0 at tokens that do not count; None for
            none.
        reward_weights: of the parts of the reward, ``reward/NAME``, by name; ``env_reward_weight`` for the
            others, which environments of one's own return.
        estimator: the estimator named in ``settings``, if it has been loaded already.

    Raises:
        BatchError: a custom estimator returned a wrong result.
    """
    parts, weights = _parts_by_name(samples), reward_weights or {}
    inputs = AdvantageInputs(
        settings,
        _groups(samples["prompt_ids"], samples["reward"], samples["sample_mask"]),
        samples["reward"],
        samples["sample_mask"],
        samples["token_mask"] * sample_mask.unsqueeze(1),
        token_penalties,
        parts,
        {name: weights[name] if name in weights else settings["env_reward_weight"] for name in parts},
    )
    name = settings["adv_estimator"]["name"]
    estimate = estimator or estimator_of(name)
    # Built-in estimators change no input, so only a user's estimator gets a copy of all columns.
    found = (
        estimate(inputs) if name in ESTIMATORS else _checked(estimate(copy.deepcopy(inputs)), inputs, name)
    )
    by_token = found.unsqueeze(1) if found.ndim == 1 else found
    return torch.where((sample_mask.unsqueeze(1) if found.ndim == 1 else inputs.mask) == 0, 0.0, by_token).to(
        inputs.rewards.dtype
    )


def _parts_by_name(samples: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the rewards of all environments by their own names.

    A named environment adds columns ``reward/ENV``, its total, and ``reward/ENV/NAME``. The total of parts is
    none of them, and rewards of one name are one reward, which each response gets from its environment.
    """
    columns = {name.removeprefix(PART): values for name, values in samples.items() if name.startswith(PART)}
    totals = {name.partition("/")[0] for name in columns if "/" in name}
    parts: dict[str, Tensor] = {}
    for column, values in columns.items():
        if column in totals:
            continue
        name = column.rpartition("/")[2]
        parts[name] = torch.where(parts[name].isnan(), values, parts[name]) if name in parts else values
    return parts


def estimator_of(name: str, key: str = ESTIMATOR) -> Estimator:
    """Return the estimator of a name or import path.

    Raises:
        ConfigError: nothing can be imported under that name.
    """
    found: Estimator = _ESTIMATORS[name] if name in _ESTIMATORS else load_object(name, key)
    return found


def _checked(found: Any, inputs: AdvantageInputs, name: str) -> Tensor:
    """Check the advantages that a custom estimator returned, and return them with 0 at tokens that are not
    trained on."""
    shapes = [inputs.mask.shape[:1], inputs.mask.shape]
    if not isinstance(found, Tensor) or found.shape not in shapes:
        kind = f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        raise BatchError(
            f"{name} returned {kind}. Fix: return advantages of responses {list(shapes[0])} or of tokens "
            f"{list(shapes[1])}"
        )
    if found.is_complex() or found.layout is not torch.strided:
        raise BatchError(
            f"{name} returned a tensor of {found.dtype} and {found.layout}. Fix: return dense real numbers"
        )
    # Convert to the dtype of training first, because the values may overflow in it.
    found = found.detach().to(inputs.rewards.dtype)
    counts = inputs.mask.any(dim=1) if found.ndim == 1 else inputs.mask != 0
    wrong = int((counts & ~found.isfinite()).sum())
    if wrong:
        raise BatchError(
            f"{name} returned {wrong} advantages that are not finite. Nothing was trained on them. Fix: "
            "return finite numbers"
        )
    return torch.where(counts, found, 0.0)


def _grpo(inputs: AdvantageInputs) -> Tensor:
    settings = inputs.settings
    leave_one_out, normalize = settings["use_leave_one_out_baseline"], settings["normalize_rewards"]
    return group_advantages(
        inputs.groups.unsqueeze(1),
        inputs.net_rewards,
        inputs.compared,
        leave_one_out,
        normalize,
        settings["std"],
    )


def _rloo(inputs: AdvantageInputs) -> Tensor:
    # RLOO (arXiv 2402.14740) subtracts the mean of the others, and does not divide by a deviation.
    return group_advantages(
        inputs.groups.unsqueeze(1),
        inputs.net_rewards,
        inputs.compared,
        leave_one_out_baseline=True,
        normalize_rewards=False,
    )


def _gdpo(inputs: AdvantageInputs) -> Tensor:
    settings = inputs.settings
    leave_one_out, normalize = settings["use_leave_one_out_baseline"], settings["normalize_rewards"]
    found = gdpo_advantages(
        inputs.groups.unsqueeze(1),
        inputs.parts,
        inputs.weights,
        inputs.compared,
        leave_one_out,
        normalize,
        settings["std"],
    )
    return found.to(inputs.rewards.dtype)


def _reinforce_plus_plus(inputs: AdvantageInputs) -> Tensor:
    compared = inputs.compared if inputs.settings["adv_estimator"]["minus_baseline"] else None
    return reinforce_plus_plus_advantages(
        inputs.groups.unsqueeze(1), inputs.rewards, inputs.mask, compared, inputs.penalties
    )


_ESTIMATORS: Mapping[str, Estimator] = MappingProxyType(
    {"grpo": _grpo, "rloo": _rloo, "gdpo": _gdpo, "reinforce_plus_plus": _reinforce_plus_plus}
)


def gdpo_advantages(
    prompts: Tensor,
    parts: Mapping[str, Tensor],
    weights: Mapping[str, float],
    valid_mask: Tensor,
    leave_one_out_baseline: bool,
    normalize_rewards: bool,
    std: Literal["population", "sample"] = "population",
) -> Tensor:
    """Return advantages [B] of several rewards, each compared within the group by itself (GDPO, arXiv
    2601.05242).

    The advantages of each reward (``group_advantages``) are summed with its weight, and the sum is whitened
    over all valid rows. So a reward of another size, or one that is equal for all responses to a prompt,
    hides none of the others.

    Args:
        prompts: [B, P] int, padded in the same way within a group.
        parts: [B] float of each reward, without its weight; NaN for a row that has no such reward.
        weights: of each reward; 1 for a reward without one.
        valid_mask: [B], 1 for rows that count.
        leave_one_out_baseline, normalize_rewards, std: as for ``group_advantages``.

    Raises:
        BatchError: there are fewer than two rewards, or shapes do not fit.
    """
    if len(parts) < 2:
        bound = "GDPO compares each of several rewards separately, but the samples have"
        raise BatchError(
            f"{bound} {sorted(parts) or 'none'}. Fix: name several under env.rewards, or choose "
            "another adv_estimator"
        )
    total = torch.zeros_like(valid_mask, dtype=torch.float64)
    for name, rewards in parts.items():
        # A row that lacks a reward is left out of its group for that reward alone.
        has_part = (valid_mask != 0) & ~rewards.isnan()
        known = torch.where(has_part, rewards, 0.0).double()
        compared = group_advantages(
            prompts, known, has_part.double(), leave_one_out_baseline, normalize_rewards, std
        )
        total += weights.get(name, 1.0) * compared
    return whitened(total, valid_mask)


def reinforce_plus_plus_advantages(
    prompts: Tensor,
    rewards: Tensor,
    mask: Tensor,
    compared: Tensor | None = None,
    token_penalties: Tensor | None = None,
) -> Tensor:
    """Return advantages of tokens, [B, S] float64 (REINFORCE++, arXiv 2501.03262).

    The return of a token is the reward of its response minus the penalties of this and all later tokens that
    count. All returns are whitened together, over the valid tokens of all given rows.

    Args:
        prompts: [B, P] int, padded in the same way within a group; read only with ``compared``.
        rewards: [B] float.
        mask: [B, S], 1 for tokens that count: of valid rows, sampled by the policy.
        compared: [B], 1 for rows whose rewards make up the mean of their prompt, which is subtracted first
            (REINFORCE++-baseline); these may be more rows than are trained on. None for no baseline.
        token_penalties: [B, S] float, for example of a divergence from the reference policy; None for none.
            Read only under the mask.
    """
    counts = mask != 0
    values = rewards.double()
    if compared is not None:
        values = (
            values
            - _baseline_and_std(
                _groups(prompts, values, compared), values, compared, leave_one_out_baseline=False
            )[0]
        )
    # A row in which nothing counts may have a reward that is NaN.
    values = torch.where(counts.any(dim=1), values, 0.0)
    returns = values[:, None].expand(mask.shape)
    if token_penalties is not None:
        penalties = torch.where(counts, token_penalties, 0.0).double()
        returns = returns - _to_the_end(penalties)
    return whitened(returns, mask)


def generalized_advantages(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    *,
    discount: float,
    gae_lambda: float,
    after_end: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return advantages and returns of tokens, both [B, S] float64 (generalized advantage estimation, arXiv
    1506.02438, equation 16).

    A row's counted tokens form one sequence, whatever is between them: an environment's observation is not an
    action. For the k-th of them, with its reward r and the value v of the state before it::

        d_k = r_k + discount v_{k+1} - v_k
        A_k = d_k + discount gae_lambda A_{k+1},  0 after the last one
        return_k = A_k + v_k

    Args:
        rewards: [B, S] float, column t of token t; read only under the mask, as all other inputs.
        values: [B, S] float, column t of the state before token t (``values_before``).
        mask: [B, S], not 0 for tokens that the policy sampled, in valid rows.
        discount, gae_lambda: in [0, 1].
        after_end: [B] float, the value of the state after the last token, for truncated rows; None for 0.

    Returns:
        Advantages and returns; 0 where nothing counts.
    """
    counts = mask != 0
    rewards = torch.where(counts, rewards, 0.0).double()
    values = torch.where(counts, values, 0.0).double()
    advantages = torch.zeros_like(values)
    advantage = values.new_zeros(len(values))
    value = advantage if after_end is None else after_end.double()
    # Go backwards, because each token needs the values of the tokens after it; positions that do not count
    # pass both numbers on.
    for token in reversed(range(values.shape[1])):
        here = counts[:, token]
        change = rewards[:, token] + discount * value - values[:, token]
        advantage = torch.where(here, change + discount * gae_lambda * advantage, advantage)
        value = torch.where(here, values[:, token], value)
        advantages[:, token] = torch.where(here, advantage, 0.0)
    return advantages, torch.where(counts, advantages + values, 0.0)


def rewards_of_tokens(rewards: Tensor, mask: Tensor, token_penalties: Tensor | None = None) -> Tensor:
    """Return [B, S] float64: the reward of a response at the last of its counted tokens, minus each token's
    own penalty; 0 elsewhere.

    Args:
        rewards: [B] float, read in rows in which something counts.
        mask: [B, S], not 0 for tokens that count.
        token_penalties: [B, S] float, read under the mask; None for none.
    """
    counts = mask != 0
    # Number of counted tokens from here to the end: 1 at the last one that counts.
    behind = _to_the_end(counts.long())
    found = torch.where(counts & (behind == 1), rewards.double()[:, None], 0.0)
    return found if token_penalties is None else found - torch.where(counts, token_penalties.double(), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the entries under a mask: 1 for a critic that is
    always correct, 0 for one that knows only the mean of the returns. Return 0 too if all returns are equal,
    so that there is no variance to explain."""
    counts = mask != 0
    found, said = returns[counts].double(), values[counts].double()
    if not len(found) or agree(found):
        return 0.0
    return float(1 - (found - said).var(correction=0) / found.var(correction=0))


def values_before(values: Tensor) -> Tensor:
    """Return [B, S] whose column t is the value of the state before token t, from a model's value at each
    token, [B, S]; column 0 is 0."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def _to_the_end(penalties: Tensor) -> Tensor:
    """Return the sum of each token's value and those of all later ones, [B, S]."""
    return penalties.flip(1).cumsum(1).flip(1)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Return values under a mask minus their mean, divided by their population deviation, in float64; 0
    elsewhere.

    Mean and deviation are those of all given values, so a share of a batch gives other results. Values that
    differ by rounding only give 0.

    Args:
        values: any shape, float; read only under the mask.
        mask: the same shape, not 0 for values that count.
    """
    counts = mask != 0
    count = counts.sum().clamp(min=1)
    kept = torch.where(counts, values, 0.0).double()
    mean = kept.sum() / count
    centred = torch.where(counts, kept - mean, 0.0)
    deviation = (centred.square().sum() / count).sqrt()
    agreed = _agreed(deviation, mean)
    return torch.where(agreed, 0.0, centred / torch.where(agreed, 1.0, deviation))


def clipped(advantages: Tensor, low: float | None, high: float | None) -> Tensor:
    """Clip advantages to bounds; None is no bound."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def agree(values: Tensor) -> bool:
    """Return whether numbers [n] differ by rounding only, so that none of a group of such rewards has an
    advantage."""
    values = values.double()
    return bool(_agreed(values.std(correction=0), values.mean()))


def _agreed(deviation: Tensor, mean: Tensor) -> Tensor:
    """Return whether values with this deviation and mean differ by rounding only."""
    return deviation <= _ROUNDING * mean.abs().clamp(min=1.0)


def _groups(prompts: Tensor, rewards: Tensor, valid_mask: Tensor) -> Tensor:
    """Return the number of each row's group, [B] int64: rows with equal prompts [B, P] form one. Shapes that
    do not fit raise BatchError."""
    if prompts.ndim != 2 or rewards.shape != prompts.shape[:1] or valid_mask.shape != rewards.shape:
        raise BatchError(
            f"prompts {list(prompts.shape)}, rewards {list(rewards.shape)} and valid_mask "
            f"{list(valid_mask.shape)} "
            "must be [B, P], [B] and [B]. Fix: pass one reward and one mask entry for each row of prompts"
        )
    # torch.unique refuses rows of size 0. Prompts without tokens are all equal, and so form one group.
    if prompts.numel() == 0:
        return torch.zeros(prompts.shape[0], dtype=torch.int64, device=prompts.device)
    # Responses to one prompt are adjacent, so only one prompt of each run is sorted.
    begins = torch.ones(prompts.shape[0], dtype=torch.bool, device=prompts.device)
    begins[1:] = (prompts[1:] != prompts[:-1]).any(dim=1)
    return torch.unique(prompts[begins], dim=0, return_inverse=True)[1][begins.cumsum(0) - 1]


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Return for each row the sum of its group's values, [B]."""
    sums = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=values.dtype, device=values.device)
    return sums.index_add(0, group, values)[group]
