"""Tools: calls in the forms of models, what each tool answers, and conversations with them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet

from megarl.config.environments import TOOL_PARSERS, EnvConfig
from megarl.config.load import load_config
from megarl.config.recipes import find
from megarl.data.chat_template import shows_tools
from megarl.data.datasets import Example
from megarl.data.records import read_records
from megarl.errors import ConfigError
from megarl.key import defaults_of
from megarl.rollout.environments import make_environment, tools_told
from megarl.rollout.message_env import EnvironmentLostError
from megarl.rollout.programs import isolation
from megarl.rollout.tools.calculator import calculate
from megarl.rollout.tools.http import post
from megarl.rollout.tools.parsers import BadCallError, parser_of
from megarl.rollout.tools.search import DocumentIndex
from megarl.rollout.tools.tool import Tool, Toolbox, tools_of
from megarl.time_limit import time_limit
from tests.templates import TEMPLATES, tokenizer_of
from tests.templates.conversations import call
from tests.unit.scripted import collector_of

HOTPOT = Path(__file__).parents[2] / "configs" / "quickstart" / "hotpot-qa.jsonl"
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Rome"},
    {"city": 'a "b" {c}\n<d>', "days": 3, "exact": True, "of": [1, None]},
    {},
]
TEMPLATE_OF = {
    "hermes": ("qwen2.5", "qwen3", "hermes"),
    "qwen3_coder": ("qwen3.5",),
    "llama3": ("llama3.1", "llama3.2"),
    "mistral": ("mistral-v3",),
    "deepseek": ("deepseek-v3", "deepseek-r1", "deepseek-v3.1"),
    "gpt-oss": ("gpt-oss",),
}


def written(template: str, name: str, arguments: dict[str, Any]) -> str:
    """What a published template writes for a call: models are trained on that."""
    tokenizer = tokenizer_of(template)
    given = json.dumps(arguments) if template.startswith("deepseek") else arguments
    turn = {"role": "assistant", "content": "", "tool_calls": [call(name, given)]}
    asked = [{"role": "user", "content": "Ask."}]
    before = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    return str(tokenizer.apply_chat_template([*asked, turn], tokenize=False)).removeprefix(before)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=range(len(ARGUMENTS)))
@pytest.mark.parametrize(
    ("form", "template"), [(form, template) for form, names in TEMPLATE_OF.items() for template in names]
)
def test_calls_are_read_as_templates_write_them(form: str, template: str, arguments: dict[str, Any]) -> None:
    if form == "qwen3_coder" and arguments.get("of") == [1, None]:
        arguments = {
            **arguments,
            "city": "a line\nand another",
        }  # values are texts of lines there: white space at their ends is no part
    full = written(template, "look_up", arguments)
    tokenizer = tokenizer_of(template)
    plain = tokenizer.decode(tokenizer(full, add_special_tokens=False)["input_ids"], skip_special_tokens=True)
    content, calls = parser_of(form)(plain, [full])
    assert [(each["function"]["name"], each["function"]["arguments"]) for each in calls] == [
        ("look_up", arguments)
    ]
    assert "look_up" not in content


def test_of_mistral_the_id_of_a_call_is_no_part_of_its_name() -> None:
    """Mistral Small 3.2 writes it, and later models leave it out again."""
    text = 'Sure.[TOOL_CALLS]look_up[CALL_ID]Vx3kP9aQz[ARGS]{"city": "Paris"}[TOOL_CALLS]ask[ARGS]{}'
    content, calls = parser_of("mistral")(text, [text])
    assert content == "Sure." and [each["function"] for each in calls] == [
        {"name": "look_up", "arguments": {"city": "Paris"}},
        {"name": "ask", "arguments": {}},
    ]


def test_every_form_has_a_template() -> None:
    assert set(TEMPLATE_OF) == set(TOOL_PARSERS) and all(
        name in TEMPLATES for names in TEMPLATE_OF.values() for name in names
    )


@pytest.mark.parametrize(
    ("form", "text"),
    [
        ("hermes", '<tool_call>\n{"name": "a", "arguments": {"b": 1'),
        ("hermes", '<tool_call>\n{"name": "a", "arguments": {"b": 1}}\n'),
        ("hermes", "<tool_call>\nlook it up\n</tool_call>"),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "a", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>'),
        ("qwen3_coder", "<tool_call>\n<function=a>\n<parameter=b>\n1\n</tool_call>"),
        ("llama3", '{"name": "a", "parameters": {"b": '),
        ("mistral", '[TOOL_CALLS][{"name": "a"'),
        ("deepseek", "<\uff5ctool\u2581call\u2581begin\uff5c>function<\uff5ctool\u2581sep\uff5c>a"),
    ],
)
def test_a_call_that_cannot_be_read_is_told(form: str, text: str) -> None:
    with pytest.raises(BadCallError):
        parser_of(form)(text, [text])


@pytest.mark.parametrize("form", [*TOOL_PARSERS, None])
def test_other_texts_are_no_calls(form: str | None) -> None:
    for text in ("", "The answer is 4.", '{"value": 3}', "<think>call a tool</think>{ok}", "a <b> [c]"):
        assert parser_of(form)(text, [text]) == (text, [])


_CALL = "<\uff5ctool\u2581call\u2581{}\uff5c>"
_BEGIN, _END, _SEPARATOR = _CALL.format("begin"), _CALL.format("end"), "<\uff5ctool\u2581sep\uff5c>"


@pytest.mark.parametrize(
    ("form", "begin", "repeated", "end"),
    [
        ("gpt-oss", "to=functions.", "a", ""),
        ("gpt-oss", "", "to=functions.a ", ""),
        ("gpt-oss", "", "to=functions.a<|channel|>commentary ", ""),
        ("gpt-oss", "to=functions.a <|channel|>", "a", "<|call|>"),
        ("deepseek", f"{_BEGIN}function{_SEPARATOR}a\n```json\n", "\n", f"\n```{_END}"),
        ("deepseek", f"{_BEGIN}function{_SEPARATOR}a\n```json\n{{}}\n```", " \n", f"a{_END}"),
        ("qwen3_coder", "<tool_call>", "<function=", "</tool_call>"),
        ("qwen3_coder", "<tool_call><function=a>", "<parameter=", "</function></tool_call>"),
    ],
)
def test_the_time_to_read_calls_grows_as_their_length(form: str, begin: str, repeated: str, end: str) -> None:
    """A text of 200,000 characters takes milliseconds, and took minutes when time grew as the square."""
    text = begin + repeated * (200_000 // len(repeated)) + end
    with time_limit(20.0), contextlib.suppress(BadCallError):
        parser_of(form)(text, [text])


@pytest.mark.parametrize(
    ("said", "content", "called"),
    [
        (
            "I use to=functions.a <|end|>to=functions.b<|message|>{}<|call|>",
            "I use to=functions.a <|end|>",
            ["b"],
        ),
        ("to=functions. to=functions.a<|message|>{}", "to=functions.", ["a"]),
        ("to=functions.a to=functions.b<|message|>{}<|call|> to=functions.c<|message|>{}", "", ["a", "c"]),
        (
            "to=functions.a<|channel|>x to=functions.b<|channel|>y<|message|>{}",
            "to=functions.a<|channel|>x",
            ["b"],
        ),
    ],
)
def test_the_first_recipient_before_a_message_is_called(said: str, content: str, called: list[str]) -> None:
    found, calls = parser_of("gpt-oss")("", [said])
    assert (found, [call["function"]["name"] for call in calls]) == (content, called)


def test_values_without_quotes_are_texts_where_the_tool_takes_texts() -> None:
    parameters = {
        "zip_code": {"anyOf": [{"type": ["string", "null"]}, {"type": "integer"}]},
        "days": {"type": "integer"},
        "any": True,
    }
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"properties": parameters}}}
    written = "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("zip_code", "012"), ("days", "3"), ("other", "[1]"))
    )
    text = f"<tool_call>\n<function=weather>\n{written}</function>\n</tool_call>"
    [call] = parser_of("qwen3_coder", [tool])(text, [text])[1]
    assert call["function"]["arguments"] == {"zip_code": "012", "days": 3, "other": [1]}


def test_what_a_tool_returns_is_awaited() -> None:
    async def weather(city: str) -> str:
        return f"warm in {city}"

    assert Toolbox([Tool("weather", {}, lambda: weather)]).call("weather", {"city": "Rome"}) == "warm in Rome"


def test_several_calls_are_read_in_order() -> None:
    one = '<tool_call>\n{"name": "a", "arguments": {"n": %d}}\n</tool_call>'
    content, calls = parser_of("hermes")(f"First.\n{one % 1}\n{one % 2}", [])
    assert content == "First." and [each["function"]["arguments"]["n"] for each in calls] == [1, 2]
    assert len({each["id"] for each in calls}) == 2


@given(
    st.recursive(
        st.integers(-50, 50) | st.floats(-9, 9).map(lambda x: round(x, 3)),
        lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner),
    )
)
def test_the_calculator_agrees_with_python(tree: Any) -> None:
    def text(node: Any) -> str:
        return f"({text(node[0])} {node[1]} {text(node[2])})" if isinstance(node, tuple) else str(node)

    try:
        expected = eval(text(tree))
    except ArithmeticError:
        with pytest.raises(ArithmeticError):
            calculate(text(tree))
        return
    if abs(expected) < 1e300:
        assert float(calculate(text(tree))) == float(expected)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("2+3*4", "14"),
        ("7/2", "3.5"),
        ("6/2", "3"),
        ("2**10", "1024"),
        ("-(3)", "-3"),
        (" 10 // 3 % 2 ", "1"),
    ],
)
def test_the_calculator_writes_numbers_plainly(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    "expression",
    [
        "",
        "1+",
        "a",
        "__import__('os')",
        "9**9**9",
        "9**99999",
        "(1).real",
        "[1]",
        "'a'*3",
        "1 if 1 else 2",
        "(-1)**0.5",
        "1" * 2000,
        "True+1",
    ],
)
def test_the_calculator_refuses_all_else(expression: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        calculate(expression)


def test_the_time_to_search_does_not_grow_with_repetitions(tmp_path: Path) -> None:
    """200 repetitions of a common word took 12 s, during which no other conversation could search."""
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"word{row} the a b c " * 20}) for row in range(1000)))
    index = DocumentIndex(str(path), "env.tools.search.documents")
    with time_limit(20.0):
        assert index.search("the The " * 500 + "word7", 1).startswith("[1] word7 the")


def test_search_finds_what_fits_best(tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    rows = [
        {"title": "Rome", "text": "Rome is the capital of Italy."},
        {"text": "Paris lies on the Seine."},
        {"contents": "Italy has lakes."},
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    index = DocumentIndex(str(path), "env.tools.search.documents")
    assert index.search("capital of Italy?").startswith(
        "[1] Rome\nRome is the capital of Italy.\n\n[2] Italy has lakes."
    )
    assert index.search('SEINE" OR NOT (*', count=1) == "[1] Paris lies on the Seine."
    assert index.search("Tokyo") == "nothing was found"
    with pytest.raises(ValueError, match="no words"):
        index.search("?!")
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda: found.append(index.search("capital", count=1))) for _ in range(8)
    ]
    [thread.start() for thread in threads], [thread.join() for thread in threads]  # type: ignore[func-returns-value]
    assert found == ["[1] Rome\nRome is the capital of Italy."] * 8
    path.write_text('{"title": "no text"}\n')
    with pytest.raises(ConfigError, match=r"env\.tools\.search\.documents.*line 1 is no object with a text"):
        DocumentIndex(str(path), "env.tools.search.documents")
    with pytest.raises(ConfigError, match="No such file"):
        DocumentIndex(str(tmp_path / "none"), "env.tools.search.documents")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a \\ud800"}', r"line 2 has \\ud800, which is half of a surrogate pair"),
        ('{"text": ', "line 2 is no JSON: Expecting value"),
        ('{"context": {"title": ["a"], "sentences": [3]}}', "line 2 has a context that is no list of titles"),
        ('{"context": {"title": 3, "sentences": []}}', "line 2 has a context that is no list of titles"),
        (
            '{"context": {"title": [], "sentences": [["x"]]}}',
            "line 2 has a context that is no list of titles",
        ),
    ],
)
def test_documents_that_cannot_be_read_are_named_by_their_line(
    line: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_text(f'{{"text": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        DocumentIndex(str(path), "env.tools.search.documents")
    path.write_text("\n")
    with pytest.raises(ConfigError, match="it has no documents"):
        DocumentIndex(str(path), "env.tools.search.documents")


def test_the_paragraphs_of_a_named_set_are_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rows in its published form, from a file or by its name; each paragraph once."""
    rows = [json.loads(line) for line in HOTPOT.read_text().splitlines()]
    monkeypatch.setattr(
        "megarl.data.rows.rows_of", lambda source: iter((source["name"], row) for row in rows)
    )
    for place in (str(HOTPOT), "HotpotQA"):
        index = DocumentIndex(place, "env.tools.search.documents")
        assert (
            index.search("Where does the ferry Alma leave from", 1)
            == "[1] Alma (ferry)\nThe Alma is a ferry. She leaves from the harbour of Vik."
        )
        assert index.search("harbour in Norway", 9).count("Vik is a harbour in Norway.") == 1
    monkeypatch.setattr("megarl.data.rows.rows_of", lambda source: iter([("row 0", {"context": "none"})]))
    with pytest.raises(ConfigError, match="row 0 is no object with a text"):
        DocumentIndex("HotpotQA", "env.tools.search.documents")


