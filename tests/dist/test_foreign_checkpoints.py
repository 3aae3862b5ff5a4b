"""What Megatron-Core saves for Megatron-LM, with its arguments, its own names and its optimizers, is exported
as the worker holds it."""

from __future__ import annotations

import argparse
import dataclasses
import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor

from converters.checkpoint.artifacts import read_config
from converters.command import main
from converters.families.read import read_architecture
from converters.mapping.shards import join
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

pytestmark = newest_megatron
COMMON: dict[str, Any] = {
    "add_bias_linear": False,
    "add_qkv_bias": False,
    "exit_signal": signal.SIGTERM,
    "ffn_hidden_size": 52,
    "group_query_attention": True,
    "hidden_size": 36,
    "init_method_std": 0.2,
    "kv_channels": 10,
    "make_vocab_size_divisible_by": 1,
    "max_position_embeddings": 64,
    "norm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "num_attention_heads": 6,
    "num_experts": None,
    "num_layers": 3,
    "num_query_groups": 2,
    "params_dtype": torch.bfloat16,
    "position_embedding_type": "rope",
    "rotary_base": 9000,
    "swiglu": True,
    "tensor_model_parallel_size": 1,
    "untie_embeddings_and_output_weights": True,
    "vocab_size": 101,
}
LLAMA = {
    "max_position_embeddings": 16384,
    "rotary_base": 5000,
    "rope_scaling_factor": 4.0,
    "use_rope_scaling": True,
}
MOE = {
    "moe_aux_loss_coeff": 0.001,
    "moe_ffn_hidden_size": 28,
    "moe_router_topk": 5,
    "num_experts": 8,
    "qk_layernorm": True,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "llama": {**LLAMA, "untie_embeddings_and_output_weights": False},
    "qwen2": {"add_qkv_bias": True, "rotary_base": 7000, "tensor_model_parallel_size": 2},
    "qwen3_moe": MOE,
    "qwen3_moe_mixed": {**MOE, "moe_layer_freq": [1, 0, 1], "moe_router_pre_softmax": True},
}


def save_as_megatron_lm(
    config: Mapping[str, Any],
    target: str,
    arguments: argparse.Namespace,
    metadata: Mapping[str, Any],
    own_names: bool,
) -> dict[str, Tensor]:
    """Train for a step, save as Megatron-LM does, and give the weights that the worker has then."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megarl.models.megatron.checkpoint import exact_offsets
    from megarl.models.megatron.cuda_redirect import cuda_literals
    from megarl.models.megatron.optimizer import fused_style_adam
    from megarl.models.megatron.sharded_save import save_sharded

    worker = jobs.build(config, init_reference_model=False)
    worker.train(data=jobs.my_share(worker, make_batch(rows=8, length=12, seed=1), 8), loss_fn=NLLLoss())
    chunks, optimizer = worker.backend.chunks, worker.backend.optimizer
    for layer in (
        module
        for chunk in chunks
        for module in chunk.modules()
        if own_names and isinstance(module, TransformerLayer)
    ):
        spec = get_gpt_layer_local_spec(
            num_experts=chunks[0].module.config.num_moe_experts, normalization="RMSNorm"
        )
        layer.submodules_config.sharded_state_dict_keys_map = spec.submodules.sharded_state_dict_keys_map
    with cuda_literals(), fused_style_adam(), exact_offsets() as stream:
        model = chunks[0].module.sharded_state_dict(metadata=dict(metadata))
        state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 1, "model": model}
        if "distrib_optim_sharding_type" in metadata:
            state["optimizer"] = optimizer.sharded_state_dict(model, metadata=dict(metadata))
        if torch.distributed.get_rank() == 0:
            Path(target).mkdir(parents=True)
        torch.distributed.barrier()
        save_sharded(state, Path(target), stream)
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return weights


def provider_of(model: Any) -> dict[str, Any]:
    """What Megatron-Bridge writes of a model: every field of Megatron-Core's own configuration, and the
    arguments of GPTModel."""

    def said(value: Any) -> Any:
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if isinstance(value, list | tuple):
            return [said(one) for one in value]
        name = (
            getattr(value, "__qualname__", None) or getattr(value, "name", None) or type(value).__qualname__
        )
        return {"_call_": False, "_target_": f"{getattr(value, '__module__', None) or 'torch'}.{name}"}

    fields = {field.name: getattr(model.config, field.name) for field in dataclasses.fields(model.config)}
    fields |= {name: value for name, value in vars(model.config).items() if name.startswith("yarn_")}
    own = (
        "position_embedding_type",
        "rotary_base",
        "rotary_percent",
        "share_embeddings_and_output_weights",
        "vocab_size",
    )
    fields |= {name: getattr(model, name) for name in own if hasattr(model, name)}
    return {
        "_target_": "some.Provider",
        "seq_length": model.max_sequence_length,
        **{name: said(value) for name, value in fields.items()},
    }


def save_as_megatron_bridge(config: Mapping[str, Any], target: str) -> dict[str, Tensor]:
    """Train for a step, save as Megatron-Bridge does, and give the weights that the worker has then."""
    from megarl.models.megatron.cuda_redirect import cuda_literals
    from megarl.models.megatron.sharded_save import save_sharded
    from megarl.models.megatron.state_stream import StateStream

    worker = jobs.build(config, init_reference_model=False)
    worker.train(data=jobs.my_share(worker, make_batch(rows=8, length=12, seed=1), 8), loss_fn=NLLLoss())
    model = worker.backend.chunks[0].module
    if torch.distributed.get_rank() == 0:
        Path(target).mkdir(parents=True)
        (Path(target) / "run_config.yaml").write_text(yaml.safe_dump({"model": provider_of(model)}))
    torch.distributed.barrier()
    with cuda_literals():
        save_sharded(model.sharded_state_dict(metadata={}), Path(target), StateStream())
    weights = jobs.full_weights(worker)
    worker.backend.close()
    return weights


@sampled(1)
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("deepseek_v2", {}),
        ("deepseek_v3", {"tp": 2, "sp": True, "multiple": 2}),
        ("glm4_moe", {"ep": 2}),
        ("gpt_oss", {"tp": 2, "sp": True, "multiple": 2}),
    ],
)
def test_a_config_that_is_given_agrees_with_what_megatron_core_computed_with(
    family: str, layout: dict[str, Any], pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Families of which no config is made: that of the user is held against every setting of the model that
    was saved."""
    model = make_tiny(tmp_path / "hf", family, tied=False, seed=3)
    source = tmp_path / "run" / "iter_0000001"
    # a HybridModel does not keep the arguments that the provider is made of
    config = policy_config(model, precision="bfloat16", lr=1e-2, model_class=None, **layout)
    weights = pool.run(2 if layout else 1, save_as_megatron_bridge, config, str(source))[0]
    assert main(["export", str(source), str(tmp_path / "out"), "--eos-token-id", "2"]) == 2
    assert "pass --hf-config DIRECTORY" in capsys.readouterr().err
    assert main(["export", str(source), str(tmp_path / "out"), "--hf-config", str(model)]) == 0, (
        capsys.readouterr().err
    )
    exported = load_file(tmp_path / "out" / "model.safetensors")
    stored = dict(join(weights.items(), read_architecture(read_config(model))))
    assert exported.keys() == stored.keys()
    for name, tensor in stored.items():
        assert exported[name].dtype == tensor.dtype and torch.equal(exported[name], tensor), name
    other = {
        **read_config(model),
        "num_experts_per_tok": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 9001.0},
    }
    (model / "config.json").write_text(json.dumps(other))
    assert main(["export", str(source), str(tmp_path / "other"), "--hf-config", str(model)]) == 2
    said = capsys.readouterr().err
    assert "moe_router_topk = " in said and "rotary_base = " in said and not (tmp_path / "other").exists()


