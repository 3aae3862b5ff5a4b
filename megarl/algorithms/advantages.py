"""Advantages of groups of answers to the same prompt."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megarl.errors import BatchError

# Relative to the mean, some twenty units in the last place of a float32 reward; absolute, what is left where parts of size 1 cancel.
_ROUNDING = 1e-6


def calculate_baseline_and_std_per_prompt(
    prompts: Tensor,
    rewards: Tensor,
    valid_mask: Tensor,
    leave_one_out_baseline: bool = True,
) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the rewards that answers to the same prompt got.

    Rows with equal prompts form a group. Only valid rows count. With ``leave_one_out_baseline`` a row's own reward is left out of its
    baseline and deviation, which makes the baseline independent of the row's action (Kool et al., "Buy 4 REINFORCE samples, get a
    baseline for free!", 2019). A row that no other (leave-one-out) or no (plain mean) valid row can be compared with gets its own reward
    as the baseline, so that its advantage is 0, and deviation 0.

    Args:
        prompts: [B, P] int, padded alike within a group.
        rewards: [B] float.
        valid_mask: [B], 1 for rows that count.
        leave_one_out_baseline: see above.

    Returns:
        (baseline, std), both [B] in the dtype of the rewards; std is the population deviation (divided by n).

    Raises:
        BatchError: the shapes do not fit.
    """
    return _baseline_and_std(_groups(prompts, rewards, valid_mask), rewards, valid_mask, leave_one_out_baseline)


def _baseline_and_std(group: Tensor, rewards: Tensor, valid_mask: Tensor, leave_one_out_baseline: bool) -> tuple[Tensor, Tensor]:
    """As ``calculate_baseline_and_std_per_prompt``, by the number of each row's group, [B] int64."""
    valid = (valid_mask != 0).double()
    values = torch.where(valid != 0, rewards.double(), 0.0)

    count = _group_sums(valid, group)
    # Sums of squares of centred values keep the digits that squares of large rewards would lose.
    centre = _group_sums(values, group) / count.clamp(min=1)
    centred = (values - centre) * valid
    own_count, own = (valid, centred) if leave_one_out_baseline else (torch.zeros_like(valid), torch.zeros_like(centred))
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
    """Reward minus the group's baseline, [B], optionally divided by the group's standard deviation (GRPO, arXiv 2402.03300).

    The deviation is that of the whole group even when the baseline leaves the row out: with n answers no advantage then exceeds
    n / sqrt(n - 1), whereas the deviation of the others is 0 whenever they agree. Groups that agree entirely, but for rounding, and
    invalid rows get 0. ``std`` divides the squares by n (``population``) or by n - 1 (``sample``).
    """
    group = _groups(prompts, rewards, valid_mask)
    baseline, _ = _baseline_and_std(group, rewards, valid_mask, leave_one_out_baseline)
    group_mean, deviation = _baseline_and_std(group, rewards, valid_mask, leave_one_out_baseline=False)
    # A group of equal rewards can differ from its mean by rounding only; dividing that by itself would make noise an advantage.
    agreed = deviation <= _ROUNDING * group_mean.abs().clamp(min=1.0)
    advantages = torch.where(valid_mask == 0, 0.0, rewards - baseline)
    if not normalize_rewards:
        return advantages
    if std == "sample":
        count = _group_sums((valid_mask != 0).to(rewards.dtype), group)
        deviation = deviation * (count / (count - 1).clamp(min=1)).sqrt()
    return torch.where(agreed, 0.0, advantages / torch.where(agreed, 1.0, deviation))


def _groups(prompts: Tensor, rewards: Tensor, valid_mask: Tensor) -> Tensor:
    """The number of each row's group, [B] int64: rows with equal prompts [B, P] form one. Shapes that do not fit raise BatchError."""
    if prompts.ndim != 2 or rewards.shape != prompts.shape[:1] or valid_mask.shape != rewards.shape:
        raise BatchError(
            f"prompts {list(prompts.shape)}, rewards {list(rewards.shape)} and valid_mask {list(valid_mask.shape)} "
            "must be [B, P], [B] and [B]. Fix: pass one reward and one mask entry for each row of prompts"
        )
    if prompts.numel() == 0:
        return torch.zeros(prompts.shape[0], dtype=torch.int64, device=prompts.device)
    # answers to one prompt stand next to each other: one of each run is sorted, not all of them
    begins = torch.ones(prompts.shape[0], dtype=torch.bool, device=prompts.device)
    begins[1:] = (prompts[1:] != prompts[:-1]).any(dim=1)
    return torch.unique(prompts[begins], dim=0, return_inverse=True)[1][begins.cumsum(0) - 1]


def _group_sums(values: Tensor, group: Tensor) -> Tensor:
    """Return for each row the sum of its group's values, [B]."""
    sums = torch.zeros(int(group.max()) + 1 if group.numel() else 0, dtype=values.dtype, device=values.device)
    return sums.index_add(0, group, values)[group]
