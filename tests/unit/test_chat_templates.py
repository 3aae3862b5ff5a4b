"""Whole conversations by templates that behave as published ones: ids, spans, ends, forms of tool calls,
dates and limits."""

from __future__ import annotations

import datetime
import json
import re
from typing import Any

import pytest

from megarl.data import chat_template, conversations
from megarl.data.chat_template import ChatTemplate
from megarl.data.tokenization import PromptEncoder
from megarl.errors import DataError, RecordError
from tests.templates import TEMPLATES, stop_ids, tokenizer_of
from tests.templates.conversations import (
    CONVERSATIONS,
    NO_TOOLS,
    REFUSED,
    TOOLS,
    assistant,
    call,
    record_of,
    tool,
    user,
)

DAY = datetime.date(2026, 2, 3)
WANT_TEXT = frozenset({"deepseek-v3", "deepseek-r1", "deepseek-v3.1"})
CASES = [(name, kind) for name in TEMPLATES for kind in CONVERSATIONS]


def encoder_of(name: str, **values: Any) -> PromptEncoder:
    tokenizer = tokenizer_of(name)
    return PromptEncoder(tokenizer, template_kwargs=values, stop_tokens=stop_ids(name, tokenizer), date=DAY)


def shaped(name: str, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with arguments of calls in the form that a template is written for."""
    found = json.loads(json.dumps(messages))
    for message in found:
        for each in message.get("tool_calls", ()):
            given = each["function"]["arguments"]
            if name in WANT_TEXT and not isinstance(given, str):
                each["function"]["arguments"] = json.dumps(given)
            if name not in WANT_TEXT and isinstance(given, str):
                each["function"]["arguments"] = json.loads(given)
    return found


def reference(name: str, messages: list[dict[str, Any]], tools: Any, **options: Any) -> str:
    tokenizer = tokenizer_of(name)
    tools = list(tools) or None
    clock = {"strftime_now": DAY.strftime}
    return str(
        tokenizer.apply_chat_template(shaped(name, messages), tools=tools, tokenize=False, **clock, **options)
    )


def tools_of(kind: str) -> Any:
    return TOOLS if kind in NO_TOOLS else ()


def said_of(message: dict[str, Any]) -> str:
    return str(message["content"] or "").rpartition("</think>")[2].strip()


def test_there_is_a_template_and_a_conversation_of_every_kind() -> None:
    assert len(TEMPLATES) >= 20 and len(CONVERSATIONS) >= 11
    assert {kind for kinds in REFUSED.values() for kind in kinds} <= set(CONVERSATIONS) and set(
        REFUSED
    ) <= set(TEMPLATES)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_the_assistant_alone_is_learned_of_the_whole_rendering(name: str, kind: str) -> None:
    messages, tools = CONVERSATIONS[kind], tools_of(kind)
    encoder, tokenizer = encoder_of(name), tokenizer_of(name)
    if kind in REFUSED.get(name, ()):
        with pytest.raises(RecordError, match=r"^row 1: .*Fix: "):
            encoder.encode_conversation(record_of(messages, tools))
        return
    found = encoder.encode_conversation(record_of(messages, tools))
    whole = tokenizer(reference(name, messages, tools), add_special_tokens=False)["input_ids"]
    stops = set(stop_ids(name, tokenizer))

    # the tokens are those of the whole rendering, but for one end where it writes none
    last = found.targets[-1][1]
    assert found.ids[: last - 1] == whole[: last - 1]
    assert found.ids == whole or (found.ids[-1] == tokenizer.eos_token_id and len(found.ids) == last)

    # one span a turn of the assistant, disjoint and in order, which says what the turn says and nothing of
    # others
    spoken = [message for message in messages if message["role"] == "assistant"]
    assert len(found.targets) == len(spoken)
    edges = [edge for span in found.targets for edge in span]
    assert edges == sorted(edges) and all(start < end for start, end in found.targets)
    texts = [tokenizer.decode(found.ids[start:end]) for start, end in found.targets]
    for message, text in zip(spoken, texts, strict=True):
        assert said_of(message) in text
        for each in message.get("tool_calls", ()):
            assert each["function"]["name"] in text and "Rome" in text
    others = [message["content"].strip() for message in messages if message["role"] != "assistant"]
    if kind != "equal texts":
        assert not [text for text in texts for other in others if other in text]
    assert "".join(texts).count("Yes.") == (2 if kind == "equal texts" else 0)

    # each ends by a token at which generation stops; an end that is none is not learned
    for number, (_, end) in enumerate(found.targets, 1):
        marks_line_feed = name == "smollm3" and tokenizer.decode(found.ids[end - 1]) == "\n"
        ends_well = found.ids[end - 1 - marks_line_feed] in stops
        if number < len(found.targets) and name == "gpt-oss" and found.ids[end - 1] not in stops:
            ends_well = tokenizer.decode(found.ids[end]) == "<|end|>"
        assert ends_well or (name == "plain-text" and number < len(found.targets))


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name != "smollm3"])
def test_a_turn_begins_where_a_response_would(name: str) -> None:
    messages = CONVERSATIONS["three turns"]
    found, tokenizer = encoder_of(name).encode_conversation(record_of(messages)), tokenizer_of(name)
    for place, (start, _) in zip((1, 3, 5), found.targets, strict=True):
        prompt = reference(name, messages[:place], (), add_generation_prompt=True)
        header = prompt.rpartition(messages[place - 1]["content"])[2].partition("<think>")[0]
        # A line feed that opens a block of reasoning may be one token with the next one.
        assert re.sub(r"<think>\n+$", "", tokenizer.decode(found.ids[:start])).endswith(header)


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "glm-4.5"])
@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_thinking_off_is_learned_or_refused_with_what_differs(name: str, kind: str) -> None:
    """A response is then generated after an empty block of reasoning: one with reasoning would follow
    something else."""
    messages, tools = CONVERSATIONS[kind], tools_of(kind)
    tokenizer = tokenizer_of(name)
    whole = reference(name, messages, tools, enable_thinking=False)
    prompt = reference(name, messages[:-1], tools, enable_thinking=False, add_generation_prompt=True)
    try:
        found = encoder_of(name, enable_thinking=False).encode_conversation(record_of(messages, tools))
    except RecordError as error:
        assert "would be generated" in str(error) or "but a generated turn follows" in str(error)
        assert not whole.startswith(prompt)
        return
    last = found.targets[-1][1]
    assert found.ids[: last - 1] == tokenizer(whole, add_special_tokens=False)["input_ids"][: last - 1]
    assert said_of(messages[-1]) in tokenizer.decode(found.ids[slice(*found.targets[-1])])


def test_calls_that_are_named_by_their_ids() -> None:
    identifier = "functions.weather:0"
    messages = [
        user("How warm?"),
        assistant("", tool_calls=[call("weather", {"city": "Rome"}, identifier)]),
        tool("20", identifier),
    ]
    found = encoder_of("kimi-k2").encode_conversation(record_of([*messages, assistant("Mild.")], TOOLS))
    start, end = found.targets[0]
    text = tokenizer_of("kimi-k2").decode(found.ids[start:end])
    assert text.startswith("<|tool_calls_section_begin|>") and text.endswith(
        '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|><|im_end|>'
    )


@pytest.mark.parametrize("arguments", ["[1]", "{broken", '"text"'])
def test_arguments_that_are_no_object_are_refused(arguments: str) -> None:
    messages = [user("How warm?"), assistant("", tool_calls=[call("weather", arguments)])]
    with pytest.raises(RecordError, match="'weather' are no JSON"):
        encoder_of("qwen2.5").encode_conversation(record_of(messages, TOOLS))


@pytest.mark.parametrize("name", TEMPLATES)
def test_turn_ends_are_tokens_that_generation_stops_at(name: str) -> None:
    tokenizer = tokenizer_of(name)
    ends = ChatTemplate(tokenizer, date=DAY).stop_tokens
    assert set(ends) <= set(stop_ids(name, tokenizer))
    assert bool(ends) == (name != "plain-text")


def test_a_turn_ends_after_what_closes_its_response() -> None:
    """Command A closes a response and then the turn: the first special token after the text is no end."""
    tokenizer = tokenizer_of("command-a")
    found = encoder_of("command-a").encode_conversation(record_of(CONVERSATIONS["three turns"]))
    texts = [tokenizer.decode(found.ids[start:end]) for start, end in found.targets]
    assert texts[0] == "<|START_RESPONSE|>Said two.<|END_RESPONSE|><|END_OF_TURN_TOKEN|>"
    assert ChatTemplate(tokenizer).stop_tokens == (tokenizer.eos_token_id,)


@pytest.mark.parametrize("begins", ["", "<think>\\n"])
def test_results_of_tools_that_end_otherwise_where_others_follow(begins: str) -> None:
    tokenizer = tokenizer_of("hermes")
    header = "'<|im_start|>assistant\\n"
    assert tokenizer.chat_template.count(header + "'") == 1
    tokenizer.chat_template = tokenizer.chat_template.replace(header + "'", f"{header}{begins}'")
    found = PromptEncoder(tokenizer).encode_conversation(record_of(CONVERSATIONS["call without text"], TOOLS))
    texts = [tokenizer.decode(found.ids[start:end]) for start, end in found.targets]
    assert texts[0].startswith("<tool_call>") and texts[1] == "It is mild.<|im_end|>"


def test_a_first_word_that_is_one_token_with_the_space_before_it_is_learned() -> None:
    """The prompt ends in ``Assistant: ``, and `` two`` is one token."""
    found = encoder_of("ernie").encode_conversation(record_of([user("Say it."), assistant("two")]))
    assert [tokenizer_of("ernie").decode(found.ids[start:end]) for start, end in found.targets] == [
        " two</s>"
    ]


@pytest.mark.parametrize("asked", ["Ask one.", "What is <|im_start|>assistant\nthen?"])
def test_a_turn_that_a_template_writes_twice_is_refused(asked: str) -> None:
    """Its end would be found in the summary behind the turns."""
    tokenizer = tokenizer_of("chatml")
    summary = "{{ '<|im_start|>summary\n' }}{% for m in messages %}{{ m.content[:10] + ';' }}{% endfor %}"
    turns, added = tokenizer.chat_template.split("{% if add_generation_prompt")
    tokenizer.chat_template = f"{turns}{summary}{{% if add_generation_prompt{added}"
    with pytest.raises(
        RecordError, match="more than once" if "<" in asked else "but a generated turn follows"
    ):
        PromptEncoder(tokenizer).encode_conversation(record_of([user(asked), assistant("Said two.")]))


def test_a_turn_that_the_user_alone_repeats_is_refused() -> None:
    """The template leaves out earlier turns of the assistant, so that this one is in the whole once: in a
    later turn."""
    text = "A long answer, to be repeated."
    messages = [user("Ask one."), assistant(text), user(f"You said: {text}"), assistant("Yes.")]
    tokenizer = tokenizer_of("chatml")
    said = "(message['content'] if loop.last or message['role'] == 'user' else '')"
    tokenizer.chat_template = tokenizer.chat_template.replace("message['content']", said)
    with pytest.raises(RecordError, match=r"turn 2 of 4.* again after the next message"):
        PromptEncoder(tokenizer).encode_conversation(record_of(messages))


def _marking(body: str) -> PromptEncoder:
    """Return an encoder by ChatML with other text for a message's content and end."""
    tokenizer = tokenizer_of("chatml")
    plain = "message['content'] + '<|im_end|>' + '\\n' }}"
    assert plain in tokenizer.chat_template
    tokenizer.chat_template = tokenizer.chat_template.replace(plain, "'' }}" + body)
    return PromptEncoder(tokenizer)


def test_marks_around_the_content_alone_learn_the_end_too() -> None:
    said = "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}{% endgeneration %}"
    encoder = _marking(said + "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}")
    found = encoder.encode_conversation(record_of(CONVERSATIONS["three turns"]))
    texts = [tokenizer_of("chatml").decode(found.ids[start:end]) for start, end in found.targets]
    assert texts == ["Said two.<|im_end|>", "Told st more.<|im_end|>", "Done.<|im_end|>"]


@pytest.mark.parametrize(
    ("marked", "learned"),
    [
        ("loop.last", ["Done.<|im_end|>"]),
        ("message.role == 'user' and loop.index > 1", None),
        ("message.role == 'assistant'", 3),
    ],
)
def test_marks_of_some_turns_are_the_assistants(marked: str, learned: Any) -> None:
    said = "{{ message.content }}"
    body = f"{{% if {marked} %}}{{% generation %}}{said}{{% endgeneration %}}{{% else %}}{said}{{% endif %}}"
    encoder, record = _marking(body + "{{ '<|im_end|>\n' }}"), record_of(CONVERSATIONS["three turns"])
    if learned is None:
        with pytest.raises(
            RecordError,
            match=r"not all marked texts are such turns; the first marked text is 'Want further\.'",
        ):
            encoder.encode_conversation(record)
        return
    found = encoder.encode_conversation(record)
    texts = [tokenizer_of("chatml").decode(found.ids[start:end]) for start, end in found.targets]
    assert texts == learned or len(texts) == learned


def test_a_clock_shows_the_day_of_the_run() -> None:
    record = record_of(CONVERSATIONS["one turn"])
    texts = [encoder_of(name).whole_text(record) for name in ("llama3.2", "gpt-oss", "smollm3")]
    assert ["03 Feb 2026" in texts[0], "2026-02-03" in texts[1], "03 February 2026" in texts[2]] == [True] * 3
    tokenizer = tokenizer_of("llama3.2")
    identities = [
        PromptEncoder(tokenizer, date=day).identity for day in (DAY, DAY + datetime.timedelta(1), DAY)
    ]
    assert identities[0] == identities[2] != identities[1]
    plain = tokenizer_of("llama3.1")
    assert PromptEncoder(plain, date=DAY).identity == PromptEncoder(plain, date=None).identity


def test_a_template_that_does_not_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "RENDER_SECONDS", 0.3)
    tokenizer = tokenizer_of("chatml")
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    tokenizer.chat_template = "{% if messages|length > 1 %}" + loops + "{% endif %}{{ messages[0].content }}"
    with pytest.raises(
        RecordError, match=r"row 1: policy.tokenizer.chat_template took more than 0.3 s for 2 messages"
    ):
        PromptEncoder(tokenizer).whole_text(record_of(CONVERSATIONS["one turn"]))


