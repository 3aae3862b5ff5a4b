"""Kinds of layers."""

from __future__ import annotations

from typing import Literal, NamedTuple

Mixer = Literal["attention", "latent", "gated_delta"]
"""Token mixer of a layer: grouped-query attention, latent attention, or a gated delta net."""


class LayerKind(NamedTuple):
    """Parts of a layer. Layers of the same kind have the same tensors.

    Attributes:
        mixer: token mixer of the layer.
        sparse: whether the layer has experts instead of the MLP.
    """

    mixer: Mixer
    sparse: bool
