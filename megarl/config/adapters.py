"""Low-rank adapters of ``policy.peft``: which layers have one, and how many parameters they add to a
model."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence

from converters.mapping.layouts import padded_vocab_size
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, expert_index, is_expert
from converters.model_config.architecture import ModelFacts
from megarl.config.nested import at
from megarl.config.parameters import model_rules, rules_of_layer, vocabulary_rules
from megarl.config.policy import PeftConfig, PolicyConfig

_MEGATRON_NAMES: Mapping[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
CUT_KINDS = frozenset({Kind.COLUMN, Kind.ROW, Kind.QKV, Kind.GATED})
"""Kinds of weights that may have an adapter: those of parallel linear layers."""


def adapters_of(policy: PolicyConfig) -> PeftConfig | None:
    """Return the ``peft`` section of a policy section, or None if it is absent or disabled. A policy section
    without its defaults may lack it."""
    section = policy.get("peft")
    return section if section and section["enabled"] else None


def share_a_base(policy: PolicyConfig, other: PolicyConfig) -> bool:
    """Return whether two models train adapters of the same weights, which their ranks divide alike, so that
    each rank can hold them once."""
    if adapters_of(policy) is None or adapters_of(other) is None:
        return False
    return _base_settings(policy) == _base_settings(other)


def _base_settings(policy: PolicyConfig) -> tuple[object, ...]:
    megatron = dict(policy["megatron_cfg"])
    megatron.pop("optimizer", None)
    megatron.pop("scheduler", None)
    return policy["model_name"], policy["precision"], policy["dtensor_cfg"], megatron


def adapter_alone(policy: PolicyConfig) -> PeftConfig | None:
    """Return the ``peft`` section of a policy whose engines receive only the adapters, as
    ``policy.generation.vllm_cfg.enable_lora`` requests. None if the engines receive merged weights."""
    generation = policy["generation"]
    if generation is None or generation["backend"] != "vllm" or not at(generation, "vllm_cfg.enable_lora"):
        return None
    return adapters_of(policy)


def expanded(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return the patterns with Megatron-Core's module names replaced by the Hugging Face names."""
    found = []
    for pattern in patterns:
        before, dot, last = pattern.rpartition(".")
        found += [f"{before}{dot}{name}" for name in _MEGATRON_NAMES.get(last, (last,))]
    return tuple(found)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether any of the patterns matches a module: its full name, the end of its name, or a ``*``
    glob."""
    return any(
        fnmatch.fnmatchcase(name, pattern)
        if "*" in pattern
        else name == pattern or name.endswith(f".{pattern}")
        for pattern in patterns
    )


def unmatched(patterns: Iterable[str], facts: ModelFacts) -> list[str]:
    """Return the patterns that match the name of no weight of a model, whose names are known."""
    left = set(patterns)
    layers = itertools.chain.from_iterable(rules_of_layer(facts, layer) for layer in range(facts.num_layers))
    # The first layer has nearly all names, and a large mixture has very many of them in all.
    for rule in itertools.chain(model_rules(facts), layers):
        if not left:
            break
        for part in rule.parts:
            name = part.name.removesuffix(".weight")
            left -= {pattern for pattern in left if is_named(name, expanded([pattern]))}
    return sorted(left)


def adapter_parameters(
    section: PeftConfig,
    facts: ModelFacts,
    layers: Sequence[int],
    tensor: int = 1,
    experts: tuple[int, int] | None = None,
) -> int:
    """Return the number of adapter parameters in the given layers on one rank.

    Args:
        section: the ``peft`` section.
        facts: sizes of the model.
        layers: layer numbers.
        tensor: ranks that share a layer.
        experts: number of experts of each layer to count, and the ranks that share each expert. If None, all
            experts are counted, and ``tensor`` ranks share each.
    """
    number, expert_tensor = experts or (facts.num_experts, tensor)
    total = 0
    for rule in itertools.chain.from_iterable(rules_of_layer(facts, layer) for layer in layers):
        if not is_expert(rule.megatron_name):
            total += _parameters(section, rule, tensor)
        # The experts of a layer are all alike, so that the first one is counted for all.
        elif expert_index(rule.megatron_name) == 0:
            total += number * _parameters(section, rule, expert_tensor)
    return total


def vocabulary_adapter_parameters(section: PeftConfig, facts: ModelFacts, tensor: int = 1) -> tuple[int, int]:
    """Return the numbers of adapter parameters of the embedding and of the output layer on one of the
    ``tensor`` ranks that share each."""
    targets, excluded = section["target_modules"], section["exclude_modules"]
    found = {"embed": 0, "lm": 0}
    for rule in vocabulary_rules(facts):
        [part] = rule.parts
        name, (rows, columns) = part.name.removesuffix(".weight"), part.shape
        if is_named(name, targets) and not is_named(name, excluded):
            padded = padded_vocab_size(rows, tensor)
            found["embed" if rule.megatron_name.startswith("embedding.") else "lm"] = section["dim"] * (
                padded // tensor + columns
            )
    return found["embed"], found["lm"]


def _parameters(section: PeftConfig, rule: Rule, tensor: int) -> int:
    targets, excluded = expanded(section["target_modules"]), expanded(section["exclude_modules"])
    if rule.kind not in CUT_KINDS:
        return 0
    # An empty list means every linear layer. Experts, however, only have adapters if they are named.
    if not targets and not is_expert(rule.megatron_name):
        targets = ("*",)
    total, stacks = 0, set()
    for part in rule.parts:
        if len(part.shape) != 2:
            continue
        rows, columns = part.shape
        # The factor on the divided side is divided, whereas the other one is held in full.
        rows, columns = (rows, columns // tensor) if rule.kind is Kind.ROW else (rows // tensor, columns)
        name, stack = part.name.removesuffix(".weight"), stack_of(part)
        if stack is not None and is_named(stack, section["target_parameters"]):
            # All matrices of a stack share the factor on the input side.
            total += rows + columns * (stack not in stacks)
            stacks.add(stack)
        elif is_named(name, targets) and not is_named(name, excluded):
            total += rows + columns
    return section["dim"] * total


def stack_of(tensor: HuggingFaceTensor) -> str | None:
    """Return the name of the stacked parameter in which transformers' model holds this matrix for all
    experts. None for a tensor that is not part of a stack."""
    stack = None
    # If a family is published under other names, the last location is that of transformers' model.
    for place in tensor.places:
        if place.index is not None and len(place.shape) == 3 and place.written:
            stack = place.name
    return stack
