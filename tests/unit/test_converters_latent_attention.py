"""DeepSeek's configs: what the published ones say is read, and whatever else changes the model is refused by name."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from transformers import PreTrainedConfig

from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rules import hf_tensors, rule_for
from converters.model_config.latent_attention import LatentAttention
from converters.model_config.megatron_settings import latent_settings, megatron_settings
from converters.torch_dist.keys import stored_place
from tests.tiers import newest_megatron
from tests.unit.converters_tiny import DEEPSEEK_YARN, tiny_config

pytestmark = newest_megatron

# config.json of DeepSeek-V2-Lite and of DeepSeek-V3, as published, the latter without quantization_config
V2_LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"},
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V3: dict[str, Any] = {
    **V2_LITE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "rope_scaling": {**V2_LITE["rope_scaling"], "mscale": 1.0, "mscale_all_dim": 1.0},
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "vocab_size": 129280,
}


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
    times = [(math.prod(tensor.shape), 58 if ".layers.3." in tensor.name else 1) for tensor in hf_tensors(short)]
    assert sum(size * layers for size, layers in times) / 1e9 == pytest.approx(671, abs=0.5)


def test_megatron_gets_the_published_settings() -> None:
    settings = megatron_settings(read_architecture(V3))
    chosen = settings.transformer
    assert {key: chosen[key] for key in ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")} == {
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_head_dim": 128,
        "qk_pos_emb_head_dim": 64,
        "v_head_dim": 128,
    }
    assert (chosen["rope_type"], chosen["rotary_scaling_factor"], chosen["original_max_position_embeddings"]) == ("yarn", 40.0, 4096)
    assert (chosen["mscale"], chosen["mscale_all_dim"], chosen["beta_fast"], chosen["beta_slow"]) == (1.0, 1.0, 32.0, 1.0)
    assert chosen["moe_layer_freq"] == [0] * 3 + [1] * 58
    assert settings.model["position_embedding_type"] == "rope" and settings.latent_norm_epsilon is None
    # every default of Megatron-Core's is that of a scaled model
    plain = megatron_settings(read_architecture(tiny_config("deepseek_v3", rms_norm_eps=1e-5)))
    assert (plain.transformer["rope_type"], plain.transformer["rotary_scaling_factor"]) == ("rope", 1.0)
    assert plain.latent_norm_epsilon == 1e-6


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("v3", {"attention_bias": True}, "attention_bias = True"),
    ("v3", {"rope_interleave": False}, "rope_interleave = False"),
    ("v3", {"num_key_value_heads": 3}, "num_key_value_heads = 3"),
    ("v3", {"head_dim": 10}, "head_dim = 10: with these qk_rope_head_dim and qk_nope_head_dim it has to be 6"),
    ("v3", {"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
    ("v3", {"topk_method": "greedy"}, "topk_method = 'greedy'"),
    ("v3", {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
    ("v3", {"kv_lora_rank": 0}, "kv_lora_rank = 0"),
    ("v3", {"sliding_window": 7}, "sliding_window = 7: transformers reads it for DeepseekV3Config"),
    ("v2", {"mlp_bias": True}, "mlp_bias = True"),
    ("v2", {"norm_topk_prob": True}, "norm_topk_prob = True"),
    ("v2", {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'"),
    ("v2", {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'"),
    ("v2", {"moe_layer_freq": 3}, "moe_layer_freq = 3"),
    ("v2", {"rope_parameters": {**DEEPSEEK_YARN, "mscale_all_dim": -1.0}}, "mscale_all_dim = -1.0"),
]


@pytest.mark.parametrize(("name", "changes", "message"), REFUSED, ids=[f"{name}-{next(iter(changes))}" for name, changes, _ in REFUSED])
def test_what_cannot_be_carried_over_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConversionError, match="Fix: ") as caught:
        read_architecture(tiny_config(f"deepseek_{name}", **changes))
    assert any(message in detail for detail in caught.value.details), caught.value


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
def test_the_attention_factor_is_that_of_transformers(scales: tuple[float | None, float | None], attention_factor: float | None) -> None:
    """The oracle is the function of transformers that makes YaRN's frequencies and factor."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {**DEEPSEEK_YARN, "mscale": scales[0], "mscale_all_dim": scales[1], "attention_factor": attention_factor}
    config = tiny_config("deepseek_v3", rope_parameters={key: value for key, value in rope.items() if value is not None})
    _, expected = ROPE_INIT_FUNCTIONS["yarn"](config)
    chosen = latent_settings(read_architecture(config))
    scale, of_all = (0.1 * chosen[key] * math.log(chosen["rotary_scaling_factor"]) + 1.0 for key in ("mscale", "mscale_all_dim"))
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


CHANGED: dict[type, Any] = {bool: lambda value: not value, int: lambda value: value + 2, float: lambda value: 2 * value + 0.5}
CHANGED_BY_NAME: dict[str, dict[str, Any]] = {
    "hidden_act": {"hidden_act": "gelu"},
    "hidden_size": {"hidden_size": 48},
    "n_group": {"n_group": 6},
    "n_routed_experts": {"n_routed_experts": 16},
    "topk_group": {"topk_group": 3},
    "num_attention_heads": {"num_attention_heads": 7, "num_key_value_heads": 7},
    "first_k_dense_replace": {"first_k_dense_replace": 2},
    "qk_rope_head_dim": {"qk_rope_head_dim": 8, "head_dim": 8},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "topk_method": {"topk_method": "greedy"},
}
REFUSED_KEYS = {"attention_bias", "hidden_act", "mlp_bias", "num_key_value_heads", "rope_interleave"}
# of the last, transformers makes another key or nothing
INERT = {
    "use_cache",
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "output_router_logits",
    "pretraining_tp",
    "num_mtp_layers",
    "head_dim",
    "attention_dropout",  # training uses 0, and says so
}


@pytest.mark.parametrize("name", ["deepseek_v2_groups_tied", "deepseek_v3"])
def test_no_key_of_a_family_goes_unread(name: str) -> None:
    """Whatever the config class declares changes the architecture when it changes, or is refused, or is listed above."""
    base = tiny_config(name)
    own = {field.name for field in dataclasses.fields(base)} - {field.name for field in dataclasses.fields(PreTrainedConfig)}
    assert len(own) > 25
    for key in sorted(own - INERT):
        changes = CHANGED_BY_NAME.get(key) or {key: CHANGED[type(getattr(base, key))](getattr(base, key))}
        try:
            assert read_architecture(tiny_config(name, **changes)) != read_architecture(base), key
        except ConversionError as refusal:
            assert key in REFUSED_KEYS | ({"norm_topk_prob"} if "v2" in name else set()), refusal
