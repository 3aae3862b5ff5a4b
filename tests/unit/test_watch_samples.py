"""Samples as a person sees them: in the terminal, and in the page of the report."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from megarl.cli import main
from megarl.observe.sample_files import SampleFiles
from megarl.watch import sample_page
from megarl.watch.report import write_report
from megarl.watch.sample_page import samples_panel, spread
from megarl.watch.samples import Selection, holds, ordered, render
from tests.tiers import slow
from tests.unit.runs import make_run
from tests.unit.test_sample_files import HOSTILE


def sample(step: int, record: int, generation: int = 0, **more: Any) -> dict[str, Any]:
    row = {
        "step": step,
        "set": None,
        "group": record,
        "generation": generation,
        "record": record,
        "source": "sums.jsonl",
        "env": None,
        "prompt": f"question {record}",
        "answer": f"answer {record}.{generation} at {step}",
        "reference": str(record),
        "reward": 0.0,
        "accuracy": None,
        "advantage": 0.5,
        "mismatch": 0.001,
        "rewards": {},
        "length": 10,
        "truncated": False,
        "masked": False,
        "weight_version": step - 1,
    }
    return {**row, **more}


def add_samples(run_dir: Path, step: int, rows: list[dict[str, Any]], kind: str = "train") -> Path:
    with SampleFiles(run_dir / "samples") as files:
        files.write(kind, step, rows)
    return run_dir


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    make_run(tmp_path)
    rewards, lengths = [0.5, 1.0, 0.0, 1.0], [7, 3, 9, 9]
    for step in (1, 2):
        add_samples(
            tmp_path,
            step,
            [
                sample(step, place // 2, place % 2, reward=rewards[place], length=lengths[place])
                for place in range(4)
            ]
            + [
                sample(
                    step,
                    2,
                    0,
                    reward=-5.0,
                    masked=True,
                    truncated=True,
                    length=1,
                    rewards={"right": 0.0, "form": 1.0},
                    env="math",
                )
            ],
        )
    for step in (0, 2):
        add_samples(
            tmp_path,
            step,
            [
                sample(step, place, set="aime", answer=f"{place} is the {'first' if step else 'last'}")
                for place in range(3)
            ],
            "validation",
        )
    return tmp_path


def shown(run_dir: Path, width: int = 100, color: Any = None, **selection: Any) -> str:
    stream = io.StringIO()
    console = Console(
        width=width, file=stream, color_system=color, force_terminal=color is not None, highlight=False
    )
    for part in render(run_dir, Selection(**selection)):
        console.print(part, soft_wrap=True)
    return stream.getvalue()


def answers(text: str) -> list[str]:
    return re.findall(r"answer \d\.\d at \d", text)


# terminal


def test_the_newest_step_is_shown_with_each_prompt_once(run_dir: Path) -> None:
    text = shown(run_dir)
    assert answers(text) == [
        "answer 0.0 at 2",
        "answer 0.1 at 2",
        "answer 1.0 at 2",
        "answer 1.1 at 2",
        "answer 2.0 at 2",
    ]
    assert text.count("question 0\n") == 1 and "step 2  prompt 0 of sums.jsonl" in text
    assert (
        "response 0  reward 0.500  advantage 0.500  mismatch 0.0010  7 tokens  weights 1  reference 0" in text
    )
    assert (
        "right 0.000  form 1.000  1 tokens  weights 1  truncated  masked" in text
        and "environment math" in text
    )


def test_a_masked_sample_has_no_reward(run_dir: Path) -> None:
    add_samples(run_dir, 3, [sample(3, 0, reward=None, masked=True, rewards={"right": None}), sample(3, 1)])
    text = shown(run_dir)
    assert (
        "response 0  reward none  advantage 0.500  mismatch 0.0010  right none  10 tokens  weights 2  masked"
        in text
    )
    assert answers(shown(run_dir, order="worst")) == ["answer 1.0 at 3"]
    assert answers(shown(run_dir, order="longest")) == ["answer 0.0 at 3", "answer 1.0 at 3"]


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        ("worst", ["1.0", "0.0", "0.1", "1.1"]),
        ("best", ["0.1", "1.1", "0.0", "1.0"]),
        ("longest", ["1.0", "1.1", "0.0", "0.1", "2.0"]),
    ],
)
def test_orders_keep_equal_ones_as_they_were_and_judge_no_masked_one(
    run_dir: Path, order: Any, wanted: list[str]
) -> None:
    assert [found.split()[1] for found in answers(shown(run_dir, order=order))] == wanted
    assert answers(shown(run_dir, order=order, number=2)) == [f"answer {name} at 2" for name in wanted[:2]]


def test_what_has_no_number_comes_last() -> None:
    rows = [{"reward": value, "length": value} for value in (None, "inf", 1.0, "x", "-inf", 2)]
    assert [row["reward"] for row in ordered(rows, "worst")] == ["-inf", 1.0, 2, "inf", None, "x"]
    assert [row["reward"] for row in ordered(rows, "best")] == ["inf", 2, 1.0, "-inf", None, "x"]
    assert [row["reward"] for row in ordered(rows, "longest")] == ["inf", 2, 1.0, "-inf", None, "x"]


def test_a_text_is_looked_for_in_all_steps_or_in_one(run_dir: Path) -> None:
    assert answers(shown(run_dir, text="ANSWER 1.", number=3)) == [
        "answer 1.0 at 2",
        "answer 1.1 at 2",
        "answer 1.0 at 1",
    ]
    assert answers(shown(run_dir, text="question 2")) == ["answer 2.0 at 2", "answer 2.0 at 1"]
    assert answers(shown(run_dir, text="question 2", step=1)) == ["answer 2.0 at 1"]


def test_two_steps_stand_side_by_side(run_dir: Path) -> None:
    text = shown(run_dir, kind="validation", against=0)
    assert text.count("│") and [text.index(name) for name in ("step 0", "step 2")] == sorted(
        text.index(name) for name in ("step 0", "step 2")
    )
    line = next(line for line in text.splitlines() if "0 is the last" in line)
    assert line.index("0 is the last") < line.index("0 is the first")
    assert text == shown(run_dir, kind="validation", step=0, against=2), "the earlier one is on the left"
    assert "set aime  prompt 1 of sums.jsonl" in text


DOUBLED = [(0, 0), (0, 1), (1, 0), (0, 0), (0, 1), (0, 0)]
"""Record and number of the answer: a step has record 0 three times, of the last time the first answer
alone."""


def doubled(step: int, number: int = len(DOUBLED)) -> list[dict[str, Any]]:
    return [
        sample(step, record, generation, group=place, answer=f"answer {place}.{generation} at {step}")
        for place, (record, generation) in enumerate(DOUBLED[:number])
    ]


def test_a_prompt_that_a_step_has_twice_is_compared_twice(run_dir: Path) -> None:
    add_samples(run_dir, 3, doubled(3))
    add_samples(run_dir, 4, doubled(4, 5))
    text = shown(run_dir, against=3, number=9)
    assert answers(text) == [
        f"answer {place}.{DOUBLED[place][1]} at {step}" for place in range(5) for step in (3, 4)
    ]


def test_a_command_line_selects(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["samples", str(run_dir), "--best", "--number", "1", "--step", "1"]) == 0
    assert answers(capsys.readouterr().out) == ["answer 0.1 at 1"]
    assert main(["samples", str(run_dir), "--validation", "--grep", "2 is"]) == 0
    assert capsys.readouterr().out.count("2 is the") == 2
    assert main(["samples", str(run_dir), "--validation", "--diff", "0"]) == 0
    assert "0 is the last" in capsys.readouterr().out
    for wrong in (["--worst", "--best"], ["--diff", "1", "--grep", "x"], ["--number", "0"], ["--step", "x"]):
        with pytest.raises(SystemExit):
            main(["samples", str(run_dir), *wrong])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "9"], "step 9 has no train samples in .*Fix: choose one of 1, 2"),
        (["--grep", "nowhere"], "no train sample of 2 steps in .* holds 'nowhere'"),
        (["--grep", "nowhere", "--step", "1"], "no train sample of step 1 in .* holds 'nowhere'"),
        (["--diff", "7"], "step 7 has no train samples"),
    ],
)
def test_what_is_not_there_is_said(
    run_dir: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["samples", str(run_dir), *arguments]) == 2
    assert re.search(message, capsys.readouterr().err.replace("\n", " "))


def test_runs_without_samples_and_prompts_in_common_are_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(tmp_path / "run")
    assert main(["samples", str(tmp_path / "run"), "--validation"]) == 2
    assert (
        "holds no samples of validation steps. Fix: let an algorithm that generates responses"
        in capsys.readouterr().err
    )
    add_samples(tmp_path / "run", 1, [sample(1, 0)])
    add_samples(tmp_path / "run", 2, [sample(2, 1)])
    assert main(["samples", str(tmp_path / "run"), "--diff", "1"]) == 2
    assert "have no prompt in common" in capsys.readouterr().err
    assert main(["samples", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err


def test_a_terminal_gets_nothing_to_obey(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "\x1b]0;title\x07[bold]\x1b[2J" + HOSTILE
    row = sample(
        3,
        0,
        prompt=hostile,
        answer=hostile,
        reference=hostile,
        source=hostile,
        env=hostile,
        set=hostile,
        rewards={hostile: 1.0},
    )
    row |= {
        "length": hostile,
        "reward": hostile,
        "generation": hostile,
        "weight_version": hostile,
        "record": hostile,
    }
    add_samples(run_dir, 3, [row])
    add_samples(run_dir, 4, [row | {"step": 4}])
    for text in (shown(run_dir), shown(run_dir, against=3)):
        assert not [
            character
            for character in text
            if (ord(character) < 32 and character != "\n") or 0x7F <= ord(character) <= 0x9F
        ]
        assert not set("\u202e\u2028\ud800") & set(text)
        assert "[bold]" in text
    assert r"\x1b]0;title\x07[bold]\x1b[2Ja\x1b[31mred\x9b2J\x00\x0d" in shown(
        run_dir
    ) and r"\u202eevil" in shown(run_dir)
    coloured = shown(run_dir, color="standard")
    assert {found for found in re.findall("\x1b.", coloured)} == {"\x1b["} and set(
        re.findall("\x1b\\[[0-9;]*(.)", coloured)
    ) == {"m"}
    assert "\x1b[31mred" not in coloured and "\x1b[2J" not in coloured
    assert main(["samples", str(run_dir)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_long_line_reaches_a_pipe_whole(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    add_samples(run_dir, 3, [sample(3, 0, answer="word " * 100 + "end")])
    assert main(["samples", str(run_dir)]) == 0
    assert "word " * 100 + "end\n" in capsys.readouterr().out


# page


class Elements(HTMLParser):
    """Elements with their attributes, and what is in scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.found and self.found[-1][0] == "script":
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self.found.append((f"/{tag}", {}))