def hotpot_features() -> list[dict[str, Any]]:
    """Columns as the card of the set on the hub describes them."""
    texts: list[dict[str, Any]] = [
        {"name": name, "dtype": "string"} for name in ("id", "question", "answer", "type", "level")
    ]
    facts, context = ([{"name": "title", "dtype": "string"}] for _ in range(2))
    return [
        *texts,
        {"name": "supporting_facts", "sequence": [*facts, {"name": "sent_id", "dtype": "int32"}]},
        {"name": "context", "sequence": [*context, {"name": "sentences", "sequence": "string"}]},
    ]


@pytest.mark.parametrize("described", [True, False])
def test_the_published_set_gives_questions_and_documents(
    described: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the layout of the hub: a card, and parquet files of both subsets. Of a fullwiki row the paragraphs
    are others than the answer takes, so that the recipe reads the distractor rows."""
    monkeypatch.chdir(tmp_path)
    rows = [json.loads(line) for line in HOTPOT.read_text().splitlines()]
    elsewhere = {"title": ["Elsewhere"], "sentences": [["Found by a search."]]}
    published = {"distractor": rows, "fullwiki": [row | {"context": elsewhere} for row in rows]}
    card: dict[str, Any] = {"configs": [], "dataset_info": []}
    for subset, rows_of_subset in published.items():
        path = tmp_path / "hotpotqa" / "hotpot_qa" / subset / "train-00000-of-00001.parquet"
        path.parent.mkdir(parents=True)
        parquet.write_table(pyarrow.Table.from_pylist(rows_of_subset), path)
        files = [{"split": "train", "path": f"{subset}/train-*"}]
        card["configs"].append({"config_name": subset, "data_files": files})
        if described:
            card["dataset_info"].append({"config_name": subset, "features": hotpot_features()})
    (path.parents[1] / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n")

    config = load_config(find("grpo-tools-search-qwen2.5-3b-8gpu-megatron"))
    for source in (config["data"]["train"], {**config["data"]["train"], "subset": "fullwiki"}):
        records = [(record.prompt, record.answer) for record in read_records(source)]
        assert records == [(row["question"], row["answer"]) for row in rows]
    index = DocumentIndex(config["env"]["tools"]["search"]["documents"], "env.tools.search.documents")
    assert index.search("harbour in Norway", 9).count("Vik is a harbour in Norway.") == 1
    assert index.search("Sund", 9) == "[1] Sund\nSund is a strait."
    assert index.search("Found by a search", 1).count("Elsewhere") == 0


@pytest.fixture
def service() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["query"]
            status = int(asked) if asked.isdecimal() else 200
            said = {"plain": b"as it is", "object": b'{"output": "found"}', "other": b'{"n": [1]}'}.get(
                asked, b""
            )
            if asked == "torn":
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
                return
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(said)

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_a_service_answers_refuses_or_is_gone(service: str) -> None:
    assert [post(service, 5.0, query=word) for word in ("plain", "object", "other")] == [
        "as it is",
        "found",
        '{"n": [1]}',
    ]
    with pytest.raises(ValueError, match="status 400"):
        post(service, 5.0, query="400")
    for status in ("429", "503"):
        with pytest.raises(EnvironmentLostError, match=status):
            post(service, 5.0, query=status)
    with pytest.raises(EnvironmentLostError, match="redirects to /elsewhere"):
        post(service, 5.0, query="302")
    with pytest.raises(EnvironmentLostError, match="does not answer"):
        post(service, 5.0, query="torn")
    with pytest.raises(EnvironmentLostError, match="does not answer"):
        post("http://127.0.0.1:9", 1.0, query="plain")


needs_sandbox = pytest.mark.skipif(isolation()[0] is not None, reason="no namespaces")


def python_tool(**section: Any) -> Any:
    [tool] = tools_of({"tools": {"python": section}})
    return tool.begin()


@needs_sandbox
def test_python_keeps_its_variables_and_says_what_went_wrong() -> None:
    python = python_tool(timeout_s=2.0)
    try:
        assert python("x = 3\nprint('hi')\nx * 2") == "hi\n6\n"
        assert python("def twice(n): return 2 * n\n") == "" and python("twice(x)") == "6\n"
        assert python("1/0") == "ZeroDivisionError: division by zero\n" and "SyntaxError" in python("if:")
        assert "FileNotFoundError" in python("open('/etc/passwd')") and "unreachable" in python(
            "import socket; socket.create_connection(('192.0.2.1', 80), 1)"
        )
        with pytest.raises(
            ValueError, match=r"more than 2 s; the interpreter was ended, and its variables are gone"
        ):
            python("while True: pass")
        assert python("x") == "NameError: name 'x' is not defined\n"
        with pytest.raises(ValueError, match="ended the interpreter"):
            python("import os; os._exit(0)")
        assert python("1") == "1\n"
        # names of its own do not stand in for what the interpreter itself calls
        for own in (
            "def eval(x): return 5",
            "def print(*_): pass",
            "compile = globals = repr = isinstance = 0",
        ):
            assert python(own) == "" and python("1 + 1") == "2\n"
        assert python("BaseException = int") == "" and "ZeroDivisionError" in python("1/0")
    finally:
        python.close()


def test_a_function_of_ones_own_says_what_it_takes(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        'def weather(city: str, days: int = 1):\n    """\n    Look a temperature up.\n\n'
        '    Args:\n        city: where.\n        days: ahead.\n    """\n'
        "    return {'city': city, 'days': days}\n"
        "def unsaid(city): return city\n"
    )
    [tool] = tools_of({"tools": {"weather": {"tool": f"{path}:weather"}}})
    described = tool.schema["function"]
    assert described["description"] == "Look a temperature up." and described["parameters"]["required"] == [
        "city"
    ]
    box = Toolbox([tool])
    assert box.call("weather", {"city": "Rome"}) == '{"city": "Rome", "days": 1}'
    assert box.fault_of("weather", {"town": "Rome"}) == "weather takes city, days, not town"
    assert box.fault_of("clock", {}) == "there is no tool 'clock'; the tools are weather"
    with pytest.raises(
        ConfigError, match=r"env\.tools\.a\.tool .*its docstring does not say what the tool takes"
    ):
        tools_of({"tools": {"a": {"tool": f"{path}:unsaid"}}})


