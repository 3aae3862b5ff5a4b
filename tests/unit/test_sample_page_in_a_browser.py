"""The samples page as a user operates it, by keys and clicks in a real browser: what it shows is what
``megarl samples`` would choose."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.watch.report import write_report
from megarl.watch.samples import holds, ordered
from tests.browser import CHROMIUM, Browser, browser
from tests.unit.runs import make_run
from tests.unit.test_sample_files import HOSTILE
from tests.unit.test_watch_samples import add_samples, sample

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

ORDERS, ONLY = ("worst", "best", "longest"), ("truncated", "masked")
SHOWN = "[...document.querySelectorAll('#samples .sample .answer')].map(one => one.textContent)"
NOTE = "document.querySelector('#samples .note').textContent"


def drawn(step: int, count: int) -> list[dict[str, Any]]:
    """Samples with rewards that tie, some cut off, some masked; a third of the prompts are asked at every
    step."""
    draw = random.Random(step)
    rows = []
    for place in range(count):
        record = place if place % 3 == 0 else 100 * step + place
        word = draw.choice(["pears", "Apples", "apples", "figs"])
        masked = draw.random() < 0.2
        row = sample(
            step,
            record,
            prompt=f"How many {word} are {record}?",
            answer=f"{place} {draw.choice(['APPLES', 'of them'])} at {step}",
        )
        rows.append(
            {
                **row,
                "reward": draw.choice([0.0, 0.5, 1.0]),
                "length": draw.randrange(9),
                "masked": masked,
                "truncated": draw.random() < 0.3,
            }
        )
    return rows


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[int, list[dict[str, Any]]]]:
    validation = {
        step: [
            sample(step, place, set=name, answer=f"{name} {place} at {step}")
            for name in ("aime", "math")
            for place in range(3)
        ]
        for step in (0, 2)
    }
    validation[2].append(
        sample(
            2,
            9,
            set="math",
            prompt=HOSTILE,
            answer=f"<script>alert(1)</script><img src=x onerror=alert(2)>{HOSTILE}",
        )
    )
    return {"train": {step: drawn(step, 47) for step in (1, 2)}, "validation": validation}


@pytest.fixture(scope="module")
def page(
    tmp_path_factory: pytest.TempPathFactory, rows: dict[str, dict[int, list[dict[str, Any]]]]
) -> Iterator[Browser]:
    pytest.importorskip("matplotlib")
    run_dir = make_run(tmp_path_factory.mktemp("run"))
    for kind, steps in rows.items():
        for step, of_step in steps.items():
            add_samples(run_dir, step, of_step, kind)
    report = write_report([run_dir], run_dir / "report.html")
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        opened.open(report)
        yield opened


def choose(page: Browser, title: str, place: int) -> None:
    """Take the option at a place of a list, by keys."""
    found = (
        "[...document.querySelectorAll('#samples .bar label')].find(one => "
        f"one.textContent.startsWith('{title}'))"
    )
    page.value(f"{found}.querySelector('select').focus()")
    page.press("Home")
    page.press("ArrowDown", place)
    assert page.value("document.activeElement.selectedIndex") == place


def look_for(page: Browser, text: str) -> None:
    """Write into the field for texts, which is emptied before."""
    page.click("#samples input")
    page.value("document.activeElement.select()")
    page.press("Backspace")
    page.write(text)


def all_shown(page: Browser) -> list[str]:
    """The answers that the page shows after ``show more`` as often as it is there."""
    more = "#samples > button"
    while not page.value(f"document.querySelector('{more}').hidden"):
        before = len(page.value(SHOWN))
        page.click(more)
        assert before < len(page.value(SHOWN)) <= before + 20
    found: list[str] = page.value(SHOWN)
    return found


def test_what_a_user_chooses_is_shown(
    page: Browser, rows: dict[str, dict[int, list[dict[str, Any]]]]
) -> None:
    newest = rows["train"][2]
    assert (
        page.value(SHOWN) == [row["answer"] for row in newest[:20]]
        and page.value(NOTE) == "47 of 47 samples."
    )
    assert all_shown(page) == [row["answer"] for row in newest]
    for place, order in enumerate(ORDERS, 1):
        choose(page, "order", place)
        assert all_shown(page) == [row["answer"] for row in ordered(newest, order)], order  # type: ignore[arg-type]
        masked = 0 if order == "longest" else sum(row["masked"] for row in newest)
        assert page.value(NOTE).startswith(f"{47 - masked} of 47 samples.") and (
            f" {masked} more are masked" in page.value(NOTE)
        ) == (masked > 0)
    for place, only in enumerate(ONLY, 1):
        choose(page, "only", place)
        wanted = [row["answer"] for row in ordered(newest, "longest") if row[only]]
        assert all_shown(page) == wanted and 0 < len(wanted) < 47, only
        assert page.value(NOTE) == f"{len(wanted)} of 47 samples."
    choose(page, "only", 0)
    choose(page, "order", 0)
    for text in ("apples", "pears", "nothing like it"):
        look_for(page, text)
        assert all_shown(page) == [row["answer"] for row in newest if holds(row, text)], text
    look_for(page, "apples")
    choose(page, "step", 0)
    choose(page, "order", 1)
    assert all_shown(page) == [
        row["answer"] for row in ordered([row for row in rows["train"][1] if holds(row, "apples")], "worst")
    ]
    look_for(page, "")
    choose(page, "order", 0)
    choose(page, "compare with step", 2)
    first, second = ({row["prompt"]: row["answer"] for row in rows["train"][step]} for step in (1, 2))
    shared = [prompt for prompt in first if prompt in second]
    assert (
        all_shown(page) == [answers[prompt] for prompt in shared for answers in (first, second)]
        and 0 < len(shared) < 47
    )


def test_validation_sets_are_chosen_and_nothing_of_a_model_runs(
    page: Browser, rows: dict[str, dict[int, list[dict[str, Any]]]]
) -> None:
    choose(page, "samples of", 1)
    newest = rows["validation"][2]
    assert len(all_shown(page)) == len(newest)
    choose(page, "set", 2)
    assert (
        page.value(SHOWN)[:3] == [row["answer"] for row in newest if row["set"] == "math"][:3]
        and len(page.value(SHOWN)) == 4
    )
    assert (
        "alert(1)" in page.value(SHOWN)[3]
        and page.value("document.querySelectorAll('#samples script, #samples img').length") == 0
    )
    choose(page, "set", 1)
    assert page.value(SHOWN) == [row["answer"] for row in newest if row["set"] == "aime"]
    choose(page, "step", 0)
    assert page.value(SHOWN) == [row["answer"] for row in rows["validation"][0] if row["set"] == "aime"], (
        "the set stays chosen"
    )
    assert page.faults == []


def test_what_an_environment_says_is_folded_until_it_is_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    turns = [
        {"role": "assistant", "text": "Let me look.", "reward": 0.25},
        {"role": "environment", "text": "<b>20 degrees</b>"},
        {"role": "assistant", "text": "Mild.", "reward": 0.0},
        {"role": "environment", "text": "Sure?", "segment": 2},
        {"role": "assistant", "text": "Yes.", "reward": 1.0},
    ]
    run_dir = make_run(tmp_path / "run")
    add_samples(run_dir, 1, [{**sample(1, 0), "turns": turns, "ended": "done"}], "train")
    report = write_report([run_dir], run_dir / "report.html")
    profile = tmp_path / "profile"
    profile.mkdir()
    with browser(profile) as page:
        page.open(report)
        said = "[...document.querySelectorAll('#samples .sample .answer')].map(one => one.textContent)"
        assert page.value(said) == ["Let me look.", "Mild.", "Yes."]
        summaries = "[...document.querySelectorAll('#samples summary')].map(one => one.textContent)"
        assert page.value(summaries) == ["environment: <b>20 degrees</b>", "environment, segment 2: Sure?"]
        heights = "[...document.querySelectorAll('#samples details .text')].map(one => one.checkVisibility())"
        assert page.value(heights) == [False, False]
        page.value("document.querySelector('#samples summary').click()")
        assert page.value(heights) == [True, False]
        rewards = page.value(
            "[...document.querySelectorAll('#samples .sample .figures')].map(one => one.textContent)"
        )
        assert rewards[1:] == ["reward 0.25", "reward 1"] and not page.faults
