"""Triton kernels for vocabulary-parallel log-probabilities and entropies. They read the logits once in the
forward pass, and read and write them once in the backward pass.

Their reference is the PyTorch code of ``megarl.models.engine.logprobs``. Results are bitwise reproducible,
because one program sums each row in a fixed order. The kernels run on a CPU in Triton's interpreter
(``TRITON_INTERPRET=1``, set before this module is imported, and ``MEGARL_LOGPROB_KERNEL=1``), and Triton can
compile them for a GPU that is not present. On an H200 they gave the same numbers as on a CPU; block sizes are
not tuned.

Shapes: T tokens, V vocabulary columns of this rank; the first ``own`` columns are not padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_BLOCK = 4096
"""Maximum number of columns that one program keeps in registers: in float32, 16 KiB over eight warps."""
# Initial maximum of a row. It is finite so that a row of minus infinities has exponentials of 0, not NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# A finite stand-in for minus infinity in products with its exponential, which is 0: infinity would give NaN.
NEGLIGIBLE = tl.constexpr(-1000.0)


@triton.jit
def _scaled(places, mask, temperature, is_scaled: tl.constexpr):
    """Load logits as float32 and divide them by the temperature. The result is minus infinity where ``mask``
    is False."""
    values = tl.load(places, mask=mask, other=float("-inf")).to(tl.float32)
    if is_scaled:
        # Round to nearest, like the computation of the bounds with which the quotient is compared.
        values = tl.div_rn(values, temperature)
    return values


@triton.jit
def _statistics(
    logits,
    targets,
    bounds,
    maxima,
    totals,
    target_logits,
    moments,
    row_stride,
    start,
    own,
    temperature,
    is_scaled: tl.constexpr,
    is_bounded: tl.constexpr,
    with_entropies: tl.constexpr,
    block: tl.constexpr,
):
    """Compute the maximum of one row per program, the sum of exponentials relative to the maximum (online
    softmax, Milakov and Gimelshein 2018), and the logit of the target.

    For entropies, also compute the sum of exponentials times logits, both relative to the maximum. When the
    maximum grows, this sum is rescaled like the other.
    """
    # int64, because row times stride can exceed 2**31.
    row = tl.program_id(0).to(tl.int64)
    place = logits + row * row_stride
    maximum = LOWEST + 0.0
    total = 0.0
    moment = 0.0
    for first in range(0, own, block):
        columns = first + tl.arange(0, block)
        scaled = _scaled(place + columns, columns < own, temperature, is_scaled)
        highest = tl.maximum(maximum, tl.max(scaled, 0))
        shares = tl.exp(scaled - highest)
        if is_bounded:
            shares = tl.where(scaled < tl.load(bounds + row), 0.0, shares)
        if with_entropies:
            below = tl.maximum(maximum - highest, NEGLIGIBLE)
            relative = tl.maximum(scaled - highest, NEGLIGIBLE)
            moment = (moment + total * below) * tl.exp(below) + tl.sum(shares * relative, 0)
        total = total * tl.exp(maximum - highest) + tl.sum(shares, 0)
        maximum = highest
    target = tl.load(targets + row) - start
    is_mine = (target >= 0) & (target < own)
    target_logit = _scaled(place + target, is_mine, temperature, is_scaled)
    tl.store(maxima + row, maximum)
    tl.store(totals + row, total)
    tl.store(target_logits + row, tl.where(is_mine, target_logit, 0.0))
    if with_entropies:
        tl.store(moments + row, moment)


@triton.jit
def _gradient(
    logits,
    gradient,
    targets,
    bounds,
    maxima,
    scales,
    target_weights,
    slopes,
    further,
    further_weights,
    row_stride,
    gradient_stride,
    start,
    own,
    width,
    temperature,
    further_count,
    is_scaled: tl.constexpr,
    is_bounded: tl.constexpr,
    with_entropies: tl.constexpr,
    block: tl.constexpr,
):
    """Compute the gradient of one block of columns of one row per program. ``gradient`` may be ``logits``."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * block
    columns = first + tl.arange(0, block)
    scaled = _scaled(logits + row * row_stride + columns, columns < own, temperature, is_scaled)
    relative = scaled - tl.load(maxima + row)
    scale = tl.load(scales + row)
    if with_entropies:
        scale += tl.load(slopes + row) * tl.maximum(relative, NEGLIGIBLE)
    part = tl.exp(relative) * scale
    if is_bounded:
        part = tl.where(scaled < tl.load(bounds + row), 0.0, part)
    is_target = columns == tl.load(targets + row) - start
    part += tl.where(is_target, tl.load(target_weights + row), 0.0)
    # Add these weights before rounding to 16 bits. A weight may be in the thousands, and the softmax's part
    # cancels all but less than 1 of it.
    for number in range(further_count):
        column = tl.load(further + row * further_count + number) - start
        if (column >= first) & (column < first + block):
            weight = tl.load(further_weights + row * further_count + number)
            part += tl.where(columns == column, weight, 0.0)
    part = tl.where(columns < own, part, 0.0)
    tl.store(
        gradient + row * gradient_stride + columns, part.to(gradient.dtype.element_ty), mask=columns < width
    )


