"""Runs micro-batches through Megatron's own pipeline schedules, which end in one of the engine's heads."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.models.engine.attention import offsets
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.output_layer import asked, asking
from megarl.models.megatron.cuda_redirect import cuda_literals, plain_torch
from megarl.models.megatron.hf_state import ADAPTER
from megarl.models.megatron.specs import PackedSequences


def sum_gradients(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Run Megatron's end of a backward pass (reductions over data, tensor and embedding groups) without its
    division by a token count."""
    # Pass None as the token count, because losses are already sums, divided by counts of the whole global
    # batch.
    finalize_model_grads(model, None, **options)


@dataclass(frozen=True, slots=True)
class _Work:
    """One micro-batch in the schedule. A filler contributes nothing and keeps the pipeline full.

    Attributes:
        sequences: [n, t] for the routers of a mixture of experts (``sequence_numbers``); None if they have
            nothing to record.
    """

    model_input: ModelInput
    sequences: torch.Tensor | None = None
    filler: bool = False

    def as_filler(self) -> _Work:
        """Return a copy that contributes nothing."""
        # -1 means no sequence, so that routers count nothing of a filler.
        sequences = None if self.sequences is None else torch.full_like(self.sequences, -1)
        return dataclasses.replace(self, sequences=sequences, filler=True)

    def sequences_for(self, model: DistributedDataParallel) -> torch.Tensor | None:
        """Return ``sequences`` in the form that a model chunk needs: with sequence parallelism only the
        model's first chunk splits them itself."""
        if self.sequences is None or model.module.pre_process or not model.config.sequence_parallel:
            return self.sequences
        return (
            scatter_to_sequence_parallel_region(self.sequences.transpose(0, 1).contiguous())
            .transpose(0, 1)
            .contiguous()
        )


def _packed(model_input: ModelInput) -> PackedSequences | None:
    """Return Megatron's description of a packed row; None for rows that are single sequences."""
    starts = model_input.layout.starts
    if starts is None:
        return None
    limits = offsets(starts, model_input.tokens.device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=limits,
        cu_seqlens_kv=limits,
        # Limits include the padding of each sequence, so that padded and real limits are equal here.
        cu_seqlens_q_padded=limits,
        cu_seqlens_kv_padded=limits,
        max_seqlen_q=model_input.longest,
        max_seqlen_kv=model_input.longest,
        layout=model_input.layout,
        positions=model_input.positions[0],
    )


def answer_requests(layer: ColumnParallelLinear) -> None:
    """Patch the output layer of a model's last chunk so that it computes the current request: it gathers the
    sequence and selects the requested rows first.

    If logits are requested, the product stays Megatron's own, with whatever is fused into it.
    """
    plain, adapter = layer.forward, getattr(layer, ADAPTER, None)

    def forward(
        hidden: torch.Tensor, weight: torch.Tensor | None = None, **options: Any
    ) -> tuple[torch.Tensor, None]:
        request = asked()
        if request is None:
            return plain(hidden, weight=weight, **options)
        group, low_rank = layer.tp_group, None
        if adapter is not None and adapter.switch.is_on:
            # Add the adapter before the softmax, for the chosen rows only. A is small, so that it is applied
            # to all positions.
            low_rank = request.rows(adapter.inner(hidden), sequence_first=True), adapter.up()
        if request.chunk_size is None:
            whole = (
                # Pass False: the layer, called without sequence parallelism, sums the gradient itself, and
                # True would sum it twice.
                gather_from_sequence_parallel_region(hidden, False, group)
                if layer.sequence_parallel
                else hidden
            )
            with (
                _whole_sequences(layer),
                contextlib.nullcontext() if adapter is None else adapter.switch.off(),
            ):
                # Pass the chosen rows as a sequence of batch size 1, because Megatron's layer takes [s, b,
                # h].
                output, _ = plain(request.rows(whole, sequence_first=True)[:, None], weight=weight, **options)
            return output if low_rank is None else output + F.linear(*low_rank)[:, None], None
        if layer.sequence_parallel:
            # Pass True, so that the backward pass reduce-scatters, which sums the gradients of all ranks'
            # vocabulary columns.
            whole = gather_from_sequence_parallel_region(hidden, True, group)
        else:
            # Copy forward and all-reduce backward, because each rank multiplies by its own columns of the
            # vocabulary.
            whole = copy_to_tensor_model_parallel_region(hidden, group)
        answer = request.output(
            request.rows(whole, sequence_first=True),
            layer.weight if weight is None else weight,
            None,
            low_rank,
        )
        return answer.transpose(0, 1), None

    layer.forward = forward


