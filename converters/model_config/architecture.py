"""Architecture: the facts of a model that decide its shapes and its forward pass."""

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
    """A model's sizes, and which tensors its layers have. The mapping rules follow from these alone.

    Attributes:
        family: ``model_type`` of the Hugging Face config.
        num_layers: transformer layers.
        hidden_size: width of the residual stream.
        ffn_hidden_size: width of the gated MLP of dense layers.
        num_attention_heads: query heads.
        num_key_value_heads: key-value groups; equal to the heads without grouped-query attention.
        head_dim: width of one head; not always hidden_size / num_attention_heads. With latent attention, of
            its rotated part.
        vocab_size: rows of the embedding, unpadded.
        tied_embeddings: the output layer is the embedding.
        max_position: longest sequence that the config allows, tokens; None where it does not say.
        qkv_bias, attention_output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: RMS norms over each query and key head.
        sinks: each head has a learnt logit beside those of the keys, which takes its share of the softmax and
            has no value.
        output_gate: the output of attention is multiplied by the sigmoid of a gate that the query projection
            gives beside each query head.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it; None for all
            before it.
        window_layers: for each layer, whether ``sliding_window`` holds for it; None for every layer.
        mixture: the experts; None for a dense model.
        latent_attention: the projections of latent attention; None for ordinary attention.
        gated_delta: the gated delta nets, which some layers have in the place of attention; None where all
            have attention.
        zero_centered_norms: norms multiply by 1 + weight, but for those inside gated delta nets.
        prediction_layers: layers behind the others that predict further tokens
            (``converters.model_config.prediction_layers``).
        vision: the vision tower, which is carried and not computed; None for a model of text alone.
        head: the layer that scores in place of the output layer (``converters.model_config.heads``); None for
            a language model.
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
        """Experts of a layer that has them; 0 for a dense model."""
        return 0 if self.mixture is None else self.mixture.num_experts

    @property
    def has_dense_layers(self) -> bool:
        """True if some layer has a dense MLP."""
        return self.mixture is None or not all(self.mixture.sparse_layers)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer, in tokens."""
        layers = self.window_layers or (True,) * self.num_layers
        return tuple(self.sliding_window if windowed else None for windowed in layers)

    def is_sparse(self, layer: int) -> bool:
        """Return whether the layer of that global index has experts instead of a dense MLP. Prediction
        layers, which are counted on behind the others, are like the last of these."""
        return self.mixture is not None and self.mixture.sparse_layers[min(layer, self.num_layers - 1)]

    def kind_of(self, layer: int) -> LayerKind:
        """The kind of the layer of that global index. Prediction layers have attention."""
        mixer: Mixer = "attention" if self.latent_attention is None else "latent"
        if self.gated_delta is not None and layer < self.num_layers and self.gated_delta.layers[layer]:
            mixer = "gated_delta"
        return LayerKind(mixer, self.is_sparse(layer))


@dataclass(frozen=True, kw_only=True)
class Architecture(ModelFacts):
    """A model's facts, and everything else that its forward pass depends on.

    Attributes:
        norm_epsilon: epsilon of every RMS norm.
        rope_theta, rope_scaling: see ``read_rope``.
        activation: of the gate: ``silu``, or ``clamped_swiglu`` where there is a ``gate_limit``.
        initializer_range: standard deviation of freshly initialised weights.
        rotary_fraction: part of a head, from its beginning, that is rotated.
        gate_limit: the gate is at most this, and what it is multiplied with lies between this and its
            negative. The gate then is ``x * sigmoid(1.702 x)``, and what it is multiplied with has 1 added.
            None for a MLP without that.
    """

    max_position: int
    norm_epsilon: float
    rope_theta: float
    # A dict has no hash, and rules are cached by architecture.
    rope_scaling: dict[str, Any] | None = field(hash=False)
    activation: str
    initializer_range: float
    rotary_fraction: float = 1.0
    gate_limit: float | None = None
