"""Megatron's router with load-balancing losses that no layout changes (``megarl.models.megatron.moe_record``).

Megatron's own are averages over micro-batches of losses that are not linear in the tokens, and, with losses that are sums, they would be
multiplied by a number of tokens that nothing divides by again; releases 0.16 and 0.19 even differ in that number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from megarl.models.megatron.moe_choice import choose
from megarl.models.megatron.moe_record import RoutingRecord


class Choice(Protocol):
    """See ``choose``."""

    def __call__(self, logits: torch.Tensor, *, correction_bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [t, E] and which experts, [t, E] bool."""
        ...


class BalancedRouter(TopKRouter):
    """Megatron's top-k router, reporting to a ``RoutingRecord``.

    Attributes:
        choose: how experts are chosen, from logits [t, E] and the correction bias; None where Megatron's own way is the model's.
        record: shared by the routers of a model; None reports to nobody.
        sequences: [s, b] int64 of the micro-batch at hand, as ``RoutingRecord.report`` wants them; None in a pass without record.
    """

    choose: Choice | None = None
    record: RoutingRecord | None = None
    sequences: torch.Tensor | None = None

    def routing(self, logits: torch.Tensor, padding_mask: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [t, E] of the experts that each token goes to, 0 for the others, and which they are, [t, E] bool."""
        if self.choose is None:
            probabilities, went_to = super().routing(logits, padding_mask)
        else:
            probabilities, went_to = self.choose(logits.reshape(-1, logits.shape[-1]), correction_bias=self.expert_bias)
        if self.record is None or self.sequences is None or not self.record.is_open:
            return probabilities, went_to
        by_token = logits.reshape(-1, logits.shape[-1])
        loss = self.record.report(self.layer_number - 1, by_token, went_to, self.sequences.reshape(-1))
        if loss is not None:
            # adds its gradient where the probabilities get theirs, times the factor that float16 scales the main loss by
            probabilities = MoEAuxLossAutoScaler.apply(probabilities, loss)
        return probabilities, went_to


def routers(chunks: Sequence[torch.nn.Module]) -> Iterator[BalancedRouter]:
    """All routers of some model chunks."""
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, BalancedRouter):
                yield module


def teach_routing(chunks: Sequence[torch.nn.Module], architecture: Architecture) -> None:
    """Let routers choose experts as the model does, where Megatron's own way is another."""
    mixture, routing = architecture.mixture, megatron_settings(architecture).routing
    if mixture is None or routing is None:
        return
    for router in routers(chunks):
        router.choose = functools.partial(choose, chosen=mixture.experts_per_token, routing=routing, normalized=mixture.normalized)


def _expert_layers(chunks: Sequence[torch.nn.Module]) -> Iterator[MoELayer]:
    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MoELayer):
                yield module


def release(chunks: Sequence[torch.nn.Module]) -> None:
    """Let go of what the layers keep of the last micro-batch.

    Megatron's dispatchers keep tensors with their autograd graph, which holds the model by its gradient hooks: a circle that Python's
    garbage collection cannot see, so that neither the model nor its process groups would ever go.
    """
    for layer in _expert_layers(chunks):
        layer.router.sequences = None
        dispatcher = layer.token_dispatcher
        for name, value in list(vars(dispatcher).items()):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                setattr(dispatcher, name, None)


def connect(chunks: Sequence[torch.nn.Module], record: RoutingRecord) -> None:
    """Let the routers of ``chunks`` report to ``record``.

    The numbers of sequences go through Megatron's layers as their ``padding_mask``, the one argument per token that reaches the layers with
    experts, also when activations are recomputed; the layers would reduce it to booleans.
    """
    for layer in _expert_layers(chunks):
        layer.router.record = record
        layer.register_forward_pre_hook(_take_sequences, with_kwargs=True)


def _take_sequences(layer: MoELayer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    sequences = kwargs.get("padding_mask")
    layer.router.sequences = None if sequences is None else sequences.transpose(0, 1)
    return args, {**kwargs, "padding_mask": None}
