"""Columns found by their usual names, and rows in the published forms of other tools, compared with the same
rows as plain messages."""

from __future__ import annotations

import csv
import datetime
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl.data.columns import Kind, complete_source
from megarl.data.datasets import Dataset, Reading, load_dataset
from megarl.data.messages import as_messages
from megarl.data.rows import number_of_rows
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import DataError, RecordError
from megarl.rollout.programs import Limits, judge
from tests.tables import read_table
from tests.templates import stop_ids, tokenizer_of

TABLES = read_table("columns.yaml")

Rows = list[dict[str, Any]]


def turns(*texts: str, system: str = "") -> Rows:
    """A conversation as plain messages: the user's and the assistant's texts in turn."""
    messages = [
        {"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)
    ]
    return [{"role": "system", "content": system}, *messages] if system else messages


def sharegpt(*texts: str) -> Rows:
    return [{"from": ("human", "gpt")[place % 2], "value": text} for place, text in enumerate(texts)]


def called(name: str, arguments: Any, number: str, said: str) -> Rows:
    """A call of a function and what it returned, as plain messages."""
    call = {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": number, "content": said},
    ]


def write(path: Path, rows: Rows, form: str = "jsonl") -> Path:
    path.mkdir(parents=True, exist_ok=True)
    file = path / f"rows.{form}"
    if form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(file))
    elif form == "csv":
        with file.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        file.write_text("\n".join(map(json.dumps, rows)))
    return file


def load(
    path: Path, kind: Kind = Kind.ANSWERS, template: str = "qwen2.5", **keys: Any
) -> tuple[Dataset, dict[str, Any]]:
    """The rows of a file as a run reads them, and the source with what was found."""
    tokenizer = tokenizer_of(template)
    source: Any = {"path": str(path), **keys}
    config: Any = {"max_input_seq_length": 4000, "cache_dir": str(path.parent / "cache")}
    reading = Reading(
        config,
        tokenizer,
        kind is not Kind.REFERENCES,
        pairs=kind is Kind.PAIRS,
        stop_tokens=tuple(stop_ids(template, tokenizer)),
    )
    return load_dataset(source, reading), source


def tokens_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    return [(each.prompt_ids, each.answer_ids, each.targets) for each in dataset.examples]


PUBLISHED: dict[str, dict[str, Any]] = read_table("published_rows.yaml")
LEARNED = PUBLISHED["learned"]
TOOL = {
    "name": "weather",
    "description": "",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
TOOLS = [{"type": "function", "function": TOOL}]
WARM = {"role": "assistant", "content": "It is 20."}


@pytest.mark.parametrize("template", ["qwen2.5", "llama3.1"])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", LEARNED)
def test_published_rows_are_learned_as_plain_messages(
    tmp_path: Path, name: str, form: str, template: str
) -> None:
    rows, plain = LEARNED[name].values()
    has_tools = bool({"functions", "tools"} & rows[0].keys())
    # llama3.1's template writes the arguments of a call as it gets them
    found, _ = load(write(tmp_path / "found", rows, form), template=template)
    same: Rows = [{"m": messages, **({"t": TOOLS} if has_tools else {})} for messages in plain]
    keys = {"messages_key": "m", **({"tools_key": "t"} if has_tools else {})}
    assert tokens_of(found) == tokens_of(load(write(tmp_path / "plain", same), template=template, **keys)[0])


@pytest.mark.parametrize("name", ["function_call", "sharegpt with tools"])
def test_calls_and_their_answers_have_the_same_ids(name: str) -> None:
    """Mistral's templates refuse calls without an id; the templates above write none."""
    rows, plain = LEARNED[name].values()
    [messages] = [rows[0][key] for key in ("messages", "conversations") if key in rows[0]]
    found = as_messages(messages, "m", "row")
    calls = [call for message in found for call in message.get("tool_calls", [])]
    assert (
        [call["id"] for call in calls]
        == [message["tool_call_id"] for message in found if message["role"] == "tool"]
        == ["c00001000"]
    )
    assert [message["role"] for message in found] == [
        message["role"] for message in plain[0] if message["role"] != "system"
    ]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLISHED["pairs"])
