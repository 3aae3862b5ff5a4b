"""Megatron's router with load-balancing losses that do not depend on the parallel layout (``moe_record``),
and with routing methods that Megatron-Core lacks.

Megatron averages its balancing losses over micro-batches, although they are not linear in the tokens. With
summed losses it would also multiply them by a token count that is never divided out; releases 0.16 and 0.19
even differ in that count. Its router always divides sigmoid scores by their sum. It ranks expert groups only
by the sum of their best scores, as many as a token uses experts per group on average; DeepSeek-V2 ranks
groups by the best score (arXiv:2405.04434, section 2.2.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.mixture import Routing
from megarl.models.megatron.moe_record import RoutingRecord


def choose(
    logits: torch.Tensor,
    chosen: int,
    routing: Routing,
    *,
    normalized: bool,
    correction_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each token's experts and return their weights and a mask.

    Args:
        logits: [t, E].
        chosen: number of experts per token.
        routing: the routing method.
        normalized: divide the scores of the chosen experts by their sum.
        correction_bias: [E] float32, added to the scores for the choice only; None for none.

    Returns:
        Weights [t, E] in the logits' dtype, differentiable and 0 for experts that are not chosen; and the
        mask [t, E] bool of the chosen experts.
    """
    # Compute at least in float32: with near ties, 16-bit scores would choose other experts than transformers
    # does.
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = wide.softmax(-1) if routing.score == "softmax" else wide.sigmoid()
    # The bias affects only the choice; the weights are the unbiased scores (DeepSeek-V3, section 2.1.2).
    ranks = scores.detach() if correction_bias is None else scores.detach() + correction_bias
    if routing.is_grouped:
        ranks = _of_best_groups(ranks, routing)
    experts = ranks.topk(chosen, dim=-1).indices
    weights = scores.gather(1, experts)
    if normalized:
        # Add the constant of transformers' router, because the sigmoids of very small logits may all be 0.
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    weights = (weights * routing.scaling_factor).to(logits.dtype)
    went_to = torch.zeros_like(logits, dtype=torch.bool).scatter(1, experts, True)
    return torch.zeros_like(logits).scatter(1, experts, weights), went_to


def _of_best_groups(ranks: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Return ``ranks`` [t, E] with minus infinity for experts outside each token's best groups."""
    by_group = ranks.unflatten(1, (routing.groups, -1))
    best = (
        by_group.topk(routing.best_of_group, dim=-1)
        .values.sum(-1)
        .topk(routing.groups_per_token, dim=-1)
        .indices
    )
    kept = torch.zeros(by_group.shape[:2], dtype=torch.bool, device=ranks.device).scatter(1, best, True)
    # Minus infinity, not 0: with a negative bias, 0 could beat experts of the best groups.
    return by_group.masked_fill(~kept[..., None], float("-inf")).flatten(1)


class Choice(Protocol):
    """Signature of a function that chooses experts; see ``choose``."""

    def __call__(
        self, logits: torch.Tensor, *, correction_bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights [t, E] and the chosen experts, [t, E] bool."""
        ...


class BalancedRouter(TopKRouter):
    """Megatron's top-k router, which reports its choices to a ``RoutingRecord``.

    Attributes:
        choose: chooses experts from logits [t, E] and the correction bias; None if Megatron's own routing
            matches the model's.
        record: shared by all routers of a model; None to record nothing.
        sequences: [s, b] int64 for the current micro-batch, see ``RoutingRecord.report``; None in passes that
            record nothing.
    """

    choose: Choice | None = None
    record: RoutingRecord | None = None
    sequences: torch.Tensor | None = None

    def routing(
        self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights [t, E] of each token's experts, 0 for the others, and the chosen experts, [t, E]
        bool."""
        if self.choose is None:
            probabilities, went_to = super().routing(logits, padding_mask)
        else:
            probabilities, went_to = self.choose(
                logits.reshape(-1, logits.shape[-1]), correction_bias=self.expert_bias
            )
        if self.record is None or self.sequences is None or not self.record.is_open:
            return probabilities, went_to
        by_token = logits.reshape(-1, logits.shape[-1])
        loss = self.record.report(self.layer_number - 1, by_token, went_to, self.sequences.reshape(-1))
        if loss is not None:
            # Attach the loss to the probabilities: its gradient is added in their backward pass, scaled by
            # float16's loss scale.
            probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)
        return probabilities, went_to


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[BalancedRouter]:
    """Yield all routers of some model chunks."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, BalancedRouter):
                yield module


def teach_routing(chunks: Sequence[torch.nn.Module], architecture: Architecture) -> None:
    """Make routers choose experts as the model does, if Megatron's own routing differs."""
    mixture, routing = architecture.mixture, megatron_settings(architecture).routing
    if mixture is None or routing is None:
        return
    for router in routers(chunks):
        router.choose = functools.partial(
            choose, chosen=mixture.experts_per_token, routing=routing, normalized=mixture.normalized
        )


def _expert_layers(chunks: Sequence[torch.nn.Module]) -> Iterator[MoELayer]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                yield module


def release(chunks: Sequence[torch.nn.Module]) -> None:
    """Release the tensors that expert layers keep from the last micro-batch.

    Megatron's token dispatchers keep tensors with their autograd graph, whose gradient hooks reference the
    model. Python's garbage collector cannot see this reference cycle, so the model and its process groups
    would never be freed.
    """
    for layer in _expert_layers(chunks):
        layer.router.sequences = None
        dispatcher = layer.token_dispatcher
        for name, value in list(vars(dispatcher).items()):
            # Clear only tensors with a graph; other attributes are the dispatcher's settings and buffers.
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)


def connect(chunks: Sequence[torch.nn.Module], record: RoutingRecord) -> None:
    """Make the routers of ``chunks`` report to ``record``.

    The sequence numbers pass through Megatron's layers as ``padding_mask``, the only per-token argument that
    reaches expert layers, during recomputation too. Megatron's code would convert them to booleans, so a hook
    removes them first.
    """
    for layer in _expert_layers(chunks):
        layer.router.record = record
        layer.register_forward_pre_hook(_take_sequences, with_kwargs=True)
        if layer.moe_layer_recompute:
            # Replace Megatron's recomputation, which would run the router with the sequences of the latest
            # micro-batch.
            layer.moe_layer_recompute = False
            layer.forward = functools.partial(_recomputed, layer, layer.forward)


def _recomputed(layer: MoELayer, forward: Callable[..., Any], hidden: torch.Tensor, **options: Any) -> Any:
    """Run ``forward`` with recomputation in the backward pass, as Megatron's layer would, but with the
    sequences of its own forward pass: the router may have seen other micro-batches since."""

    def run(hidden: torch.Tensor, sequences: torch.Tensor | None) -> Any:
        layer.router.sequences = sequences
        return forward(hidden, **options)

    if not layer.training:
        return forward(hidden, **options)
    return tensor_parallel.checkpoint(run, False, hidden, layer.router.sequences)


def _take_sequences(
    layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sequences = kwargs.get("padding_mask")
    layer.router.sequences = None if sequences is None else sequences.transpose(0, 1)
    # Pass None on, because Megatron would use the numbers as a boolean mask.
    return args, {**kwargs, "padding_mask": None}