def section(**changes: Any) -> dict[str, Any]:
    own = {
        "environment": "tools",
        "reward": "exact_match",
        "tool_parser": "hermes",
        "tools": {"calculator": {}},
        "processes": 1,
    }
    return {**defaults_of(EnvConfig), **own, **changes}


def called(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def conversed(
    said: list[str], turns: int = 4, limit: int | None = None, **changes: Any
) -> tuple[Any, list[str], Any]:
    """The samples of one conversation in which the policy says this, what it was shown, and the figures."""
    environment = make_environment(section(**changes))
    tokenizer = tokenizer_of("qwen2.5")

    def script(prompt: list[int], seed: int) -> list[int]:
        text = tokenizer.decode(prompt)
        return [
            *tokenizer(said[text.count("<|im_start|>assistant") - 1], add_special_tokens=False)["input_ids"],
            tokenizer.eos_token_id,
        ]

    collector, engine, _ = collector_of(environment, script, turns=turns, tokens=limit)
    ids = tokenizer("<|im_start|>user\n6*7?<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    try:
        rollouts = collector.collect([Example(0, tuple(ids), (), "42")], 1, [5])
    finally:
        environment.close()
    return rollouts.samples, [tokenizer.decode(prompt) for [prompt] in engine.calls], rollouts.metrics


def test_the_policy_calls_a_tool_and_is_judged_by_its_answer() -> None:
    samples, shown, metrics = conversed([called("calculator", expression="6*7"), "42"])
    answer = "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert shown[1].endswith(f"</tool_call><|im_end|>\n{answer}") and len(shown) == 2
    assert (
        samples["reward"].tolist() == [1.0]
        and samples["turns"].tolist() == [2]
        and samples["ended"] == ["done"]
    )
    assert metrics["tool_calls"] == 1 and metrics["reward_errors"] == 0


def test_what_is_wrong_with_a_call_is_told_or_ends_it() -> None:
    wrong = [
        called("calculator", expression="6*"),
        called("abacus", beads=3),
        "<tool_call>\n{\n</tool_call>",
        "42",
    ]
    samples, shown, metrics = conversed(wrong)
    assert "Error: '6*' is no arithmetic expression" in shown[1] and "there is no tool 'abacus'" in shown[2]
    assert "The tool call could not be read: no JSON" in shown[3]
    assert (
        samples["reward"].tolist() == [1.0] and metrics["tool_errors"] == 1 and metrics["bad_tool_calls"] == 2
    )
    for said, key in ((wrong[0], "on_tool_error"), (wrong[1], "on_bad_call"), (wrong[2], "on_bad_call")):
        samples, shown, metrics = conversed([said, "42"], **{key: "end"})
        assert (
            len(shown) == 1
            and samples["ended"] == ["error"]
            and samples["reward"].tolist() == [0.0]
            and not samples["masked"].any()
        )


def test_half_a_character_in_a_call_ends_no_run() -> None:
    """The policy may write it in the JSON of a call, in a name that it is told of."""
    call = '<tool_call>\n{"name": "calculator", "arguments": {"\\ud800": 1}}\n</tool_call>'
    samples, shown, metrics = conversed([call, "42"])
    assert "calculator takes expression, not \ufffd\n" in shown[1] and samples["reward"].tolist() == [1.0]
    assert metrics["bad_tool_calls"] == 1


def test_an_environment_with_tools_of_its_own_makes_the_calls_itself() -> None:
    """As configs/README.md has it."""
    toy = Path(__file__).parents[1] / "toys" / "two_tools.py"
    both = called("product", left=6, right=7) + "\n" + called("length", text="four")
    said = [both, called("product", left=6), called("abacus"), "42"]
    samples, shown, metrics = conversed(said, environment=f"{toy}:TwoTools", tools={}, turns=5)
    assert "<tool_response>\n42\n</tool_response>\n<tool_response>\n4\n</tool_response>" in shown[1]
    assert (
        "missing 1 required positional argument: 'right'" in shown[2]
        and "Error: KeyError: 'abacus'" in shown[3]
    )
    assert (
        samples["turn_rewards"] == [[0.1, 0.0, 0.0, 1.0]]
        and samples["ended"] == ["done"]
        and samples["accuracy"].tolist() == [1.0]
    )
    assert metrics["calls"] == 2 and metrics["tool_errors"] == 2


def test_what_an_environment_of_ones_own_does_not_read_is_told(caplog: pytest.LogCaptureFixture) -> None:
    toy = Path(__file__).parents[1] / "toys" / "two_tools.py"
    own = {"environment": f"{toy}:TwoTools", "reward": "math", "tool_parser": None}
    make_environment({**defaults_of(EnvConfig), **own}).close()  # type: ignore[typeddict-item]
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        f"env.reward is not read, since the steps of {toy}:TwoTools return the rewards. Fix: set it to null",
        f"env.tool_parser is null: calls of the tools of {toy}:TwoTools are not parsed",
    ]
    caplog.clear()
    own |= {"reward": None, "tool_parser": "hermes"}
    make_environment({**defaults_of(EnvConfig), **own}).close()  # type: ignore[typeddict-item]
    assert not caplog.records
    assert [shows_tools(tokenizer_of(name)) for name in ("qwen2.5", "gemma2")] == [True, False]


@pytest.mark.parametrize("on_bad_call", ["observe", "end"])
def test_a_call_that_the_length_limit_cuts_is_not_made(on_bad_call: str) -> None:
    """Behind the first turn the limit of the conversation is met in the middle of a call, in front of its
    last mark."""
    whole = called("calculator", expression="6*7")
    samples, shown, metrics = conversed([whole, whole, "42"], on_bad_call=on_bad_call)
    assert len(shown) == 3 and metrics["tool_calls"] == 2
    tokenizer = tokenizer_of("qwen2.5")
    size = len(tokenizer(whole, add_special_tokens=False)["input_ids"])
    behind_prompt = int(samples["input_lengths"][0] - samples["prompt_lengths"][0])
    answer = len(tokenizer(shown[2][len(shown[1]) :], add_special_tokens=False)["input_ids"]) - size - 1
    cut, shown, metrics = conversed(
        [whole, whole, "42"], on_bad_call=on_bad_call, limit=2 * (size + 1) + answer - 3
    )
    assert (
        behind_prompt > 2 * size
        and len(shown) == 2
        and metrics["tool_calls"] == 1
        and metrics["bad_tool_calls"] == 1
    )
    assert cut["truncated"].tolist() == [True] and cut["reward"].tolist() == [0.0] and not cut["masked"].any()
    assert cut["ended"] == (["tokens"] if on_bad_call == "observe" else ["error"])
    kept = cut["input_ids"][0, : cut["input_lengths"][0]].tolist()
    assert kept == samples["input_ids"][0, : len(kept)].tolist(), (
        "what was sampled of it is trained on as it is"
    )


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ("look_up", "its tools are str, not a list"),
        ([{"type": "function"}], r"tools\[0\] = .* names no function"),
        (["look_up"], r"tools\[0\] = 'look_up' names no function"),
        (
            [{"function": {"name": "a", "parameters": []}}],
            "the parameters of its tool 'a' are not a JSON schema",
        ),
        (
            [{"function": {"name": "a", "parameters": {"properties": ["b"]}}}],
            "the parameters of its tool 'a' are not a JSON schema",
        ),
        ([{"function": {"name": "a"}}] * 2, "two of its tools are called 'a'"),
    ],
)
def test_tools_of_ones_own_with_a_wrong_schema_are_refused(tools: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        f"from megarl.rollout.message_env import MessageEnv\nclass Own(MessageEnv):\n    tools = {tools!r}\n"
        "    def step(self, message):\n        pass\n"
    )
    with pytest.raises(ConfigError, match=message):
        make_environment(section(environment=f"{path}:Own", tools={}))


