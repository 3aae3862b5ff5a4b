"""DeepSeek's configs: what the published ones say is read, and whatever else changes the model is refused by
name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rules import hf_tensors, rule_for
from converters.model_config.latent_attention import LatentAttention
from converters.model_config.megatron_settings import latent_settings, megatron_settings
from converters.torch_dist.keys import stored_place
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import DEEPSEEK_YARN, tiny_config
from tests.unit.published_models import published

pytestmark = newest_megatron

V2_LITE, V3 = published("DeepSeek-V2-Lite"), published("DeepSeek-V3-bf16__no_quant_")


def test_the_published_configs_are_read() -> None:
    lite, large = read_architecture(V2_LITE), read_architecture(V3)
    assert lite.latent_attention == LatentAttention(None, 512, 128, 64, 128, 0.707)
    assert large.latent_attention == LatentAttention(1536, 512, 128, 64, 128, 1.0)
    assert (lite.prediction_layers, large.prediction_layers) == (0, 1)
    assert [lite.is_sparse(layer) for layer in (0, 1, 26)] == [False, True, True]
    assert [large.is_sparse(layer) for layer in (2, 3, 60, 61)] == [False, True, True, True]
    # what the model cards say, billions of parameters; of the larger one the last 58 of 61 layers are alike
    assert sum(math.prod(tensor.shape) for tensor in hf_tensors(lite)) / 1e9 == pytest.approx(15.7, abs=0.05)
    short = dataclasses.replace(large, num_layers=4, prediction_layers=0)
    times = [
        (math.prod(tensor.shape), 58 if ".layers.3." in tensor.name else 1) for tensor in hf_tensors(short)
    ]
    assert sum(size * layers for size, layers in times) / 1e9 == pytest.approx(671, abs=0.5)


def test_megatron_gets_the_published_settings() -> None:
    settings = megatron_settings(read_architecture(V3))
    chosen = settings.transformer
    assert {
        key: chosen[key]
        for key in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
    } == {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    }
    assert (
        chosen["rope_type"],
        chosen["rotary_scaling_factor"],
        chosen["original_max_position_embeddings"],
    ) == ("yarn", 40.0, 4096)
    assert (chosen["mscale"], chosen["mscale_all_dim"], chosen["beta_fast"], chosen["beta_slow"]) == (
        1.0,
        1.0,
        32.0,
        1.0,
    )
    assert chosen["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert settings.model["position_embedding_type"] == "rope" and settings.latent_norm_epsilon is None
    # every default of Megatron-Core's is that of a scaled model
    plain = megatron_settings(read_architecture(tiny_config("deepseek_v3", rms_norm_eps=1e-5)))
    assert (plain.transformer["rope_type"], plain.transformer["rotary_scaling_factor"]) == ("rope", 1.0)
    assert plain.latent_norm_epsilon == 1e-6


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}, "rope type 'linear'"),
        ({**DEEPSEEK_YARN, "truncate": False}, "yarn truncate = False"),
        ({**DEEPSEEK_YARN, "factor": 1.0, "attention_factor": 1.5}, "yarn attention_factor = 1.5"),
    ],
)
def test_rotations_that_megatron_has_no_setting_for_are_refused(rope: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match=message.replace(".", r"\.")):
        megatron_settings(read_architecture(tiny_config("deepseek_v3", rope_parameters=rope)))


@pytest.mark.parametrize("scales", [(None, None), (0.9, None), (None, 0.7), (0.9, 0.7), (2.0, 2.0)])
@pytest.mark.parametrize("attention_factor", [None, 0.8, 1.0])
def test_the_attention_factor_is_that_of_transformers(
    scales: tuple[float | None, float | None], attention_factor: float | None
) -> None:
    """The oracle is the function of transformers that makes YaRN's frequencies and factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {
        **DEEPSEEK_YARN,
        "mscale": scales[0],
        "mscale_all_dim": scales[1],
        "attention_factor": attention_factor,
    }
    config = tiny_config(
        "deepseek_v3", rope_parameters={key: value for key, value in rope.items() if value is not None}
    )
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config)
    chosen = latent_settings(read_architecture(config))
    scale, of_all = (
        0.1 * chosen[key] * math.log(chosen["rotary_scaling_factor"]) + 1.0
        for key in ("mscale", "mscale_all_dim")
    )
    assert scale / of_all == pytest.approx(expected, rel=1e-12)


def test_names_of_both_layer_specs_give_the_same_rule() -> None:
    architecture = read_architecture(tiny_config("deepseek_v3"))
    for letter, ours in (("q", "q_a"), ("kv", "kv_a")):
        fused = f"decoder.layers.1.self_attention.linear_{letter}_up_proj.layer_norm_weight"
        rule = rule_for(fused, architecture)
        assert rule is rule_for(f"decoder.layers.1.self_attention.{letter}_layernorm.weight", architecture)
        assert rule.hf_names == (f"model.layers.1.self_attn.{ours}_layernorm.weight",)
        assert stored_place(rule, architecture, stacked=False).key == fused
    before = rule_for("decoder.layers.1.input_layernorm.weight", architecture)
    assert stored_place(before, architecture, stacked=True).key == "decoder.layers.input_layernorm.weight"
    with pytest.raises(ConversionError, match="no parameter"):
        rule_for("decoder.layers.1.self_attention.linear_qkv.weight", architecture)
