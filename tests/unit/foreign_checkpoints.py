"""Checkpoints as other trainers leave them, for the converter tests: real tensors under foreign keys, and
settings written down by hand."""

from __future__ import annotations

import argparse
import enum
import json
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from converters.checkpoint.boxes import whole
from converters.checkpoint.source import open_source
from converters.command import build_parser, main, run
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.importing import import_model, plan_import
from converters.torch_dist.reader import TorchDistCheckpoint
from tests.unit.converters_tiny import save_tiny, stored_tensors


class Backend(enum.Enum):
    """An enum as Megatron-LM keeps them among its arguments; nothing that reads a checkpoint can import this
    one."""

    AUTO = 5


# what every run of Megatron-LM has among its arguments, and what all models of the tests have in common
COMMON: dict[str, Any] = {
    "add_bias_linear": False,
    "add_position_embedding": True,
    "add_qkv_bias": False,
    "apply_layernorm_1p": False,
    "attention_backend": Backend.AUTO,
    "attention_dropout": 0.0,
    "bf16": True,
    "ckpt_format": "torch_dist",
    "cp_comm_type": ["p2p"],
    "exit_signal": signal.SIGTERM,
    "ffn_hidden_size": 52,
    "group_query_attention": True,
    "hidden_dropout": 0.0,
    "hidden_size": 42,
    "init_method_std": 0.02,
    "iteration": 12,
    "kv_channels": 10,
    "load": None,
    "lr": 1e-5,
    "make_vocab_size_divisible_by": 128,
    "max_position_embeddings": 64,
    "moe_layer_freq": 1,
    "moe_router_load_balancing_type": "none",
    "moe_router_topk": 2,
    "norm_epsilon": 1e-6,
    "normalization": "RMSNorm",
    "num_attention_heads": 6,
    "num_experts": None,
    "num_layers": 3,
    "num_query_groups": 2,
    "padded_vocab_size": 128,
    "params_dtype": torch.bfloat16,
    "pipeline_model_parallel_size": 2,
    "position_embedding_type": "rope",
    "qk_layernorm": False,
    "rope_scaling_factor": 8.0,
    "rotary_base": 10000,
    "rotary_interleaved": False,
    "rotary_percent": 1.0,
    "rotary_seq_len_interpolation_factor": None,
    "seq_length": 48,
    "spec": None,
    "squared_relu": False,
    "swiglu": True,
    "tensor_model_parallel_size": 1,
    "tokenizer_type": "HuggingFaceTokenizer",
    "untie_embeddings_and_output_weights": True,
    "use_rope_scaling": False,
    "vocab_size": 101,
    "window_size": None,
    "world_size": 4,
}
_QWEN3_MOE = {
    "moe_aux_loss_coeff": 0.001,
    "moe_ffn_hidden_size": 22,
    "moe_router_topk": 4,
    "num_experts": 7,
    "qk_layernorm": True,
}
_MIXTRAL = {
    "moe_aux_loss_coeff": 0.001,
    "moe_ffn_hidden_size": 52,
    "moe_router_topk": 4,
    "norm_epsilon": 1e-5,
    "num_experts": 5,
}
_QWEN2_MOE = {
    "moe_aux_loss_coeff": 0.001,
    "add_qkv_bias": True,
    "moe_ffn_hidden_size": 22,
    "moe_router_topk": 3,
    "moe_shared_expert_gate": True,
    "moe_shared_expert_intermediate_size": 32,
    "num_experts": 7,
}
# by the name of the tiny model that a trainer with these arguments trains
ARGUMENTS: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama_tied": {"untie_embeddings_and_output_weights": False, "num_query_groups": 3},
    "llama_all_biases": {"add_bias_linear": True},
    "llama_one_group": {"num_query_groups": 1},
    "mistral_window": {"window_size": (8, 0), "num_query_groups": 3},
    "mixtral": {**_MIXTRAL, "ffn_hidden_size": 64, "rotary_base": 1000000},
    "qwen2": {"add_qkv_bias": True},
    "qwen3": {"qk_layernorm": True, "group_query_attention": False, "num_query_groups": 1},
    "qwen3_moe": _QWEN3_MOE,
    "qwen3_moe_mixed": {**_QWEN3_MOE, "moe_layer_freq": [1, 0, 1], "moe_router_pre_softmax": True},
    "qwen2_moe": {**_QWEN2_MOE, "moe_router_pre_softmax": True},
    "qwen2_moe_mixed_tied": {
        **_QWEN2_MOE,
        "moe_layer_freq": [1, 0, 1],
        "num_query_groups": 3,
        "untie_embeddings_and_output_weights": False,
    },
}


