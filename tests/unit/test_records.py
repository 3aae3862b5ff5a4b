"""Reading prompt and answer records, and refusing what is not one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl.data.records import Fingerprint, Record, read_records
from megarl.errors import DataError
from tests.tables import read_table

TABLES = read_table("records.yaml")


def list_records(source: Any) -> list[Record]:
    return list(read_records(source))


def fingerprint(records: list[Record]) -> str:
    digest = Fingerprint()
    for record in records:
        digest.add(record)
    return digest.hexdigest()


def write(path: Path, lines: list[str]) -> dict[str, Any]:
    path.write_text("\n".join(lines), encoding="utf-8")
    return {"path": str(path), "prompt_key": "question", "answer_key": "target"}


def row(prompt: Any, answer: Any) -> str:
    return json.dumps({"question": prompt, "target": answer, "other": 1})


def test_lines_come_in_order_with_their_numbers(tmp_path: Path) -> None:
    source = write(tmp_path / "a.jsonl", [row("1+1=", "2"), "", row("\u00e9 ", ""), "   ", row("x", "y")])
    records = list_records(source)
    assert [(record.prompt, record.answer) for record in records] == [
        ("1+1=", "2"),
        ("\u00e9 ", ""),
        ("x", "y"),
    ]
    assert [record.origin.rsplit(" ", 1)[1] for record in records] == ["1", "3", "5"]


@pytest.mark.parametrize(("limit", "count"), [(None, 3), (1, 1), (2, 2), (7, 3)])
def test_max_samples(tmp_path: Path, limit: int | None, count: int) -> None:
    source = write(tmp_path / "a.jsonl", [row(str(number), "a") for number in range(3)]) | {
        "max_samples": limit
    }
    assert len(list_records(source)) == count


def test_chat_prompts(tmp_path: Path) -> None:
    # A message with tool calls need not have a content.
    messages = json.loads(
        '[{"role": "system", "content": "s"}, {"role": "user", "content": "u"},'
        ' {"role": "assistant", "tool_calls": [{"id": "c"}]}]'
    )
    records = list_records(write(tmp_path / "a.jsonl", [row(messages, "x")]))
    assert records[0].prompt == tuple(messages)


@pytest.mark.parametrize(
    ("bad", "message"),
    TABLES["broken lines are named"],
)
def test_broken_lines_are_named(tmp_path: Path, bad: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list_records(write(tmp_path / "a.jsonl", [row("a", "b"), bad, row("c", "d")]))


def test_missing_empty_and_binary_files(tmp_path: Path) -> None:
    source = write(tmp_path / "empty.jsonl", ["", "  "])
    with pytest.raises(DataError, match="holds 0 records"):
        list_records(source)
    with pytest.raises(DataError, match="does not exist"):
        list_records(source | {"path": str(tmp_path / "nowhere.jsonl")})
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match=r" \(split \w+\) cannot be loaded"):
        list_records(source | {"path": str(tmp_path / "folder")})
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="not UTF-8"):
        list_records(source | {"path": str(tmp_path / "b.jsonl")})


def test_a_saved_data_set(tmp_path: Path) -> None:
    rows = datasets.Dataset.from_dict({"question": ["a", "b", "c"], "target": ["1", "2", "3"]})
    source = {"name": str(tmp_path / "one"), "prompt_key": "question", "answer_key": "target"}
    rows.save_to_disk(str(tmp_path / "one"))
    assert [record.prompt for record in list_records(source)] == ["a", "b", "c"]
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "two"))
    records = list_records(source | {"name": str(tmp_path / "two"), "split": "test"})
    assert [record.answer for record in records] == ["2"]
    assert "test] row 0" in records[0].origin
    with pytest.raises(DataError, match="split nonsense"):
        list_records(source | {"name": str(tmp_path / "two"), "split": "nonsense"})


def test_a_folder_of_data_files(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", [row("a", "1"), row("b", "2")])
    source = {
        "name": str(tmp_path / "folder"),
        "prompt_key": "question",
        "answer_key": "target",
        "max_samples": 1,
    }
    assert [record.prompt for record in list_records(source)] == ["a"]


def test_fingerprint_sees_content_and_order() -> None:
    first, second = Record("a", "1", "x"), Record("b", "2", "y")
    assert fingerprint([first, second]) == fingerprint([Record("a", "1", "elsewhere"), second])
    # of the first version: a run that began with it goes on
    chat = Record(({"role": "user", "content": "\u00e9", "name": "n"},), "", "y")
    assert fingerprint([Record("1+1=", "2", "x"), chat]) == "e48d69c7ecdfd3bfc4161cdf10d68f20"
    different = [
        [second, first],
        [first],
        [first, second, second],
        [Record("a", "2", "x"), second],
        [Record("a1", "", "x"), second],
    ]
    assert len({fingerprint(records) for records in [[first, second], *different]}) == 6
