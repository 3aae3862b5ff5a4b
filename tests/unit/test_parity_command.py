"""``megarl parity`` as a user meets it: arguments, exit codes, messages, progress. No worker is started
here."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.cli import main
from megarl.parity import command, faults
from megarl.parity.case import Case
from megarl.parity.compare import Difference
from megarl.parity.faults import Fault
from megarl.parity.runner import CaseOutcome


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--case", "tpp=2"], ["'tpp=2'", "nearest is 'tp'"]),
        (["--case", "tp=2 kv=1"], ["tensor_model_parallel_size", "key-value heads"]),
        (["--case", "backend=fsdp1 pp=2"], ["'pp=2'"]),
        (["--mutate", "norm"], ["'norm'", "norm-counts-copies"]),
        (["--mutate", "weights"], ["--mutate weights: 8 faults", "--prove"]),
        (["--only", "batchin=packed"], ["'batchin=packed'", "nearest is 'batching'"]),
    ],
)
def test_wrong_arguments_end_with_2_and_name_the_word(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *arguments]) == 2
    message = capsys.readouterr().err
    assert message.startswith("megarl: ")
    for word in words:
        assert word in message


def test_the_command_line_reaches_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[command.Options] = []
    monkeypatch.setattr(command, "run", lambda options: seen.append(options) or 0)
    line = (
        "parity --cases 7 --seed 3 --backend megatron dtensor --max-world 4 --only cp=2 --json out.json "
        "--job-seconds 9"
    )
    assert main(line.split()) == 0
    assert seen == [
        command.Options(7, 3, ["megatron", "dtensor"], 4, json=Path("out.json"), only="cp=2", job_seconds=9)
    ]


def difference(error: float, what: str = "loss 0", kind: str = "loss") -> Difference:
    return Difference(what, kind, error, 1e-5, "1", "2")


@pytest.mark.parametrize("checkout", [True, False])
def test_the_help_names_the_tests_mutations_where_they_are(
    checkout: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    if not checkout:
        monkeypatch.setattr(faults, "MUTATIONS", tmp_path / "tests" / "mutations" / "__init__.py")
    with pytest.raises(SystemExit, match="0"):
        main(["parity", "--help"])
    assert ("tests/mutations" in " ".join(capsys.readouterr().out.split())) is checkout


def test_a_proof_plants_what_is_named_in_the_cases_that_the_command_line_allows(
    monkeypatch: pytest.MonkeyPatch, console: Console, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "CaseRunner", Runner)
    options = command.Options(
        seed=4,
        backends=["fsdp1"],
        mutate="grad_norm",
        prove=True,
        only="temperature=0.7",
        json=tmp_path / "out.json",
    )
    assert command.run(options, console) == 1
    cases = {verdict["name"]: verdict["case"] for verdict in json.loads((tmp_path / "out.json").read_text())}
    assert cases["torch-norm-of-own-shard"] == "backend=fsdp1 seed=4 dp=2 mbs=2 length=9 temperature=0.7"
    assert "norm-counts-copies" not in cases and "have no case that these arguments allow" in said(console)


class Runner:
    """In the place of the workers: a case fails when it has two tensor-parallel ranks."""

    def __init__(self, *arguments: Any) -> None:
        self.ran: list[Case] = []

    def possible(self, case: Case) -> bool:
        return True

    def run(self, case: Case, fault: Fault | None = None) -> CaseOutcome:
        self.ran.append(case)
        return CaseOutcome(case, [difference(1.0 if case.tp > 1 else 1e-7)])


@pytest.fixture
def console() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_failure_prints_the_smallest_line_that_shows_it(
    monkeypatch: pytest.MonkeyPatch, console: Console, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "CaseRunner", Runner)
    options = command.Options(cases=12, seed=0, backends=["megatron"], json=tmp_path / "out.json")
    assert command.run(options, console) == 1
    text = said(console)
    assert 'megarl parity --case "backend=megatron seed=' in text and " tp=2" in text
    smallest = next(line for line in text.splitlines() if "smallest" in line)
    assert smallest.split("--case ")[1].strip('"').split()[2:] == ["tp=2"]
    assert "largest relative error of loss: 1.0e-07" in text
    assert (tmp_path / "out.json").read_text().count('"smallest"') == text.count("FAILED")


def test_no_answer_is_no_mismatch_and_is_not_shrunk(
    monkeypatch: pytest.MonkeyPatch, console: Console, tmp_path: Path
) -> None:
    class Late(Runner):
        def run(self, case: Case, fault: Fault | None = None) -> CaseOutcome:
            self.ran.append(case)
            assert len(self.ran) <= 3, "it is not run again"
            return CaseOutcome(case, error="ranks [0] of measure gave no result in 7 s", timed_out=True)

    monkeypatch.setattr(command, "CaseRunner", Late)
    assert command.run(command.Options(cases=3, json=tmp_path / "out.json", job_seconds=7), console) == 1
    assert said(console).count("NO RESULT in 7 s") == 3 and "FAILED" not in said(console)
    assert "3 gave no result in 7 s, which is not a mismatch" in said(console)
    assert len(json.loads((tmp_path / "out.json").read_text())["no_answer"]) == 3


def test_agreement_ends_with_0_and_a_table(monkeypatch: pytest.MonkeyPatch, console: Console) -> None:
    monkeypatch.setattr(command, "CaseRunner", Runner)
    assert command.run(command.Options(cases=5, only="tp=1"), console) == 0
    assert "5 of 5 cases agree with plain transformers (seed 0)" in said(console)
    assert "batching: fixed" in said(console)


def test_an_outcome_tells_the_worst_first() -> None:
    outcome = CaseOutcome(
        Case(), [difference(1e-7, "fine"), difference(2e-5, "bad"), difference(float("inf"), "worst")]
    )
    assert [line.split(":")[0] for line in outcome.summary()] == ["worst", "bad"]
    assert not outcome.passes and CaseOutcome(Case(), [difference(1e-7)]).passes
    assert CaseOutcome(Case(), error="Traceback\nValueError: no\n").summary() == ["error: ValueError: no"]
