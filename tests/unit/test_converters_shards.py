"""Layouts: shards equal a slow reference written with loops over heads, and going back gives the same
bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from converters.checkpoint.source import open_source
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.layouts import padded_vocab_size, runs_of
from converters.mapping.rule import Kind, Rule, is_expert
from converters.mapping.rules import all_rules, hf_names, hf_tensors, rule_for
from converters.mapping.shards import load_shard, to_hf
from converters.model_config.architecture import Architecture
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_drawn import DrawnModel, MemorySource, drawn_models
from tests.unit.converters_tiny import ALONE, save_tiny, stored_tensors, tiny_config

pytestmark = newest_megatron


def reference_shard(
    rule: Rule, tensors: dict[str, Tensor], architecture: Architecture, rank: int, size: int, padded: int
) -> Tensor:
    """One rank's shard, row by row, from the description of the layouts."""
    parts = [tensors[name] for name in rule.hf_names]
    if rule.kind is Kind.REPLICATED:
        return parts[0]
    if rule.kind is Kind.ROW:
        share = parts[0].shape[1] // size
        return torch.stack(
            [torch.stack([row[rank * share + column] for column in range(share)]) for row in parts[0]]
        )
    rows: list[Tensor] = []
    if rule.kind is Kind.GATED:
        share = parts[0].shape[0] // size
        for part in parts:
            rows += [part[rank * share + row] for row in range(share)]
        return torch.stack(rows)
    if rule.kind is Kind.COLUMN:
        rows = list(parts[0])
    elif rule.kind is Kind.VOCAB:
        rows = [
            parts[0][row] if row < parts[0].shape[0] else torch.zeros_like(parts[0][0])
            for row in range(padded)
        ]
    elif rule.megatron_name.endswith(("in_proj.weight", "conv1d.weight")):
        rows = gated_delta_rows(rule, parts, architecture)
    else:
        heads_per_group = architecture.num_attention_heads // architecture.num_key_value_heads
        if architecture.output_gate:
            # each query head has its gate behind it; Megatron-Core wants the gates of a group behind its
            # query heads
            width = architecture.head_dim
            heads = [
                parts[0][head * width : (head + 1) * width]
                for head in range(2 * architecture.num_attention_heads)
            ]
            for group in range(architecture.num_key_value_heads):
                own = heads[2 * group * heads_per_group : 2 * (group + 1) * heads_per_group]
                for block in [
                    *own[::2],
                    *own[1::2],
                    *(part[group * width : (group + 1) * width] for part in parts[1:]),
                ]:
                    rows += list(block)
            share = len(rows) // size
            return torch.stack(rows[rank * share : (rank + 1) * share])
        for group in range(architecture.num_key_value_heads):
            for head in range(heads_per_group):
                for index in range(architecture.head_dim):
                    rows.append(parts[0][(group * heads_per_group + head) * architecture.head_dim + index])
            for part in parts[1:]:
                for index in range(architecture.head_dim):
                    rows.append(part[group * architecture.head_dim + index])
    share = len(rows) // size
    return torch.stack(rows[rank * share : (rank + 1) * share])


