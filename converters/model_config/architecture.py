"""Architecture of a model: all facts that determine its parameters and its forward pass."""

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
    """Dimensions of a model, and which optional tensors its layers have. The mapping rules depend on nothing
    else.

    Attributes:
        family: ``model_type`` of the Hugging Face config.
        num_layers: number of transformer layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the gated MLP in dense layers.
        num_attention_heads: number of query heads.
        num_key_value_heads: number of key-value groups.
        head_dim: width of a head; not always hidden_size / num_attention_heads. With latent attention, the
            width of the rotated part.
        vocab_size: rows of the embedding, without padding.
        tied_embeddings: the output layer is the embedding.
        max_position: maximum sequence length in tokens; None if unknown.
        qkv_bias, attention_output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: queries and keys have an RMS norm per head.
        sinks: each head has a trained logit that takes part in the softmax and has no value (attention sink).
        output_gate: the attention output is multiplied by the sigmoid of a gate that the query projection
            computes.
        sliding_window: attention window in tokens, including the token itself; None for full attention.
        window_layers: for each layer, whether it has the window; None for all layers.
        mixture: mixture of experts; None for a dense model.
        latent_attention: latent attention; None for ordinary attention.
        gated_delta: gated delta nets that replace attention in some layers; None without them.
        zero_centered_norms: norms multiply by 1 + weight, except those inside gated delta nets.
        prediction_layers: number of multi-token-prediction layers
            (``converters.model_config.prediction_layers``).
        vision: vision tower, which is converted but not computed; None for a text-only model.
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
        """Number of experts in a layer with experts; 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.num_experts

    @property
    def has_dense_layers(self) -> bool:
        """True if at least one layer has a dense MLP."""
        return self.mixture is None or not all(self.mixture.sparse_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens; None for full attention."""
        layers = self.window_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if windowed else None for windowed in layers)

    def is_sparse(self, layer: int) -> bool:
        """Return whether a layer, by global index, has experts instead of a dense MLP. Multi-token-prediction
        layers, which are numbered after the others, are like the last ordinary layer."""
        return self.mixture is not None and self.mixture.sparse_layers[min(layer, self.num_layers - 1)]

    def kind_of(self, layer: int) -> LayerKind:
        """Return the kind of a layer, by global index. Multi-token-prediction layers have attention."""
        mixer: Mixer = "attention" if self.latent_attention is None else "latent"
        if self.gated_delta is not None and layer < self.num_layers and self.gated_delta.layers[layer]:
            mixer = "gated_delta"
        return LayerKind(mixer, self.is_sparse(layer))


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelFacts):
    """Facts of a model with all other settings that affect its forward pass.

    Attributes:
        norm_epsilon: epsilon of the RMS norms.
        rope_theta, rope_scaling: see ``read_rope``.
        activation: activation of the gate: ``silu``, or ``clamped_swiglu`` with a ``gate_limit``.
        initializer_range: standard deviation of the initial weights.
        rotary_fraction: leading fraction of a head's dimensions that is rotated.
        gate_limit: None for an ordinary gated MLP. Otherwise the gate is clamped from above to this limit and
            the other factor to plus or minus the limit; the gate is ``x * sigmoid(1.702 x)``, and 1 is added
            to the other factor.
    """

    max_position: int
    norm_epsilon: float
    rope_theta: float
    # A dict is not hashable, and rules are cached by architecture.
    rope_scaling: dict[str, Any] | None = field(hash=False)
    activation: str
    initializer_range: float
    rotary_fraction: float = 1.0
    gate_limit: float | None = None
