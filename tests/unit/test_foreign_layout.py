"""Imports to where Megatron-LM looks for its checkpoints: what its own code reads there, and what the way
back gives."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from converters.command import main
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.foreign.arguments import megatron_lm_state
from converters.foreign.opening import arguments_of, read_common_state
from converters.foreign.settings import ROPE_FACTOR
from converters.model_config.megatron_settings import megatron_settings
from converters.torch_dist.reader import TorchDistCheckpoint
from tests.tiers import newest_megatron, sampled
from tests.unit.converters_tiny import DEEPSEEK_YARN, save_tiny, stored_tensors, tiny_config
from tests.unit.foreign_checkpoints import (
    assert_exported,
    config_of,
    is_refused,
    tensors_of,
    write_checkpoint,
)

pytestmark = newest_megatron
LLAMA_3_1 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LLAMA_3_2 = {**LLAMA_3_1, "factor": 32.0}
NAMES = (
    "llama_tied",
    "llama_all_biases",
    "mistral_window",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen2_moe_mixed_tied",
    "qwen3_moe_mixed",
)


def imported(directory: Path, name: str, *flags: str, **changes: Any) -> Path:
    save_tiny(directory / "hf", name, torch.bfloat16, **changes)
    assert (
        main(["import", str(directory / "hf"), str(directory / "mlm"), "--layout", "megatron-lm", *flags])
        == 0
    )
    return directory / "mlm"


@sampled(2)
@pytest.mark.parametrize("name", NAMES)
def test_the_arguments_alone_give_the_model_back(name: str, tmp_path: Path) -> None:
    source = imported(tmp_path, name, "--vocab-multiple", "16")
    assert sorted(path.name for path in source.iterdir()) == ["latest_checkpointed_iteration.txt", "release"]
    assert (source / "latest_checkpointed_iteration.txt").read_text() == "release"
    assert main(["verify", str(tmp_path / "hf"), str(source)]) == 0
    shutil.rmtree(source / "release" / "huggingface")
    (source / "release" / "conversion.json").unlink()
    assert main(["export", str(source), str(tmp_path / "back"), "--eos-token-id", "2"]) == 0
    expected, found = stored_tensors(tmp_path / "hf"), stored_tensors(tmp_path / "back")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[key], tensor) for key, tensor in expected.items()
    )
    before, after = (read_architecture(config_of(tmp_path / place)) for place in ("hf", "back"))
    assert megatron_settings(before) == megatron_settings(after)


def test_what_is_written_twice_is_refused_and_can_be_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = imported(tmp_path, "qwen3")
    again = ["import", str(tmp_path / "hf"), str(source), "--layout", "megatron-lm"]
    assert main(again) == 2
    assert main([*again, "--overwrite"]) == 0
    assert "--use-checkpoint-args: --norm-epsilon 1e-06 --qk-layernorm" in capsys.readouterr().out


def test_the_directory_of_a_training_run_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_tiny(tmp_path / "hf", "llama")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("12")
    assert (
        main(
            ["import", str(tmp_path / "hf"), str(tmp_path / "run"), "--layout", "megatron-lm", "--overwrite"]
        )
        == 2
    )
    assert "names '12': a training run keeps its checkpoints there" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["latest_checkpointed_iteration.txt"]


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        (
            "llama",
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "rope_theta": 1e4,
                    "factor": 8.0,
                    "low_freq_factor": 2.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "llama3 = ",
        ),
        ("mixtral", {"num_experts_per_tok": 1}, "moe_router_pre_softmax = False"),
        (
            "deepseek_v3",
            {"rope_parameters": DEEPSEEK_YARN},
            "original_max_position_embeddings = 16: Megatron-LM has no flag for it",
        ),
        ("deepseek_v3", {"rms_norm_eps": 1e-5}, "latent_norm_epsilon = "),
        ("deepseek_v2_groups_tied", {}, "routing = "),
        ("glm4_moe_all_experts_tied", {}, "routing = "),
        ("llama", {"rope_parameters": LLAMA_3_2}, "rope_scaling_factor = 32: Megatron-LM computes with 8"),
    ],
)
def test_a_model_that_megatron_lm_cannot_compute_is_refused(
    name: str, changes: dict[str, Any], said: str
) -> None:
    architecture = read_architecture(tiny_config(name, **changes))
    with pytest.raises(ConversionError, match="Megatron-LM has no arguments for this model") as caught:
        megatron_lm_state(architecture, 128, torch.bfloat16)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("vocabulary", "padded"), [(101, 128), (101, 101), (101, 104), (101, 112), (128, 128)]
)
def test_megatron_lm_pads_to_the_stored_vocabulary(vocabulary: int, padded: int) -> None:
    state = megatron_lm_state(
        read_architecture(tiny_config("llama", vocab_size=vocabulary)), padded, torch.bfloat16
    )
    multiple = state["args"].make_vocab_size_divisible_by
    assert -(-vocabulary // multiple) * multiple == padded == state["args"].padded_vocab_size


# what makes other arguments of some models
CHANGES: dict[str, dict[str, Any]] = {
    "llama": {"rope_parameters": LLAMA_3_1},
    "deepseek_v3": {
        "rope_parameters": {
            **DEEPSEEK_YARN,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32,
            "mscale": 0.7,
        }
    },
    "deepseek_v2": {
        "rope_parameters": {**DEEPSEEK_YARN, "original_max_position_embeddings": 4096, "beta_fast": 32}
    },
}
NAMED = ("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss")


@pytest.mark.parametrize("name", NAMED)
def test_the_arguments_agree_with_a_config_that_is_named(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No config is made of the arguments of these families, but a config that is given is held against
    them."""
    source = imported(tmp_path, name, "--vocab-multiple", "16", **CHANGES.get(name, {}))
    shutil.rmtree(source / "release" / "huggingface")
    (source / "release" / "conversion.json").unlink()
    assert main(["export", str(source), str(tmp_path / "back"), "--eos-token-id", "2"]) == 2
    assert "pass --hf-config DIRECTORY" in capsys.readouterr().err
    assert main(["export", str(source), str(tmp_path / "back"), "--hf-config", str(tmp_path / "hf")]) == 0
    expected, found = stored_tensors(tmp_path / "hf"), stored_tensors(tmp_path / "back")
    assert found.keys() == expected.keys() and all(
        torch.equal(found[key], tensor) for key, tensor in expected.items()
    )