def gated_delta_rows(rule: Rule, parts: list[Tensor], architecture: Architecture) -> list[Tensor]:
    """Rows key head by key head: query, key, values and, of the projection, gates, step sizes and decays of
    its value heads."""
    net = architecture.gated_delta
    assert net is not None
    values, gates = net.values // net.key_heads, net.value_heads // net.key_heads
    if net.stored_by_head and len(parts) == 2:
        blocks = [list(part.split(len(part) // net.key_heads)) for part in parts]
    else:
        widths = [net.key_width, net.key_width, values, *([values, gates, gates] if len(parts) > 1 else [])]
        blocks = []
        rest = torch.cat(parts)
        for width in widths:
            own, rest = rest[: width * net.key_heads], rest[width * net.key_heads :]
            blocks.append(list(own.split(width)))
    return [row for head in range(net.key_heads) for block in blocks for row in block[head]]


def check_both_ways(architecture: Architecture, tp_size: int, padded: int, expert_tp_size: int = 1) -> None:
    source = MemorySource(architecture)
    seen: dict[str, Tensor] = {}
    for rule in all_rules(architecture):
        size = expert_tp_size if is_expert(rule.megatron_name) else tp_size
        shards = [load_shard(rule, source, architecture, rank, size, padded) for rank in range(size)]
        for rank, shard in enumerate(shards):
            expected = reference_shard(rule, source.tensors, architecture, rank, size, padded)
            assert shard.is_contiguous()
            assert torch.equal(shard, expected), (rule.megatron_name, rank, size)
        whole = reference_shard(rule, source.tensors, architecture, 0, 1, padded)
        for run in runs_of(rule, architecture.head_dim, padded):
            rows = source.tensors[rule.parts[run.part].name][run.start : run.stop]
            assert torch.equal(whole[run.position : run.position + len(rows)], rows), rule.megatron_name
        for name, tensor in to_hf(rule, shards, architecture):
            assert name not in seen
            assert tensor.is_contiguous()
            seen[name] = tensor
    assert seen.keys() == source.tensors.keys()
    assert all(torch.equal(seen[name], source.tensors[name]) for name in seen)


@settings(max_examples=40, derandomize=True)
@given(drawn=drawn_models())
def test_any_shape_equals_the_reference_and_comes_back(drawn: DrawnModel) -> None:
    check_both_ways(drawn.architecture, drawn.tensor_size, drawn.padded_vocab, drawn.expert_tensor_size)


@sampled(8)
@pytest.mark.parametrize("name", ALONE)
@pytest.mark.parametrize("tp_size", [1, 2])
def test_every_family_equals_the_reference(name: str, tp_size: int) -> None:
    architecture = read_architecture(tiny_config(name))
    check_both_ways(architecture, tp_size, padded_vocab_size(101, tp_size, 4), 3 - tp_size)


def test_more_ranks_than_groups_cut_through_a_group() -> None:
    check_both_ways(
        dataclasses.replace(
            read_architecture(tiny_config("llama_one_group")), ffn_hidden_size=54, head_dim=12
        ),
        3,
        102,
    )


@sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALONE)
def test_saved_models_come_back_bit_for_bit(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = save_tiny(tmp_path, name, dtype, max_shard_size="60KB")
    source, architecture = open_source(tmp_path), read_architecture(model.config)
    assert sorted(hf_names(architecture)) == source.names()
    state = stored_tensors(tmp_path)
    for tp_size, padded in ((1, None), (2, 128)):
        for rule in all_rules(architecture):
            shards = [
                load_shard(rule, source, architecture, rank, tp_size, padded) for rank in range(tp_size)
            ]
            for hf_name, tensor in to_hf(rule, shards, architecture):
                # GLM keeps the bias that corrects the choice of experts in float32
                assert tensor.dtype == state[hf_name].dtype and (
                    tensor.dtype == dtype or hf_name.endswith("e_score_correction_bias")
                )
                assert torch.equal(tensor.view(torch.uint8), state[hf_name].view(torch.uint8))


def test_names_of_both_layer_specs_give_the_same_rule() -> None:
    architecture = read_architecture(tiny_config("qwen3"))
    for layer in range(3):
        prefix = f"decoder.layers.{layer}."
        assert rule_for(f"{prefix}self_attention.linear_qkv.layer_norm_weight", architecture) is rule_for(
            f"{prefix}input_layernorm.weight", architecture
        )
        fused = rule_for(f"{prefix}mlp.linear_fc1.layer_norm_weight", architecture)
        assert fused.hf_names == (f"model.layers.{layer}.post_attention_layernorm.weight",)


@pytest.mark.parametrize("name", ALONE)
def test_every_tensor_of_the_model_is_named_exactly_once(name: str, tmp_path: Path) -> None:
    architecture = read_architecture(save_tiny(tmp_path, name).config)
    names = hf_names(architecture)
    assert len(names) == len(set(names))
    assert {tensor.name: tensor.shape for tensor in hf_tensors(architecture)} == {
        key: tuple(value.shape) for key, value in stored_tensors(tmp_path).items()
    }
    parameters = [rule.megatron_name for rule in all_rules(architecture)]
    assert len(parameters) == len(set(parameters))


def test_output_layer_of_a_tied_model_is_a_copy_that_emits_nothing() -> None:
    architecture = read_architecture(tiny_config("qwen2_tied"))
    assert "output_layer.weight" not in {rule.megatron_name for rule in all_rules(architecture)}
    rule = rule_for("output_layer.weight", architecture)
    source = MemorySource(architecture)
    shards = [load_shard(rule, source, architecture, rank, 2, 104) for rank in range(2)]
    assert torch.equal(torch.cat(shards)[:101], source.tensors["model.embed_tokens.weight"])
    assert list(to_hf(rule, shards, architecture)) == []


@pytest.mark.parametrize(
    "name",
    [
        "decoder.layers.3.input_layernorm.weight",
        "decoder.layers.00.input_layernorm.weight",
        "decoder.layers.-1.input_layernorm.weight",
        "decoder.layers.0.self_attention.linear_qkv.bias",
        "decoder.layers.0.self_attention.q_layernorm.weight",
        "decoder.layers.0.mlp.linear_fc1._extra_state",
        "module.embedding.word_embeddings.weight",
        "lm_head.weight",
        "",
    ],
)
def test_names_the_model_does_not_have_are_refused(name: str) -> None:
    with pytest.raises(ConversionError, match="Fix: "):
        rule_for(name, read_architecture(tiny_config("llama")))


def test_dtype_is_changed_only_on_request() -> None:
    architecture = read_architecture(tiny_config("qwen2"))
    source = MemorySource(architecture, torch.float32)
    rule = rule_for("decoder.layers.1.self_attention.linear_qkv.weight", architecture)
    shard = load_shard(rule, source, architecture, 0, 1, dtype=torch.bfloat16)
    assert shard.dtype == torch.bfloat16
    assert torch.equal(shard, load_shard(rule, source, architecture, 0, 1).bfloat16())
    source.tensors["model.layers.1.self_attn.k_proj.weight"] = source.tensors[
        "model.layers.1.self_attn.k_proj.weight"
    ].half()
    with pytest.raises(ConversionError, match=r"different dtypes[\s\S]*k_proj.weight: torch.float16"):
        load_shard(rule, source, architecture)
    assert load_shard(rule, source, architecture, dtype=torch.float32).dtype == torch.float32


def test_results_share_no_memory_with_the_shards() -> None:
    architecture = read_architecture(tiny_config("llama"))
    source = MemorySource(architecture)
    for rule in all_rules(architecture):
        shard = load_shard(rule, source, architecture)
        before = shard.clone()
        for _, tensor in to_hf(rule, [shard], architecture):
            tensor.zero_()
        assert torch.equal(shard, before)


def test_parameters_that_want_gradients_are_accepted() -> None:
    architecture = read_architecture(tiny_config("llama"))
    rule = rule_for("decoder.layers.0.mlp.linear_fc1.weight", architecture)
    parameter = torch.nn.Parameter(load_shard(rule, MemorySource(architecture, torch.float32), architecture))
    assert all(not tensor.requires_grad for _, tensor in to_hf(rule, [parameter], architecture))


def test_impossible_cuts_and_wrong_shards_are_refused() -> None:
    architecture = read_architecture(tiny_config("llama"))
    source = MemorySource(architecture)
    qkv = rule_for("decoder.layers.0.self_attention.linear_qkv.weight", architecture)
    embedding = rule_for("embedding.word_embeddings.weight", architecture)
    with pytest.raises(ConversionError, match="cannot be cut into 3 equal parts"):
        load_shard(qkv, source, architecture, 0, 3)
    with pytest.raises(ConversionError, match="rank 2 of 2 does not exist"):
        load_shard(qkv, source, architecture, 2, 2)
    with pytest.raises(
        ConversionError, match=r"padded vocabulary 100 is smaller than the vocabulary 101[\s\S]*pad to 102"
    ):
        load_shard(embedding, source, architecture, 0, 2, 100)
    shards = [load_shard(qkv, source, architecture, rank, 2) for rank in range(2)]
    with pytest.raises(ConversionError, match=r"shard of rank 0 .*\[50, 42\], expected .*\[100, 42\]"):
        list(to_hf(qkv, shards[:1], architecture))
    with pytest.raises(ConversionError, match="shard of rank 1"):
        list(to_hf(qkv, [shards[0], shards[1].float()], architecture))
    with pytest.raises(ConversionError, match="no shards given"):
        list(to_hf(qkv, [], architecture))
    source.tensors["model.layers.0.self_attn.v_proj.weight"] = torch.zeros(20, 41)
    with pytest.raises(
        ConversionError, match=r"v_proj.weight has shape \[20, 41\], but config.json asks for \[20, 42\]"
    ):
        load_shard(qkv, source, architecture)


@given(vocab=st.integers(1, 1000), tp_size=st.integers(1, 9), divisible_by=st.integers(1, 130))
@settings(max_examples=100, derandomize=True)
def test_padded_vocabulary_is_the_smallest_that_fits(vocab: int, tp_size: int, divisible_by: int) -> None:
    padded = padded_vocab_size(vocab, tp_size, divisible_by)
    assert padded == next(
        size for size in range(vocab, vocab + tp_size * divisible_by) if size % (tp_size * divisible_by) == 0
    )
