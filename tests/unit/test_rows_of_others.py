"""Rows in the forms in which others publish them: tool calls, answers as text, preferences, ends of
responses, broken records."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest

from megarl.data.datasets import Dataset, Reading, load_dataset
from megarl.data.sampler import ResumableSampler
from megarl.data.stop_tokens import generation_config_of, stop_tokens_of
from megarl.errors import DataError, ModelError, UnusableCheckpointError
from megarl.rollout.programs import Limits, fault_of_tests, judge
from megarl.rollout.rewards import RewardSpec, Task, get_reward
from tests.tables import read_table
from tests.templates import TEMPLATES, stop_ids, tokenizer_of

TABLES = read_table("rows_of_others.yaml")

ROWS = Path(__file__).parents[1] / "data" / "rows"
SPEAKING = [
    "chatml",
    "qwen3",
    "qwen3.5",
    "gpt-oss",
    "deepseek-v3",
    "deepseek-r1",
    "glm-4.5",
    "gemma3",
    "phi-3.5",
    "mistral-v3",
    "llama3.1",
]


def rows_in(*names: str) -> list[dict[str, Any]]:
    return [json.loads(line) for name in names for line in (ROWS / f"{name}.jsonl").read_text().splitlines()]


def load(
    directory: Path,
    rows: list[dict[str, Any]],
    template: str,
    form: str = "jsonl",
    pairs: bool = False,
    data: Any = None,
    **keys: Any,
) -> Dataset:
    """The rows as a user has them stored, read as a run reads them."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / ("rows.jsonl" if form == "jsonl" else "rows.parquet" if form == "parquet" else "rows")
    if form == "jsonl":
        path.write_text("\n".join(json.dumps(row) if isinstance(row, dict) else str(row) for row in rows))
    elif form == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(str(path))
    else:
        datasets.Dataset.from_list(rows).save_to_disk(str(path))
    tokenizer = tokenizer_of(template)
    config: Any = {"max_input_seq_length": 4000, "cache_dir": str(directory / "cache"), **(data or {})}
    source: Any = {"path": str(path), **keys}
    return load_dataset(
        source,
        Reading(config, tokenizer, True, pairs=pairs, stop_tokens=tuple(stop_ids(template, tokenizer))),
    )


def tokens_of(dataset: Dataset) -> list[tuple[Any, ...]]:
    return [(each.prompt_ids, each.answer_ids, each.targets) for each in dataset.examples]


def learned(dataset: Dataset, template: str) -> list[list[str]]:
    """The texts that are learned of each record."""
    tokenizer = tokenizer_of(template)
    found = []
    for each in dataset.examples:
        ids = [*each.prompt_ids, *each.answer_ids]
        spans = each.targets or ((len(each.prompt_ids), len(ids)),)
        found.append([tokenizer.decode(ids[start:end]) for start, end in spans])
    return found


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "qwen3.5", "deepseek-v3", "glm-4.5", "mistral-v3"])
@pytest.mark.parametrize("form", ["parquet", "saved"])
def test_rows_of_a_table_have_the_tokens_of_the_same_lines(tmp_path: Path, template: str, form: str) -> None:
    """Arrow gives each call the arguments of all calls, and each tool the parameters of all tools."""
    rows = rows_in("two_tool_calls", "more_tool_calls")
    if template == "mistral-v3":
        rows[1]["messages"][1]["content"] = ""
    rows[0]["tools"] = None
    keys = {"messages_key": "messages", "tools_key": "tools"}
    lines = load(tmp_path / "lines", rows, template, **keys)
    table = load(tmp_path / "table", rows, template, form, **keys)
    assert tokens_of(table) == tokens_of(lines)
    assert "null" not in str(learned(table, template)) and "None" not in str(learned(table, template))


@pytest.mark.parametrize(
    "template", ["qwen2.5", "qwen3", "deepseek-v3", "glm-4.5", "llama3.1", "mistral-v3", "gpt-oss"]
)
@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_arguments_as_json_text_are_those_as_an_object(tmp_path: Path, template: str, form: str) -> None:
    texts = rows_in("tool_arguments_text")
    objects = json.loads(json.dumps(texts))
    for row in objects:
        for each in row["messages"][1]["tool_calls"]:
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
    found = [
        load(tmp_path / kind, rows, template, form, messages_key="messages")
        for kind, rows in (("t", texts), ("o", objects))
    ]
    assert tokens_of(found[0]) == tokens_of(found[1])
    [[call, said]] = learned(found[0], template)
    assert "weather" in call and "Rome" in call and '\\"' not in call and "20 degrees" in said


