"""Advantage estimators. An advantage tells how much better a response, or a token of it, is than others. It
depends on all samples of a step, so the driver computes it."""

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
"""Prefix of columns and metrics of a reward part."""
# Rewards whose deviation is below this bound count as equal. Relative to the mean it is about twenty ulp of a
# float32 reward; absolute, it covers the rounding error when parts of size 1 cancel.
_ROUNDING = 1e-6


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the mean and standard deviation of the rewards of responses to the same prompt.

    Rows with equal prompts form a group, and only valid rows count. With ``leave_one_out_baseline``, baseline
    and deviation of a row exclude the row itself, which makes the baseline independent of the row's action
    (Kool et al., "Buy 4 REINFORCE samples, get a baseline for free!", 2019). If no valid row is left for
    comparison, the row's own reward is its baseline (so the advantage is 0), and its deviation is 0.

    Args:
        prompts: [B, P] int, padded the same way within a group.
        rewards: [B] float.
        valid_mask: [B], 1 for valid rows.
        leave_one_out_baseline: see above.

    Returns:
        (baseline, std), both [B] in the dtype of the rewards. std is the population deviation (divided by n).

    Raises:
        BatchError: the shapes do not match.
    """
    return _baseline_and_std(
        _groups(prompts, rewards, valid_mask), rewards, valid_mask, leave_one_out_baseline
    )


def _baseline_and_std(
    group: Tensor, rewards: Tensor, valid_mask: Tensor, leave_one_out_baseline: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``calculate_baseline_and_std_per_prompt`` from the group index of each row, [B] int64."""
    # float64, because advantages divide by differences of nearly equal rewards.
    valid = (valid_mask != 0).double()
    # where, not a product: the reward of an invalid row may be NaN.
    values = torch.where(valid != 0, rewards.double(), 0.0)

    count = _group_sums(valid, group)
    # Centre before squaring, because squares of large rewards would lose digits.
    centre = _group_sums(values, group) / count.clamp(min=1)
    centred = (values - centre) * valid
    own_count, own = (
        (valid, centred) if leave_one_out_baseline else (torch.zeros_like(valid), torch.zeros_like(centred))
    )
    # Rows without others are divided by 1 here; their own reward becomes the baseline below.
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
    """Return the rewards minus their group's baseline, [B], divided by the group's standard deviation if
    ``normalize_rewards`` (GRPO, arXiv 2402.03300).

    The deviation is that of the whole group, even if the baseline leaves the row out. This bounds the
    advantage by n / sqrt(n - 1) for n responses, whereas the deviation of the other responses is 0 whenever
    they agree.

    Advantages are 0 for invalid rows, and for groups whose rewards differ only by rounding.

    Args:
        prompts, rewards, valid_mask, leave_one_out_baseline: see ``calculate_baseline_and_std_per_prompt``.
        normalize_rewards: divide by the standard deviation.
        std: ``population`` divides the squares by n, ``sample`` by n - 1.
    """
    group = _groups(prompts, rewards, valid_mask)
    baseline, _ = _baseline_and_std(group, rewards, valid_mask, leave_one_out_baseline)
    group_mean, deviation = _baseline_and_std(group, rewards, valid_mask, leave_one_out_baseline=False)
    # Equal rewards may differ from their mean by rounding; dividing that by its own deviation would turn
    # noise into advantages.
    agreed = _agreed(deviation, group_mean)
    # where, not a product: the reward of an invalid row may be NaN, and NaN * 0 is NaN.
    advantages = torch.where(valid_mask == 0, 0.0, rewards - baseline)
    if not normalize_rewards:
        return advantages
    if std == "sample":
        count = _group_sums((valid_mask != 0).to(rewards.dtype), group)
        deviation = deviation * (count / (count - 1).clamp(min=1)).sqrt()
    return torch.where(agreed, 0.0, advantages / torch.where(agreed, 1.0, deviation))


