"""Faults go into functions that were imported before and come out again, and each fits its module and names
cases that there are."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from megarl.errors import ConfigError
from megarl.models.engine import context
from megarl.models.engine.context import ContextShare
from megarl.parity import faults
from megarl.parity.case import BACKENDS
from megarl.parity.faults import FAULTS, Fault, changed_functions, faults_named, known_faults, planted
from megarl.parity.prove import cases_of
from tests.mutations import parity_faults

SOURCE = '''
import contextlib
import functools

def twice(value):
    """Double a number."""
    return 2 * value

class Number:
    def __init__(self, value):
        self.value = value

    @property
    def next(self):
        return self.value + 1

    @staticmethod
    def of(value):
        return [super_ for super_ in (Number(value),) if super_.value > -5][0]

class Large(Number):
    def __init__(self, value):
        super().__init__(value + 1000)

@functools.lru_cache
def kept(value):
    return twice(value) + 100

@contextlib.contextmanager
def inside(value):
    yield value + 10

LAST = 10 ** 5
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    (tmp_path / "planted_in.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "planted_in", raising=False)
    return importlib.import_module("planted_in")


def answers(twice: object, module: ModuleType) -> list[int]:
    assert callable(twice)
    with module.inside(1) as within:
        return [twice(3), module.Number.of(3).next, module.Large(3).value, module.kept(3), within]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("return 2 * value", "more = 1\n    return 3 * value + more - 1", [9, 4, 1003, 109, 11]),
        ("self.value + 1", "self.value + 2", [6, 5, 1003, 106, 11]),
        ("(Number(value),)", "(Number(0), Number(1))", [6, 1, 1003, 106, 11]),
        ("super().__init__(value + 1000)", "super().__init__(value)", [6, 4, 3, 106, 11]),
        ("twice(value) + 100", "twice(value)", [6, 4, 1003, 6, 11]),
        ("yield value + 10", "yield value", [6, 4, 1003, 106, 1]),
    ],
)
def test_a_fault_goes_into_functions_that_were_imported_before(
    old: str, new: str, expected: list[int], module: ModuleType
) -> None:
    before = [6, 4, 1003, 106, 11]
    twice = module.twice
    assert answers(twice, module) == before
    with pytest.raises(ZeroDivisionError), planted(Fault("planted_in", old, new)):
        assert answers(twice, module) == expected
        raise ZeroDivisionError
    assert answers(twice, module) == before
    assert Path(str(module.__file__)).read_text() == SOURCE


def test_nothing_is_planted_without_a_fault(module: ModuleType) -> None:
    with planted(None):
        assert module.twice(3) == 6


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("return 3 * value", "pass", "'return 3 * value' occurs 0 times"),
        ("value + 1", "value", "occurs 3 times"),
        ("LAST = 10 ** 5", "LAST = 1", "is in no function"),
        ("return 2 * value", "return 2  * value", "does the same"),
        ("super().__init__(value + 1000)", "pass", "closes over other names"),
    ],
)
def test_a_fault_that_changes_nothing_is_refused(old: str, new: str, words: str, module: ModuleType) -> None:
    with pytest.raises(ConfigError, match="fault in planted_in") as caught:
        changed_functions(Fault("planted_in", old, new), module)
    assert words in str(caught.value) and caught.value.exit_code == 2


def test_what_other_functions_of_the_module_keep_is_forgotten() -> None:
    starts, share = (0, 8), ContextShare(0, 2)
    whole = share.index(starts).tolist()
    with planted(
        Fault(context.__name__, "last = 2 * self.size - 1 - self.rank", "last = self.size + self.rank")
    ):
        assert share.index(starts).tolist() == [0, 1, 4, 5]
    assert share.index(starts).tolist() == whole == [0, 1, 6, 7]


# those of a checkout change with the code, and are looked at where they are made (test_mutations)
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_fits_its_module_and_has_a_case_on_every_backend_that_it_names(name: str) -> None:
    fault = FAULTS[name]
    originals = {
        function: function.__code__
        for function in changed_functions(fault, importlib.import_module(fault.module))
    }
    with planted(fault):
        assert all(function.__code__ is not code for function, code in originals.items())
    assert all(function.__code__ is code for function, code in originals.items())
    cases = cases_of(fault, BACKENDS, 8, 3, {})
    assert cases and len(cases) >= len(fault.cases) and {case.seed for case in cases} == {3}


def test_the_faults_show_every_kind_of_quantity_and_family_of_losses() -> None:
    assert {fault.kind for fault in FAULTS.values()} == {"logprobs", "loss", "metric", "grad_norm", "weights"}
    cases = [case for fault in FAULTS.values() for case in cases_of(fault, BACKENDS, 8, 0, {})]
    assert {case.loss_kind for case in cases} == {"nll", "pg", "dpo", "rm", "value", "distill"}
    for kind in {fault.kind for fault in FAULTS.values()}:
        seen = {
            case.backend
            for fault in FAULTS.values()
            if fault.kind == kind
            for case in cases_of(fault, BACKENDS, 8, 0, {})
        }
        assert seen == set(BACKENDS), kind


def test_faults_are_found_by_name_kind_and_module(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(faults_named("ratio-not-clipped")) == ["ratio-not-clipped"]
    assert set(faults_named("weights")) == {name for name, fault in FAULTS.items() if fault.kind == "weights"}
    assert len(faults_named("megarl.models.engine.ring_attention")) > 3
    with pytest.raises(
        ConfigError, match=r"'norm' ?: there is none.*norm-counts-copies.*kinds of them: logprobs, loss"
    ) as caught:
        faults_named("norm")
    assert caught.value.exit_code == 2
    assert known_faults(7) == {**FAULTS, **parity_faults(7)}
    # installed, without the tests
    monkeypatch.setattr(faults, "MUTATIONS", Path("nowhere") / "tests")
    assert known_faults() is FAULTS
