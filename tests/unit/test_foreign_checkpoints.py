"""Checkpoints of other trainers are exported bit for bit, from every form that they are stored in, with a
config made of what is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from converters.command import main
from converters.opening import open_megatron
from tests.tiers import sampled
from tests.unit.converters_tiny import stored_tensors
from tests.unit.foreign_checkpoints import (
    ARGUMENTS,
    arguments_for,
    assert_exported,
    config_of,
    is_refused,
    megatron_lm,
    renamed,
    split_experts,
    tensors_of,
    write_checkpoint,
)


@sampled(4)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_megatron_lm_exports_with_a_config_made_of_its_arguments(name: str, tmp_path: Path) -> None:
    source = megatron_lm(tmp_path, name)
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--eos-token-id", "7,9")
    config = config_of(tmp_path / "out")
    assert (
        config["eos_token_id"] == [7, 9] and config["bos_token_id"] is None and config["dtype"] == "float32"
    )
    assert main(["verify", str(tmp_path / "out"), str(source)]) == 0


def test_an_export_with_a_made_config_says_what_it_lacks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = megatron_lm(tmp_path, "llama")
    assert "Fix: pass --hf-config DIRECTORY of the model that was trained" in is_refused(source)
    capsys.readouterr()
    assert main(["export", str(source), str(tmp_path / "out"), "--eos-token-id", "7"]) == 0
    said = capsys.readouterr().out
    assert (
        "config.json: made from the trainer's settings, except bos_token_id = None, eos_token_id = 7" in said
    )
    assert "not_written: tokenizer, chat template, generation_config.json; --hf-config DIRECTORY" in said


def singleton_shards(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """As Megatron-Core stores layers with ``singleton_local_shards``: experts alone, gate and up alone."""
    found = {}
    for name, one in split_experts(key, tensor, 0).items():
        halves = (
            dict(zip(("_w", "_v"), one.chunk(2), strict=True)) if "linear_fc1.weight" in name else {"": one}
        )
        found |= {name + half: value for half, value in halves.items()}
    return found


def indexed(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Layers that are not stacked."""
    if not key.startswith("decoder.layers."):
        return {key: tensor}
    return {key.replace("layers.", f"layers.{layer}.", 1): one for layer, one in enumerate(tensor.unbind(0))}


def norms_apart(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """Norms as modules of their own, as in Megatron-Core's own layer spec."""
    key = key.replace("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight")
    return {key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"): tensor}


def norms_fused(key: str, tensor: Tensor) -> dict[str, Tensor]:
    """The norm before experts under the key of a dense layer, as Megatron-Core's own layer spec stores it."""
    return {key.replace("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"): tensor}


def chained(
    *changes: Callable[[str, Tensor], Mapping[str, Tensor]],
) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    def change_all(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        for change in changes:
            tensors = renamed(tensors, change)
        return tensors

    return change_all


def prefixed(prefix: str) -> Callable[[str, Tensor], dict[str, Tensor]]:
    return lambda key, tensor: {prefix + key: tensor}


LAYOUTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]]] = {
    "a prefix": ("qwen2", chained(prefixed("module."))),
    "prefixes and layers apart": ("llama_tied", chained(indexed, prefixed("model.module."))),
    "layers apart": ("qwen3_moe", chained(indexed)),
    "norms apart": ("qwen3", chained(norms_apart)),
    "norms and layers apart": ("llama", chained(norms_apart, indexed)),
    "fused norm before experts": ("mixtral", chained(norms_fused)),
    "fused norm before experts of some layers": ("qwen2_moe_mixed_tied", chained(norms_fused)),
    "experts apart in stacked layers": (
        "qwen3_moe",
        chained(lambda key, tensor: split_experts(key, tensor, 1)),
    ),
    "experts and layers apart": (
        "qwen2_moe",
        chained(indexed, lambda key, tensor: split_experts(key, tensor, 0)),
    ),
    "singleton local shards": ("qwen3_moe_mixed", chained(singleton_shards)),
    "optimizer beside the weights": (
        "qwen2",
        lambda tensors: (
            tensors | {f"optimizer.state.exp_avg.{key}": value * 2 for key, value in tensors.items()}
        ),
    ),
    "chained optimizers beside the weights": (
        "mixtral",
        lambda tensors: (
            tensors
            | {f"chained_1.optimizer.state.fp32_param.{key}": value * 2 for key, value in tensors.items()}
        ),
    ),
}


@sampled(4)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_the_tensors_is_read(layout: str, tmp_path: Path) -> None:
    name, change = LAYOUTS[layout]
    tensors = change(tensors_of(name, tmp_path, torch.bfloat16))
    source = write_checkpoint(tmp_path / "run" / "release", tensors, arguments_for(name))
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("release")
    assert_exported(source.parent, tmp_path / "out", tmp_path / "hf", "--eos-token-id", "none")


