"""Rules of the plain decoder that the dense families share: grouped-query attention, gated MLP, RMS norms before each block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from converters.families import latent
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, module_rules

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
        *module_rules("decoder.final_layernorm", Kind.REPLICATED, {"model.norm": (facts.hidden_size,)}),
        Rule("output_layer.weight", Kind.VOCAB, (embedding if tied else head,), emits=not tied),
    )


def layer_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """All parameters of one layer, in forward order."""
    return (*attention_rules(facts, layer), *_mlp_rules(facts, layer))


def attention_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    """Yield the rules of the attention, with the norms before it and behind it."""
    hidden, head_dim = facts.hidden_size, facts.head_dim
    query, key = facts.num_attention_heads * head_dim, facts.num_key_value_heads * head_dim
    megatron, prefix = f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield from module_rules(f"{megatron}input_layernorm", Kind.REPLICATED, {f"{prefix}input_layernorm": (hidden,)})
    if facts.latent_attention is not None:
        yield from latent.attention_rules(facts, layer)
    else:
        heads = {f"{prefix}self_attn.{letter}_proj": (width, hidden) for letter, width in (("q", query), ("k", key), ("v", key))}
        yield from module_rules(f"{megatron}self_attention.linear_qkv", Kind.QKV, heads, bias=facts.qkv_bias)
        for letter in "qk" if facts.qk_norm else "":
            norm = {f"{prefix}self_attn.{letter}_norm": (head_dim,)}
            yield from module_rules(f"{megatron}self_attention.{letter}_layernorm", Kind.REPLICATED, norm)
        output = {f"{prefix}self_attn.o_proj": (hidden, query)}
        yield from module_rules(f"{megatron}self_attention.linear_proj", Kind.ROW, output, bias=facts.attention_output_bias)
    if facts.sinks:
        sinks = HuggingFaceTensor(f"{prefix}self_attn.sinks", (facts.num_attention_heads,))
        yield Rule(f"{megatron}self_attention.core_attention.softmax_offset", Kind.COLUMN, (sinks,))
    yield from module_rules(f"{megatron}pre_mlp_layernorm", Kind.REPLICATED, {f"{prefix}post_attention_layernorm": (hidden,)})


def _mlp_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    hidden, ffn, bias = facts.hidden_size, facts.ffn_hidden_size, facts.mlp_bias
    megatron, prefix = f"decoder.layers.{layer}.mlp.linear_", f"model.layers.{layer}.mlp."
    yield from module_rules(f"{megatron}fc1", Kind.GATED, {f"{prefix}{part}_proj": (ffn, hidden) for part in ("gate", "up")}, bias=bias)
    yield from module_rules(f"{megatron}fc2", Kind.ROW, {f"{prefix}down_proj": (hidden, ffn)}, bias=bias)