@dataclass(frozen=True, slots=True)
class AdvantageInputs:
    """Input of an advantage estimator: all samples of a step, B responses with S positions each (prompts
    included).

    Attributes:
        settings: a ``GRPOConfig``. ``settings["adv_estimator"]["options"]`` holds the options of a
            user-defined estimator.
        groups: [B] int64, equal for responses to the same prompt.
        rewards: [B] float.
        compared: [B], 1 for responses whose reward counts in the statistics of their group, 0 for masked
            ones. A response may count here and still be left out of training; its row of ``mask`` is then 0.
        mask: [B, S], 1 for tokens that are trained on: sampled by the policy, in responses that are trained
            on.
        penalties: [B, S] float, subtracted from the rewards; 0 at tokens that do not count. None for no
            penalties.
        parts: [B] float for each reward part by name, unweighted; NaN for a response without that part.
        weights: weights of the parts, by name.
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
        """Rewards minus the sum of all token penalties, [B]."""
        return self.rewards if self.penalties is None else self.rewards - self.penalties.sum(dim=1)


Estimator: TypeAlias = Callable[[AdvantageInputs], Tensor]
"""Advantage estimator. It returns [B] advantages of responses, or [B, S] advantages of tokens. Those of
samples that are not trained on are then set to 0."""


def estimated_advantages(
    settings: Mapping[str, Any],
    samples: Mapping[str, Tensor],
    sample_mask: Tensor,
    token_penalties: Tensor | None = None,
    reward_weights: Mapping[str, float] | None = None,
    estimator: Estimator | None = None,
) -> Tensor:
    """Compute the advantages of a step's samples: [B, 1], or [B, S] if they differ within a response, in the
    dtype of the rewards. They are 0 at rows and tokens that are not trained on.

    Args:
        settings: a ``GRPOConfig`` with ``adv_estimator``.
        samples: all samples of the step, see ``megarl.rollout.collector.Rollouts``.
        sample_mask: [B], 1 for rows that are trained on. Other rows count only in the statistics of their
            groups.
        token_penalties: [B, S] float, subtracted from the rewards; 0 at tokens that do not count. None for
            none.
        reward_weights: weights of the reward parts (columns ``reward/NAME``) by name. Parts without a weight,
            which user-defined environments may return, get ``env_reward_weight``.
        estimator: the loaded estimator; None loads the one named in ``settings``.

    Raises:
        BatchError: a user-defined estimator returned an invalid result.
    """
    parts, weights = _parts_by_name(samples), reward_weights or {}
    inputs = AdvantageInputs(
        settings,
        _groups(samples["prompt_ids"], samples["reward"], samples["sample_mask"]),
        samples["reward"],
        # The mask before any exclusion from training: excluded responses still count in their groups.
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


def _parts_by_name(samples: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Collect the reward parts of all environments under the names that the environments give them.

    A named environment ENV adds the columns ``reward/ENV`` (its total) and ``reward/ENV/NAME``. The total is
    dropped if there are parts. Parts with the same NAME are merged, since each response has only the parts of
    its own environment.
    """
    columns = {name.removeprefix(PART): values for name, values in samples.items() if name.startswith(PART)}
    totals = {name.partition("/")[0] for name in columns if "/" in name}
    parts: dict[str, Tensor] = {}
    for column, values in columns.items():
        if column in totals:
            continue
        name = column.rpartition("/")[2]
        # A response has a part only from its own environment, so at most one of these columns is not NaN.
        parts[name] = torch.where(parts[name].isnan(), values, parts[name]) if name in parts else values
    return parts


def estimator_of(name: str, key: str = ESTIMATOR) -> Estimator:
    """Return the advantage estimator with this name or import path.

    Raises:
        ConfigError: it cannot be imported.
    """
    found: Estimator = _ESTIMATORS[name] if name in _ESTIMATORS else load_object(name, key)
    return found


