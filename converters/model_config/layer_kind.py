"""Kinds of layers."""

from __future__ import annotations

from typing import Literal, NamedTuple

Mixer = Literal["attention", "latent", "gated_delta"]
"""What mixes the tokens of a layer: grouped-query attention, latent attention, or a gated delta net."""


class LayerKind(NamedTuple):
    """The parts of a layer. Layers of one kind have the same tensors.

    Attributes:
        mixer: of its tokens.
        sparse: it has experts in the place of the MLP.
    """

    mixer: Mixer
    sparse: bool
