"""DeepSeek-V3 and -R1: latent attention, mixture of experts after the first layers, multi-token-prediction
layers."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family
from converters.families.sparse import MixtureNames, layer_rules
from converters.model_config import latent_attention, prediction_layers
from converters.model_config.mixture import MixtureOfExperts, read_deepseek_mixture, require_sigmoids
from converters.model_config.sizes import Config

NAMES = MixtureNames(shared="shared_experts")

CONFIG_KEYS = latent_attention.CONFIG_KEYS | {
    # transformers has its own class for the model. The code that this key names is copied along, but never
    # run.
    "auto_map",
    # These belong to the loss of DeepSeek's own training, which transformers does not compute.
    "aux_loss_alpha",
    "seq_aux",
    # These give the number of ranks over which DeepSeek's own code would divide experts and matrices.
    "ep_size",
    "pretraining_tp",
    # This key only determines what transformers returns.
    "output_router_logits",
    "first_k_dense_replace",
    "moe_intermediate_size",
    "moe_layer_freq",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_experts_per_tok",
    "routed_scaling_factor",
    "scoring_func",
    "topk_group",
    "topk_method",
}
"""Config keys of both V2 and V3."""


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    require_sigmoids(config, problems)
    return read_deepseek_mixture(config, num_layers, problems)


FAMILY = Family(
    model_type="deepseek_v3",
    architecture_class="DeepseekV3ForCausalLM",
    config_keys=CONFIG_KEYS | prediction_layers.CONFIG_KEYS,
    layer_rules=partial(layer_rules, names=NAMES),
    read_mixture=_read_mixture,
    read_latent_attention=latent_attention.read_latent_attention,
    may_predict_further=True,
    defaults={"first_k_dense_replace": 3, "n_group": 8, "n_shared_experts": 1, "topk_group": 4},
)
