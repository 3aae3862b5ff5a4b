"""Low-rank adapters of ``policy.peft``: selection of the layers that have one, and parameter counts."""

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
"""Kinds of mapping rules whose weights may have an adapter: the linear layers that tensor parallelism
shards."""


def adapters_of(policy: PolicyConfig) -> PeftConfig | None:
    """Return the ``peft`` section of a ``policy`` section, or None if it is absent or disabled."""
    section = policy.get("peft")
    return section if section and section["enabled"] else None


def share_a_base(policy: PolicyConfig, other: PolicyConfig) -> bool:
    """Return whether two models train adapters on the same base weights with the same sharding, so that each
    rank can hold the base weights once for both."""
    if adapters_of(policy) is None or adapters_of(other) is None:
        return False
    return _base_settings(policy) == _base_settings(other)


def _base_settings(policy: PolicyConfig) -> tuple[object, ...]:
    megatron = dict(policy["megatron_cfg"])
    megatron.pop("optimizer", None)
    megatron.pop("scheduler", None)
    return policy["model_name"], policy["precision"], policy["dtensor_cfg"], megatron


def adapter_alone(policy: PolicyConfig) -> PeftConfig | None:
    """Return the ``peft`` section if a refit sends only the adapters to the engines
    (``policy.generation.vllm_cfg.enable_lora``), or None if it sends merged weights."""
    generation = policy["generation"]
    if generation is None or generation["backend"] != "vllm" or not at(generation, "vllm_cfg.enable_lora"):
        return None
    return adapters_of(policy)


def expanded(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return module name patterns with Megatron-Core's names (``linear_qkv``) replaced by the Hugging Face
    names."""
    found = []
    for pattern in patterns:
        before, dot, last = pattern.rpartition(".")
        found += [f"{before}{dot}{name}" for name in _MEGATRON_NAMES.get(last, (last,))]
    return tuple(found)


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Return whether one of the patterns matches a module's name. A pattern is a full name, the end of a
    name after a dot, or a glob with ``*``."""
    return any(
        fnmatch.fnmatchcase(name, pattern)
        if "*" in pattern
        else name == pattern or name.endswith(f".{pattern}")
        for pattern in patterns
    )


def unmatched(patterns: Iterable[str], facts: ModelFacts) -> list[str]:
    """Return, sorted, the patterns that match no weight of the model."""
    left = set(patterns)
    layers = itertools.chain.from_iterable(rules_of_layer(facts, layer) for layer in range(facts.num_layers))
    # Go layer by layer and stop early: most patterns match in the first layer, and a mixture-of-experts model
    # has very many names.
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
        tensor: tensor-parallel size.
        experts: (experts per layer on the rank, tensor-parallel size of an expert); None for all experts with
            the size ``tensor``.
    """
    number, expert_tensor = experts or (facts.num_experts, tensor)
    total = 0
    for rule in itertools.chain.from_iterable(rules_of_layer(facts, layer) for layer in layers):
        if not is_expert(rule.megatron_name):
            total += _parameters(section, rule, tensor)
        # All experts of a layer have the same size, so multiply the first one's count.
        elif expert_index(rule.megatron_name) == 0:
            total += number * _parameters(section, rule, expert_tensor)
    return total


def vocabulary_adapter_parameters(section: PeftConfig, facts: ModelFacts, tensor: int = 1) -> tuple[int, int]:
    """Return the adapter parameters of the embedding, and those of the output layer, on one of ``tensor``
    ranks."""
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
    # An empty list selects all linear layers except experts, which get adapters only by name.
    if not targets and not is_expert(rule.megatron_name):
        targets = ("*",)
    total, stacks = 0, set()
    for part in rule.parts:
        if len(part.shape) != 2:
            continue
        rows, columns = part.shape
        # Tensor parallelism shards the LoRA factor on the sharded side of the weight; the other factor is
        # replicated.
        rows, columns = (rows, columns // tensor) if rule.kind is Kind.ROW else (rows // tensor, columns)
        name, stack = part.name.removesuffix(".weight"), stack_of(part)
        if stack is not None and is_named(stack, section["target_parameters"]):
            # The matrices of a stack (gate and up) share A, the factor on the input side.
            total += rows + columns * (stack not in stacks)
            stacks.add(stack)
        elif is_named(name, targets) and not is_named(name, excluded):
            total += rows + columns
    return section["dim"] * total


def stack_of(tensor: HuggingFaceTensor) -> str | None:
    """Return the name of the stacked parameter (all experts of a layer) that contains this matrix in
    transformers' model, or None if the matrix is a parameter of its own."""
    stack = None
    # If a family is published under other names, the last location is that of transformers' model.
    for place in tensor.places:
        if place.index is not None and len(place.shape) == 3 and place.written:
            stack = place.name
    return stack
