"""Qwen3.5, dense or with experts: like Qwen3-Next, but the projections of gated delta nets are separate
tensors.

Published checkpoints are vision-language models. transformers loads the text part alone
(``AutoModelForCausalLM``), and saves it with another ``model_type``.
"""

from __future__ import annotations

from dataclasses import replace

from converters.families import dense, qwen3_next
from converters.families.base import Family, read_nothing
from converters.families.sparse import layer_rules
from converters.model_config import gated_delta, vision
from converters.model_config.mixture import MixtureOfExperts, read_mixture
from converters.model_config.prediction_layers import MTP_KEYS
from converters.model_config.sizes import Config

# The model always has the output gate, whatever ``attn_output_gate`` says.
_TEXT_KEYS = (
    gated_delta.CONFIG_KEYS | MTP_KEYS | frozenset({"attention_bias", "attn_output_gate", "mamba_ssm_dtype"})
)
_EXPERT_KEYS = frozenset(
    {
        "moe_intermediate_size",
        "num_experts",
        "num_experts_per_tok",
        "output_router_logits",
        "router_aux_loss_coef",
        "shared_expert_intermediate_size",
    }
)


def _read_mixture(config: Config, num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    """Read the mixture of experts: experts in all layers, normalised probabilities."""
    shared = "shared_expert_intermediate_size"
    every = (True,) * num_layers
    return read_mixture(
        config,
        problems,
        width_key="moe_intermediate_size",
        normalized=True,
        sparse_layers=every,
        shared_width_key=shared,
    )


_TEXT = replace(
    qwen3_next.FAMILY,
    config_keys=_TEXT_KEYS,
    read_gated_delta=gated_delta.read_gated_delta,
    rotates_in_sections=True,
    may_be_nested=True,
    defaults={},
)
DENSE = replace(
    _TEXT,
    model_type="qwen3_5_text",
    architecture_class="Qwen3_5ForCausalLM",
    layer_rules=dense.layer_rules,
    read_mixture=read_nothing,
)
SPARSE = replace(
    _TEXT,
    model_type="qwen3_5_moe_text",
    architecture_class="Qwen3_5MoeForCausalLM",
    config_keys=_TEXT_KEYS | _EXPERT_KEYS,
    layer_rules=layer_rules,
    read_mixture=_read_mixture,
)


def _seeing(text: Family, model_type: str, architecture_class: str) -> Family:
    """Return the vision-language family of published checkpoints with a given text family."""
    keys = text.config_keys | vision.CONFIG_KEYS
    return replace(
        text,
        model_type=model_type,
        architecture_class=architecture_class,
        config_keys=keys,
        read_vision=vision.read_vision,
    )


SEEING_DENSE = _seeing(DENSE, "qwen3_5", "Qwen3_5ForConditionalGeneration")
SEEING_SPARSE = _seeing(SPARSE, "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration")
