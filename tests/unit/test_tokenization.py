"""Chat templates, prompt templates, special tokens and length limits."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from megarl.data.datasets import Reading, load_dataset
from megarl.data.records import Record
from megarl.data.tokenization import (
    PASSTHROUGH_TEMPLATE,
    PromptEncoder,
    as_published,
    encode_answers,
    get_tokenizer,
)
from megarl.errors import DataError, ModelError
from megarl.rollout.mathematics import fault_of_reference
from tests.templates import tokenizer_of

WORDS = [
    "<pad>",
    "</s>",
    "<s>",
    "<user>",
    "<bot>",
    "<unk>",
    "two",
    "plus",
    "three",
    "five",
    "be",
    "kind",
    "Q",
    "A",
]


def save_tokenizer(
    path: Path, bos: bool = False, chat: bool = False, pad: bool = True, eos: bool = True
) -> str:
    """A word tokenizer; with ``bos`` it puts <s> in front of every text."""
    backend = Tokenizer(
        models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if bos:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 2)])
    names: dict[str, str] = {"unk_token": "<unk>"}
    names |= {"pad_token": "<pad>"} if pad else {}
    names |= {"eos_token": "</s>"} if eos else {}
    names |= {"bos_token": "<s>"} if bos else {}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **names)
    if chat:
        tokenizer.chat_template = (
            "{% for m in messages %}<{{ 'bot' if m['role'] == 'assistant' else m['role'] }}> {{ "
            "m['content'] }} {% endfor %}"
            "{% if add_generation_prompt %}<bot>{% endif %}"
        )
    tokenizer.save_pretrained(path)
    return str(path)


def words(identifiers: list[int]) -> str:
    return " ".join(WORDS[identifier] for identifier in identifiers)


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_a_text_by_itself_begins_as_the_tokenizer_begins_texts(tmp_path: Path, bos: bool, chat: bool) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path, bos=bos, chat=chat)})
    encoder = PromptEncoder(tokenizer, system_prompt="kind")
    for text in ("Q A", "Q A </s>", *(["<s> Q A"] if bos else [])):
        record = encoder.as_conversation(Record((), text, "line 1"))
        [prompt], [answer] = encoder.encode_records([record]), encode_answers(tokenizer, [text])
        given, learned = encoder.split(record, prompt, answer)
        assert words([*given, *learned]) == ("<s> Q A </s>" if bos else "Q A </s>") and len(given) == 1
    for ids in ([1], *([] if bos else [[1, 1]])):
        assert encoder.split(Record((), "", "line 1"), [], ids) == ([], [])


def test_a_missing_pad_token_becomes_the_end_token(tmp_path: Path) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path, pad=False)})
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 1
    assert get_tokenizer({"name": save_tokenizer(tmp_path / "b")}).pad_token_id == 0


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ({}, "<user> two plus <bot>"),
        ({"chat_template": "default"}, "<user> two plus <bot>"),
        ({"chat_template": None}, "two plus"),
        ({"chat_template": "Q {{ messages[0]['content'] }} A"}, "Q two plus A"),
    ],
)
def test_chat_templates(tmp_path: Path, setting: dict[str, Any], expected: str) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path, chat=True), **setting})
    assert words(PromptEncoder(tokenizer).encode("two plus")) == expected


@pytest.mark.parametrize("setting", [{}, {"chat_template": None}])
def test_a_saved_tokenizer_keeps_the_template_of_the_model(tmp_path: Path, setting: dict[str, Any]) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "own", chat=True, pad=False), **setting})
    at_work = tokenizer.chat_template
    as_published(pickle.loads(pickle.dumps(tokenizer))).save_pretrained(tmp_path / "export")
    assert AutoTokenizer.from_pretrained(tmp_path / "export").pad_token is None
    assert tokenizer.pad_token == "</s>"
    exported = get_tokenizer({"name": str(tmp_path / "export")})
    assert words(PromptEncoder(exported).encode("two")) == "<user> two <bot>"
    assert tokenizer.chat_template == at_work


def test_mistral_s_own_tokenizer_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers takes it for a directory with tekken.json where vLLM is installed."""
    name, load = save_tokenizer(tmp_path, chat=True), AutoTokenizer.from_pretrained
    (tmp_path / "tekken.json").write_text("{}")

    def beside_vllm(name: str, mistral_format: bool | None = None, **options: Any) -> Any:
        is_taken = mistral_format is not False and (Path(name) / "tekken.json").exists()
        return object() if is_taken else load(name, **options)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", beside_vllm)
    assert words(PromptEncoder(get_tokenizer({"name": name})).encode("two")) == "<user> two <bot>"


