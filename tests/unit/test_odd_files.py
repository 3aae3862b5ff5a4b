"""Data files that would hang a run or cost it the machine: refused by file and line, with little work and
memory."""

from __future__ import annotations

import copy
import json
import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from converters.files.process import status_bytes
from megarl.config.load import load_config
from megarl.data import datasets as data_sets
from megarl.data import rows as data_rows
from megarl.data.datasets import Dataset, Reading, load_dataset
from megarl.data.records import read_records
from megarl.data.rows import LONGEST_LINE, rows_of
from megarl.data.table import StoredValues
from megarl.data.tokenization import PromptEncoder, get_tokenizer, long_text
from megarl.errors import ConfigError, DataError, ModelError
from megarl.run.run import run
from megarl.watch.run_state import read_run_state
from tests.unit.driver_runs import PolicyMaker, make_config

LIMIT = 24


@pytest.fixture(scope="module")
def tokenizer(model: str) -> Any:
    return get_tokenizer({"name": model})


def source(path: Path, **more: Any) -> Any:
    return {"path": str(path), "prompt_key": "prompt", "answer_key": "answer", **more}


def load(
    path: Path, tokenizer: Any, with_answers: bool = False, cache: Path | None = None, **more: Any
) -> Dataset:
    config: Any = {
        "max_input_seq_length": LIMIT,
        "cache_dir": str(cache or path.parent / "cache"),
        "cache_gib": None,
        **more,
    }
    return load_dataset(
        source(path) if "train" not in more else more["train"], Reading(config, tokenizer, with_answers)
    )


def line(prompt: str = "1+1=", answer: str = "2") -> str:
    return json.dumps({"prompt": prompt, "answer": answer}) + "\n"


# what is no file


