"""Triton kernels of the vocabulary-parallel log-probabilities and entropies: the logits are read once in the
forward pass, and read and written once in the backward pass.

They compute the same as the PyTorch code of ``megarl.models.engine.logprobs``, which is their reference.
Triton's interpreter runs them on a CPU (``TRITON_INTERPRET=1``, set before this module is imported, and
``MEGARL_LOGPROB_KERNEL=1``), and Triton compiles them for devices that are not present. On an H200 they give
the same numbers as on a CPU; their block sizes are not tuned. Equal inputs give equal bits: one program sums
each row, in a fixed order.

Legend: T tokens, V vocabulary columns of this rank, of which the first ``own`` are not padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LARGEST_BLOCK = 4096
"""Maximum columns that one program holds in its registers at a time: float32, 16 KiB over eight warps."""
# Use a finite maximum, so that the exponentials of a row that is minus infinity everywhere are 0 and not NaN.
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# The exponential of anything below this bound is 0, so that in a product with it the bound stands for minus
# infinity.
NEGLIGIBLE = tl.constexpr(-1000.0)


@triton.jit
def _scaled(places, mask, temperature, is_scaled: tl.constexpr):
    """Load logits divided by the temperature in float32, minus infinity where ``mask`` is false."""
    values = tl.load(places, mask=mask, other=float("-inf")).to(tl.float32)
    if is_scaled:
        # Round the quotient exactly as the bounds were rounded that it is compared with.
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
    """Compute for one row per program its maximum, its sum of exponentials relative to the maximum (Milakov
    and Gimelshein, 2018), and its target's logit. For entropies, also compute the sum of exponentials times
    logits, both relative to the maximum, which is rescaled in the same way when the maximum grows."""
    # Use int64, because rows times a vocabulary exceed 2**31 elements.
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
    """Compute the gradient of one block of columns of one row per program; ``gradient`` may be ``logits``."""
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
    # Add these before rounding to 16 bits: each weight may be in the thousands, and the softmax's part leaves
    # less than 1 of it.
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
"""True if Triton's interpreter runs the kernels, on any device."""


def _block(columns: int) -> tuple[int, int]:
    """Return the number of columns of a program, and its number of warps."""
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
    """Compute [3, T] float32: maximum, sum of exponentials relative to the maximum, and target logit (0 if
    the target is on another rank). For entropies the result is [4, T], with the sum of exponentials times
    logits, both relative to the maximum.

    Args:
        logits: [T, V] of any floating dtype; columns are adjacent in memory, rows need not be.
        targets: [T] int64, vocabulary indices.
        start: vocabulary index of the first column.
        own: columns that are not padding, at least 1.
        temperature: divisor of the logits.
        bounds: [T] float32: columns with a smaller scaled logit are excluded from the sums; None excludes
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
            # Without bounds pass any pointer, because the kernel is compiled without reading it.
            logits if bounds is None else bounds,
            *found[:3],
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
    """Write ``exp(x) (scale + slope x)`` for each scaled logit that is not excluded, with x relative to the
    maximum, plus ``target_weight`` at the target and the further weights at further tokens.

    Args:
        gradient: [T, V], the output, with 0 in columns of padding; columns are adjacent in memory; it may be
            ``logits``.
        logits, targets, start, own, temperature, bounds: as for ``statistics``.
        maximum, scale, target_weight, slope: [T] float32; None for a slope of 0.
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
