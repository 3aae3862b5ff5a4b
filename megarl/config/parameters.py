"""Parameter counts of a model and of a rank. They are sums over the converters' mapping rules, so a model is
described in one place only."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache

from converters.families import FAMILIES
from converters.families.base import Family
from converters.families.head import head_rules
from converters.families.usual import USUAL
from converters.mapping.rule import Kind, Rule, expert_index, is_expert
from converters.model_config.architecture import ModelFacts
from converters.model_config.layer_kind import LayerKind
from megarl.config.arithmetic import padded_vocabulary

# The router's expert bias is a buffer: it has no gradient and no optimizer state.
_NO_PARAMETER = ".router.expert_bias"
_NUMBER = re.compile(r"\.layers\.\d+\.")


def layers_by_kind(facts: ModelFacts, layers: Iterable[int]) -> Counter[LayerKind]:
    """Return how many of the layers with these numbers are of each kind."""
    return Counter(map(facts.kind_of, layers))


def sparse_layers(kinds: Counter[LayerKind]) -> int:
    """Return the number of mixture-of-experts layers in a count of layer kinds."""
    return sum(count for kind, count in kinds.items() if kind.sparse)


def first_layer(facts: ModelFacts, kind: LayerKind) -> int:
    """Return the number of the first layer of a kind."""
    return next(layer for layer in range(facts.num_layers) if facts.kind_of(layer) == kind)


def stage_parameters(facts: ModelFacts, tensor: int, stage: int, layers: Sequence[Iterable[int]]) -> int:
    """Return the number of parameters on one tensor-parallel rank of one pipeline stage, without routed
    experts.

    The first stage holds the embedding, the last one the final norm and the output layer. If these two are
    tied and there are several stages, the last stage holds a copy of the embedding. A reward model has one
    row in place of the output layer. The vocabulary is padded to a multiple of ``tensor``.

    Args:
        facts: sizes of the model.
        tensor: tensor-parallel size.
        stage: index of the stage.
        layers: layer numbers of each stage.
    """
    first, last = stage == 0, stage == len(layers) - 1
    total = sum(layer_parameters(facts, layer, tensor) for layer in layers[stage])
    for rule in model_rules(facts):
        is_held = first if rule.megatron_name.startswith("embedding.") else last
        # A tied output layer has no own tensor: on the first stage it is the embedding, and elsewhere a copy.
        if is_held and (rule.emits or not first):
            total += _on_a_rank(rule, tensor)
    return total


def layer_parameters(facts: ModelFacts, layer: int, tensor: int) -> int:
    """Return the number of parameters of one layer on one of ``tensor`` ranks, without routed experts."""
    return sum(
        _on_a_rank(rule, tensor) for rule in _layer_rules(facts, layer) if not is_expert(rule.megatron_name)
    )


def expert_layer_parameters(facts: ModelFacts, expert: int, expert_tensor: int) -> int:
    """Return the number of parameters of one layer's routed experts on one rank; 0 for a dense model.

    Args:
        facts: sizes of the model.
        expert: expert-parallel size, over which the experts are distributed.
        expert_tensor: tensor-parallel size of an expert.
    """
    if facts.mixture is None:
        return 0
    # All sparse layers have experts of the same size, so count those of the first one.
    rules = _layer_rules(facts, facts.mixture.sparse_layers.index(True))
    return (
        facts.num_experts
        // expert
        * sum(_on_a_rank(rule, expert_tensor) for rule in rules if _is_of_first_expert(rule))
    )


def model_parameters(facts: ModelFacts, tensor: int = 1) -> int:
    """Return the number of parameters of the model, or of the shard of one of ``tensor`` tensor-parallel
    ranks."""
    layers = range(facts.num_layers)
    sparse = sparse_layers(layers_by_kind(facts, layers))
    return stage_parameters(facts, tensor, 0, [layers]) + sparse * expert_layer_parameters(facts, 1, tensor)


def rules_of_layer(facts: ModelFacts, layer: int) -> list[Rule]:
    """Return the mapping rules of one layer, with its number in the names of the Hugging Face tensors."""
    found = []
    for rule in _layer_rules(facts, layer):
        parts = tuple(
            replace(part, name=_NUMBER.sub(f".layers.{layer}.", part.name, count=1)) for part in rule.parts
        )
        found.append(replace(rule, parts=parts))
    return found


def multiplied(facts: ModelFacts, layer: int) -> Counter[str]:
    """Return the number of matrix elements with which one token is multiplied in a layer, which gives its
    FLOPs.

    Returns:
        Elements by part: ``attention`` (or another mixer, with its convolution), ``dense`` for an MLP,
            ``experts`` for the chosen and the shared experts, and ``router``.
    """
    found: Counter[str] = Counter()
    for rule in _layer_rules(facts, layer):
        elements = sum(math.prod(part.shape) for part in rule.parts if len(part.shape) > 1)
        if _is_of_first_expert(rule):
            assert facts.mixture is not None
            found["experts"] += elements * facts.mixture.experts_per_token
        elif not is_expert(rule.megatron_name):
            found[_part_of(rule, facts.is_sparse(layer))] += elements
    return found


def _part_of(rule: Rule, is_sparse: bool) -> str:
    if ".mlp." not in rule.megatron_name:
        return "attention"
    if ".router." in rule.megatron_name:
        return "router"
    return "experts" if is_sparse else "dense"


def _is_of_first_expert(rule: Rule) -> bool:
    return is_expert(rule.megatron_name) and expert_index(rule.megatron_name) == 0


def _on_a_rank(rule: Rule, tensor: int) -> int:
    """Return the number of elements of a rule's parameter on one of ``tensor`` tensor-parallel ranks."""
    if rule.kind is Kind.VOCAB:
        [part] = rule.parts
        rows, columns = part.shape
        return padded_vocabulary(rows, tensor) // tensor * columns
    elements = sum(math.prod(part.shape) for part in rule.parts)
    return elements if rule.kind is Kind.REPLICATED else elements // tensor


def _family(facts: ModelFacts) -> Family:
    return FAMILIES.get(facts.family, USUAL)


def has_own_rules(facts: ModelFacts) -> bool:
    """Return whether the model's family has mapping rules of its own, so that the names of its weights are
    known. The usual family's rules, used otherwise, give only sizes."""
    return facts.family in FAMILIES


def vocabulary_rules(facts: ModelFacts) -> list[Rule]:
    """Return the mapping rules of the embedding and, unless it is tied, of the output layer."""
    return [rule for rule in model_rules(facts) if rule.kind is Kind.VOCAB and rule.emits]


def model_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the mapping rules of the weights outside the layers: embedding, final norm, and output layer or
    score head."""
    return head_rules(_family(facts).model_rules(facts), facts)


def _layer_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """Return the mapping rules of the first layer of the same kind, which all layers of that kind share."""
    return _rules_of_kind(facts, first_layer(facts, facts.kind_of(layer)))


# Cache by kind: a model has many layers, but only a few kinds.
@lru_cache(maxsize=16)
def _rules_of_kind(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    return tuple(
        rule
        for rule in _family(facts).layer_rules(facts, layer)
        if not rule.megatron_name.endswith(_NO_PARAMETER)
    )
