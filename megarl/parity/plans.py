"""Tensor-parallel plans that a user might write for DTensor, for ``dtensor_cfg.custom_parallel_plan``: functions without arguments.

``written`` is the built-in plan, as a user's; ``names`` has torch's plain column and row styles by name, without sequence parallelism;
``mlp`` divides the MLPs alone and leaves every rank whole attentions.
"""

from __future__ import annotations

from typing import Any

from megarl.models.dtensor.plans import decoder_plan
from megarl.parity.case import HEAD_NORMS, Case

_LAYER = "model.layers.*"
_MLP = {f"{_LAYER}.mlp.gate_proj": "colwise", f"{_LAYER}.mlp.up_proj": "colwise", f"{_LAYER}.mlp.down_proj": "rowwise"}
_ATTENTION = {
    **{f"{_LAYER}.self_attn.{name}_proj": "colwise" for name in ("q", "k", "v")},
    f"{_LAYER}.self_attn.o_proj": "rowwise",
}
_HEAD_NORMS = {f"{_LAYER}.self_attn.{name}_norm": "replicated_with_grad_allreduce" for name in ("q", "k")}


def plan_path(case: Case) -> str | None:
    """The import path of a case's plan; None for the built-in one."""
    if case.plan == "built-in":
        return None
    head_norms = case.family in HEAD_NORMS
    name = {
        "written": ("sequence" if case.sp else "whole") + ("_head_norms" if head_norms else ""),
        "names": "names" + ("_head_norms" if head_norms else ""),
        "mlp": "mlp",
    }[case.plan]
    return f"{__name__}.{name}"


def names() -> dict[str, Any]:
    """Columns and rows by name."""
    return {**_MLP, **_ATTENTION}


def names_head_norms() -> dict[str, Any]:
    """The same for a family that normalises heads."""
    return {**names(), **_HEAD_NORMS}


def mlp() -> dict[str, Any]:
    """The MLPs alone."""
    return dict(_MLP)


def whole() -> dict[str, Any]:
    """The built-in plan."""
    return _without_head_norms(whole_head_norms())


def whole_head_norms() -> dict[str, Any]:
    """The built-in plan for a family that normalises heads."""
    return dict(decoder_plan(sequence_parallel=False))


def sequence() -> dict[str, Any]:
    """The built-in plan with sequence parallelism."""
    return _without_head_norms(sequence_head_norms())


def sequence_head_norms() -> dict[str, Any]:
    """The built-in plan with sequence parallelism for a family that normalises heads."""
    return dict(decoder_plan(sequence_parallel=True))


def _without_head_norms(plan: dict[str, Any]) -> dict[str, Any]:
    return {name: style for name, style in plan.items() if name not in _HEAD_NORMS}
