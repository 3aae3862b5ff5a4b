"""Layers that predict further tokens: carried over both ways to the bit, all of a layer or nothing of it, and
never lost in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from converters.checkpoint.source import open_source
from converters.checkpoint.work import ConversionResult
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.families.read import read_architecture
from converters.importing import import_model, plan_import
from converters.mapping.logical import shape_of_parameter
from converters.mapping.rules import all_rules, rule_for
from converters.model_config.megatron_settings import megatron_settings
from converters.opening import open_any, open_megatron
from converters.torch_dist.keys import stored_place
from converters.torch_dist.reader import TorchDistCheckpoint
from converters.verify import verify
from megarl.models.megatron.specs import PortableAttention
from tests.prediction_layers import add_prediction_layers
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_tiny import save_tiny, stored_tensors, tiny_config
from tests.unit.test_converters_megatron import cpu_device, one_process_group

__all__ = ["cpu_device", "one_process_group"]

pytestmark = newest_megatron
ALL_SPARSE_TIED = {"first_k_dense_replace": 0, "tie_word_embeddings": True}


def bring_in(source: Path, target: Path, **options: Any) -> ConversionResult:
    return import_model(plan_import(open_source(source), **options), target)


def there_and_back(directory: Path, **options: Any) -> Path:
    bring_in(directory, directory.with_name("mcore"), **options)
    export_model(plan_export(open_megatron(directory.with_name("mcore"))), directory.with_name("back"))
    return directory.with_name("back")


def assert_same_tensors(one: Path, other: Path) -> None:
    left, right = stored_tensors(one), stored_tensors(other)
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.view(torch.uint8), right[name].view(torch.uint8)), name


def test_the_tiny_layers_are_those_that_transformers_reads(tmp_path: Path) -> None:
    save_tiny(tmp_path, "deepseek_v3")
    added = add_prediction_layers(tmp_path, count=2)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager")
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[34]\."]
    read = MtpModel.from_pretrained(model)
    assert torch.equal(read.layers[1].eh_proj.weight, added["model.layers.4.eh_proj.weight"])
    assert torch.equal(
        read.layers[0].mtp_block.mlp.experts.down_proj[7],
        added["model.layers.3.mlp.experts.7.down_proj.weight"],
    )


@sampled(1)
@pytest.mark.parametrize(
    ("count", "copies", "dtype", "changes"),
    [
        (1, True, torch.float32, {}),
        (2, False, torch.bfloat16, {}),
        (2, True, torch.bfloat16, ALL_SPARSE_TIED),
        (1, True, torch.float32, {"first_k_dense_replace": 3}),
    ],
)
def test_there_and_back_is_bit_exact(
    count: int, copies: bool, dtype: torch.dtype, changes: dict[str, Any], tmp_path: Path
) -> None:
    save_tiny(tmp_path / "hf", "deepseek_v3", dtype, **changes)
    add_prediction_layers(tmp_path / "hf", count, copies)
    assert_same_tensors(tmp_path / "hf", there_and_back(tmp_path / "hf"))
    assert verify(open_any(tmp_path / "hf"), open_any(tmp_path / "mcore")) == []
    assert verify(open_any(tmp_path / "mcore"), open_any(tmp_path / "back")) == []
    keys = [key for key in TorchDistCheckpoint(tmp_path / "mcore") if key.startswith("mtp.layers.0.")]
    layer = "mtp.layers.0.transformer_layer."
    outside = {f"mtp.layers.0.{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
    attention = {
        f"linear_{name}.weight" for name in ("q_down_proj", "q_up_proj", "kv_down_proj", "kv_up_proj", "proj")
    }
    attention |= {f"linear_{name}_up_proj.layer_norm_weight" for name in ("q", "kv")}
    mlp = {"mlp.linear_fc1.layer_norm_weight", "mlp.linear_fc1.weight", "mlp.linear_fc2.weight"}
    if changes.get("first_k_dense_replace") != 3:
        mlp = {
            f"mlp.{block}.linear_fc{number}.weight"
            for block in ("experts.experts", "shared_experts")
            for number in (1, 2)
        }
        mlp |= {"pre_mlp_layernorm.weight", "mlp.router.weight", "mlp.router.expert_bias"}
    inside = {"input_layernorm.weight", *mlp, *(f"self_attention.{name}" for name in attention)}
    assert set(keys) == outside | {layer + name for name in inside}


def test_weights_may_come_without_them(tmp_path: Path) -> None:
    """As transformers saves a model whose config counts them."""
    save_tiny(tmp_path / "hf", "deepseek_v3", num_nextn_predict_layers=1)
    assert_same_tensors(tmp_path / "hf", there_and_back(tmp_path / "hf"))
    assert verify(open_any(tmp_path / "hf"), open_any(tmp_path / "mcore")) == []


def test_weights_with_and_without_them_differ(tmp_path: Path) -> None:
    for name in ("with", "without"):
        save_tiny(tmp_path / name, "deepseek_v3", num_nextn_predict_layers=1)
    add_prediction_layers(tmp_path / "with")
    bring_in(tmp_path / "without", tmp_path / "mcore")
    found = verify(open_any(tmp_path / "with"), open_any(tmp_path / "mcore"))
    assert ("config", "prediction_layers") in {(difference.kind, difference.name) for difference in found}
    assert ("missing", "model.layers.3.eh_proj.weight") in {
        (difference.kind, difference.name) for difference in found
    }


def test_every_missing_or_added_tensor_is_named(tmp_path: Path) -> None:
    save_tiny(
        tmp_path / "hf", "deepseek_v3", n_routed_experts=4, n_group=2, num_experts_per_tok=2, topk_group=1
    )
    added = add_prediction_layers(tmp_path / "hf")
    file = tmp_path / "hf" / "model.safetensors"
    tensors = load_file(file)
    for key in added:
        rest = {name: tensor for name, tensor in tensors.items() if name != key}
        repeated = "embed_tokens" in key or "shared_head.head" in key
        for changed, named in [(rest, key)] * (not repeated) + [
            ({**tensors, f"{key}_too": tensors[key].clone()}, f"{key}_too")
        ]:
            save_file(changed, file, metadata={"format": "pt"})
            with pytest.raises(ConversionError, match=named.replace(".", r"\.")):
                bring_in(tmp_path / "hf", tmp_path / "mcore")
    # not counted by the config, they are unknown
    save_file(tensors, file, metadata={"format": "pt"})
    config = (tmp_path / "hf" / "config.json").read_text()
    (tmp_path / "hf" / "config.json").write_text(
        config.replace('"num_nextn_predict_layers": 1', '"num_nextn_predict_layers": 0')
    )
    with pytest.raises(ConversionError, match=r"unknown: model\.layers\.3\.eh_proj\.weight"):
        bring_in(tmp_path / "hf", tmp_path / "mcore")
    assert not (tmp_path / "mcore").exists()


@pytest.mark.parametrize(
    ("copy", "original"), [("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")]
)
def test_a_copy_that_says_something_else_is_refused(copy: str, original: str, tmp_path: Path) -> None:
    save_tiny(tmp_path / "hf", "deepseek_v3")
    add_prediction_layers(tmp_path / "hf")
    file, name = tmp_path / "hf" / "model.safetensors", f"model.layers.3.{copy}.weight"
    tensors = load_file(file)
    tensors[name][100, 41] += 1e-6
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        ConversionError,
        match=rf"{name} differs from {original}\.weight".replace(".", r"\.").replace(r"\\.", r"\."),
    ):
        bring_in(tmp_path / "hf", tmp_path / "mcore")
    outcome = bring_in(tmp_path / "hf", tmp_path / "mcore", allow_missing=(name,))
    assert outcome.notes["left_out"] == [name]
    export_model(plan_export(open_megatron(tmp_path / "mcore")), tmp_path / "back")
    assert stored_tensors(tmp_path / "back").keys() == tensors.keys() - {name}


def test_all_names_of_a_parameter_give_the_same_rule() -> None:
    architecture = read_architecture(tiny_config("deepseek_v3", num_nextn_predict_layers=2))
    layer = "mtp.layers.1.transformer_layer."
    for name in ("self_attention.kv_layernorm.weight", "self_attention.linear_kv_up_proj.layer_norm_weight"):
        rule = rule_for(f"mtp.layers.1.mtp_model_layer.{name}", architecture)
        assert rule is rule_for(f"{layer}self_attention.kv_layernorm.weight", architecture)
        assert rule.hf_names == ("model.layers.4.self_attn.kv_a_layernorm.weight",)
    grouped = rule_for(f"{layer}mlp.experts.linear_fc2.weight5", architecture)
    assert grouped.hf_names == ("model.layers.4.mlp.experts.5.down_proj.weight",)
    for name in ("enorm", "hnorm", "eh_proj"):
        assert rule_for(f"mtp.layers.1.{name}.weight", architecture).hf_names == (
            f"model.layers.4.{name}.weight",
        )
    assert rule_for("mtp.layers.1.final_layernorm.weight", architecture).hf_names == (
        "model.layers.4.shared_head.norm.weight",
    )


@pytest.mark.usefixtures("one_process_group", "cpu_device")
def test_megatron_has_the_same_parameters_under_the_same_keys() -> None:
    """The oracle is Megatron-Core's own model with its own prediction layers, whose spec keeps the norms
    between projections apart."""
    architecture = read_architecture(tiny_config("deepseek_v3", num_nextn_predict_layers=2))
    settings = megatron_settings(architecture)
    options = {
        "use_cpu_initialization": True,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "mtp_num_layers": 2,
    }
    config = MLATransformerConfig(**settings.transformer, **options, activation_func=torch.nn.functional.silu)
    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    for layer_spec in spec.layer_specs:
        layer_spec.submodules.self_attention.submodules.core_attention = PortableAttention
    further = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    model = GPTModel(config, spec, mtp_block_spec=further, **{**settings.model, "vocab_size": 104})
    names = []
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "cached" not in name and "local_tokens" not in name and "inv_freq" not in name:
            rule = rule_for(name, architecture)
            assert shape_of_parameter(rule, 104) == tuple(tensor.shape), name
            names.append(rule.megatron_name)
    assert sorted(names) == sorted(rule.megatron_name for rule in all_rules(architecture))
    keys = {
        value.key
        for value in model.mtp.sharded_state_dict("mtp.").values()
        if isinstance(value, (ShardedTensor, ShardedTensorFactory))
    }
    places = [
        stored_place(rule, architecture, stacked=False)
        for rule in all_rules(architecture)
        if rule.megatron_name.startswith("mtp.")
    ]
    apart = {
        "linear_q_up_proj.layer_norm_weight": "q_layernorm.weight",
        "linear_kv_up_proj.layer_norm_weight": "kv_layernorm.weight",
    }
    expected = set()
    for place in places:
        before, dot, last = place.key.partition("self_attention.")
        expected.add(before + dot + apart.get(last, last))
    assert keys == expected


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mtp.layers.2.enorm.weight", "the model has layers 0 to 1"),
        ("mtp.layers.0.enorm.bias", "nearest known name is mtp.layers.0.enorm.weight"),
        ("mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight12", "a layer has experts 0 to 11"),
        ("decoder.layers.3.input_layernorm.weight", "the model has layers 0 to 2"),
    ],
)
def test_what_the_model_does_not_have_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConversionError, match=message):
        rule_for(name, read_architecture(tiny_config("deepseek_v3", num_nextn_predict_layers=2)))


@pytest.mark.parametrize("count", [-1, 1.5, True])
def test_a_count_that_is_none_is_refused(count: Any) -> None:
    config = {**tiny_config("deepseek_v3").to_dict(), "num_nextn_predict_layers": count}
    with pytest.raises(ConversionError, match=r"num_nextn_predict_layers|num_mtp_layers"):
        read_architecture(config)


def test_those_of_glm_come_back_to_the_bit(tmp_path: Path) -> None:
    """Its attention is another one; and its config counts them where the weights that transformers saves have
    none."""
    save_tiny(tmp_path / "hf", "glm4_moe", torch.bfloat16, num_nextn_predict_layers=1)
    assert_same_tensors(tmp_path / "hf", there_and_back(tmp_path / "hf"))
    save_tiny(tmp_path / "two" / "hf", "glm4_moe", torch.bfloat16)
    add_prediction_layers(tmp_path / "two" / "hf")
    assert_same_tensors(tmp_path / "two" / "hf", there_and_back(tmp_path / "two" / "hf"))
    keys = set(TorchDistCheckpoint(tmp_path / "two" / "mcore"))
    assert {
        "mtp.layers.0.eh_proj.weight",
        "mtp.layers.0.transformer_layer.self_attention.linear_qkv.bias",
    } <= keys
    assert "mtp.layers.0.transformer_layer.mlp.router.expert_bias" in keys
