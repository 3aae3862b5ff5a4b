"""The page of results: complete in itself, with plots, whole runs in the field's columns, and marked results
named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import __main__ as command
from benchmarks import results_file
from benchmarks.drawings import drawn, panels_of, varied
from benchmarks.report import page
from benchmarks.whole_runs import HEAD, whole_runs
from tests.tiers import slow
from tests.unit.test_benchmarks_check import RESULTS, result, summary
from tests.unit.test_watch_report import Page, pictures, words

pytest.importorskip("matplotlib")


def point(backend: str, **parameters: Any) -> dict[str, Any]:
    return {
        "parameters": {"backend": backend, **parameters},
        "metrics": {"step": summary(1.2), "loss_difference": summary(0.0, unit="largest")},
    }


def test_a_page_of_what_was_committed_needs_no_network_and_closes_what_it_opens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("generation.json", "scaling.ranks.json"):
        (tmp_path / name).write_text((RESULTS / name).read_text())
    assert command.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    read = Page(text)
    assert not read.open and not read.fetched
    assert len(pictures(text)) == 2
    assert "ranks" in words(pictures(text)[1])


def test_names_are_text_and_never_elements() -> None:
    text = page([{**result("a <b>"), "error": "<script>alert(1)</script>"}])
    assert "<script>" not in text
    assert "a &lt;b&gt;" in text


def test_marked_results_are_named_on_top_and_at_their_case() -> None:
    text = page([result("good"), {**result("bad"), "commit": "d" * 40 + "+changes"}])
    assert "1 of 2 results are not to be quoted" in text
    assert text.count("the tree differed from its commit") == 2
    assert "not to be quoted" not in page([result("good")])


def test_whole_runs_have_the_columns_of_the_field_and_blanks_where_nothing_was_measured() -> None:
    facts = {
        "algorithm": "GRPO",
        "model": "Qwen2 0.5 M",
        "policy_lag": 0,
        "longest": 27,
        "gpus": 0,
        "training_layout": "tp=2",
    }
    whole = {**point("megatron"), "run": facts}
    whole["metrics"] = {**whole["metrics"], "step_seconds": summary(0.9, unit="s")}
    [row] = whole_runs([{**result("grpo.step"), "points": [whole, point("dtensor")]}])
    cells = dict(zip(HEAD, row, strict=True))
    assert (cells["backend"], cells["algorithm"], cells["policy lag"], cells["step time, s"]) == (
        "megatron",
        "GRPO",
        "0",
        "0.9",
    )
    assert (cells["MFU"], cells["mean length"], cells["layout, generation"]) == ("", "", "")
    assert "Whole runs" in page([{**result("grpo.step"), "points": [whole]}])


def test_what_was_varied_becomes_the_axis() -> None:
    over_tokens = [
        point(backend, tokens=tokens) for backend in ("megatron", "dtensor") for tokens in (128, 256, 512)
    ]
    assert varied(over_tokens) == "tokens"
    assert varied([point(backend) for backend in ("megatron", "dtensor")]) is None
    svg = drawn(over_tokens)
    assert svg.startswith("<svg") and "dtensor" in svg and "backend=" not in svg
    assert drawn(over_tokens[:1]) == ""


def test_a_busy_machine_s_ratios_are_drawn_in_cpu_seconds() -> None:
    points = result()["points"]
    assert panels_of(points, in_cpu_seconds=False) == ["step"]
    assert panels_of(points, in_cpu_seconds=True) == ["step_cpu"]


@slow
def test_every_committed_result_can_be_drawn() -> None:
    for found in results_file.read(RESULTS):
        drawn(found["points"])
