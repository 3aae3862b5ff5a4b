"""Which linear layers of a model may have adapters, and what both sides call them."""

from __future__ import annotations

import re

from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, is_expert
from converters.mapping.rules import all_rules
from converters.model_config.architecture import Architecture
from converters.torch_dist.keys import StoredPlace, stored_place

PEFT_PREFIX = "base_model.model."
_LAYER = re.compile(r"(decoder|mtp)\.layers\.")
_PARTS = {Kind.QKV: ("adapter_q", "adapter_k", "adapter_v"), Kind.GATED: ("adapter_gate", "adapter_up")}
"""What Megatron-Bridge's CanonicalLoRA calls the adapters of the parts of a fused layer."""


def linears(architecture: Architecture) -> list[Rule]:
    """The rules of the weights of linear layers that may have an adapter: those inside of layers. Experts have none here, since
    Megatron-Bridge keeps one for all experts of a rank, and PEFT one for each."""
    return [rule for rule in all_rules(architecture) if _is_linear(rule)]


def _is_linear(rule: Rule) -> bool:
    name = rule.megatron_name
    if _LAYER.match(name) is None or not name.endswith(".weight") or is_expert(name):
        return False
    return all(len(part.shape) == 2 and part.name.endswith(".weight") for part in rule.parts)


def peft_name(part: HuggingFaceTensor, factor: str) -> str:
    """What PEFT calls a factor, ``lora_A`` or ``lora_B``, of the adapter of a tensor."""
    return f"{PEFT_PREFIX}{part.name.removesuffix('.weight')}.{factor}.weight"


def stored_factor(rule: Rule, architecture: Architecture, side: str, part: int | None = None, *, stacked: bool) -> StoredPlace:
    """Where a checkpoint keeps a factor of an adapter.

    Args:
        rule: of the weight of the linear layer.
        architecture: of the model.
        side: ``linear_in`` or ``linear_out``.
        part: number of the part of a fused layer that the adapter is of; None for the adapter of the whole layer.
        stacked: whether layers are stacked.
    """
    place = stored_place(rule, architecture, stacked=stacked)
    of_part = "" if part is None else f"{_PARTS[rule.kind][part]}."
    return StoredPlace(f"{place.key.removesuffix('weight')}adapter.{of_part}{side}.weight", place.index, place.grid)


def parts_of(rule: Rule) -> range:
    """Numbers of the parts that may have adapters of their own; empty for a layer that is not fused."""
    return range(len(_PARTS.get(rule.kind, ())))


def rows_of(rule: Rule) -> int:
    """Rows of the whole layer."""
    return sum(part.shape[0] for part in rule.parts)
