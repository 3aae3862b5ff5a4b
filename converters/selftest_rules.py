"""What has to hold of the rules of a family whatever its weights are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from converters.architecture import Architecture
from converters.errors import ConversionError
from converters.families import family_of
from converters.heads import head_rules
from converters.layouts import padded_vocab_size
from converters.rule import Kind, Rule
from converters.rules import all_rules, rule_for
from converters.shards import load_shard, to_hf
from converters.source import HuggingFaceSource
from converters.torch_dist.keys import is_stacked, stored_place

_TENSOR_PARALLEL_SIZES = (1, 2)
_ONE_PART, _GATE_AND_UP, _HEADS = 1, 2, 3


def rule_problems(architecture: Architecture) -> Iterator[str]:
    """Names that come twice, places that two parameters share, parts that a layout cannot be made of."""
    family = family_of(architecture.family)
    rules = [*head_rules(family.model_rules(architecture), architecture)]
    for layer in range(architecture.num_layers):
        rules += family.layer_rules(architecture, layer)
    yield from _twice("Megatron-Core parameter", [rule.megatron_name for rule in rules])
    emitted = all_rules(architecture)
    yield from _twice("Hugging Face tensor", [part.name for rule in emitted for part in rule.parts])
    stacked = is_stacked(architecture)
    places = [stored_place(rule, architecture, stacked=stacked) for rule in emitted]
    yield from _twice("place in a checkpoint", [f"{place.key} {list(place.index)}" for place in places])
    for rule in emitted:
        if rule_for(rule.megatron_name, architecture) != rule:
            yield f"{rule.megatron_name}: another rule is found under this name"
        yield from _part_problems(rule, architecture)


def _twice(what: str, names: list[str]) -> Iterator[str]:
    for name, count in Counter(names).items():
        if count > 1:
            yield f"{what} {name} has {count} rules"


def _part_problems(rule: Rule, architecture: Architecture) -> Iterator[str]:
    shapes = [part.shape for part in rule.parts]
    wanted = {Kind.QKV: _HEADS, Kind.GATED: _GATE_AND_UP}.get(rule.kind, _ONE_PART)
    if len(shapes) != wanted:
        yield f"{rule.megatron_name}: {rule.kind} is made of {wanted} tensors, not of {len(shapes)}"
        return
    if len({shape[1:] for shape in shapes}) > 1:
        yield f"{rule.megatron_name}: its tensors differ in more than their rows: {shapes}"
    if rule.kind is Kind.ROW and len(shapes[0]) < 2:
        yield f"{rule.megatron_name}: {rule.kind} is cut by columns, and {rule.hf_names[0]} has none"
    if rule.kind is Kind.VOCAB and shapes[0][0] != architecture.vocab_size:
        yield f"{rule.megatron_name}: {rule.kind} has {architecture.vocab_size} rows, {rule.hf_names[0]} has {shapes[0][0]}"
    if rule.kind is Kind.QKV:
        query, key, value = (shape[0] for shape in shapes)
        if key != value or key % architecture.head_dim or query % key:
            yield f"{rule.megatron_name}: {query}, {key} and {value} rows are no heads of {architecture.head_dim} in groups"


def shard_problems(source: HuggingFaceSource, architecture: Architecture) -> Iterator[str]:
    """Parameters whose tensors are not what they were after they have been cut over ranks and put together again."""
    for rule in all_rules(architecture):
        for ranks in _TENSOR_PARALLEL_SIZES:
            padded = padded_vocab_size(architecture.vocab_size, ranks)
            try:
                shards = [load_shard(rule, source, architecture, rank, ranks, padded) for rank in range(ranks)]
            except ConversionError:
                if ranks == 1:
                    raise
                continue  # a size that does not divide by two
            yield from _changed(rule, shards, source, architecture)


def _changed(rule: Rule, shards: list[Tensor], source: HuggingFaceSource, architecture: Architecture) -> Iterator[str]:
    back = dict(to_hf(rule, shards, architecture))
    whole = dict(to_hf(rule, [load_shard(rule, source, architecture)], architecture))
    for part in rule.parts:
        # a tensor that is stored in one piece under its own name is compared with what is stored
        expected = source.read(part.name) if part.name in source else whole[part.name]
        if not torch.equal(back[part.name], expected):
            yield f"{part.name}: cut over {len(shards)} ranks as {rule.kind} and put together again, it is another tensor"
