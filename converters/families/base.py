"""Definition of a model family: how its config is read, and the rules of its parameters."""

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
    """Optional tensors in a model's layers."""

    qkv_bias: bool = False
    attention_output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    output_gate: bool = False


PLAIN = Features()
"""Features of a model without optional tensors."""


def features_of(config: Config, **keys: str | bool) -> Features:
    """Read which optional tensors a model has.

    Args:
        config: config with the family's defaults filled in.
        **keys: feature -> config key that enables it, or a constant; omitted features are off.
    """
    return Features(
        **{name: key if isinstance(key, bool) else bool(config.get(key)) for name, key in keys.items()}
    )


def read_nothing(*_: object) -> None:
    """Return None; default reader for parts that a family does not have."""
    return None


def read_windows(config: Config, num_layers: int, *, uniform: bool, by_layer: bool) -> tuple[int | None, ...]:
    """Return the attention window of each layer in tokens, including the token itself; None for full
    attention.

    Args:
        config: config with the family's defaults filled in.
        num_layers: number of layers.
        uniform: ``sliding_window`` applies to every layer.
        by_layer: ``sliding_window`` applies to the layers that ``layer_types`` lists. Without
            ``layer_types``, transformers' defaults apply: with ``max_window_layers`` the layers from that
            index on, with ``uniform`` all layers, otherwise every other layer, starting with the first.
    """
    window = config.get("sliding_window")
    if not isinstance(window, int) or not (uniform or by_layer) or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    if not by_layer:
        return (window,) * num_layers
    # Newer configs list the type of each layer, older ones give the first layer with a window, or neither.
    kinds, first = config.get("layer_types"), config.get("max_window_layers")
    if isinstance(kinds, list | tuple) and len(kinds) == num_layers:
        sliding = [kind == "sliding_attention" for kind in kinds]
    elif isinstance(first, int):
        sliding = [layer >= first for layer in range(num_layers)]
    else:
        sliding = [uniform or layer % 2 == 0 for layer in range(num_layers)]
    return tuple(window if slides else None for slides in sliding)


NESTED_PREFIX = "model.language_model."
"""Prefix, instead of ``model.``, of the text model's tensors in checkpoints of vision-language models."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model family.

    Attributes:
        model_type: ``model_type`` in its configs.
        architecture_class: causal language model class in ``config.architectures``.
        config_keys: config keys specific to this family that its readers use.
        read_features: reads the optional tensors from a config; by default there are none.
        model_rules: rules of the parameters outside of layers, embedding first; by default of a plain
            decoder.
        layer_rules: rules of a layer, by its global index; by default of a plain decoder.
        read_mixture: reads the experts from the config and the number of layers; appends problems to the
            list.
        has_uniform_window: ``sliding_window`` applies to every layer. Together with ``has_layer_windows``,
            only if there is no ``layer_types``.
        read_latent_attention: reads latent attention from the config; appends problems to the list.
        read_gated_delta: reads gated delta nets from the config and the number of layers; appends problems to
            the list.
        read_vision: reads the vision tower from the config; appends problems to the list. Families with a
            tower nest the text config in ``text_config``, and the text tensors under ``NESTED_PREFIX``.
        may_be_nested: transformers uses ``NESTED_PREFIX`` for a text-only model that was loaded from a
            vision-language model.
        zero_centered_norms: norms multiply by 1 + weight.
        may_predict_further: a model may have multi-token-prediction layers
            (``converters.model_config.prediction_layers``).
        predicts_in_mtp: these layers have Qwen's names and config key (``read_mtp_layers``).
        has_layer_windows: ``sliding_window`` applies to the layers that ``layer_types`` lists.
        read_gate_limit: reads the clamp of the gated MLP's factors from the config (``Architecture``).
        rotates_partly: rotary embedding may skip a part of each head (``partial_rotary_factor``).
        rotates_in_sections: see ``read_rope``; for vision-language models.
        config_like: for a family that transformers does not know: ``model_type`` of the config class that
            provides defaults. None if ``config.json`` must be complete.
        defaults: that class's defaults for keys that decide which tensors exist, for reading a
            ``config.json`` without transformers.
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
