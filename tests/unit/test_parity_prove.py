"""The proof passes only where every fault was caught in the cases that have to show it. No worker is started
here."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.parity.case import Case
from megarl.parity.compare import Difference
from megarl.parity.faults import Fault
from megarl.parity.prove import cases_of, is_above_noise, prove
from megarl.parity.runner import CaseOutcome

BACKENDS = ("megatron", "fsdp1")


class Runner:
    """Shows every fault in the loss, but none in nll, and in 16 bit none at all; with sgd workers die, clean
    or not as it says."""

    def __init__(self, broken: bool = False) -> None:
        self.ran: list[tuple[str, bool]] = []
        self._broken = broken

    def possible(self, case: Case) -> bool:
        return case.cp == 1

    def run(self, case: Case, fault: Fault | None = None) -> CaseOutcome:
        self.ran.append((str(case), fault is not None))
        if case.optimizer == "sgd" and (fault is not None or self._broken):
            return CaseOutcome(case, error="it died")
        error = 1.0 if fault is not None and case.loss_kind != "nll" and not case.half else 0.0
        return CaseOutcome(case, [Difference("loss", "loss", error, 1e-5, "", "")])


def proved(
    *given: Fault,
    backends: Sequence[str] = BACKENDS,
    broken: bool = False,
    file: Path | None = None,
    **fixed: Any,
) -> tuple[int, Runner, str]:
    faults: Mapping[str, Fault] = {f"fault-{number}": fault for number, fault in enumerate(given)}
    console, runner = Console(file=io.StringIO(), width=300), Runner(broken)
    cases = {name: cases_of(fault, backends, 2, 5, fixed) for name, fault in faults.items()}
    code = prove(runner, faults, cases, console, file)  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return code, runner, console.file.getvalue()


def of(*lines: str, kind: str = "loss") -> Fault:
    return Fault("module", "old", "new", lines, kind)


def test_cases_are_lines_on_the_backends_that_have_what_they_ask_for() -> None:
    fault = of("tp=2 loss=pg", "backend=fsdp1 dp=2", "seed=3 dp=4", "mbs=2")
    assert [str(case) for case in cases_of(fault, BACKENDS, 2, 5, {"length": 9})] == [
        "backend=megatron seed=5 tp=2 length=9 loss=pg",
        "backend=fsdp1 seed=5 dp=2 length=9",
        "backend=megatron seed=5 mbs=2 length=9",
        "backend=fsdp1 seed=5 mbs=2 length=9",
    ]


def test_a_fault_that_is_caught_passes_and_is_written_down(tmp_path: Path) -> None:
    code, runner, told = proved(
        of("loss=pg"), of("loss=pg", "loss=dpo mbs=2"), file=tmp_path / "verdicts.json"
    )
    assert code == 0 and "2 of 2 faults caught, in 6 cases" in told
    # a case is run once without a fault, whatever the number of faults that it has to show
    assert len(runner.ran) == 4 + 6 and sum(not planted for _, planted in runner.ran) == 4
    verdicts = json.loads((tmp_path / "verdicts.json").read_text())
    assert len(verdicts) == 6 and verdicts[0] == {
        "name": "fault-0",
        "case": "backend=megatron seed=5 loss=pg",
        "state": "caught",
        "detail": "loss (1)",
    }


@pytest.mark.parametrize(
    "fault", [of("loss=nll", "loss=pg"), of("loss=pg", kind="weights"), of("loss=pg optimizer=sgd")]
)
def test_a_fault_has_to_be_caught_in_every_case_by_its_kind_of_quantity(fault: Fault) -> None:
    code, _, told = proved(fault)
    assert (
        code == 1
        and "SURVIVED: megarl parity --mutate fault-0 --case" in told
        and "0 of 1 faults caught" in told
    )
    assert "survives: fault-0: old -> new" in told


def test_one_without_a_kind_has_to_be_caught_in_one_case() -> None:
    code, runner, _ = proved(of("loss=nll", "loss=pg", "loss=dpo mbs=2", kind=""))
    assert code == 0 and not any("dpo" in case for case, _ in runner.ran)
    assert proved(of("loss=nll", kind=""))[0] == 1
    assert proved(of("loss=pg optimizer=sgd", kind=""))[0] == 0


def test_a_case_that_fails_without_a_fault_shows_nothing() -> None:
    for kind in ("", "loss"):
        code, _, told = proved(of("loss=pg optimizer=sgd", kind=kind), broken=True)
        assert code == 1 and "fails without the fault" in told


def test_a_fault_without_a_case_is_named_and_nothing_caught_is_a_failure() -> None:
    code, runner, told = proved(of("loss=pg cp=2"), of("loss=pg dp=8"))
    assert (
        code == 1
        and runner.ran == []
        and "2 have no case that these arguments allow: fault-0, fault-1" in told
    )
    assert proved(of("loss=pg"), of("dp=8"))[0] == 0


def test_in_16_bit_a_small_effect_may_be_below_the_noise() -> None:
    code, runner, told = proved(of("loss=nll"), precision="bfloat16")
    assert (
        code == 0
        and "below noise" in told
        and any("precision" not in case for case, planted in runner.ran if planted)
    )
    assert proved(of("loss=pg"), precision="bfloat16")[0] == 1


def test_a_fault_is_below_noise_only_where_its_effect_is_not_twice_the_bound() -> None:
    def outcome(error: float, bound: float, kind: str = "grad_norm") -> CaseOutcome:
        case = Case(precision="bfloat16")
        return CaseOutcome(
            case,
            [Difference("loss", "loss", 0.0, 1e-5, "", ""), Difference("norm", kind, error, bound, "", "")],
        )

    in_16_bit = outcome(1e-3, 1e-2)
    assert is_above_noise(in_16_bit, outcome(0.021, 1e-5))
    assert not is_above_noise(in_16_bit, outcome(0.019, 1e-5))
    assert is_above_noise(in_16_bit, CaseOutcome(Case(), error="it died"))
    # an exported weight is rounded to bfloat16, whose steps are up to 2^-7
    rounded = outcome(1e-3, 1e-2, "weights")
    assert not is_above_noise(rounded, outcome(0.02 + 0.9 * 2**-7, 1e-5, "weights"))
    assert is_above_noise(rounded, outcome(0.02 + 1.1 * 2**-7, 1e-5, "weights"))
