"""Multi-head latent attention, as in DeepSeek-V2: its dimensions in the config.

Keys and values are projected down to one small vector per token, normalised, and projected up to heads; so
are the queries, if they have a rank. In each head, a part of query and key without positions is followed by a
rotated part; the rotated part of the keys is shared by all heads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from converters.model_config.sizes import Config, read_number, read_size

NORM_EPSILON = 1e-6
"""Epsilon of the norms between the projections. transformers uses the default of its norm class, not
``rms_norm_eps``."""

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
"""Config keys that ``read_latent_attention`` reads."""


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Dimensions of latent attention, named as in the config.

    Attributes:
        q_lora_rank: width between the two query projections; None if there is a single projection.
        kv_lora_rank: width of the vector from which keys and values are projected up.
        qk_nope_head_dim: width of the part of query and key without positions, which comes first.
        qk_rope_head_dim: width of the rotated part; dimensions are rotated in interleaved pairs.
        v_head_dim: width of a head's value.
        mscale_all_dim: scores are multiplied by (0.1 * mscale_all_dim * ln(YaRN factor) + 1) squared; 0 for
            no factor.
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
    """Read the latent attention of a model. Unsupported settings are appended to ``problems``."""
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
    """Return ``mscale_all_dim`` from the rotary parameters. As in transformers, it is used even without
    ``mscale``, and 0 means that it is not given."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    value = parameters.get("mscale_all_dim") if isinstance(parameters, Mapping) else None
    return read_number(value or 0.0, "rope parameter mscale_all_dim", problems, instead=0.0, may_be_zero=True)
