"""Rules of latent attention (dimensions: ``converters.model_config.latent_attention``)."""

from __future__ import annotations

from collections.abc import Iterator

from converters.mapping.rule import Kind, Rule, module_rules
from converters.model_config.architecture import ModelFacts


def attention_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    """Yield the rules of latent attention, without the norm before it."""
    latent, heads, hidden = facts.latent_attention, facts.num_attention_heads, facts.hidden_size
    assert latent is not None, facts.family
    query = heads * latent.qk_head_dim
    rows: list[tuple[str, Kind, str, tuple[int, ...]]] = []
    if latent.q_lora_rank is None:
        rows.append(("linear_q_proj", Kind.COLUMN, "q_proj", (query, hidden)))
    else:
        rows += [
            ("linear_q_down_proj", Kind.COLUMN, "q_a_proj", (latent.q_lora_rank, hidden)),
            ("q_layernorm", Kind.REPLICATED, "q_a_layernorm", (latent.q_lora_rank,)),
            ("linear_q_up_proj", Kind.COLUMN, "q_b_proj", (query, latent.q_lora_rank)),
        ]
    rows += [
        (
            "linear_kv_down_proj",
            Kind.COLUMN,
            "kv_a_proj_with_mqa",
            (latent.kv_lora_rank + latent.qk_rope_head_dim, hidden),
        ),
        ("kv_layernorm", Kind.REPLICATED, "kv_a_layernorm", (latent.kv_lora_rank,)),
        (
            "linear_kv_up_proj",
            Kind.COLUMN,
            "kv_b_proj",
            (heads * (latent.qk_nope_head_dim + latent.v_head_dim), latent.kv_lora_rank),
        ),
        ("linear_proj", Kind.ROW, "o_proj", (hidden, heads * latent.v_head_dim)),
    ]
    for megatron, kind, name, shape in rows:
        yield from module_rules(
            f"decoder.layers.{layer}.self_attention.{megatron}",
            kind,
            {f"model.layers.{layer}.self_attn.{name}": shape},
        )
