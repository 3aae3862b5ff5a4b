"""What a checkpoint of another trainer does not say, says wrongly, or says in a way that could run code, is
refused by name."""

from __future__ import annotations

import argparse
import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from converters.command import main
from converters.errors import ConversionError
from converters.foreign.options import OpeningOptions
from converters.opening import open_megatron
from tests.unit.foreign_checkpoints import (
    arguments_for,
    assert_exported,
    is_refused,
    megatron_lm,
    renamed,
    split_experts,
    tensors_of,
    write_checkpoint,
)

# what is wrong with the arguments of a tiny model, and what the error has to say
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "gelu": ("llama", {"swiglu": False}, "activation = 'gelu', by the config 'silu'"),
    "squared relu": (
        "llama",
        {"swiglu": False, "squared_relu": True},
        "gated_linear_unit = False, by the config True",
    ),
    "layer norm": (
        "llama",
        {"normalization": "LayerNorm"},
        "normalization = 'LayerNorm', by the config 'RMSNorm'",
    ),
    "centred norms": ("llama", {"apply_layernorm_1p": True}, "layernorm_zero_centered_gamma = True"),
    "learned positions": (
        "llama",
        {"position_embedding_type": "learned_absolute"},
        "position_embedding_type = 'learned_absolute'",
    ),
    "partial rotation": ("llama", {"rotary_percent": 0.5}, "rotary_percent = 0.5, by the config 1.0"),
    "interleaved rotation": ("llama", {"rotary_interleaved": True}, "rotary_interleaved = True"),
    "window and norms": (
        "qwen3",
        {"window_size": (8, 0)},
        "window_size = (8, 0): the config has no such setting",
    ),
    "window in some layers": ("mistral_window", {"window_attn_skip_freq": 2}, "window_attn_skip_freq = 2"),
    "another scale": ("llama", {"softmax_scale": 0.1}, "softmax_scale = 0.1"),
    "learned sink": ("llama", {"softmax_type": "learnable"}, "softmax_type = 'learnable'"),
    "no rotation in some layers": ("llama", {"no_rope_freq": 4}, "no_rope_freq = 4"),
    "layers of their own": (
        "llama",
        {"spec": ["slime_plugins.models.glm4", "get_glm_spec"]},
        "spec = ['slime_plugins.models.glm4'",
    ),
    "further predictions": ("llama", {"mtp_num_layers": 1}, "mtp_num_layers = 1"),
    "hybrid": ("llama", {"hybrid_override_pattern": "M-M*"}, "hybrid_override_pattern = 'M-M*'"),
    "latent attention": (
        "llama",
        {"multi_latent_attention": True},
        "no config can be made for latent attention",
    ),
    "norms and biases": ("qwen3", {"add_qkv_bias": True}, "add_qkv_bias = True, by the config False"),
    "sigmoid routing": (
        "qwen3_moe",
        {"moe_router_score_function": "sigmoid"},
        "moe_router_score_function = 'sigmoid'",
    ),
    "scaled routing": (
        "qwen3_moe",
        {"moe_router_topk_scaling_factor": 2.5},
        "moe_router_topk_scaling_factor = 2.5",
    ),
    "grouped routing": ("qwen3_moe", {"moe_router_num_groups": 7}, "moe_router_num_groups = 7"),
    "dropped tokens": ("mixtral", {"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor = 1.0"),
    "jitter": ("mixtral", {"moe_input_jitter_eps": 0.01}, "moe_input_jitter_eps = 0.01"),
    "interleaved experts": (
        "mixtral",
        {"moe_mlp_glu_interleave_size": 32},
        "moe_mlp_glu_interleave_size = 32",
    ),
    "experts unlike any family": (
        "mixtral",
        {"moe_router_pre_softmax": True},
        "no known family has experts without norms",
    ),
    "a pattern that is none": (
        "qwen3_moe",
        {"moe_layer_freq": [1, 0]},
        "moe_layer_freq = [1, 0] is no pattern of 3 layers",
    ),
    "an unknown setting": (
        "llama",
        {"attention_logits_softcap": 30.0},
        "attention_logits_softcap = 30.0: unknown setting",
    ),
    "too many layers": ("llama", {"num_layers": 10**12}, "does not say num_layers"),
    "no size": ("llama", {"hidden_size": None}, "does not say hidden_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_config_says_is_refused_by_name(case: str, tmp_path: Path) -> None:
    name, changes, said = REFUSED[case]
    assert said in is_refused(write_with_head(tmp_path, name, **changes), "--eos-token-id", "2")


def write_with_head(directory: Path, name: str, **changes: Any) -> Path:
    """Arguments beside two tensors, about as large as the model: what they say is wrong before any other
    tensor is looked at."""
    tensors = {
        "embedding.word_embeddings.weight": torch.zeros(128, 42),
        "decoder.layers.mlp.router.weight": torch.zeros(3, 7, 42),
    }
    return write_checkpoint(directory / "run", tensors, arguments_for(name, **changes))


def test_a_setting_known_to_be_harmless_is_passed_over(tmp_path: Path) -> None:
    source = megatron_lm(tmp_path, "llama", attention_logits_softcap=30.0, spec=["my.own", "spec"])
    flags = [
        "--ignore-setting",
        "spec",
        "--ignore-setting",
        "attention_logits_softcap",
        "--eos-token-id",
        "2",
    ]
    assert "spec" in is_refused(source, *flags[2:])
    assert_exported(source, tmp_path / "out", tmp_path / "hf", *flags)


VOCABULARIES: dict[str, tuple[dict[str, Any], tuple[str, ...], str]] = {
    "nobody says it": (
        {"vocab_size": None},
        (),
        "does not say how many of the 128 rows of the embedding are padding",
    ),
    "a tokenizer that adds a token": (
        {"tokenizer_type": "NullTokenizer"},
        (),
        "does not say how many of the 128 rows",
    ),
    "does not fit": (
        {"vocab_size": 129},
        (),
        "vocab_size = 129, padded to a multiple of 128 x 1, does not make",
    ),
    "too large": ({}, ("--vocab-size", "129"), "vocab-size = 129: the stored embedding has 128 rows"),
}


@pytest.mark.parametrize("case", VOCABULARIES)
def test_the_vocabulary_is_asked_for(case: str, tmp_path: Path) -> None:
    changes, flags, said = VOCABULARIES[case]
    message = is_refused(write_with_head(tmp_path, "llama", **changes), "--eos-token-id", "2", *flags)
    assert said in message and "pass --vocab-size N" in message


def test_flags_answer_what_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = megatron_lm(tmp_path, "llama", vocab_size=None)
    assert "--eos-token-id" in is_refused(source, "--vocab-size", "101")
    assert main(["inspect", str(source), "--vocab-size", "101"]) == 0
    assert main(["verify", str(source), "--vocab-size", "101"]) == 0
    assert main(["verify", str(tmp_path / "hf"), str(source), "--vocab-size", "101"]) == 0
    assert main(["verify", str(tmp_path / "hf"), str(source), "--vocab-size", "100"]) == 1
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--vocab-size", "101", "--eos-token-id", "2")


class Bomb:
    """Does something when it is unpickled."""

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.call, self.arguments = call, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call, self.arguments


@pytest.mark.parametrize(
    "call", [eval, exec, Path.touch, __import__, json.loads], ids=lambda call: call.__qualname__
)
def test_arguments_cannot_run_code(
    call: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_with_head(tmp_path, "llama", load=Bomb(call, "open('exploded', 'w')"))
    with pytest.raises(ConversionError, match=r"loading it could run code|cannot be read"):
        open_megatron(source, OpeningOptions(eos_token_ids=()))
    assert not (tmp_path / "exploded").exists()


def test_what_cannot_be_imported_is_not_imported(tmp_path: Path) -> None:
    """Enums, signals and classes of forks stand for themselves; a class of nobody's package cannot be found,
    and is not looked for."""
    source = megatron_lm(tmp_path, "llama")
    file = source / "iter_0000012" / "common.pt"
    content = file.read_bytes()
    named = b"tests.unit.foreign_checkpoints"
    assert content.count(named) == 1
    file.write_bytes(content.replace(named, b"tests.unit.foreign_checkpointz"))
    with pytest.raises(ConversionError, match=r"cannot be read.*CRC"):
        open_megatron(source)
    with zipfile.ZipFile(io.BytesIO(content)) as archive, zipfile.ZipFile(file, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name).replace(named, b"tests.unit.foreign_checkpointz"))
    assert_exported(source, tmp_path / "out", tmp_path / "hf", "--eos-token-id", "2")


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no archive": (lambda run: (run / "common.pt").write_bytes(b"PK"), "cannot be read"),
    "no arguments": (lambda run: torch.save({"args": [1]}, run / "common.pt"), "not an argparse.Namespace"),
    "no dictionary": (lambda run: torch.save([argparse.Namespace()], run / "common.pt"), "is no dictionary"),
    "no yaml": (lambda run: (run / "run_config.yaml").write_text("{"), "run_config.yaml cannot be read"),
    "yaml that calls": (
        lambda run: (run / "run_config.yaml").write_text("model: !!python/object/apply:os.abort []"),
        "cannot be read",
    ),
    "no model": (lambda run: (run / "run_config.yaml").write_text("train: {}"), "has no section 'model'"),
    "nothing at all": (
        lambda run: torch.save({"iteration": 4}, run / "common.pt"),
        "does not say which model it is",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_descriptions_are_refused(case: str, tmp_path: Path) -> None:
    damage, said = DAMAGED[case]
    source = write_with_head(tmp_path, "llama")
    damage(source)
    assert said in is_refused(source, "--eos-token-id", "2")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda tensors: tensors | {"input": tensors["decoder.final_layernorm.weight"]},
            r"unknown: input \[42\]",
        ),
        (
            lambda tensors: (
                tensors
                | {
                    "decoder.layers.input_layernorm.weight": tensors[
                        "decoder.layers.self_attention.linear_qkv.layer_norm_weight"
                    ]
                }
            ),
            "linear_qkv.layer_norm_weight is stored more than once",
        ),
        (
            lambda tensors: tensors | {f"critic.{key}": value for key, value in tensors.items()},
            "holds several models",
        ),
        (
            lambda tensors: {key: value for key, value in tensors.items() if "linear_fc2" not in key},
            "missing: decoder.layers.mlp.linear_fc2",
        ),
        (
            lambda tensors: {key: value for key, value in tensors.items() if "embedding" not in key},
            "has no embedding.word_embeddings",
        ),
        (
            lambda tensors: (
                tensors | {"decoder.layers.mlp.linear_fc2.adapter.linear_in.weight": torch.zeros(3, 4, 52)}
            ),
            (
                r"holds the LoRA adapters of its trainer \(1 tensors, the first "
                r"decoder\.layers\.mlp\.linear_fc2\.adapter.*, not a model"
            ),
        ),
        (
            lambda tensors: {
                "decoder.layers.self_attention.linear_qkv.adapter.adapter_q.linear_out.weight": torch.zeros(
                    3, 60, 4
                )
            },
            "holds the LoRA adapters",
        ),
    ],
    ids=[
        "unknown",
        "twice",
        "two models",
        "missing",
        "no embedding",
        "adapters beside the model",
        "adapters alone",
    ],
)
def test_tensors_are_accounted_for(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]], said: str, tmp_path: Path
) -> None:
    source = write_checkpoint(tmp_path / "run", change(tensors_of("llama", tmp_path)), arguments_for("llama"))
    assert re.search(said, is_refused(source, "--eos-token-id", "2"))


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tensors = renamed(tensors_of("qwen3_moe", tmp_path), lambda key, tensor: split_experts(key, tensor, 1))
    del tensors["decoder.layers.mlp.experts.experts.4.linear_fc2.weight"]
    source = write_checkpoint(tmp_path / "run", tensors, arguments_for("qwen3_moe"))
    message = is_refused(source, "--eos-token-id", "2")
    assert (
        "missing: decoder.layers.mlp.experts.experts.linear_fc2.weight of "
        "decoder.layers.0.mlp.experts.local_experts.4"
    ) in message