INTERPRETED = not isinstance(_statistics, triton.JITFunction)
"""True if Triton's interpreter runs the kernels, even on a GPU."""


def _block(columns: int) -> tuple[int, int]:
    """Return the number of columns per program, and its number of warps."""
    block = min(triton.next_power_of_2(columns), LARGEST_BLOCK)
    return block, 8 if block == LARGEST_BLOCK else 4


def statistics(
    logits: torch.Tensor,
    targets: torch.Tensor,
    start: int,
    own: int,
    temperature: float,
    bounds: torch.Tensor | None,
    with_entropies: bool = False,
) -> torch.Tensor:
    """Compute per-token statistics of this rank's columns, [3, T] float32: the maximum, the sum of
    exponentials relative to the maximum, and the target's logit (0 if it is on another rank). For entropies
    the result is [4, T], with the sum of exponentials times logits, both relative to the maximum.

    Args:
        logits: [T, V] of any floating dtype; columns must be contiguous, rows need not be.
        targets: [T] int64, vocabulary indices.
        start: vocabulary index of the first column.
        own: number of columns that are not padding, at least 1.
        temperature: divisor of the logits.
        bounds: [T] float32; columns whose scaled logit is smaller are excluded from the sums. None excludes
            none.
        with_entropies: compute the fourth row.
    """
    tokens = logits.shape[0]
    found = torch.empty(3 + with_entropies, tokens, dtype=torch.float32, device=logits.device)
    if tokens:
        block, warps = _block(own)
        _statistics[(tokens,)](
            logits,
            targets.contiguous(),
            # Without bounds the compiled kernel does not read this pointer, but Triton needs one.
            logits if bounds is None else bounds,
            *found[:3],
            # The row of moments; without entropies the kernel does not write to this pointer.
            found[-1],
            *(logits.stride(0), start, own, float(temperature)),
            is_scaled=temperature != 1.0,
            is_bounded=bounds is not None,
            with_entropies=with_entropies,
            block=block,
            num_warps=warps,
        )
    return found


def write_gradient(
    gradient: torch.Tensor,
    logits: torch.Tensor,
    targets: torch.Tensor,
    start: int,
    own: int,
    temperature: float,
    bounds: torch.Tensor | None,
    maximum: torch.Tensor,
    scale: torch.Tensor,
    target_weight: torch.Tensor,
    slope: torch.Tensor | None = None,
    further: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the gradient of the logits.

    For each scaled logit that is not excluded, with x relative to the maximum, it is ``exp(x) (scale + slope
    x)``. ``target_weight`` is added at the target, and further weights are added at further tokens.

    Args:
        gradient: [T, V], the output, 0 in padding columns; columns must be contiguous. May be ``logits``.
        logits, targets, start, own, temperature, bounds: as in ``statistics``.
        maximum, scale, target_weight, slope: [T] float32; a slope of None is 0.
        further: vocabulary indices [T, K] int64 and weights [T, K] float32; None for none.
    """
    tokens, width = logits.shape
    if not tokens:
        return
    block, warps = _block(width)
    _gradient[(tokens, triton.cdiv(width, block))](
        *(logits, gradient, targets.contiguous(), logits if bounds is None else bounds),
        *(maximum.contiguous(), scale.contiguous(), target_weight.contiguous()),
        scale if slope is None else slope.contiguous(),
        *((targets, scale) if further is None else (each.contiguous() for each in further)),
        *(logits.stride(0), gradient.stride(0), start, own, width, float(temperature)),
        0 if further is None else further[0].shape[1],
        is_scaled=temperature != 1.0,
        is_bounded=bounds is not None,
        with_entropies=slope is not None,
        block=block,
        num_warps=warps,
    )
