"""Kinds of transformer layers."""

from __future__ import annotations

from typing import Literal, NamedTuple

Mixer = Literal["attention", "latent", "gated_delta"]
"""Token mixer of a layer: grouped-query attention, latent attention, or a gated delta net."""


class LayerKind(NamedTuple):
    """Parts of a layer. Layers of the same kind have the same tensors.

    Attributes:
        mixer: token mixer.
        sparse: the layer has experts instead of a dense MLP.
    """

    mixer: Mixer
    sparse: bool
