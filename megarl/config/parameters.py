"""Parameter counts of a model and of its ranks. They are sums over the converters' mapping rules, so that
there is a single description of a model."""

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

# This tensor is a buffer, which receives no gradient.
_NO_PARAMETER = ".router.expert_bias"
_NUMBER = re.compile(r"\.layers\.\d+\.")


def layers_by_kind(facts: ModelFacts, layers: Iterable[int]) -> Counter[LayerKind]:
    """Return the number of layers of each kind among the layers with these numbers."""
    return Counter(map(facts.kind_of, layers))


def sparse_layers(kinds: Counter[LayerKind]) -> int:
    """Return the number of layers with experts."""
    return sum(count for kind, count in kinds.items() if kind.sparse)


def first_layer(facts: ModelFacts, kind: LayerKind) -> int:
    """Return the first layer of a kind."""
    return next(layer for layer in range(facts.num_layers) if facts.kind_of(layer) == kind)


def stage_parameters(facts: ModelFacts, tensor: int, stage: int, layers: Sequence[Iterable[int]]) -> int:
    """Return the number of parameters on one tensor-parallel rank of one pipeline stage, without routed
    experts. ``layers`` are the numbers of each stage's layers.

    The first stage holds the embedding, and the last one the final norm and the output layer. If embedding
    and output layer are tied and there are several stages, the last one holds a copy of the embedding. A
    scoring model has one row in place of the output layer. The vocabulary is padded to a multiple of
    ``tensor``.
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
    """Return the number of parameters of one layer on one tensor-parallel rank, without routed experts."""
    return sum(
        _on_a_rank(rule, tensor) for rule in _layer_rules(facts, layer) if not is_expert(rule.megatron_name)
    )


def expert_layer_parameters(facts: ModelFacts, expert: int, expert_tensor: int) -> int:
    """Return the number of parameters of one layer's routed experts on one rank; 0 for a dense model.

    Args:
        facts: sizes of the model.
        expert: number of ranks that the experts are distributed over.
        expert_tensor: number of ranks that share each expert.
    """
    if facts.mixture is None:
        return 0
    # The experts of all sparse layers have the same size, so that the first layer represents all of them.
    rules = _layer_rules(facts, facts.mixture.sparse_layers.index(True))
    return (
        facts.num_experts
        // expert
        * sum(_on_a_rank(rule, expert_tensor) for rule in rules if _is_of_first_expert(rule))
    )


def model_parameters(facts: ModelFacts, tensor: int = 1) -> int:
    """Return the number of parameters of the whole model, or of one of the ``tensor`` ranks that share it."""
    layers = range(facts.num_layers)
    sparse = sparse_layers(layers_by_kind(facts, layers))
    return stage_parameters(facts, tensor, 0, [layers]) + sparse * expert_layer_parameters(facts, 1, tensor)


def rules_of_layer(facts: ModelFacts, layer: int) -> list[Rule]:
    """Return the mapping rules of one layer, with this layer's number in the names of the Hugging Face
    tensors."""
    found = []
    for rule in _layer_rules(facts, layer):
        parts = tuple(
            replace(part, name=_NUMBER.sub(f".layers.{layer}.", part.name, count=1)) for part in rule.parts
        )
        found.append(replace(rule, parts=parts))
    return found


def multiplied(facts: ModelFacts, layer: int) -> Counter[str]:
    """Return the number of elements of the matrices that a token is multiplied with in a layer, by part:
    ``attention`` (or another mixer, with its convolution), ``dense`` MLP, ``experts`` (the chosen ones and
    the shared one) and ``router``."""
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
    """Return the number of elements of a parameter on one of ``tensor`` ranks."""
    if rule.kind is Kind.VOCAB:
        [part] = rule.parts
        rows, columns = part.shape
        return padded_vocabulary(rows, tensor) // tensor * columns
    elements = sum(math.prod(part.shape) for part in rule.parts)
    return elements if rule.kind is Kind.REPLICATED else elements // tensor


def _family(facts: ModelFacts) -> Family:
    return FAMILIES.get(facts.family, USUAL)


def has_own_rules(facts: ModelFacts) -> bool:
    """Return whether the names of the model's weights are known. Only its sizes are, if another family's
    rules stand for its own."""
    return facts.family in FAMILIES


def vocabulary_rules(facts: ModelFacts) -> list[Rule]:
    """Return the mapping rules of the embedding and the output layer. A tied output layer is left out."""
    return [rule for rule in model_rules(facts) if rule.kind is Kind.VOCAB and rule.emits]


def model_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the mapping rules of the weights outside the layers."""
    return head_rules(_family(facts).model_rules(facts), facts)


def _layer_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """Return the mapping rules of a layer; all layers of one kind share them."""
    return _rules_of_kind(facts, first_layer(facts, facts.kind_of(layer)))


# Cache by kind, because a model has many layers but few kinds of them.
@lru_cache(maxsize=16)
def _rules_of_kind(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    return tuple(
        rule
        for rule in _family(facts).layer_rules(facts, layer)
        if not rule.megatron_name.endswith(_NO_PARAMETER)
    )
