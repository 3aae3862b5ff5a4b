"""Mixtures of experts: every form in which a checkpoint may hold them, every division over ranks, and what of
routing is carried over."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from converters.check import check_source
from converters.checkpoint.source import HuggingFaceSource, open_source
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rule import expert_index, is_expert, sequential_name, shift_expert
from converters.mapping.rules import all_rules, hf_names, rule_for
from converters.mapping.shards import load_shard, to_hf
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.mixture import MixtureOfExperts
from tests.tiers import newest_megatron, sampled, slow
from tests.unit.converters_tiny import save_tiny, stored_tensors, tiny_config

pytestmark = newest_megatron

SPARSE = [
    "glm4_moe",
    "mixtral",
    "mixtral_window_tied",
    "qwen2_moe",
    "qwen2_moe_mixed_tied",
    "qwen3_moe",
    "qwen3_moe_mixed",
]
SEQUENTIAL = "decoder.layers.1.mlp.experts.local_experts.4.linear_fc1.weight"
GROUPED = "decoder.layers.1.mlp.experts.linear_fc1.weight4"


def moved(tensors: dict[str, Tensor], old: str, new: str) -> dict[str, Tensor]:
    """The tensors with a part of their names replaced."""
    return {name.replace(old, new): tensor for name, tensor in tensors.items()}


def rewrite(directory: Path, tensors: dict[str, Tensor]) -> HuggingFaceSource:
    """Put other weights beside the config."""
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return open_source(directory)


@sampled(8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", SPARSE)
def test_both_stored_forms_come_back_bit_for_bit_from_any_division(
    name: str, stacked: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Every rank of an expert-parallel group names its experts from 0, and cuts each over its
    expert-tensor-parallel ranks."""
    model = save_tiny(tmp_path / "alone", name, dtype)
    save_tiny(tmp_path / "stored", name, dtype, max_shard_size="60KB", stacked_experts=stacked)
    expected, source, architecture = (
        stored_tensors(tmp_path / "alone"),
        open_source(tmp_path / "stored"),
        read_architecture(model.config),
    )
    assert any(tensor.endswith(".mlp.experts.gate_up_proj") for tensor in source.names()) == stacked
    check_source(source, architecture)
    assert architecture.mixture is not None
    for expert_parallel in (1, architecture.mixture.num_experts):
        share = architecture.mixture.num_experts // expert_parallel
        for expert_tensor in (1, 2):
            seen = {}
            for named in all_rules(architecture):
                global_name, size = named.megatron_name, 2
                if is_expert(global_name):
                    offset, size = expert_index(global_name) // share * share, expert_tensor
                    local_name = shift_expert(global_name, -offset)
                    assert expert_index(local_name) < share
                    global_name = shift_expert(local_name, offset)
                rule = rule_for(global_name, architecture)
                shards = [load_shard(rule, source, architecture, rank, size) for rank in range(size)]
                seen |= dict(to_hf(rule, shards, architecture))
            assert seen.keys() == expected.keys() == set(hf_names(architecture))
            assert all(
                torch.equal(seen[key].view(torch.uint8), expected[key].view(torch.uint8)) for key in seen
            )


@pytest.mark.parametrize(
    ("stacked", "old", "new"),
    [
        (False, ".block_sparse_moe.", ".mlp."),
        (True, ".mlp.", ".block_sparse_moe."),
        (True, ".mlp.gate.", ".block_sparse_moe.gate."),
        (False, ".layers.1.block_sparse_moe.", ".layers.1.mlp."),
    ],
)
def test_every_name_of_the_mixtral_block_that_transformers_reads_is_read(
    stacked: bool, old: str, new: str, tmp_path: Path
) -> None:
    model = save_tiny(tmp_path, "mixtral", stacked_experts=stacked)
    source = rewrite(tmp_path, moved(stored_tensors(tmp_path), old, new))
    loaded, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    state, architecture = loaded.state_dict(), read_architecture(model.config)
    check_source(source, architecture)
    for layer in range(3):
        prefix, block = f"decoder.layers.{layer}.mlp.", f"model.layers.{layer}.mlp."
        router = load_shard(rule_for(f"{prefix}router.weight", architecture), source, architecture)
        assert torch.equal(router, state[f"{block}gate.weight"])
        for expert in range(5):
            for number, parameter in ((1, "gate_up_proj"), (2, "down_proj")):
                rule = rule_for(
                    f"{prefix}experts.local_experts.{expert}.linear_fc{number}.weight", architecture
                )
                assert torch.equal(
                    load_shard(rule, source, architecture), state[f"{block}experts.{parameter}"][expert]
                )


