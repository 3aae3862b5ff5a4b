"""What plain transformers say is computed once for all layouts: a reference is given nothing that tells of a
layout."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

import torch

Answer = TypeVar("Answer")
# of ``megatron_cfg``, what a reference may read
READ = (
    "optimizer",
    "scheduler",
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "freeze_moe_router",
)


def without_layout(policy: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a policy configuration that has the same meaning in every layout; nothing else reaches a
    reference."""
    return {
        "generation": {"temperature": policy["generation"]["temperature"]},
        "megatron_cfg": {key: policy["megatron_cfg"][key] for key in READ},
    }


def remembered(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """``function``, run once a process for equal arguments, whose answer is afterwards the same object.
    Nobody may change it."""
    answers: dict[Hashable, Answer] = {}

    @functools.wraps(function)
    def ask(*arguments: Any) -> Answer:
        key = _written_out(arguments)
        if key not in answers:
            answers[key] = function(*arguments)
        return answers[key]

    return ask


def _written_out(value: Any) -> Hashable:
    """Equal for equal values alone: tensors and the attributes of losses are compared by what is in them.

    Raises:
        TypeError: a kind of value that this does not know.
    """
    if value is None or isinstance(value, bool | int | float | str | Path | Enum):
        return type(value), value
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, Mapping):
        return "mapping", tuple((key, _written_out(value[key])) for key in sorted(value))
    if isinstance(value, list | tuple):
        return "sequence", tuple(map(_written_out, value))
    if type(value).__module__.startswith("megarl.algorithms."):
        return type(value), _written_out(vars(value))
    raise TypeError(
        f"a {type(value).__name__} among the arguments of a remembered reference: say in _written_out what "
        "makes two of them equal"
    )
