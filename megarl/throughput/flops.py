"""Count the FLOPs of a model from its dimensions and the sequence lengths.

Only the matmuls of the mathematical model count, with two operations per multiply-add: projections, the
experts of each token, attention over the causal (or windowed) pairs, and the output layer. Padding, masked
pairs, recomputation and element-wise work count as 0, so a layout that adds such work has a lower MFU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from converters.model_config.architecture import ModelFacts
from megarl.config.parameters import first_layer, multiplied

Lengths = NDArray[np.float64]


def attended_pairs(lengths: ArrayLike, window: int | None = None) -> Lengths:
    """Return the number of (query, key) token pairs of causal attention.

    Args:
        lengths: [B] number of tokens per sequence.
        window: number of tokens that a token attends to, including itself; None for all before it.

    Returns:
        [B] number of pairs: n (n + 1) / 2 up to the window, then ``window`` more per token.
    """
    length = np.asarray(lengths, dtype=np.float64)
    inside = length if window is None else np.minimum(length, window)
    beyond = 0.0 if window is None else (length - inside) * window
    return inside * (inside + 1) / 2 + beyond


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """FLOPs of a model's forward pass.

    Attributes:
        token: FLOPs of all layers per token, without attention scores and routers.
        dense_mlps, experts: parts of ``token``: MLPs of dense layers, and experts of mixture-of-experts
            layers.
        routers: FLOPs of the routers per token; 0 for a dense model.
        logits: FLOPs of the output layer per token.
        pairs: (window, FLOPs per attended pair), summed over the layers with that window; None means no
            window.
    """

    token: float
    dense_mlps: float
    experts: float
    routers: float
    logits: float
    pairs: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(cls, facts: ModelFacts) -> ModelFlops:
        """Return the FLOPs of a model with the given dimensions.

        Latent attention is counted as in DeepSeek-V2 (arXiv 2405.04434, section 2.1), with keys and values
        projected up. A gated delta net is counted as its recurrence (arXiv 2412.06464, equation 10), not as
        the chunked algorithm that computes it.
        """
        matrices: Counter[str] = Counter()
        kinds = list(map(facts.kind_of, range(facts.num_layers)))
        for kind, layers in Counter(kinds).items():
            for part, elements in multiplied(facts, first_layer(facts, kind)).items():
                matrices[part] += layers * elements
            if kind.mixer == "gated_delta":
                matrices["attention"] += layers * _state_products(facts)
        windows = Counter(
            window for window, kind in zip(facts.windows, kinds, strict=True) if kind.mixer != "gated_delta"
        )
        query_width, value_width = _head_widths(facts)
        # Query times key, and probability times value: two operations per element each.
        pair = 2 * facts.num_attention_heads * (query_width + value_width)
        return cls(
            token=2.0 * (matrices["attention"] + matrices["dense"] + matrices["experts"]),
            dense_mlps=2.0 * matrices["dense"],
            experts=2.0 * matrices["experts"],
            routers=2.0 * matrices["router"],
            # The head of a critic or reward model has a single output.
            logits=2.0 * facts.hidden_size * (facts.vocab_size if facts.head is None else 1),
            pairs=tuple((window, float(count * pair)) for window, count in windows.items()),
        )

    def attention(self, lengths: ArrayLike) -> float:
        """Return the FLOPs of the attention scores in a forward pass.

        Args:
            lengths: [B] number of tokens per sequence.
        """
        return sum(rate * float(attended_pairs(lengths, window).sum()) for window, rate in self.pairs)

    def forward(self, lengths: ArrayLike, logits: float | None = None) -> float:
        """Return the FLOPs of a forward pass.

        Args:
            lengths: [B] number of tokens per sequence.
            logits: number of tokens that go through the output layer; None for all.
        """
        tokens = float(np.sum(np.asarray(lengths, dtype=np.float64)))
        return (
            tokens * (self.token + self.routers)
            + (tokens if logits is None else logits) * self.logits
            + self.attention(lengths)
        )

    def training(
        self,
        lengths: ArrayLike,
        logits: float | None = None,
        *,
        frozen_routers: bool = False,
        adapters: int | None = None,
    ) -> float:
        """Return the FLOPs of a forward and a backward pass.

        For each matmul of the forward pass, the backward pass has two: for the gradient of the input, and for
        that of the weight. Frozen weights do not need the second.

        Args:
            lengths: [B] number of tokens per sequence.
            logits: number of tokens that go through the output layer; None for all.
            frozen_routers: routers are frozen.
            adapters: number of adapter parameters that a token uses, if only adapters are trained; else None.
        """
        tokens = float(np.sum(np.asarray(lengths, dtype=np.float64)))
        if adapters is not None:
            # Frozen weights need gradients of their inputs, but no weight gradients.
            last = (tokens if logits is None else logits) * self.logits
            return (
                3 * (self.forward(lengths, logits) + tokens * 2.0 * adapters)
                - tokens * (self.token + self.routers)
                - last
            )
        return 3 * self.forward(lengths, logits) - (tokens * self.routers if frozen_routers else 0.0)

    def recomputation(self, lengths: ArrayLike, parts: Collection[str] | None = None) -> float:
        """Return the FLOPs of recomputing activations in the backward pass. They count only for the hardware
        FLOP utilisation (HFU).

        Args:
            lengths: [B] number of tokens per sequence.
            parts: recomputed modules (``mlp``, ``moe``, ``core_attn``); None for whole layers.
        """
        if parts is None:
            return self.forward(lengths, logits=0.0)
        tokens = float(np.sum(np.asarray(lengths, dtype=np.float64)))
        of_token = ("mlp" in parts) * self.dense_mlps + ("moe" in parts) * (self.experts + self.routers)
        return tokens * of_token + (self.attention(lengths) if "core_attn" in parts else 0.0)

    def generation(self, prompts: ArrayLike, prompt_lengths: ArrayLike, lengths: ArrayLike) -> float:
        """Return the FLOPs of sampling responses with a KV cache.

        Each distinct prompt is prefilled once for all its responses, and the last token of a response is not
        fed back. Latent attention is assumed to cache projected keys and values, so these are projected once.

        Args:
            prompts: [P] number of tokens of each distinct prompt.
            prompt_lengths: [B] number of prompt tokens of each row.
            lengths: [B] number of tokens of each row, prompt and response.
        """
        # An empty response costs only its prompt.
        starts, ends = np.asarray(prompt_lengths, dtype=np.float64), np.asarray(lengths, dtype=np.float64)
        read = np.maximum(ends - 1, starts)
        decoded = float((read - starts).sum())
        first = self.forward(prompts, logits=float(np.size(prompts)))
        return (
            first
            + decoded * (self.token + self.routers + self.logits)
            + self.attention(read)
            - self.attention(starts)
        )


def _state_products(facts: ModelFacts) -> int:
    """Return the number of multiply-adds per token with the state of a gated delta net. The state is used
    three times: read with the key, updated, and read with the query."""
    net = facts.gated_delta
    assert net is not None, facts.family
    return 3 * net.values * net.key_width


def _head_widths(facts: ModelFacts) -> tuple[int, int]:
    """Return the query width and the value width of a head."""
    if facts.latent_attention is None:
        return facts.head_dim, facts.head_dim
    return facts.latent_attention.qk_head_dim, facts.latent_attention.v_head_dim
