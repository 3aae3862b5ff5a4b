"""Sources of data: keys into objects and lists, conversations, parquet, sets known by name, several sources,
and kept tables."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pytest
from pyarrow import parquet

from megarl.data import datasets as data_sets
from megarl.data import table
from megarl.data.datasets import Dataset, Reading, load_dataset
from megarl.data.records import Record, read_records
from megarl.data.tokenization import PromptEncoder, get_tokenizer
from megarl.distributed.token_batches import supervised_batch
from megarl.errors import DataError
from megarl.rollout.rewards import RewardSpec, get_reward
from tests.tables import read_table
from tests.unit.test_tokenization import save_tokenizer, words

TABLES = read_table("sources.yaml")

USER = {"role": "user", "content": "two"}
BOT = {"role": "assistant", "content": "five"}
SYSTEM = {"role": "system", "content": "be kind"}
TURN_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}<bot> {{ m['content'] }} </s> Q {% else "
    "%}<user> {{ m['content'] }} "
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<bot> {% endif %}"
)
MARKED_TEMPLATE = TURN_TEMPLATE.replace(
    "<bot> {{ m['content'] }} </s> Q ", "<bot> {% generation %}{{ m['content'] }} </s>{% endgeneration %} Q "
)


def write(path: Path, rows: list[Any], **keys: Any) -> dict[str, Any]:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return {"path": str(path), **keys}


def records(source: dict[str, Any]) -> list[Record]:
    return list(read_records(source))  # type: ignore[arg-type]


def load(sources: Any, tokenizer: Any, with_answers: bool = False, longest: int = 99, **more: Any) -> Dataset:
    config: Any = {"train": sources, "max_input_seq_length": longest, **more}
    return load_dataset(sources, Reading(config, tokenizer, with_answers))


@pytest.fixture
def tokenizer(tmp_path: Path) -> Any:
    return get_tokenizer({"name": save_tokenizer(tmp_path / "tokenizer")})


def test_keys_go_into_objects_and_lists(tmp_path: Path) -> None:
    row = {
        "prompt": [{"content": "a"}, {"content": "b"}],
        "reward_model": {"ground_truth": "1"},
        "x.y": "whole",
        "x": {"y": "parts"},
    }
    path = tmp_path / "a.jsonl"
    for key, expected in [("prompt[0].content", "a"), ("prompt[-1].content", "b"), ("x.y", "whole")]:
        found = records(write(path, [row], prompt_key=key, answer_key="reward_model.ground_truth"))
        assert (found[0].prompt, found[0].answer) == (expected, "1")


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("reward.truth", r"line 1 has no key 'reward.truth'; 'reward' has \['style'\]"),
        ("reward[0]", r"'reward' is dict, not a list"),
        ("list[2]", r"'list' has 2 members"),
        ("list.x", r"'list' is list, not an object"),
        ("list", r"by list\[0\]"),
        ("nowhere.x", r"it has \['list', 'p', 'reward'\]"),
    ],
)
def test_a_key_that_leads_nowhere_says_how_far(tmp_path: Path, key: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        records(
            write(
                tmp_path / "a.jsonl",
                [{"p": "a", "reward": {"style": "x"}, "list": ["1", "2"]}],
                prompt_key="p",
                answer_key=key,
            )
        )


@pytest.mark.parametrize(
    ("number", "text"),
    [(33, "33"), (-1, "-1"), (2.5, "2.5"), (4.0, "4"), (10**30, str(10**30)), (1e300, "1e+300")],
)
def test_numbers_become_text(tmp_path: Path, number: float, text: str) -> None:
    found = records(write(tmp_path / "a.jsonl", [{"p": number, "a": number}], prompt_key="p", answer_key="a"))
    assert (found[0].prompt, found[0].answer) == (text, text)


@pytest.mark.parametrize(
    "number", ["33.000", "-2.500", "0.000", "100.000", "1234567890123456789012345678901234.125"]
)
def test_exact_numbers_of_a_table_become_text(tmp_path: Path, number: str) -> None:
    table = pyarrow.table(
        {name: pyarrow.array([Decimal(number)], pyarrow.decimal256(40, 3)) for name in ("p", "a")}
    )
    parquet.write_table(table, tmp_path / "a.parquet")
    [found] = records({"path": str(tmp_path / "a.parquet"), "prompt_key": "p", "answer_key": "a"})
    shortest = {"33.000": "33", "-2.500": "-2.5", "0.000": "0", "100.000": "100"}.get(number, number)
    assert (found.prompt, found.answer) == (shortest, shortest)


def test_the_last_turn_of_the_assistant_is_the_answer(tmp_path: Path) -> None:
    turns = [SYSTEM, USER, BOT, {**USER, "name": None}, {**BOT, "content": "three"}]
    found = records(write(tmp_path / "a.jsonl", [{"m": turns}], messages_key="m"))
    assert (
        found[0].answer == "three"
        and list(found[0].prompt) == [SYSTEM, USER, BOT, USER]
        and found[0].last == turns[-1]
    )
    judged = records(
        write(
            tmp_path / "b.jsonl",
            [{"m": turns[:2], "a": 5}, {"m": turns, "a": 6}],
            messages_key="m",
            answer_key="a",
        )
    )
    assert [(list(each.prompt), each.answer, each.last) for each in judged] == [
        ([SYSTEM, USER], "5", None),
        ([SYSTEM, USER, BOT, USER], "6", None),
    ]


TOOL_CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
}
TOOL = {"role": "tool", "content": "two"}


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        *TABLES["broken conversations are named"],
        ([USER, {**BOT, "content": "\ud800"}], "half of a surrogate pair"),
    ],
)
def test_broken_conversations_are_named(tmp_path: Path, turns: Any, message: str) -> None:
    good = {"m": [USER, BOT]}
    with pytest.raises(
        DataError,
        match=rf"a\.jsonl line 2: .*{message}" if not message.startswith("m") else rf"line 2: {message}",
    ):
        records(write(tmp_path / "a.jsonl", [good, {"m": turns}], messages_key="m"))


def test_tools_and_their_answers(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    turns = [USER, TOOL_CALL, TOOL, TOOL, BOT]
    rows = [{"m": turns, "t": tools}, {"m": turns, "t": json.dumps(tools)}, {"m": turns, "t": None}]
    found = records(write(tmp_path / "a.jsonl", rows, messages_key="m", tools_key="t"))
    assert [list(each.tools) for each in found] == [tools, tools, []]
    name = save_tokenizer(tmp_path / "t")
    template = (
        "{% for tool in tools or [] %}Q {% endfor %}{% for m in messages %}<{{ m['role'] }}> {% endfor %}"
    )
    encoder = PromptEncoder(get_tokenizer({"name": name, "chat_template": template}))
    assert [words(row) for row in encoder.encode_records(found)] == [
        *["Q <user> <unk> <unk> <unk>"] * 2,
        "<user> <unk> <unk> <unk>",
    ]
    for bad, message in [
        ("[", "is not JSON"),
        ({"name": "add"}, "no list of objects"),
        (["add"], "no list of objects"),
    ]:
        with pytest.raises(DataError, match=message):
            records(write(tmp_path / "b.jsonl", [{"m": turns, "t": bad}], messages_key="m", tools_key="t"))


def test_parquet_jsonl_and_saved_data_sets_have_the_same_records(tmp_path: Path) -> None:
    rows = [{"p": [USER], "r": {"truth": number}} for number in range(2100)]
    keys = {"prompt_key": "p", "answer_key": "r.truth"}
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet", row_group_size=700)
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "train.jsonl", rows)
    expected = [(each.prompt, each.answer) for each in records(write(tmp_path / "a.jsonl", rows, **keys))]
    for path in ("a.parquet", "saved", "folder"):
        found = records({"path": str(tmp_path / path), **keys})
        assert [(each.prompt, each.answer) for each in found] == expected, path
        assert found[2099].origin.endswith("row 2099")


def test_a_broken_parquet_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{"p": "a", "a": "b"}]), path)
    whole = path.read_bytes()
    for content in (b"", b"no parquet", whole[:-9], whole[:20] + whole[40:]):
        path.write_bytes(content)
        with pytest.raises(DataError, match="cannot be read as parquet"):
            records({"path": str(path), "prompt_key": "p", "answer_key": "a"})


VERL = {
    "data_source": "math_dapo",
    "prompt": [{"content": "What?", "role": "user"}],
    "ability": "MATH",
    "extra_info": {"index": "9a9b"},
}
PUBLISHED = TABLES["published"]


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sets_need_no_keys(name: str, tmp_path: Path) -> None:
    row, answer = PUBLISHED[name]
    for found in (
        records(write(tmp_path / "a.jsonl", [row], name=name)),
        records({"name": name, "path": _parquet(tmp_path / "a.parquet", [row])}),
    ):
        assert [(each.prompt, each.answer) for each in found] == [("What?", answer)]


def _parquet(path: Path, rows: list[Any]) -> str:
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return str(path)


def test_sets_are_asked_for_where_they_are_published(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def load_set(name: str, subset: str | None, split: str) -> Any:
        asked.append((name, subset, split))
        return datasets.Dataset.from_list([PUBLISHED["AIME2025"][0]])

    monkeypatch.setattr(datasets, "load_dataset", load_set)
    assert [each.answer for each in records({"name": "AIME2025"})] == ["70", "70"]
    records({"name": "AIME2025", "subset": "AIME2025-II"})
    both = [("opencompass/AIME2025", f"AIME2025-{day}", "test") for day in ("I", "II")]
    assert asked == [*both, both[1]]


def test_a_solution_without_its_answer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"line 1: 'answer' is not of the form of gsm8k: there is no answer after ####"
    ):
        records(write(tmp_path / "a.jsonl", [{"question": "What?", "answer": "It is 4"}], name="gsm8k"))


def test_overlong_prompts_are_left_out_and_counted(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rows = [{"p": "two " * (1 + place % 4), "a": str(place)} for place in range(8)]
    source = write(tmp_path / "a.jsonl", rows, prompt_key="p", answer_key="a")
    found = load(source, tokenizer, longest=3, filter_overlong_prompts=True)
    assert [example.answer for example in found.examples] == ["0", "1", "2", "4", "5", "6"]
    assert [example.index for example in found.examples] == list(range(6))
    assert (
        "2 of 8 records (25.00 %) are left out" in caplog.text and "the longest has 4 tokens" in caplog.text
    )
    kept = write(
        tmp_path / "b.jsonl",
        [row for place, row in enumerate(rows) if place % 4 < 3],
        prompt_key="p",
        answer_key="a",
    )
    assert found.fingerprint == load(kept, tokenizer).fingerprint
    with pytest.raises(
        DataError, match=r"2 of 8 prompts exceed .* = 3\. Fix: raise it to 4, .*filter_overlong_prompts=true"
    ):
        load(source, tokenizer, longest=3)
    with pytest.raises(DataError, match="all 8 prompts exceed"):
        load(source, tokenizer, longest=0, filter_overlong_prompts=True)
    assert len(load(source, tokenizer, True, 4, filter_overlong_prompts=True)) == 4


def test_the_chat_template_reads_its_values(tmp_path: Path) -> None:
    template = (
        "{% if enable_thinking is defined and not enable_thinking %}Q {% endif %}{{ messages[0]['content'] }}"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path), "chat_template": template})
    encoded = [
        words(PromptEncoder(tokenizer, template_kwargs=values).encode("two"))
        for values in (None, {"enable_thinking": False})
    ]
    assert encoded == ["two", "Q two"]
    with pytest.raises(
        DataError, match=r"chat_template_kwargs\.enable_thinkin: the chat template does not read it"
    ):
        PromptEncoder(tokenizer, template_kwargs={"enable_thinkin": False})


def test_further_fields_go_to_the_environment(tmp_path: Path, tokenizer: Any, spilling: Path) -> None:
    rows = [{"p": "two", "a": "five", "x": {"level": place, "tests": ["\u00e9", None]}} for place in range(5)]
    plain = write(tmp_path / "a.jsonl", rows, prompt_key="p", answer_key="a")
    source = {**plain, "extra_keys": ["x.level", "x.tests"]}
    for _ in range(2):
        found = load(source, tokenizer, cache_dir=str(spilling))
        assert [each.fields for each in found.examples] == [
            {"x.level": place, "x.tests": ["\u00e9", None]} for place in range(5)
        ]
    assert found.fingerprint != load(plain, tokenizer).fingerprint
    with pytest.raises(DataError, match=r"line 1 has no key 'x\.y'"):
        load({**plain, "extra_keys": ["x.y"]}, tokenizer)
    path = _parquet(tmp_path / "a.parquet", [{"p": "two", "a": "five", "x": b"bytes"}])
    with pytest.raises(DataError, match=r"row 0: 'x' = b'bytes' cannot be passed on"):
        load({**source, "path": path, "extra_keys": ["x"]}, tokenizer)


def test_answers_are_judged_by_the_environment_that_the_record_meets(
    tmp_path: Path, tokenizer: Any, spilling: Path
) -> None:
    """Named by the source, or by the record itself; at the second start as well."""

    def fault(answer: str, name: str | None) -> str | None:
        return None if answer == name else f"{name} wants its name"

    rows = [{"p": "two", "a": name, "task_name": name} for name in ("one", "two", "one", "two")]
    source: Any = write(tmp_path / "a.jsonl", rows, prompt_key="p", answer_key="a", extra_keys=["task_name"])
    config: Any = {"max_input_seq_length": 9, "cache_dir": str(spilling)}
    for judge in ("first", "second"):
        assert (
            len(
                load_dataset(source, Reading(config, tokenizer, False, fault, judge, names_environments=True))
            )
            == 4
        )
        with pytest.raises(
            DataError, match=r"2 of 4 reference answers .* index 1.*: 'two': one wants its name"
        ):
            load_dataset(
                {**source, "env_name": "one"},
                Reading(config, tokenizer, False, fault, judge, names_environments=True),
            )


def test_a_template_that_fails_names_the_record(tmp_path: Path) -> None:
    template = (
        "{% if messages[0]['content'] == 'Q' %}{{ raise_exception('no') }}{% endif %}{{ "
        "messages[0]['content'] }}"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    source = write(
        tmp_path / "a.jsonl", [{"p": "two", "a": "1"}, {"p": "Q", "a": "1"}], prompt_key="p", answer_key="a"
    )
    with pytest.raises(
        DataError, match=r"a\.jsonl line 2: policy\.tokenizer\.chat_template cannot be applied"
    ):
        load(source, tokenizer)


@pytest.mark.parametrize(
    ("fails_at", "turn"),
    [("'system'", "1 of 4, of 'system'"), ("'tool'", "4 of 4, of 'tool'"), ("'user'", "2 of 4, of 'user'")],
)
def test_a_template_that_fails_names_the_turn(tmp_path: Path, fails_at: str, turn: str) -> None:
    """In the last case the system message alone can be written, and what fails comes after it."""
    template = (
        f"{{% for m in messages %}}{{% if m['role'] == {fails_at} %}}{{{{ raise_exception('no') "
        "}}{% endif %}Q{% endfor %}"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    turns = [SYSTEM, USER, BOT, TOOL]
    source = write(tmp_path / "a.jsonl", [{"m": turns, "a": 5}], messages_key="m", answer_key="a")
    with pytest.raises(
        DataError,
        match=rf"a\.jsonl line 1: \S*chat_template cannot be applied to turn {turn} \(TemplateError: no\)",
    ):
        load(source, tokenizer)


def test_turns_that_the_template_leaves_out_are_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of every record, wherever it stands; reasoning of earlier turns and answers of tools may be left
    out."""
    template = (
        "{% for m in messages %}{% if m['role'] in ('user', 'tool') %}{{ m['content'] | trim }} {% "
        "endif %}{% endfor %}"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    asked = {"role": "user", "content": " two\n"}
    rows = [
        {"m": turns, "a": 5}
        for turns in ([asked, BOT, TOOL], [SYSTEM, USER], [SYSTEM, USER], [SYSTEM, USER, BOT, USER])
    ]
    source = write(tmp_path / "a.jsonl", rows, messages_key="m", answer_key="a")
    load(source, tokenizer)
    places = "; ".join(
        rf"index {place} \(\S*a\.jsonl line {place + 1}\): a turn of 'system'" for place in (1, 2, 3)
    )
    assert re.search(
        f"chat_template leaves turns out of 3 of 4 records, so that the model never sees them: {places}",
        caplog.text,
    )
    caplog.clear()
    load(write(tmp_path / "b.jsonl", rows[:1], messages_key="m", answer_key="a"), tokenizer)
    assert caplog.text == ""
    # the run's own system prompt is a turn as well
    load(
        write(tmp_path / "c.jsonl", [{"p": "two", "a": 5}] * 3, prompt_key="p", answer_key="a"),
        tokenizer,
        system_prompt="be kind",
    )
    assert "of 3 of 3 records" in caplog.text and caplog.text.count("a turn of 'system'") == 3


def test_a_turn_that_one_record_alone_loses_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The record before it has the same order of roles, and another content."""
    template = TURN_TEMPLATE.replace("{% else %}", "{% elif m['content'] != 'kind' %}")
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    turns = [[{"role": "user", "content": text}, BOT] for text in ("two", "three", "kind", "six")]
    for with_answers in (True, False):
        caplog.clear()
        keys = {} if with_answers else {"answer_key": "a"}
        rows = [{"m": each if with_answers else each[:1], "a": 5} for each in turns]
        load(
            write(tmp_path / "a.jsonl", rows, messages_key="m", **keys), tokenizer, with_answers=with_answers
        )
        assert re.search(
            r"leaves turns out of 1 of 4 records, .*: index 2 \(\S*a\.jsonl line 3\): a turn of 'user'\. "
            r"Give",
            caplog.text,
        )


def test_turns_that_the_marks_leave_out_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    unmarked = "{% if m['role'] == 'assistant' and m['content'] == 'six' %}Q "
    template = MARKED_TEMPLATE.replace(
        "{% if m['role'] == 'assistant' %}", unmarked + "{% elif m['role'] == 'assistant' %}"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    rows = [{"m": [USER, {**BOT, "content": text}, USER, BOT]} for text in ("five", "six")]
    load(write(tmp_path / "a.jsonl", rows, messages_key="m"), tokenizer, with_answers=True)
    assert re.search(
        r"turns of the assistant out of 1 of 2 records, .*: index 1 \(\S*a\.jsonl line 2\): 1 of 2\. Mark "
        r"all",
        caplog.text,
    )


def test_several_sources_are_one_after_another(tmp_path: Path, tokenizer: Any) -> None:
    first = write(
        tmp_path / "a.jsonl",
        [{"p": "two", "a": "1"}, {"p": "plus", "a": "2"}],
        prompt_key="p",
        answer_key="a",
        repeat=2,
    )
    second = write(
        tmp_path / "b.jsonl", [{"q": "three", "r": 3}], prompt_key="q", answer_key="r", env_name="sums"
    )
    found = load([first, second], tokenizer)
    assert [(each.index, each.answer, each.env_name) for each in found.examples] == [
        *[(0, "1", None), (1, "2", None), (2, "1", None), (3, "2", None)],
        (4, "3", "sums"),
    ]
    assert [(each.start, each.end, each.env_name) for each in found.sources] == [(0, 4, None), (4, 5, "sums")]
    assert found.examples[-1] == found.examples[4] and [each.answer for each in found.examples[3:]] == [
        "2",
        "3",
    ]
    assert found.examples.lengths(True).tolist() == [3] * 5
    once = {key: value for key, value in first.items() if key != "repeat"}
    fingerprints = [
        load(each, tokenizer).fingerprint
        for each in ([first, second], [second, first], [once, second], once, [once])
    ]
    assert len(set(fingerprints)) == 4 and fingerprints[3] == fingerprints[4]


@pytest.mark.parametrize("template", [TURN_TEMPLATE, MARKED_TEMPLATE], ids=["by beginnings", "by marks"])
def test_every_turn_of_the_assistant_is_learned(tmp_path: Path, template: str) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    turns = [
        SYSTEM,
        USER,
        BOT,
        {"role": "user", "content": "plus"},
        {"role": "assistant", "content": "three two"},
    ]
    found = load(
        write(tmp_path / "a.jsonl", [{"m": turns}, {"m": turns[:3]}], messages_key="m"),
        tokenizer,
        with_answers=True,
    )
    batch = supervised_batch(list(found.examples), 0)
    learned = [
        words(ids[mask > 0].tolist())
        for ids, mask in zip(batch["input_ids"], batch["token_mask"], strict=True)
    ]
    assert learned == ["five </s> three two </s>", "five </s>"]
    whole = "<user> be kind <user> two <bot> five </s> Q <user> plus <bot> three two </s> Q"
    assert words(batch["input_ids"][0].tolist()) == whole
    assert found.examples[0].answer == "three two"


@pytest.mark.parametrize("template", [TURN_TEMPLATE, MARKED_TEMPLATE], ids=["by beginnings", "by marks"])
def test_answers_of_several_tools_are_not_learned(tmp_path: Path, template: str) -> None:
    """Two in a row after one turn of the assistant, and one after another."""
    template = template.replace(
        "{{ m['content'] }} </s>", "{{ m['content'] }} {% for c in m.tool_calls or [] %}A {% endfor %}</s>"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    calls = {**TOOL_CALL, "content": "plus", "tool_calls": [{"function": {"name": "A", "arguments": {}}}]}
    turns = [
        USER,
        calls,
        TOOL,
        {"role": "tool", "content": "three"},
        {**calls, "content": "be"},
        {"role": "tool", "content": "kind"},
        BOT,
    ]
    found = load(write(tmp_path / "a.jsonl", [{"m": turns}], messages_key="m"), tokenizer, with_answers=True)
    batch = supervised_batch(list(found.examples), 0)
    assert words(batch["input_ids"][batch["token_mask"] > 0].tolist()) == "plus A </s> be A </s> five </s>"
    assert words(batch["input_ids"][0].tolist()) == (
        "<user> two <bot> plus A </s> Q <user> two <user> three <bot> be A </s> Q <user> kind <bot> five "
        "</s> Q"
    )


def test_a_last_turn_without_an_end_gets_one(tmp_path: Path, tokenizer: Any) -> None:
    turns = [
        {"role": "user", "content": "two "},
        {"role": "assistant", "content": "five "},
        {"role": "user", "content": "Q "},
        BOT,
    ]
    found = load(write(tmp_path / "a.jsonl", [{"m": turns}], messages_key="m"), tokenizer, with_answers=True)
    example = found.examples[0]
    assert words(
        [*example.prompt_ids, *example.answer_ids]
    ) == "two five Q five </s>" and example.targets == ((1, 2), (3, 5))


REASONED = "{% if loop.last %}be kind {% endif %}"


def test_a_template_may_leave_reasoning_out_of_earlier_turns(tmp_path: Path) -> None:
    """As Qwen3's: what stands before the content of the last turn is not there once more turns follow."""
    template = TURN_TEMPLATE.replace(
        "<bot> {{ m['content'] }}", f"<bot> {REASONED}{{{{ m['content'].split('</think>')[-1] }}}}"
    )
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    turns = [
        USER,
        {**BOT, "content": "be </think> five"},
        {"role": "user", "content": "plus"},
        {"role": "assistant", "content": "three"},
    ]
    batch = supervised_batch(
        list(load(write(tmp_path / "a.jsonl", [{"m": turns}], messages_key="m"), tokenizer, True).examples), 0
    )
    assert (
        words(batch["input_ids"][0].tolist())
        == "<user> two <bot> five </s> Q <user> plus <bot> be kind three </s> Q"
    )
    assert words(batch["input_ids"][batch["token_mask"] > 0].tolist()) == "five </s> be kind three </s>"


@pytest.mark.parametrize(
    ("template", "ids", "learned"),
    [
        (
            TURN_TEMPLATE.replace("<bot> {{ m['content'] }} </s>", f"<bot> {REASONED}{{{{ m['content'] }}}}"),
            "<user> two <bot> five Q <user> two <bot> be kind five Q </s>",
            "five be kind five Q </s>",
        ),
        (
            TURN_TEMPLATE.replace("<user>", "{% if loop.length > 1 and loop.first %}be {% endif %}<user>"),
            "be <user> two <bot> five </s> Q <user> two <bot> five </s> Q",
            "five </s> five </s>",
        ),
    ],
    ids=["no end", "other beginning"],
)
def test_a_turn_is_found_where_the_text_before_it_depends_on_what_follows(
    tmp_path: Path, template: str, ids: str, learned: str
) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    source = write(tmp_path / "a.jsonl", [{"m": [USER, BOT, USER, BOT]}], messages_key="m")
    batch = supervised_batch(list(load(source, tokenizer, with_answers=True).examples), 0)
    assert words(batch["input_ids"][0].tolist()) == ids
    assert words(batch["input_ids"][batch["token_mask"] > 0].tolist()) == learned


def test_a_turn_that_the_template_does_not_write_is_refused(tmp_path: Path) -> None:
    template = TURN_TEMPLATE.replace("{{ m['content'] }} </s>", f"{REASONED}Q </s>")
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t"), "chat_template": template})
    source = write(tmp_path / "a.jsonl", [{"m": [USER, BOT, USER, BOT]}], messages_key="m")
    with pytest.raises(
        DataError, match=r"line 1: turn 2 of 4, the assistant's, is not written by the template"
    ):
        load(source, tokenizer, with_answers=True)


def test_a_conversation_keeps_its_own_system_message(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"m": [{"role": "system", "content": "be "}, USER, BOT]}, {"m": [USER, BOT]}]
    found = load(write(tmp_path / "a.jsonl", rows, messages_key="m"), tokenizer, system_prompt="kind ")
    assert [words(list(each.prompt_ids)) for each in found.examples] == ["be two", "kind two"]


