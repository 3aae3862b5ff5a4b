"""The engine's attention on a CUDA device: the FlashAttention kernel for packed sequences, and parts of the
keys in plain operations.

Skipped where there is no CUDA device.
"""

from __future__ import annotations

import pytest
import torch

from megarl.models.engine.attention import SequenceLayout, attention, serves
from megarl.models.engine.partial_attention import partial_attention, partial_gradients, takes_flash
from megarl.models.engine.ring_attention import _join
from tests.unit.test_partial_attention import whole

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.gpu_attention,
]
STARTS = (0, 37, 37, 200, 201, 333)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_packed_attention_is_as_exact_as_its_dtype(dtype: torch.dtype, window: int | None) -> None:
    """Against the same numbers in float64 on the CPU; 16 bit goes through the kernel, float32 from sequence
    to sequence."""
    generator = torch.Generator().manual_seed(1)
    small = [torch.randn(1, heads, STARTS[-1], 16, generator=generator).to(dtype) for heads in (6, 2, 2, 6)]
    exact, close = (
        [tensor.to(*place).requires_grad_() for tensor in small[:3]]
        for place in ((torch.float64,), ("cuda",))
    )
    assert serves(close[0]) == (dtype is not torch.float32)
    layout = SequenceLayout(STARTS)
    expected, output = attention(*exact, layout, window=window), attention(*close, layout, window=window)
    expected.backward(small[3].double())
    output.backward(small[3].cuda())
    bound = 16 * torch.finfo(dtype).eps
    for got, wanted in zip(
        [output, *(leaf.grad for leaf in close)], [expected, *(leaf.grad for leaf in exact)], strict=True
    ):
        # who sees one key has no gradient of query and key but what is left of a difference of numbers as
        # large as those of the output
        scale = expected.detach().norm() if window == 1 else wanted.detach().norm()
        assert (got.detach().cpu().double() - wanted.detach()).norm() < bound * scale


def test_parts_of_the_keys_agree_with_the_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value, pull = (torch.randn(2, heads, 700, 16, generator=generator) for heads in (6, 2, 2, 6))
    seen = torch.rand(700, 700, generator=generator) < 0.5
    for options in ({"causal": True}, {"seen": seen}, {}):
        on_device = {
            name: option.cuda() if isinstance(option, torch.Tensor) else option
            for name, option in options.items()
        }
        expected = partial_attention(query, key, value, 0.3, **options)
        output = partial_attention(query.cuda(), key.cuda(), value.cuda(), 0.3, **on_device)
        torch.testing.assert_close([tensor.cpu() for tensor in output], list(expected), atol=1e-4, rtol=1e-4)
        gradients = partial_gradients(
            pull.cuda(), query.cuda(), key.cuda(), value.cuda(), *output, 0.3, **on_device
        )
        wanted = partial_gradients(pull, query, key, value, *expected, 0.3, **options)
        torch.testing.assert_close([tensor.cpu() for tensor in gradients], list(wanted), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_parts_by_the_kernel_join_to_the_whole(dtype: torch.dtype) -> None:
    """Own keys, causal, and keys in front of them, as in a ring: against whole attention in float64, and its
    gradients."""
    generator = torch.Generator().manual_seed(3)
    small = [
        torch.randn(2, heads, length, 16, generator=generator).to(dtype)
        for heads, length in ((6, 70), (2, 170), (2, 170), (6, 70))
    ]
    exact = [tensor.double().requires_grad_() for tensor in small[:3]]
    seen = torch.ones(70, 170, dtype=torch.bool).tril(diagonal=100)
    expected = whole(*exact, 0.3, seen)
    expected.backward(small[3].double())
    query, key, value, pull = (tensor.cuda() for tensor in small)
    assert takes_flash(query)
    parts = [(slice(0, 100), False), (slice(100, 170), True)]
    output = torch.zeros(query.shape, device="cuda")
    logsumexp = torch.full(query.shape[:3], float("-inf"), device="cuda")
    for keys, causal in parts:
        _join(
            output,
            logsumexp,
            *partial_attention(query, key[:, :, keys], value[:, :, keys], 0.3, causal=causal),
        )
    found = [torch.zeros(tensor.shape, device="cuda") for tensor in (query, key, value)]
    for keys, causal in parts:
        given = (pull, query, key[:, :, keys], value[:, :, keys], output.to(dtype), logsumexp, 0.3)
        of_query, of_key, of_value = partial_gradients(*given, causal=causal)
        found[0] += of_query
        found[1][:, :, keys] += of_key
        found[2][:, :, keys] += of_value
    bound = 16 * torch.finfo(dtype).eps
    for got, wanted in zip(
        [output, *found], [expected.detach(), *(leaf.grad for leaf in exact)], strict=True
    ):
        assert (got.cpu().double() - wanted).norm() < bound * wanted.norm()