def arguments_for(name: str, **changes: Any) -> argparse.Namespace:
    """The arguments with which Megatron-LM would train a tiny model."""
    return argparse.Namespace(**{**COMMON, **ARGUMENTS[name], **changes})


def tensors_of(name: str, directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Save a tiny model as ``directory/hf`` and give its tensors under Megatron-Core's keys, the vocabulary
    padded to 128."""
    save_tiny(directory / "hf", name, dtype)
    import_model(plan_import(open_source(directory / "hf"), vocab_multiple=128), directory / "imported")
    checkpoint = TorchDistCheckpoint(directory / "imported")
    tensors = {key: checkpoint.read(key, whole(checkpoint.shape(key))) for key in checkpoint}
    shutil.rmtree(directory / "imported")
    return tensors


def write_checkpoint(
    directory: Path,
    tensors: Mapping[str, Tensor],
    arguments: argparse.Namespace | None = None,
    objects: Mapping[str, Any] | None = None,
) -> Path:
    """A checkpoint written by torch's own code, with the arguments where Megatron-LM has them."""
    directory.mkdir(parents=True)
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(
        {**tensors, **(objects or {})},
        storage_writer=dcp.FileSystemWriter(directory),
        planner=planner,
        no_dist=True,
    )
    (directory / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    if arguments is not None:
        state = {
            "args": arguments,
            "checkpoint_version": 3.0,
            "iteration": 12,
            "opt_param_scheduler": {"num_steps": 4},
        }
        torch.save(state, directory / "common.pt")
    return directory


def megatron_lm(directory: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """What Megatron-LM leaves of a tiny model: a tracker and an iteration; the model itself is ``hf`` beside
    it."""
    tensors = tensors_of(name, directory, dtype)
    write_checkpoint(directory / "run" / "iter_0000012", tensors, arguments_for(name, **changes))
    (directory / "run" / "latest_checkpointed_iteration.txt").write_text("12\n")
    return directory / "run"


def renamed(
    tensors: Mapping[str, Tensor], change: Callable[[str, Tensor], Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """The tensors, each replaced by what ``change`` makes of it."""
    return {
        key: tensor.contiguous()
        for old, value in tensors.items()
        for key, tensor in change(old, value).items()
    }


def config_of(directory: Path) -> dict[str, Any]:
    """``config.json``."""
    return json.loads((directory / "config.json").read_text())


def assert_exported(
    source: Path, target: Path, model: Path, *flags: str, dtype: torch.dtype | None = None
) -> None:
    """Export by the command, and compare tensors bit for bit and the config by its meaning."""
    assert main(["export", str(source), str(target), *flags]) == 0
    expected, found = stored_tensors(model), stored_tensors(target)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        wanted = tensor if dtype is None else tensor.to(dtype)
        assert found[name].dtype == wanted.dtype and torch.equal(found[name], wanted), name
    assert read_architecture(config_of(target)) == read_architecture(config_of(model))


def is_refused(source: Path, *flags: str) -> str:
    """What the error of an export says."""
    with pytest.raises(ConversionError) as caught:
        arguments = ["export", str(source), str(source.parent / "out"), *flags]
        run(build_parser().parse_args(arguments))
    assert not (source.parent / "out").exists()
    return str(caught.value)


def split_experts(key: str, tensor: Tensor, axis: int) -> dict[str, Tensor]:
    """Every expert under a key of its own."""
    if ".experts.experts." not in key:
        return {key: tensor}
    return {
        key.replace("experts.experts.", f"experts.experts.{index}."): one
        for index, one in enumerate(tensor.unbind(axis))
    }
