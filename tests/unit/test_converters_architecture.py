"""Config reading: what is carried over, what is refused, and that Megatron-Core computes the same rotary
frequencies as transformers."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from transformers import BertConfig, LlamaConfig

from converters.errors import ConversionError
from converters.families.read import config_notes, read_architecture
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from tests.tables import read_table
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import CONFIGS, SIZES, tiny_config, tiny_model

pytestmark = newest_megatron

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


WINDOWED = {"gpt_oss", "qwen2_tied", "qwen3_tied", "ministral"}
BIASED = {"qwen2", "qwen2_moe", "gpt_oss"}


def test_importing_the_package_loads_no_torch() -> None:
    modules = (
        "converters, converters.families.read, converters.model_config.megatron_settings, "
        "converters.mapping.rules"
    )
    program = f"import sys, {modules}; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_size_lands_in_its_field(name: str) -> None:
    config = tiny_config(name, rms_norm_eps=3e-5, initializer_range=0.07, rope_theta=12345.0)
    architecture = read_architecture(config)
    assert architecture.family == config.model_type
    assert architecture.num_layers == 3
    assert (architecture.hidden_size, architecture.ffn_hidden_size, architecture.vocab_size) == (42, 52, 101)
    assert (architecture.num_attention_heads, architecture.num_key_value_heads) == (
        6,
        config.num_key_value_heads,
    )
    assert (architecture.head_dim, architecture.max_position) == (
        6 if architecture.latent_attention else 10,
        64,
    )
    assert (architecture.norm_epsilon, architecture.initializer_range) == (3e-5, 0.07)
    if config.model_type == "gpt_oss":
        assert architecture.rope_theta == 10000.0 and architecture.rope_scaling is not None
        assert (architecture.activation, architecture.sinks) == ("clamped_swiglu", True)
    else:
        assert (architecture.rope_theta, architecture.rope_scaling, architecture.activation) == (
            12345.0,
            None,
            "silu",
        )
    assert architecture.tied_embeddings == name.endswith("tied")
    assert architecture.qk_norm == (
        config.model_type in {"qwen3", "qwen3_moe", "qwen3_next", "dots1"}
        or config.model_type.startswith("qwen3_5")
        or name == "glm4_moe_all_experts_tied"
    )
    assert architecture.sliding_window == (9 if "window" in name or name in WINDOWED else None)
    assert architecture.qkv_bias == (
        "all_biases" in name or name in {"glm4_moe", "seed_oss"} or config.model_type in BIASED
    )
    assert architecture.attention_output_bias == ("all_biases" in name or config.model_type == "gpt_oss")
    assert architecture.mlp_bias == ("all_biases" in name or config.model_type == "gpt_oss")


@pytest.mark.parametrize("name", ["llama", "qwen2_tied", "qwen3"])
def test_a_parsed_config_json_reads_like_the_config_object(name: str) -> None:
    config = tiny_config(name)
    assert (
        read_architecture(config.to_dict())
        == read_architecture(config)
        == read_architecture(config.to_diff_dict())
    )


def test_defaults_of_a_sparse_config_json_are_filled_in() -> None:
    sparse = {"model_type": "llama", "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 7}
    architecture = read_architecture(sparse)
    assert (architecture.head_dim, architecture.num_key_value_heads, architecture.rope_theta) == (
        6,
        4,
        10000.0,
    )
    assert (architecture.num_layers, architecture.ffn_hidden_size) == (32, 11008)


def test_older_rope_keys_read_like_the_new_ones() -> None:
    old = {
        "model_type": "llama",
        **SIZES,
        "rope_theta": 777.0,
        "rope_scaling": {"type": "linear", "factor": 3.0},
    }
    new = {
        "model_type": "llama",
        **SIZES,
        "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 777.0},
    }
    assert read_architecture(old) == read_architecture(new)
    assert read_architecture(old).rope_scaling == {"type": "linear", "factor": 3.0}


def test_an_object_with_only_the_older_rope_attributes_is_read() -> None:
    class OlderConfig:
        rope_theta = 5e5
        rope_scaling: dict[str, Any] = LLAMA3

        def to_dict(self) -> dict[str, Any]:
            config = tiny_config("llama").to_dict()
            del config["rope_parameters"]
            return config

    architecture = read_architecture(OlderConfig())
    assert architecture.rope_theta == 5e5
    assert architecture.rope_scaling == {"type": "llama3", **{key: LLAMA3[key] for key in list(LLAMA3)[1:]}}


REFUSED = read_table("refused_configs.yaml")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    REFUSED,
    ids=[f"{name}-{next(iter(changes))}" for name, changes, _ in REFUSED],
)
def test_what_cannot_be_carried_over_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match="Fix: ") as caught:
        read_architecture(tiny_config(name, **changes))
    assert any(message in detail for detail in caught.value.details), caught.value
    assert len(caught.value.details) == 1 or name not in ("llama", "qwen2", "qwen3"), caught.value
    assert caught.value.exit_code == 2


def test_all_reasons_are_reported_at_once() -> None:
    with pytest.raises(ConversionError) as caught:
        read_architecture(
            tiny_config("llama", hidden_act="relu", rms_norm_eps=0.0, logit_scale=2, attention_dropout=1)
        )
    assert len(caught.value.details) == 4


def test_windows_that_are_switched_off_are_no_reason_to_refuse() -> None:
    assert (
        read_architecture(tiny_config("qwen2", use_sliding_window=False, sliding_window=8)).family == "qwen2"
    )
    assert (
        read_architecture(
            tiny_config("qwen2_moe", use_sliding_window=True, sliding_window=8, max_window_layers=0)
        ).sliding_window
        is None
    )
    assert (
        read_architecture(tiny_config("qwen3", use_sliding_window=True, max_window_layers=3)).window_layers
        is None
    )


@pytest.mark.parametrize(("name", "first"), [("qwen2", 1), ("qwen3", 2)])
def test_layers_from_max_window_layers_on_have_a_window(name: str, first: int) -> None:
    found = read_architecture(
        tiny_config(name, use_sliding_window=True, sliding_window=9, max_window_layers=first)
    )
    assert found.sliding_window == 9 and found.window_layers == tuple(layer >= first for layer in range(3))
    settings = megatron_settings(found).transformer
    assert settings["window_size"] == (8, 0) and settings["window_attn_skip_freq"] == [
        int(layer >= first) for layer in range(3)
    ]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {"new_feature": False, "other_feature": None, "third": []}),
        ("qwen3", {"rope_parameters": {**YARN, "rope_theta": 1e4, "attn_factor": 1.0}}),
    ],
)
def test_keys_that_are_off_say_nothing(name: str, changes: dict[str, Any]) -> None:
    config = tiny_config(name, **changes)
    assert read_architecture(config).num_layers == 3 and config_notes(config) == []


ONE, SEVERAL = "ignored, transformers does not read it", "ignored, transformers does not read them"


@pytest.mark.parametrize(
    ("name", "changes", "note"),
    [
        ("llama", {"neftune_noise_alpha": 5.0}, f"neftune_noise_alpha = 5.0: {ONE}"),
        ("llama", {"_attn_implementation_autoset": True}, f"_attn_implementation_autoset = True: {ONE}"),
        (
            "llama",
            {"embedding_multiplier": 12.0, "moe": True},
            f"embedding_multiplier = 12.0, moe = True: {SEVERAL}",
        ),
        ("qwen2", {"attention_bias": True}, f"attention_bias = True: {ONE}"),
        ("qwen2_moe", {"num_local_experts": 7}, f"num_local_experts = 7: {ONE}"),
        ("qwen3", {"mlp_bias": True}, f"mlp_bias = True: {ONE}"),
        (
            "qwen3_moe",
            {"use_qk_norm": True, "shared_expert_intermediate_size": 0},
            f"shared_expert_intermediate_size = 0, use_qk_norm = True: {SEVERAL}",
        ),
        ("deepseek_v3", {"mlp_bias": True}, f"mlp_bias = True: {ONE}"),
        ("llama", {"notes": ["x" * 200]}, f"notes = ['{'x' * 78}...: {ONE}"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1: training uses 0"),
    ],
)
def test_keys_that_transformers_does_not_read_are_said_and_passed_over(
    name: str, changes: dict[str, Any], note: str
) -> None:
    """As attributes of a transformers config and in the text of a file."""
    config, plain = tiny_config(name, **changes), tiny_config(name)
    text = {**json.loads(json.dumps(plain.to_dict())), **changes}
    for each in (config, text):
        assert config_notes(each) == [note]
        assert read_architecture(each) == read_architecture(plain)


def test_a_rotary_parameter_that_nobody_reads_is_said() -> None:
    config = tiny_config("llama", rope_parameters={**YARN, "rope_theta": 1e4, "finetuned": True})
    assert config_notes(config) == [f"rope_scaling.finetuned = True: {ONE}"]
    assert read_architecture(config) == read_architecture(
        tiny_config("llama", rope_parameters={**YARN, "rope_theta": 1e4})
    )


def test_keys_named_by_the_caller_are_ignored() -> None:
    config = tiny_config("llama", logit_scale=0.5, auto_map={"AutoModel": "code.Model"})
    with pytest.raises(ConversionError):
        read_architecture(config)
    asked = ("auto_map", "logit_scale", "not_there")
    assert read_architecture(config, asked) == read_architecture(tiny_config("llama"))
    assert config_notes(config, asked) == [
        "auto_map = {'AutoModel': 'code.Model'}, logit_scale = 0.5: ignored as requested"
    ]


@pytest.mark.parametrize(
    "config", [BertConfig(), {"hidden_size": 3}, {"model_type": ["llama"]}, {"model_type": "gpt2"}]
)
def test_unknown_families_are_refused(config: Any) -> None:
    with pytest.raises(ConversionError, match=r"known families are deepseek_v2, .*, llama, .*, qwen3_moe"):
        read_architecture(config)


def test_something_that_is_no_config_is_refused() -> None:
    with pytest.raises(ConversionError, match="int is not a model config"):
        read_architecture(3)
    with pytest.raises(ConversionError, match="not a valid llama config"):
        read_architecture({"model_type": "llama", "hidden_size": "many"})


@pytest.mark.parametrize("name", CONFIGS)
def test_megatron_accepts_every_argument(name: str) -> None:
    architecture = read_architecture(tiny_config(name, rms_norm_eps=3e-6))
    settings = megatron_settings(architecture)
    latent = architecture.latent_attention is not None
    config = (MLATransformerConfig if latent else TransformerConfig)(
        **settings.transformer, activation_func=torch.nn.functional.silu
    )
    assert set(settings.model) <= set(inspect.signature(GPTModel).parameters)
    assert (config.kv_channels, config.num_query_groups, config.layernorm_epsilon) == (
        10,
        architecture.num_key_value_heads,
        3e-6,
    )
    assert (config.gated_linear_unit, config.normalization, config.qk_layernorm) == (
        True,
        "RMSNorm",
        architecture.qk_norm or latent,
    )
    assert (config.add_bias_linear or config.add_qkv_bias) == architecture.qkv_bias
    assert config.add_bias_linear == architecture.mlp_bias
    assert settings.model["share_embeddings_and_output_weights"] == architecture.tied_embeddings


@pytest.mark.parametrize("changes", [{"attention_bias": True}, {"mlp_bias": True}])
def test_bias_combinations_without_a_megatron_setting_are_refused(changes: dict[str, bool]) -> None:
    with pytest.raises(ConversionError, match="attention_bias, mlp_bias"):
        megatron_settings(read_architecture(tiny_config("llama", **changes)))
    with pytest.raises(ConversionError, match="attention_bias, mlp_bias"):
        megatron_settings(read_architecture(tiny_config("qwen3", attention_bias=True)))


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "theta": {"rope_type": "default", "rope_theta": 1000000.0},
    "fraction": {"rope_type": "default", "rope_theta": 12345.5},
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 5000.0},
    "llama3": {**LLAMA3, "rope_theta": 500000.0},
    "yarn": {**YARN, "rope_theta": 10000.0},
    "yarn_ratio": {
        "rope_type": "yarn",
        "factor": None,
        "original_max_position_embeddings": 24,
        "rope_theta": 10000.0,
    },
    # So long an original context that neither end of the ramp is clamped.
    "yarn_all": {
        **YARN,
        "original_max_position_embeddings": 4096,
        "rope_theta": 9000.0,
        "beta_fast": 4,
        "beta_slow": 2,
        "mscale": 0.7,
        "mscale_all_dim": 0.4,
        "truncate": False,
    },
    "yarn_one_scale": {**YARN, "rope_theta": 9000.0, "mscale": 0.7},
}


@pytest.mark.parametrize("rope", ROPES)
def test_megatron_rotates_like_transformers(rope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle is the rotary module of transformers; positions reach beyond the original length."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    length = 150
    model = tiny_model("llama", rope_parameters=dict(ROPES[rope]), num_hidden_layers=1, head_dim=34)
    cosine, sine = model.model.rotary_emb(torch.zeros(1), torch.arange(length)[None])
    settings = megatron_settings(read_architecture(model.config))
    arguments = settings.model
    common = {
        "kv_channels": 34,
        "rotary_percent": arguments["rotary_percent"],
        "rotary_base": arguments["rotary_base"],
    }
    if arguments["position_embedding_type"] == "yarn":
        config = TransformerConfig(**settings.transformer, activation_func=torch.nn.functional.silu)
        for key, value in settings.attributes.items():
            assert not hasattr(config, key)
            setattr(config, key, value)
        names = {
            key.removeprefix("yarn_").removeprefix("rotary_"): value
            for key, value in settings.attributes.items()
        }
        angles, scale = YarnRotaryEmbedding(**common, **names, use_cpu_initialization=True).get_emb(length)
        assert scale == pytest.approx(_yarn_get_concentration_factor_from_config(config))
    else:
        scaling = {
            key: arguments[key]
            for key in ("rope_scaling", "rope_scaling_factor", "seq_len_interpolation_factor")
            if key in arguments
        }
        rotary = RotaryEmbedding(**common, **scaling, use_cpu_initialization=True)
        half = rotary.get_freqs_non_repeated(length)
        angles, scale = torch.cat((half, half), dim=-1)[:, None, None, :], 1.0
    torch.testing.assert_close(angles[:, 0, 0].cos() * scale, cosine[0], rtol=0, atol=3e-5)
    torch.testing.assert_close(angles[:, 0, 0].sin() * scale, sine[0], rtol=0, atol=3e-5)


def test_a_rope_setting_that_megatron_fixes_is_refused() -> None:
    architecture = read_architecture(
        tiny_config("llama", rope_parameters={**YARN, "attention_factor": 1.5, "rope_theta": 1e4})
    )
    with pytest.raises(ConversionError, match=r"attention_factor = 1\.5"):
        megatron_settings(architecture)


def test_architecture_is_a_usable_dictionary_key() -> None:
    first = read_architecture(tiny_config("llama", rope_parameters={**LLAMA3, "rope_theta": 1e4}))
    assert {first: 1}[dataclasses.replace(first)] == 1
    assert isinstance(first, Architecture)
    assert first != read_architecture(LlamaConfig(**SIZES))
