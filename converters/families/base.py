"""Interface of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from converters.families import dense
from converters.mapping.rule import Rule
from converters.model_config.gated_delta import GatedDeltaNet
from converters.model_config.latent_attention import LatentAttention
from converters.model_config.mixture import MixtureOfExperts
from converters.model_config.sizes import Config
from converters.model_config.vision import VisionTower

if TYPE_CHECKING:
    from converters.model_config.architecture import ModelFacts


@dataclass(frozen=True, slots=True)
class Features:
    """Optional tensors of the layers of a model."""

    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    output_gate: bool = False


PLAIN = Features()
"""Features of a model without optional tensors."""


def features_of(config: Config, **keys: str | bool) -> Features:
    """Read the optional tensors from a config.

    Args:
        config: config with the defaults of its family filled in.
        **keys: for each feature, the config key that enables it, or whether the family always has it; omitted
            features are off.
    """
    return Features(
        **{name: key if isinstance(key, bool) else bool(config.get(key)) for name, key in keys.items()}
    )


def read_nothing(*_: object) -> None:
    """Return None: the default reader for parts that a family does not have."""
    return None


def read_windows(config: Config, num_layers: int, *, uniform: bool, by_layer: bool) -> tuple[int | None, ...]:
    """Return the window of each layer, in tokens. A token sees itself and the ``window - 1`` tokens before
    it; None means all tokens before it.

    Args:
        config: config with the defaults of its family filled in.
        num_layers: number of layers of the model.
        uniform: whether ``sliding_window`` applies to every layer.
        by_layer: whether ``sliding_window`` applies only to the layers that ``layer_types`` lists. Without
            ``layer_types``, transformers' defaults apply: with ``max_window_layers`` the layers from that
            index on, with ``uniform`` all layers, otherwise every other layer, starting with the first.
    """
    window = config.get("sliding_window")
    if not isinstance(window, int) or not (uniform or by_layer) or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    if not by_layer:
        return (window,) * num_layers
    kinds, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif isinstance(first, int):
        sliding = [layer >= first for layer in range(num_layers)]
    else:
        sliding = [uniform or layer % 2 == 0 for layer in range(num_layers)]
    return tuple(window if slides else None for slides in sliding)


NESTED_PREFIX = "model.language_model."
"""Prefix of the text model's tensor names in a checkpoint of a vision-language model, which replaces
``model.``."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        model_type: name of the family in its configs.
        architecture_class: causal language model class named in ``config.architectures``.
        config_keys: config keys that only this family has and that ``read_features`` or the window check
            consume.
        read_features: reads the optional tensors from the config, a mapping; by default there are none.
        model_rules: rules of the parameters outside the layers, embedding first; by default those of a plain
            decoder.
        layer_rules: rules of one layer, by its global index; by default those of a plain decoder.
        read_mixture: reads the experts from the config and the number of layers, and appends problems to the
            list.
        has_uniform_window: ``sliding_window``, if set, applies to every layer. With ``has_layer_windows`` it
            applies to the layers that ``layer_types`` lists, or to every layer if there is no list.
        read_latent_attention: reads the latent attention from the config, and appends problems to the list.
        read_gated_delta: reads the gated delta nets from the config and the number of layers, and appends
            problems to the list.
        read_vision: reads the vision tower from the config, and appends problems to the list. A family with a
            tower nests the config of its text in ``text_config``, and names the text's tensors by
            ``NESTED_PREFIX``.
        may_be_nested: whether transformers saves the tensors of a text-only model under these names if it was
            loaded from a vision-language model.
        zero_centered_norms: whether norms multiply by 1 + weight.
        may_predict_further: whether a model may have prediction layers after its ordinary layers
            (``converters.model_config.prediction_layers``).
        predicts_in_mtp: whether prediction layers have Qwen's names and number (``read_mtp_layers``).
        has_layer_windows: whether ``sliding_window`` applies only to the layers that ``layer_types`` lists.
        read_gate_limit: reads the clamp of the gated MLP's factors from the config (``Architecture``).
        rotates_partly: whether rotary embedding may skip a part of each head (``partial_rotary_factor``).
        rotates_in_sections: for vision-language models, see ``read_rope``.
        config_like: ``model_type`` of the transformers config class that completes a ``config.json``, for a
            family unknown to transformers; without it, the ``config.json`` has to be complete.
        defaults: that class's defaults for the keys that decide which tensors exist, for code that reads a
            ``config.json`` without transformers. Sizes have no defaults, since every ``config.json`` has
            them.
    """

    model_type: str
    architecture_class: str
    config_keys: frozenset[str]
    read_features: Callable[[Config], Features] = features_of
    model_rules: Callable[[ModelFacts], tuple[Rule, ...]] = dense.model_rules
    layer_rules: Callable[[ModelFacts, int], tuple[Rule, ...]] = dense.layer_rules
    read_mixture: Callable[[Config, int, list[str]], MixtureOfExperts | None] = read_nothing
    has_uniform_window: bool = False
    read_latent_attention: Callable[[Config, list[str]], LatentAttention | None] = read_nothing
    read_gated_delta: Callable[[Config, int, list[str]], GatedDeltaNet | None] = read_nothing
    read_vision: Callable[[Config, list[str]], VisionTower | None] = read_nothing
    may_be_nested: bool = False
    zero_centered_norms: bool = False
    may_predict_further: bool = False
    predicts_in_mtp: bool = False
    has_layer_windows: bool = False
    read_gate_limit: Callable[[Config, list[str]], float | None] = read_nothing
    rotates_partly: bool = False
    rotates_in_sections: bool = False
    config_like: str | None = None
    defaults: Config = field(default_factory=dict)

    @property
    def sees(self) -> bool:
        """True if the family's models are vision-language models."""
        return self.read_vision is not read_nothing
