"""Attention over parts of the keys, joined, against whole attention in float64 and autograd: the CPU kernel
and the plain operations."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import Tensor

from megarl.models.engine import partial_attention
from megarl.models.engine.context import ContextShare
from megarl.models.engine.ring_attention import _join, _pieces

KERNELS = {
    "cpu": (partial_attention.partial_attention, partial_attention.partial_gradients),
    "plain": (
        lambda *tensors, causal=False, seen=None: partial_attention._in_blocks(*tensors, causal, seen),
        lambda *tensors, causal=False, seen=None: partial_attention._gradients_in_blocks(
            *tensors, causal, seen
        ),
    ),
}
BOUNDS = {torch.float32: 3e-6, torch.float64: 1e-12, torch.bfloat16: 3e-2}


def whole(query: Tensor, key: Tensor, value: Tensor, scale: float, seen: Tensor) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, dim=1), value.repeat_interleave(group, dim=1)
    return ((query @ key.mT) * scale).masked_fill(~seen, float("-inf")).softmax(dim=-1) @ value


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("case", ["all", "causal", "window", "blind"])
def test_parts_join_to_the_whole(
    kernel: str, dtype: torch.dtype, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys in two parts of 7 and 4; with "blind" some queries see nothing of the first part and others
    nothing of the second."""
    monkeypatch.setattr(partial_attention, "BLOCK", 3)
    forward, backward = KERNELS[kernel]
    torch.manual_seed(5)
    query, key, value = torch.randn(2, 6, 7, 5), torch.randn(2, 2, 11, 5), torch.randn(2, 2, 11, 5)
    query, key, value = (tensor.to(dtype).double().requires_grad_() for tensor in (query, key, value))
    pull = torch.randn(2, 6, 7, 5).to(dtype)
    parts = [slice(0, 7), slice(7, 11)]
    seen = torch.ones(7, 11, dtype=torch.bool)
    if case == "causal":
        seen[:, :7] = torch.ones(7, 7, dtype=torch.bool).tril()
    elif case == "window":
        seen[:, :7] = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)
    elif case == "blind":
        seen[1:3, :7] = False
        seen[3:, 7:] = False
    expected = whole(query, key, value, 0.4, seen)
    expected.backward(pull.double())

    small = [tensor.detach().to(dtype) for tensor in (query, key, value)]
    output, sums = torch.zeros(2, 6, 7, 5, dtype=torch.promote_types(dtype, torch.float32)), None
    sums = torch.full((2, 6, 7), float("-inf"), dtype=output.dtype)
    options = []
    for part in parts:
        mask = seen[:, part]
        causal = case == "causal" and part.start == 0
        options.append({"causal": True} if causal else {"seen": None if bool(mask.all()) else mask})
        made, part_sums = forward(small[0], small[1][:, :, part], small[2][:, :, part], 0.4, **options[-1])
        assert made.dtype == dtype and part_sums.dtype == output.dtype
        _join(output, sums, made, part_sums)
    bound = BOUNDS[dtype]
    torch.testing.assert_close(output.double(), expected, atol=bound, rtol=bound)

    output = output.to(dtype)
    of_query = torch.zeros_like(query)
    for part, option in zip(parts, options, strict=True):
        keys, values = small[1][:, :, part], small[2][:, :, part]
        got = backward(pull, small[0], keys, values, output, sums, 0.4, **option)
        of_query += got[0].double()
        torch.testing.assert_close(got[1].double(), key.grad[:, :, part], atol=4 * bound, rtol=bound)
        torch.testing.assert_close(got[2].double(), value.grad[:, :, part], atol=4 * bound, rtol=bound)
    torch.testing.assert_close(of_query, query.grad, atol=4 * bound, rtol=bound)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_without_keys_is_marked(kernel: str) -> None:
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn(1, 2, 3, 4, generator=generator), torch.randn(1, 1, 5, 4, generator=generator)
    seen = torch.ones(3, 5, dtype=torch.bool)
    seen[1] = False
    output, sums = KERNELS[kernel][0](query, key, key, 1.0, seen=seen)
    assert output[:, :, 1].eq(0).all() and sums[:, :, 1].eq(float("-inf")).all()
    assert sums[:, :, [0, 2]].isfinite().all()


def test_the_two_kernels_agree_on_random_masks() -> None:
    seed = random.randrange(10**6)
    print(f"seed {seed}")
    torch.manual_seed(seed)
    query, key, value = torch.randn(1, 4, 9, 6), torch.randn(1, 2, 13, 6), torch.randn(1, 2, 13, 6)
    seen = torch.rand(9, 13) < 0.5
    one, other = (KERNELS[name][0](query, key, value, 0.3, seen=seen) for name in KERNELS)
    torch.testing.assert_close(one, other, atol=3e-6, rtol=3e-6)


@pytest.mark.parametrize("causal", [True, False])
def test_the_kernels_of_torch_take_what_they_are_given(monkeypatch: pytest.MonkeyPatch, causal: bool) -> None:
    """On tensors without memory: arguments and shapes; the numbers are for tests/gpu."""
    monkeypatch.setattr(partial_attention, "takes_flash", lambda query: True)
    query = torch.empty(2, 6, 7, 16, dtype=torch.bfloat16, device="meta")
    key = torch.empty(2, 2, 7 if causal else 11, 16, dtype=torch.bfloat16, device="meta")
    output, logsumexp = partial_attention.partial_attention(query, key, key, 0.3, causal=causal)
    assert (output.shape, output.dtype) == (query.shape, query.dtype)
    assert (logsumexp.shape, logsumexp.dtype) == ((2, 6, 7), torch.float32)
    gradients = partial_attention.partial_gradients(
        output, query, key, key, output, logsumexp, 0.3, causal=causal
    )
    assert [(one.shape, one.dtype) for one in gradients] == [
        (one.shape, one.dtype) for one in (query, key, key)
    ]


def test_a_window_reaches_what_its_mask_says() -> None:
    """Every pair of ranks, sequences and windows of many lengths: no piece is left out that shows something,
    and none is empty."""
    pieces = 0
    for size, half, window in itertools.product((2, 3, 4), (1, 2, 5), range(1, 41)):
        starts = (0, 2 * size, 2 * size, 2 * size * (half + 1))
        for rank, source in itertools.product(range(size), repeat=2):
            context, whole_there = ContextShare(rank, size), ContextShare(source, size)
            asked, held = context.index(starts), whole_there.index(starts)
            sequence = torch.bucketize(asked, torch.tensor(starts[1:]), right=True)[
                :, None
            ] == torch.bucketize(held, torch.tensor(starts[1:]), right=True)
            distance = asked[:, None] - held
            expected = sequence & (distance >= 0) & (distance < window)
            found = torch.zeros_like(expected)
            for piece in _pieces(starts, context, source, window, torch.device("cpu")):
                block = found[piece.queries, piece.keys]
                block |= (
                    piece.seen
                    if piece.seen is not None
                    else torch.ones_like(block).tril()
                    if piece.causal
                    else torch.ones_like(block)
                )
                assert block.any()
                pieces += 1
            assert torch.equal(found, expected), (size, half, window, rank, source)
    assert pieces > 1000