@pytest.mark.parametrize("template", SPEAKING)
@pytest.mark.parametrize("name", ["text_pair", "more_text_pairs"])
def test_an_answer_as_text_is_the_row_given_as_messages(tmp_path: Path, template: str, name: str) -> None:
    rows = rows_in(name)
    turns = [
        {"m": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["answer"]}]}
        for row in rows
    ]
    texts = load(tmp_path / "t", rows, template, prompt_key="prompt", answer_key="answer")
    messages = load(tmp_path / "m", turns, template, messages_key="m")
    assert tokens_of(texts) == tokens_of(messages)
    assert all(row["answer"] in said for row, [said] in zip(rows, learned(texts, template), strict=True))


@pytest.mark.parametrize("template", SPEAKING)
def test_preferred_texts_are_the_rows_given_as_messages(tmp_path: Path, template: str) -> None:
    rows = rows_in("nine_pairs")
    turns = [
        {"p": [{"role": "user", "content": row["prompt"]}]}
        | {key: [{"role": "assistant", "content": row[key]}] for key in ("chosen", "rejected")}
        for row in rows
    ]
    keys: dict[str, Any] = {"pairs": True, "chosen_key": "chosen", "rejected_key": "rejected"}
    texts = load(tmp_path / "t", rows, template, prompt_key="prompt", **keys)
    messages = load(tmp_path / "m", turns, template, prompt_key="p", **keys)
    assert tokens_of(texts) == tokens_of(messages) and len(texts) == 9


def test_whole_conversations_beside_their_prompt(tmp_path: Path) -> None:
    """As sets of preferences store them: the prompt is in its column, and again in both conversations."""
    rows = rows_in("preference_with_prompt_and_whole_conversations", "more_preferences")
    keys: dict[str, Any] = {
        "pairs": True,
        "prompt_key": "prompt",
        "chosen_key": "chosen",
        "rejected_key": "rejected",
    }
    assert learned(load(tmp_path, rows, "qwen2.5", **keys), "qwen2.5") == [
        [each]
        for each in (
            "Hi!<|im_end|>",
            "No.<|im_end|>",
            "5<|im_end|>",
            "6<|im_end|>",
            "Also.<|im_end|>",
            "Never.<|im_end|>",
        )
    ]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", ["multi_turn_plain", "glm_turns", "nine_rows", "sixteen_other"])
def test_plain_turns_are_learned_by_every_template(tmp_path: Path, template: str, name: str) -> None:
    rows = rows_in(name)
    found = learned(load(tmp_path, rows, template, messages_key="messages"), template)
    for row, spans in zip(rows, found, strict=True):
        spoken = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
        asked = [message["content"] for message in row["messages"] if message["role"] == "user"]
        assert len(spans) == len(spoken) and all(
            text in span for text, span in zip(spoken, spans, strict=True)
        )
        assert not [text for text in asked for span in spans if text in span]


def test_earlier_turns_of_glm_end_by_the_mark_of_the_next_role(tmp_path: Path) -> None:
    [spans] = learned(load(tmp_path, rows_in("glm_turns"), "glm-4.5", messages_key="messages"), "glm-4.5")
    assert [span.rpartition("\n")[2] for span in spans] == ["Hello!<|user|>", "4.<|endoftext|>"]


@pytest.mark.parametrize("template", ["deepseek-r1", "nemotron"])
def test_reasoning_that_a_template_leaves_out_of_the_last_turn_is_refused(
    tmp_path: Path, template: str
) -> None:
    with pytest.raises(
        DataError,
        match=r"line 1: turn 2 of 2, the assistant's, has the reasoning 'add', but the template leaves it "
        r"out",
    ):
        load(tmp_path, rows_in("one_turn_r1"), template, messages_key="messages")


@pytest.mark.parametrize("row", rows_in("generation_config_eos", "more_generation_config_eos"))
def test_stop_tokens_are_all_that_the_files_name(tmp_path: Path, row: dict[str, Any]) -> None:
    for name in ("generation_config.json", "config.json"):
        if name in row:
            (tmp_path / name).write_text(json.dumps(row[name]))
    tokenizer = tokenizer_of("plain-text")
    tokenizer.eos_token_id = row["tokenizer_eos"]
    assert list(stop_tokens_of(tokenizer, str(tmp_path))) == row["expected_stop_token_ids"]


