"""The generated problems are right, seeded, split without overlap and readable again."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from megarl.errors import DataError
from megarl.quickstart.material import (
    Problem,
    generate_problems,
    read_problems,
    split_of,
    write_pairs,
    write_problems,
)
from tests.tiers import slow


def solve(prompt: str) -> int:
    """The answer worked out from the text alone."""
    numbers = [int(number) for number in re.findall(r"\d+", prompt)]
    digits = [int(digit) for digit in re.findall(r"\d", prompt)]
    rules = {
        " first ": lambda: digits[0],
        " last ": lambda: digits[-1],
        " largest ": lambda: sorted(digits)[-1],
        " smallest ": lambda: sorted(digits)[0],
        "+": lambda: numbers[0] + numbers[1],
        "-": lambda: numbers[0] - numbers[1],
        " buys ": lambda: numbers[0] + numbers[1],
        " loses ": lambda: numbers[0] - numbers[1],
        " richer?": lambda: sorted(numbers)[-1],
        " poorer?": lambda: sorted(numbers)[0],
    }
    (answer,) = (rule() for key, rule in rules.items() if key in prompt)
    return answer


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_answer_is_right(split: str) -> None:
    for problem in generate_problems(1201, 5, split):
        assert problem.answer == str(solve(problem.prompt)), problem


@slow
def test_same_arguments_give_the_same_problems_in_another_process() -> None:
    code = "from megarl.quickstart.material import generate_problems as g; print(g(57, 3, 'train', 0.5))"
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": "77"}
    )
    assert other.stdout.strip() == str(generate_problems(57, 3, "train", 0.5))


def test_seeds_and_lengths() -> None:
    assert generate_problems(57, 3, "train") != generate_problems(57, 4, "train")
    assert generate_problems(31, 3, "train") == generate_problems(57, 3, "train")[:31]


def test_splits_are_disjoint_for_any_seeds() -> None:
    train = {problem.prompt for seed in (1, 2) for problem in generate_problems(3001, seed, "train")}
    validation = {problem.prompt for seed in (1, 9) for problem in generate_problems(701, seed, "validation")}
    assert not train & validation
    assert all(split_of(prompt) == "train" for prompt in train)
    assert all(split_of(prompt) == "validation" for prompt in validation)


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_kind_comes_up_often(split: str) -> None:
    marks = ("first", "last", "largest", "smallest", "+", "-", "buys", "loses", "richer", "poorer")
    counts = Counter(
        next(mark for mark in marks if mark in problem.prompt)
        for problem in generate_problems(1000, 11, split)
    )
    assert set(counts) == set(marks)
    assert min(counts.values()) >= 40, counts


@pytest.mark.parametrize("share", [0.0, 0.37, 1.0])
def test_mistakes_change_answers_only_and_as_often_as_asked(share: float) -> None:
    true, careless = generate_problems(2003, 6, "train"), generate_problems(2003, 6, "train", share)
    everywhere = generate_problems(2003, 6, "train", 1.0)
    assert [problem.prompt for problem in true] == [problem.prompt for problem in careless]
    possible = [index for index in range(2003) if everywhere[index] != true[index]]
    made = [index for index in possible if careless[index] == everywhere[index]]
    assert all(careless[index] == true[index] for index in range(2003) if index not in set(made))
    assert len(made) / len(possible) == pytest.approx(share, abs=0.04)
    assert len(possible) > 1200


def test_mistaken_answers_are_copied_out_of_the_question() -> None:
    assert all(problem.answer in problem.prompt for problem in generate_problems(997, 8, "train", 1.0))


def test_file_round_trip(tmp_path: Path) -> None:
    path = write_problems(tmp_path / "new" / "folder" / "problems.jsonl", 23, 1, "validation")
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert all(set(record) == {"prompt", "answer"} for record in records)
    assert (
        read_problems(path)
        == generate_problems(23, 1, "validation")
        == [Problem(**record) for record in records]
    )


def test_reading_skips_blank_lines_and_keeps_line_separators_inside_text(tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text('\n{"prompt": "a\u2028b", "answer": "7", "more": 1}\n\n', encoding="utf-8")
    assert read_problems(path) == [Problem("a\u2028b", "7")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no record"),
        (" \n\n", "holds no record"),
        ('{"prompt": "a", "answer": "1"}\n{"prompt": ', "line 2: .* is not JSON"),
        ('{"prompt": "a", "answer": "1"}\n\n{"prompt": "b"}', "line 3: .* no string under both"),
        ('{"prompt": "a", "answer": 1}', "line 1: .* no string under both"),
        ('["a", "1"]', "line 1: .* no string under both"),
    ],
)
def test_broken_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=message):
        read_problems(path)


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        read_problems(tmp_path / "absent.jsonl")


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(DataError, match="count = 0"):
        generate_problems(0, 1, "train")
    with pytest.raises(DataError, match="split = 'test'"):
        generate_problems(3, 1, "test")
    for share in (-0.1, 1.5, float("nan")):
        with pytest.raises(DataError, match="mistake_share"):
            generate_problems(3, 1, "train", share)


def test_pairs_have_the_true_and_the_careless_answer_of_problems_where_they_differ(tmp_path: Path) -> None:
    file = write_pairs(tmp_path / "new" / "pairs.jsonl", 401, 7, "validation")
    pairs = [json.loads(line) for line in file.read_text().splitlines()]
    true, careless = generate_problems(901, 7, "validation"), generate_problems(901, 7, "validation", 1.0)
    expected = [
        {"prompt": one.prompt, "chosen": one.answer, "rejected": other.answer}
        for one, other in zip(true, careless, strict=True)
        if one != other
    ]
    assert len(pairs) == 401 and pairs == expected[:401]
    assert all(pair["chosen"] == str(solve(pair["prompt"])) for pair in pairs)
