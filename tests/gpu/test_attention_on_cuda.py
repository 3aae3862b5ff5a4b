"""The engine's attention on a CUDA device: the FlashAttention kernel for packed sequences, and parts of the keys in plain operations.

Skipped where there is no CUDA device; when this was written none was at hand.
"""

from __future__ import annotations

import pytest
import torch

from megarl.models.engine.attention import SequenceLayout, attention, serves
from megarl.models.engine.partial_attention import partial_attention, partial_gradients

pytestmark = [pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"), pytest.mark.gpu_attention]
STARTS = (0, 37, 37, 200, 201, 333)


@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_packed_attention_is_as_exact_as_its_dtype(dtype: torch.dtype, window: int | None) -> None:
    """Against the same numbers in float64 on the CPU; 16 bit goes through the kernel, float32 from sequence to sequence."""
    generator = torch.Generator().manual_seed(1)
    small = [torch.randn(1, heads, STARTS[-1], 16, generator=generator).to(dtype) for heads in (6, 2, 2, 6)]
    exact, close = ([tensor.to(*place).requires_grad_() for tensor in small[:3]] for place in ((torch.float64,), ("cuda",)))
    assert serves(close[0]) == (dtype is not torch.float32)
    layout = SequenceLayout(STARTS)
    expected, output = attention(*exact, layout, window=window), attention(*close, layout, window=window)
    expected.backward(small[3].double())
    output.backward(small[3].cuda())
    bound = 16 * torch.finfo(dtype).eps
    for got, wanted in zip([output, *(leaf.grad for leaf in close)], [expected, *(leaf.grad for leaf in exact)], strict=True):
        assert (got.detach().cpu().double() - wanted.detach()).norm() < bound * wanted.detach().norm()


def test_parts_of_the_keys_agree_with_the_cpu() -> None:
    generator = torch.Generator().manual_seed(2)
    query, key, value, pull = (torch.randn(2, heads, 700, 16, generator=generator) for heads in (6, 2, 2, 6))
    seen = torch.rand(700, 700, generator=generator) < 0.5
    for options in ({"causal": True}, {"seen": seen}, {}):
        on_device = {name: option.cuda() if isinstance(option, torch.Tensor) else option for name, option in options.items()}
        expected = partial_attention(query, key, value, 0.3, **options)
        output = partial_attention(query.cuda(), key.cuda(), value.cuda(), 0.3, **on_device)
        torch.testing.assert_close([tensor.cpu() for tensor in output], list(expected), atol=1e-4, rtol=1e-4)
        gradients = partial_gradients(pull.cuda(), query.cuda(), key.cuda(), value.cuda(), *output, 0.3, **on_device)
        wanted = partial_gradients(pull, query, key, value, *expected, 0.3, **options)
        torch.testing.assert_close([tensor.cpu() for tensor in gradients], list(wanted), atol=1e-3, rtol=1e-3)
