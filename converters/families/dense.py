"""Rules of the plain decoder that dense families share: grouped-query attention, gated MLP, RMS norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.families import gated_delta, latent
from converters.mapping.rule import GroupRows, HuggingFaceTensor, Kind, Rule, module_rules

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts


def model_rules(facts: ModelFacts) -> tuple[Rule, ...]:
    """Return the rules of embedding, final norm and output layer.

    A tied model has a rule for its output layer too, because the last pipeline stage stores a copy of the
    embedding; this rule writes no Hugging Face tensor.
    """
    embedding = HuggingFaceTensor("model.embed_tokens.weight", (facts.vocab_size, facts.hidden_size))
    head = HuggingFaceTensor("lm_head.weight", embedding.shape)
    tied = facts.tied_embeddings
    return (
        Rule("embedding.word_embeddings.weight", Kind.VOCAB, (embedding,)),
        *module_rules("decoder.final_layernorm", Kind.REPLICATED, {"model.norm": (facts.hidden_size,)}),
        # With pipeline parallelism, the last stage has a copy of a tied embedding, which must not be exported
        # a second time.
        Rule("output_layer.weight", Kind.VOCAB, (embedding if tied else head,), emits=not tied),
    )


def layer_rules(facts: ModelFacts, layer: int) -> tuple[Rule, ...]:
    """Return the rules of all parameters of a layer, in forward order."""
    return (*attention_rules(facts, layer), *_mlp_rules(facts, layer))


def attention_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    """Yield the rules of a layer's token mixer and the norms around it."""
    hidden, megatron, prefix = facts.hidden_size, f"decoder.layers.{layer}.", f"model.layers.{layer}."
    yield from module_rules(
        f"{megatron}input_layernorm", Kind.REPLICATED, {f"{prefix}input_layernorm": (hidden,)}
    )
    yield from MIXERS[facts.kind_of(layer).mixer](facts, layer)
    if facts.sinks:
        sinks = HuggingFaceTensor(f"{prefix}self_attn.sinks", (facts.num_attention_heads,))
        # One logit per head, sharded like the heads.
        yield Rule(f"{megatron}self_attention.core_attention.softmax_offset", Kind.COLUMN, (sinks,))
    yield from module_rules(
        f"{megatron}pre_mlp_layernorm", Kind.REPLICATED, {f"{prefix}post_attention_layernorm": (hidden,)}
    )


def _grouped_query_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    hidden, head_dim = facts.hidden_size, facts.head_dim
    query, key = facts.num_attention_heads * head_dim, facts.num_key_value_heads * head_dim
    megatron, prefix = f"decoder.layers.{layer}.self_attention.", f"model.layers.{layer}.self_attn."
    # The query projection also computes the gates of the attention output.
    heads = {"q": query * (1 + facts.output_gate), "k": key, "v": key}
    projections = {f"{prefix}{letter}_proj": (width, hidden) for letter, width in heads.items()}
    rules = module_rules(f"{megatron}linear_qkv", Kind.QKV, projections, bias=facts.qkv_bias)
    for rule in rules:
        yield _with_gates(rule, facts) if facts.output_gate else rule
    for letter in "qk" if facts.qk_norm else "":
        yield from module_rules(
            f"{megatron}{letter}_layernorm", Kind.REPLICATED, {f"{prefix}{letter}_norm": (head_dim,)}
        )
    yield from module_rules(
        f"{megatron}linear_proj",
        Kind.ROW,
        {f"{prefix}o_proj": (hidden, query)},
        bias=facts.attention_output_bias,
    )


def _with_gates(rule: Rule, facts: ModelFacts) -> Rule:
    """Return the QKV rule for attention with an output gate. Hugging Face stores a gate after each query
    head; Megatron-Core stores all gates of a group after all its query heads."""
    groups, width = facts.num_key_value_heads, facts.head_dim
    heads = facts.num_attention_heads // groups
    # In the rows of a group, query head h begins at 2h widths, and its gate follows one width later.
    stop = 2 * heads * width
    starts = (*range(0, stop, 2 * width), *range(width, stop, 2 * width))
    queries = [GroupRows(0, start, width, stop) for start in starts]
    rows = (*queries, GroupRows(1, 0, width, width), GroupRows(2, 0, width, width))
    return replace(rule, kind=Kind.GROUPED, groups=groups, group_rows=rows)


MIXERS: Mapping[str, Callable[[ModelFacts, int], Iterator[Rule]]] = {
    "attention": _grouped_query_rules,
    "latent": latent.attention_rules,
    "gated_delta": gated_delta.mixer_rules,
}
"""``LayerKind.mixer`` -> rules of the token mixer."""


def _mlp_rules(facts: ModelFacts, layer: int) -> Iterator[Rule]:
    hidden, ffn, bias = facts.hidden_size, facts.ffn_hidden_size, facts.mlp_bias
    megatron, prefix = f"decoder.layers.{layer}.mlp.linear_", f"model.layers.{layer}.mlp."
    yield from module_rules(
        f"{megatron}fc1",
        Kind.GATED,
        {f"{prefix}{part}_proj": (ffn, hidden) for part in ("gate", "up")},
        bias=bias,
    )
    yield from module_rules(f"{megatron}fc2", Kind.ROW, {f"{prefix}down_proj": (hidden, ffn)}, bias=bias)
