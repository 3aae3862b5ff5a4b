"""Multi-token-prediction (MTP) layers after the ordinary layers, for training and speculative decoding
(DeepSeek-V3).

Hugging Face checkpoints number them after the ordinary layers: ``model.layers.{num_hidden_layers}``. Each has
the tensors of an ordinary layer, norms of the next token's embedding (``enorm``) and of the hidden state
(``hnorm``), a projection of both (``eh_proj``), and a norm before the output layer (``shared_head.norm``).
Logits do not depend on them. A checkpoint may lack all MTP layers of its config, as when transformers saves
it, but not some of their tensors.

Qwen3-Next and Qwen3.5 have one MTP layer, with attention, under the prefix ``mtp.``, and not always in the
config.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from converters.mapping.rule import Kind, Rule, module_rules, renamed
from converters.model_config.sizes import Config

if TYPE_CHECKING:
    from converters.model_config.architecture import Architecture, ModelFacts

CONFIG_KEYS = frozenset({"num_nextn_predict_layers", "num_mtp_layers"})
"""Config keys that ``read_prediction_layers`` reads; the second is an alias of the first."""

MTP_KEYS = frozenset({"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"})
"""Config keys that ``read_mtp_layers`` reads."""

_OUTSIDE = (
    ("enorm", "enorm"),
    ("hnorm", "hnorm"),
    ("eh_proj", "eh_proj"),
    ("shared_head.norm", "final_layernorm"),
)
_OUTSIDE_MTP = (
    ("pre_fc_norm_embedding", "enorm"),
    ("pre_fc_norm_hidden", "hnorm"),
    ("fc", "eh_proj"),
    ("norm", "final_layernorm"),
)
# Releases of Megatron-Core name the inner layer differently. In checkpoints it is always transformer_layer.
_INNER = "transformer_layer"
_NAME = re.compile(r"(mtp\.layers\.(?:0|[1-9]\d*)\.)mtp_model_layer(\..+)")


def read_prediction_layers(config: Config, problems: list[str]) -> int:
    """Return the number of MTP layers in a config. Problems are appended to ``problems``."""
    value = config.get("num_nextn_predict_layers", config.get("num_mtp_layers"))
    if value is None:
        return 0
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**16:
        problems.append(f"num_nextn_predict_layers = {value!r}: a whole number from 0 to {2**16} is needed")
        return 0
    return value


def read_mtp_layers(config: Config, problems: list[str]) -> int:
    """Return the number of MTP layers of a Qwen model, 1 by default. Problems are appended to
    ``problems``."""
    value = config.get("mtp_num_hidden_layers", 1)
    if isinstance(value, bool) or value not in (0, 1):
        problems.append(f"mtp_num_hidden_layers = {value!r}: only 0 or 1 is supported")
        return 0
    if config.get("mtp_use_dedicated_embeddings"):
        problems.append(
            "mtp_use_dedicated_embeddings = True: only a prediction layer that shares the embedding is "
            "supported"
        )
    return int(str(value))


def prediction_rules(
    facts: ModelFacts, index: int, layer_rules: tuple[Rule, ...], *, in_mtp: bool = False
) -> tuple[Rule, ...]:
    """Return the rules of all parameters of an MTP layer.

    Args:
        facts: facts of the model.
        index: index of the MTP layer, from 0.
        layer_rules: rules of the ordinary layer with index ``num_layers + index``.
        in_mtp: the tensors have Qwen's names.
    """
    layer, hidden = facts.num_layers + index, facts.hidden_size
    megatron, counted = f"mtp.layers.{index}.", f"model.layers.{layer}."
    rules: list[Rule] = []
    for theirs, ours in _OUTSIDE_MTP if in_mtp else _OUTSIDE:
        shape = (hidden, 2 * hidden) if ours == "eh_proj" else (hidden,)
        kind = Kind.COLUMN if ours == "eh_proj" else Kind.REPLICATED
        rules += module_rules(f"{megatron}{ours}", kind, {f"{'mtp.' if in_mtp else counted}{theirs}": shape})
    inner = []
    for rule in layer_rules:
        name = rule.megatron_name.replace(f"decoder.layers.{layer}.", f"{megatron}{_INNER}.", 1)
        parts = tuple(renamed(part, counted, megatron) for part in rule.parts) if in_mtp else rule.parts
        inner.append(replace(rule, megatron_name=name, parts=parts))
    # The final norm comes after the inner layer.
    return (*rules[:-1], *inner, rules[-1])


def usual_name(megatron_name: str) -> str:
    """Return the name that the rules use for an MTP layer's parameter; other names are returned unchanged."""
    return _NAME.sub(rf"\g<1>{_INNER}\2", megatron_name)


def copies(facts: ModelFacts) -> Iterator[tuple[str, str]]:
    """Yield (copy, original) tensor names for the embedding and the output layer, which an MTP layer shares
    with the main model but may store again."""
    for index in range(facts.prediction_layers):
        # MTP layers are numbered after the model's own layers.
        prefix = f"model.layers.{facts.num_layers + index}."
        yield f"{prefix}embed_tokens.weight", "model.embed_tokens.weight"
        head = "model.embed_tokens.weight" if facts.tied_embeddings else "lm_head.weight"
        yield f"{prefix}shared_head.head.weight", head


def as_stored(architecture: Architecture, names: Iterable[str]) -> Architecture:
    """Return the architecture without MTP layers if none of their tensors is stored; else unchanged.

    Args:
        architecture: architecture that the config describes.
        names: names of the stored tensors, in either format.
    """
    begin = beginnings(architecture)
    if architecture.prediction_layers and not any(name.startswith(begin) for name in names):
        return replace(architecture, prediction_layers=0)
    return architecture


def beginnings(architecture: Architecture) -> tuple[str, ...]:
    """Return the name prefixes of the tensors of MTP layers."""
    layers = range(architecture.num_layers, architecture.num_layers + architecture.prediction_layers)
    return ("mtp.", *(f"model.layers.{layer}." for layer in layers))