@pytest.fixture
def spilling(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Tables go to files as soon as there is a row; where these lie."""
    monkeypatch.setattr(data_sets, "_MOST_IN_MEMORY", 0)
    monkeypatch.setattr(data_sets, "_CHUNK", 3)
    return tmp_path / "cache"


@pytest.fixture
def cached(tmp_path: Path, tokenizer: Any, spilling: Path) -> tuple[dict[str, Any], list[Any], Path]:
    """A source, its examples, and where its table lies in the cache."""
    source = write(tmp_path / "a.jsonl", [{"p": "two", "a": "five"}] * 7, prompt_key="p", answer_key="a")
    examples = list(load(source, tokenizer, cache_dir=str(spilling)).examples)
    (directory,) = spilling.iterdir()
    return source, examples, directory


def test_the_second_start_takes_what_the_first_has_left(
    tmp_path: Path,
    tokenizer: Any,
    spilling: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    rows = [{"p": "two " * (place % 4 + 1), "a": "\u00e9 five" if place else ""} for place in range(10)]
    source = write(tmp_path / "a.jsonl", rows, prompt_key="p", answer_key="a")
    options: Any = {"cache_dir": str(spilling), "longest": 3, "filter_overlong_prompts": True}
    first = load(source, tokenizer, **options)
    assert len(list(spilling.iterdir())) == 1
    caplog.clear()
    monkeypatch.setattr(data_sets, "read_records", None)
    second = load(source, tokenizer, **options)
    assert list(second.examples) == list(first.examples) and second.fingerprint == first.fingerprint
    assert [len(each.prompt_ids) for each in second.examples] == [1, 2, 3, 1, 2, 3, 1, 2]
    assert "2 of 10 records" in caplog.text
    for change in ({"longest": 4}, {"prompt_template": "Q {prompt}"}, {"system_prompt": "be"}):
        with pytest.raises(TypeError):
            load(source, tokenizer, **{**options, **change})
    with pytest.raises(TypeError):
        load({**source, "max_samples": 9}, tokenizer, **options)
    template = "{{ first }}{% for m in messages %}{{ m['content'] }}{% endfor %}"
    other_template = get_tokenizer({"name": save_tokenizer(tmp_path / "again"), "chat_template": template})
    other_tokens = get_tokenizer({"name": save_tokenizer(tmp_path / "other")})
    other_tokens.add_tokens(["seven"])
    for other, values in ((other_template, None), (other_template, {"first": "Q "}), (other_tokens, None)):
        config: Any = {
            "train": source,
            "max_input_seq_length": 3,
            "filter_overlong_prompts": True,
            "cache_dir": str(spilling),
        }
        with pytest.raises(TypeError):
            load_dataset(source, Reading(config, other, False, template_kwargs=values))
    os.utime(source["path"])
    load(source, tokenizer, **options)
    write(Path(source["path"]), [*rows[1:], rows[0]])
    with pytest.raises(TypeError):
        load(source, tokenizer, **options)


def test_a_damaged_table_is_made_again(cached: Any, tokenizer: Any, spilling: Path) -> None:
    source, expected, directory = cached
    for damage in ("prompt.values", "meta.json"):
        (directory / damage).write_bytes(b"x")
        assert list(load(source, tokenizer, cache_dir=str(spilling)).examples) == expected
        assert [each.name for each in spilling.iterdir()] == [directory.name]


@pytest.mark.parametrize("name", ["prompt.values", "prompt.starts", "answer.values", "meta.json"])
def test_a_table_with_a_flipped_bit_is_made_again(
    name: str, cached: Any, tokenizer: Any, spilling: Path, caplog: Any
) -> None:
    """Any bit: of the file that says what the others have to be, too."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    source, expected, directory = cached
    content = (directory / name).read_bytes()
    for _ in range(8):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        (directory / name).write_bytes(damaged)
        assert table.read_table(directory) is None, seed
    caplog.clear()
    assert list(load(source, tokenizer, cache_dir=str(spilling)).examples) == expected, seed
    assert f"{directory} is not used but written again: " in caplog.text
    assert table.read_table(directory) is not None and (directory / name).read_bytes() == content


@pytest.mark.parametrize("name", [".", "meta.json", "prompt.values", "answer.starts"])
def test_a_table_that_others_may_write_is_not_trusted(
    name: str, tmp_path: Path, tokenizer: Any, spilling: Path, caplog: Any
) -> None:
    source = write(tmp_path / "a.jsonl", [{"p": "two", "a": "five"}] * 7, prompt_key="p", answer_key="a")
    before = os.umask(0)
    try:
        expected = list(load(source, tokenizer, cache_dir=str(spilling)).examples)
    finally:
        os.umask(before)
    (directory,) = spilling.iterdir()
    assert table.read_table(directory) is not None, "whatever the umask was"
    path = directory / name
    path.chmod(path.stat().st_mode | 0o002)
    assert table.read_table(directory) is None and f"everybody may write to {path.name}" in caplog.text
    assert list(load(source, tokenizer, cache_dir=str(spilling)).examples) == expected
    assert table.read_table(directory) is not None


def test_a_table_of_another_user_is_neither_trusted_nor_in_the_way(
    cached: Any, tokenizer: Any, spilling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, expected, of_this_one = cached
    user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: user)
    assert table.read_table(of_this_one) is None
    # what it writes belongs to this user all the same, as on a file system that gives everything to nobody
    assert list(load(source, tokenizer, cache_dir=str(spilling)).examples) == expected
    assert len(list(spilling.iterdir())) == 2 and table.read_table(of_this_one, os.getuid()) is not None


def test_a_refusal_leaves_nothing(tmp_path: Path, tokenizer: Any, spilling: Path) -> None:
    source = write(
        tmp_path / "a.jsonl", [*[{"p": "two", "a": "five"}] * 7, {"p": "two"}], prompt_key="p", answer_key="a"
    )
    with pytest.raises(DataError, match="line 8"):
        load(source, tokenizer, cache_dir=str(spilling))
    assert list(spilling.iterdir()) == []


def test_answers_are_judged_once_and_again_by_another_judge(
    tmp_path: Path, tokenizer: Any, spilling: Path
) -> None:
    source: Any = write(
        tmp_path / "a.jsonl",
        [{"p": "two", "a": str(place % 3)} for place in range(7)],
        prompt_key="p",
        answer_key="a",
    )
    asked: list[str] = []

    def start(judge: str, bad: str) -> Dataset:
        asked.clear()

        def fault(answer: str) -> str | None:
            asked.append(answer)
            return "bad" if answer == bad else None

        config: Any = {"max_input_seq_length": 9, "cache_dir": str(spilling)}
        return load_dataset(source, Reading(config, tokenizer, False, fault, judge))

    start("first", "x")
    assert asked == ["0", "1", "2"]
    start("first", "x")
    assert asked == []
    with pytest.raises(DataError, match=r"2 of 7 reference answers .*index 1: '1': bad"):
        start("second", "1")
    start("second", "x")
    assert asked == ["0", "1", "2"]


def test_statements_that_a_program_can_pass_unsolved_are_counted_at_every_start(
    tmp_path: Path, tokenizer: Any, spilling: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also where the tokens come from the cache, judged before or by another judge."""
    asserts = ["assert f(2) == 4", "assert g() == 'x'", "import numpy\nassert numpy.all(f(1))"]
    rows = [{"p": "two", "a": json.dumps([asserts[0], asserts[place % 3]])} for place in range(7)]
    source: Any = write(tmp_path / "a.jsonl", rows, prompt_key="p", answer_key="a")
    reward = get_reward(RewardSpec("code", {"isolation": "preferred", "isolated": False}))
    config: Any = {"max_input_seq_length": 9, "cache_dir": str(spilling)}
    for judge in ("first", "first", "second", "second"):
        caplog.clear()
        load_dataset(source, Reading(config, tokenizer, False, reward.fault_of_reference, judge))
        [said] = [
            record.getMessage() for record in caplog.records if "without solving" in record.getMessage()
        ]
        assert "a.jsonl: 2 of 7 reference answers allow a reward" in said
        assert (
            "index 2" in said
            and "index 5" in said
            and "numpy.all(f(1))' without solving its task (the module numpy is not available outside the "
            "sandbox)"
            in said
        )


def kept(spilling: Path) -> set[str]:
    return {each.name for each in spilling.iterdir()}


def locked_as_on_nfs(monkeypatch: pytest.MonkeyPatch) -> None:
    """There a lock is one of a range of bytes: who locks out others has to have the file open for writing
    (nfs(5), flock(2))."""
    lock = fcntl.flock

    def on_nfs(file: Any, operation: int) -> None:
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        if mode == (os.O_RDONLY if operation & fcntl.LOCK_EX else os.O_WRONLY):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", on_nfs)


@pytest.mark.parametrize("on_nfs", [False, True])
def test_the_cache_is_bounded_by_last_use_and_never_loses_what_is_in_use(
    on_nfs: bool, tmp_path: Path, tokenizer: Any, spilling: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four tables of equal size the bound has room for three."""
    if on_nfs:
        locked_as_on_nfs(monkeypatch)
    config: Any = {"max_input_seq_length": 9, "cache_dir": str(spilling), "cache_gib": None}
    sources: list[Any] = [
        write(tmp_path / f"{name}.jsonl", [{"p": "two", "a": name}] * 9, prompt_key="p", answer_key="a")
        for name in ("one", "two", "six", "ten")
    ]
    names, sizes = [], []
    for age, source in enumerate(sources):
        before = kept(spilling) if spilling.exists() else set()
        load_dataset(source, Reading(config, tokenizer, False))
        (name,) = kept(spilling) - before
        names.append(name)
        sizes.append(sum(each.stat().st_size for each in [spilling / name, *(spilling / name).iterdir()]))
        os.utime(spilling / name / "meta.json", (age, age))
    room = {**config, "cache_gib": (sum(sizes) - 1) / 2**30}
    (spilling / "mine").mkdir()
    (spilling / "mine" / "meta.json").write_text("{}")
    # used again, the oldest is the newest, and as long as it is used nothing takes it away
    used = load_dataset(sources[0], Reading(config, tokenizer, False))
    os.utime(spilling / names[0] / "meta.json", (0, 0))
    load_dataset(sources[3], Reading(room, tokenizer, False))
    assert kept(spilling) == {names[0], names[2], names[3], "mine"}
    load_dataset(sources[3], Reading({**room, "cache_gib": 1e-9}, tokenizer, False))
    assert kept(spilling) == {names[0], names[3], "mine"}, "the one that has just been read is in use as well"
    assert [example.answer for example in used.examples] == ["one"] * 9
    del used
    load_dataset(sources[3], Reading({**room, "cache_gib": 1e-9}, tokenizer, False))
    assert kept(spilling) == {names[3], "mine"}


def test_what_a_killed_start_has_left_goes_a_day_later(
    tmp_path: Path, tokenizer: Any, spilling: Path
) -> None:
    source: Any = write(tmp_path / "a.jsonl", [{"p": "two", "a": "five"}] * 7, prompt_key="p", answer_key="a")
    for age, name in ((0, "0" * 32), (100_000, "1" * 32)):
        partial = spilling / f".{name}.partial-7"
        partial.mkdir(parents=True)
        (partial / "prompt.values").write_bytes(b"x")
        for each in (partial / "prompt.values", partial):
            os.utime(each, (each.stat().st_mtime - age,) * 2)
    load(source, tokenizer, cache_dir=str(spilling))
    assert f".{'0' * 32}.partial-7" in kept(spilling) and f".{'1' * 32}.partial-7" not in kept(spilling)


def test_a_table_that_is_just_being_removed_is_made_again(
    cached: Any, tokenizer: Any, spilling: Path
) -> None:
    source, expected, directory = cached
    with (directory / "meta.json").open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert table.read_table(directory) is None
    assert list(load(source, tokenizer, cache_dir=str(spilling)).examples) == expected
