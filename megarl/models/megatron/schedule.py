"""Runs micro-batches through Megatron's own pipeline schedules with one of the engine's heads at the end."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func

from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.microbatches import MicroBatch
from megarl.models.megatron.cuda_redirect import cuda_literals, plain_torch


def sum_gradients(model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any) -> None:
    """Megatron's end of a backward pass (reductions over data, tensor and embedding groups) without its division by a token count."""
    finalize_model_grads(model, None, **options)


def _forward_step(micro_batches: Iterator[MicroBatch], model: DistributedDataParallel, head: Head) -> tuple[torch.Tensor, Any]:
    micro_batch = next(micro_batches)
    with plain_torch():
        output = model(micro_batch.input_ids, None, None)

    def finish(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        with plain_torch():
            result = head(output, micro_batch)
        if non_loss_data:
            return result
        assert result.loss is not None, "a backward pass needs a head that returns a loss"
        # the schedule frees the storage of what it sends on, and on the last stage that is the loss itself
        kept = dataclasses.replace(result, loss=result.loss.detach().clone())
        return result.loss, torch.zeros((), dtype=torch.int), kept

    return output, finish


def forward_backward(
    model: DistributedDataParallel, micro_batches: Sequence[MicroBatch], head: Head, *, backward: bool
) -> list[HeadOutput]:
    """One pass of Megatron's schedule (1F1B with a pipeline) over micro-batches of one shape.

    Returns:
        What the head returned, in order, on the last pipeline stage; an empty list elsewhere.
    """
    config = model.config
    config.finalize_model_grads_func = sum_gradients
    first = micro_batches[0]
    with cuda_literals():
        results = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, head=head),
            data_iterator=iter(micro_batches),
            model=[model],
            num_microbatches=len(micro_batches),
            seq_length=first.sequence_length,
            micro_batch_size=first.size,
            forward_only=not backward,
            collect_non_loss_data=not backward,
        )
    return list(results)
