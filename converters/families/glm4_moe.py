"""GLM-4.5, GLM-4.5-Air and GLM-4.6: grouped-query attention with partial rotary embedding, and DeepSeek's
mixture of experts after the first layers."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family, features_of
from converters.families.sparse import MixtureNames, layer_rules
from converters.model_config import prediction_layers
from converters.model_config.mixture import (
    ROUTER_KEYS,
    MixtureOfExperts,
    read_deepseek_mixture,
    require_sigmoids,
)
from converters.model_config.sizes import Config

_NAMES = MixtureNames(shared="shared_experts")


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    if config.get("n_shared_experts") == 0:
        problems.append(
            "n_shared_experts = 0: transformers then has a shared expert of no width; at least 1 is needed"
        )
    require_sigmoids(config, problems)
    return read_deepseek_mixture(config, num_layers, problems)


FAMILY = Family(
    model_type="glm4_moe",
    architecture_class="Glm4MoeForCausalLM",
    config_keys=prediction_layers.CONFIG_KEYS
    | ROUTER_KEYS
    | frozenset(
        {
            "attention_bias",
            "first_k_dense_replace",
            "moe_intermediate_size",
            "n_group",
            "n_routed_experts",
            "n_shared_experts",
            "norm_topk_prob",
            "num_experts_per_tok",
            "output_router_logits",  # It only determines what transformers returns.
            "routed_scaling_factor",
            "topk_group",
            "use_qk_norm",
        }
    ),
    read_features=partial(features_of, qkv_bias="attention_bias", qk_norm="use_qk_norm"),
    layer_rules=partial(layer_rules, names=_NAMES),
    read_mixture=_read_mixture,
    rotates_partly=True,
    may_predict_further=True,
    defaults={"first_k_dense_replace": 1, "n_group": 1, "n_shared_experts": 1, "topk_group": 1},
)
