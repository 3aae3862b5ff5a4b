"""The redirection of Megatron's CUDA calls: it takes everything back, and under CUDA it does nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.models.megatron import cuda_redirect
from tests.tiers import newest_megatron, slow

pytestmark = newest_megatron

MISSING = object()


def everything() -> dict[str, Any]:
    """Every attribute that could be replaced, as it is now."""
    from megatron.core.distributed import param_and_grad_buffer
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.tensor_parallel import mappings
    from megatron.core.tensor_parallel import random as megatron_random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    owners = (
        torch.cuda,
        Tensor,
        mappings,
        megatron_random,
        moe_utils,
        token_dispatcher,
        param_and_grad_buffer,
        schedules,
    )
    return {f"{owner.__name__}.{name}": value for owner in owners for name, value in vars(owner).items()}


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without CUDA")
def test_restore_puts_every_original_back() -> None:
    before = everything()
    cuda_redirect.install()
    during = everything()
    cuda_redirect.restore()
    changed = {name for name in during if before.get(name, MISSING) is not during[name]}
    assert {
        "torch.cuda.current_device",
        "torch.cuda.Stream",
        "torch.cuda.get_rng_state",
        "Tensor.record_stream",
    } <= changed
    after = everything()
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] is not before[name]] == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without CUDA")
def test_installs_nest() -> None:
    original = torch.cuda.current_device
    cuda_redirect.install()
    cuda_redirect.install()
    cuda_redirect.restore()
    assert torch.cuda.current_device() == torch.device("cpu")
    assert torch.ones(2).record_stream(torch.cuda.current_stream()) is None
    cuda_redirect.restore()
    cuda_redirect.restore()
    assert torch.cuda.current_device is original


def test_under_cuda_nothing_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_redirect, "needed", lambda: False)
    before = everything()
    cuda_redirect.install()
    during = everything()
    cuda_redirect.restore()
    assert [name for name in during if during[name] is not before[name]] == []
    from torch.overrides import _get_current_function_mode_stack

    for context in (cuda_redirect.cuda_literals(), cuda_redirect.plain_torch()):
        with context:
            assert _get_current_function_mode_stack() == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without CUDA")
def test_literals_mean_the_cpu_and_only_inside() -> None:
    tensor = torch.arange(3.0)
    with cuda_redirect.cuda_literals():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1], device="cuda:1").device.type == "cpu"
        assert torch.empty_like(tensor, device=torch.device("cuda", 0)).device.type == "cpu"
        assert tensor.cuda() is tensor and tensor.pin_memory() is tensor
        assert tensor.to("cuda").device.type == "cpu" and tensor.to(device="cuda").device.type == "cpu"
        assert torch.empty(2, pin_memory=True).device.type == "cpu"
        assert [tensor.to(dtype).type() for dtype in (torch.float32, torch.float16, torch.bfloat16)] == [
            "torch.cuda.FloatTensor",
            "torch.cuda.HalfTensor",
            "torch.cuda.BFloat16Tensor",
        ]
        assert (
            tensor.long().type() == "torch.LongTensor" and tensor.type(torch.float64).dtype is torch.float64
        )
        with cuda_redirect.plain_torch():
            assert tensor.type() == "torch.FloatTensor"
    assert tensor.type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(2, device="cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without CUDA")
def test_random_numbers_of_the_stand_ins_are_those_of_the_cpu() -> None:
    state = torch.get_rng_state()
    cuda_redirect.install()
    try:
        torch.cuda.manual_seed(5)
        first = torch.rand(3)
        kept = torch.cuda.get_rng_state()
        second = torch.rand(3)
        torch.cuda.set_rng_state(kept)
        assert torch.equal(torch.rand(3), second)
    finally:
        cuda_redirect.restore()
        torch.set_rng_state(state)
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), first)


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without CUDA")
def test_a_failure_inside_the_literals_leaves_no_mode_behind() -> None:
    with pytest.raises(ZeroDivisionError), cuda_redirect.cuda_literals():
        raise ZeroDivisionError
    assert torch.ones(1).type() == "torch.FloatTensor"


@slow
def test_without_a_device_megatron_is_imported_without_a_compiler() -> None:
    """Its functions are what they were written as, torch's compiler is not even loaded, and torch.compile is
    torch's own afterwards."""
    script = (
        "import sys, torch; own = torch.compile; import megarl.models.megatron.backend;"
        "from megatron.core.fusions.fused_bias_swiglu import swiglu;"
        "print(type(swiglu).__name__, swiglu.__module__, 'torch._inductor' in sys.modules, torch.compile is "
        "own)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.split() == ["function", "megatron.core.fusions.fused_bias_swiglu", "False", "True"]


def test_options_of_a_compiled_function_are_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with cuda_redirect.without_compiler():
        assert torch.compile(dynamic=True)(max) is max and torch.compile(max) is max


def test_with_a_device_megatron_compiles_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    own = torch.compile
    with cuda_redirect.without_compiler():
        assert torch.compile is own


class _Group:
    """Stands for a process group of a size."""

    def __init__(self, size: int) -> None:
        self.ranks = size

    def size(self) -> int:
        return self.ranks


def test_one_rank_sends_nothing_to_itself() -> None:
    from megatron.core.distributed import param_and_grad_buffer

    calls = []

    def collective(*tensors: Tensor, **options: Any) -> str:
        calls.append(options)
        return "work"

    with pytest.MonkeyPatch.context() as patch:
        for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
            patch.setattr(param_and_grad_buffer, name, collective)
        for _, _, run in cuda_redirect._collectives_of_one(param_and_grad_buffer):
            whole = torch.arange(6.0)
            shard = whole[:]
            assert run(shard, whole, group=_Group(1), async_op=True) is None and not calls
            # among several ranks, or into other memory, it is the collective
            assert (
                run(whole[:3], whole, group=_Group(2))
                == run(torch.empty(6), whole, group=_Group(1))
                == "work"
            )
            assert len(calls) == 2
            calls.clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="for a process without CUDA")
def test_a_backward_pass_rewrites_nothing() -> None:
    from megatron.core.pipeline_parallel import schedules

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: Tensor) -> Tensor:
            return value * 3

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            seen.append(gradients[0].type())
            return gradients[0] * 3

    seen: list[str] = []
    value = torch.ones(1, requires_grad=True)
    cuda_redirect.install()
    try:
        with cuda_redirect.cuda_literals():
            schedules.custom_backward(Seen.apply(value), None)
            assert value.type() == "torch.cuda.FloatTensor"
    finally:
        cuda_redirect.restore()
    assert seen == ["torch.FloatTensor"] and value.grad is not None and value.grad.item() == 3
