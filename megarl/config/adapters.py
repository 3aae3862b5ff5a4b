"""Which layers have a low-rank adapter by ``policy.peft``, and how many parameters the adapters of a model
have."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterable, Mapping, Sequence

from converters.mapping.layouts import padded_vocab_size
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, expert_index, is_expert
from converters.model_config.architecture import ModelFacts
from megarl.config.nested import at
from megarl.config.parameters import rules_of_layer, vocabulary_rules
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


def adapter_parameters(
    section: PeftConfig,
    facts: ModelFacts,
    layers: Sequence[int],
    tensor: int = 1,
    experts: tuple[int, int] | None = None,
) -> int:
    """Return parameters of the adapters of some layers on one of ``tensor`` ranks that share each.

    Args:
        section: of the configuration.
        facts: of the model.
        layers: their numbers.
        tensor: ranks that a layer is cut over.
        experts: experts of each layer that are counted, and ranks that each is cut over; all of them, cut as
            the other layers, if None.
    """
    number, expert_tensor = experts or (facts.num_experts, tensor)
    total = 0
    for rule in itertools.chain.from_iterable(rules_of_layer(facts, layer) for layer in layers):
        if not is_expert(rule.megatron_name):
            total += _parameters(section, rule, tensor)
        # The experts of a layer are alike: the first one counts for all.
        elif expert_index(rule.megatron_name) == 0:
            total += number * _parameters(section, rule, expert_tensor)
    return total


def vocabulary_adapter_parameters(section: PeftConfig, facts: ModelFacts, tensor: int = 1) -> tuple[int, int]:
    """Return parameters of the adapters of embedding and output layer on one of ``tensor`` ranks that share
    each."""
    targets, excluded = section["target_modules"], section["exclude_modules"]
    found = {"embed": 0, "lm": 0}
    for rule in vocabulary_rules(facts):
        [(name, (rows, columns))] = [(part.name.removesuffix(".weight"), part.shape) for part in rule.parts]
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
    # An empty list means every linear layer; experts have adapters only where they are named.
    if not targets and not is_expert(rule.megatron_name):
        targets = ("*",)
    total, stacks = 0, set()
    for part in (part for part in rule.parts if len(part.shape) == 2):
        rows, columns = part.shape
        # the factor at the cut side is cut, the other one is whole
        rows, columns = (rows, columns // tensor) if rule.kind is Kind.ROW else (rows // tensor, columns)
        name, stack = part.name.removesuffix(".weight"), stack_of(part)
        if stack is not None and is_named(stack, section["target_parameters"]):
            # All matrices of a stack share the factor on the side of the input.
            total += rows + columns * (stack not in stacks)
            stacks.add(stack)
        elif is_named(name, targets) and not is_named(name, excluded):
            total += rows + columns
    return section["dim"] * total


def stack_of(tensor: HuggingFaceTensor) -> str | None:
    """Return the name of the parameter in which transformers' model holds a matrix of all experts; None for a
    tensor of another kind."""
    # of a family that is published in other names the last place is that of transformers' model
    places = [
        place.name
        for place in tensor.places
        if place.index is not None and len(place.shape) == 3 and place.written
    ]
    return places[-1] if places else None
