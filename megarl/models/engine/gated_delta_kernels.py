"""Triton kernels of the gated delta rule, for the one part that runs chunk by chunk: one launch, where
PyTorch needs about four per chunk.

They compute the loop of ``megarl.models.engine.gated_delta``, which is their reference, in float32. Triton's
interpreter runs them on a CPU (``TRITON_INTERPRET=1``, set before this module is imported, and
``MEGARL_GATED_DELTA_KERNEL=1``), and Triton compiles them for devices that are not present. They have not run
on a GPU, and their block sizes are not tuned. Equal inputs give equal bits: one program computes each state.

Legend: n chunks of C tokens, of R runs; G heads, K and V their widths. The chunks of a run are not adjacent:
the first chunks of all runs come first, then the second ones.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

COLUMNS = 32
"""Columns of a state that a program holds in its registers; columns do not depend on each other."""
SMALLEST = 16
"""Minimum size of the blocks that Triton multiplies."""


@triton.jit
def _places(size, keys, values, block_size: tl.constexpr, block_keys: tl.constexpr, columns: tl.constexpr):
    """Return the token and key indices of a program's blocks, the offsets of its columns in a state and in a
    chunk's values, and the masks of both."""
    token = tl.arange(0, block_size)
    key = tl.arange(0, block_keys)
    column = tl.program_id(1) * columns + tl.arange(0, columns)
    is_column = column[None, :] < values
    of_state = key[:, None] * values + column[None, :]
    of_tokens = token[:, None] * values + column[None, :]
    return (
        token,
        key,
        of_state,
        of_tokens,
        (key[:, None] < keys) & is_column,
        (token[:, None] < size) & is_column,
    )


@triton.jit
def _forward(
    solved,
    reads,
    written,
    keeps,
    initial,
    first_chunks,
    chunks_of_run,
    before,
    corrections,
    final,
    heads,
    size,
    keys,
    values,
    has_initial: tl.constexpr,
    block_size: tl.constexpr,
    block_keys: tl.constexpr,
    columns: tl.constexpr,
):
    """Compute one head of one run, some columns of its state per program: x = solved - reads S, S <- keep S +
    written x, chunk by chunk."""
    run = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    token, key, of_state, of_tokens, in_state, in_tokens = _places(
        size, keys, values, block_size, block_keys, columns
    )
    in_reads = (token[:, None] < size) & (key[None, :] < keys)
    in_written = (key[:, None] < keys) & (token[None, :] < size)
    state = tl.zeros((block_keys, columns), dtype=tl.float32)
    if has_initial:
        state = tl.load(initial + head * keys * values + of_state, mask=in_state, other=0.0)
    for step in range(tl.load(chunks_of_run + run)):
        chunk = (tl.load(first_chunks + step) + run).to(tl.int64) * heads + head
        tl.store(before + chunk * keys * values + of_state, state, mask=in_state)
        read = tl.load(
            reads + chunk * size * keys + token[:, None] * keys + key[None, :], mask=in_reads, other=0.0
        )
        wanted = tl.load(solved + chunk * size * values + of_tokens, mask=in_tokens, other=0.0)
        # "ieee" keeps float32: TF32 would round states, which pass through hundreds of chunks, to 10 bits.
        correction = wanted - tl.dot(read, state, input_precision="ieee")
        tl.store(corrections + chunk * size * values + of_tokens, correction, mask=in_tokens)
        write = tl.load(
            written + chunk * keys * size + key[:, None] * size + token[None, :], mask=in_written, other=0.0
        )
        state = tl.load(keeps + chunk) * state + tl.dot(write, correction, input_precision="ieee")
    place = tl.program_id(0).to(tl.int64) * keys * values
    tl.store(final + place + of_state, state, mask=in_state)


