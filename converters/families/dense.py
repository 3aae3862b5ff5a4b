"""Rules of the plain decoder that the dense families share: grouped-query attention, gated MLP, RMS norms before each block."""

from __future__ import annotations

from typing import TYPE_CHECKING

from converters.mapping.rule import HuggingFaceTensor, Kind, Rule
from converters.model_config import latent_attention

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts


def model_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Embedding, final norm and output layer.

    The output layer of a tied model is there for the last pipeline stage, which holds a copy of the embedding; it emits nothing.
    """
    embedding = HuggingFaceTensor("model.embed_tokens.weight", (facts.vocab_size, facts.hidden_size))
    head = HuggingFaceTensor("lm_head.weight", embedding.shape)
    tied = facts.tied_embeddings
    return (
        Rule("embedding.word_embeddings.weight", Kind.VOCAB, (embedding,)),
        Rule("decoder.final_layernorm.weight", Kind.REPLICATED, (HuggingFaceTensor("model.norm.weight", (facts.hidden_size,)),)),
        Rule("output_layer.weight", Kind.VOCAB, (embedding if tied else head,), emits=not tied),
    )


def layer_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """All parameters of one layer, in forward order."""
    return (*attention_rules(facts, layer), mlp_norm_rule(facts, layer), *_mlp_rules(facts, layer))


def attention_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """Attention and the norm before it."""
    if facts.latent_attention is not None:
        return latent_attention.attention_rules(facts, layer)
    hidden, head_dim = facts.hidden_size, facts.head_dim
    query, key = facts.num_attention_heads * head_dim, facts.num_key_value_heads * head_dim
    megatron, prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    widths = (("q", query), ("k", key), ("v", key))
    rules = [
        Rule(f"{megatron}input_layernorm.weight", Kind.REPLICATED, (HuggingFaceTensor(f"{prefix}input_layernorm.weight", (hidden,)),)),
        Rule(
            f"{megatron}self_attention.linear_qkv.weight",
            Kind.QKV,
            tuple(HuggingFaceTensor(f"{prefix}self_attn.{letter}_proj.weight", (width, hidden)) for letter, width in widths),
        ),
    ]
    if facts.qkv_bias:
        biases = tuple(HuggingFaceTensor(f"{prefix}self_attn.{letter}_proj.bias", (width,)) for letter, width in widths)
        rules.append(Rule(f"{megatron}self_attention.linear_qkv.bias", Kind.QKV, biases))
    if facts.qk_norm:
        for letter in ("q", "k"):
            norm = HuggingFaceTensor(f"{prefix}self_attn.{letter}_norm.weight", (head_dim,))
            rules.append(Rule(f"{megatron}self_attention.{letter}_layernorm.weight", Kind.REPLICATED, (norm,)))
    output = HuggingFaceTensor(f"{prefix}self_attn.o_proj.weight", (hidden, query))
    rules.append(Rule(f"{megatron}self_attention.linear_proj.weight", Kind.ROW, (output,)))
    if facts.attention_output_bias:
        bias = HuggingFaceTensor(f"{prefix}self_attn.o_proj.bias", (hidden,))
        rules.append(Rule(f"{megatron}self_attention.linear_proj.bias", Kind.REPLICATED, (bias,)))
    return tuple(rules)


def mlp_norm_rule(facts: ModelFacts, layer: int) -> Rule:
    """The norm before the MLP or the experts."""
    norm = HuggingFaceTensor(f"model.layers.{layer}.post_attention_layernorm.weight", (facts.hidden_size,))
    return Rule(f"decoder.layers.{layer}.pre_mlp_layernorm.weight", Kind.REPLICATED, (norm,))


def _mlp_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    hidden, ffn = facts.hidden_size, facts.ffn_hidden_size
    megatron, prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    gated = tuple(HuggingFaceTensor(f"{prefix}mlp.{part}_proj.weight", (ffn, hidden)) for part in ("gate", "up"))
    rules = [Rule(f"{megatron}mlp.linear_fc1.weight", Kind.GATED, gated)]
    if facts.mlp_bias:
        biases = tuple(HuggingFaceTensor(f"{prefix}mlp.{part}_proj.bias", (ffn,)) for part in ("gate", "up"))
        rules.append(Rule(f"{megatron}mlp.linear_fc1.bias", Kind.GATED, biases))
    down = HuggingFaceTensor(f"{prefix}mlp.down_proj.weight", (hidden, ffn))
    rules.append(Rule(f"{megatron}mlp.linear_fc2.weight", Kind.ROW, (down,)))
    if facts.mlp_bias:
        bias = HuggingFaceTensor(f"{prefix}mlp.down_proj.bias", (hidden,))
        rules.append(Rule(f"{megatron}mlp.linear_fc2.bias", Kind.REPLICATED, (bias,)))
    return tuple(rules)
