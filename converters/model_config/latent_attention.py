"""Multi-head latent attention, as in DeepSeek-V2: the settings in its config.

Queries (if the config gives them a rank), and keys and values together in one small vector for each token,
are projected down, normalised, and projected up to heads. In each head's query and key, a part without
positions is followed by a rotated part; all heads share the rotated part of the keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.model_config.sizes import Config, read_number, read_size

NORM_EPSILON = 1e-6
"""Epsilon of the norms between the projections: transformers uses the default of its norm class, whatever
``rms_norm_eps`` is."""

CONFIG_KEYS = frozenset(
    {
        "attention_bias",
        "kv_lora_rank",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "v_head_dim",
    }
)
"""Config keys that ``read_latent_attention`` consumes."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of the projections, named as in the config.

    Attributes:
        q_lora_rank: width of the queries between their two projections; None if there is only one projection.
        kv_lora_rank: width of the vector that keys and values are projected up from.
        qk_nope_head_dim: width of the part of a head's query and key without positions, which comes first.
        qk_rope_head_dim: width of the part that is rotated, in interleaved pairs of dimensions.
        v_head_dim: width of a head's value.
        mscale_all_dim: scores are multiplied by (0.1 * mscale_all_dim * ln(YaRN factor) + 1) squared; 0
            disables this.
    """

    q_lora_rank: int | None
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    mscale_all_dim: float

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


def read_latent_attention(config: Config, problems: list[str]) -> LatentAttention:
    """Return the latent attention that a config describes, and append to ``problems`` what cannot be carried
    over."""
    if config.get("attention_bias"):
        problems.append(
            f"attention_bias = {config['attention_bias']!r}: Megatron-Core's latent attention has no biases"
        )
    if config.get("rope_interleave", True) is not True:
        problems.append(
            f"rope_interleave = {config['rope_interleave']!r}: Megatron-Core's latent attention rotates "
            "interleaved dimensions only"
        )
    heads, groups = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if groups is not None and groups != heads:
        problems.append(
            f"num_key_value_heads = {groups!r}: latent attention has as many as num_attention_heads = "
            f"{heads!r}"
        )
    latent = LatentAttention(
        q_lora_rank=None if config.get("q_lora_rank") is None else read_size(config, "q_lora_rank", problems),
        kv_lora_rank=read_size(config, "kv_lora_rank", problems),
        qk_nope_head_dim=read_size(config, "qk_nope_head_dim", problems),
        qk_rope_head_dim=read_size(config, "qk_rope_head_dim", problems),
        v_head_dim=read_size(config, "v_head_dim", problems),
        mscale_all_dim=_mscale_all_dim(config, problems),
    )
    for key, width in (("head_dim", latent.qk_rope_head_dim), ("qk_head_dim", latent.qk_head_dim)):
        if config.get(key) not in (None, width):
            problems.append(
                f"{key} = {config[key]!r}: with these qk_rope_head_dim and qk_nope_head_dim it has to be "
                f"{width}"
            )
    return latent


def _mscale_all_dim(config: Config, problems: list[str]) -> float:
    """Return ``mscale_all_dim`` from the rotary parameters. As in transformers, it counts even without
    ``mscale``, and zero means that it is not given."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    value = parameters.get("mscale_all_dim") if isinstance(parameters, Mapping) else None
    return read_number(value or 0.0, "rope parameter mscale_all_dim", problems, instead=0.0, may_be_zero=True)
