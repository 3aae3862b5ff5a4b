"""Whole tensors out of many shards at once: against one parameter at a time, for every shape and cut; and
that the copies stay few."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rule import Rule, is_expert
from converters.mapping.rules import all_rules
from converters.mapping.shards import load_shard, to_hf
from converters.model_config.architecture import Architecture
from megarl.models.engine.gather_stream import in_buckets
from megarl.models.megatron.weight_stream import assembly_of
from megarl.weight_sync.plan import Copy, merged
from tests.tiers import newest_megatron
from tests.unit.converters_drawn import DrawnModel, MemorySource, drawn_models
from tests.unit.converters_tiny import tiny_config

pytestmark = newest_megatron


def assembled(
    rules: Sequence[Rule], shards: Sequence[Sequence[Tensor]], architecture: Architecture
) -> list[tuple[str, Tensor]]:
    """As a stream has them: the shards of all parameters behind one another, a row a rank."""
    ranks = len(shards[0])
    rows = torch.stack([torch.cat([of_rule[rank].flatten() for of_rule in shards]) for rank in range(ranks)])
    return assembly_of(rules, [of_rule[0].shape for of_rule in shards], ranks, architecture).tensors(rows)


@settings(max_examples=60, derandomize=True)
@given(drawn=drawn_models())
def test_the_tensors_are_those_of_one_parameter_at_a_time(drawn: DrawnModel) -> None:
    architecture, source = drawn.architecture, MemorySource(drawn.architecture)
    for of_experts, ranks in ((False, drawn.tensor_size), (True, drawn.expert_tensor_size)):
        rules = [rule for rule in all_rules(architecture) if is_expert(rule.megatron_name) is of_experts]
        if not rules:
            continue
        shards = [
            [load_shard(rule, source, architecture, rank, ranks, drawn.padded_vocab) for rank in range(ranks)]
            for rule in rules
        ]
        expected = [
            pair
            for rule, of_rule in zip(rules, shards, strict=True)
            for pair in to_hf(rule, of_rule, architecture)
        ]
        found = assembled(rules, shards, architecture)
        assert [name for name, _ in found] == [name for name, _ in expected]
        for (name, tensor), (_, right) in zip(found, expected, strict=True):
            assert tensor.is_contiguous() and tensor.shape == right.shape and torch.equal(tensor, right), name


@settings(max_examples=200, derandomize=True)
@given(
    forms=st.lists(st.tuples(st.integers(1, 3), st.integers(1, 2)), min_size=1, max_size=3),
    picks=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 40)), min_size=1, max_size=30),
    seed=st.integers(0, 9),
)
def test_merged_copies_copy_the_same(
    forms: list[tuple[int, int]], picks: list[tuple[int, int]], seed: int
) -> None:
    """Sources anywhere, one within another too; targets apart, in no order."""
    order = list(range(len(picks)))
    random.Random(seed).shuffle(order)
    copies = []
    for place, (form, begin) in zip(order, picks, strict=True):
        length, step = forms[form % len(forms)]
        copies.append(Copy(begin, 10 * place, (length,), (step,), (1,)))
    source = torch.arange(60)
    expected, found = torch.zeros(310, dtype=torch.int64), torch.zeros(310, dtype=torch.int64)
    for copy in copies:
        copy.run(source, expected)
    fewer = merged(copies)
    for copy in fewer:
        copy.run(source, found)
    assert torch.equal(found, expected) and len(fewer) <= len(copies)


@pytest.mark.parametrize("ranks", [1, 2])
def test_many_experts_need_no_more_copies_than_few(ranks: int) -> None:
    base = read_architecture(tiny_config("qwen3_moe"))
    assert base.mixture is not None
    counts = []
    for experts in (3, 48):
        mixture = dataclasses.replace(base.mixture, num_experts=experts, ffn_hidden_size=6)
        architecture = dataclasses.replace(base, mixture=mixture)
        prefix = "decoder.layers.1.mlp.experts."
        rules = [rule for rule in all_rules(architecture) if rule.megatron_name.startswith(prefix)]
        assert len(rules) == 2 * experts
        source = MemorySource(architecture)
        shapes = [load_shard(rule, source, architecture, 0, ranks).shape for rule in rules]
        counts.append(len(assembly_of(rules, shapes, ranks, architecture)._copies))
    # with one rank everything lies in its shards as it should; with two, gate, up and down are one each
    assert counts[0] == counts[1] <= 3 * (ranks - 1)


def test_heads_of_all_groups_and_ranks_are_one_copy_a_projection() -> None:
    architecture = read_architecture(tiny_config("llama"))
    rule = next(rule for rule in all_rules(architecture) if rule.megatron_name.endswith("linear_qkv.weight"))
    source = MemorySource(architecture)
    shape = load_shard(rule, source, architecture, 0, 2).shape
    assert len(assembly_of([rule], [shape], 2, architecture)._copies) <= 3


def test_a_shard_of_another_shape_is_named() -> None:
    architecture = read_architecture(tiny_config("llama"))
    rule = all_rules(architecture)[1]
    with pytest.raises(
        ConversionError, match=rf"{rule.megatron_name}: the shard of rank 0 is \[1000\], expected"
    ):
        assembly_of([rule], [(1000,)], 1, architecture)


def test_buckets_are_filled_in_order_and_a_large_one_stands_alone() -> None:
    assert list(in_buckets([4, 6, 1, 9, 30, 2, 0, 8, 1], lambda size: size, 10)) == [
        [4, 6],
        [1, 9],
        [30],
        [2, 0, 8],
        [1],
    ]
    assert list(in_buckets([], len, 10)) == []