def test_a_sample_is_text_in_the_page_whatever_it_says(run_dir: Path) -> None:
    pytest.importorskip("matplotlib")
    hostile = (
        "<!--<script>"
        + HOSTILE
        + "</script><img src=x onerror=alert(1)><script>alert(2)</script>&lt;b&gt;]]>"
    )
    add_samples(
        run_dir,
        3,
        [sample(3, 0, prompt=hostile, answer=hostile, source=hostile, set=hostile, rewards={hostile: 1.0})],
    )
    text = write_report([run_dir], run_dir / "page.html").read_text()
    page = Elements(text)
    assert not [tag for tag, _ in page.found if tag == "img"]
    assert [attributes for tag, attributes in page.found if tag == "script"] == [
        {"type": "application/json", "id": "samples-data"},
        {},
    ]
    data, script = page.scripts
    assert not set("<>&\u2028") & set(data), "no tag can begin or end in it"
    [row] = json.loads(data)["train"]["steps"]["3"]
    assert row["answer"] == hostile and list(row["rewards"]) == [hostile] and row["source"] == hostile
    assert "alert" not in script and not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\(", script
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [
        attributes["content"]
        for tag, attributes in page.found
        if tag == "meta" and "http-equiv" in attributes
    ]
    assert (
        policy
        == f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}';"
    )


