"""The interface of a model family."""

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
"""None of them."""


def features_of(config: Config, **keys: str | bool) -> Features:
    """Read the optional tensors.

    Args:
        config: with the defaults of its family filled in.
        **keys: the config key that switches a feature on, or whether the family has it always; features that
            are left out it never has.
    """
    return Features(
        **{name: key if isinstance(key, bool) else bool(config.get(key)) for name, key in keys.items()}
    )


def read_nothing(*_: object) -> None:
    """Read what a family does not have."""
    return None


def read_windows(config: Config, num_layers: int, *, uniform: bool, by_layer: bool) -> tuple[int | None, ...]:
    """The window of each layer, in tokens: a token sees itself and the ``window - 1`` tokens before it; None
    for all before it.

    Args:
        config: with the defaults of its family filled in.
        num_layers: layers of the model.
        uniform: ``sliding_window`` holds for every layer.
        by_layer: it holds for the layers that ``layer_types`` says. What transformers fills in for those
            where the config does not say: with ``max_window_layers`` the layers from that on, all layers with
            ``uniform``, otherwise every other layer, beginning with the first.
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
"""Beginning of the names of the tensors of the text in a checkpoint of a model that also sees, in place of
``model.``."""


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        model_type: what its config calls it.
        architecture_class: the causal language model class named in ``config.architectures``.
        config_keys: config keys that only this family has and that ``read_features`` or the window check
            consume.
        read_features: the optional tensors, from the config as a mapping; none of them by default.
        model_rules: rules of the parameters outside the layers, embedding first; by default those of a plain
            decoder.
        layer_rules: rules of one layer, by its global index; by default those of a plain decoder.
        read_mixture: the experts, from the config and the number of layers; what is wrong is appended to the
            list.
        has_uniform_window: ``sliding_window``, when it is set, holds for every layer; with
            ``has_layer_windows``, for those that ``layer_types`` says, and for every layer where it says
            nothing.
        read_latent_attention: the latent attention, from the config; what is wrong is appended to the list.
        read_gated_delta: the gated delta nets, from the config and the number of layers; what is wrong is
            appended to the list.
        read_vision: the vision tower, from the config; what is wrong is appended to the list. A family that
            has one nests the config of its text in ``text_config``, and names its tensors by
            ``NESTED_PREFIX``.
        may_be_nested: of a text alone, whose tensors transformers saves under these names where it was read
            from a model that also sees.
        zero_centered_norms: norms multiply by 1 + weight.
        may_predict_further: behind its layers a model may have layers that predict further tokens
            (``converters.model_config.prediction_layers``).
        predicts_in_mtp: these have Qwen's names and number (``read_mtp_layers``).
        has_layer_windows: ``sliding_window`` holds for the layers that ``layer_types`` says.
        read_gate_limit: bound of what the gated MLP multiplies, from the config (``Architecture``).
        rotates_partly: rotary embedding may leave a part of each head alone (``partial_rotary_factor``).
        rotates_in_sections: of a model that also sees: see ``read_rope``.
        config_like: ``model_type`` of the transformers config class that fills in what a ``config.json``
            leaves out, for a family that transformers does not know; without it, such a config has to say
            everything.
        defaults: what that class fills in for keys that decide which tensors there are, for those who read a
            ``config.json`` without transformers. Sizes are not among them: a ``config.json`` says those.
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
        """Return whether its models also see."""
        return self.read_vision is not read_nothing