def test_a_tokenizer_without_a_template_joins_messages(tmp_path: Path) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path)})
    assert tokenizer.chat_template == PASSTHROUGH_TEMPLATE
    assert (
        words(
            PromptEncoder(tokenizer).encode(
                [{"role": "user", "content": "two "}, {"role": "user", "content": "plus"}]
            )
        )
        == "two plus"
    )


def test_begin_token_only_without_a_chat_template(tmp_path: Path) -> None:
    name = save_tokenizer(tmp_path, bos=True, chat=True)
    assert (
        words(PromptEncoder(get_tokenizer({"name": name, "chat_template": None})).encode("two")) == "<s> two"
    )
    assert words(PromptEncoder(get_tokenizer({"name": name})).encode("two")) == "<user> two <bot>"
    assert [words(row) for row in encode_answers(get_tokenizer({"name": name}), ["five", ""])] == [
        "five </s>",
        "</s>",
    ]


def test_a_text_that_was_rendered_before_keeps_its_one_begin_token(tmp_path: Path) -> None:
    """As columns of prompts with apply_chat_template(tokenize=False) have it."""
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path, bos=True, chat=True), "chat_template": None})
    encoder = PromptEncoder(tokenizer)
    assert words(encoder.encode("<s> two plus")) == "<s> two plus"
    asked, said = ({"role": "user", "content": "<s> two "}, {"role": "assistant", "content": "five"})
    found = encoder.encode_conversation(Record((asked,), "", "row", last=said))
    assert words(found.ids) == "<s> two five </s>"
    assert [words(found.ids[begin:end]) for begin, end in found.targets] == ["five </s>"]


def test_prompt_template_and_system_prompt(tmp_path: Path) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path)})
    encoder = PromptEncoder(tokenizer, prompt_template="Q {prompt} A", system_prompt="be kind ")
    assert words(encoder.encode("two plus three")) == "be kind Q two plus three A"
    assert words(encoder.encode([{"role": "user", "content": "two"}])) == "be kind two"
    assert (
        words(PromptEncoder(tokenizer, prompt_template="Q {x} {prompt}").encode("{prompt}"))
        == "Q <unk> <unk>"
    )
    with pytest.raises(DataError, match=r"has no \{prompt\}"):
        PromptEncoder(tokenizer, prompt_template="Q")


@pytest.mark.parametrize("with_answers", [True, False])
def test_a_prompt_template_beside_messages_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, with_answers: bool
) -> None:
    asked = [{"prompt": [{"role": "user", "content": text}], "answer": "five"} for text in ("two", "three")]
    asked.append({"prompt": "two", "answer": "five"})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, asked)))
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path, chat=True)})
    data: Any = {"max_input_seq_length": 20, "cache_dir": str(tmp_path)}
    for template in (None, "Q {prompt} A"):
        caplog.clear()
        source: Any = {"path": str(tmp_path / "rows.jsonl")}
        load_dataset(source, Reading(data | {"prompt_template": template}, tokenizer, with_answers))
        told = "data.prompt_template is not applied to 2 of 3 records" in caplog.text
        assert told is (template is not None)