@triton.jit
def _backward(
    reads,
    written,
    keeps,
    of_before,
    of_corrections,
    of_final,
    first_chunks,
    chunks_of_run,
    after,
    total,
    heads,
    size,
    keys,
    values,
    block_size: tl.constexpr,
    block_keys: tl.constexpr,
    columns: tl.constexpr,
):
    """Compute the gradients of states and corrections, from the last chunk to the first. The gradients of a
    chunk's inputs follow from these two outside the kernel."""
    run = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    token, key, of_state, of_tokens, in_state, in_tokens = _places(
        size, keys, values, block_size, block_keys, columns
    )
    # Both blocks are loaded transposed, and need masks of the transposed shape.
    in_reads = (key[:, None] < keys) & (token[None, :] < size)
    in_written = (token[:, None] < size) & (key[None, :] < keys)
    place = tl.program_id(0).to(tl.int64) * keys * values
    gradient = tl.load(of_final + place + of_state, mask=in_state, other=0.0)
    count = tl.load(chunks_of_run + run)
    for back in range(count):
        chunk = (tl.load(first_chunks + count - 1 - back) + run).to(tl.int64) * heads + head
        tl.store(after + chunk * keys * values + of_state, gradient, mask=in_state)
        write = tl.load(
            written + chunk * keys * size + key[None, :] * size + token[:, None], mask=in_written, other=0.0
        )
        pulled = tl.load(of_corrections + chunk * size * values + of_tokens, mask=in_tokens, other=0.0)
        pulled += tl.dot(write, gradient, input_precision="ieee")
        tl.store(total + chunk * size * values + of_tokens, pulled, mask=in_tokens)
        read = tl.load(
            reads + chunk * size * keys + token[None, :] * keys + key[:, None], mask=in_reads, other=0.0
        )
        own = tl.load(of_before + chunk * keys * values + of_state, mask=in_state, other=0.0)
        gradient = tl.load(keeps + chunk) * gradient + own - tl.dot(read, pulled, input_precision="ieee")


class _Passage(torch.autograd.Function):
    """Autograd function of ``passage``."""

    @staticmethod
    def forward(
        ctx: Any,
        solved: torch.Tensor,
        reads: torch.Tensor,
        written: torch.Tensor,
        keeps: torch.Tensor,
        initial: torch.Tensor | None,
        first_chunks: torch.Tensor,
        chunks_of_run: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        heads, size, values = solved.shape[1:]
        keys, runs = reads.shape[-1], len(chunks_of_run)
        before = solved.new_empty(len(solved), heads, keys, values)
        corrections, final = torch.empty_like(solved), solved.new_empty(runs, heads, keys, values)
        ctx.shape = heads, size, keys, values
        _forward[(runs * heads, triton.cdiv(values, COLUMNS))](
            # Without an initial state pass any pointer, because the kernel does not read it.
            *(solved, reads, written, keeps, solved if initial is None else initial),
            *(first_chunks, chunks_of_run, before, corrections, final),
            *ctx.shape,
            has_initial=initial is not None,
            **_blocks(size, keys),
        )
        ctx.save_for_backward(reads, written, keeps, before, corrections, first_chunks, chunks_of_run)
        return before, corrections, final

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        reads, written, keeps, before, corrections, first_chunks, chunks_of_run = ctx.saved_tensors
        heads, _, _, values = ctx.shape
        after, total = torch.empty_like(before), torch.empty_like(corrections)
        _backward[(len(chunks_of_run) * heads, triton.cdiv(values, COLUMNS))](
            *(reads, written, keeps, *(gradient.contiguous() for gradient in gradients)),
            *(first_chunks, chunks_of_run, after, total),
            *ctx.shape,
            **_blocks(*ctx.shape[1:3]),
        )
        # Compute these gradients outside the kernel as batched products, because they need no order of
        # chunks.
        of_reads, of_written = -(total @ before.mT), after @ corrections.mT
        return total, of_reads, of_written, (after * before).sum((-2, -1)), None, None, None


def _blocks(size: int, keys: int) -> dict[str, int]:
    """Return the block sizes for chunks of ``size`` tokens and keys of width ``keys``."""
    return {
        "block_size": max(SMALLEST, triton.next_power_of_2(size)),
        "block_keys": max(SMALLEST, triton.next_power_of_2(keys)),
        "columns": COLUMNS,
        # One stage, because a program already holds two blocks as high as the keys are wide in shared memory.
        "num_stages": 1,
    }


def passage(
    solved: torch.Tensor,
    reads: torch.Tensor,
    written: torch.Tensor,
    keeps: torch.Tensor,
    initial: torch.Tensor | None,
    first_chunks: torch.Tensor,
    chunks_of_run: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the state before each chunk [n, G, K, V], the corrections of each chunk [n, G, C, V], and the
    state after each run [R, G, K, V]. Differentiable except in ``initial``. All tensors are float32 and
    contiguous.

    Args:
        solved: [n, G, C, V], the corrections for a state of 0.
        reads: [n, G, C, K]; its product with the state is subtracted from ``solved``.
        written: [n, G, K, C]; its product with the corrections is added to the state.
        keeps: [n, G], the factor on the state before that addition.
        initial: [1, G, K, V], the state before every run; None for 0.
        first_chunks: int32, the first chunk of each step, among the chunks of the sorted runs.
        chunks_of_run: [R] int32, number of chunks of each run, in falling order.
    """
    contiguous = (tensor.contiguous() for tensor in (solved, reads, written, keeps))
    before, corrections, final = _Passage.apply(  # type: ignore[no-untyped-call]
        *contiguous, initial, first_chunks, chunks_of_run
    )
    return before, corrections, final