def test_published_pairs_are_those_of_plain_messages(tmp_path: Path, name: str, form: str) -> None:
    rows, plain = PUBLISHED["pairs"][name].values()
    found, _ = load(write(tmp_path / "found", rows, form), Kind.PAIRS)
    same: Rows = [
        {"p": asked, **{key: turns("", said)[1:] for key, said in (("c", good), ("r", bad))}}
        for asked, good, bad in plain
    ]
    keys = {"prompt_key": "p", "chosen_key": "c", "rejected_key": "r"}
    assert tokens_of(found) == tokens_of(load(write(tmp_path / "plain", same), Kind.PAIRS, **keys)[0])


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLISHED["references"])
def test_published_rows_give_prompts_and_reference_answers(tmp_path: Path, name: str, form: str) -> None:
    rows, plain, keys = PUBLISHED["references"][name].values()
    file = write(tmp_path / "found", rows, form)
    found, source = load(file, Kind.REFERENCES)
    assert {key: value for key, value in source.items() if key != "path"} == keys
    same, _ = load(
        write(tmp_path / "plain", [{"p": p, "a": a} for p, a in plain]),
        Kind.REFERENCES,
        prompt_key="p",
        answer_key="a",
    )
    assert [(each.prompt_ids, each.answer) for each in found.examples] == [
        (each.prompt_ids, each.answer) for each in same.examples
    ]
    # a resumed run reads the configuration that has been completed
    again, _ = load(file, Kind.REFERENCES, **keys)
    assert again.fingerprint == found.fingerprint


PROGRAM = (
    "```python\nimport math\ndef square(x):\n    return x * x\nif __name__ == '__main__':\n    "
    "print(sum(map(int, input().split())))\n```"
)


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("name", PUBLISHED["tests"])
def test_columns_of_tests_are_run_as_they_are_stored(tmp_path: Path, name: str, form: str) -> None:
    found, _ = load(write(tmp_path, [PUBLISHED["tests"][name]], form), Kind.REFERENCES)
    [example] = found.examples
    limits = Limits(seconds=60.0, isolated=False)
    assert judge(PROGRAM, example.answer, limits) == 1.0
    assert judge("```python\ndef square(x):\n    return 5\nprint(5)\n```", example.answer, limits) == 0.0


@pytest.mark.parametrize(
    ("kind", "row", "parts"),
    [
        (
            Kind.ANSWERS,
            {"messages": turns("a", "b"), "prompt": "a", "completion": "b"},
            ["messages, prompt, completion", "messages_key="],
        ),
        (
            Kind.ANSWERS,
            {"problem": "a", "solution": "b", "answer": "c"},
            ["answer_key=answer", "answer_key=solution"],
        ),
        (
            Kind.ANSWERS,
            {"context": "c", "question": "a", "answer": "b"},
            ["prompt_key=[context,question]", "prompt_key=question "],
        ),
        (
            Kind.REFERENCES,
            {"passage": "c", "question": "a", "answer": "b"},
            ["prompt_key=[passage,question]", "prompt_key=question "],
        ),
        (Kind.REFERENCES, {"text": "Once upon a time."}, ["(text)", "prompt_key and answer_key"]),
        *(
            (Kind.ANSWERS, {"text": "Once upon a time.", name: "a"}, [f"(text, {name})", "prompt_key=[]"])
            for name in ("label", "system", "tools", "context", "input", "summary", "chosen")
        ),
        (Kind.ANSWERS, {"text": "\n\nHuman: Hi\n\nAssistant: Hi\n\nHuman: Bye"}, ["(text)", "messages_key"]),
        (Kind.ANSWERS, {"ask": "a", "say": "b"}, ["(ask, say)", "messages_key"]),
        (
            Kind.REFERENCES,
            {"prompt": "a", "question": "b", "answer": "c"},
            ["prompt_key=prompt", "prompt_key=question"],
        ),
        (
            Kind.REFERENCES,
            {"messages": turns("a", "b"), "answer": "b"},
            ["messages_key=messages;", "answer_key=answer"],
        ),
        (Kind.REFERENCES, {"prompt": "a"}, ["reference answers", "(prompt)"]),
        (
            Kind.PAIRS,
            {"chosen": "a", "rejected": "b"},
            ["(chosen, rejected)", "prompt_key unless both hold whole conversations"],
        ),
        (
            Kind.PAIRS,
            {"prompt": "a", "good": "b", "bad": "c"},
            ["(prompt, good, bad)", "chosen_key and rejected_key"],
        ),
        (
            Kind.PAIRS,
            {"prompt": "a", "question": "a", "chosen": "b", "rejected": "c"},
            ["prompt_key=prompt chosen_key=chosen", "; or "],
        ),
    ],
)
def test_columns_without_one_reading_are_refused_with_what_to_write(
    tmp_path: Path, kind: Kind, row: Any, parts: list[str]
) -> None:
    with pytest.raises(DataError) as caught:
        load(write(tmp_path, [row]), kind)
    assert "rows.jsonl" in str(caught.value) and "Fix: write" in str(caught.value)
    assert all(part in str(caught.value) for part in parts), caught.value