def test_stop_tokens_of_a_base_model_have_the_end_of_its_chat_template() -> None:
    """The files of a base model name the end of texts alone, and its chat template ends turns otherwise."""
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.eos_token = "<|endoftext|>"
    ends = [tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert stop_tokens_of(tokenizer, None) == {ends[0]: ["tokenizer"], ends[1]: ["chat template"]}


def test_stop_tokens_of_a_model_that_sees_are_those_of_its_text(tmp_path: Path) -> None:
    """Qwen3.5's config.json has the end of texts in its text section alone."""
    tokenizer = tokenizer_of("qwen3.5")
    text = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert text != tokenizer.eos_token_id
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"eos_token_id": text}}))
    assert stop_tokens_of(tokenizer, str(tmp_path))[text] == ["config.json"]
    (tmp_path / "config.json").write_text(json.dumps({"text_config": None}))
    assert text not in stop_tokens_of(tokenizer, str(tmp_path))


# records that cannot be used

BROKEN = TABLES["broken"]


def test_bad_records_are_left_out_counted_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dataset = load(tmp_path, BROKEN, "chatml", messages_key="messages", data={"on_bad_record": "skip"})
    assert learned(dataset, "chatml") == [["Yes.<|im_end|>"], ["Also.<|im_end|>"]]
    [note] = [record.getMessage() for record in caplog.records if "on_bad_record" in record.getMessage()]
    assert "5 records are left out, 2 are used" in note
    for part in (
        "line 2: 'messages' ends with a turn of 'user'",
        "line 3 has no key 'messages'",
        "line 4 is not JSON",
        "line 5: messages[0]",
    ):
        assert part in note
    assert "line 6: turn 2 of 2" in note


@pytest.mark.parametrize("data", [{}, {"on_bad_record": "refuse"}], ids=["absent", "refuse"])
@pytest.mark.parametrize("place", [1, 2, 3, 4, 5])
def test_a_bad_record_is_refused_where_that_is_not_asked_for(
    tmp_path: Path, data: dict[str, str], place: int
) -> None:
    with pytest.raises(DataError, match=r"rows.jsonl line 2.*Fix: "):
        load(tmp_path, [BROKEN[0], BROKEN[place]], "chatml", messages_key="messages", data=data)


def test_a_source_of_bad_records_alone_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"on_bad_record = 'skip' leaves none of 5 records"):
        load(tmp_path, BROKEN[1:6], "chatml", messages_key="messages", data={"on_bad_record": "skip"})


def test_bad_pairs_are_left_out_whole(tmp_path: Path) -> None:
    rows = [
        {"p": "One?", "c": "1", "r": "2"},
        {"p": "Same?", "c": "1", "r": "1"},
        {"p": "None?", "c": "1"},
        {"p": "Two?", "c": "2", "r": "1"},
    ]
    keys: dict[str, Any] = {"pairs": True, "prompt_key": "p", "chosen_key": "c", "rejected_key": "r"}
    dataset = load(tmp_path, rows, "chatml", data={"on_bad_record": "skip"}, **keys)
    assert len(dataset) == 2 and [each.answer for each in dataset.examples] == ["1", "2", "2", "1"]


def test_what_is_left_out_does_not_depend_on_what_is_read_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for chunk in (1, 2, 1000):
        monkeypatch.setattr("megarl.data.datasets._CHUNK", chunk)
        dataset = load(
            tmp_path / str(chunk),
            BROKEN * 3,
            "chatml",
            messages_key="messages",
            data={"on_bad_record": "skip"},
        )
        found.append((tokens_of(dataset), dataset.fingerprint))
    assert found[0] == found[1] == found[2] and len(found[0][0]) == 6


def test_an_exported_model_keeps_its_generation_configuration(tmp_path: Path) -> None:
    tokenizer = tokenizer_of("llama3.1")
    ends = stop_ids("llama3.1", tokenizer)
    own = {"eos_token_id": ends, "temperature": 0.6, "top_p": 0.9, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    assert generation_config_of(tokenizer, str(tmp_path)) == own
    # Forms of others, which transformers 5 refuses.
    odd = {"eos_token_id": ends, "num_beams": 1, "num_return_sequences": 3, "early_stopping": "always"}
    (tmp_path / "generation_config.json").write_text(json.dumps(odd))
    assert generation_config_of(tokenizer, str(tmp_path)) == odd


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"eos_token_id": 5', "cannot be read: Expecting"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "cannot be read: Expecting"),
        ("[5]", "has no JSON object"),
        ('{"eos_token_id": "5"}', "generation_config.json: eos_token_id = '5': token ids are whole"),
        (
            '{"eos_token_id": [5, 5.5]}',
            "generation_config.json: eos_token_id = [5, 5.5]: token ids are whole",
        ),
    ],
)
def test_a_damaged_generation_configuration_is_refused(tmp_path: Path, text: str, says: str) -> None:
    """A model would otherwise not stop at a token that it was trained to end with."""
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(ModelError, match=re.escape(says)):
        stop_tokens_of(tokenizer_of("qwen2.5"), str(tmp_path))