def _checked(found: Any, inputs: AdvantageInputs, name: str) -> Tensor:
    """Check the advantages that a user-defined estimator returned. Return them with 0 at tokens that are not
    trained on.

    Raises:
        BatchError: they are no tensor of the right shape, or not finite.
    """
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
    # Check in the dtype of training, in which the values may overflow.
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
    # RLOO (arXiv 2402.14740) subtracts the mean of the other responses, and does not divide by a deviation.
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
    """Return [B] advantages from several rewards, each normalised within the group by itself (GDPO, arXiv
    2601.05242).

    The weighted advantages of all rewards (``group_advantages``) are summed, and the sum is whitened over all
    valid rows. So a reward with a larger scale does not dominate the others, and a reward that is the same
    for all responses to a prompt does not dilute them.

    Args:
        prompts: [B, P] int, padded the same way within a group.
        parts: [B] float for each reward, unweighted; NaN for a row without that reward.
        weights: weight of each reward; 1 if missing.
        valid_mask: [B], 1 for valid rows.
        leave_one_out_baseline, normalize_rewards, std: see ``group_advantages``.

    Raises:
        BatchError: there are fewer than two rewards, or the shapes do not match.
    """
    if len(parts) < 2:
        bound = "GDPO compares each of several rewards separately, but the samples have"
        raise BatchError(
            f"{bound} {sorted(parts) or 'none'}. Fix: name several under env.rewards, or choose "
            "another adv_estimator"
        )
    total = torch.zeros_like(valid_mask, dtype=torch.float64)
    for name, rewards in parts.items():
        # A row that lacks one reward is left out of its group for that reward only.
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
    """Return [B, S] float64 advantages of tokens (REINFORCE++, arXiv 2501.03262).

    The return of a token is the reward of its response minus the penalties of this and all later tokens. All
    returns are whitened together, over the valid tokens of all rows.

    Args:
        prompts: [B, P] int, padded the same way within a group; only read with ``compared``.
        rewards: [B] float.
        mask: [B, S], 1 for valid tokens: sampled by the policy, in valid rows.
        compared: [B], 1 for rows that enter the mean reward of their prompt, which is subtracted first
            (REINFORCE++-baseline). These may be more rows than are trained on. None for no baseline.
        token_penalties: [B, S] float, for example the KL to the reference policy; only read under the mask.
            None for none.
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
    # The reward of a row without valid tokens may be NaN.
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

    The valid tokens of a row form one sequence. Tokens between them, such as an environment's observation,
    are skipped, because they are not actions. For the k-th valid token, with reward r and the value v of the
    state before it::

        d_k = r_k + discount v_{k+1} - v_k
        A_k = d_k + discount gae_lambda A_{k+1},  0 after the last one
        return_k = A_k + v_k

    Args:
        rewards: [B, S] float, column t for token t. Like all inputs, only read under the mask.
        values: [B, S] float, column t for the state before token t (``values_before``).
        mask: [B, S], nonzero for tokens sampled by the policy in valid rows.
        discount, gae_lambda: in [0, 1].
        after_end: [B] float, value of the state after the last token, for truncated rows; None for 0.

    Returns:
        Advantages and returns, 0 at other tokens.
    """
    counts = mask != 0
    rewards = torch.where(counts, rewards, 0.0).double()
    values = torch.where(counts, values, 0.0).double()
    advantages = torch.zeros_like(values)
    advantage = values.new_zeros(len(values))
    value = advantage if after_end is None else after_end.double()
    # Backwards, because each token needs the values of later ones. Invalid positions pass both numbers on.
    for token in reversed(range(values.shape[1])):
        here = counts[:, token]
        change = rewards[:, token] + discount * value - values[:, token]
        advantage = torch.where(here, change + discount * gae_lambda * advantage, advantage)
        value = torch.where(here, values[:, token], value)
        advantages[:, token] = torch.where(here, advantage, 0.0)
    return advantages, torch.where(counts, advantages + values, 0.0)