@pytest.mark.parametrize(
    ("kind", "given", "row", "found"),
    [
        (
            Kind.ANSWERS,
            {"answer_key": "solution"},
            {"problem": "a", "solution": "b", "answer": "c"},
            {"prompt_key": "problem"},
        ),
        (
            Kind.REFERENCES,
            {"prompt_key": "ask"},
            {"ask": "a", "question": "b", "answer": "c"},
            {"answer_key": "answer"},
        ),
        (
            Kind.REFERENCES,
            {"answer_key": "n"},
            {"messages": turns("a", "b"), "n": 3},
            {"messages_key": "messages"},
        ),
        (Kind.ANSWERS, {"messages_key": "m"}, {"m": turns("a", "b"), "messages": 3, "system": "c"}, {}),
        (
            Kind.PAIRS,
            {"chosen_key": "good"},
            {"prompt": "a", "good": "b", "chosen": "x", "rejected": "c"},
            {"rejected_key": "rejected"},
        ),
    ],
)
def test_given_keys_stay(
    tmp_path: Path, kind: Kind, given: dict[str, str], row: Any, found: dict[str, str]
) -> None:
    source: Any = {"path": str(write(tmp_path, [row])), **given}
    complete_source(source, kind)
    assert source.items() >= {**given, **found}.items()
    assert (len(source) == 2) == (not found)


def test_what_was_found_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "megarl")
    load(write(tmp_path, [{"question": "1+1?", "answer": "2"}]), Kind.REFERENCES)
    assert "rows.jsonl: prompts from 'question', reference answers from 'answer'" in caplog.text


def test_a_first_record_that_cannot_be_read_is_refused_or_left_out(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": \n{"prompt": "a", "answer": "b"}\n')
    with pytest.raises(RecordError, match="line 1 is not JSON"):
        complete_source({"path": str(file)}, Kind.ANSWERS)
    source: Any = {"path": str(file)}
    complete_source(source, Kind.ANSWERS, skips_bad_records=True)
    assert source["prompt_key"] == "prompt"


@pytest.mark.parametrize(
    ("value", "message"),
    TABLES["messages that cannot be read are told what to write"],
)
def test_messages_that_cannot_be_read_are_told_what_to_write(
    tmp_path: Path, value: Any, message: str
) -> None:
    with pytest.raises(RecordError, match=rf"line 1.*{message}"):
        load(write(tmp_path, [{"messages": value}]), messages_key="messages")


def test_a_text_that_only_looks_like_messages_stays_a_text(tmp_path: Path) -> None:
    texts = [
        "[1, 2]",
        "[not JSON",
        "Human: is this a transcript?",
        '[{"a": 1}]',
        "\n\nHuman: no end\n\nAssistant: said",
    ]
    found, _ = load(write(tmp_path / "t", [{"prompt": text, "completion": text} for text in texts]))
    plain, _ = load(
        write(tmp_path / "m", [{"messages": turns(text, text)} for text in texts]), messages_key="messages"
    )
    # a conversation may not hold a transcript, so that only the texts are compared
    decoded = [
        tokenizer_of("qwen2.5").decode([*each.prompt_ids, *each.answer_ids]) for each in found.examples
    ]
    assert all(text.count(said) == 2 for text, said in zip(decoded, texts, strict=True))
    assert tokens_of(found) == tokens_of(plain)


def test_a_completion_of_several_messages_is_told_what_to_write(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"holds 3 messages.*messages_key"):
        load(write(tmp_path, [{"prompt": turns("Hi"), "completion": turns("", "Hello", "Bye", "Bye!")[1:]}]))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": None, "answer": "2"}, "'prompt' = None is neither"),
        ({"prompt": "1+1?", "answer": None}, "'answer' is null"),
        ({"prompt": "1+1?", "answer": {"is": 2}}, r"'answer' = .* is a dict.*answer\.is"),
        (["1+1?", "2"], r"is a list, expected an object. Fix: write \{'prompt': \.\.\., 'answer'"),
    ],
)
def test_a_first_record_of_the_wrong_type_is_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(RecordError, match=f"line 1.*{message}"):
        load(write(tmp_path, [row, row]), Kind.REFERENCES)


def test_a_column_that_is_null_in_the_first_record_is_no_second_reading(tmp_path: Path) -> None:
    rows = [
        {"prompt": None, "question": "1+1?", "answer": "2", "target": None},
        {"prompt": None, "question": "Sky?", "answer": "Blue."},
    ]
    _, source = load(write(tmp_path, rows, "parquet"), Kind.REFERENCES)
    assert (source["prompt_key"], source["answer_key"]) == ("question", "answer")


