"""Micro-batches through a transformers model with one of the engine's heads at the end."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.model_input import ModelInput


def logits_of(model: torch.nn.Module, model_input: ModelInput) -> torch.Tensor:
    """[n, t, V]: the logits of one micro-batch, this rank's positions and vocabulary columns."""
    output = model(
        input_ids=model_input.tokens,
        position_ids=model_input.positions,
        sequence_layout=model_input.layout,
        use_cache=False,
    )
    logits: torch.Tensor = output.logits
    return logits


def forward_backward(
    model: torch.nn.Module,
    inputs: Sequence[ModelInput],
    head: Head,
    *,
    backward: bool,
    loss_scale: float = 1.0,
    before_last: Callable[[], None] = lambda: None,
) -> list[HeadOutput]:
    """Run ``head`` on every micro-batch, one after the other, and with ``backward`` add up the gradients of the losses.

    Args:
        model: a causal language model of transformers, wrapped or not; what wraps it reduces gradients over ranks.
        inputs: the micro-batches.
        head: gets the logits [n, t, V] of each.
        backward: also go backward from the head's loss.
        loss_scale: factor of every loss on its way backward, for float16.
        before_last: called before the last micro-batch.

    Returns:
        What the head returned, in order; losses detached.
    """
    outputs = []
    for number, model_input in enumerate(inputs, start=1):
        if number == len(inputs):
            before_last()
        result = head(logits_of(model, model_input), model_input)
        if backward:
            assert result.loss is not None, "a backward pass needs a head that returns a loss"
            (result.loss * loss_scale if loss_scale != 1.0 else result.loss).backward()
        outputs.append(result if result.loss is None else dataclasses.replace(result, loss=result.loss.detach()))
    return outputs
