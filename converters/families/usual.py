"""A stand-in for unsupported families: the usual config keys, and layers like Llama's or, with experts,
Mixtral's.

Models of these families are not converted. The torch backends run them with transformers, and their memory
and FLOPs are estimated from this stand-in.
"""

from __future__ import annotations

from converters.families.base import Family, Features
from converters.families.sparse import layer_rules
from converters.model_config.mixture import MixtureOfExperts
from converters.model_config.sizes import Config

_NORMALISED_HEADS = frozenset({"gemma3_text", "gemma3"})
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


def _read_features(config: Config) -> Features:
    biased = bool(config.get("attention_bias"))
    norms = config.get("model_type") in _NORMALISED_HEADS or bool(config.get("use_qk_norm"))
    return Features(
        qkv_bias=biased, attention_output_bias=biased, mlp_bias=bool(config.get("mlp_bias")), qk_norm=norms
    )


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    """Read the experts, which are assumed to be in every layer."""
    # Part of the interface; the usual mixture rejects nothing.
    del problems
    experts = next((_number(config[key]) for key in _EXPERTS if config.get(key)), 0)
    if not experts:
        return None
    return MixtureOfExperts(
        num_experts=experts,
        experts_per_token=_number(config.get("num_experts_per_tok") or 1),
        ffn_hidden_size=_number(config.get("moe_intermediate_size") or config["intermediate_size"]),
        normalized=True,
        sparse_layers=(True,) * num_layers,
        auxiliary_loss_coefficient=0.0,
    )


def _number(value: object) -> int:
    return int(str(value))


USUAL = Family(
    model_type="",
    architecture_class="",
    config_keys=frozenset(),
    read_features=_read_features,
    layer_rules=layer_rules,
    read_mixture=_read_mixture,
)