def test_a_conversation_may_go_with_several_columns_of_tests(tmp_path: Path) -> None:
    row = {
        "messages": turns("Square."),
        "test_list": ["assert square(two) == 4"],
        "test_setup_code": "two = 2",
    }
    for keys in ({}, {"messages_key": "messages", "answer_key": ["test_list", "test_setup_code"]}):
        found, _ = load(write(tmp_path, [row]), Kind.REFERENCES, **keys)
        assert judge(PROGRAM, found.examples[0].answer, Limits(seconds=60.0, isolated=False)) == 1.0


def test_two_system_messages_are_refused(tmp_path: Path) -> None:
    row = {"m": turns("Hi", "Hello", system="Be kind."), "s": "Be brief."}
    with pytest.raises(RecordError, match=r"has a system message, and so has 's'"):
        load(write(tmp_path, [row]), messages_key="m", system_key="s")


def test_a_system_message_beside_some_conversations_is_read(tmp_path: Path) -> None:
    """The first record says its own, and stores it a second time; the others have theirs in the column."""
    rows = [
        {"system": "Be kind.", "messages": turns("Hi", "Hello", system="Be kind.")},
        {"system": "Count.", "messages": turns("1+1?", "2")},
        {"system": "", "messages": turns("Bye", "Bye!", system="Be brief.")},
    ]
    plain = [{"m": row["messages"]} for row in rows]
    plain[1] = {"m": turns("1+1?", "2", system="Count.")}
    found, source = load(write(tmp_path / "found", rows))
    assert source["system_key"] == "system"
    assert tokens_of(found) == tokens_of(load(write(tmp_path / "plain", plain), messages_key="m")[0])


def prompts(path: Path, rows: Rows, **keys: Any) -> list[str]:
    """The text of each prompt, where a run has a system message of its own."""
    tokenizer = tokenizer_of("qwen2.5")
    config: Any = {
        "max_input_seq_length": 4000,
        "cache_dir": str(path / "cache"),
        "system_prompt": "Of the run.",
    }
    source: Any = {"path": str(write(path, rows)), **keys}
    found = load_dataset(source, Reading(config, tokenizer, False))
    return [tokenizer.decode(each.prompt_ids) for each in found.examples]


def test_a_system_message_of_the_run_is_put_before_prompts_without_one(tmp_path: Path) -> None:
    rows = [{"prompt": turns("Hi", system="Its own."), "answer": "4"}, {"prompt": turns("Hi"), "answer": "4"}]
    own, without = prompts(tmp_path / "prompts", rows, prompt_key="prompt", answer_key="answer")
    assert own.count("system") == 1 and "Its own." in own
    assert without.count("system") == 1 and "Of the run." in without
    fields = [{"q": "Hi", "a": "4", "s": system} for system in ("Its own.", "", None)]
    keys = {"prompt_key": "q", "answer_key": "a", "system_key": "s"}
    own, empty, null = prompts(tmp_path / "fields", fields, **keys)
    assert "Its own." in own and "Of the run." not in own
    # qwen2.5's template writes a system message of its own where there is none
    assert "Of the run." not in empty and "Of the run." in null


def test_prompts_that_end_with_the_assistant_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"messages": turns("2+2?", "4"), "answer": "4"}]
    load(write(tmp_path, rows), Kind.REFERENCES, prompt_key="messages", answer_key="answer")
    assert "1 of 1 prompts end with a turn of the assistant, which the chat template closes" in caplog.text


@pytest.mark.parametrize("kind", [Kind.ANSWERS, Kind.REFERENCES])
def test_messages_with_dates_are_read(tmp_path: Path, kind: Kind) -> None:
    dated = [{**message, "timestamp": datetime.datetime(2024, 1, 1)} for message in turns("Hi", "Hello")]
    rows = [{"m": dated[: 1 if kind is Kind.REFERENCES else 2], "a": "x"}]
    keys = {"prompt_key": "m", "answer_key": "a"} if kind is Kind.REFERENCES else {"messages_key": "m"}
    found, _ = load(write(tmp_path, rows, "parquet"), kind, **keys)
    assert len(found.examples) == 1


HALF = "half of a character: \ud83d"


@pytest.mark.parametrize(
    ("template", "turn"),
    [
        ("qwen2.5", called("weather", {"city": HALF}, "a", "20")[0]),
        ("qwen3", {"role": "assistant", "content": "Yes.", "reasoning_content": HALF}),
    ],
)
def test_half_a_character_anywhere_names_its_record(tmp_path: Path, template: str, turn: Any) -> None:
    with pytest.raises(RecordError, match=r"rows.jsonl line 1: .* half of a surrogate pair"):
        load(write(tmp_path, [{"m": [*turns("Hi"), turn]}]), template=template, messages_key="m")


