"""What a model family has to say about itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from converters.mixture import MixtureOfExperts
from converters.rule import Rule

if TYPE_CHECKING:
    from converters.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Features:
    """Which optional tensors the layers of a model have."""

    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool


def no_mixture(config: Mapping[str, object], num_layers: int, problems: list[str]) -> MixtureOfExperts | None:
    """The mixture of a dense family."""
    del config, num_layers, problems
    return None


@dataclass(frozen=True, slots=True)
class Family:
    """One model family.

    Attributes:
        model_type: what its config calls it.
        architecture_class: the causal language model class named in ``config.architectures``.
        config_keys: config keys that only this family has and that ``read_features`` or the window check consume.
        read_features: the optional tensors, from the config as a mapping.
        model_rules: rules of the parameters outside the layers, embedding first.
        layer_rules: rules of one layer, by its global index.
        read_mixture: the experts, from the config and the number of layers; what is wrong is appended to the list.
        has_uniform_window: ``sliding_window``, when it is set, holds for every layer.
    """

    model_type: str
    architecture_class: str
    config_keys: frozenset[str]
    read_features: Callable[[Mapping[str, object]], Features]
    model_rules: Callable[[Architecture], tuple[Rule, ...]]
    layer_rules: Callable[[Architecture, int], tuple[Rule, ...]]
    read_mixture: Callable[[Mapping[str, object], int, list[str]], MixtureOfExperts | None] = no_mixture
    has_uniform_window: bool = False
