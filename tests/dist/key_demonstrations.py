"""How a configuration key shows what it is good for: a change that can be seen, a refusal, or a test of its
own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from megarl.config.schema import known_paths
from megarl.models.policy import PolicyConfig
from tests.tables import read_table

BACKENDS = ("megatron", "dtensor", "fsdp1")
SECTIONS = ("megatron_cfg", "dtensor_cfg")
# a member of the list that ``policy.scheduler`` may be, which is no TypedDict
MILESTONES = "scheduler.milestones"
# float32 sums in another order differ by less
ROUNDING = 1e-5


class AsItIs:
    """Stands for the value that the baseline has."""


@dataclass(frozen=True, slots=True)
class Changes:
    """Two values of the key are seen in what a worker does.

    Attributes:
        value: the other value.
        seen_in: ``<observation of tests.dist.key_observations>.<what of it>``.
        beside: other keys, in both runs.
        before: the first value; the baseline's where it is not given.
        with_it: other keys that have to change along.
        world: ranks.
        model: of ``tests.dist.test_configuration_keys``'s models.
        path: what is really set, where that is not the key itself.
    """

    value: Any
    seen_in: str
    beside: Mapping[str, Any] = field(default_factory=dict)
    before: Any = AsItIs
    with_it: Mapping[str, Any] = field(default_factory=dict)
    world: int | None = None
    model: str = "qwen2"
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """Some values are refused with a reason, because they would do nothing or cannot be done.

    Attributes:
        values: what is refused.
        accepted: what is not.
        reason: a part of the bound that the violation names.
        beside: other keys.
        model: as for ``Changes``.
        path: what is really set, where that is not the key itself.
        named: the key that the violation names, where that is another one.
    """

    values: Sequence[Any]
    accepted: Sequence[Any]
    reason: str
    beside: Mapping[str, Any] = field(default_factory=dict)
    model: str = "qwen2"
    path: str | None = None
    named: str | None = None


@dataclass(frozen=True, slots=True)
class ShownBy:
    """A test of its own shows the key, for each backend that has it.

    Attributes:
        test: its name in ``tests.dist.test_configuration_keys``, or ``module:name``.
    """

    test: str


Demonstration: TypeAlias = Changes | Refused | ShownBy
KINDS: Mapping[str, Any] = {"seen_in": Changes, "values": Refused, "test": ShownBy}
"""Each kind by a field that it alone has."""


def read_demonstrations() -> dict[str, dict[str, Demonstration]]:
    """Demonstrations by key, in the groups of ``tests/data/key_demonstrations.yaml``."""
    found: dict[str, dict[str, Demonstration]] = {}
    for group, rows in read_table("key_demonstrations.yaml").items():
        found[group] = {
            key: next(kind for name, kind in KINDS.items() if name in row)(**row) for key, row in rows.items()
        }
    return found


def leaves(backend: str) -> set[str]:
    """The keys of ``policy`` that are no sections and concern a backend: all but those inside another
    backend's section, of which only ``enabled`` counts."""
    paths = {*known_paths(PolicyConfig), MILESTONES}
    ends = {path for path in paths if not any(other.startswith(f"{path}.") for other in paths)}
    foreign = tuple(f"{section}." for section in SECTIONS if section != f"{backend}_cfg")
    return {path for path in ends if not path.startswith(foreign) or path.endswith("_cfg.enabled")}


def differs(one: Any, other: Any) -> bool:
    """Whether two observations are different, numbers beyond rounding."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape or one.dtype != other.dtype:
            return True
        if not one.dtype.is_floating_point:
            return not torch.equal(one, other)
        size = float(torch.maximum(one.abs().max(), other.abs().max())) if one.numel() else 0.0
        return bool(((one - other).abs() > ROUNDING * size).any())
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) > ROUNDING * max(abs(one), abs(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() != other.keys() or any(differs(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) != len(other) or any(differs(*pair) for pair in zip(one, other, strict=True))
    return bool(one != other)
