"""Problems, conversations and the check of the quickstart's task with a calculator."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megarl.data.chat_template import ChatTemplate
from megarl.data.observations import ObservationEncoder
from megarl.data.records import Record
from megarl.data.tokenization import PromptEncoder, get_tokenizer
from megarl.quickstart.calculator import (
    TOOLS,
    evaluate_conversations,
    make_calculator_model,
    write_conversations,
    write_products,
)
from megarl.rollout.tools.calculator import calculate
from megarl.rollout.tools.parsers import parser_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calculator")
    make_calculator_model(path / "model", 3)
    write_products(path / "train.jsonl", 400, 3)
    write_products(path / "validation.jsonl", 40, 4, "validation")
    write_conversations(path / "demonstrations.jsonl", 400, 5, 0.7)
    return path


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_right_and_guesses_are_not(directory: Path) -> None:
    train, validation = rows_of(directory / "train.jsonl"), rows_of(directory / "validation.jsonl")
    assert not {row["prompt"] for row in train} & {row["prompt"] for row in validation}
    worked_out = 0
    for row in rows_of(directory / "demonstrations.jsonl"):
        asked, *said = row["messages"]
        left, right = [
            int("".join(filter(str.isdigit, word)))
            for word in asked["content"].replace("*", " ").split()
            if any(map(str.isdigit, word))
        ]
        if len(said) == 1:
            assert int(said[0]["content"]) != left * right
            continue
        worked_out += 1
        [call] = said[0]["tool_calls"]
        assert (
            calculate(**call["function"]["arguments"])
            == said[1]["content"]
            == said[2]["content"]
            == str(left * right)
        )
    assert 80 < worked_out < 160, "3 in 10 of 400"
    assert {len(row["answer"]) for row in (*train, *validation)} == {4}


def test_what_is_learned_is_what_a_run_sees(directory: Path) -> None:
    """A demonstration is token for token a rollout's prompt, call, observation and answer, and is read as a
    call."""
    tokenizer = get_tokenizer({"name": str(directory / "model")})
    row = next(row for row in rows_of(directory / "demonstrations.jsonl") if len(row["messages"]) == 4)
    asked, call, result, answer = row["messages"]
    encoder = PromptEncoder(tokenizer, tools=TOOLS)
    learned = encoder.encode_conversation(
        Record((asked, call, result), answer["content"], "row", answer, tuple(TOOLS))
    )
    prompt = encoder.encode(asked["content"])
    (start, end), (second, last) = learned.targets
    said = learned.ids[start:end]
    suffix = ObservationEncoder(tokenizer, ChatTemplate(tokenizer), {tokenizer.eos_token_id}).encode(
        [result], said[-1]
    )
    assert (
        learned.ids == [*prompt, *said, *suffix, *learned.ids[second:last]] and last == len(learned.ids) <= 64
    )
    text = tokenizer.decode(said, skip_special_tokens=True)
    assert parser_of("hermes")(text, [])[1][0]["function"] == call["tool_calls"][0]["function"]


def test_the_check_needs_a_call_and_its_result(directory: Path) -> None:
    accuracy, calls = evaluate_conversations(directory / "model", directory / "validation.jsonl")
    assert accuracy == 0 and calls == 0
    assert evaluate_conversations(directory / "model", directory / "validation.jsonl", with_tool=False) == (
        0,
        0,
    )