@slow
def test_a_page_of_several_runs_or_without_samples_has_no_script(
    run_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pytest.importorskip("matplotlib")
    other = make_run(tmp_path_factory.mktemp("other"))
    for run_dirs in ([run_dir, other], [other]):
        text = write_report(run_dirs, run_dir / "page.html").read_text()
        assert "<script" not in text and "script-src" not in text and 'id="samples"' not in text


def test_a_page_has_room_for_some_steps_and_says_how_many_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_page, "_MOST_BYTES", 60_000)
    for step in range(1, 31):
        add_samples(
            tmp_path,
            step,
            [sample(step, place, prompt_ids=[1] * 9, answer="a" * 9_000) for place in range(4)],
        )
    data = json.loads(Elements(samples_panel(tmp_path)).scripts[0])["train"]
    assert (
        list(map(int, data["steps"])) == [1, 4, 6, 9, 12, 14, 17, 19, 22, 25, 27, 30]
        and data["written"] == 30
    )
    assert set(data["rows"].values()) == {4} and {len(rows) for rows in data["steps"].values()} == {1}
    row = data["steps"]["30"][0]
    assert "prompt_ids" not in row and len(row["answer"]) < 6_100 and "characters left out" in row["answer"]


@pytest.mark.parametrize(("count", "most"), [(0, 12), (1, 12), (12, 12), (13, 12), (1000, 12), (5, 2)])
def test_places_are_spread_with_both_ends(count: int, most: int) -> None:
    places = spread(count, most)
    assert places == sorted(set(places)) and len(places) == min(count, most)
    assert not count or (places[0], places[-1]) == (0, count - 1)