def provider(name: str, **changes: Any) -> dict[str, Any]:
    """The section ``model`` that Megatron-Bridge writes for a tiny model."""
    arguments = vars(arguments_for(name))
    renamed_fields = {"num_experts": "num_moe_experts", "norm_epsilon": "layernorm_epsilon"}
    names = [
        "num_layers",
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        "num_query_groups",
        "kv_channels",
        "init_method_std",
        "normalization",
        "add_bias_linear",
        "add_qkv_bias",
        "qk_layernorm",
        "rotary_base",
        "rotary_percent",
        "position_embedding_type",
        "moe_router_topk",
        "vocab_size",
        "window_size",
        "num_experts",
        "norm_epsilon",
        "moe_layer_freq",
        "moe_ffn_hidden_size",
        "moe_router_pre_softmax",
        "moe_aux_loss_coeff",
        "make_vocab_size_divisible_by",
        "moe_shared_expert_gate",
        "moe_shared_expert_intermediate_size",
    ]
    fields = {renamed_fields.get(field, field): arguments[field] for field in names if field in arguments}
    if not arguments["group_query_attention"]:
        fields["num_query_groups"] = None
    fields |= {
        "_target_": "megatron.bridge.models.qwen.qwen_provider.Qwen2ModelProvider",
        "activation_func": {"_call_": False, "_target_": "torch.nn.functional.silu"},
        "gated_linear_unit": True,
        "attention_backend": {
            "_args_": [5],
            "_call_": True,
            "_target_": "megatron.core.transformer.enums.AttnBackend",
        },
        "bias_dropout_fusion": True,
        "layernorm_zero_centered_gamma": False,
        "params_dtype": {"_call_": False, "_target_": "torch.bfloat16"},
        "seq_length": 64,
        "share_embeddings_and_output_weights": not arguments["untie_embeddings_and_output_weights"],
        "should_pad_vocab": True,
        "tensor_model_parallel_size": 1,
        "transformer_layer_spec": None,
    }
    if isinstance(fields.get("window_size"), tuple):
        fields["window_size"] = list(fields["window_size"])
    return fields | changes


def bridge(directory: Path, name: str, nested: bool = False, **changes: Any) -> Path:
    """What Megatron-Bridge leaves of a tiny model."""
    tensors = tensors_of(name, directory)
    source = write_checkpoint(directory / "run" / "iter_0000012", tensors)
    model = provider(name, **changes)
    if nested:
        outer = (
            "vocab_size",
            "seq_length",
            "rotary_base",
            "position_embedding_type",
            "share_embeddings_and_output_weights",
        )
        model = {key: model.pop(key) for key in outer} | {"transformer": model}
    (source / "run_config.yaml").write_text(yaml.safe_dump({"model": model, "train": {"train_iters": 4}}))
    (source.parent / "latest_checkpointed_iteration.txt").write_text("12")
    return source.parent


@pytest.mark.parametrize(
    ("name", "nested"), [("qwen2", False), ("qwen3", True), ("mistral_window", True), ("qwen2_moe", False)]
)
def test_megatron_bridge_exports_with_a_config_made_of_its_provider(
    name: str, nested: bool, tmp_path: Path
) -> None:
    assert_exported(bridge(tmp_path, name, nested), tmp_path / "out", tmp_path / "hf", "--eos-token-id", "2")


def test_verl_keeps_the_config_beside(tmp_path: Path) -> None:
    tensors = tensors_of("qwen3_moe", tmp_path)
    write_checkpoint(tmp_path / "global_step_4" / "actor" / "dist_ckpt", tensors)
    (tmp_path / "hf" / "config.json").rename(tmp_path / "config.json")
    (tmp_path / "global_step_4" / "actor" / "huggingface").mkdir()
    (tmp_path / "config.json").rename(tmp_path / "global_step_4" / "actor" / "huggingface" / "config.json")
    for path in ("global_step_4/actor", "global_step_4", "global_step_4/actor/dist_ckpt"):
        opened = open_megatron(tmp_path / path)
        assert not opened.config_is_made and opened.model.architecture.family == "qwen3_moe"
    assert main(["export", str(tmp_path / "global_step_4"), str(tmp_path / "out")]) == 0
    expected, found = stored_tensors(tmp_path / "hf"), stored_tensors(tmp_path / "out")
    assert (
        all(torch.equal(found[name], tensor) for name, tensor in expected.items())
        and found.keys() == expected.keys()
    )


def test_newer_releases_keep_the_arguments_among_the_tensors(tmp_path: Path) -> None:
    """Megatron-Core 0.18 and newer write no common.pt."""
    tensors = tensors_of("qwen2", tmp_path)
    state = [{"args": arguments_for("qwen2"), "checkpoint_version": 3.0}]
    source = write_checkpoint(
        tmp_path / "run" / "iter_0000012", tensors, objects={"common_state/shard_0_1": state}
    )
    assert not (source / "common.pt").exists()
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--eos-token-id", "2")


