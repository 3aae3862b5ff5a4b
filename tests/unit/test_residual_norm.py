"""Residual and norm in one operation: numbers and gradients of the two, and the norm taken only where it is
that of the tensor at hand."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from megatron.core.utils import make_viewless_tensor
from torch import Tensor
from torch._dynamo.testing import CompileCounter

from megarl.models.megatron import residual_norm
from megarl.models.megatron.residual_norm import JoinedAdd, SumAndNorm
from megarl.models.megatron.specs import PortableRMSNorm

EPSILON = 1e-5


def config_of(dtype: torch.dtype) -> SimpleNamespace:
    """What a norm reads of Megatron-Core's configuration."""
    return SimpleNamespace(params_dtype=dtype, sequence_parallel=False, layernorm_zero_centered_gamma=False)


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torch.compile is given, as it is."""
    monkeypatch.setattr(
        residual_norm, "_compiled", lambda: (residual_norm._sum_and_norm, residual_norm._gradients)
    )
    yield


def inputs(dtype: torch.dtype, *sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    shapes = [(*sizes, 7), (*sizes, 7), (7,)]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in shapes
    ]


def reference(tokens: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    total = residual + tokens
    return total, total / (total.square().mean(-1, keepdim=True) + EPSILON).sqrt() * weight


def test_gradients_are_those_of_differences() -> None:
    assert torch.autograd.gradcheck(
        lambda *tensors: SumAndNorm.apply(*tensors, EPSILON), inputs(torch.float64, 3, 2)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_numbers_are_those_of_float64_within_the_dtype(dtype: torch.dtype) -> None:
    given = inputs(dtype, 11, 3)
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    found, expected = SumAndNorm.apply(*given, EPSILON), reference(*exact)
    rounding = torch.finfo(dtype).eps
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        # the sum is rounded once, and what is made of it a few times more
        torch.testing.assert_close(one.double(), other, atol=4 * rounding * other.abs().max().item(), rtol=0)
    readers = [
        torch.randn(one.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
        for one in expected
    ]
    got = torch.autograd.grad(
        sum((one.double() * reader).sum() for one, reader in zip(found, readers, strict=True)), given
    )
    right = torch.autograd.grad(
        sum((one * reader).sum() for one, reader in zip(expected, readers, strict=True)), exact
    )
    for one, other in zip(got, right, strict=True):
        torch.testing.assert_close(one.double(), other, atol=16 * rounding * other.abs().max().item(), rtol=0)


def test_a_weight_that_is_on_its_way_is_waited_for() -> None:
    """As Megatron-Core's ``overlap_param_gather`` has it: a hook before the module's call brings what other
    ranks keep of the weight."""
    norm = PortableRMSNorm(config_of(torch.float32), 7, EPSILON)
    tokens, residual, weight = inputs(torch.float32, 3, 2)

    def arrives(module: torch.nn.Module, given: object) -> None:
        norm.weight.data.copy_(weight.detach())

    norm.register_forward_pre_hook(arrives)
    total = JoinedAdd(norm)(True, False)((tokens, None), residual, 0.0)
    expected_total, expected = reference(tokens, residual, weight)
    torch.testing.assert_close(total, expected_total)
    assert norm._ready is not None
    torch.testing.assert_close(norm(total), expected)


def test_it_is_compiled_once_for_all_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and sequences in any number, whole tensors and views: after eight versions the compiler gives up,
    and every call is slow."""
    counters = [CompileCounter(), CompileCounter()]
    functions = (residual_norm._sum_and_norm, residual_norm._gradients)
    compiled = tuple(
        torch.compile(function, dynamic=True, backend=counter)
        for function, counter in zip(functions, counters, strict=True)
    )
    monkeypatch.setattr(residual_norm, "_compiled", lambda: compiled)
    weight = torch.ones(7, requires_grad=True)
    for sizes in ((3, 2), (5, 1), (1, 4), (6, 3), (8, 8), (2, 9), (11, 5), (4, 12), (13, 2), (7, 3)):
        tokens = torch.randn(*sizes, 7, requires_grad=True)
        # as embeddings come: rows first, and then positions
        residual = torch.randn(sizes[1], sizes[0], 7).transpose(0, 1)
        for one, other in (
            (tokens, residual),
            (tokens, residual.contiguous()),
            (tokens, torch.randn(*sizes, 9)[..., :7]),
        ):
            total, norm = SumAndNorm.apply(one, other, weight, EPSILON)
            (total.sum() + norm.square().sum()).backward()
    assert [counter.frame_count for counter in counters] == [1, 1]


def norm_of(weight: Tensor) -> PortableRMSNorm:
    norm = PortableRMSNorm(config_of(weight.dtype), len(weight), EPSILON)
    with torch.no_grad():
        norm.weight.copy_(weight)
    return norm


def is_joined(norm: PortableRMSNorm, total: Tensor) -> bool:
    """Whether the norm of a tensor is the one that was left, and right either way."""
    left = norm._ready
    got = norm(total)
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(total, (7,), norm.weight, EPSILON))
    assert norm._ready is None
    return left is not None and got is left[1]


def test_a_norm_is_taken_for_its_own_tensor_alone() -> None:
    tokens, residual, weight = inputs(torch.float32, 5, 2)
    norm = norm_of(weight)
    add = JoinedAdd(norm)(True, False)
    assert is_joined(norm, add((tokens, None), residual, 0.0))
    total = add((tokens, None), residual, 0.0)
    assert total._base is None and make_viewless_tensor(total, requires_grad=True, keep_graph=True) is total
    assert not is_joined(norm, total.detach())
    # asked again, it is not there
    total = add((tokens, None), residual, 0.0)
    assert is_joined(norm, total) and not is_joined(norm, total)
    # an addition that is another one leaves nothing
    assert not is_joined(norm, add((tokens, torch.ones(7)), residual, 0.0))
    torch.manual_seed(3)
    assert not is_joined(norm, add((tokens, None), residual, 0.5))


def test_a_norm_without_a_gradient_is_not_taken_where_one_is_wanted() -> None:
    """The output of a recomputed layer is the very tensor that the layer made, with the history of the
    recomputation."""
    tokens, residual, weight = inputs(torch.float32, 5, 2)
    norm = norm_of(weight)
    add = JoinedAdd(norm)(True, False)

    class Recomputed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, tokens: Tensor, residual: Tensor) -> Tensor:
            return add((tokens.detach(), None), residual.detach(), 0.0)

        @staticmethod
        def backward(ctx: object, gradient: Tensor) -> tuple[Tensor, Tensor]:
            return gradient, gradient

    total = Recomputed.apply(tokens, residual)
    assert norm._ready is not None and norm._ready[0] is total and not is_joined(norm, total)
    norm(total).sum().backward()
    assert norm.weight.grad is not None and tokens.grad is not None and bool(tokens.grad.any())


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    """Megatron-Core's layers add with gradients switched on, also when they score."""
    tokens, residual, weight = (tensor.detach() for tensor in inputs(torch.float32, 5, 2))
    norm = norm_of(weight)
    with torch.no_grad():
        with torch.enable_grad():
            total = JoinedAdd(norm)(False, False)((tokens, None), residual, 0.0)
        assert not total.requires_grad and is_joined(norm, total)