def test_a_template_that_takes_all_memory_is_refused() -> None:
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template = "{{ messages[0].content * 10 ** 12 }}"
    with pytest.raises(RecordError, match=r"row 1: .*cannot be applied.*MemoryError"):
        PromptEncoder(tokenizer).whole_text(record_of(CONVERSATIONS["one turn"]))


def test_a_template_that_writes_far_more_than_it_is_given_is_refused() -> None:
    """A tokenizer takes hundreds of bytes and microseconds for each character."""
    tokenizer = tokenizer_of("chatml")
    tokenizer.chat_template += "{{ 'a b ' * 10 ** 7 }}"
    with pytest.raises(
        RecordError, match=r"row 1: .* writes 400000\d\d characters for messages and tools of \d\d\d?;.*Fix: "
    ):
        PromptEncoder(tokenizer).encode_conversation(record_of(CONVERSATIONS["one turn"]))


@pytest.mark.parametrize(
    ("first", "second", "shared"),
    [("", "", 0), ("ab", "ab", 2), ("abc", "abd", 2), ("x", "y", 0), ("abcd", "ab", 2)],
)
def test_texts_share_a_beginning(first: str, second: str, shared: int) -> None:
    assert conversations.shared_length(first, second) == conversations.shared_length(second, first) == shared


