"""What is known of the settings of Megatron-Core and Megatron-LM is held against their own code."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

import pytest
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from converters.command import read_token_ids
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.foreign.agreement import check_agreement
from converters.foreign.known_settings import NEUTRAL, NEUTRAL_OF_MIXTURES, READ, is_inert, is_suspicious
from converters.foreign.settings import ForeignSettings, settings_from_arguments
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import tiny_config
from tests.unit.foreign_checkpoints import ARGUMENTS, arguments_for

pytestmark = newest_megatron
FIELDS = {
    field.name: field
    for config in (MLATransformerConfig, TransformerConfig)
    for field in dataclasses.fields(config)
}
# how a user of Megatron-LM starts the training of each tiny model
FLAGS: dict[str, str] = {
    "llama": "",
    "mistral_window": "--window-size (8,0)",
    "qwen2": "--add-qkv-bias",
    "qwen3_moe_mixed": "--qk-layernorm --num-experts 7 --moe-router-topk 4 --moe-ffn-hidden-size 22 "
    "--moe-layer-freq ([1,0,1]) "
    "--moe-router-pre-softmax",
    "qwen2_moe": "--add-qkv-bias --num-experts 7 --moe-router-topk 3 --moe-ffn-hidden-size 22 "
    "--moe-shared-expert-intermediate-size 32 "
    "--moe-shared-expert-gate --moe-router-pre-softmax",
}
COMMON_FLAGS = (
    "--num-layers 3 --hidden-size 42 --ffn-hidden-size 52 --num-attention-heads 6 --kv-channels 10 "
    "--group-query-attention "
    "--micro-batch-size 1 --seq-length 48 --max-position-embeddings 64 --swiglu --disable-bias-linear "
    "--normalization RMSNorm "
    "--position-embedding-type rope --rotary-base 10000 --untie-embeddings-and-output-weights --bf16 "
    "--vocab-size 101"
)


def settings_for(name: str, **changes: Any) -> ForeignSettings:
    return settings_from_arguments(vars(arguments_for(name, **changes)), "args")


def test_every_setting_of_megatron_core_is_known() -> None:
    """A newer Megatron-Core that has a setting which sounds like the model has to be gone through."""
    assert len(FIELDS) > 200
    assert [name for name in FIELDS if name != "activation_func" and is_suspicious(name)] == []


def test_neutral_values_are_the_defaults_of_megatron_core() -> None:
    """Whatever changes the function when it is set has to be off by default, or every checkpoint would be
    refused."""
    known = {**NEUTRAL, **NEUTRAL_OF_MIXTURES}
    assert [
        name for name, values in known.items() if name in FIELDS and FIELDS[name].default not in values
    ] == []
    assert sum(name in FIELDS for name in known) > 20


def test_no_setting_is_both_read_and_passed_over() -> None:
    assert not [name for name in {*READ, *NEUTRAL, *NEUTRAL_OF_MIXTURES} if is_inert(name)]
    assert not READ & (set(NEUTRAL) | set(NEUTRAL_OF_MIXTURES))


@pytest.mark.parametrize(
    "name",
    [
        "logits_multiplier",
        "logit_scale_attention",
        "attn_softcap",
        "moe_new_routing",
        "residual_scale",
        "norm_after",
        "qk_scale",
        "sliding_step",
    ],
)
def test_unknown_names_that_sound_like_the_model_are_suspicious(name: str) -> None:
    assert is_suspicious(name)
    settings = settings_for("llama", **{name: 0.5})
    with pytest.raises(ConversionError, match=f"{name} = 0.5: unknown setting"):
        check_agreement(settings, read_architecture(tiny_config("llama", rms_norm_eps=1e-6)))
    for off in (None, False, "", []):
        check_agreement(
            settings_for("llama", **{name: off}), read_architecture(tiny_config("llama", rms_norm_eps=1e-6))
        )


SENSITIVE: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 54,
    "ffn_hidden_size": 53,
    "num_attention_heads": 2,
    "num_query_groups": 3,
    "kv_channels": 12,
    "norm_epsilon": 1e-5,
    "add_bias_linear": True,
    "add_qkv_bias": True,
    "qk_layernorm": True,
    "rotary_base": 10001,
    "rotary_percent": 0.5,
    "use_rope_scaling": True,
    "rotary_seq_len_interpolation_factor": 2.0,
    "position_embedding_type": "none",
    "swiglu": False,
    "quick_geglu": True,
    "normalization": "LayerNorm",
    "untie_embeddings_and_output_weights": False,
    "window_size": (8, 0),
    "num_experts": 5,
}


@pytest.mark.parametrize("name", SENSITIVE)
def test_every_argument_that_changes_the_function_is_compared(name: str) -> None:
    architecture = read_architecture(tiny_config("llama", rms_norm_eps=1e-6))
    check_agreement(settings_for("llama"), architecture)
    with pytest.raises(ConversionError, match="describe different models"):
        check_agreement(settings_for("llama", **{name: SENSITIVE[name]}), architecture)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_experts", 8),
        ("moe_router_topk", 4),
        ("moe_ffn_hidden_size", 23),
        ("moe_layer_freq", [1, 1, 0]),
        ("moe_layer_freq", 2),
        ("moe_router_pre_softmax", False),
        ("moe_router_score_function", "sigmoid"),
        ("moe_router_topk_scaling_factor", 2.5),
        ("moe_router_enable_expert_bias", True),
        ("moe_shared_expert_gate", False),
        ("moe_shared_expert_intermediate_size", 31),
    ],
)
def test_every_argument_of_a_mixture_is_compared(name: str, value: Any) -> None:
    architecture = read_architecture(tiny_config("qwen2_moe", rms_norm_eps=1e-6))
    check_agreement(settings_for("qwen2_moe"), architecture)
    with pytest.raises(ConversionError, match=name.replace("num_experts", "num_moe_experts")):
        check_agreement(settings_for("qwen2_moe", **{name: value}), architecture)


def parsed(flags: str) -> argparse.Namespace:
    """What Megatron-LM's own parser makes of flags, before it validates them against the machine."""
    arguments = pytest.importorskip(
        "megatron.training.arguments", reason="only newer packages of Megatron-Core contain Megatron-LM"
    )
    parser = arguments.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    return parser.parse_args(flags.split())


