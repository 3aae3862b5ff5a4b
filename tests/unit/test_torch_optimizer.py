"""Optimizer and schedule of the torch backends by name: what is built, and how wrong names and arguments are
refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from megarl.errors import ConfigError
from megarl.models.huggingface.checkpoint import install_optimizer_state, named_optimizer_state
from megarl.models.huggingface.optimizer import (
    build_optimizer,
    build_scheduler,
    clip,
    schedule_values,
    squared_norm,
)
from tests.tables import read_table

TABLES = read_table("torch_optimizer.yaml")

ADAM: dict[str, Any] = {
    "name": "torch.optim.AdamW",
    "kwargs": {"lr": 0.1, "weight_decay": 0.3, "betas": [0.8, 0.9], "foreach": False},
}
LINEAR = {"name": "torch.optim.lr_scheduler.LinearLR", "kwargs": {"start_factor": 0.1, "total_iters": 3}}
CONSTANT = {"name": "torch.optim.lr_scheduler.ConstantLR", "kwargs": {"factor": 1.0, "total_iters": 9}}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5), nn.Linear(5, 2))


def refusal(call: Any) -> Any:
    with pytest.raises(ConfigError) as caught:
        call()
    assert len(caught.value.violations) == 1
    return caught.value.violations[0]


def test_everything_decays_as_in_torch() -> None:
    ours, plain = model(), model()
    optimizer = build_optimizer({"optimizer": ADAM}, ours.named_parameters())
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.3, 0.3]
    expected = torch.optim.AdamW(plain.parameters(), **ADAM["kwargs"])
    for net, steps in ((ours, optimizer), (plain, expected)):
        for _ in range(3):
            steps.zero_grad()
            net(torch.ones(2, 3)).square().sum().backward()
            steps.step()
    assert all(
        torch.equal(one, other) for one, other in zip(ours.parameters(), plain.parameters(), strict=True)
    )


def test_matrices_decay_and_vectors_do_not() -> None:
    net = model()
    optimizer = build_optimizer(
        {"optimizer": {**ADAM, "weight_decay_on_vectors": False}}, net.named_parameters()
    )
    matrices, vectors = optimizer.param_groups
    assert type(optimizer) is torch.optim.AdamW
    assert [parameter.ndim for parameter in matrices["params"]] == [2, 2] and matrices["weight_decay"] == 0.3
    assert [parameter.ndim for parameter in vectors["params"]] == [1, 1, 1, 1] and vectors[
        "weight_decay"
    ] == 0.0
    assert schedule_values(optimizer) == {"lr": 0.1, "wd": 0.3}


def test_dimensions_are_given_where_shards_are_flat() -> None:
    shards = {
        name: nn.Parameter(parameter.detach().flatten()[:2]) for name, parameter in model().named_parameters()
    }
    dimensions = {name: parameter.ndim for name, parameter in model().named_parameters()}
    optimizer = build_optimizer({"optimizer": ADAM}, shards.items(), dimensions)
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 4]


def test_frozen_parameters_are_left_out_and_no_group_is_empty() -> None:
    net = model()
    for name, parameter in net.named_parameters():
        parameter.requires_grad_(name == "0.weight")
    assert [
        len(group["params"])
        for group in build_optimizer({"optimizer": ADAM}, net.named_parameters()).param_groups
    ] == [1]


def test_an_optimizer_without_weight_decay() -> None:
    optimizer = build_optimizer(
        {"optimizer": {"name": "torch.optim.Rprop", "kwargs": {"lr": 0.5}}}, model().named_parameters()
    )
    assert schedule_values(optimizer) == {"lr": 0.5, "wd": 0.0}


def fused_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group.get("fused") for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("name", "kwargs", "fused"),
    [
        ("AdamW", {}, True),
        ("Adam", {"amsgrad": True}, True),
        ("AdamW", {"foreach": None, "fused": None}, True),
        ("AdamW", {"fused": False}, False),
        ("AdamW", {"foreach": True}, None),
        ("AdamW", {"differentiable": True}, None),
        ("SGD", {}, None),
        ("NAdam", {}, None),
    ],
    ids=str,
)
def test_adam_is_fused_where_no_kernel_is_chosen(
    name: str, kwargs: dict[str, Any], fused: bool | None
) -> None:
    chosen = {"name": f"torch.optim.{name}", "kwargs": {"lr": 0.1, **kwargs}}
    assert fused_of(build_optimizer({"optimizer": chosen}, model().named_parameters())) == [fused] * 2


def trained(net: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[torch.Tensor]:
    """The parameters after a step on each seed's input."""
    for seed in seeds:
        optimizer.zero_grad()
        net(torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
        optimizer.step()
    return [parameter.detach().clone() for parameter in net.parameters()]


def resumed(written: dict[str, Any], reads: dict[str, Any]) -> tuple[bool, list[Any]]:
    """Whether a run that stops after 20 steps and goes on equals one that does not, to the bit; and ``fused``
    afterwards."""

    def of(kwargs: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
        net = model()
        chosen = {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.1, "eps": 1e-3, **kwargs}}
        return net, build_optimizer({"optimizer": chosen}, net.named_parameters())

    net, optimizer = of(written)
    trained(net, optimizer, range(20))
    other, after = of(reads)
    other.load_state_dict(net.state_dict())
    state = copy.deepcopy(named_optimizer_state(optimizer, net.named_parameters()))
    install_optimizer_state(after, other.named_parameters(), state)
    expected, here = trained(net, optimizer, range(20, 60)), trained(other, after, range(20, 60))
    return all(torch.equal(one, two) for one, two in zip(expected, here, strict=True)), fused_of(after)


def test_an_open_kernel_is_the_one_that_wrote_the_checkpoint() -> None:
    plain = {"fused": False, "foreach": False}
    assert resumed({}, {}) == (True, [True, True])
    assert resumed(plain, {}) == (True, [False, False])
    assert resumed({}, {"fused": True}) == (True, [True, True])
    # what the configuration says counts; this is also what shows that the kernels differ in bits
    assert resumed(plain, {"fused": True}) == (False, [True, True])
    assert resumed({}, plain) == (False, [False, False])


def test_a_checkpoint_of_an_older_version_goes_on_with_the_plain_kernel() -> None:
    net, old = model(), model()
    before = torch.optim.AdamW(list(old.parameters()), lr=0.1, foreach=None, fused=None)
    after = build_optimizer(
        {"optimizer": {"name": "torch.optim.AdamW", "kwargs": {"lr": 0.3}}}, net.named_parameters()
    )
    trained(old, before, range(20))
    state = copy.deepcopy(named_optimizer_state(before, old.named_parameters()))
    matrices, vectors = (
        [name for name, parameter in net.named_parameters() if (parameter.ndim > 1) is big]
        for big in (True, False)
    )
    (group,) = state["param_groups"]
    state["param_groups"] = [{**group, "params": matrices}, {**group, "params": vectors}]
    net.load_state_dict(old.state_dict())
    install_optimizer_state(after, net.named_parameters(), state)
    assert fused_of(after) == [None, None] and after.param_groups[0]["lr"] == 0.1
    pairs = zip(trained(net, after, range(20, 60)), trained(old, before, range(20, 60)), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize(
    ("chosen", "key", "words"),
    TABLES["wrong optimizers are refused"],
)
def test_wrong_optimizers_are_refused(chosen: Any, key: str, words: str) -> None:
    violation = refusal(lambda: build_optimizer({"optimizer": chosen}, model().named_parameters()))
    assert violation.key == key and words in violation.bound and violation.fix


def rates(scheduler: Any, steps: int) -> list[float]:
    optimizer = build_optimizer({"optimizer": ADAM}, model().named_parameters())
    schedule = build_scheduler({"scheduler": scheduler}, optimizer)
    seen = []
    for _ in range(steps):
        seen.append(optimizer.param_groups[1]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return seen


def test_schedules() -> None:
    assert rates(None, 3) == [0.1] * 3
    assert rates(LINEAR, 5) == pytest.approx([0.01, 0.04, 0.07, 0.1, 0.1])
    assert rates([LINEAR], 5) == rates(LINEAR, 5)
    halves = {"name": "torch.optim.lr_scheduler.StepLR", "kwargs": {"step_size": 1, "gamma": 0.5}}
    assert rates([LINEAR, CONSTANT, halves, {"milestones": [3, 5]}], 8) == pytest.approx(
        [0.01, 0.04, 0.07, 0.1, 0.1, 0.1, 0.05, 0.025]
    )


@pytest.mark.parametrize(
    ("chosen", "key", "words"),
    TABLES["wrong schedules are refused"],
)
def test_wrong_schedules_are_refused(chosen: Any, key: str, words: str) -> None:
    optimizer = build_optimizer({"optimizer": ADAM}, model().named_parameters())
    if chosen == []:
        assert isinstance(
            build_scheduler({"scheduler": chosen}, optimizer), torch.optim.lr_scheduler.ConstantLR
        )
        return
    violation = refusal(lambda: build_scheduler({"scheduler": chosen}, optimizer))
    assert violation.key == key and words in violation.bound and violation.fix


def test_clipping_is_that_of_torch() -> None:
    net = model()
    net(torch.randn(4, 3)).square().sum().backward()
    gradients = [parameter.grad for parameter in net.parameters()]
    expected = [gradient.clone() for gradient in gradients]
    copies = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(copies, expected, strict=True):
        parameter.grad = gradient
    norm = float(squared_norm(gradients, torch.device("cpu")).sqrt())
    clip(gradients, norm, None)
    clip(gradients, norm, 0.0)
    clip(gradients, norm, norm * 2)
    assert all(
        torch.equal(gradient, parameter.grad) for gradient, parameter in zip(gradients, copies, strict=True)
    )
    total = torch.nn.utils.clip_grad_norm_(copies, norm / 3)
    clip(gradients, norm, norm / 3)
    assert norm == pytest.approx(float(total))
    for gradient, parameter in zip(gradients, copies, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)
    assert float(squared_norm([], torch.device("cpu"))) == 0.0