def test_a_model_without_a_generation_configuration_gets_one_only_for_an_end_that_no_file_names(
    tmp_path: Path,
) -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.eos_token = "<|endoftext|>"
    text, turn = (tokenizer.convert_tokens_to_ids(token) for token in ("<|endoftext|>", "<|im_end|>"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [text, turn]}))
    assert generation_config_of(tokenizer, str(tmp_path)) is None
    older = {"eos_token_id": [text, turn], "temperature": 0.6, "do_sample": True, "use_cache": True}
    (tmp_path / "config.json").write_text(json.dumps(older))
    del older["use_cache"]
    assert generation_config_of(tokenizer, str(tmp_path)) == older
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": text}))
    assert generation_config_of(tokenizer, str(tmp_path)) == {"eos_token_id": [text, turn]}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": text, "max_new_tokens": 7}))
    found = generation_config_of(tokenizer, str(tmp_path))
    assert found == {"eos_token_id": [text, turn], "max_new_tokens": 7}


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_a_prompt_may_hold_tool_calls_without_text(tmp_path: Path, form: str) -> None:
    """The history of an agent, to which a response is sampled."""
    rows = [
        {"p": row["messages"][:-1], "a": row["messages"][-1]["content"]}
        for row in rows_in("two_tool_calls", "more_tool_calls")
    ]
    rows[0]["p"][1]["content"] = None
    dataset = load(tmp_path, rows, "qwen2.5", form, prompt_key="p", answer_key="a")
    texts = [tokenizer_of("qwen2.5").decode(each.prompt_ids) for each in dataset.examples]
    assert (
        '"arguments": {"zone": "UTC", "hours": 24}}' in texts[0]
        and '"arguments": {"value": 5, "unit"' in texts[1]
    )
    assert all(
        text.endswith("<|im_start|>assistant\n") and "null" not in text and "None" not in text
        for text in texts
    )
    # the answer alone is learned
    assert learned(dataset, "qwen2.5") == [[f"{row['a']}<|im_end|>"] for row in rows]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "saved"])
def test_tests_of_programs_are_answers_as_they_are_stored(tmp_path: Path, form: str) -> None:
    """MBPP stores statements in a list, APPS inputs and outputs in an object, LiveCodeBench a list of
    objects."""
    mbpp = rows_in("mbpp_like")
    pairs = [{"text": "Add.", "tests": {"inputs": ["1 2\n"], "outputs": ["3\n"]}}]
    cases = [{"text": "Add.", "tests": [{"input": "1 2\n", "output": "3\n"}]}]
    program = (
        "```python\ndef square(x):\n    return x * x\nif __name__ == '__main__':\n    "
        "print(sum(map(int, input().split())))\n```"
    )
    for place, (rows, key) in enumerate([(mbpp, "test_list"), (pairs, "tests"), (cases, "tests")]):
        dataset = load(tmp_path / str(place), rows, "chatml", form, prompt_key="text", answer_key=key)
        assert fault_of_tests(dataset.examples[0].answer) is None
        assert judge(program, dataset.examples[0].answer, Limits(seconds=60.0, isolated=False)) == 1.0


def test_a_list_of_answers_is_not_taken_for_tests(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"'a' = \['4', '5'\] is a list, .*name one of its members"):
        load(tmp_path, [{"p": "2+2?", "a": ["4", "5"]}], "chatml", prompt_key="p", answer_key="a")


# rewards of the cases


@pytest.mark.parametrize(
    "row",
    rows_in("math_second_thought", "math_small_numbers", "math_spelling", "math_words_after_number"),
    ids=lambda row: row["response"],
)
def test_answers_of_mathematics_are_scored_as_people_would(row: dict[str, Any]) -> None:
    assert get_reward(RewardSpec("math")).judge(Task(row["response"], row["answer"])) == row["right"]


LIMITS = Limits(seconds=60.0, isolated=False)


@pytest.mark.parametrize(
    "row", rows_in("code_then_output_block", "more_code_blocks"), ids=lambda row: row["response"]
)
def test_the_block_that_is_a_program_is_run(row: dict[str, Any]) -> None:
    assert judge(row["response"], row["answer"], LIMITS) == row["right"]


