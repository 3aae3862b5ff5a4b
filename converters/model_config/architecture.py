"""Architecture: the facts of a model that decide its shapes and its forward pass."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from converters.model_config.heads import ScoreHead
from converters.model_config.latent_attention import LatentAttention
from converters.model_config.mixture import MixtureOfExperts


@dataclass(frozen=True)
class Architecture:
    """A model's shapes and everything else its forward pass depends on.

    Attributes:
        family: ``model_type`` of the Hugging Face config.
        ffn_hidden_size: width of the gated MLP of dense layers.
        num_key_value_heads: key-value groups; equal to the heads without grouped-query attention.
        head_dim: width of one head; not always hidden_size / num_attention_heads. With latent attention, of its rotated part.
        vocab_size: rows of the embedding, unpadded.
        tied_embeddings: the output layer is the embedding.
        qkv_bias, attention_output_bias, mlp_bias: which linear layers have a bias.
        qk_norm: RMS norms over each query and key head.
        norm_epsilon: epsilon of every RMS norm.
        rope_theta, rope_scaling: see ``read_rope``.
        max_position: longest sequence the config allows, tokens.
        activation: of the gate: ``silu``, or ``clamped_swiglu`` where there is a ``gate_limit``.
        initializer_range: standard deviation of freshly initialised weights.
        sliding_window: a token sees itself and the ``sliding_window - 1`` tokens before it, in every layer; None for all before it.
        mixture: the experts; None for a dense model.
        rotary_fraction: part of a head, from its beginning, that is rotated.
        window_layers: for each layer, whether ``sliding_window`` holds for it; None for every layer.
        sinks: each head has a learnt logit beside those of the keys, which takes its share of the softmax and has no value.
        gate_limit: the gate is at most this, and what it is multiplied with lies between this and its negative. The gate then is
            ``x * sigmoid(1.702 x)``, and what it is multiplied with has 1 added. None for a MLP without that.
        latent_attention: the projections of latent attention; None for ordinary attention.
        prediction_layers: layers behind the others that predict further tokens (``converters.model_config.prediction_layers``).
        head: the layer that scores in place of the output layer (``converters.model_config.heads``); None for a language model.
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
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_epsilon: float
    rope_theta: float
    rope_scaling: dict[str, Any] | None = field(hash=False)
    max_position: int
    activation: str
    initializer_range: float
    sliding_window: int | None = None
    mixture: MixtureOfExperts | None = None
    rotary_fraction: float = 1.0
    window_layers: tuple[bool, ...] | None = None
    sinks: bool = False
    gate_limit: float | None = None
    latent_attention: LatentAttention | None = None
    prediction_layers: int = 0
    head: ScoreHead | None = None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of that global index has experts instead of a dense MLP. Prediction layers, which are counted on behind the
        others, are like the last of these."""
        return self.mixture is not None and self.mixture.sparse_layers[min(layer, self.num_layers - 1)]