def test_a_slow_tokenizer_counts_characters_by_decoding() -> None:
    """One without offsets finds the same spans; where its tokens do not decode to the text, it cannot."""
    encoder = encoder_of("qwen3")
    fast = encoder.encode_conversation(record_of(CONVERSATIONS["three turns"]))
    slow = _Slow(tokenizer_of("qwen3"))
    found = PromptEncoder(slow, stop_tokens=stop_ids("qwen3", tokenizer_of("qwen3"))).encode_conversation(  # type: ignore[arg-type]
        record_of(CONVERSATIONS["three turns"])
    )
    assert (found.ids, found.targets) == (fast.ids, fast.targets)
    slow.loses = True
    with pytest.raises(DataError, match="this tokenizer gives no offsets"):
        PromptEncoder(slow).encode_conversation(record_of(CONVERSATIONS["one turn"]))  # type: ignore[arg-type]


class _Slow:
    """A tokenizer that tells no offsets, as those in Python."""

    is_fast = False
    loses = False

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __call__(self, text: Any, **options: Any) -> Any:
        assert "return_offsets_mapping" not in options
        return self._inner(text, **options)

    def decode(self, ids: Any, **options: Any) -> str:
        return str(self._inner.decode(ids, **options)) + ("?" if self.loses else "")
