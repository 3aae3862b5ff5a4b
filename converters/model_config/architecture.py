"""Architecture: the facts of a model that determine its shapes and its forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from converters.model_config.gated_delta import GatedDeltaNet
from converters.model_config.heads import ScoreHead
from converters.model_config.latent_attention import LatentAttention
from converters.model_config.layer_kind import LayerKind, Mixer
from converters.model_config.mixture import MixtureOfExperts
from converters.model_config.vision import VisionTower


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of a model, and which tensors its layers have. The mapping rules follow from these alone.

    Attributes:
        family: ``model_type`` of the Hugging Face config.
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the gated MLP of dense layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key-value groups; equal to the heads without grouped-query attention.
        head_dim: width of one head; not always hidden_size / num_attention_heads. With latent attention, the
            width of its rotated part.
        vocab_size: rows of the embedding, unpadded.
        tied_embeddings: whether the output layer is the embedding.
        max_position: longest sequence that the config allows, in tokens; None if the config does not give it.
        qkv_bias, attention_output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: whether each query and key head has an RMS norm.
        sinks: whether each head has a learnt logit next to those of the keys, which takes a share of the
            softmax and has no value.
        output_gate: whether the output of attention is multiplied by the sigmoid of a gate, which the query
            projection computes for each query head.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None means all
            tokens before it.
        window_layers: for each layer, whether ``sliding_window`` applies to it; None means every layer.
        mixture: the experts; None for a dense model.
        latent_attention: projections of latent attention; None for ordinary attention.
        gated_delta: gated delta nets, which some layers have instead of attention; None if all layers have
            attention.
        zero_centered_norms: whether norms multiply by 1 + weight, except those inside gated delta nets.
        prediction_layers: number of prediction layers after the ordinary layers
            (``converters.model_config.prediction_layers``).
        vision: the vision tower, which is converted and not computed; None for a text-only model.
        head: score layer that replaces the output layer (``converters.model_config.heads``); None for a
            language model.
    """

    family: str
    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tied_embeddings: bool
    max_position: int | None
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sinks: bool = False
    output_gate: bool = False
    sliding_window: int | None = None
    window_layers: tuple[bool, ...] | None = None
    mixture: MixtureOfExperts | None = None
    latent_attention: LatentAttention | None = None
    gated_delta: GatedDeltaNet | None = None
    zero_centered_norms: bool = False
    prediction_layers: int = 0
    vision: VisionTower | None = None
    head: ScoreHead | None = None

    @property
    def num_experts(self) -> int:
        """Number of experts in a sparse layer; 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.num_experts

    @property
    def has_dense_layers(self) -> bool:
        """True if some layer has a dense MLP."""
        return self.mixture is None or not all(self.mixture.sparse_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Window of each layer in tokens; None for a layer without a window."""
        layers = self.window_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if windowed else None for windowed in layers)

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer of that global index has experts instead of a dense MLP. Prediction
        layers, which are numbered after the ordinary layers, are like the last ordinary layer."""
        return self.mixture is not None and self.mixture.sparse_layers[min(layer, self.num_layers - 1)]

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of the layer of that global index. Prediction layers have attention."""
        mixer: Mixer = "attention" if self.latent_attention is None else "latent"
        if self.gated_delta is not None and layer < self.num_layers and self.gated_delta.layers[layer]:
            mixer = "gated_delta"
        return LayerKind(mixer, self.is_sparse(layer))


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelFacts):
    """Facts of a model, together with all other settings that its forward pass depends on.

    Attributes:
        norm_epsilon: epsilon of every RMS norm.
        rope_theta, rope_scaling: see ``read_rope``.
        activation: activation of the gate: ``silu``, or ``clamped_swiglu`` with a ``gate_limit``.
        initializer_range: standard deviation of freshly initialised weights.
        rotary_fraction: part of a head, from its beginning, that is rotated.
        gate_limit: the gate is clamped to at most this limit, and the other factor to between minus and plus
            the limit. The gate then is ``x * sigmoid(1.702 x)``, and 1 is added to the other factor. None for
            an MLP without clamping.
    """

    max_position: int
    norm_epsilon: float
    rope_theta: float
    # Exclude it from the hash: a dict is not hashable, and rules are cached by architecture.
    rope_scaling: dict[str, Any] | None = field(hash=False)
    activation: str
    initializer_range: float
    rotary_fraction: float = 1.0
    gate_limit: float | None = None
