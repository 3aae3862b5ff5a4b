"""Which layers have a low-rank adapter by ``policy.peft``, and how many parameters the adapters of a model
have."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence

from converters.mapping.rule import Kind, is_expert
from converters.model_config.architecture import ModelFacts
from megarl.config.nested import at
from megarl.config.parameters import rules_of_layer
from megarl.config.policy import PeftConfig, PolicyConfig

_MEGATRON_NAMES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
CUT_KINDS = frozenset({Kind.COLUMN, Kind.ROW, Kind.QKV, Kind.GATED})
"""Kinds of the weights that may have an adapter: those of parallel linear layers."""


def adapters_of(policy: PolicyConfig) -> PeftConfig | None:
    """Return the section ``peft`` of a policy section, where it is enabled. A section that nobody has filled
    in need not have it."""
    section = policy.get("peft")
    return section if section and section["enabled"] else None


def adapter_alone(policy: PolicyConfig) -> PeftConfig | None:
    """Return the section ``peft`` of a policy section whose engines get adapters by themselves, as
    ``policy.generation.vllm_cfg.enable_lora`` says; None where they get whole weights."""
    generation = policy["generation"]
    if generation is None or generation["backend"] != "vllm" or not at(generation, "vllm_cfg.enable_lora"):
        return None
    return adapters_of(policy)


def expanded(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return patterns with Hugging Face names in the place of Megatron-Core's."""
    found = []
    for pattern in patterns:
        before, dot, last = pattern.rpartition(".")
        found += [f"{before}{dot}{name}" for name in _MEGATRON_NAMES.get(last, (last,))]
    return tuple(found)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether a module is one of those that patterns name: by its name, the end of it, or with
    ``*``."""
    return any(
        fnmatch.fnmatchcase(name, pattern)
        if "*" in pattern
        else name == pattern or name.endswith(f".{pattern}")
        for pattern in patterns
    )


def adapter_parameters(section: PeftConfig, facts: ModelFacts, layers: Sequence[int], tensor: int = 1) -> int:
    """Return parameters of the adapters of some layers on one of ``tensor`` ranks that share each."""
    targets, excluded = expanded(section["target_modules"]) or ("*",), expanded(section["exclude_modules"])
    total = 0
    for layer in layers:
        for rule in rules_of_layer(facts, layer):
            if rule.kind not in CUT_KINDS or is_expert(rule.megatron_name):
                continue
            for name, shape in (
                (part.name.removesuffix(".weight"), part.shape) for part in rule.parts if len(part.shape) == 2
            ):
                if is_named(name, targets) and not is_named(name, excluded):
                    rows, columns = shape
                    # the factor at the cut side is cut, the other one is whole
                    total += section["dim"] * (
                        rows + columns // tensor if rule.kind is Kind.ROW else columns + rows // tensor
                    )
    return total
