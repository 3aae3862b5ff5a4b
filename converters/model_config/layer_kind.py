"""Kinds of transformer layers."""

from __future__ import annotations

from typing import Literal, NamedTuple

Mixer = Literal["attention", "latent", "gated_delta"]
"""Token mixer of a layer: grouped-query attention, latent attention, or a gated delta net."""


class LayerKind(NamedTuple):
    """Kind of a transformer layer. Layers of one kind have tensors of the same names and shapes.

    Attributes:
        mixer: the part that mixes tokens.
        sparse: the layer has experts instead of a dense MLP.
    """

    mixer: Mixer
    sparse: bool