def test_arguments_of_a_wrong_kind_are_told(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        'def half(number: int) -> float:\n    """Halve.\n\n    Args:\n        number: a number.\n    """\n  '
        "  return number / 2\n"
    )
    calls = [called("half", number="three"), called("half", numbers=3), called("half", number=84), "42"]
    samples, shown, metrics = conversed(calls, tools={"half": {"tool": f"{path}:half"}}, turns=5)
    assert (
        "Error: unsupported operand type" in shown[1]
        and "half takes number, not numbers" in shown[2]
        and "42.0" in shown[3]
    )
    assert samples["reward"].tolist() == [1.0] and metrics["tool_errors"] == metrics["bad_tool_calls"] == 1


def test_calls_are_bounded_and_the_last_turn_is_judged() -> None:
    both = called("calculator", expression="1") + "\n" + called("calculator", expression="2")
    samples, shown, _ = conversed([both, both, "42"], max_tool_calls=3)
    assert (
        samples["ended"] == ["tools"]
        and samples["turns"].tolist() == [2]
        and "1\n</tool_response>\n<tool_response>\n2" in shown[1]
    )
    samples, *_ = conversed([both, both, "42"], turns=2)
    assert samples["ended"] == ["turns"] and samples["reward"].tolist() == [0.0]


def test_a_service_that_is_gone_masks_the_conversation() -> None:
    gone = {"http": {"url": "http://127.0.0.1:9", "timeout_s": 1.0}}
    samples, *_ = conversed([called("http", query="x"), "42"], tools=gone)
    assert samples["ended"] == ["lost"] and samples["masked"].tolist() == [True]


