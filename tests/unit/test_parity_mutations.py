"""Known faults go in and come out again, and each names a feature that exists."""

from __future__ import annotations

import contextlib
import inspect
import random
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from megarl.errors import ConfigError
from megarl.models.engine import step
from megarl.parity.batches import token_batch, with_signals
from megarl.parity.case import BACKENDS, Case
from megarl.parity.compare import Difference
from megarl.parity.draw_loss import draw_loss
from megarl.parity.faults.mutations import GROUPS, MUTATIONS, applied, mutation, named
from megarl.parity.faults.patching import found, replacing
from megarl.parity.jobs import with_signals_made
from megarl.parity.lines import parse, words_of
from megarl.parity.losses import make_loss
from megarl.parity.possible import _own_violations
from megarl.parity.prove import _above_noise
from megarl.parity.runner import CaseOutcome
from megarl.patched import patched
from tests.dist.test_parity_fuzzer import FAULTS, HALF_FAULTS
from tests.tiers import sampled
from tests.unit.test_policy_gradients import given_to


def test_an_unknown_fault_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"'norm' ?: there is none.*norm-counts-copies") as caught:
        mutation("norm")
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_fault_says_what_it_is_and_where_it_belongs(name: str) -> None:
    fault = mutation(name)
    assert fault.what and set(fault.backends) <= set(BACKENDS)
    for needs in fault.each_need:
        parse(needs)


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


def cases_of(name: str, needs: str, count: int) -> Iterator[Case]:
    """Cases with further options of their loss and their advantages where a fault must be seen."""
    generator, fault = random.Random(f"{name} {needs}"), mutation(name)
    fixed: dict[str, Any] = {"mbs": 2, "micro": 3, "length": 12, **words_of(needs)}
    found = 0
    for _ in range(400):
        drawn = draw_loss(generator, fixed.get("loss"), fixed.get("advantages"))
        case = replace(Case(), **{**fixed, **drawn}, seed=generator.randrange(10**6))
        assert not _own_violations(case), str(case)
        if fault.applies(case):
            yield case
            found += 1
            if found == count:
                return
    raise AssertionError(f"{name} applies to {found} of 400 cases with {needs}")


def results(case: Case, name: str | None) -> tuple[torch.Tensor, dict[str, float]]:
    """What the loss of a case makes of its batch, cut into micro-batches, with a fault in it: its gradient by what it reads of the model,
    and its metrics summed up."""
    generator = torch.Generator().manual_seed(case.seed)
    logprobs = -torch.rand(case.total_rows, case.length, generator=generator) - 0.5
    batch: Mapping[str, torch.Tensor] = with_signals(case, token_batch(case), logprobs)
    further = (0.8 * torch.randn(case.total_rows, case.length, case.vocab, generator=generator)).log_softmax(-1)
    entropies = 0.3 - 0.7 * logprobs.flip(0)
    scores = torch.cat([logprobs[None], entropies[None], *further.permute(2, 0, 1)[:, None]]).requires_grad_()
    total, metrics = torch.zeros(()), Counter[str]()
    with applied(name, case):
        batch = with_signals_made(case, batch)
        loss_fn = make_loss(case)
        for first in range(0, case.total_rows, case.global_batch):
            step = slice(first, first + case.global_batch)
            sequences = batch["sample_mask"][step].sum()
            tokens = (batch["token_mask"][step, 1:] * batch["sample_mask"][step, None]).sum()
            for row in range(first, first + case.global_batch, case.mbs):
                part = {key: value[row : row + case.mbs] for key, value in batch.items()}
                loss, found = loss_fn(part, sequences, tokens, **read_by(case, loss_fn, scores[:, row : row + case.mbs], part))
                total = total + loss
                metrics.update({metric: float(value) for metric, value in found.items()})
    return torch.autograd.grad(total, scores)[0], dict(metrics)


def read_by(case: Case, loss_fn: Any, scores: torch.Tensor, part: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a loss reads of the model, of [2 + vocabulary, B, S]: values, or log-probabilities with entropies or those of further tokens."""
    if case.scores:
        return {"values": scores[0]}
    if case.loss_kind != "distill":
        return given_to(loss_fn, scores[:2, :, 1:])
    further = scores[2:].permute(1, 2, 0)[:, :-1].gather(2, part["teacher_topk_indices"][:, :-1])
    return {"next_token_logprobs": scores[0, :, 1:], "scored_logprobs": further}


# those of how a worker deals, scores and computes are not seen by a loss alone
IN_WORKERS = (
    *("likeliest-of-own-vocabulary", "likeliest-at-another-temperature", "teachers-tokens-of-other-ranks-left-out"),
    *("teachers-tokens-of-the-next-position", "teachers-gradient-off-the-sampled-token", "score-gradient-of-one-run"),
)
PLANTED = [(name, needs) for name, fault in GROUPS["losses"].items() if name not in IN_WORKERS for needs in fault.each_need]


@sampled(20)
@pytest.mark.parametrize(("name", "needs"), PLANTED)
def test_a_fault_of_a_loss_is_seen_wherever_it_applies(name: str, needs: str) -> None:
    for case in cases_of(name, needs, 3):
        gradient, metrics = results(case, None)
        faulty_gradient, faulty = results(case, name)
        apart = float((faulty_gradient - gradient).norm() / gradient.norm())
        others = [metric for metric, value in metrics.items() if abs(faulty[metric] - value) > 1e-4 * max(abs(value), 1e-2)]
        assert apart > 1e-4 or others, str(case)


@pytest.mark.parametrize(("name", "line"), [*FAULTS.items(), *HALF_FAULTS.items()])
def test_the_cases_in_which_workers_have_a_fault_are_such_that_it_must_be_seen(name: str, line: str) -> None:
    assert mutation(name).applies(parse(line))


def test_a_group_of_faults_is_all_of_its_faults() -> None:
    assert named("losses") == list(GROUPS["losses"]) and named("whitened-by-rank") == ["whitened-by-rank"]
    with pytest.raises(ConfigError, match="there is none"):
        named("loss")