@pytest.mark.parametrize("kind", ["arguments", "provider"])
@pytest.mark.parametrize("kept", [True, False], ids=["agrees", "contradicts"])
def test_a_given_config_has_to_agree_with_what_the_trainer_says(
    kind: str, kept: bool, tmp_path: Path
) -> None:
    make = megatron_lm if kind == "arguments" else bridge
    source = make(tmp_path, "qwen3", **({} if kept else {"rotary_base": 500000}))
    if kept:
        assert_exported(source, tmp_path / "out", tmp_path / "hf", "--hf-config", str(tmp_path / "hf"))
        assert (tmp_path / "out" / "config.json").read_bytes() == (
            tmp_path / "hf" / "config.json"
        ).read_bytes()
    else:
        assert "rotary_base = 500000, by the config 10000" in is_refused(
            source, "--hf-config", str(tmp_path / "hf")
        )


def test_tokenizer_and_ids_come_from_a_directory(tmp_path: Path) -> None:
    source = megatron_lm(tmp_path, "llama")
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text('{"a": 1}')
    (tmp_path / "tokenizer" / "generation_config.json").write_text(
        '{"eos_token_id": [5, 6], "bos_token_id": 4}'
    )
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--tokenizer", str(tmp_path / "tokenizer"))
    config = config_of(tmp_path / "out")
    assert (config["eos_token_id"], config["bos_token_id"]) == ([5, 6], 4)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == '{"a": 1}'


ROPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3": (
        {"use_rope_scaling": True, "rope_scaling_factor": 32.0},
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "linear": ({"rotary_seq_len_interpolation_factor": 4}, {"rope_type": "linear", "factor": 4.0}),
    "yarn": (
        {
            "position_embedding_type": "yarn",
            "yarn_rotary_scaling_factor": 4.0,
            "yarn_original_max_position_embeddings": 16,
            "yarn_beta_fast": 30.0,
            "yarn_beta_slow": 2.0,
            "yarn_mscale": None,
            "yarn_mscale_all_dim": None,
            "yarn_correction_range_round_to_int": False,
        },
        {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 30.0,
            "beta_slow": 2.0,
            "truncate": False,
        },
    ),
}


@pytest.mark.parametrize("kind", ROPES)
def test_rope_scalings_are_carried_over(kind: str, tmp_path: Path) -> None:
    changes, scaling = ROPES[kind]
    tensors = tensors_of("llama", tmp_path)
    source = write_checkpoint(tmp_path / "run", tensors, arguments_for("llama", **changes))
    config = config_of(tmp_path / "hf")
    config["rope_parameters"] = {"rope_theta": 10000.0, **scaling}
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    answers = ["--rope-scaling-factor", "32"] if kind == "llama3" else []
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--eos-token-id", "2", *answers)


def test_a_factor_that_megatron_lm_does_not_use_is_asked_for(tmp_path: Path) -> None:
    tensors = tensors_of("llama", tmp_path)
    written = {"use_rope_scaling": True, "rope_scaling_factor": 32.0}
    source = write_checkpoint(tmp_path / "run", tensors, arguments_for("llama", **written))
    said = is_refused(source, "--eos-token-id", "2")
    assert "rope_scaling_factor = 32.0, which Megatron-LM records but does not use: it trains with 8" in said
    assert (
        "pass --rope-scaling-factor 8 if Megatron-LM itself trained the model, or --rope-scaling-factor 32"
        in said
    )
    assert "rope-scaling-factor = 16.0, but args" in is_refused(
        source, "--eos-token-id", "2", "--rope-scaling-factor", "16"
    )
    assert (
        main(
            [
                "export",
                str(source),
                str(tmp_path / "out"),
                "--eos-token-id",
                "2",
                "--rope-scaling-factor",
                "8",
            ]
        )
        == 0
    )
    assert config_of(tmp_path / "out")["rope_scaling"]["factor"] == 8.0
    # a config that was handed over has to say the same
    config = config_of(tmp_path / "out")
    config["rope_scaling"]["factor"] = 32.0
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    given = ["--hf-config", str(tmp_path / "hf"), "--rope-scaling-factor"]
    shutil.rmtree(tmp_path / "out")
    assert "rope_scaling_factor = 8.0, by the config 32.0" in is_refused(source, *given, "8")
    assert main(["export", str(source), str(tmp_path / "out"), *given, "32"]) == 0
    plain = write_checkpoint(tmp_path / "plain", tensors, arguments_for("llama"))
    shutil.rmtree(tmp_path / "out")
    assert "has no rope scaling" in is_refused(plain, "--eos-token-id", "2", "--rope-scaling-factor", "8")


def test_rows_behind_the_vocabulary_may_hold_anything(tmp_path: Path) -> None:
    """Megatron-LM starts them at random."""
    tensors = tensors_of("llama", tmp_path)
    tensors["embedding.word_embeddings.weight"][101:] = 0.5
    source = write_checkpoint(tmp_path / "run", tensors, arguments_for("llama"))
    assert main(["verify", str(tmp_path / "hf"), str(source)]) == 0
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--eos-token-id", "2")
    write_checkpoint(tmp_path / "said", tensors)
    assert main(["verify", str(tmp_path / "said"), "--hf-config", str(tmp_path / "hf")]) == 1