def test_damaged_files_cost_the_page_nothing_else(run_dir: Path) -> None:
    (run_dir / "samples" / "train_step_9.jsonl").write_text(
        "nonsense\n" + json.dumps(sample(9, 0)).replace('"reward": 0.0', '"reward": 1e999')
    )
    (run_dir / "samples" / "train_step_10.jsonl").write_text("")
    data = json.loads(Elements(samples_panel(run_dir)).scripts[0])
    assert list(data["train"]["steps"]) == ["1", "2", "9"] and data["train"]["steps"]["9"] == []
    assert list(data["validation"]["steps"]) == ["0", "2"]
    (run_dir / "samples" / "validation_step_5.jsonl").mkdir()
    assert samples_panel(run_dir) == ""


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js to run the script of the page")
def test_the_page_says_that_a_masked_sample_has_no_reward(run_dir: Path) -> None:
    script = Elements(samples_panel(run_dir)).scripts[1]
    known = script[script.index("const known") : script.index("const matches")]
    figures = script[script.index("const figures") : script.index("const place")]
    made = (
        "const make = (tag, name, text) => ({text, parts: [], append(...parts) { "
        "this.parts.push(...parts); }});\n"
    )
    row = sample(3, 0, reward=None, masked=True, rewards={"right": None})
    asked = f"console.log(JSON.stringify(figures({json.dumps(row)}).parts.map(part => part.text)))"
    said = subprocess.run(
        ["node", "-e", made + known + figures + asked], capture_output=True, text=True, check=True
    ).stdout
    assert {"reward none", "part right none", "masked"} <= set(json.loads(said))


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js to run the script of the page")
def test_the_script_finds_texts_as_the_command_does(run_dir: Path) -> None:
    """Not over the seam of prompt and answer, and whatever letters are capitals, of which some have several
    small ones."""
    script = Elements(samples_panel(run_dir)).scripts[1]
    functions = script[script.index("const number") : script.index("const figures")]
    rows = [
        sample(2, place, prompt=prompt, answer=answer)
        for place, (prompt, answer) in enumerate(
            [
                ("What is", "Stra\u00dfe"),
                ("\u039f\u0394\u039f\u03a3", "is\nit"),
                ("", "\u0130stanbul \ufb01 \u01c5"),
            ]
        )
    ]
    texts = [
        "IS\nstra",
        "is",
        "STRASSE",
        "stra\u00dfe",
        "strasse",
        "\u03bf\u03b4\u03bf\u03c3",
        "\u03bf\u03b4\u03bf\u03c2",
        "i\u0307stanbul",
        "FI",
        "\u01c6",
        " ",
        "x",
    ]
    found = [[row["record"] for row in rows if holds(row, text)] for text in texts]
    given = f"const rows = {json.dumps(rows)}, texts = {json.dumps(texts)};"
    asked = "console.log(JSON.stringify(texts.map(text => choose(rows, {text}).map(row => row.record))))"
    said = subprocess.run(
        ["node", "-e", functions + given + asked], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(said) == found
    assert found[:7] == [[], [0, 1], [0], [0], [0], [1], [1]]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js to run the script of the page")
def test_the_script_pairs_as_the_command_does(run_dir: Path) -> None:
    script = Elements(samples_panel(run_dir)).scripts[1]
    functions = script[script.index("const number") : script.index("const figures")]
    given = f"const rows = {json.dumps(doubled(4, 5))}, others = {json.dumps(doubled(3))};"
    asked = (
        "console.log(JSON.stringify([...paired(rows, others)].map(([row, other]) => [row.group, "
        "other.group])))"
    )
    said = subprocess.run(
        ["node", "-e", functions + given + asked], capture_output=True, text=True, check=True
    ).stdout
    assert json.loads(said) == [[place, place] for place in range(5)]


@pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js to run the script of the page")
def test_the_script_chooses_as_the_command_does(run_dir: Path) -> None:
    """The functions of the panel that filter and sort, without a browser around them."""
    script = Elements(samples_panel(run_dir)).scripts[1]
    functions = script[script.index("const number") : script.index("const figures")]
    rows = [
        sample(2, place, reward=value, length=place, masked=place == 3)
        for place, value in enumerate([0.5, "inf", -1.0, -9.0, None, 0.5])
    ]
    for order in ("worst", "best", "longest", ""):
        asked = (
            f"const rows = {json.dumps(rows)}; console.log(JSON.stringify(choose(rows, {{order: "
            f"'{order}'}}).map(row => row.record)))"
        )
        said = subprocess.run(
            ["node", "-e", functions + asked], capture_output=True, text=True, check=True
        ).stdout
        wanted = [row["record"] for row in ordered(rows, order or None)]
        assert json.loads(said) == wanted, order
