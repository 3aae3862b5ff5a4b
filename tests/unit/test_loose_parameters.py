"""Parameters outside Megatron-Core's buffers leave the device and come back with the hooks that collect their
gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch

from megarl.distributed.device import DeviceRuntime
from megarl.models.megatron.backend import LooseParameters


def chunk(module: torch.nn.Module, buffered: list[torch.nn.Parameter]) -> Any:
    """A model chunk with one buffer, which has some of its parameters."""
    buffer = SimpleNamespace(param_data=torch.zeros(1), params=buffered)
    return SimpleNamespace(module=module, buffers=[buffer], expert_parallel_buffers=[])


def test_memory_goes_and_tensors_stay() -> None:
    module = torch.nn.Sequential(
        torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, bias=False), torch.nn.Linear(3, 2, bias=False)
    )
    module[2].weight = module[1].weight  # tied: one tensor, which is copied once
    buffered = module[0].bias
    before = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    loose = LooseParameters(
        cast(Any, [chunk(module, [buffered])]), DeviceRuntime(torch.device("cpu"), "gloo")
    )
    collected: list[str] = []
    nodes = []  # torch keeps them weakly, as long as somebody has them
    for name, parameter in module.named_parameters():
        node = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
        node.register_hook(lambda *unused, name=name: collected.append(name))
        nodes.append(node)
    for _ in range(2):
        loose.move("host")
        sizes = {name: parameter.untyped_storage().size() for name, parameter in module.named_parameters()}
        assert sizes == {"0.weight": 0, "0.bias": 12, "1.weight": 0}
        loose.move("device")
        assert all(torch.equal(parameter, before[name]) for name, parameter in module.named_parameters())
    module[2](module[0](torch.ones(4, 5))).sum().backward()
    assert sorted(collected) == sorted(before)


def test_frozen_memory_that_is_shared_is_not_copied_again() -> None:
    """As on a GPU: its host copy is memory of another process."""
    module = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.Linear(3, 2, bias=False))
    module[0].weight.requires_grad_(False)
    loose = LooseParameters(cast(Any, [chunk(module, [])]), DeviceRuntime(torch.device("cpu"), "gloo"))
    assert list(loose.frozen()) == ["0.0.weight"]
    # These bytes come back, so that nothing has written the others over them.
    memory = torch.full((3, 5), 7.0).view(torch.uint8).flatten()
    loose.keep_host_copy(module[0].weight, memory)
    bias = module[0].bias.detach().clone()
    for _ in range(2):
        loose.move("host")
        loose.move("device")
        assert module[0].weight.eq(7).all()
        assert torch.equal(module[0].bias, bias)
