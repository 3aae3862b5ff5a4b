"""Adam on stored states: against a loop in float64 over single numbers, against float32 over 200 steps, and
against ``torch.optim``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from megarl.models.engine import state_formats
from megarl.models.engine.low_precision_adam import (
    MASTER,
    MOMENTS,
    Hyperparameters,
    LowPrecisionAdamW,
    Shard,
    StateSettings,
    step_shard,
)
from megarl.models.engine.state_formats import BLOCK
from tests.tiers import sampled

COUNT = BLOCK + 41
CPU = torch.device("cpu")
SETTINGS = {
    "float32": StateSettings(),
    "bf16": StateSettings("bfloat16", "bfloat16", "bfloat16", seed=3),
    "8bit": StateSettings("float32", "8bit", "8bit", seed=3),
    "no-master-8bit": StateSettings("bfloat16", "8bit", "8bit", seed=3),
}


def by_hand(
    weight: float, gradient: float, mean: float, square: float, numbers: Hyperparameters
) -> tuple[float, float, float]:
    """Algorithm 2 of arXiv:1711.05101 for one number (its schedule multiplier is the learning rate)."""
    first, second = numbers.betas
    gradient *= numbers.gradient_factor
    if not numbers.decoupled:
        gradient += numbers.weight_decay * weight
    mean = first * mean + (1 - first) * gradient
    square = second * square + (1 - second) * gradient**2
    unbiased = mean / (1 - first**numbers.step), square / (1 - second**numbers.step)
    decay = numbers.lr * numbers.weight_decay * weight if numbers.decoupled else 0.0
    return weight - decay - numbers.lr * unbiased[0] / (math.sqrt(unbiased[1]) + numbers.eps), mean, square


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_that_of_a_loop_over_numbers(
    settings: StateSettings, precision: torch.dtype, decoupled: bool
) -> None:
    """Each step begins with what the formats say, so that what is compared is one step and one rounding."""
    generator = torch.Generator().manual_seed(2)
    weights = torch.randn(COUNT, generator=generator).to(precision)
    master = weights.float() if settings.master == "float32" and precision is torch.bfloat16 else None
    moments = {name: settings.format_of(name).zeros(COUNT, CPU) for name in MOMENTS}
    for step in range(1, 6):
        gradient = torch.randn(COUNT, generator=generator).to(precision)
        numbers = Hyperparameters(
            0.01, (0.8, 0.9), 1e-8, 0.3, step, decoupled, gradient_factor=0.5 if step % 2 else 1.0
        )
        before = [(weights if master is None else master).double(), gradient.double()]
        before += [settings.format_of(name).read(moments[name], 0, COUNT).double() for name in MOMENTS]
        expected = torch.tensor(
            [by_hand(*row, numbers) for row in zip(*(each.tolist() for each in before), strict=True)]
        )
        step_shard(Shard("w", 7, weights, gradient, moments, master), settings, numbers)
        stepped = weights if master is None else master
        tolerance = 2**-7 if stepped.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(stepped.float(), expected[:, 0].float(), rtol=tolerance, atol=1e-6)
        for name, column in zip(MOMENTS, expected.T[1:], strict=True):
            kind = getattr(settings, name)
            found = settings.format_of(name).read(moments[name], 0, COUNT)
            width = {"float32": 1e-5, "bfloat16": 2**-7, "8bit": 0.126}[kind]
            least = state_formats.FORMATS[name]["8bit"].least if kind == "8bit" else 1e-7  # type: ignore[attr-defined]
            torch.testing.assert_close(
                found, column.float(), rtol=width, atol=least * float(column.abs().max())
            )
        if master is not None:
            assert torch.equal(weights, master.to(precision))


def test_a_step_is_a_function_of_seed_step_name_and_position() -> None:
    generator = torch.Generator().manual_seed(4)
    weights, gradient = (torch.randn(2 * BLOCK, generator=generator).bfloat16() for _ in range(2))

    def stepped(parts: int = 1, name: str = "w", step: int = 1, seed: int = 1) -> list[torch.Tensor]:
        """Weights and moments of all parts."""
        settings, found, size = (
            StateSettings("bfloat16", "8bit", "bfloat16", seed=seed),
            [],
            2 * BLOCK // parts,
        )
        for first in range(0, 2 * BLOCK, size):
            own = weights[first : first + size].clone()
            moments = {moment: settings.format_of(moment).zeros(size, CPU) for moment in MOMENTS}
            shard = Shard(name, first, own, gradient[first : first + size], moments, None)
            step_shard(shard, settings, Hyperparameters(0.1, (0.9, 0.99), 1e-8, 0.0, step))
            found.append(
                [
                    own.float(),
                    *(settings.format_of(moment).read(moments[moment], 0, size) for moment in MOMENTS),
                ]
            )
        return [torch.cat(column) for column in zip(*found, strict=True)]

    plain = stepped()
    assert all(torch.equal(*pair) for pair in zip(plain, stepped(parts=2), strict=True))
    for other in (stepped(name="v"), stepped(step=2), stepped(seed=2)):
        assert all(not torch.equal(*pair) for pair in zip(plain, other, strict=True))


# 200 steps

STEPS, SEEDS = 200, 8


def train(settings: StateSettings, precision: torch.dtype) -> float:
    """Mean loss of the last 20 of 200 steps towards a teacher; inputs differ in size a thousand times, and
    gradients with them."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 5))
    student = nn.Sequential(nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 5)).to(precision)
    optimizer = adam_of(student, settings, lr=3e-3)
    losses, sizes = [], torch.logspace(-2, 1, 24)
    for step in range(STEPS):
        inputs = torch.randn(64, 24, generator=torch.Generator().manual_seed(step)) * sizes
        loss = (student(inputs.to(precision)).float() - teacher(inputs).detach()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return sum(losses[-20:]) / 20


def adam_of(model: nn.Module, settings: StateSettings, **options: Any) -> LowPrecisionAdamW:
    optimizer = LowPrecisionAdamW(model.parameters(), **options)
    places = {parameter: (name, 0) for name, parameter in model.named_parameters()}
    optimizer.settings, optimizer.place_of = settings, places.__getitem__
    return optimizer


CASES: Mapping[str, tuple[torch.dtype, Mapping[str, str]]] = {
    "bf16": (torch.float32, {"exp_avg": "bfloat16", "exp_avg_sq": "bfloat16"}),
    "8bit": (torch.float32, {"exp_avg": "8bit", "exp_avg_sq": "8bit"}),
    "no-master": (torch.bfloat16, {"master": "bfloat16"}),
}


@sampled(1)
@pytest.mark.parametrize("case", CASES)
def test_200_steps_lead_to_where_float32_leads(case: str) -> None:
    """Float32's loss lies among those of eight roundings, within twice their spread, which is small; rounded
    to the nearest they lie elsewhere."""
    precision, formats = CASES[case]
    expected = train(StateSettings(), precision)
    found = torch.tensor(
        [train(StateSettings(**formats, seed=seed), precision) for seed in range(SEEDS)], dtype=torch.float64
    )
    spread, share = float(found.std()), 0.02 if precision is torch.float32 else 0.1
    assert 0 < spread < share * expected, (spread, expected)
    assert abs(float(found.mean()) - expected) < 2 * spread, (found, expected)
    with pytest.MonkeyPatch.context() as patch:
        for kind in (state_formats.BFloat16, state_formats.Blockwise):
            patch.setattr(kind, "write", to_nearest(kind.write))
        assert abs(train(StateSettings(**formats), precision) - expected) > 4 * spread


def to_nearest(write: Callable[..., None]) -> Callable[..., None]:
    return lambda form, stored, first, values, bits: write(form, stored, first, values, None)


# torch's interface


def step_on(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.randn(6, 19, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()


def linear() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(19, 23)


def test_a_float32_state_steps_as_torch() -> None:
    ours, theirs = linear(), linear()
    step_on(ours, adam_of(ours, StateSettings(), lr=0.01, weight_decay=0.2), 4)
    step_on(theirs, torch.optim.AdamW(theirs.parameters(), lr=0.01, weight_decay=0.2, fused=True), 4)
    assert all(torch.equal(*pair) for pair in zip(ours.parameters(), theirs.parameters(), strict=True))


@pytest.mark.parametrize(
    "formats", [("bfloat16", "bfloat16"), ("8bit", "8bit"), ("float32", "8bit")], ids=str
)
def test_state_goes_out_and_comes_back(formats: tuple[str, str]) -> None:
    settings = StateSettings("float32", *formats, seed=9)
    model = linear()
    optimizer = adam_of(model, settings, lr=0.01)
    step_on(model, optimizer, 3)
    saved, other = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model)
    assert {key: value.dtype for key, value in saved["state"][0].items()} == dict.fromkeys(
        ("step", *MOMENTS), torch.float32
    )
    assert saved["state"][0]["exp_avg"].shape == (23, 19) and MASTER not in saved["state"][0]
    resumed = adam_of(other, settings, lr=0.01)
    resumed.load_state_dict(saved)
    for net, steps in ((model, optimizer), (other, resumed)):
        step_on(net, steps, 3)
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))
    # torch reads it, and ours reads torch's
    plain = torch.optim.AdamW(other.parameters(), lr=0.01)
    plain.load_state_dict(saved)
    step_on(other, plain, 1)
    resumed.load_state_dict(plain.state_dict())
    step_on(other, resumed, 1)
    assert int(resumed.state[next(other.parameters())]["step"]) == 5
