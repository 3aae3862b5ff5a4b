"""The proof of the fuzzer passes only where every fault was put into a case and caught there. No worker is started here."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console

from megarl.errors import ConfigError
from megarl.parity import prove
from megarl.parity.case import Case
from megarl.parity.compare import Difference
from megarl.parity.faults.patching import Mutation
from megarl.parity.runner import CaseOutcome


class Drawer:
    """Draws cases that have what is fixed, and nothing else."""

    def __init__(self, fixed: dict[str, Any] | None = None, backends: tuple[str, ...] = ("megatron", "fsdp1")) -> None:
        self.fixed, self.backends = fixed or {}, backends

    def narrowed(self, fixed: dict[str, Any]) -> Drawer:
        return Drawer({**self.fixed, **fixed}, self.backends)

    def draw(self, seed: int, number: int) -> Case:
        if "cp" in self.fixed:
            raise ConfigError("the rules refuse them all")
        return Case(seed=number, **self.fixed)


class Runner:
    """Sees every fault but one in nll."""

    def __init__(self) -> None:
        self.ran: list[tuple[Case, str | None]] = []

    def run(self, case: Case, name: str | None = None) -> CaseOutcome:
        self.ran.append((case, name))
        error = 1.0 if name and case.loss_kind != "nll" else 0.0
        return CaseOutcome(case, [Difference("loss", "loss", error, 1e-5, "", "")])


def proved(
    monkeypatch: pytest.MonkeyPatch, needs: str | tuple[str, ...], applies: Callable[[Case], bool] = bool
) -> tuple[int, Runner, str]:
    fault = Mutation("something is wrong", applies, lambda stack, case: None, needs, ("megatron", "fsdp1"))
    monkeypatch.setattr(prove, "MUTATIONS", {"fault": fault})
    console, runner = Console(file=io.StringIO(), width=300), Runner()
    code = prove.prove(runner, Drawer(), 0, console, ["fault"])  # type: ignore[arg-type]
    assert isinstance(console.file, io.StringIO)
    return code, runner, console.file.getvalue()


def test_a_fault_that_is_caught_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    code, runner, said = proved(monkeypatch, "loss=pg")
    assert code == 0 and "4 of 4 faults caught" in said
    assert {case.backend for case, _ in runner.ran} == {"megatron", "fsdp1"}


def test_a_fault_that_survives_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    code, _, said = proved(monkeypatch, "loss=nll")
    assert code == 1 and "SURVIVED fault on megatron" in said


@pytest.mark.parametrize("reason", ["no draw", "nowhere"])
def test_a_fault_that_was_put_into_no_case_fails(monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    if reason == "no draw":
        code, runner, said = proved(monkeypatch, "loss=pg cp=2")
    else:
        code, runner, said = proved(monkeypatch, "loss=pg", lambda case: False)
    assert code == 1 and runner.ran == [] and "NO CASE fault on megatron" in said


def test_what_a_backend_or_16_bit_cannot_have_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    code, runner, said = proved(monkeypatch, "loss=pg tp=2")
    assert code == 0 and {case.backend for case, _ in runner.ran} == {"megatron"} and "no feature" in said
    code, runner, said = proved(monkeypatch, "loss=pg keep=5")
    assert code == 0 and {case.precision for case, _ in runner.ran} == {"float32"}


def test_every_loss_of_a_fault_is_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ("loss=pg", "loss=dpo", "loss=distill")
    code, runner, _ = proved(monkeypatch, needs)
    in_float32 = {(case.loss_kind, case.backend) for case, _ in runner.ran if case.precision == "float32"}
    assert code == 0
    assert in_float32 == {("pg", "megatron"), ("pg", "fsdp1"), ("dpo", "fsdp1"), ("distill", "megatron")}
    assert proved(monkeypatch, ("loss=pg", "loss=nll"))[0] == 1
