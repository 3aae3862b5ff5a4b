"""Mixtral: experts in every layer, no biases. Probabilities of the selected experts are normalised to sum
1."""

from __future__ import annotations

from functools import partial

from converters.families.base import Family
from converters.families.sparse import MixtureNames, layer_rules
from converters.model_config.mixture import MixtureOfExperts, read_mixture
from converters.model_config.sizes import Config

_NAMES = MixtureNames(blocks=("block_sparse_moe", "mlp"), gate="w1", up="w3", down="w2")


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    noise = config.get("router_jitter_noise")
    if noise:
        problems.append(
            f"router_jitter_noise = {noise!r}: only 0 is supported; transformers scales the input of router "
            "and experts at random, "
            "Megatron-Core that of the router alone"
        )
    if config.get("num_local_experts") == 0:
        problems.append("num_local_experts = 0: a Mixtral layer has no other MLP")
    return read_mixture(
        config, problems, width_key="intermediate_size", normalized=True, sparse_layers=(True,) * num_layers
    )


FAMILY = Family(
    model_type="mixtral",
    architecture_class="MixtralForCausalLM",
    # output_router_logits and router_aux_loss_coef concern the loss that transformers computes from labels.
    config_keys=frozenset(
        {
            "num_experts_per_tok",
            "num_local_experts",
            "output_router_logits",
            "router_aux_loss_coef",
            "router_jitter_noise",
            "sliding_window",
        }
    ),
    layer_rules=partial(layer_rules, names=_NAMES),
    read_mixture=_read_mixture,
    has_uniform_window=True,
)