@pytest.mark.parametrize("name", FLAGS)
def test_arguments_of_megatron_lm_itself_are_understood(name: str) -> None:
    groups = ARGUMENTS[name].get("num_query_groups", 2)
    arguments = parsed(f"{COMMON_FLAGS} --norm-epsilon 1e-6 --num-query-groups {groups} {FLAGS[name]}")
    settings = settings_from_arguments(vars(arguments), "args")
    assert len(settings.values) > 700
    check_agreement(settings, read_architecture(tiny_config(name, rms_norm_eps=1e-6)))


def test_hand_written_arguments_are_arguments_of_megatron_lm() -> None:
    """What the tests of exports write down by hand exists under these names."""
    known = set(vars(parsed(COMMON_FLAGS)))
    made_later = {"iteration", "params_dtype", "world_size"}
    older = {"apply_layernorm_1p", "norm_epsilon"}
    written = {name for changes in ARGUMENTS.values() for name in changes} | set(vars(arguments_for("llama")))
    assert written - made_later - older <= known


@pytest.mark.parametrize(("text", "ids"), [("2", (2,)), ("151643,151645", (151643, 151645)), ("none", ())])
def test_token_ids_are_read(text: str, ids: tuple[int, ...]) -> None:
    assert read_token_ids(text) == ids


@pytest.mark.parametrize("text", ["", "two", "-1", "1,", "1.5", "²"])
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is no token id"):
        read_token_ids(text)