@pytest.mark.parametrize("name", ["deepseek_v2", "deepseek_v3"])
def test_the_tensors_say_whether_latents_have_norms(name: str, tmp_path: Path) -> None:
    """A trainer may build them by its layers, with ``qk_layernorm`` off (as megarl does); or not build
    them."""
    tensors = tensors_of(name, tmp_path)
    state = megatron_lm_state(read_architecture(config_of(tmp_path / "hf")), 128, torch.float32)
    state["args"].qk_layernorm = False
    source = write_checkpoint(tmp_path / "run" / "with", tensors, state["args"])
    assert_exported(source, tmp_path / "back", tmp_path / "hf", "--hf-config", str(tmp_path / "hf"))
    norm = "linear_kv_up_proj.layer_norm_weight"
    without = {key: tensor for key, tensor in tensors.items() if not key.endswith(norm)}
    assert len(without) < len(tensors)
    source = write_checkpoint(tmp_path / "run" / "without", without, state["args"])
    assert f"missing: decoder.layers.0.self_attention.{norm}" in is_refused(
        source, "--hf-config", str(tmp_path / "hf")
    )


@pytest.mark.parametrize("name", [*NAMES, *NAMED, "llama"])
def test_megatron_lm_itself_takes_the_arguments(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--use-checkpoint-args`` and the further flags lead Megatron-LM's own code to the settings that this
    library trains with."""
    reason = "only newer packages of Megatron-Core contain Megatron-LM"
    arguments = pytest.importorskip("megatron.training.arguments", reason=reason)
    checkpointing = pytest.importorskip("megatron.training.checkpointing", reason=reason)
    utilities = pytest.importorskip("megatron.training.argument_utils", reason=reason)
    source = imported(tmp_path, name, "--vocab-multiple", "16", **CHANGES.get(name, {}))
    stored = arguments_of(read_common_state(TorchDistCheckpoint(source / "release")))
    assert stored is not None
    flags = (
        f"--load {source} --use-checkpoint-args --micro-batch-size 1 --bf16 --no-rope-fusion "
        "--transformer-impl local"
    ).split()
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *flags])
    wanted = parser.parse_args(flags)
    taken, found = checkpointing.load_args_from_checkpoint(wanted)
    assert vars(found).keys() >= {"num_layers", "padded_vocab_size", "world_size"}
    from converters.foreign.arguments import further_flags

    further = further_flags({"args": found})
    without = vars(parser.parse_args(flags))
    for key, value in vars(parser.parse_args([*flags, *further.split()])).items():
        if value != without[key]:
            setattr(taken, key, value)
    taken.params_dtype = torch.bfloat16
    model = utilities.gpt_config_from_args(taken)
    settings = megatron_settings(read_architecture(config_of(tmp_path / "hf")))
    expected = {**settings.transformer, **settings.attributes}
    for key in {*expected} - {"init_method_std", "num_query_groups", "moe_router_bias_update_rate"}:
        neither = {"yarn_mscale": 1.0, "yarn_mscale_all_dim": 0.0}.get(key) if expected[key] is None else None
        assert getattr(model.transformer, key) in (expected[key], neither), key
    assert (model.transformer.num_query_groups or expected["num_attention_heads"]) == expected[
        "num_query_groups"
    ]
    for key in (
        "position_embedding_type",
        "rotary_base",
        "rotary_percent",
        "rope_scaling",
        "share_embeddings_and_output_weights",
    ):
        # with latent attention the transformer's configuration has the same settings, and they alone are used
        assert (
            getattr(model if key not in settings.transformer else model.transformer, key)
            == settings.model[key]
        ), key
    assert model.vocab_size == 112
    # the reason why another factor is refused on the way in and asked for on the way out
    found.rope_scaling_factor = taken.rope_scaling_factor = 32.0
    assert (
        utilities.gpt_config_from_args(taken).rope_scaling_factor
        == settings.model.get("rope_scaling_factor", 8.0)
        == ROPE_FACTOR
    )
