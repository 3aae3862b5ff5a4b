"""Triton kernels for the part of the gated delta rule that runs chunk by chunk. They take one launch, where
PyTorch needs about four per chunk.

They compute the loop of ``megarl.models.engine.gated_delta``, their reference, in float32. Results are
bitwise reproducible, because one program computes each state. The kernels run on a CPU in Triton's
interpreter (``TRITON_INTERPRET=1``, set before this module is imported, and ``MEGARL_GATED_DELTA_KERNEL=1``),
and Triton can compile them for a GPU that is not present. Untested on a GPU; block sizes are not tuned.

Shapes: n chunks of C tokens, R runs, G heads, K and V widths of keys and values. Chunks are ordered by step:
the first chunks of all runs, then the second chunks, and so on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch.autograd.function import once_differentiable

COLUMNS = 32
"""Number of columns of a state that one program keeps in registers. Columns are independent of each other."""
SMALLEST = 16
"""Minimum block size of Triton's ``tl.dot``."""


@triton.jit
def _places(size, keys, values, block_size: tl.constexpr, block_keys: tl.constexpr, columns: tl.constexpr):
    """Return a program's token and key indices, the offsets of its columns in a state and in a chunk's
    values, and the masks of these two."""
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
    """Compute one head of one run, chunk by chunk: x = solved - reads S, then S <- keep S + written x. Each
    program computes some columns of the state."""
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
        # "ieee" computes in float32. TF32 would round the state to 10 bits in each of hundreds of chunks.
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
    chunk's inputs are computed from these outside the kernel."""
    run = tl.program_id(0) // heads
    head = tl.program_id(0) % heads
    token, key, of_state, of_tokens, in_state, in_tokens = _places(
        size, keys, values, block_size, block_keys, columns
    )
    # Both blocks are loaded transposed, so their masks are too.
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
    """Autograd function behind ``passage``."""

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
            # Without an initial state the kernel does not read this pointer, but Triton needs one.
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
        # These gradients do not depend on the order of chunks, so batched matmuls are faster than the kernel.
        of_reads, of_written = -(total @ before.mT), after @ corrections.mT
        return total, of_reads, of_written, (after * before).sum((-2, -1)), None, None, None


def _blocks(size: int, keys: int) -> dict[str, int]:
    """Return the block sizes for chunks of ``size`` tokens and keys of width ``keys``."""
    return {
        "block_size": max(SMALLEST, triton.next_power_of_2(size)),
        "block_keys": max(SMALLEST, triton.next_power_of_2(keys)),
        "columns": COLUMNS,
        # One pipeline stage: a program already has two blocks of the width of the keys in shared memory.
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
    """Pass the states through the chunks of all runs.

    Differentiable, except with respect to ``initial``. All tensors are float32 and made contiguous here.

    Args:
        solved: [n, G, C, V], the corrections for a zero state.
        reads: [n, G, C, K]; reads @ state is subtracted from ``solved``.
        written: [n, G, K, C]; written @ corrections is added to the state.
        keeps: [n, G], the factor by which the state is multiplied before that addition.
        initial: [1, G, K, V], the state before every run; None for zero.
        first_chunks: int32, the index of each step's first chunk.
        chunks_of_run: [R] int32, number of chunks of each run, in descending order.

    Returns:
        The state before each chunk [n, G, K, V], the corrections of each chunk [n, G, C, V], and the state
        after each run [R, G, K, V].
    """
    contiguous = (tensor.contiguous() for tensor in (solved, reads, written, keeps))
    before, corrections, final = _Passage.apply(  # type: ignore[no-untyped-call]
        *contiguous, initial, first_chunks, chunks_of_run
    )
    return before, corrections, final
