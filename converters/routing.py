"""How a router chooses experts and weighs them: what the config of a mixture of experts says about it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Routing:
    """From the router's logits to the experts of a token.

    Logits become scores. Where experts are in groups, a token goes to experts of its best groups alone. It goes to the experts of the
    highest scores; their scores are its weights, divided by their sum where the mixture is normalized, and times the scaling factor.

    Attributes:
        score: softmax over all experts, or the sigmoid of each logit.
        has_correction_bias: a number for each expert is added to its score for the choice of groups and experts, not for the weights. It
            is no parameter: gradients do not reach it. Float32 whatever the dtype of the model.
        groups: equal parts that the experts are divided into, in order; 1 without groups.
        groups_per_token: groups that a token may go to.
        best_of_group: a group is as good as the sum of this many of its best scores.
        scaling_factor: of the weights.
        in_float32: logits are computed in float32 whatever the dtype of the model.
        has_bias: the logits have a bias, which is a parameter.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    has_correction_bias: bool = False
    groups: int = 1
    groups_per_token: int = 1
    best_of_group: int = 1
    scaling_factor: float = 1.0
    in_float32: bool = False
    has_bias: bool = False

    @property
    def is_grouped(self) -> bool:
        """Whether groups keep a token from some experts."""
        return self.groups_per_token < self.groups


def read_deepseek_routing(
    config: Mapping[str, object],
    problems: list[str],
    *,
    experts: int,
    chosen: int,
    score: Literal["softmax", "sigmoid"],
    best_of_group: int,
    grouped: bool = True,
) -> Routing:
    """The routing of DeepSeek's mixtures and of those that follow them (``n_group``, ``topk_group``, ``routed_scaling_factor``).

    Args:
        config: flat, with the defaults of its class filled in.
        problems: what is wrong is appended here.
        experts: experts of a layer.
        chosen: experts that a token goes through.
        score: see :class:`Routing`. Routers that take sigmoids have a correction bias.
        best_of_group: see :class:`Routing`.
        grouped: False where the config's groups are not in use.
    """
    scale = _scaling_factor(config, problems)
    groups, kept = (_whole(config, key, problems) for key in ("n_group", "topk_group")) if grouped else (1, 1)
    if experts % groups:
        problems.append(f"n_group = {groups}: it must divide the {experts} experts")
        groups = kept = 1
    if kept > groups:
        problems.append(f"topk_group = {kept}: there are only {groups} groups (n_group)")
    size = experts // groups
    if best_of_group > size and kept <= groups:
        problems.append(f"n_group = {groups}: groups of {size} experts are smaller than the {best_of_group} scores that rank a group")
    if chosen > kept * size:
        problems.append(f"num_experts_per_tok = {chosen}: {kept} groups (topk_group) have only {kept * size} experts")
    sigmoid = score == "sigmoid"
    return Routing(score, sigmoid, groups, kept, best_of_group, scale, in_float32=True)


def _whole(config: Mapping[str, object], key: str, problems: list[str]) -> int:
    value = config.get(key)
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    problems.append(f"{key} = {value!r}: a positive whole number is needed")
    return 1


def _scaling_factor(config: Mapping[str, object], problems: list[str]) -> float:
    value = config.get("routed_scaling_factor")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        problems.append(f"routed_scaling_factor = {value!r}: a positive number is needed")
        return 1.0
    return float(value)