def test_calls_as_text_are_read_as_objects(tmp_path: Path) -> None:
    [turn, said] = called("weather", {"city": "Rome"}, "a", "20")
    found = []
    for place, calls in enumerate(
        (turn["tool_calls"], json.dumps(turn["tool_calls"]), [json.dumps(turn["tool_calls"][0])])
    ):
        rows = [{"m": [*turns("Warm?"), {**turn, "tool_calls": calls}, said, WARM]}]
        found.append(tokens_of(load(write(tmp_path / str(place), rows), messages_key="m")[0]))
    assert found[0] == found[1] == found[2]
    for calls in ("null", None, []):
        rows = [{"m": [*turns("Hi"), {**WARM, "tool_calls": calls}]}]
        assert load(write(tmp_path / "none", rows), messages_key="m")[0].examples[0].prompt_ids
    rows = [{"m": [*turns("Warm?"), {**turn, "tool_calls": ["look"]}, said, WARM]}]
    with pytest.raises(RecordError, match=r"m\[1\]: 'look' is no function call"):
        load(write(tmp_path / "odd", rows), template="chatml", messages_key="m")


def test_the_earlier_turns_of_a_column_are_not_left_out_quietly(tmp_path: Path) -> None:
    row = {"instruction": "And 3+3?", "output": "6", "history": [["1+1?", "2"]]}
    with pytest.raises(DataError, match="'history' holds earlier turns"):
        load(write(tmp_path, [row]))


def test_empty_and_controlled_answers_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"q": "Hi", "a": ""}, {"q": "Hi", "a": "Yes.<|im_end|>"}, {"q": "Hi", "a": "Yes."}]
    load(write(tmp_path, rows), prompt_key="q", answer_key="a")
    assert "1 empty answers in 3 records" in caplog.text and "line 1): its answer" in caplog.text
    assert "1 of 3 records have a control token" in caplog.text


@pytest.mark.parametrize(
    ("row", "keys", "names"),
    [
        ({"tools": TOOLS}, {}, ["tools_key"]),
        ({"system": "Be kind.", "tools": json.dumps(TOOLS)}, {}, ["system_key", "tools_key"]),
        ({"functions": [TOOL]}, {"tools_key": "functions"}, []),
        ({"system": "", "tools": None}, {}, []),
        ({"system": "Tools: <tools></tools>", "tools": TOOLS}, {"system_key": "system"}, []),
        ({"system": "Be kind.", "messages": turns("Hi", "Hello", system="Be brief.")}, {}, []),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}], "tools": TOOLS}, {}, ["tools_key"]),
    ],
)
def test_tools_that_no_given_key_names_are_warned_of(
    tmp_path: Path, row: Any, keys: dict[str, str], names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    file = write(tmp_path, [{"messages": turns("Hi", "Hello"), **row}])
    complete_source({"path": str(file), "messages_key": "messages", **keys}, Kind.ANSWERS)
    assert [name for name in ("system_key", "tools_key") if f"Set {name}" in caplog.text] == names


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "hermes"])
def test_hermes_text_of_tools_and_results_is_written_once(tmp_path: Path, template: str) -> None:
    """Its system message lists the tools of the column too, and results have their marks."""
    asked = turns("How warm is Rome?", system=f"You may call <tools>{json.dumps(TOOL)}</tools>")[:2]
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    result = "<tool_response>\n{}\n</tool_response>"
    messages = [*asked, {"role": "assistant", "content": call}]
    messages += [{"role": "tool", "content": result.format('{"degrees": 20}')}, WARM]
    two = [*messages[:3], {"role": "tool", "content": "\n".join([result.format("20"), result.format("30")])}]
    rows = [{"messages": each, "tools": json.dumps(TOOLS)} for each in (messages, [*two, WARM])]
    found, source = load(write(tmp_path, rows), template=template)
    tokenizer = tokenizer_of(template)
    texts = [tokenizer.decode([*each.prompt_ids, *each.answer_ids]) for each in found.examples]
    assert "tools_key" not in source
    assert [text.count("weather") for text in texts] == [2, 2]
    assert [text.count("<tool_response>") for text in texts] == [1, 2]
    assert "<tool_response>\n20\n</tool_response>\n<tool_response>\n30\n</tool_response>" in texts[1]


# columns that are not read, and without which the others mean something else

UNREAD = TABLES["what is not read is refused where nobody has named the keys"]


@pytest.mark.parametrize(("kind", "row", "message"), UNREAD)
def test_a_column_that_changes_what_the_others_mean_is_refused(
    tmp_path: Path, kind: str, row: Any, message: str
) -> None:
    with pytest.raises(DataError, match=rf"{message}.*Fix: "):
        load(write(tmp_path, [row]), Kind[kind])