@pytest.mark.parametrize("stacked", [False, True])
def test_a_rank_reads_no_byte_of_other_ranks(
    stacked: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture = read_architecture(save_tiny(tmp_path, "qwen3_moe", stacked_experts=stacked).config)
    source, read = open_source(tmp_path), HuggingFaceSource.read
    elements: list[int] = []

    def counting(self: HuggingFaceSource, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        tensor = read(self, name, slices)
        elements.append(tensor.numel())
        return tensor

    monkeypatch.setattr(HuggingFaceSource, "read", counting)
    for rule in [rule for rule in all_rules(architecture) if is_expert(rule.megatron_name)]:
        for rank in range(2):
            shard = load_shard(rule, source, architecture, rank, 2)
            assert sum(elements) == shard.numel()
            elements.clear()


@slow
def test_one_expert_of_a_huge_stack_costs_no_memory(tmp_path: Path) -> None:
    """The stack of 3 GiB is larger than what the process may grow by; the file is sparse, so that it takes no
    disk."""
    experts, width, hidden = 512, 768, 2048
    size = 2 * experts * 2 * width * hidden
    tensors = {
        "model.layers.0.mlp.experts.gate_up_proj": {
            "dtype": "BF16",
            "shape": [experts, 2 * width, hidden],
            "data_offsets": [0, size],
        }
    }
    header = json.dumps(tensors).encode()
    header += b" " * (-len(header) % 8)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)
    program = f"""
import resource
from converters.families.read import read_architecture
from converters.mapping.rules import rule_for
from converters.mapping.shards import load_shard
from converters.checkpoint.source import open_source
architecture = read_architecture({{
    "model_type": "qwen3_moe", "num_hidden_layers": 1, "num_experts": {experts},
    "moe_intermediate_size": {width}, "hidden_size": {hidden},
}})
rule = rule_for("decoder.layers.0.mlp.experts.local_experts.300.linear_fc1.weight", architecture)
source = open_source({str(tmp_path)!r})
source.shape("model.layers.0.mlp.experts.gate_up_proj")
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert load_shard(rule, source, architecture, 1, 2).shape == ({width}, {hidden})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(run.stdout) < 64 * 1024, "KiB"


def test_what_is_wrong_with_stacks_is_reported_at_once(tmp_path: Path) -> None:
    save_tiny(tmp_path, "qwen3_moe_mixed", stacked_experts=True)
    tensors = stored_tensors(tmp_path)
    block = "model.layers.0.mlp.experts."
    tensors[f"{block}down_proj"] = tensors[f"{block}down_proj"].transpose(1, 2).contiguous()
    tensors[f"{block}6.up_proj.weight"] = torch.zeros(22, 42)
    tensors[f"{block}7.up_proj.weight"] = torch.zeros(22, 42)
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(7, 42)
    del tensors["model.layers.2.mlp.gate.weight"]
    source, architecture = rewrite(tmp_path, tensors), read_architecture(tiny_config("qwen3_moe_mixed"))
    with pytest.raises(ConversionError) as caught:
        check_source(source, architecture)
    assert sorted(caught.value.details) == [
        "missing: model.layers.2.mlp.gate.weight [7, 42]",
        (
            f"shape: {block}down_proj is [7, 22, 42], config.json asks for [7, 42, 22] = [num_experts, "
            "hidden_size, moe_intermediate_size]"
        ),
        f"stored more than once: {block}6.up_proj.weight, {block}gate_up_proj",
        "unknown: model.layers.0.mlp.experts.7.up_proj.weight [22, 42]",
        "unknown: model.layers.1.mlp.gate.weight [7, 42]",
    ]
    with pytest.raises(
        ConversionError,
        match=r"experts\.down_proj has shape \[7, 22, 42\], but config.json asks for \[7, 42, 22\]",
    ):
        load_shard(
            rule_for("decoder.layers.0.mlp.experts.local_experts.0.linear_fc2.weight", architecture),
            source,
            architecture,
        )
    with pytest.raises(ConversionError, match=r"6\.up_proj\.weight is stored more than once"):
        load_shard(
            rule_for("decoder.layers.0.mlp.experts.local_experts.6.linear_fc1.weight", architecture),
            source,
            architecture,
        )
    with pytest.raises(ConversionError, match=r"has no tensor 'model\.layers\.2\.mlp\.gate\.weight'"):
        load_shard(rule_for("decoder.layers.2.mlp.router.weight", architecture), source, architecture)


def test_names_of_experts() -> None:
    assert (
        is_expert(SEQUENTIAL)
        and is_expert(GROUPED)
        and is_expert(f"module.{GROUPED}")
        and is_expert("mlp.experts.weight1")
    )
    for name in (
        "decoder.layers.1.mlp.router.weight",
        "decoder.layers.1.mlp.linear_fc1.weight",
        "decoder.layers.1.mlp.shared_experts.x",
    ):
        assert not is_expert(name)
    assert expert_index(SEQUENTIAL) == expert_index(GROUPED) == 4
    assert shift_expert(SEQUENTIAL, 12) == "decoder.layers.1.mlp.experts.local_experts.16.linear_fc1.weight"
    assert shift_expert(GROUPED, 12) == "decoder.layers.1.mlp.experts.linear_fc1.weight16"
    assert sequential_name(GROUPED) == sequential_name(SEQUENTIAL) == SEQUENTIAL
    for name in (
        "decoder.layers.1.mlp.router.weight",
        "decoder.layers.1.mlp.experts.weight1",
        "decoder.layers.1.mlp.experts.linear_fc1.weight",
    ):
        with pytest.raises(ConversionError, match="Fix: "):
            shift_expert(name, 1)


def test_both_ways_of_naming_an_expert_give_the_same_rule() -> None:
    architecture = read_architecture(tiny_config("qwen3_moe_mixed"))
    for layer in (0, 2):
        for expert in range(7):
            for number in (1, 2):
                prefix = f"decoder.layers.{layer}.mlp.experts."
                rule = rule_for(f"{prefix}linear_fc{number}.weight{expert}", architecture)
                assert rule is rule_for(
                    f"{prefix}local_experts.{expert}.linear_fc{number}.weight", architecture
                )
                assert all(f"layers.{layer}.mlp.experts.{expert}." in name for name in rule.hf_names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("decoder.layers.0.mlp.experts.local_experts.7.linear_fc1.weight", "a layer has experts 0 to 6"),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight7", "a layer has experts 0 to 6"),
        ("decoder.layers.0.mlp.experts.weight1", "switch moe_grouped_gemm off"),
        ("decoder.layers.0.mlp.experts.linear_fc1.weight03", "not the name of a weight of one expert"),
        (
            "decoder.layers.1.mlp.experts.local_experts.0.linear_fc1.weight",
            "no parameter of a qwen3_moe model",
        ),
        ("decoder.layers.1.mlp.router.weight", "no parameter of a qwen3_moe model"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "no parameter of a qwen3_moe model"),
        ("decoder.layers.0.mlp.router.expert_bias", "no parameter of a qwen3_moe model"),
        ("decoder.layers.0.mlp.router.bias", "no parameter of a qwen3_moe model"),
    ],
)
def test_experts_that_the_model_does_not_have_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        rule_for(name, read_architecture(tiny_config("qwen3_moe_mixed")))


def test_an_expert_that_cannot_be_cut_is_refused() -> None:
    architecture = read_architecture(tiny_config("qwen3_moe"))
    shards = [torch.zeros(14, 42)] * 3
    with pytest.raises(ConversionError, match="22 rows or columns cannot be cut into 3 equal parts"):
        list(to_hf(rule_for(SEQUENTIAL, architecture), shards, architecture))


def mixture_of(config: Any) -> MixtureOfExperts:
    mixture = read_architecture(config).mixture
    assert mixture is not None
    return mixture


def test_facts_of_every_family() -> None:
    assert mixture_of(tiny_config("mixtral", router_aux_loss_coef=0.02)) == MixtureOfExperts(
        5, 4, 52, True, (True,) * 3, 0.02
    )
    assert mixture_of(tiny_config("qwen3_moe")) == MixtureOfExperts(7, 4, 22, True, (True,) * 3, 0.001)
    assert mixture_of(tiny_config("qwen3_moe_mixed")) == MixtureOfExperts(
        7, 4, 22, False, (True, False, True), 0.001
    )
    assert mixture_of(tiny_config("qwen2_moe")) == MixtureOfExperts(7, 3, 22, False, (True,) * 3, 0.001, 32)
    assert mixture_of(tiny_config("qwen2_moe_mixed_tied")) == MixtureOfExperts(
        7, 3, 22, True, (True, False, True), 0.001, 32
    )
    # What the published config.json files hold, less the sizes.
    older = {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_window_layers": 48,
    }
    older |= {
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": 1e6,
        "moe_intermediate_size": 768,
        "head_dim": 128,
    }
    assert mixture_of(older) == MixtureOfExperts(128, 8, 768, True, (True,) * 24, 0.001)
    assert mixture_of({"model_type": "mixtral", "num_hidden_layers": 2}) == MixtureOfExperts(
        8, 2, 14336, True, (True, True), 0.001
    )
    published = {
        "model_type": "qwen2_moe",
        "num_hidden_layers": 24,
        "max_window_layers": 21,
        "sliding_window": 32768,
        "num_experts": 60,
    }
    published |= {
        "use_sliding_window": False,
        "decoder_sparse_step": 1,
        "norm_topk_prob": False,
        "shared_expert_intermediate_size": 5632,
    }
    assert mixture_of(published) == MixtureOfExperts(60, 4, 1408, False, (True,) * 24, 0.001, 5632)
    for name in ("mixtral", "qwen2_moe_mixed_tied", "qwen3_moe_mixed"):
        config = tiny_config(name)
        assert (
            read_architecture(config.to_dict())
            == read_architecture(config)
            == read_architecture(config.to_diff_dict())
        )
    assert {read_architecture(tiny_config("mixtral")): 1}


@pytest.mark.parametrize("layers", [3, 7])
@pytest.mark.parametrize("step", [1, 2, 3, 9])
@pytest.mark.parametrize("dense", [[], [1], [0, 2, 5, 40, -1]])
@pytest.mark.parametrize("name", ["qwen2_moe", "qwen3_moe"])
def test_layers_with_experts_are_those_of_transformers(
    name: str, layers: int, step: int, dense: list[int]
) -> None:
    config = tiny_config(name, num_hidden_layers=layers, decoder_sparse_step=step, mlp_only_layers=dense)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    architecture = read_architecture(config)
    assert [architecture.is_sparse(layer) for layer in range(layers)] == [
        hasattr(layer.mlp, "experts") for layer in model.model.layers
    ]
    frequency = megatron_settings(architecture).transformer.get("moe_layer_freq")
    sparse = [int(architecture.is_sparse(layer)) for layer in range(layers)]
    assert frequency == (None if not any(sparse) else 1 if all(sparse) else sparse)


def test_a_model_without_experts_is_dense() -> None:
    assert read_architecture(tiny_config("qwen3_moe", num_experts=0)).mixture is None
    assert read_architecture(tiny_config("qwen2_moe", num_experts=0)).mixture is None
    assert not any(
        "moe" in key for key in megatron_settings(read_architecture(tiny_config("qwen3"))).transformer
    )


def test_one_expert_a_token_with_the_weight_one_goes_round_the_constructor_of_megatron() -> None:
    for config in (
        tiny_config("mixtral", num_experts_per_tok=1),
        tiny_config("qwen3_moe", num_experts_per_tok=1),
    ):
        settings = megatron_settings(read_architecture(config))
        assert settings.transformer["moe_router_pre_softmax"] is True
        assert settings.attributes == {"moe_router_pre_softmax": False}
    settings = megatron_settings(
        read_architecture(tiny_config("qwen3_moe", num_experts_per_tok=1, norm_topk_prob=False))
    )
    assert settings.transformer["moe_router_pre_softmax"] is True and settings.attributes == {}
