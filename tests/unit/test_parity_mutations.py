"""Known faults go in and come out again, and each names a feature that exists."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest

from megarl.errors import ConfigError
from megarl.models.engine import step
from megarl.parity.case import BACKENDS, Case
from megarl.parity.compare import Difference
from megarl.parity.faults.mutations import MUTATIONS, applied, mutation
from megarl.parity.faults.patching import found, replacing
from megarl.parity.lines import parse
from megarl.parity.prove import _above_noise
from megarl.parity.runner import CaseOutcome
from megarl.patched import patched


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