@pytest.mark.parametrize(
    ("kind", "row", "keys"),
    [
        (Kind.REFERENCES, UNREAD[0][1], {"prompt_key": "question", "answer_key": "answer"}),
        (Kind.ANSWERS, UNREAD[6][1], {"prompt_key": "prompt", "answer_key": "completion"}),
        (Kind.REFERENCES, {"question": "A. Rome\nB. 20", "options": ["Rome", 20, ""], "answer": "B"}, {}),
        (Kind.REFERENCES, {"question": "A. Rome B. Oslo", "choices": '["Rome", "Oslo"]', "answer": "B"}, {}),
        (Kind.ANSWERS, {"question": "Sky?", "options": {"temperature": 0.7}, "answer": "Blue"}, {}),
        (Kind.REFERENCES, {"question": "Sky?", "images": [], "options": None, "answer": "Blue"}, {}),
        (Kind.ANSWERS, {"question": "What is <image>?", "image": "", "answer": "A tag."}, {}),
        (Kind.ANSWERS, {"messages": turns("Hi", "Hello"), "label": 1, "chat_template_kwargs": None}, {}),
    ],
)
def test_a_column_that_changes_nothing_is_no_fault(
    tmp_path: Path, kind: Kind, row: Any, keys: dict[str, str]
) -> None:
    assert len(load(write(tmp_path, [row]), kind, **keys)[0]) == 1


@pytest.mark.parametrize("kind", [Kind.ANSWERS, Kind.PAIRS])
def test_a_text_with_the_place_of_a_picture_is_refused(tmp_path: Path, kind: Kind) -> None:
    asked = [
        {"prompt": "Sky?", "image": None},
        {"prompt": "<image>\nWhat is it?", "image": "a.png"},
    ]
    rows = [{**row, "answer": "A", "chosen": "A", "rejected": "B"} for row in asked]
    keys = {"prompt_key": "prompt"}
    if kind is Kind.ANSWERS:
        keys["answer_key"] = "answer"
    file = write(tmp_path, rows)
    with pytest.raises(
        RecordError, match=r"line 2.*placeholder <image> for the content of 'image'.*on_bad_record"
    ):
        load(file, kind, **keys)


# Texts


@pytest.mark.parametrize("keys", [{}, {"prompt_key": [], "answer_key": "text"}])
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
@pytest.mark.parametrize("template", ["qwen2.5", "llama3.1", "mistral-v3", "hermes"])
def test_a_text_by_itself_is_learned_whole(
    tmp_path: Path, form: str, template: str, keys: dict[str, Any]
) -> None:
    """As TRL's language modelling has it: the tokenizer's tokens and one end token; all but the first are
    targets."""
    tokenizer = tokenizer_of(template)
    begin, end = tokenizer.bos_token or "", tokenizer.eos_token
    texts = ["Once upon a time.", "### Question: 1+1?\n### Answer: 2" + end, begin + "Two\n\nparts", "a"]
    rows = [{"text": text, "meta": {"source": "book"}} for text in texts]
    found, source = load(write(tmp_path, rows, form), template=template, **keys)
    assert source["prompt_key"] == [] and source["answer_key"] == "text"
    leads = tokenizer("")["input_ids"] == [tokenizer.bos_token_id] != [tokenizer.eos_token_id]
    expected = [
        (begin if leads and not text.startswith(begin) else "") + text.removesuffix(end) + end
        for text in texts
    ]
    batch = supervised_batch(list(found.examples), tokenizer.pad_token_id or 0)
    for row, text in enumerate(expected):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        length = int(batch["input_lengths"][row])
        assert batch["input_ids"][row, :length].tolist() == ids
        assert batch["token_mask"][row].nonzero().flatten().tolist() == list(range(1, length))


@pytest.mark.parametrize("key", ["prompt_key", "system_key"])
def test_a_text_beside_a_field_that_the_source_names_is_not_by_itself(tmp_path: Path, key: str) -> None:
    with pytest.raises(DataError, match="hold neither prompts with answers nor"):
        load(write(tmp_path, [{"text": "a", "q": "b"}]), **{key: "q"})


def test_texts_that_cannot_be_learned_are_refused(tmp_path: Path) -> None:
    for row, message in (
        ({"text": ""}, "1 of 2 prompts with answers have no tokens"),
        ({"text": None}, "is null"),
    ):
        with pytest.raises(DataError, match=message):
            load(write(tmp_path, [{"text": "a"}, row]))
    with pytest.raises(DataError, match=r"max_input_seq_length = 4000.*more than \d+ tokens"):
        load(write(tmp_path, [{"text": "1 + 1 = " * 100_000}]))


# One list


ALPACA = [
    {"instruction": "Add.", "input": "1 [and] 2", "output": "3"},
    {"instruction": "Grüße?\n[", "input": "", "output": "Hallo ☺"},
    {"instruction": "Stop.", "input": "", "output": "]"},
]