@pytest.mark.parametrize(
    "row", rows_in("code_tests_metadata_text", "more_code_tests"), ids=lambda row: row["prompt"]
)
def test_tests_whose_metadata_are_text_are_run(row: dict[str, Any]) -> None:
    reverses = "```python\ndef f(text):\n    return text[::-1]\n```"
    assert fault_of_tests(row["answer"]) is None
    assert judge(row.get("response", reverses), row["answer"], LIMITS) == 1.0
    assert (
        judge("```python\ndef f(*_):\n    return None\ndouble = join = f\n```", row["answer"], LIMITS) == 0.0
    )


@pytest.mark.parametrize(
    "row", rows_in("think_prefilled", "more_think_prefilled"), ids=lambda row: row["response"]
)
def test_the_form_of_a_response_to_a_prompt_that_opened_the_thoughts(row: dict[str, Any]) -> None:
    reward = get_reward(RewardSpec("format"))
    assert (
        reward.judge(Task(row["response"], "4", prompt="<|im_start|>assistant\n<think>\n"))
        == row["right_format"]
    )
    assert reward.judge(Task(row["response"], "4", prompt="<|im_start|>assistant\n")) == 0.0


def test_a_resumed_run_does_not_go_on_with_other_rows(tmp_path: Path) -> None:
    nine, sixteen = (
        load(tmp_path / name, rows_in(name), "chatml", messages_key="messages")
        for name in ("nine_rows", "sixteen_other")
    )
    sampler = ResumableSampler(len(nine), 1, True, nine.fingerprint)
    sampler.take(4)
    again = ResumableSampler(len(nine), 1, True, nine.fingerprint)
    again.load_state(sampler.state())
    assert again.take(5) == sampler.take(5)
    with pytest.raises(UnusableCheckpointError):
        ResumableSampler(len(sixteen), 1, True, sixteen.fingerprint).load_state(sampler.state())


TALK = [
    {"role": "user", "content": "One and one?"},
    {"role": "assistant", "content": "Three."},
    {"role": "user", "content": "No."},
    {"role": "assistant", "content": "Two, then."},
]


def weighed(*weights: Any) -> list[dict[str, Any]]:
    """The conversation with weights of its turns of the assistant; ... for none."""
    given = iter(weights)
    turns = [dict(turn) for turn in TALK]
    for turn in turns:
        if turn["role"] == "assistant" and (weight := next(given)) is not ...:
            turn["weight"] = weight
    return [{"messages": turns}]


@pytest.mark.parametrize("template", SPEAKING)
@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_turns_of_weight_0_are_not_learned(tmp_path: Path, template: str, form: str) -> None:
    """OpenAI's form. The tokens of the conversation are the same, and so is what the other turns teach."""
    keys = {"messages_key": "messages"}
    whole, all_of_weight_1 = (
        load(tmp_path / name, weighed(*each), template, form, **keys)
        for name, each in (("w", (..., ...)), ("1", (1, 1.0)))
    )
    assert tokens_of(all_of_weight_1) == tokens_of(whole)
    [first, last] = learned(whole, template)[0]
    assert "Three." in first and "Two, then." in last
    for name, weights, kept in (("l", (0, ...), last), ("f", (1, 0), first)):
        found = load(tmp_path / name, weighed(*weights), template, form, **keys)
        assert learned(found, template) == [[kept]]
        [example], [expected] = found.examples, whole.examples
        assert [*example.prompt_ids, *example.answer_ids] == [*expected.prompt_ids, *expected.answer_ids]


@pytest.mark.parametrize(
    ("weights", "said"),
    [((0, 0), "nothing is learned"), ((0.5, 1), r"weight = 0\.5"), (("1", 1), "weight = '1'")],
)
def test_weights_that_are_neither_0_nor_1_are_refused(
    tmp_path: Path, weights: tuple[Any, ...], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        load(tmp_path, weighed(*weights), "qwen3", messages_key="messages")


def test_weights_are_no_difference_of_preferred_answers(tmp_path: Path) -> None:
    """DPO learns the last turns alone; what only SFT reads of the turns before them tells no prompts
    apart."""
    [row] = weighed(0, ...)
    pair = {"chosen": row["messages"], "rejected": [*TALK[:3], {"role": "assistant", "content": "Four."}]}
    found = load(tmp_path, [pair], "qwen3", pairs=True, chosen_key="chosen", rejected_key="rejected")
    assert len(found) == 1 and [len(each) for each in learned(found, "qwen3")] == [1, 1]
