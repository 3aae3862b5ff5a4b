"""Look up rules by Megatron-Core parameter name, and list the tensors of a model."""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

from converters.errors import ConversionError
from converters.families import family_of
from converters.families.base import NESTED_PREFIX, Family
from converters.families.head import head_rules
from converters.families.vision import tower_rules
from converters.mapping.rule import (
    PORTABLE_NORMS,
    HuggingFaceTensor,
    Rule,
    expert_index,
    is_expert,
    parts_in,
    renamed,
    sequential_name,
)
from converters.model_config.architecture import Architecture
from converters.model_config.prediction_layers import prediction_rules, usual_name

_LAYER = re.compile(r"((decoder|mtp)\.layers\.(0|[1-9]\d*)\.(?:transformer_layer\.)?)(.+)")


def rule_for(megatron_name: str, architecture: Architecture) -> Rule:
    """Return the rule of a Megatron-Core parameter.

    Args:
        megatron_name: name without wrapper prefixes such as ``module.``, as in Megatron-Core's local or
            Transformer Engine layer spec. Layer and expert indices are *global*. Example:
            ``decoder.layers.7.self_attention.linear_qkv.weight``.
        architecture: architecture of the model.

    Raises:
        ConversionError: the model has no such parameter.
    """
    match = _LAYER.fullmatch(usual_name(megatron_name))
    if match is None:
        rules = _model_rules(architecture)
        rule = rules.get(megatron_name)
    else:
        prefix, block, layer, suffix = match.group(1), match.group(2), int(match.group(3)), match.group(4)
        layers = architecture.num_layers if block == "decoder" else architecture.prediction_layers
        if layer >= layers:
            raise ConversionError(
                f"{megatron_name}: the model has "
                f"{f'layers 0 to {layers - 1}' if layers else 'no such layers'}",
                "give the global layer index, counted from 0 over all pipeline stages",
            )
        # Multi-token-prediction layers are numbered after the decoder's layers.
        layer += 0 if block == "decoder" else architecture.num_layers
        rules = _layer_rules(architecture, layer)
        suffix = sequential_name(PORTABLE_NORMS.get(suffix, suffix))
        rule = rules.get(f"{prefix}{suffix}")
        if (
            rule is None
            and is_expert(megatron_name)
            and architecture.mixture is not None
            and architecture.is_sparse(layer)
        ):
            experts = architecture.mixture.num_experts
            if expert_index(megatron_name) >= experts:
                raise ConversionError(
                    f"{megatron_name}: a layer has experts 0 to {experts - 1}",
                    "give the global expert index, counted from 0 over all expert-parallel ranks",
                )
    if rule is None:
        near = difflib.get_close_matches(megatron_name, list(rules), n=1)
        hint = (
            f"the nearest known name is {near[0]}"
            if near
            else "strip wrapper prefixes and skip _extra_state entries"
        )
        raise ConversionError(
            f"{megatron_name} is no parameter of a {architecture.family} model with these settings", hint
        )
    return rule


def all_rules(architecture: Architecture) -> list[Rule]:
    """Return all rules that write tensors: embedding, layers, multi-token-prediction layers, final norm,
    output layer. The output layer of a tied model is not included."""
    model = [rule for rule in _model_rules(architecture).values() if rule.emits]
    count = architecture.num_layers + architecture.prediction_layers
    layers: list[Rule] = []
    for layer in range(count):
        layers += _layer_rules(architecture, layer).values()
    # The first rule of a model is the rule of its embedding.
    return [*model[:1], *layers, *model[1:]]


def hf_tensors(architecture: Architecture) -> list[HuggingFaceTensor]:
    """Return all tensors of the Hugging Face checkpoint, each once."""
    return list(parts_in(all_rules(architecture)))


def missing_names(architecture: Architecture, present: Container[str]) -> tuple[str, ...]:
    """Return the names of the tensors of the Hugging Face checkpoint that are not ``present``."""
    return tuple(name for name in hf_names(architecture) if name not in present)


def hf_names(architecture: Architecture) -> list[str]:
    """Return the names of all tensors of the Hugging Face checkpoint, each once."""
    return [tensor.name for tensor in hf_tensors(architecture)]


@lru_cache(maxsize=16)
def _model_rules(architecture: Architecture) -> dict[str, Rule]:
    family = family_of(architecture.family)
    rules = _nested(head_rules(family.model_rules(architecture), architecture), family)
    vision = () if architecture.vision is None else tower_rules(architecture.vision)
    return {rule.megatron_name: rule for rule in (*rules, *vision)}


@lru_cache(maxsize=1024)
def _layer_rules(architecture: Architecture, layer: int) -> dict[str, Rule]:
    family = family_of(architecture.family)
    rules = family.layer_rules(architecture, layer)
    if layer >= architecture.num_layers:
        rules = prediction_rules(
            architecture, layer - architecture.num_layers, rules, in_mtp=family.predicts_in_mtp
        )
    return {rule.megatron_name: rule for rule in _nested(rules, family)}


def _nested(rules: Iterable[Rule], family: Family) -> Iterator[Rule]:
    """Return the rules with the tensor names that the family's checkpoints have for the text model."""
    for rule in rules:
        if family.sees or family.may_be_nested:
            rule = replace(rule, parts=tuple(_nested_part(part, family) for part in rule.parts))
        yield rule


def _nested_part(part: HuggingFaceTensor, family: Family) -> HuggingFaceTensor:
    nested = renamed(part, "model.", NESTED_PREFIX)
    # Names outside of the language model, such as lm_head, are the same in both layouts.
    if family.sees or nested == part:
        return nested
    # Written under its plain name, and found under either name.
    return replace(part, alternatives=(*part.alternatives, *nested.places))


def forget_rules() -> None:
    """Clear the caches of rules, after a family was registered again."""
    _model_rules.cache_clear()
    _layer_rules.cache_clear()
