"""The grouped products of experts against a loop over experts, and the memory of several tensors seen as
one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megarl.models.megatron import grouped_experts
from megarl.models.megatron.grouped_experts import _OfTokens, _Product, shared_view, stacked

pytestmark = pytest.mark.skipif(
    grouped_experts.grouped_mm is None, reason="torch.nn.functional.grouped_mm is in torch 2.10 and newer"
)

# tokens of each expert: uneven, none for some or for the last, one token in all
SPLITS = [(3, 0, 9, 1), (0, 0, 0, 1), (1, 0, 0, 0), (5, 5, 5, 5), (0, 7, 0, 0)]


def parameters(shape: tuple[int, ...], dtype: torch.dtype, *, beside: bool) -> list[torch.nn.Parameter]:
    """Four of a shape, ``beside`` one another in one piece of memory with gaps, with gradient buffers as
    Megatron's."""
    numbers = torch.Size(shape).numel()
    homes = [torch.randn(4, numbers + 64).to(dtype) for _ in range(2)]
    weights = [home[:, :numbers].view(4, *shape) for home in homes]
    result = []
    for index in range(4):
        weight = torch.nn.Parameter(weights[0][index] if beside else weights[0][index].clone())
        weight.main_grad = weights[1][index].float().clone() if not beside else torch.zeros(0)
        result.append(weight)
    if beside:
        buffer = torch.randn(4, numbers + 64)
        for index, weight in enumerate(result):
            weight.main_grad = buffer[index, :numbers].view(shape)
    return result


def summed(weights: list[torch.nn.Parameter]) -> list[Tensor]:
    """What is in the gradient buffers once Megatron's hook has run."""
    return [weight.main_grad + (0 if weight.grad_added_to_main_grad else weight.grad) for weight in weights]


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("split", SPLITS)
def test_products_equal_those_of_a_loop(split: tuple[int, ...], dtype: torch.dtype, beside: bool) -> None:
    """To the bit, gradients and their sums in buffers too; near float64 within rounding."""
    torch.manual_seed(7)
    weights, tokens = (
        parameters((24, 16), dtype, beside=beside),
        torch.randn(sum(split), 16).to(dtype).requires_grad_(),
    )
    before = [weight.main_grad.clone() for weight in weights]
    limits = torch.tensor(split).cumsum(0, dtype=torch.int32)
    gradient = torch.randn(sum(split), 24).to(dtype)
    product = _Product.apply(tokens, limits, *weights)
    product.backward(gradient)

    def loop(wanted: torch.dtype) -> tuple[Tensor, Tensor, list[Tensor]]:
        own = [weight.detach().to(wanted).requires_grad_() for weight in weights]
        given = tokens.detach().to(wanted).requires_grad_()
        result = torch.cat([part @ weight.t() for part, weight in zip(given.split(split), own, strict=True)])
        result.backward(gradient.to(wanted))
        return result, given.grad, [weight.grad for weight in own]

    result, of_tokens, of_weights = loop(dtype)
    assert torch.equal(product, result) and torch.equal(tokens.grad, of_tokens)
    for total, first, one in zip(summed(weights), before, of_weights, strict=True):
        assert torch.equal(total, first + one)
    assert all(weight.grad_added_to_main_grad == beside for weight in weights)
    exact = loop(torch.float64)
    bound = 1e-5 if dtype is torch.float32 else 0.15
    torch.testing.assert_close(product.double(), exact[0], atol=bound, rtol=0)
    torch.testing.assert_close(tokens.grad.double(), exact[1], atol=bound, rtol=0)


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize("split", SPLITS)
def test_biases_of_tokens(split: tuple[int, ...], beside: bool) -> None:
    torch.manual_seed(8)
    biases = parameters((24,), torch.float32, beside=beside)
    before = [bias.main_grad.clone() for bias in biases]
    limits, gradient = torch.tensor(split).cumsum(0, dtype=torch.int32), torch.randn(sum(split), 24)
    of_tokens = _OfTokens.apply(limits, sum(split), *biases)
    of_tokens.backward(gradient)
    expected = torch.cat([bias.detach().expand(count, -1) for bias, count in zip(biases, split, strict=True)])
    assert torch.equal(of_tokens, expected)
    for total, first, rows in zip(summed(biases), before, gradient.split(split), strict=True):
        torch.testing.assert_close(total, first + rows.sum(0), atol=1e-5, rtol=0)


def test_gradients_without_strides_of_their_own() -> None:
    """Those of a sum have strides of zero, which the kernel refuses; frozen weights get none."""
    weights = parameters((24, 16), torch.float32, beside=True)
    for weight in weights:
        weight.requires_grad_(False)
    for rows in (1, 4):
        tokens, limits = (
            torch.randn(rows, 16, requires_grad=True),
            torch.tensor([0, 0, 1, rows], dtype=torch.int32),
        )
        _Product.apply(tokens, limits, *weights).sum().backward()
        assert tokens.grad is not None and tokens.grad.shape == (rows, 16)
    assert all(weight.grad is None for weight in weights)


def test_memory_is_shared_only_at_equal_distances() -> None:
    home = torch.arange(64.0)
    even = [home[start : start + 8].view(2, 4) for start in (4, 20, 36)]
    view = shared_view(even)
    assert view is not None and view.data_ptr() == even[0].data_ptr() and torch.equal(view, torch.stack(even))
    assert torch.equal(stacked(even[::-1]), torch.stack(even[::-1])), "backwards: a copy"
    others = {
        "backwards": even[::-1],
        "uneven": [even[0], even[1], home[40:48].view(2, 4)],
        "overlapping": [home[start : start + 8].view(2, 4) for start in (0, 4, 8)],
        "elsewhere": [even[0], even[1], even[2].clone()],
        "between 16 bytes": [home[start : start + 8].view(2, 4) for start in (1, 17, 33)],
        "turned": [tensor.t() for tensor in even],
    }
    for name, tensors in others.items():
        assert shared_view(tensors) is None, name
        assert torch.equal(stacked(tensors), torch.stack(tensors)), name