@pytest.mark.parametrize("name", ["train.json", "train.jsonl"])
@pytest.mark.parametrize(
    "text",
    [
        json.dumps(ALPACA),
        json.dumps(ALPACA, indent=2, ensure_ascii=False) + "\n",
        "\ufeff\n" + json.dumps(ALPACA, indent=4).replace("\n", "\r\n"),
        "[" + ",\n".join(map(json.dumps, ALPACA)) + "]\n\n",
        "[\n" + json.dumps(ALPACA)[1:],
    ],
)
def test_a_list_has_the_tokens_of_its_items_as_lines(tmp_path: Path, name: str, text: str) -> None:
    lines, found = load(write(tmp_path / "l", ALPACA))
    (tmp_path / name).write_bytes(text.encode())
    table, source = load(tmp_path / name)
    assert {**source, "path": ""} == {**found, "path": ""} and number_of_rows(source) == 3  # type: ignore[arg-type]
    assert tokens_of(table) == tokens_of(lines) and table.fingerprint == lines.fingerprint


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"prompt": "a", "answer": "b"},\n {"prompt": "c" "answer": "d"}]', "line 2 column 17 is not JSON"),
        ('[{"prompt": "a", "answer": "b"},\n', "line 2 column 1 is not JSON"),
        ('[\n{"prompt": "a", "answer": "b"}\n]\n{"prompt": "c"}', "line 4 column 1 is not JSON: Extra data"),
        ('[{"prompt": "a", "answer": "b"}, "c"]', "item 2 is a str, expected an object"),
        ('[{"prompt": "a", "answer": "b"}, {"prompt": "c"}]', "item 2 has no key 'answer'"),
        ('[{"prompt": "a", "answer": ' + "[" * 600 + "]" * 600 + "}]", "item 1 cannot be used: it nests"),
        ("[" * 200_000, "is not JSON: it nests too deeply"),
        ("[" + "9" * 5000 + "]", "is not JSON: Exceeds the limit"),
        ('[{"prompt": "a"}]\n[{"prompt": "c"}]', "line 1 is a list, expected an object"),
        ("[]", "holds 0 records"),
    ],
)
def test_a_list_that_cannot_be_used_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "train.json").write_text(text)
    with pytest.raises(DataError, match=rf"(?s)train\.json.*{message}.*Fix: "):
        load(tmp_path / "train.json", Kind.REFERENCES)


# CSV


def test_csv_has_the_tokens_of_the_same_lines(tmp_path: Path) -> None:
    rows = [
        {"question": "Agent?", "answer": "007"},
        {"question": "Large?", "answer": "1e3"},
        {"question": 'A "quoted", long\n\nquestion; with\ttabs?', "answer": "NA"},
        {"question": "True?", "answer": "true"},
        {"question": "When?", "answer": "2024-01-01"},
    ]
    lines = load(write(tmp_path / "l", rows), Kind.REFERENCES)[0]
    table = load(write(tmp_path / "c", rows, "csv"), Kind.REFERENCES)[0]
    assert [each.answer for each in table.examples] == [row["answer"] for row in rows]
    assert tokens_of(table) == tokens_of(lines) and table.fingerprint == lines.fingerprint


@pytest.mark.parametrize(
    ("name", "content", "rows"),
    [
        ("a.csv", b"\xef\xbb\xbfprompt,answer\r\na,007\r\n", [("a", "007")]),
        ("a.tsv", b'prompt\tanswer\n"a\tb"\t1,5\n', [("a\tb", "1,5")]),
        ("A.CSV", b'prompt,answer\n"say ""yes""",\xc3\xa9\n', [('say "yes"', "é")]),
        ("a.csv", b",prompt,answer\n0,a,b\n1,c,\n", [("a", "b"), ("c", "")]),
    ],
)
def test_cells_are_texts(tmp_path: Path, name: str, content: bytes, rows: list[tuple[str, str]]) -> None:
    (tmp_path / name).write_bytes(content)
    found, source = load(tmp_path / name, Kind.REFERENCES)
    assert source["prompt_key"] == "prompt" and source["answer_key"] == "answer"
    assert [each.answer for each in found.examples] == [answer for _, answer in rows]
    decoded = [tokenizer_of("qwen2.5").decode(each.prompt_ids) for each in found.examples]
    assert all(
        f"<|im_start|>user\n{prompt}<|im_end|>" in text
        for (prompt, _), text in zip(rows, decoded, strict=True)
    )


