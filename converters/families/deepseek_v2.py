"""DeepSeek-V2 and -V2-Lite: latent attention; mixture of experts with a softmax router after the first
layers."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family
from converters.families.deepseek_v3 import CONFIG_KEYS, NAMES
from converters.families.sparse import layer_rules
from converters.model_config import latent_attention
from converters.model_config.mixture import MixtureOfExperts, read_deepseek_mixture, require
from converters.model_config.sizes import Config

_METHODS = ("greedy", "group_limited_greedy")


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    if config.get("mlp_bias"):
        problems.append(f"mlp_bias = {config['mlp_bias']!r}: Megatron-Core cannot have biases only in MLPs")
    require(
        config, "scoring_func", "softmax", "transformers computes no other score for this family", problems
    )
    require(
        config, "moe_layer_freq", 1, "transformers gives every layer after the first ones experts", problems
    )
    require(
        config,
        "norm_topk_prob",
        False,
        "transformers never divides the scores of this family by their sum",
        problems,
    )
    method = config.get("topk_method")
    if method not in _METHODS:
        problems.append(f"topk_method = {method!r}: only {' and '.join(map(repr, _METHODS))} are supported")
    return read_deepseek_mixture(
        config,
        num_layers,
        problems,
        score="softmax",
        best_of_group=1,
        grouped=method == "group_limited_greedy",
    )


FAMILY = Family(
    model_type="deepseek_v2",
    architecture_class="DeepseekV2ForCausalLM",
    config_keys=CONFIG_KEYS | {"mlp_bias"},
    layer_rules=partial(layer_rules, names=NAMES),
    read_mixture=_read_mixture,
    read_latent_attention=latent_attention.read_latent_attention,
    defaults={"first_k_dense_replace": 0, "n_shared_experts": 2, "topk_method": "greedy"},
)
