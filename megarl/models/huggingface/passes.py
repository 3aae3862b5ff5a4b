"""Runs micro-batches through a transformers model, with one of the engine's heads computing the result."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch

from megarl.errors import ModelError
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.output_layer import Request, answers_requests, asking


def output_of(model: Any, model_input: ModelInput, request: Request | None = None) -> torch.Tensor:
    """Return the logits [n, t, V] of one micro-batch, for this rank's positions and vocabulary columns; with
    ``request``, return the requested output instead.

    Raises:
        ModelError: the model changes its logits after the output layer, which a request for log-probabilities
            cannot take into account.
    """
    with asking(request):
        output = model(
            input_ids=model_input.tokens,
            # Pass positions, because transformers would count through a packed row.
            position_ids=model_input.positions,
            sequence_layout=model_input.layout,
            use_cache=False,
        )
    logits: torch.Tensor = output.logits
    if request is not None and not request.is_answer(logits):
        raise _without_chunks(
            model,
            request,
            "changes its logits after the output layer, which cannot be done to log-probabilities",
        )
    return logits


def _request(head: Head, model: Any, model_input: ModelInput) -> Request | None:
    """Return the head's request to the output layer; None if the head has none or the layer cannot serve
    requests.

    Raises:
        ModelError: the layer cannot serve requests, but the configuration requires chunked log-probabilities.
    """
    request = head.asks(model_input)
    if request is None or answers_requests(model.get_output_embeddings()):
        return request
    if request.chunk_size is not None:
        raise _without_chunks(model, request, "has an output layer that is no plain linear layer")
    return None


def _without_chunks(model: Any, request: Request, reason: str) -> ModelError:
    return ModelError(
        f"policy.logprob_chunk_size = {request.chunk_size}: {type(model).__name__} {reason}. Fix: set it to "
        "null"
    )


def forward_backward(
    model: Any,
    inputs: Sequence[ModelInput],
    head: Head,
    *,
    backward: bool,
    loss_scale: float = 1.0,
    before_last: Callable[[], None] = lambda: None,
) -> list[HeadOutput]:
    """Run ``head`` on every micro-batch in order; with ``backward``, accumulate gradients of the losses.

    Args:
        model: a causal language model, possibly in a wrapper that reduces gradients over ranks.
        inputs: the micro-batches.
        head: gets the logits [n, t, V] of each micro-batch, or the output that it requested.
        backward: run the backward pass.
        loss_scale: factor of every loss in the backward pass, for float16.
        before_last: called before the last micro-batch.

    Returns:
        The head's outputs in order, with detached losses.
    """
    outputs = []
    for number, model_input in enumerate(inputs, start=1):
        if number == len(inputs):
            before_last()
        request = _request(head, model, model_input)
        result = head(output_of(model, model_input, request), model_input, request)
        if backward:
            assert result.loss is not None, "a backward pass needs a head that returns a loss"
            # Run backward for each micro-batch immediately, so that its activations are freed before the next
            # one.
            (result.loss * loss_scale if loss_scale != 1.0 else result.loss).backward()
        outputs.append(
            result if result.loss is None else dataclasses.replace(result, loss=result.loss.detach())
        )
    return outputs