OPTIMIZER = {"distrib_optim_sharding_type": "fully_reshardable"}
CASES: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], bool]] = {
    "distributed optimizer": ("qwen2", 2, {"tp": 2}, OPTIMIZER, False),
    "chained optimizers, own names": (
        "qwen3_moe",
        2,
        {"ep": 2},
        {**OPTIMIZER, "chained_optim_avoid_prefix": False},
        True,
    ),
    "plain optimizer, tied, own names": ("llama", 2, {"distributed_optimizer": False}, OPTIMIZER, True),
    "singleton shards": ("qwen3_moe_mixed", 2, {"ep": 2}, {"singleton_local_shards": True}, True),
    "layers apart": ("llama", 1, {}, {"non_homogeneous_layers": True}, False),
    "buckets": ("qwen2", 2, {"tp": 2}, {"distrib_optim_sharding_type": "dp_reshardable"}, False),
}


@sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_what_megatron_core_saves_is_exported(
    case: str, pool: WorkerPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    family, world, layout, metadata, own_names = CASES[case]
    model = make_tiny(tmp_path / "hf", family, tied=family == "llama", seed=3)
    source, flags = tmp_path / "run" / "iter_0000001", ["--eos-token-id", "2"]
    flags += ["--rope-scaling-factor", "4"] if family == "llama" else []
    config = policy_config(model, precision="bfloat16", lr=1e-2, **layout)
    arguments = argparse.Namespace(**COMMON | ARGUMENTS[family])
    weights = pool.run(world, save_as_megatron_lm, config, str(source), arguments, metadata, own_names)[0]
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("1")
    assert main(["export", str(source.parent), str(tmp_path / "out"), *flags]) == 0
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == weights.keys()
    for name, tensor in weights.items():
        assert exported[name].dtype == tensor.dtype == torch.bfloat16 and torch.equal(
            exported[name], tensor
        ), name
    assert read_architecture(read_config(tmp_path / "out")) == read_architecture(read_config(model))
    as_master = ["export", str(source.parent), str(tmp_path / "master"), *flags, "--source-weights", "master"]
    if metadata.get("distrib_optim_sharding_type") != "fully_reshardable":
        assert main(as_master) == 2
        assert (
            "saved by buckets" if case == "buckets" else "has no optimizer state"
        ) in capsys.readouterr().err
        return
    assert main(as_master) == 0
    master = load_file(tmp_path / "master" / "model.safetensors")
    assert all(
        torch.equal(master[name].bfloat16(), tensor) and master[name].dtype == torch.float32
        for name, tensor in weights.items()
    )
    finer = [name for name, tensor in weights.items() if not torch.equal(master[name], tensor.float())]
    assert len(finer) > len(weights) // 2


def test_own_names_are_what_they_are_called(pool: WorkerPool, tmp_path: Path) -> None:
    """The cases above save the names that they say."""
    model = make_tiny(tmp_path / "hf", "qwen3_moe_mixed", tied=False, seed=3)
    arguments = argparse.Namespace(**COMMON | ARGUMENTS["qwen3_moe_mixed"])
    config = policy_config(model, precision="bfloat16")
    pool.run(
        1,
        save_as_megatron_lm,
        config,
        str(tmp_path / "saved"),
        arguments,
        {"singleton_local_shards": True},
        True,
    )
    keys = set(TorchDistCheckpoint(tmp_path / "saved"))
    assert {
        "decoder.layers.0.mlp.linear_fc1.layer_norm_weight",
        "decoder.layers.1.mlp.linear_fc1.weight_v",
    } <= keys
    assert any(".experts.7." in key and key.endswith("linear_fc1.weight_w") for key in keys), sorted(keys)
