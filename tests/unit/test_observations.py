"""Observations behind sampled tokens, by templates that behave as published ones: the rule equals the whole rendering."""

from __future__ import annotations

from typing import Any

import pytest

from megarl.data.chat_template import PASSTHROUGH_TEMPLATE, ChatTemplate
from megarl.data.observations import ObservationEncoder
from megarl.errors import DataError
from tests.templates import TEMPLATES, stop_ids, tokenizer_of
from tests.templates.conversations import CONVERSATIONS, REFUSED, TOOLS, assistant, tool, user

REWRITES = frozenset({"qwen3", "qwen3.5", "glm-4.5"})
"""Templates that leave reasoning, or the empty mark of it, out of responses that a user's turn follows."""


def encoder_of(name: str) -> ObservationEncoder:
    tokenizer = tokenizer_of(name)
    return ObservationEncoder(tokenizer, ChatTemplate(tokenizer), frozenset({*stop_ids(name, tokenizer), tokenizer.eos_token_id}))


def turns_of(messages: list[dict[str, Any]]) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of each response that others follow: what was before, with it, and what follows up to the next one."""
    found = []
    for place, message in enumerate(messages[:-1]):
        if message["role"] == "assistant":
            rest = messages[place + 1 :]
            count = next((number for number, each in enumerate(rest) if each["role"] == "assistant"), len(rest))
            found.append((messages[:place], messages[: place + 1], rest[:count]))
    return found


def rendered_whole_and_by_turns(name: str, kind: str) -> list[tuple[str, str, bool]]:
    """The text up to the next response as the template writes it, as the rule makes it, and whether the template keeps the response."""
    encoder, tools = encoder_of(name), TOOLS if "call" in kind else ()
    found = []
    for before, with_response, following in turns_of(CONVERSATIONS[kind]):
        start = encoder.template.render(before, tools, for_generation=True)
        last = encoder.template.render(with_response, tools)
        whole = encoder.template.render([*with_response, *following], tools, for_generation=True)
        if not last.startswith(start):
            continue  # the template writes a response otherwise than one that is generated
        said = encoder.tokenizer(last[len(start) :], add_special_tokens=False)["input_ids"]
        end = next((place for place, token in enumerate(said) if token in encoder.stop_token_ids), None)
        if end is None:
            continue  # what ends a turn is plain text, or the mark of the next one
        names = [call["function"]["name"] for call in with_response[-1].get("tool_calls", ())]
        named = [{**each, "name": names[number]} if each["role"] == "tool" else each for number, each in enumerate(following)]
        suffix = encoder.encode(named, said[end])
        made = start + encoder.tokenizer.decode([*said[: end + 1], *suffix])
        kept = whole.startswith(start + encoder.tokenizer.decode(said[:end]))
        found.append((whole, made, kept))
    return found


CASES = [(name, kind) for name in TEMPLATES for kind in CONVERSATIONS if kind not in REFUSED.get(name, frozenset())]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_rule_equals_the_whole_rendering(name: str, kind: str) -> None:
    for whole, made, kept in rendered_whole_and_by_turns(name, kind):
        if kept and name != "gpt-oss":
            assert made == whole
        elif kept:
            assert made.replace("<|return|>", "<|end|>") == whole
        else:
            assert name in REWRITES


def test_most_templates_are_tried() -> None:
    tried = {name for name, kind in CASES if any(kept for *_, kept in rendered_whole_and_by_turns(name, kind))}
    assert len(tried) > 20 and {"qwen2.5", "llama3.1", "mistral-v3", "hermes", "deepseek-v3"} <= tried


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_rewrite_are_told(name: str) -> None:
    found = encoder_of(name).rewritten()
    assert (found is not None) == (name in REWRITES) and (found is None or "think>" in found)


@pytest.mark.parametrize("last", [None, "other"])
def test_a_turn_that_was_not_ended_is_ended_by_the_suffix(last: str | None) -> None:
    encoder = encoder_of("qwen2.5")
    token = None if last is None else encoder.tokenizer.convert_tokens_to_ids("o")
    suffix = encoder.tokenizer.decode(encoder.encode([user("Go on.")], token))
    assert suffix == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def test_templates_of_one_turn_are_refused() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'user' %}Q {{ message.content }} A {% endif %}{% endfor %}"
    )
    with pytest.raises(DataError, match=r"does not write what the assistant says before 'user'.*max_rollout_turns: 1"):
        ObservationEncoder(tokenizer, ChatTemplate(tokenizer), {tokenizer.eos_token_id}).encode([user("x")], None)


def test_messages_are_joined_without_a_template() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    encoder = ObservationEncoder(tokenizer, ChatTemplate(tokenizer), {tokenizer.eos_token_id})
    assert tokenizer.decode(encoder.encode([user("one"), tool("two")], tokenizer.eos_token_id)) == "onetwo"
    assert encoder.rewritten() is None and assistant("x")["role"] == "assistant"
