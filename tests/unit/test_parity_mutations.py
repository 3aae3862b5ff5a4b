"""Known faults go in and come out again, and each names a feature that exists."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.errors import ConfigError
from megarl.models.engine import step
from megarl.parity.batches import token_batch, with_signals
from megarl.parity.case import BACKENDS, LOSS_CHOICES, LOSS_OPTIONS, LOSS_VARIANTS, Case
from megarl.parity.compare import Difference
from megarl.parity.faults import losses
from megarl.parity.faults.mutations import MUTATIONS, applied, mutation
from megarl.parity.faults.patching import found, replacing
from megarl.parity.jobs import with_advantages
from megarl.parity.lines import parse, words_of
from megarl.parity.losses import make_loss
from megarl.parity.possible import _own_violations
from megarl.parity.prove import _above_noise
from megarl.parity.runner import CaseOutcome
from megarl.patched import patched
from tests.unit.test_policy_gradients import given_to


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'norm' ?: there is none.*norm-counts-copies") as caught:
        mutation("norm")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_says_what_it_is_and_where_it_belongs(name: str) -> None:
    fault = mutation(name)
    assert fault.what and set(fault.backends) <= set(BACKENDS)
    parse(fault.needs)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_goes_in_and_comes_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    touched: list[tuple[Any, str, Any, Any]] = []

    def noted(*replacements: tuple[Any, str, Any]) -> contextlib.AbstractContextManager[None]:
        touched.extend((owner, attribute, vars(owner)[attribute], value) for owner, attribute, value in replacements)
        return patched(*replacements)

    monkeypatch.setattr("megarl.parity.faults.patching.patched", noted)
    case = Case(backend=mutation(name).backends[0])
    with applied(name, case):
        put_in = list(touched)
        assert put_in
        for owner, attribute, original, value in put_in:
            assert vars(owner)[attribute] is value is not original
            takes_what_the_other_takes(value, original)
    for owner, attribute, original, _ in put_in:
        assert vars(owner)[attribute] is original


def takes_what_the_other_takes(stand_in: Any, original: Any) -> None:
    """A stand-in that has not heard of a new argument would crash, which proves nothing."""
    if not (inspect.isfunction(stand_in) and inspect.isfunction(original)):
        return
    wanted = inspect.signature(original).parameters.values()
    by_place = [None for parameter in wanted if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD}]
    by_name = {parameter.name: None for parameter in wanted if parameter.kind is parameter.KEYWORD_ONLY}
    inspect.signature(stand_in).bind(*by_place, **by_name)


def test_nothing_is_put_in_without_a_name() -> None:
    before = dict(vars(step))
    with applied(None, Case()):
        assert dict(vars(step)) == before


def test_a_fault_in_something_that_is_gone_is_an_error() -> None:
    with contextlib.ExitStack() as stack, pytest.raises(AttributeError):
        replacing("megarl.models.engine.step", "no_such_function", lambda original: original)(stack, Case())


def test_places_are_modules_or_classes() -> None:
    assert found("megarl.models.engine.step") is step
    assert found("megarl.parity.case:Case") is Case


def test_a_fault_is_below_noise_only_where_its_effect_is_not_twice_the_bound() -> None:
    def outcome(error: float, bound: float, kind: str = "grad_norm") -> CaseOutcome:
        case = Case(precision="bfloat16")
        return CaseOutcome(case, [Difference("loss", "loss", 0.0, 1e-5, "", ""), Difference("norm", kind, error, bound, "", "")])

    in_16_bit = outcome(1e-3, 1e-2)
    assert _above_noise(in_16_bit, outcome(0.021, 1e-5))
    assert not _above_noise(in_16_bit, outcome(0.019, 1e-5))
    assert _above_noise(in_16_bit, CaseOutcome(Case(), error="it died"))
    # an exported weight is rounded to bfloat16, whose steps are up to 2^-7
    rounded = outcome(1e-3, 1e-2, "weights")
    assert not _above_noise(rounded, outcome(0.02 + 0.9 * 2**-7, 1e-5, "weights"))
    assert _above_noise(rounded, outcome(0.02 + 1.1 * 2**-7, 1e-5, "weights"))


def cases_of(name: str, count: int) -> Iterator[Case]:
    """Cases with further options of their loss where a fault must be seen."""
    generator, fault = random.Random(name), mutation(name)
    fixed: dict[str, Any] = {"mbs": 2, "micro": 3, "length": 12, **words_of(fault.needs)}
    found = 0
    for _ in range(400):
        kind, *options = str(fixed["loss"]).split("+")
        others = [option for option in (*LOSS_OPTIONS[kind], *LOSS_VARIANTS[kind]) if option not in options]
        drawn = generator.sample(others, min(len(others), generator.randint(0, 3)))
        case = replace(Case(), **fixed, seed=generator.randrange(10**6))
        case = replace(case, loss="+".join([kind, *options, *drawn]))
        if any(len(set(drawn + options) & set(choice)) > 1 for choice in LOSS_CHOICES) or _own_violations(case) or not fault.applies(case):
            continue
        yield case
        found += 1
        if found == count:
            return
    raise AssertionError(f"{name} applies to {found} of 400 cases")


def loss_and_gradient(case: Case, name: str | None) -> tuple[float, torch.Tensor]:
    """What the loss of a case makes of its batch, cut into micro-batches, with a fault in it; its gradient by log-probabilities, and by
    entropies as far as it reads them."""
    logprobs = -torch.rand(case.total_rows, case.length, generator=torch.Generator().manual_seed(case.seed)) - 0.5
    batch: Mapping[str, torch.Tensor] = with_signals(case, token_batch(case), logprobs)
    entropies = 0.3 - 0.7 * logprobs.flip(0)
    scores = torch.stack([logprobs, entropies])[..., 1:].requires_grad_()
    total = torch.zeros(())
    with applied(name, case):
        batch = with_advantages(case, batch)
        loss_fn = make_loss(case)
        for first in range(0, case.total_rows, case.global_batch):
            step = slice(first, first + case.global_batch)
            sequences = batch["sample_mask"][step].sum()
            tokens = (batch["token_mask"][step, 1:] * batch["sample_mask"][step, None]).sum()
            for row in range(first, first + case.global_batch, case.mbs):
                part = {key: value[row : row + case.mbs] for key, value in batch.items()}
                given = given_to(loss_fn, scores[:, row : row + case.mbs])
                total = total + loss_fn(part, sequences, tokens, **given)[0]
    return float(total.detach()), torch.autograd.grad(total, scores)[0]


OF_A_TEACHER = (
    "teachers-columns-shifted",
    "divergence-the-other-way-round",
    "other-tokens-left-out",
    "divergence-normalised-a-micro-batch",
)


@pytest.mark.parametrize("name", [*losses.FAULTS, *OF_A_TEACHER])
def test_a_fault_of_a_loss_is_seen_wherever_it_applies(name: str) -> None:
    for case in cases_of(name, 6):
        loss, gradient = loss_and_gradient(case, None)
        faulty, faulty_gradient = loss_and_gradient(case, name)
        apart = float((faulty_gradient - gradient).norm() / gradient.norm())
        assert apart > 1e-4 or abs(faulty - loss) > 1e-4 * abs(loss), str(case)
