"""Observations behind sampled tokens, by templates that behave as published ones: the rule equals the whole
rendering."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megarl.data.chat_template import PASSTHROUGH_TEMPLATE, ChatTemplate
from megarl.data.observations import ObservationEncoder, _harmony_turn, _marks_of
from megarl.errors import DataError
from megarl.time_limit import time_limit
from tests.templates import TEMPLATES, stop_ids, tokenizer_of
from tests.templates.conversations import CONVERSATIONS, REFUSED, TOOLS, assistant, tool, user

REWRITES = frozenset({"qwen3", "qwen3.5", "glm-4.5", "deepseek-r1", "deepseek-v3.1", "nemotron", "gpt-oss"})
"""Templates that leave reasoning, or the empty mark of it, out of responses that a user's turn follows, or
out of all."""


def encoder_of(name: str) -> ObservationEncoder:
    tokenizer = tokenizer_of(name)
    return ObservationEncoder(
        tokenizer, ChatTemplate(tokenizer), frozenset({*stop_ids(name, tokenizer), tokenizer.eos_token_id})
    )


def turns_of(
    messages: list[dict[str, Any]],
) -> list[tuple[list[dict[str, Any]], list[dict[str, Any]], list[dict[str, Any]]]]:
    """Of each response that others follow: what was before, with it, and what follows up to the next one."""
    found = []
    for place, message in enumerate(messages[:-1]):
        if message["role"] == "assistant":
            rest = messages[place + 1 :]
            count = next(
                (number for number, each in enumerate(rest) if each["role"] == "assistant"), len(rest)
            )
            found.append((messages[:place], messages[: place + 1], rest[:count]))
    return found


def rendered_whole_and_by_turns(name: str, kind: str) -> list[tuple[str, str, bool]]:
    """The text up to the next response as the template writes it, as the rule makes it, and whether the
    template keeps the response."""
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
        named = [
            {**each, "name": names[number]} if each["role"] == "tool" else each
            for number, each in enumerate(following)
        ]
        suffix = encoder.encode(named, said[end])
        made = start + encoder.tokenizer.decode([*said[: end + 1], *suffix])
        kept = whole.startswith(start + encoder.tokenizer.decode(said[:end]))
        found.append((whole, made, kept))
    return found


CASES = [
    (name, kind) for name in TEMPLATES for kind in CONVERSATIONS if kind not in REFUSED.get(name, frozenset())
]


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
    tried = {
        name for name, kind in CASES if any(kept for *_, kept in rendered_whole_and_by_turns(name, kind))
    }
    assert len(tried) > 20 and {"qwen2.5", "llama3.1", "mistral-v3", "hermes", "deepseek-v3"} <= tried


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_that_rewrite_are_told(name: str) -> None:
    encoder = encoder_of(name)
    assert (encoder.rewritten is not None) == (name in REWRITES) == (encoder.history([1]) is not None)
    assert encoder.rewritten is None or "think>" in encoder.rewritten or name in {"deepseek-v3.1", "gpt-oss"}


def sampled_texts(encoder: ObservationEncoder, before: list[Any], content: str) -> tuple[str, list[int]]:
    """A prompt, and the tokens of a response as a model of the template writes it."""
    start = encoder.template.render(before, for_generation=True)
    last = encoder.template.render([*before, assistant(content)])
    is_written = last.startswith(start) and content in last
    said = (
        last[len(start) :]
        if is_written
        else content.removeprefix("<think>\n" if start.endswith("<think>\n") else "")
    )
    tokens = encoder.tokens(said)
    end = next((place for place, token in enumerate(tokens) if token in encoder.stop_token_ids), None)
    if end is not None:
        return start, tokens[: end + 1]
    # of GLM the mark of the next role
    user_mark = encoder.tokenizer.convert_tokens_to_ids("<|user|>")
    return start, [
        *tokens,
        user_mark if user_mark in encoder.stop_token_ids else encoder.tokenizer.eos_token_id,
    ]


# what ends a turn of the template of plain text is no token
@pytest.mark.parametrize("name", sorted({*TEMPLATES} - {"plain-text"}))
@pytest.mark.parametrize("reasoning", ["", "<think>\nadd both\n</think>\n\n"])
def test_a_model_is_shown_the_whole_rendering_at_each_turn(name: str, reasoning: str) -> None:
    """Token by token what the template writes, whichever way a turn is made: by the suffix, or as a new
    segment."""
    encoder = encoder_of(name)
    messages, words = [user("Ask one.")], ["two", "three", "four"]
    start = encoder.template.render(messages, for_generation=True)
    tokens, segments = encoder.tokens(start), 1
    history = encoder.history(tokens)
    for word in words:
        _, said = sampled_texts(encoder, messages, f"{reasoning}Said {word}.")
        observed = [user(f"No, not {word}.")]
        messages = [*messages, assistant(f"{reasoning}Said {word}."), *observed]
        prompt = None if history is None else history.follow(said, observed)
        segments += prompt is not None
        tokens = [*tokens, *said, *encoder.encode(observed, said[-1])] if prompt is None else prompt
        whole = encoder.template.render(messages, for_generation=True)
        made = encoder.tokenizer.decode(tokens)
        if name == "gpt-oss":
            made = made.replace("<|return|>", "<|end|>")
        assert made == whole
        assert name == "gpt-oss" or prompt is None or tokens == encoder.tokens(whole)
    if name not in REWRITES or (name in {"nemotron", "deepseek-v3.1"} and not reasoning) or name == "gpt-oss":
        assert segments == 1
    else:
        assert segments == 4 or (name == "glm-4.5" and not reasoning)


def test_harmony_leaves_reasoning_out_once_it_has_answered() -> None:
    """Not behind a call: what its models sample of calls, which its template writes otherwise, stays as it
    is."""
    encoder = encoder_of("gpt-oss")
    asked = [user("How warm?")]
    prompt = encoder.tokens(encoder.template.render(asked, for_generation=True))
    history = encoder.history(prompt)
    assert history is not None
    final = "<|channel|>final<|message|>Mild.<|return|>"
    thought = "<|channel|>analysis<|message|>why not<|end|><|start|>assistant"
    assert history.follow(encoder.tokens(final), [user("Sure?")]) is None
    found = history.follow(encoder.tokens(thought + final), [user("Really?")])
    messages = [*asked, assistant("Mild."), user("Sure?"), assistant("Mild."), user("Really?")]
    assert found is not None and encoder.tokenizer.decode(found) == encoder.template.render(
        messages, for_generation=True
    )
    call = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
    assert history.follow(encoder.tokens(thought + call), [{**tool("20"), "name": "look"}]) is None
    found = history.follow(encoder.tokens(final), [user("Now?")])
    called = {"type": "function", "function": {"name": "look", "arguments": {"city": "Rome"}}}
    messages += [
        assistant("", tool_calls=[called], thinking="why not"),
        tool("20"),
        assistant("Mild."),
        user("Now?"),
    ]
    assert found is not None and encoder.tokenizer.decode(found) == encoder.template.render(
        messages, for_generation=True
    )
    assert history.follow(encoder.tokens(final), [user("And now?")]) is None


@pytest.mark.parametrize("text", ["to=functions." + "a" * 200_000, "to=functions.a" * 14_000])
def test_the_time_to_read_a_harmony_turn_grows_as_its_length(text: str) -> None:
    with time_limit(20.0):
        assert _harmony_turn(text) == assistant("")


@pytest.mark.parametrize("name", sorted(REWRITES - {"nemotron", "deepseek-r1", "gpt-oss"}))
def test_what_a_tool_says_goes_behind_the_reasoning(name: str) -> None:
    """Reasoning stays until a user speaks, where the template has it so; then that of calls is left out
    too."""
    encoder = encoder_of(name)
    prompt = encoder.tokens(encoder.template.render([user("How warm?")], for_generation=True))
    history = encoder.history(prompt)
    assert history is not None
    opened = encoder.template.render([user("x")], for_generation=True).endswith("<think>\n")
    end = encoder.tokenizer.eos_token_id
    call = encoder.tokens(f"{'' if opened else '<think>' + chr(10)}look\n</think>\n\nI call.")
    first = history.follow([*call, end], [tool("20")])
    kept = name in {"qwen3", "qwen3.5"}
    assert (first is None) == kept
    second = history.follow(
        [*encoder.tokens(f"{'' if opened else '<think>' + chr(10)}warm\n</think>\n\nMild."), end],
        [user("Sure?")],
    )
    assert second is not None and second[: len(prompt) - 8] == prompt[: len(prompt) - 8]
    text = encoder.tokenizer.decode(second)
    assert (
        "look" not in text
        and "warm\n" not in text
        and "I call." in text
        and "Mild." in text
        and "Sure?" in text
    )


def test_a_prompt_that_does_not_end_as_the_template_does_keeps_what_was_sampled() -> None:
    encoder = encoder_of("qwen3")
    history = encoder.history(encoder.tokens("Some text without a template"))
    assert history is not None
    assert history.follow(encoder.tokens("<think>\na\n</think>\n\nb<|im_end|>"), [user("c")]) is None


@pytest.mark.parametrize("last", [None, "other"])
def test_a_turn_that_was_not_ended_is_ended_by_the_suffix(last: str | None) -> None:
    encoder = encoder_of("qwen2.5")
    token = None if last is None else encoder.tokenizer.convert_tokens_to_ids("o")
    suffix = encoder.tokenizer.decode(encoder.encode([user("Go on.")], token))
    assert suffix == "<|im_end|>\n<|im_start|>user\nGo on.<|im_end|>\n<|im_start|>assistant\n"


def test_templates_of_one_turn_are_refused() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.role == 'user' %}Q {{ "
        "message.content }} A {% endif %}{% endfor %}"
    )
    with pytest.raises(
        DataError, match=r"leaves out the assistant's turn before a turn of 'user'.*max_rollout_turns: 1"
    ):
        ObservationEncoder(tokenizer, ChatTemplate(tokenizer), {tokenizer.eos_token_id}).encode(
            [user("x")], None
        )


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_is_written_without_rendering_is_what_would_be_rendered(name: str) -> None:
    """A template that writes contents in another form, as JSON for example, is rendered each time."""
    encoder = encoder_of(name)
    contents = [
        "Go on.",
        'a "b" {c}',
        "[1, 2]",
        '{"a": 1}',
        "  led",
        "",
        "é\n\nx",
        "<think>a</think>b",
        "1 < 2",
        "|x|: [/INST]",
    ]
    kinds = [user("x"), {**tool("20"), "name": "look"}, {**tool("20"), "name": "other"}][
        : 1 if name in WITHOUT_TOOLS else 3
    ]
    framed = 0
    for kind in kinds:
        for content in contents:
            messages = [{**kind, "content": content}]
            found = encoder._framed(messages)
            framed += found is not None
            assert found is None or found == encoder.tokens(encoder._behind_response(messages))
    assert framed == 4 * (1 if name in {"gpt-oss", "llama3.1", "llama3.2", "command-a"} else len(kinds)), (
        "contents that are plain, or that a template writes as they are"
    )


def _odd_tokenizer(kind: str, **marks: bool) -> PreTrainedTokenizerFast:
    """A tokenizer whose first piece, spaces or marks are what a text that is cut could lose."""
    words = [
        "<unk>",
        *"abcdefghijklmnopqrstuvwxyz0123456789 ▁.,|:\n",
        "▁an",
        "swer",
        "▁answer",
        "user",
        "▁user",
    ]
    vocabulary = {word: place for place, word in enumerate(dict.fromkeys(words))}
    merges = [("▁", "user"), ("▁an", "swer")]
    merges = [(left, right) for left, right in merges if left in vocabulary and right in vocabulary]
    backend = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))
    if kind == "prepended":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind)
    begins, ends = "<|im_start|>", "<|im_end|>"
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, **marks) for token in (begins, ends)]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=ends, clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = tokenizer_of("qwen2.5").chat_template
    return tokenizer


@pytest.mark.parametrize("kind", ["first", "always", "never", "prepended"])
@pytest.mark.parametrize("marks", [{}, {"rstrip": True}, {"lstrip": True}])
def test_a_frame_is_encoded_once_and_changes_no_token(kind: str, marks: dict[str, bool]) -> None:
    """Whatever a tokenizer does to the first piece of a text, or to the spaces around its marks."""
    tokenizer = _odd_tokenizer(kind, **marks)
    encoder = ObservationEncoder(tokenizer, ChatTemplate(tokenizer), {tokenizer.eos_token_id})
    drawn = random.Random(5)
    for _ in range(40):
        content = "".join(drawn.choices("ab 12.\n|>: user answer", k=drawn.randint(1, 12)))
        messages = [user(content)]
        found = encoder._framed(messages)
        assert found is None or found == encoder.tokens(encoder._behind_response(messages)), repr(content)
    [frame] = encoder._frames.values()
    assert frame is not None and (frame.head != []) == (not marks), "marks that take spaces are no cuts"


def test_marks_that_share_characters_are_no_cuts() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    assert _marks_of(tokenizer).search("x<|im_end|>") is not None
    tokenizer.add_tokens([AddedToken("!<|im_e", normalized=False), AddedToken("start|>?", normalized=False)])
    pattern = _marks_of(tokenizer)
    assert pattern.search("x<|im_end|>") is None and pattern.search("<|im_start|>") is None
    assert pattern.search("<|endoftext|>") is not None


WITHOUT_TOOLS = frozenset(
    {
        "gemma2",
        "gemma3",
        "phi-3.5",
        "phi-4",
        "mistral-v0.1",
        "vicuna",
        "llama2",
        "olmo2",
        "command-r",
        "chatglm",
        "ernie",
    }
)


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_template_that_leaves_out_what_a_tool_says_is_refused(name: str) -> None:
    encoder = encoder_of(name)
    encoder.check_role("user")
    if name not in WITHOUT_TOOLS:
        encoder.check_role("tool")
        return
    for call in (
        lambda: encoder.check_role("tool"),
        lambda: encoder.encode([user("and"), {**tool("20"), "name": "look"}], None),
    ):
        with pytest.raises(
            DataError, match=r"chat_template (leaves out a turn of 'tool'|cannot be applied).*Fix: "
        ):
            call()


def test_messages_are_joined_without_a_template() -> None:
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    encoder = ObservationEncoder(tokenizer, ChatTemplate(tokenizer), {tokenizer.eos_token_id})
    assert tokenizer.decode(encoder.encode([user("one"), tool("two")], tokenizer.eos_token_id)) == "onetwo"
    assert encoder.rewritten is None and assistant("x")["role"] == "assistant"