@needs_sandbox
def test_conversations_have_interpreters_of_their_own() -> None:
    say = [called("python", code="x = 40"), called("python", code="x + 2"), "42"]
    samples, shown, _ = conversed(say, tools={"python": {}})
    assert "<tool_response>\n42\n\n</tool_response>" in shown[2] and samples["reward"].tolist() == [1.0]


def test_what_the_template_is_told() -> None:
    environment = make_environment(section())
    assert [each["function"]["name"] for each in tools_told(environment)[None]] == ["calculator"]
    environment.close()
    named = make_environment(
        {**defaults_of(EnvConfig), "a": section(), "b": section(environment="single_turn", tools={})}
    )
    assert set(tools_told(named)) == {"a"}
    named.close()
    only = make_environment({**defaults_of(EnvConfig), "a": section()})
    assert set(tools_told(only)) == {"a", None}
    only.close()
    assert tools_told(None) == {}


@needs_sandbox
@pytest.mark.parametrize("in_a_call", [False, True])
def test_an_interpreter_whose_host_is_killed_is_no_fault_of_the_code(in_a_call: bool) -> None:
    """Nor does it take the conversation for one that scores 0; code that ends its interpreter is told so."""
    [tool] = tools_of({"tools": {"python": {"timeout_s": 20.0}}})
    python: Any = tool.begin()
    with pytest.raises(ValueError, match="the code ended the interpreter"):
        python("import os\nos._exit(3)")
    assert python("1").strip() == "1"
    killer = threading.Timer(1.0 if in_a_call else 0.0, python._process.kill)
    killer.start()
    if not in_a_call:
        python._process.wait(20)
    with pytest.raises(EnvironmentLostError, match="the host of the interpreter was killed"):
        python("import time\ntime.sleep(15)")
    assert python("2").strip() == "2"
    python.close()


@needs_sandbox
def test_an_interpreter_ends_with_a_driver_that_was_killed(tmp_path: Path) -> None:
    """Also in the middle of code that never ends."""
    program = (
        "import sys, threading, time\n"
        "from megarl.rollout.tools.tool import tools_of\n"
        "[tool] = tools_of({'tools': {'python': {'timeout_s': 600.0}}})\n"
        "python = tool.begin()\n"
        "python('1')\n"
        "threading.Thread(target=lambda: python('while True: pass'), daemon=True).start()\n"
        "time.sleep(1)\n"
        "print(python._process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    driver = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    session = psutil.Process(int(driver.stdout.readline()))
    below = [session, *session.children(recursive=True)]
    assert len(below) > 1
    driver.kill()
    driver.wait()
    driver.stdout.close()
    _, alive = psutil.wait_procs(below, timeout=20)
    assert not alive