@pytest.mark.parametrize("kind", ["a named pipe", "a socket", "a character device"])
def test_what_is_no_file_is_not_opened(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    if kind == "a named pipe":
        os.mkfifo(path)
    elif kind == "a socket":
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    else:
        path = Path("/dev/zero")
    with pytest.raises(DataError, match=rf"data file {path} is {kind}, not a file\. Fix"):
        next(rows_of(source(path)))
    with pytest.raises(DataError, match=kind):
        data_rows.content_digest(source(path))


def test_a_pipe_among_the_files_of_a_tokenizer(model: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(ModelError, match=r"tokenizer\.json is a named pipe, not a file\. Fix"):
        get_tokenizer({"name": str(tmp_path)})


def test_a_pipe_as_configuration(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"run\.yaml is a named pipe, not a file\. Fix"):
        load_config(tmp_path / "run.yaml")


def test_a_pipe_in_a_directory_of_data(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(line())
    os.mkfifo(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match=r"b\.jsonl in it is a named pipe, not a file\. Fix"):
        next(rows_of(source(tmp_path)))


@pytest.mark.parametrize("name", ["metrics.jsonl", "launches.jsonl", "config.yaml"])
def test_a_pipe_in_the_directory_of_a_run(name: str, tmp_path: Path, model: str, data: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "run.lock").touch()
    with pytest.raises(
        ConfigError, match=rf"run_dir = '{tmp_path}': {name} in it is a named pipe, not a file"
    ):
        run(make_config("sft", tmp_path, model, data), PolicyMaker())
    with pytest.raises(DataError, match=rf"{name} in it is a named pipe, not a file"):
        read_run_state(tmp_path)


# long lines


@pytest.fixture
def peak() -> Iterator[Callable[[], float]]:
    """How many bytes this process has had more at once than at the beginning of the test."""
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmHWM")
    yield lambda: status_bytes("VmHWM") - before


@pytest.mark.parametrize(("field", "with_answers"), [("prompt", False), ("answer", True), ("answer", False)])
def test_a_line_of_ten_megabytes(
    field: str, with_answers: bool, tmp_path: Path, tokenizer: Any, peak: Callable[[], float]
) -> None:
    """A tokenizer takes 400 bytes for each character of what is tokenized whole."""
    path, text = tmp_path / "long.jsonl", "12 7+ 9=" * (10 * 2**20 // 8)
    path.write_text(line() + line(**{field: text}) + line())
    if field == "answer" and not with_answers:
        # no part of the model's input: what it is compared with may be long
        examples = load(path, tokenizer).examples
        assert [len(example.answer) for example in examples] == [1, len(text), 1]
        assert examples[1].answer_ids == (tokenizer.eos_token_id,) and len(examples[0].answer_ids) > 1
    else:
        with pytest.raises(
            DataError,
            match=rf"1 of 3 prompts.* exceed data\.max_input_seq_length = {LIMIT}.*long\.jsonl line 2\): "
            r"more than",
        ):
            load(path, tokenizer, with_answers)
    assert peak() < 300 * 2**20


def test_a_conversation_of_ten_megabytes(tmp_path: Path, tokenizer: Any, peak: Callable[[], float]) -> None:
    path = tmp_path / "long.jsonl"
    turns = [{"role": "user", "content": "1+1=" * (10 * 2**18)}, {"role": "assistant", "content": "2"}]
    path.write_text(json.dumps({"turns": turns}))
    given = {"path": str(path), "messages_key": "turns"}
    with pytest.raises(DataError, match=r"long\.jsonl line 1\): more than \d+ tokens"):
        load(path, tokenizer, with_answers=True, train=given)
    assert peak() < 300 * 2**20


def test_a_line_that_no_record_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_rows, "LONGEST_LINE", 1000)
    path = tmp_path / "one.jsonl"
    fits = line("7" * (999 - len(line(""))))
    assert len(fits) == 1000 - 1 and LONGEST_LINE == 2**24
    path.write_text(fits + line("7" * 1000))
    found = rows_of(source(path))
    assert len(next(found)[1]["prompt"]) == 999 - len(line(""))
    with pytest.raises(
        DataError, match=r"one\.jsonl line 2 has more than 1,000 characters.*one JSON object a line$"
    ):
        next(found)
    path.write_text(json.dumps([json.loads(line())] * 100))
    assert len(list(rows_of(source(path)))) == 100
    path.write_text("[" + line() * 100)
    with pytest.raises(
        DataError, match=r"one\.jsonl line 2 column 1 is not JSON: Expecting ',' delimiter.*like one list"
    ):
        next(read_records(source(path)))


@pytest.mark.parametrize("size", [0, 1, LIMIT, 4096 + 8 * LIMIT, 4097 + 8 * LIMIT, 30_000, 100_001])
def test_the_beginning_of_a_text_says_that_it_is_too_long_only_where_it_is(size: int, tokenizer: Any) -> None:
    """Also of texts of which a token has many characters: what is not certain from the beginning is tokenized
    whole."""
    encoder = PromptEncoder(tokenizer)
    for text in ("1" * size, " " * size, "9+8=" * (size // 4)):
        tokens = len(tokenizer(text, add_special_tokens=False)["input_ids"])
        beginning = encoder.beginning(text, LIMIT)
        if len(beginning) < len(text):
            assert (
                len(tokenizer(beginning, add_special_tokens=False)["input_ids"]) > 2 * LIMIT
                and tokens > LIMIT
            )
        assert text.startswith(beginning) and (tokens > LIMIT or beginning == text)


def test_a_long_text_of_few_tokens_stays_whole(tokenizer: Any) -> None:
    longest = "x" * 214
    with_longest = copy.deepcopy(tokenizer)
    with_longest.add_tokens([longest])
    text = longest * (LIMIT - 3)
    assert len(text) > long_text(LIMIT) and PromptEncoder(with_longest).beginning(text, LIMIT) == text


def test_texts_that_are_tokenized_together_are_bounded(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(line(f"{number}+1=", str(number + 1)) for number in range(40)))
    whole = load(path, tokenizer, cache=tmp_path / "one")
    sizes: list[int] = []
    encode = PromptEncoder.encode_texts

    def counted(self: PromptEncoder, texts: Any) -> Any:
        sizes.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(PromptEncoder, "encode_texts", counted)
    monkeypatch.setattr(data_sets, "_CHUNK_CHARACTERS", 30)
    parts = load(path, tokenizer, cache=tmp_path / "two")
    assert sum(sizes) == 40 and max(sizes) <= 10
    assert parts.fingerprint == whole.fingerprint and list(parts.examples) == list(whole.examples)


# nesting


@pytest.mark.parametrize("depth", [60, 70, 500, 985, 100_000])
@pytest.mark.parametrize("brackets", ["[]", '{"a":}'])
def test_nested_records(depth: int, brackets: str, tmp_path: Path, tokenizer: Any) -> None:
    """What json reads, but nothing can write or show any more, is refused like what it does not read."""
    opening, closing = brackets[:-1], brackets[-1]
    path = tmp_path / "deep.jsonl"
    path.write_text(line() + '{"prompt": ' + opening * depth + "1" + closing * depth + ', "answer": "2"}\n')
    with pytest.raises(DataError, match=r"deep\.jsonl line 2") as refused:
        load(path, tokenizer)
    assert len(str(refused.value)) < 2000 and ("nests deeper than 64 levels" in str(refused.value)) == (
        depth > 64
    )


def test_nested_tools_in_text(tmp_path: Path) -> None:
    path = tmp_path / "deep.jsonl"
    path.write_text(json.dumps({"prompt": "1", "answer": "2", "tools": "[" * 100_000}))
    with pytest.raises(DataError, match=r"line 1: 'tools' = .* is not JSON"):
        list(read_records(source(path, tools_key="tools")))


@pytest.mark.parametrize(
    "text", ["a: " + "[" * 100_000, "a: " + "{b: " * 100_000, "a: " + "[" * 400 + "]" * 400, "- " * 100_000]
)
def test_nested_configurations(text: str, tmp_path: Path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text(f"seed: 1\n{text}\n" if not text.startswith("-") else text)
    with pytest.raises(ConfigError, match=r"deep\.yaml.* nests too deeply to be read\. Fix"):
        load_config(path)


@pytest.mark.parametrize(
    "override",
    ["seed=" + "[" * 100_000, "+a=" + "{b: " * 5_000, "+a=" + "[" * 400 + "]" * 400, "+a=" + "${" * 5_000],
)
def test_nested_overrides(override: str, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 1\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path, [override])
    assert len(str(refused.value)) < 1000 and "Fix" in str(refused.value)


# files that somebody writes meanwhile


def test_a_file_that_grows_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line() * 3)
    found = rows_of(source(path))
    next(found)
    with path.open("a") as stream:
        stream.write(line())
    with pytest.raises(
        DataError, match=r"a\.jsonl changed while it was read: it had \d+ bytes and has \d+\. Fix"
    ):
        list(found)


def test_a_file_that_grows_faster_than_it_is_read_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line() * 2000)
    rows = 0
    with path.open("a") as stream, pytest.raises(DataError, match="changed while it was read"):
        for _ in rows_of(source(path)):
            rows += 1
            stream.write(line() * 3)
            stream.flush()
    assert rows <= 2048


@pytest.mark.parametrize("change", ["shrinks", "other answers", "half a line", "torn"])
def test_a_file_that_changes_leaves_no_tokens_behind(
    change: str, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokens would be kept under what its bytes were before."""
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text(line() * 50)
    monkeypatch.setattr(data_sets, "_MOST_IN_MEMORY", 0)
    digest, changes = data_sets.content_digest, [change]

    def then_changed(given: Any) -> str:
        before = digest(given)
        if changes:
            written = {
                "shrinks": line() * 7,
                "other answers": line(answer="3") * 50,
                "half a line": line() * 50 + '{"pro',
                "torn": '{"x": 1}',
            }
            path.write_text(written[changes.pop()])
        return before

    monkeypatch.setattr(data_sets, "content_digest", then_changed)
    with pytest.raises(
        DataError,
        match=r"a\.jsonl changed while it was read: its content has changed since the reading began\. Fix",
    ):
        load(path, tokenizer, cache=cache)
    assert not cache.exists() or not list(cache.iterdir())
    path.write_text(line() * 50)
    assert len(load(path, tokenizer, cache=cache)) == 50


@pytest.mark.parametrize("name", ["prompt.values", "answer.starts"])
@pytest.mark.parametrize("left", [0, 8, 100])
def test_kept_tokens_that_are_cut_off_under_a_run(
    name: str, left: int, tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mapped into memory, they would end the process by a signal."""
    path, cache = tmp_path / "a.jsonl", tmp_path / "cache"
    path.write_text("".join(line(f"{number}+1=") for number in range(200)))
    monkeypatch.setattr(data_sets, "_MOST_IN_MEMORY", 0)
    examples = load(path, tokenizer, cache=cache).examples
    expected = list(examples)
    [file] = cache.glob(f"*/{name}")
    assert file.stat().st_size > 800
    os.truncate(file, left)
    with pytest.raises(
        DataError,
        match=rf"{name} was truncated while the run used it: \d+ of \d+ bytes are there\. Fix: start the run "
        r"again",
    ):
        list(examples)
    assert list(load(path, tokenizer, cache=cache).examples) == expected


def test_stored_values_are_those_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(range(24)))
    (tmp_path / "none").write_bytes(b"")
    values, none = StoredValues(tmp_path / "a", "int32"), StoredValues(tmp_path / "none", "int32")
    assert len(values) == 6 and len(none) == 0 and none[:].tolist() == []
    whole = values[:]
    assert whole.tobytes() == bytes(range(24)) and str(whole.dtype) == "int32"
    for start in range(8):
        for stop in range(8):
            assert values[start:stop].tolist() == whole[start:stop].tolist()
    (tmp_path / "a").unlink()
    assert values[2:3].tolist() == whole[2:3].tolist()