@contextlib.contextmanager
def _whole_sequences(layer: ColumnParallelLinear) -> Iterator[None]:
    """Make the layer treat its input as whole on every tensor-parallel rank, and sum its input's gradient
    over the ranks, within the context."""
    before = layer.sequence_parallel, layer.allreduce_dgrad
    layer.sequence_parallel, layer.allreduce_dgrad = False, before[0] or before[1]
    try:
        yield
    finally:
        layer.sequence_parallel, layer.allreduce_dgrad = before


def _forward_step(
    work: Iterator[_Work], model: DistributedDataParallel, head: Head
) -> tuple[torch.Tensor, Any]:
    item = next(work)
    model_input = item.model_input
    with plain_torch():
        packed, sequences = _packed(model_input), item.sequences_for(model)
        # This is the only argument of Megatron's layers that reaches routers per token: see
        # moe_router.connect.
        options = {} if sequences is None else {"padding_mask": sequences}
        request = head.asks(model_input)
        with asking(request):
            output = model(
                model_input.tokens, model_input.positions, None, packed_seq_params=packed, **options
            )

    def finish(output: torch.Tensor, non_loss_data: bool = False) -> Any:
        with plain_torch():
            result = head(output, model_input, request)
        if non_loss_data:
            return None if item.filler else result
        assert result.loss is not None, "a backward pass needs a head that returns a loss"
        # Multiply by 0 instead of leaving a filler out, because all stages must run equally many backward
        # passes.
        loss = result.loss * 0 if item.filler else result.loss
        # Clone the loss: the schedule frees the storage of what it sends on, and on the last stage that is
        # the loss itself.
        kept = None if item.filler else dataclasses.replace(result, loss=loss.detach().clone())
        # Return three values: with two, the schedule would divide the loss by the number of micro-batches.
        return loss, torch.zeros((), dtype=torch.int), kept

    return output, finish


def _fill_interleaved(work: list[_Work], config: TransformerConfig) -> list[_Work]:
    """Append fillers until there are at least as many micro-batches as stages, and set a group size that the
    interleaved schedule accepts."""
    stages = config.pipeline_model_parallel_size
    # The interleaved schedule refuses fewer micro-batches than stages, and a smaller last group. Use copies
    # of the last micro-batch, because fillers need a shape that the pipeline can send.
    filled = [*work, *[work[-1].as_filler()] * max(0, stages - len(work))]
    rest = len(filled) % stages
    config.microbatch_group_size_per_vp_stage = stages if rest == 0 else len(filled)
    return filled


def forward_backward(
    chunks: Sequence[DistributedDataParallel],
    inputs: Sequence[ModelInput],
    head: Head,
    *,
    backward: bool,
    sequences: Sequence[torch.Tensor] | None = None,
) -> list[HeadOutput]:
    """Run one pass of Megatron's schedule (1F1B with a pipeline, interleaved with several chunks) over
    micro-batches.

    With pipeline stages all inputs have one shape. ``sequences``, one tensor per micro-batch, is for routers
    that record.

    Returns:
        The head's outputs, in order, on the last pipeline stage; an empty list elsewhere.
    """
    config = chunks[0].config
    config.finalize_model_grads_func = sum_gradients
    numbers = sequences if sequences is not None else [None] * len(inputs)
    work = [_Work(model_input, numbered) for model_input, numbered in zip(inputs, numbers, strict=True)]
    if len(chunks) > 1:
        work = _fill_interleaved(work, config)
    first = inputs[0]
    with cuda_literals():
        results = get_forward_backward_func()(
            forward_step_func=functools.partial(_forward_step, head=head),
            # Pass one iterator per chunk, because the interleaved schedule takes every micro-batch once for
            # each chunk.
            data_iterator=[iter(work) for _ in chunks] if len(chunks) > 1 else iter(work),
            model=list(chunks),
            num_microbatches=len(work),
            # With a pipeline all micro-batches have this length (Shapes.equal); without one the schedule
            # allocates nothing by it.
            seq_length=first.micro_batch.length,
            micro_batch_size=first.tokens.shape[0],
            forward_only=not backward,
            # Otherwise the schedule requires a loss of every micro-batch, and a log-probability pass has
            # none.
            collect_non_loss_data=not backward,
        )
    return [result for result in results if result is not None]
