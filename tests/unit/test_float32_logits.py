"""The output layer in float32 out of 16-bit operands: its values and its gradients against float64."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from megarl.models.megatron.build import Float32Product


def operands(dtype: torch.dtype, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, weights and, in float32, a gradient of their product."""
    seed = random.randrange(2**31)
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    tokens, weight = (
        torch.randn(size, generator=generator).to(dtype).requires_grad_() for size in ((*shape, 37), (53, 37))
    )
    return tokens, weight, torch.randn(*shape, 53, generator=generator)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(5, 3), (1, 1), (0, 2), (7,)])
def test_the_product_is_not_rounded(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tokens, weight, _ = operands(dtype, *shape)
    found = Float32Product.apply(tokens, weight)
    exact = tokens.double() @ weight.double().t()
    assert found.dtype is torch.float32 and found.shape == (*shape, 53)
    assert torch.equal(found, (tokens.float().flatten(0, -2) @ weight.float().t()).view_as(found))
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)
    if found.numel() > 53:
        assert (found - exact).abs().max() < ((tokens @ weight.t()) - exact).abs().max() / 10


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_are_those_of_the_rounded_gradient_of_the_logits(dtype: torch.dtype) -> None:
    tokens, weight, towards = operands(dtype, 5, 3)
    of_tokens, of_weight = torch.autograd.grad(
        Float32Product.apply(tokens, weight), (tokens, weight), towards
    )
    rounded = towards.to(dtype).double()
    exact = rounded @ weight.double(), rounded.flatten(0, 1).t() @ tokens.double().flatten(0, 1)
    step = torch.finfo(dtype).eps
    for ours, right in zip((of_tokens, of_weight), exact, strict=True):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), right, rtol=step, atol=step)


@pytest.mark.parametrize("frozen", [0, 1])
def test_what_is_frozen_gets_no_gradient(frozen: int) -> None:
    both = operands(torch.bfloat16, 4)[:2]
    both[frozen].requires_grad_(False)
    Float32Product.apply(*both).sum().backward()
    assert both[frozen].grad is None and both[1 - frozen].grad is not None