def test_csv_may_hold_messages_as_json_text(tmp_path: Path) -> None:
    plain = [turns("Hi", "Hello", "Bye", "Bye!"), turns("1+1?", "2", system="Count.")]
    table, _ = load(write(tmp_path / "c", [{"messages": json.dumps(each)} for each in plain], "csv"))
    assert tokens_of(table) == tokens_of(
        load(write(tmp_path / "l", [{"messages": each} for each in plain]))[0]
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"prompt,answer,answer\na,b,c\n", r"has 'answer' 2 times"),
        (b"", r"cannot be read as CSV"),
        ("prémpt,answer\na,b\n".encode("latin-1"), r"cannot be read as CSV"),
        ("prompt,answer\na,b\n".encode("utf-16"), r"cannot be read as CSV"),
        (b"prompt;answer\na;b\n", r"\(prompt;answer, named by its first line\)"),
        (b"prompt,answer\n", r"holds 0 records"),
        (b"What is 1+1?,2\nWhat is 1+2?,3\n", r"\(What is 1\+1\?, 2, named by its first line\)"),
        (b"prompt,answer\na,b\nc\n", r"after \d rows: .*[Ee]xpected 2 columns, got 1"),
        (b"prompt,answer\n\xff\xfe,b\n", r"invalid UTF8"),
        (b'prompt,answer\n"a,b\n', r"cannot be read as CSV"),
    ],
)
def test_csv_that_cannot_be_read_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "a.csv").write_bytes(content)
    with pytest.raises(DataError, match=rf"(?s)a\.csv.*{message}.*Fix: "):
        load(tmp_path / "a.csv", Kind.REFERENCES)


def test_a_long_cell_is_read(tmp_path: Path) -> None:
    """More than a block of the reader's usual size."""
    row = {"prompt": "a", "answer": "b, " * 700_000}
    found, _ = load(write(tmp_path, [row, {"prompt": "c", "answer": "d"}], "csv"), Kind.REFERENCES)
    assert [each.answer for each in found.examples] == [row["answer"], "d"]


def test_a_directory_of_csv_files_is_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "d", [{"prompt": "a", "answer": "007"}], "csv")
    with pytest.raises(DataError, match=r"has CSV files.*Fix: give the path of each file"):
        load(file.parent, Kind.REFERENCES)


@pytest.mark.parametrize(
    ("answers", "keys"),
    [
        ([7, "08"], {}),
        (["1e3", 7.5], {}),
        (["2026-01-02", "2026-01-03"], {}),
        ([{"final": 7}, {"final": "08"}], {"answer_key": "answer.final"}),
        ([[7], ["08"]], {"answer_key": "answer[0]"}),
    ],
)
@pytest.mark.parametrize("form", ["lines", "list"])
def test_a_directory_whose_texts_the_library_changes_is_refused(
    tmp_path: Path, answers: list[Any], keys: dict[str, str], form: str
) -> None:
    rows = [{"question": "How many?", "answer": answer, "unread": answer} for answer in answers]
    directory = tmp_path / "set"
    directory.mkdir()
    if form == "lines":
        (directory / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    else:
        (directory / "train.json").write_text(json.dumps(rows))
    with pytest.raises(DataError, match=r"'answer' holds texts.*Fix: give the path of each file"):
        load(directory, Kind.REFERENCES, prompt_key="question", **{"answer_key": "answer", **keys})
    if form == "lines":
        found, _ = load(
            directory / "train.jsonl",
            Kind.REFERENCES,
            prompt_key="question",
            **{"answer_key": "answer", **keys},
        )
        assert [each.answer for each in found.examples][1] in ("08", "7.5", "2026-01-03")


def test_a_set_of_the_hub_whose_texts_the_library_changes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"question": "How many?", "answer": answer} for answer in (7, "08")]
    file, read = write(tmp_path, rows), datasets.load_dataset
    # the hub is not asked: its files are read as the library reads those of a set of JSON lines
    monkeypatch.setattr(
        datasets, "load_dataset", lambda name, subset, split: read("json", data_files=str(file), split=split)
    )
    config: Any = {"max_input_seq_length": 40, "cache_dir": str(tmp_path / "cache")}
    reading = Reading(config, tokenizer_of("qwen2.5"), False, stop_tokens=())
    source: Any = {"name": "some/set", "prompt_key": "question", "answer_key": "answer"}
    with pytest.raises(
        DataError, match=r"some/set: 'answer' holds texts.*Fix: hf download some/set --repo-type"
    ):
        load_dataset(source, reading)


def test_a_directory_of_texts_that_are_numbers_keeps_them(tmp_path: Path) -> None:
    rows = [{"question": "1+1?", "answer": text, "meta": mixed} for text, mixed in (("007", 1), ("1e3", "a"))]
    write(tmp_path / "set", rows)
    found, _ = load(tmp_path / "set", Kind.REFERENCES)
    assert [each.answer for each in found.examples] == ["007", "1e3"]
