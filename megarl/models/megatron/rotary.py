"""Rotary embedding of queries and keys by token position, for rows, packed sequences and decoded rows
alike.

Megatron-Core computes cosines and sines in every layer, separately for queries and keys, and rotates packed
sequences one after another, by lengths that it reads from the device. From 0.19 on this takes about twenty
operations per sequence; in all releases a layer synchronizes with the device four times. Here positions are
known: cosines and sines are computed once per micro-batch, and each tensor takes four operations, forward and
backward, or a single kernel if Triton is available.

A head x = (a, b) of two halves, both with the angles t, becomes x cos t + (-b, a) sin t (Su et al. 2021,
arXiv:2104.09864, equation 34, with halves instead of pairs). The gradient g is rotated back: g cos t - (-g_b,
g_a) sin t.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = None


@dataclass(frozen=True, slots=True)
class Rotation:
    """Cosines and sines of rotary angles.

    Attributes:
        cosines: [t, b or 1, 1, r] in the dtype of the rotated tensors; r is at most the head width.
        signed_sines: the same shape; the sines of the first half are negated.
    """

    cosines: torch.Tensor
    signed_sines: torch.Tensor


# All layers of a micro-batch use the same rotation. Cache two, because two chunks of an interleaved pipeline
# alternate.
@functools.lru_cache(maxsize=2)
def rotation(
    angles: torch.Tensor, positions: torch.Tensor | None, dtype: torch.dtype, factor: float
) -> Rotation:
    """Return the rotation for the given positions.

    Args:
        angles: [P, 1, 1, r] float32 for positions 0 to P - 1, as Megatron's embeddings return them: both
            halves are equal.
        positions: [t] or [t, b] int64; None if ``angles`` already has one row per token.
        dtype: dtype of the rotated tensors.
        factor: factor of cosines and sines (the concentration of YaRN).
    """
    # Half the table suffices, because both halves of a head rotate by the same angles.
    half = angles[..., : angles.shape[-1] // 2]
    if positions is not None:
        half = half[:, 0][positions if positions.ndim == 2 else positions[:, None]]
    cosines, sines = half.cos(), half.sin()
    if factor != 1.0:
        cosines, sines = cosines * factor, sines * factor
    cosines, sines = cosines.to(dtype), sines.to(dtype)
    return Rotation(torch.cat((cosines, cosines), dim=-1), torch.cat((-sines, sines), dim=-1))


def rotate(tensor: torch.Tensor, by: Rotation) -> torch.Tensor:
    """Rotate a tensor [t, b, heads, width]; columns beyond the width of the angles are unchanged.
    Differentiable."""
    rotated: torch.Tensor = _Rotate.apply(  # type: ignore[no-untyped-call]
        tensor, by.cosines, by.signed_sines
    )
    return rotated


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tensor: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor
    ) -> torch.Tensor:
        # Save only the table, which all layers share: rotating a gradient back does not need the rotated
        # tensor.
        ctx.save_for_backward(cosines, signed_sines)
        return _rotate_by(tensor, cosines, signed_sines, back=False)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _rotate_by(gradient, *ctx.saved_tensors, back=True), None, None


def _rotate_by(
    tensor: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor, *, back: bool
) -> torch.Tensor:
    # Check for CUDA, because Triton's interpreter, which tests enable, accepts tensors on any device.
    way = by_kernel if triton is not None and tensor.is_cuda else rotated_by
    return way(tensor, cosines, signed_sines, back=back)


def rotated_by(
    tensor: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor, *, back: bool
) -> torch.Tensor:
    """Rotate a tensor [t, b, heads, width], or rotate it back, with plain torch operations; the arguments
    come from a ``Rotation``."""
    width = cosines.shape[-1]
    turned, others = tensor[..., :width], tensor[..., width:]
    swapped = torch.cat((turned[..., width // 2 :], turned[..., : width // 2]), dim=-1)
    join = torch.sub if back else torch.add
    # In place, because swapped is a new copy.
    rotated = join(turned * cosines, swapped.mul_(signed_sines))
    return torch.cat((rotated, others), dim=-1) if others.shape[-1] else rotated


if triton is not None:

    @triton.jit
    def _kernel(
        tensor,
        rotated,
        cosines,
        signed_sines,
        rows,
        heads,
        half,
        width,
        token_stride,
        row_stride,
        head_stride,
        table_token_stride,
        table_row_stride,
        back: tl.constexpr,
        head_block: tl.constexpr,
        half_block: tl.constexpr,
        rest_block: tl.constexpr,
    ):
        """Rotate some heads of one token per program."""
        # int64, because tokens times the width of all heads exceeds 2**31 in long packed rows.
        token = (tl.program_id(0) // rows).to(tl.int64)
        row = (tl.program_id(0) % rows).to(tl.int64)
        head = tl.program_id(1) * head_block + tl.arange(0, head_block)
        source = tensor + token * token_stride + row * row_stride + head[:, None] * head_stride
        target = rotated + ((token * rows + row) * heads + head[:, None]) * width
        column = tl.arange(0, half_block)
        table = token * table_token_stride + row * table_row_stride + column
        cosine = tl.load(cosines + table, mask=column < half, other=0.0).to(tl.float32)[None, :]
        # The sines of the second half are not negated.
        sine = tl.load(signed_sines + table + half, mask=column < half, other=0.0).to(tl.float32)[None, :]
        if back:
            sine = -sine
        inside = (head < heads)[:, None] & (column < half)[None, :]
        first = tl.load(source + column[None, :], mask=inside, other=0.0).to(tl.float32)
        second = tl.load(source + half + column[None, :], mask=inside, other=0.0).to(tl.float32)
        tl.store(
            target + column[None, :],
            (first * cosine - second * sine).to(rotated.dtype.element_ty),
            mask=inside,
        )
        tl.store(
            target + half + column[None, :],
            (second * cosine + first * sine).to(rotated.dtype.element_ty),
            mask=inside,
        )
        if rest_block:
            others = 2 * half + tl.arange(0, rest_block)
            outside = (head < heads)[:, None] & (others < width)[None, :]
            tl.store(target + others[None, :], tl.load(source + others[None, :], mask=outside), mask=outside)


def by_kernel(
    tensor: torch.Tensor, cosines: torch.Tensor, signed_sines: torch.Tensor, *, back: bool
) -> torch.Tensor:
    """Rotate like ``rotated_by``, in one Triton kernel that rounds only its result."""
    tokens, rows, heads, width = tensor.shape
    # The kernel needs only a contiguous last dimension; query and key are views of one projection.
    tensor = tensor if tensor.stride(-1) == 1 else tensor.contiguous()
    half = cosines.shape[-1] // 2
    rotated = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    if not rotated.numel():
        return rotated
    head_block = min(triton.next_power_of_2(heads), 8)
    rest = width - 2 * half
    _kernel[(tokens * rows, triton.cdiv(heads, head_block))](
        *(tensor, rotated, cosines, signed_sines, rows, heads, half, width, *tensor.stride()[:3]),
        # A stride of 0 broadcasts one row of the table to all rows.
        *(cosines.stride(0), cosines.stride(1) if cosines.shape[1] > 1 else 0),
        back=back,
        head_block=head_block,
        half_block=triton.next_power_of_2(half),
        rest_block=triton.next_power_of_2(rest) if rest else 0,
    )
    return rotated