def test_missing_tokenizers_and_end_tokens(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        get_tokenizer({"name": str(tmp_path / "nowhere")})
    with pytest.raises(ModelError, match="no eos_token"):
        get_tokenizer({"name": save_tokenizer(tmp_path, eos=False)})


@pytest.mark.parametrize(
    ("limit", "with_answers", "fits"),
    [(3, False, True), (2, False, False), (5, True, True), (4, True, False)],
)
def test_the_length_limit_is_exact(tmp_path: Path, limit: int, with_answers: bool, fits: bool) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t")})
    lines = [{"p": "two", "a": "five"}, {"p": "two plus three", "a": "five"}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, lines)))
    source = {"path": str(tmp_path / "a.jsonl"), "prompt_key": "p", "answer_key": "a"}
    config = {"train": source, "max_input_seq_length": limit}
    if fits:
        dataset = load_dataset(source, Reading(config, tokenizer, with_answers))
        assert [len(example.prompt_ids) for example in dataset.examples] == [1, 3]
        assert [example.index for example in dataset.select([1, 0, 1])] == [1, 0, 1]
        assert (
            dataset.examples[1].answer == "five"
            and words(list(dataset.examples[1].answer_ids)) == "five </s>"
        )
    else:
        with pytest.raises(DataError, match=r"1 of 2 prompts.*max_input_seq_length = .*index 1 \(.*line 2\)"):
            load_dataset(source, Reading(config, tokenizer, with_answers))


def test_empty_prompts_are_refused(tmp_path: Path) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t")})
    (tmp_path / "a.jsonl").write_text('{"p": " ", "a": "five"}')
    source = {"path": str(tmp_path / "a.jsonl"), "prompt_key": "p", "answer_key": "a"}
    with pytest.raises(DataError, match="1 of 1 prompts have no tokens"):
        load_dataset(
            source, Reading({"train": source, "max_input_seq_length": 9}, tokenizer, with_answers=False)
        )


def test_answers_that_no_reward_can_compare_are_refused_with_their_places(tmp_path: Path) -> None:
    tokenizer = get_tokenizer({"name": save_tokenizer(tmp_path / "t")})
    answers = ["five", "", "5", *[" "] * 6]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"p": "two", "a": answer}) for answer in answers))
    source = {"path": str(tmp_path / "a.jsonl"), "prompt_key": "p", "answer_key": "a"}
    config = {"train": source, "max_input_seq_length": 9}
    expected = (
        r"7 of 9 reference answers .*index 1 \(.*line 2\): '': no mathematical expression .* and 2 more"
    )
    with pytest.raises(DataError, match=expected):
        load_dataset(source, Reading(config, tokenizer, False, fault_of_reference))
    assert len(load_dataset(source, Reading(config, tokenizer, False))) == 9


@pytest.mark.parametrize("named", ["LlamaTokenizerFast", "LlamaTokenizer"])
def test_a_byte_level_tokenizer_that_names_llamas_class_keeps_its_spaces(tmp_path: Path, named: str) -> None:
    """As DeepSeek-R1-Distill-Llama, DeepSeek-R1-0528-Qwen3 and deepseek-coder are published."""
    tokenizer_of("deepseek-r1").save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "tokenizer_class": named}))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    text = "def f(x):\n    return x  + 1\n"
    loaded = get_tokenizer({"name": str(tmp_path)})
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False)
    assert loaded(text, add_special_tokens=False)["input_ids"] == expected.ids
    assert loaded.decode(expected.ids) == text
    own = tokenizer_of("deepseek-r1")
    assert (loaded.chat_template, loaded.eos_token) == (own.chat_template, own.eos_token)
    # the files of an exported model give the same tokens again
    loaded.save_pretrained(tmp_path / "exported")
    again = get_tokenizer({"name": str(tmp_path / "exported")})
    assert again(text, add_special_tokens=False)["input_ids"] == expected.ids


def test_a_tokenizer_without_spaces_stays_as_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    loaded = get_tokenizer({"name": save_tokenizer(tmp_path)})
    assert words(loaded("two  plus", add_special_tokens=False)["input_ids"]) == "two plus"
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("text", ["templates/qwen.jinja", "chatml", ""])
def test_a_chat_template_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    """A path, as vLLM and TRL take it, would be the whole prompt of every record."""
    with pytest.raises(ModelError, match=r"no Jinja template.*Fix: write the text"):
        get_tokenizer({"name": save_tokenizer(tmp_path), "chat_template": text})
