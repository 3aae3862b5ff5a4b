"""Ring attention on real ranks, forward and backward, against a slow loop in float64 over whole sequences,
and what it sends."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.engine.attention import SequenceLayout, attention
from megarl.models.engine.context import ContextShare
from megarl.parity.pool import WorkerPool
from tests.tiers import sampled
from tests.unit.test_context import slow_attention

PACKED = {2: (0, 4, 4, 16, 24), 3: (0, 6, 18, 18, 48), 4: (0, 8, 24, 32)}


def tensors(positions: int, rows: int, seed: int) -> list[Tensor]:
    """Query, key, value and the gradient of the output, over all ranks: 6 heads on 2 key-value heads."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, heads, positions, 5, generator=generator) for heads in (6, 2, 2, 6)]


def attend(
    starts: tuple[int, ...], rows: int, window: int | None, seed: int, ring: bool, dtype: torch.dtype
) -> dict[str, Any]:
    """This rank's output and gradients, the positions they belong to and how often each collective ran."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **keywords)

        return mock.patch.object(dist, name, call)

    share = ContextShare(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, ring)
    index = share.index(starts)
    query, key, value, pull = (tensor[:, :, index].to(dtype) for tensor in tensors(starts[-1], rows, seed))
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    layout = SequenceLayout(starts if rows == 1 else None, share)
    with counted("all_gather_into_tensor"), counted("reduce_scatter_tensor"), counted("batch_isend_irecv"):
        output = attention(*leaves, layout, window=window)
        output.backward(pull)
    return {
        "output": output.detach(),
        "gradients": [leaf.grad for leaf in leaves],
        "index": index,
        "counts": dict(counts),
    }


def expected(
    starts: tuple[int, ...], rows: int, window: int | None, seed: int
) -> tuple[Tensor, list[Tensor]]:
    query, key, value, pull = tensors(starts[-1], rows, seed)
    leaves = [tensor.double().requires_grad_() for tensor in (query, key, value)]
    output = torch.cat(
        [slow_attention(*(leaf[row : row + 1] for leaf in leaves), starts, window) for row in range(rows)]
    )
    output.backward(pull.double())
    return output.detach(), [leaf.grad for leaf in leaves]


@sampled("values")
@pytest.mark.parametrize("window", [None, 1, 3, 7, 100])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_equals_the_slow_loop(pool: WorkerPool, world: int, packed: bool, window: int | None) -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    starts, rows = (PACKED[world], 1) if packed else ((0, 4 * world), 2)
    output, gradients = expected(starts, rows, window, seed)
    for result in pool.run(world, attend, starts, rows, window, seed, True, torch.float32):
        index = result["index"]
        torch.testing.assert_close(result["output"].double(), output[:, :, index], atol=2e-6, rtol=2e-6)
        for got, whole in zip(result["gradients"], gradients, strict=True):
            torch.testing.assert_close(got.double(), whole[:, :, index], atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_other_dtypes(pool: WorkerPool, dtype: torch.dtype) -> None:
    """bfloat16 is as near to the truth as gathered keys and values are, up to a rounding of each part."""
    starts = PACKED[3]
    output, gradients = expected(starts, 1, None, 4)
    ring, gathered = (pool.run(3, attend, starts, 1, None, 4, ring, dtype) for ring in (True, False))
    for one, other in zip(ring, gathered, strict=True):
        assert one["output"].dtype == dtype and all(gradient.dtype == dtype for gradient in one["gradients"])
        for got, beside, whole in zip(
            [one["output"], *one["gradients"]],
            [other["output"], *other["gradients"]],
            [output, *gradients],
            strict=True,
        ):
            truth = whole[:, :, one["index"]]
            error, bound = (got.double() - truth).norm(), (beside.double() - truth).norm()
            assert error < max(2 * bound, 1e-12 * truth.norm())


def test_keys_and_values_are_sent_round_and_never_gathered(pool: WorkerPool) -> None:
    """Forward two steps of three; backward two more, and three of the gradients on their way home."""
    for result in pool.run(3, attend, PACKED[3], 1, None, 1, True, torch.float32):
        assert result["counts"] == {"batch_isend_irecv": 2 + 2 + 3}
    for result in pool.run(3, attend, PACKED[3], 1, None, 1, False, torch.float32):
        assert result["counts"] == {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}
