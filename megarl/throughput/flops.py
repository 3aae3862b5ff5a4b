"""Floating-point operations of a model, computed from its sizes and the lengths of sequences in pure numpy.

Only the matrix products that the mathematics needs are counted, with a multiplication and an addition as two
operations: projections, the experts of each token, attention between a token and the tokens that it attends
to (itself and earlier ones, within its window), and the output layer. Padding, masked pairs, recomputation
and element-wise work count as nothing, so additional work of a layout lowers its utilisation.
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
    """Return the number of pairs of a token and one that it attends to, in causal sequences of these lengths.

    Args:
        lengths: [B] tokens.
        window: a token attends to itself and the ``window - 1`` tokens before it; None for all before it.

    Returns:
        [B]: n (n + 1) / 2 up to the window, then ``window`` more per token.
    """
    length = np.asarray(lengths, dtype=np.float64)
    inside = length if window is None else np.minimum(length, window)
    beyond = 0.0 if window is None else (length - inside) * window
    return inside * (inside + 1) / 2 + beyond


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Floating-point operations of a model's forward pass.

    Attributes:
        token: operations of all layers per token, without attention between tokens and without routers.
        dense_mlps, experts: the parts of ``token`` for MLPs of dense layers, and for experts of the other
            layers.
        routers: operations of the routers per token; 0 for a dense model.
        logits: operations of the output layer per token.
        pairs: operations of attention per pair of tokens, by window (None: no window), summed over the layers
            with that window.
    """

    token: float
    dense_mlps: float
    experts: float
    routers: float
    logits: float
    pairs: tuple[tuple[int | None, float], ...]

    @classmethod
    def of(cls, facts: ModelFacts) -> ModelFlops:
        """Return the operations of a model of these sizes.

        Latent attention counts as in DeepSeek-V2 (arXiv 2405.04434, section 2.1) with keys and values
        projected up. A gated delta net counts as its recurrence (arXiv 2412.06464, equation 10), because
        chunks are only a way to compute it.
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
        # A query times a key, and a probability times a value, take two operations per element each.
        pair = 2 * facts.num_attention_heads * (query_width + value_width)
        return cls(
            token=2.0 * (matrices["attention"] + matrices["dense"] + matrices["experts"]),
            dense_mlps=2.0 * matrices["dense"],
            experts=2.0 * matrices["experts"],
            routers=2.0 * matrices["router"],
            # The head of a critic or a reward model has a single output.
            logits=2.0 * facts.hidden_size * (facts.vocab_size if facts.head is None else 1),
            pairs=tuple((window, float(count * pair)) for window, count in windows.items()),
        )

    def attention(self, lengths: ArrayLike) -> float:
        """Return the FLOPs of attention in a forward pass over sequences of these lengths."""
        return sum(rate * float(attended_pairs(lengths, window).sum()) for window, rate in self.pairs)

    def forward(self, lengths: ArrayLike, logits: float | None = None) -> float:
        """Return the FLOPs of a forward pass over sequences of these lengths.

        Args:
            lengths: [B] tokens.
            logits: number of tokens that need the output layer; None for all.
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
        """Return the FLOPs of a forward and a backward pass over sequences of these lengths.

        For each product of the forward pass the backward pass has two: one for the gradient of the input, one
        for that of the weight. A frozen weight does not need the second.

        Args:
            lengths: [B] tokens.
            logits: number of tokens that need the output layer; None for all.
            frozen_routers: whether routers are frozen.
            adapters: adapter parameters that each token uses, if only adapters are trained; otherwise None.
        """
        tokens = float(np.sum(np.asarray(lengths, dtype=np.float64)))
        if adapters is not None:
            last = (tokens if logits is None else logits) * self.logits
            return (
                3 * (self.forward(lengths, logits) + tokens * 2.0 * adapters)
                - tokens * (self.token + self.routers)
                - last
            )
        return 3 * self.forward(lengths, logits) - (tokens * self.routers if frozen_routers else 0.0)

    def recomputation(self, lengths: ArrayLike, parts: Collection[str] | None = None) -> float:
        """Return the FLOPs of recomputing every layer, or ``parts`` of it, in the backward pass. The device
        does this work, but the model does not need it, so it counts only for the hardware utilisation."""
        if parts is None:
            return self.forward(lengths, logits=0.0)
        tokens = float(np.sum(np.asarray(lengths, dtype=np.float64)))
        of_token = ("mlp" in parts) * self.dense_mlps + ("moe" in parts) * (self.experts + self.routers)
        return tokens * of_token + (self.attention(lengths) if "core_attn" in parts else 0.0)

    def generation(self, prompts: ArrayLike, prompt_lengths: ArrayLike, lengths: ArrayLike) -> float:
        """Return the FLOPs of sampling responses with a key-value cache.

        The model does not read the last token of a response, and it reads a prompt once for all of its
        responses. Latent attention caches the keys and values that its heads read, so nothing is projected up
        twice.

        Args:
            prompts: [P] tokens of the prompts.
            prompt_lengths: [B] tokens of each row's prompt.
            lengths: [B] tokens of each row's prompt and response.
        """
        # An empty response computes no more than its prompt.
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
    """Return the number of state elements of a gated delta net that a token is multiplied with.

    A token goes through the states three times: to read with its key, to write, and to read with its query.
    """
    net = facts.gated_delta
    assert net is not None, facts.family
    return 3 * net.values * net.key_width


def _head_widths(facts: ModelFacts) -> tuple[int, int]:
    """Return the widths of a head's query and value."""
    if facts.latent_attention is None:
        return facts.head_dim, facts.head_dim
    return facts.latent_attention.qk_head_dim, facts.latent_attention.v_head_dim
