"""Runs micro-batches through Megatron's pipeline schedules, with one of the engine's heads computing the
result."""

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
    gather_from_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from megarl.models.engine.attention import offsets
from megarl.models.engine.groups import summed_gradients
from megarl.models.engine.heads import Head, HeadOutput
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.output_layer import asked, asking
from megarl.models.megatron.cuda_redirect import cuda_literals, plain_torch
from megarl.models.megatron.hf_state import ADAPTER
from megarl.models.megatron.specs import PackedSequences


def sum_gradients(
    model: list[torch.nn.Module], num_tokens: torch.Tensor | None = None, **options: Any
) -> None:
    """Run Megatron's reductions at the end of a backward pass (over data, tensor and embedding groups)
    without dividing by a token count."""
    # Pass None as the token count: losses are already divided by counts over the whole global batch.
    finalize_model_grads(model, None, **options)


@dataclass(frozen=True, slots=True)
class _Work:
    """One micro-batch in the schedule. A filler keeps the pipeline full and contributes nothing.

    Attributes:
        model_input: the micro-batch as model input.
        sequences: [n, t] for the routers of a mixture-of-experts model (see ``sequence_numbers``); None if
            they record nothing.
        filler: its loss is multiplied by 0, and its result dropped.
    """

    model_input: ModelInput
    sequences: torch.Tensor | None = None
    filler: bool = False

    def as_filler(self) -> _Work:
        """Return a copy that contributes nothing."""
        # -1 marks tokens of no sequence, which routers do not count.
        sequences = None if self.sequences is None else torch.full_like(self.sequences, -1)
        return dataclasses.replace(self, sequences=sequences, filler=True)

    def sequences_for(self, model: DistributedDataParallel) -> torch.Tensor | None:
        """Return ``sequences`` as a model chunk needs them.

        Under sequence parallelism the model's first chunk splits them itself; for later chunks they are split
        here.
        """
        if self.sequences is None or model.module.pre_process or not model.config.sequence_parallel:
            return self.sequences
        return (
            scatter_to_sequence_parallel_region(self.sequences.transpose(0, 1).contiguous())
            .transpose(0, 1)
            .contiguous()
        )


def _packed(model_input: ModelInput) -> PackedSequences | None:
    """Return Megatron's description of a packed row; None if each row is a single sequence."""
    starts = model_input.layout.starts
    if starts is None:
        return None
    limits = offsets(starts, model_input.tokens.device)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=limits,
        cu_seqlens_kv=limits,
        # Offsets include each sequence's padding, so padded and real offsets are equal.
        cu_seqlens_q_padded=limits,
        cu_seqlens_kv_padded=limits,
        max_seqlen_q=model_input.longest,
        max_seqlen_kv=model_input.longest,
        layout=model_input.layout,
        positions=model_input.positions[0],
    )


def answer_requests(layer: ColumnParallelLinear) -> None:
    """Patch the output layer of the model's last chunk to serve the current request: it keeps only the
    requested rows before the matmul, and returns logits or log-probabilities.

    For logits the matmul stays Megatron's own, including its fused kernels.
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
            # Apply B only to the requested rows, before the softmax. A is small, so it is applied to all
            # positions.
            low_rank = request.rows(adapter.inner(hidden), sequence_first=True), adapter.up()
        if request.chunk_size is None:
            whole = (
                # False, because the layer, called without sequence parallelism, sums the gradient itself;
                # True would sum it twice.
                gather_from_sequence_parallel_region(hidden, False, group)
                if layer.sequence_parallel
                else hidden
            )
            with (
                _whole_sequences(layer),
                contextlib.nullcontext() if adapter is None else adapter.switch.off(),
            ):
                # Pass the rows as a sequence with batch size 1, because Megatron's layer takes [s, b, h].
                output, _ = plain(request.rows(whole, sequence_first=True)[:, None], weight=weight, **options)
            return output if low_rank is None else output + F.linear(*low_rank)[:, None], None
        if layer.sequence_parallel:
            # True makes the backward pass reduce-scatter, which sums the gradients from all ranks' vocabulary
            # columns.
            whole = gather_from_sequence_parallel_region(hidden, True, group)
        else:
            # Copy in the forward pass and all-reduce in the backward pass, because each rank multiplies by
            # its own vocabulary columns.
            whole = summed_gradients(hidden, group)
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
    """Within the context, make the layer treat its input as complete on every tensor-parallel rank and sum
    the input's gradient over the ranks."""
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
        # padding_mask is the only per-token argument that Megatron's layers pass on to routers; see
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
        # Multiply by 0 instead of skipping a filler, because all stages must run the same number of backward
        # passes.
        loss = result.loss * 0 if item.filler else result.loss
        # Clone the loss: the schedule frees the storage of each stage's output, and on the last stage that is
        # the loss.
        kept = None if item.filler else dataclasses.replace(result, loss=loss.detach().clone())
        # Return three values, because with two the schedule would divide the loss by the number of
        # micro-batches.
        return loss, torch.zeros((), dtype=torch.int), kept

    return output, finish


def _fill_interleaved(work: list[_Work], config: TransformerConfig) -> list[_Work]:
    """Append fillers until there are at least as many micro-batches as stages, and set a group size that the
    interleaved schedule accepts."""
    stages = config.pipeline_model_parallel_size
    # The interleaved schedule rejects fewer micro-batches than stages, and a smaller last group. Fillers are
    # copies of the last micro-batch, because they need a shape that the pipeline can send.
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
    """Run one pass of Megatron's schedule over micro-batches: 1F1B with pipeline stages, interleaved with
    several chunks per stage.

    Args:
        chunks: this rank's model chunks.
        inputs: the micro-batches; with pipeline stages they must have one shape.
        head: computes loss or results from the model's output.
        backward: compute gradients.
        sequences: a tensor per micro-batch for routers that record (see ``sequence_numbers``).

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
            # One iterator per chunk, because the interleaved schedule takes every micro-batch once for each
            # chunk.
            data_iterator=[iter(work) for _ in chunks] if len(chunks) > 1 else iter(work),
            model=list(chunks),
            num_microbatches=len(work),
            # With pipeline stages all micro-batches have this length (Shapes.equal). Without them the
            # schedule does not use it.
            seq_length=first.micro_batch.length,
            micro_batch_size=first.tokens.shape[0],
            forward_only=not backward,
            # Otherwise the schedule requires a loss for every micro-batch, and a log-probability pass has
            # none.
            collect_non_loss_data=not backward,
        )
    return [result for result in results if result is not None]
