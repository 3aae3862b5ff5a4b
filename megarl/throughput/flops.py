"""Floating-point operations of a model, from its sizes and the lengths of sequences. Pure numpy.

Counted are the matrix products that the mathematics needs, a multiplication and an addition as two
operations: projections, experts that a token goes to, attention between a token and what it sees (itself and
before, within its window), and the output layer. Padding, masked pairs, recomputation and element-wise work
count as nothing: what a layout adds to the work lowers its utilisation.
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
    """Return pairs of a token and one that it sees, in causal sequences of these lengths.

    Args:
        lengths: [B] tokens.
        window: a token sees itself and the ``window - 1`` tokens before it; None for all before it.

    Returns:
        [B]: n (n + 1) / 2 up to the window, after it ``window`` more a token.
    """
    length = np.asarray(lengths, dtype=np.float64)
    inside = length if window is None else np.minimum(length, window)
    beyond = 0.0 if window is None else (length - inside) * window
    return inside * (inside + 1) / 2 + beyond


@dataclass(frozen=True, slots=True)
class ModelFlops:
    """Floating-point operations of the forward pass of a model.

    Attributes:
        token: of all layers for a token, without attention between tokens and without routers.
        dense_mlps, experts: those of them of dense layers' MLPs, and of the experts of the other layers.
        routers: of the routers for a token; 0 for a dense model.
        logits: of the output layer for a token.
        pairs: of attention for a pair of tokens, by window (None: no window); layers of one window are added
            up.
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
        projected up, a gated delta net as its recurrence (arXiv 2412.06464, equation 10): chunks are a way to
        compute that.
        """
        matrices: Counter[str] = Counter()
        kinds = [facts.kind_of(layer) for layer in range(facts.num_layers)]
        for kind, layers in Counter(kinds).items():
            matrices.update(
                {
                    part: layers * elements
                    for part, elements in multiplied(facts, first_layer(facts, kind)).items()
                }
            )
            if kind.mixer == "gated_delta":
                matrices["attention"] += layers * _state_products(facts)
        windows = Counter(
            window for window, kind in zip(facts.windows, kinds, strict=True) if kind.mixer != "gated_delta"
        )
        query_width, value_width = _head_widths(facts)
        # a query times a key, and a probability times a value, each two operations an element
        pair = 2 * facts.num_attention_heads * (query_width + value_width)
        return cls(
            token=2.0 * (matrices["attention"] + matrices["dense"] + matrices["experts"]),
            dense_mlps=2.0 * matrices["dense"],
            experts=2.0 * matrices["experts"],
            routers=2.0 * matrices["router"],
            # a head of a critic or a reward model has one output
            logits=2.0 * facts.hidden_size * (facts.vocab_size if facts.head is None else 1),
            pairs=tuple((window, float(count * pair)) for window, count in windows.items()),
        )

    def attention(self, lengths: ArrayLike) -> float:
        """Return the FLOPs of attention between the tokens of sequences of these lengths, forward."""
        return sum(rate * float(attended_pairs(lengths, window).sum()) for window, rate in self.pairs)

    def forward(self, lengths: ArrayLike, logits: float | None = None) -> float:
        """Return the FLOPs of a forward pass over sequences of these lengths.

        Args:
            lengths: [B] tokens.
            logits: tokens that the output layer is needed for; all of them when None.
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
        for that of the weight. A weight that is not trained does without the second.

        Args:
            lengths: [B] tokens.
            logits: tokens that the output layer is needed for; all of them when None.
            frozen_routers: routers are not trained.
            adapters: parameters of the adapters that a token goes through, and nothing else is trained; None
                without.
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
        """Return the FLOPs of computing every layer, or ``parts`` of it, once more in the backward pass: work
        of the device, not of the model, so that it counts for the utilisation of the hardware alone."""
        if parts is None:
            return self.forward(lengths, logits=0.0)
        tokens = float(np.sum(np.asarray(lengths, dtype=np.float64)))
        of_token = ("mlp" in parts) * self.dense_mlps + ("moe" in parts) * (self.experts + self.routers)
        return tokens * of_token + (self.attention(lengths) if "core_attn" in parts else 0.0)

    def generation(self, prompts: ArrayLike, prompt_lengths: ArrayLike, lengths: ArrayLike) -> float:
        """Return the FLOPs of sampling responses with a cache of keys and values.

        The last token of a response is not read by the model, and a prompt is read once, whatever the number
        of its responses. Latent attention keeps what its heads read, so that nothing is projected up twice.

        Args:
            prompts: [P] tokens of the prompts.
            prompt_lengths: [B] tokens of the prompt of each row.
            lengths: [B] tokens of prompt and response of each row.
        """
        # an empty response reads no more than its prompt
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
    """Return how many elements of a gated delta net's states a token is multiplied with.

    It goes through them three times: to read what its key finds, to write, to read what its query finds.
    """
    net = facts.gated_delta
    assert net is not None, facts.family
    return 3 * net.values * net.key_width


def _head_widths(facts: ModelFacts) -> tuple[int, int]:
    """Widths of a head's query and value."""
    if facts.latent_attention is None:
        return facts.head_dim, facts.head_dim
    return facts.latent_attention.qk_head_dim, facts.latent_attention.v_head_dim