def rewards_of_tokens(rewards: Tensor, mask: Tensor, token_penalties: Tensor | None = None) -> Tensor:
    """Return [B, S] float64 rewards of tokens: each response's reward at its last valid token, minus each
    token's own penalty.

    Args:
        rewards: [B] float, only read in rows with a valid token.
        mask: [B, S], nonzero for valid tokens.
        token_penalties: [B, S] float, only read under the mask; None for none.
    """
    counts = mask != 0
    # Number of valid tokens from here to the end: 1 at the last valid token.
    behind = _to_the_end(counts.long())
    found = torch.where(counts & (behind == 1), rewards.double()[:, None], 0.0)
    return found if token_penalties is None else found - torch.where(counts, token_penalties.double(), 0.0)


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """Return 1 - Var(returns - values) / Var(returns) over the masked entries. It is 1 for a perfect critic,
    and 0 for one that predicts only the mean. It is also 0 if all returns are equal, because there is no
    variance to explain."""
    counts = mask != 0
    found, said = returns[counts].double(), values[counts].double()
    if not len(found) or agree(found):
        return 0.0
    return float(1 - (found - said).var(correction=0) / found.var(correction=0))


def values_before(values: Tensor) -> Tensor:
    """Shift a model's values at tokens, [B, S], to values of the states before tokens, [B, S]. Column 0 is
    0."""
    return torch.nn.functional.pad(values[:, :-1], (1, 0))


def _to_the_end(penalties: Tensor) -> Tensor:
    """Return the sum of each token's value and all later ones, [B, S]."""
    return penalties.flip(1).cumsum(1).flip(1)


def whitened(values: Tensor, mask: Tensor) -> Tensor:
    """Subtract the mean of the masked values and divide by their population deviation, in float64. Other
    entries are 0.

    Mean and deviation are over all given values, so whitening part of a batch gives other results. Values
    that differ only by rounding give 0.

    Args:
        values: float of any shape; only read under the mask.
        mask: same shape, nonzero for values that count.
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
    """Clip advantages to [low, high]; None means no bound."""
    return advantages if low is None and high is None else advantages.clamp(low, high)


def agree(values: Tensor) -> bool:
    """Return whether numbers [n] differ only by rounding, so that none of them would have an advantage."""
    values = values.double()
    return bool(_agreed(values.std(correction=0), values.mean()))


def _agreed(deviation: Tensor, mean: Tensor) -> Tensor:
    """Return whether values with this deviation and mean differ only by rounding."""
    return deviation <= _ROUNDING * mean.abs().clamp(min=1.0)


def _groups(prompts: Tensor, rewards: Tensor, valid_mask: Tensor) -> Tensor:
    """Return the group index of each row, [B] int64. Rows with equal prompts [B, P] form a group.

    Raises:
        BatchError: the shapes do not match.
    """
    if prompts.ndim != 2 or rewards.shape != prompts.shape[:1] or valid_mask.shape != rewards.shape:
        raise BatchError(
            f"prompts {list(prompts.shape)}, rewards {list(rewards.shape)} and valid_mask "
            f"{list(valid_mask.shape)} "
            "must be [B, P], [B] and [B]. Fix: pass one reward and one mask entry for each row of prompts"
        )
    # torch.unique rejects rows of size 0. Prompts without tokens are all equal, and form one group.
    if prompts.numel() == 0:
        return torch.zeros(prompts.shape[0], dtype=torch.int64, device=prompts.device)
    # Responses to the same prompt are adjacent, so sort only one prompt of each run.
    begins = torch.ones(prompts.shape[0], dtype=torch.bool, device=prompts.device)
    begins[1:] = (prompts[1:] != prompts[:-1]).any(dim=1)
    return torch.unique(prompts[begins], dim=0, return_inverse=True)[1][begins.cumsum(0) - 1]


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Return for each row the sum over its group, [B]."""
    sums = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=values.dtype, device=values.device)
    return sums.index_add(0, group, values)[group]
