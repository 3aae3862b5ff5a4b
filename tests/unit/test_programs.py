"""Programs of a model in processes of their own: tests of every form, limits, and what they cannot reach."""

from __future__ import annotations

import base64
import json
import os
import pickle
import shutil
import site
import socket
import tracemalloc
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.records import Doubt
from megarl.errors import ConfigError, RewardError
from megarl.rollout import programs
from megarl.rollout.programs import (
    Limits,
    conversation,
    fault_of_tests,
    forms,
    judge,
    process,
    sandbox,
    verdict,
)
from megarl.rollout.programs.conversation import INSIDE
from megarl.rollout.programs.inside import decode, encode
from megarl.rollout.programs.process import fault_of_isolation, file_of, python_command, running, text_in
from megarl.rollout.programs.statements import reason_against, reason_to_doubt
from megarl.rollout.programs.verdict import same_output, same_returned
from megarl.rollout.reward_pool import RewardPool, score_of
from megarl.rollout.rewards import RewardSpec, Task, get_reward
from megarl.rollout.single_turn import SingleTurn
from megarl.time_limit import time_limit
from tests.tables import read_table
from tests.tiers import sampled

TABLES = read_table("programs_tests.yaml")

PLAIN = Limits(seconds=20.0, isolated=False)
ISOLATED = Limits(seconds=20.0)
BUBBLEWRAP = shutil.which("bwrap") or ""
needs_bubblewrap = pytest.mark.skipif(
    not BUBBLEWRAP or bool(fault_of_isolation(BUBBLEWRAP)), reason="bubblewrap is not here, or may not"
)
needs_namespaces = pytest.mark.skipif(
    fault_of_isolation() is not None, reason=f"no namespaces here: {fault_of_isolation()}"
)


def fenced(code: str, before: str = "") -> str:
    """A response with a program."""
    return f"{before}So:\n```python\n{code}\n```\nThat is it."


def result_of(code: str, limits: Limits) -> str:
    """What a program writes; empty where it does not end well."""
    task = json.dumps(
        {
            "code": code,
            "packages": site.getsitepackages(),
            "function": "",
            "given_names": [],
            "given_modules": [],
        }
    )
    with file_of(task) as source, file_of() as nothing, file_of() as written:
        command = python_command(INSIDE, str(source.fileno()), "-1", "-1")
        with running(command, limits, nothing, written, (source.fileno(),)) as started:
            code_of_end = started.wait()
        return text_in(written) if code_of_end == 0 else ""


ADDS = "a, b = map(int, input().split())\nprint(a + b)"
SUM = "def add(a, b):\n    return a + b"
SOLUTION = "class Solution:\n    def add(self, a, b):\n        return a + b"
TEXT = json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]})
CALLS = json.dumps({"fn_name": "add", "inputs": [[1, 2], ["a", "b"]], "outputs": [3, ["ab"]]})
LINES = json.dumps(
    [
        {"input": "1\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "add"}},
        {"input": "[1]\n[2, 3]", "output": "[1, 2, 3]", "testtype": "functional", "fn_name": "add"},
    ]
)
STATEMENTS = json.dumps(["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"])


FILE = """
import pytest
from math import floor
from solution import add, add as plus

base = [1, 2]

def test_numbers():
    for number in base:
        assert add(number, floor(2.5)) == number + 2

def test_texts():
    assert plus("a", "b") == "ab"

def test_refused():
    with pytest.raises((TypeError, ValueError)):
        add("a", 1)
"""


@sampled(6)
@pytest.mark.parametrize(
    ("code", "tests", "score", "share"),
    [
        (ADDS, TEXT, 1, 1),
        (ADDS.replace("a + b", "3"), TEXT, 0, 0.5),
        ("print(3)\nraise SystemExit(1)", TEXT, 0, 0),
        ("syntax error", TEXT, 0, 0),
        (
            f"import sys\nif __name__ == '__main__':\n    {ADDS.replace(chr(10), chr(10) + '    ')}",
            TEXT,
            1,
            1,
        ),
        (SUM, CALLS, 1, 1),
        (SOLUTION, CALLS, 1, 1),
        (SUM, LINES, 1, 1),
        (SUM + "\nif __name__ == '__main__':\n    input()", CALLS, 1, 1),
        (SUM.replace("a + b", "3"), CALLS, 0, 0.5),
        ("def add(a, b):\n    return {a}", CALLS, 0, 0),
        ("add = 3", CALLS, 0, 0),
        ("def other(): ...", CALLS, 0, 0),
        (SUM, STATEMENTS, 1, 1),
        (SUM.replace("a + b", "3"), STATEMENTS, 0, 0.5),
        (SUM, FILE, 1, 1),
        (SUM.replace("a + b", "f'{a}{b}'"), FILE, 0, 1 / 3),
        ("def add(a, b):\n    raise TypeError", FILE, 0, 1 / 3),
        (SUM, "def check(f):\n    assert f(1, 2) == 3\n\ncheck(add)\n", 1, 1),
        # a program that ends before the statement has not passed it
        (SUM + "\nraise SystemExit(0)", STATEMENTS, 0, 0),
        (SUM + "\nimport os\nos._exit(0)", STATEMENTS, 0, 0),
    ],
)
def test_tests_of_every_form(code: str, tests: str, score: float, share: float) -> None:
    assert fault_of_tests(tests) is None
    assert judge(fenced(code), tests, PLAIN) == score
    assert judge(fenced(code), tests, PLAIN, partial=True) == share


@pytest.mark.parametrize(("file", "fault"), TABLES["files of tests"])
def test_files_of_tests_are_understood_or_refused(file: str, fault: str | None) -> None:
    """By pytest's meaning: what never runs would let every program pass."""
    found = fault_of_tests(file)
    if fault is not None:
        assert fault in str(found)
        return
    assert found is None or isinstance(found, Doubt)
    # a function of the program's own with the name of one of a test's
    right = SUM + "\ndef helper(x):\n    return x"
    wrong = "def add(a, b):\n    return -1"
    assert [judge(fenced(code), file, PLAIN) for code in (right, wrong)] == [1, 0]


def test_a_file_of_tests_that_is_nested_too_deeply_is_refused() -> None:
    file = f"def test_a():\n    assert {' + '.join(['add(0, 0)'] * 1500)} == 0"
    assert "nested too deeply" in str(fault_of_tests(file))


LEETCODE = """
class Solution:
    def run(self, numbers: List[int], most: Optional[int] = None) -> Dict[str, int]:
        @cache
        def total(place: int) -> int:
            return 0 if place == len(numbers) else numbers[place] + total(place + 1)

        counts, heap, queue = Counter(numbers), list(numbers), deque(numbers)
        heapify(heap)
        groups = defaultdict(list)
        for number in accumulate(numbers):
            groups[number % 2].append(number)
        left = bisect_left(sorted(numbers), 2) + bisect.bisect_right(sorted(numbers), 2)
        found = reduce(gcd, numbers), sqrt(16), inf, itemgetter(0)(queue)
        found += collections.OrderedDict(), math.pi, re.sub("a", "b", "a")
        most = max(counts.values())
        sums = {"total": total(0), "least": heappop(heap), "left": left, "power": pow(2, 5, 5)}
        return {**sums, "most": most, "found": len(found)}
"""


@pytest.mark.parametrize("form", ["calls", "statements"])
def test_a_method_of_solution_finds_what_its_site_imports(form: str) -> None:
    """pow stays Python's own, of three arguments, and bisect is the module where the program takes something
    of it."""
    expected = {"total": 8, "least": 1, "left": 4, "power": 2, "most": 2, "found": 7}
    statements = [f"assert Solution().run([2, 1, 3, 2]) == {expected}"]
    calls = {"fn_name": "run", "inputs": [[[2, 1, 3, 2]]], "outputs": [expected]}
    assert judge(fenced(LEETCODE), json.dumps(calls if form == "calls" else statements), PLAIN) == 1.0
    other = "def add(a: List[int], b) -> int:\n    return a + bisect([1, 2, 3], b)"
    assert (
        judge(fenced(other), json.dumps({"fn_name": "add", "inputs": [[1, 2]], "outputs": [3]}), PLAIN) == 1.0
    )


@sampled(2)
@pytest.mark.parametrize(
    ("code", "score"),
    [
        ("def other(): ...", 0.0),
        ("class Solution:\n    def other(self): ...", 0.0),
        ("from math import gcd", 1.0),
        ("class Solution:\n    def gcd(self, a, b):\n        return gcd(a, b)", 1.0),
        ("class Solution:\n    def gcd(self, a, b):\n        return 2", 0.0),
        ("def gcd(a, b):\n    return a if b == 0 else gcd(b, a % b)", 1.0),
    ],
)
def test_what_a_program_is_given_does_not_answer_for_it(code: str, score: float) -> None:
    """The function that is asked for may have the name of one that is imported."""
    assert (
        judge(fenced(code), json.dumps({"fn_name": "gcd", "inputs": [[12, 18]], "outputs": [6]}), PLAIN)
        == score
    )


def test_a_whole_program_imports_what_it_needs() -> None:
    assert judge(fenced("print(gcd(4, 6))"), json.dumps({"inputs": [""], "outputs": ["2"]}), PLAIN) == 0.0
    assert (
        judge(fenced("def add(a, b):\n    return gcd(a, b)"), json.dumps(["assert add(4, 6) == 2"]), PLAIN)
        == 0.0
    )


def test_the_last_block_that_ends_is_the_program() -> None:
    good, bad = f"```python\n{ADDS}\n```\n", "```python\nprint(0)\n```\n"
    assert judge(bad + "no:\n" + good, TEXT, PLAIN) == 1.0
    assert judge(good + bad, TEXT, PLAIN) == 0.0
    assert judge(good.replace("```python", "```"), TEXT, PLAIN) == 1.0
    assert judge(good.replace("python", "Python3"), TEXT, PLAIN) == 1.0
    assert judge(f"```python\n{ADDS}", TEXT, PLAIN) == 0.0
    assert judge(good + "```text\n7\n```\n", TEXT, PLAIN) == 1.0
    assert judge("```text\n7\n```\nprose\n" + good, TEXT, PLAIN) == 1.0
    assert judge("```text\nnever ended\n" + good, TEXT, PLAIN) == 1.0
    assert judge(ADDS, TEXT, PLAIN) == judge("", TEXT, PLAIN) == 0.0


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\na\n```\nFor 1 2 it prints\n```\n3\n```", "a"),
        ("```\ninput\n```\n```py\na\n```\n```\noutput\n```\nIt runs by\n```bash\npython a.py\n```", "a"),
        ("```python\na\n```\n```python\nb\n```\n```\nc\n```", "b"),
        ("```\na\n```\n```\nb\n```", "b"),
        ("```\na\n```\n```json\nb\n```", "a"),
        ("```python3.11\na\n```\n```\nb\n```", "a"),
        ('```python title="a.py"\na\n```\n```\nb\n```', "a"),
        ("```{.python}\na\n```\n```\nb\n```", "a"),
        ("```python:a.py\na\n```\n```\nb\n```", "a"),
        ("```pycon\n>>> a\n```\n```\nb\n```", "b"),
        ("```cython\na\n```", None),
        ("```python\na", None),
    ],
)
def test_the_last_block_that_is_marked_as_python_is_the_program(response: str, program: str | None) -> None:
    found = forms.program_in(response)
    assert (found if found is None else found.strip()) == program


@pytest.mark.parametrize("repeated", ["a", " "])
def test_the_time_to_find_a_program_grows_as_the_response(repeated: str) -> None:
    with time_limit(20.0):
        assert forms.program_in("```" + repeated * 200_000 + "```") is None


@pytest.mark.parametrize("given", ["", "3", "x = 3\n4", "n = m", "y = x + 1, z = 2", "f(a = 3)", "a=1, 2"])
def test_inputs_that_are_no_arguments_by_name_are_read(given: str) -> None:
    assert fault_of_tests(json.dumps([{"input": given, "output": "1"}])) is None


@pytest.mark.parametrize(
    ("tests", "fault"),
    TABLES["references that hold no tests are found"],
)
def test_references_that_hold_no_tests_are_found(tests: str, fault: str) -> None:
    assert fault in str(fault_of_tests(tests))


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    TABLES["outputs are compared by words and numbers"],
)
def test_outputs_are_compared_by_words_and_numbers(written: str, expected: str, same: bool) -> None:
    assert same_output(written, expected) is same


@pytest.mark.parametrize(
    ("value", "expected", "same"),
    [
        (1, 1, True),
        (True, 1, False),
        (1, True, False),
        (True, 1.0, False),
        (False, 0, False),
        (None, 0, False),
        (None, None, True),
        (0, None, False),
        (0.1 + 0.2, 0.3, True),
        (0.300002, 0.3, False),
        (3.0, 3, True),
        (3.0000001, 3, False),
        (3, 3.0, True),
        (10**17 + 1, 10**17, False),
        (10**400, 1.0, False),
        (float("nan"), 1.0, False),
        (float("inf"), 1.0, False),
        (float("nan"), float("nan"), True),
        ((1, (2,)), [1, [2]], True),
        ([[0.1 + 0.2], {"a": (1.0000000001,)}], [[0.3], {"a": [1.0]}], True),
        ([1, True], [1, 1], False),
        ([1], [1, 2], False),
        ({True: 4}, {"1": 4}, False),
        ({True: 4}, {"true": 4}, True),
        (10**400, float("inf"), False),
        ({1: "a", None: 3, 2.5: 1}, {"1": "a", "null": 3, "2.5": 1}, True),
        ({1: 2, "1": 2}, {"1": 2}, False),
        ({1, 2}, [1, 2], False),
        ("1", 1, False),
        (b"a", "a", False),
        (1 + 0j, 1, False),
        (5, [5], True),
        ([5], [[5]], True),
        ([], [], True),
        ("ab", ["a", "b"], False),
    ],
)
def test_returned_values_are_compared_as_json(value: object, expected: object, same: bool) -> None:
    assert same_returned(value, expected) is same


def packed(content: bytes, level: int = 6) -> str:
    """As LiveCodeBench packs private tests: base64 of zlib."""
    return base64.b64encode(zlib.compress(content, level)).decode()


PAIR = {"input": '"abc"', "output": '"cba"', "testtype": "functional"}
CALL = [forms.Test(function="f", arguments=["abc"], expected="cba")]
NAMED = json.dumps({"func_name": "f"})


@pytest.mark.parametrize(
    ("answer", "tests"),
    [
        ([{**PAIR, "metadata": NAMED}], CALL),
        ([{**PAIR, "metadata": {"func_name": "f"}}], CALL),
        (json.dumps([{**PAIR, "metadata": NAMED}]), CALL),
        (
            {
                "public_test_cases": json.dumps([PAIR]),
                "private_test_cases": json.dumps([PAIR]),
                "metadata": NAMED,
            },
            CALL * 2,
        ),
        ({"tests": [PAIR], "fn_name": "f"}, CALL),
        ({"input_output": json.dumps({"fn_name": "f", "inputs": [["abc"]], "outputs": ["cba"]})}, CALL),
        ({"fn_name": "f", "inputs": '[["abc"]]', "outputs": '["cba"]'}, CALL),
        (
            {"test_cases": [{"type": "function_call", "fn_name": "f", "input": ["abc"], "output": "cba"}]},
            CALL,
        ),
        (
            [{"input": "1", "output": "2", "testtype": "stdin", "metadata": '{"func_name": null}'}],
            [forms.Test("1", "2")],
        ),
        ([{"type": "stdin_stdout", "input": "1", "output": "2"}], [forms.Test("1", "2")]),
        ({"test_list": ["assert f(1) == 2"]}, [forms.Test(statement="assert f(1) == 2")]),
        (
            {
                "test_list": ["assert f(x)"],
                "test_setup_code": "x = 1",
                "test_imports": ["import math"],
                "challenge_test_list": [],
            },
            [forms.Test(statement="import math\nx = 1\nassert f(x)")],
        ),
        ({"test_list": '["assert f(1)"]'}, [forms.Test(statement="assert f(1)")]),
        (
            {
                "public_test_cases": [PAIR],
                "private_test_cases": packed(json.dumps([PAIR]).encode()),
                "metadata": NAMED,
            },
            CALL * 2,
        ),
        (
            {"input_output": packed(json.dumps({"inputs": ["1"], "outputs": ["2"]}).encode(), level=1)},
            [forms.Test("1", "2")],
        ),
        (packed(json.dumps([{"input": "1", "output": "2"}]).encode(), level=0), [forms.Test("1", "2")]),
    ],
)
def test_tests_in_the_forms_in_which_they_are_published(answer: object, tests: list[forms.Test]) -> None:
    assert list(forms.tests_of(json.dumps(answer))) == tests


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_of_one_text_is_read_without_unpickling(
    protocol: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LiveCodeBench publishes its private tests; short texts, long ones, and letters of all sizes have
    opcodes of their own."""
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("it was unpickled"))
    for content in ("abc", "\N{SNOWMAN}" * 400, "\\u0041\n"):
        pair = {**PAIR, "input": json.dumps(content)}
        packed_tests = packed(pickle.dumps(json.dumps([pair], ensure_ascii=False), protocol))
        for answer in (json.dumps({"private_test_cases": packed_tests, "metadata": NAMED}),):
            assert forms.tests_of(answer) == (forms.Test(function="f", arguments=[content], expected="cba"),)


def test_a_pickle_of_anything_else_is_refused(tmp_path: Path) -> None:
    """Some would leave a trace if they were read."""

    class Trace:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (trace,)

    trace, text = tmp_path / "read", json.dumps([PAIR])
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        for content in (Trace(), [text], (text, text), {text: Trace()}, 5):
            packed_tests = packed(pickle.dumps(content, protocol))
            for answer in (json.dumps({"private_test_cases": packed_tests, "metadata": NAMED}), packed_tests):
                fault = str(fault_of_tests(answer))
                assert (
                    "is packed as a pickle of more than one text" in fault
                    and "json.loads(pickle.loads(zlib.decompress(" in fault
                )
    assert not trace.exists()


def test_packed_tests_have_a_bound() -> None:
    bomb = packed(b"[" + b" " * (3 * forms.LARGEST_UNPACKED) + b"]")
    assert len(bomb) < 300_000
    tracemalloc.start()
    fault = str(fault_of_tests(json.dumps({"private_test_cases": bomb})))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "more than 67,108,864 bytes" in fault and peak < 2.5 * forms.LARGEST_UNPACKED


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("eJxrYJmayQABtVM0ejhKM5OLUotLGaYUT9EDAFwYB3I=", "cannot be unpacked"),
        (packed(json.dumps([PAIR] * 9).encode())[:-8], "but truncated"),
        (packed(b"not JSON"), "its content is not JSON"),
        ("eJ is a name", "no JSON"),
    ],
)
def test_packed_tests_that_cannot_be_read_are_named(text: str, fault: str) -> None:
    assert fault in str(fault_of_tests(json.dumps({"private_test_cases": text})))


def test_statements_that_run_in_process_leave_a_doubt() -> None:
    reward = get_reward(RewardSpec("code", {"isolation": "preferred", "isolated": False}))
    assert reward.fault_of_reference is not None
    outside, inside = "assert f(1) == 2", "import numpy as np\nassert np.allclose(f(1), 2)"
    assert reward.fault_of_reference(json.dumps([outside] * 3)) is None
    doubt = reward.fault_of_reference(json.dumps([outside, inside]))
    assert (
        isinstance(doubt, Doubt)
        and "np.allclose" in doubt.why
        and "the module numpy is not available outside the sandbox" in doubt.why
    )
    assert isinstance(reward.fault_of_reference("12"), str)


def test_a_doubt_of_one_reward_hides_no_fault_of_another() -> None:
    section = {"on_error": "mask", "on_timeout": "zero", "processes": 1, "timeout_s": 5.0, "rewards": {}}
    section["rewards"] = {
        name: {**section, "reward": name, "isolation": "preferred"} for name in ("code", "gsm8k")
    }
    environment = SingleTurn({"reward": None, **section})
    try:
        answer = json.dumps(["import numpy\nassert numpy.all(f(1))"])
        assert str(environment.fault_of_reference(answer)).startswith("gsm8k: ")
    finally:
        environment.close()


@pytest.mark.parametrize(
    ("statement", "reason"),
    TABLES["what is evaluated outside"],
)
def test_what_is_evaluated_outside(statement: str, reason: str | None) -> None:
    found = reason_against(statement)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize(
    ("statement", "doubtful"),
    [
        ("assert P(1).swap() == P(2)", True),
        ("assert f(1) in [g(1)]", True),
        ("wanted = P(2)\nagain = wanted\nassert P(1).swap() == again", True),
        ("wanted = 2\nfound = f(1)\nassert found == wanted", False),
        ("assert f(1) == 2", False),
        ("assert f(f(1)) == len('a')", False),
        ("x = 3\nassert f(x) == x", False),
        ("def check(candidate):\n    assert candidate(1) == 2\ncheck(f)", False),
    ],
)
def test_statements_that_compare_what_the_program_makes(statement: str, doubtful: bool) -> None:
    """Whether two objects of its own are equal is its word."""
    assert reason_against(statement) is None
    assert (reason_to_doubt(statement) is not None) is doubtful


@pytest.mark.parametrize(
    "statement",
    [
        "assert 10 ** 10 ** 8 > f(1)",
        "assert 1 << 10 ** 9 > f(1)",
        "assert len('a' * 10 ** 9) > f(1)",
        "assert len([0] * 10 ** 9) > f(1)",
        "assert list(range(10 ** 9)) != f(1)",
        "assert len(bytes(10 ** 9)) > f(1)",
        "assert sum(1 for _ in range(10 ** 6)) > f(1)",
        "assert 'a'.ljust(10 ** 9) != f(1)",
        "assert ('ab' * 10 ** 5).replace('a', 'b' * 10 ** 5) != f(1)",
        "assert '%1000000000d' % 3 != f(1)",
        "def check(n):\n    check(n)\ncheck(1)\nassert f(1)",
        "assert pow(9, 10 ** 8) > f(1)",
        "assert (1).to_bytes(10 ** 9) != f(1)",
        "x = 'a'\nfor _ in range(40):\n    x = x + x\nassert len(x) > f(1)",
        "x = [0]\nfor _ in range(40):\n    x += x\nassert len(x) > f(1)",
        "x = [0]\nfor _ in range(40):\n    x = [*x, *x]\nassert len(x) > f(1)",
    ],
)
def test_what_is_evaluated_outside_is_bounded(statement: str) -> None:
    """It fails, and soon, whatever the program says."""
    assert reason_against(statement) is None
    assert judge(fenced("def f(x):\n    return 1"), json.dumps([statement]), PLAIN) == 0.0


NUMBERS = st.one_of(
    st.integers(),
    st.integers(-(2**300), 2**300),
    st.floats(allow_nan=False),
    st.complex_numbers(allow_nan=False),
)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    NUMBERS,
    st.text(),
    st.binary(),
    st.decimals(allow_nan=False, places=3),
    st.fractions(),
)
KEYS = st.one_of(LEAVES, st.tuples(LEAVES, LEAVES), st.frozensets(LEAVES, max_size=3))
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.sets(KEYS, max_size=4),
        st.dictionaries(KEYS, inner, max_size=4),
    ),
    max_leaves=8,
)


def typed(value: object) -> object:
    """A value with the type of each of its parts, which equality does not see."""
    if isinstance(value, dict):
        return dict, [(typed(key), typed(each)) for key, each in value.items()]
    if isinstance(value, list | tuple):
        return type(value), [typed(each) for each in value]
    if isinstance(value, set | frozenset):
        return type(value), sorted(repr(typed(each)) for each in value if not isinstance(each, frozenset))
    return type(value), repr(value)


def refuse(*_: object) -> None:
    raise AssertionError("every value is plain")


@given(VALUES)
@settings(max_examples=100, deadline=None)
def test_plain_values_come_back_as_they_were(value: object) -> None:
    """By the text that goes through a pipe; types as well, which equality alone would not see."""
    back = decode(json.loads(json.dumps(encode(value, refuse))), refuse)
    assert back == value and typed(back) == typed(value)


@pytest.mark.parametrize(
    "coded",
    [
        {},
        {"a": 1, "b": 2},
        {"list": [1]},
        {"int": 3},
        {"int": "0x" + "f" * 300_000},
        {"int": "zz"},
        {"set": [[1]]},
        {"set": 3},
        {"dict": [[1]]},
        {"dict": [[[], 1]]},
        {"dict": {"a": 1}},
        {"complex": ["a", "b"]},
        {"bytes": "0"},
        {"bytes": [1]},
        {"range": [0, 10**12, 1]},
        {"range": ["a"]},
        {"decimal": "1e999999"},
        {"decimal": {}},
        {"fraction": ["0x1", "0x0"]},
        {"object": "1"},
        {"object": True},
        {"object": {}},
        {"builtin": "eval"},
        {"eval": "1"},
    ],
)
def test_what_is_no_plain_value_is_refused(coded: object) -> None:
    program = conversation.Conversation(SimpleNamespace(), -1, -1)
    with pytest.raises(ValueError):
        program._decoded(coded)


@pytest.mark.parametrize(
    ("returned", "calls", "passes"),
    [
        ("[range(1000)] * 999", 1, True),
        ("[range(1000)] * 1001", 1, False),
        ("range(600_000)", 1, True),
        ("range(600_000)", 2, False),
        ("'a' * (15 << 20)", 4, True),
        ("'a' * (15 << 20)", 5, False),
    ],
)
def test_what_comes_back_is_bounded_over_all_calls(returned: str, calls: int, passes: bool) -> None:
    """A statement may keep all of it, and make lists of the ranges, in the process that judges."""
    statement = f"assert [f() for _ in range({calls})] != 0"
    assert judge(fenced(f"def f():\n    return {returned}"), json.dumps([statement]), PLAIN) == passes


WAYS = [
    pytest.param(PLAIN, id="limits alone"),
    pytest.param(ISOLATED, id="namespaces", marks=needs_namespaces),
]
WAYS.append(pytest.param(replace(ISOLATED, bubblewrap=BUBBLEWRAP), id="bubblewrap", marks=needs_bubblewrap))


@sampled(1)
@pytest.mark.parametrize("limits", WAYS)
def test_limits(limits: Limits) -> None:
    """Each is reached, and what stays below it is not harmed."""
    small = replace(limits, memory_mb=128, processes=6, file_mb=1)
    assert result_of("print(len(bytearray(10 << 20)))", small) == f"{10 << 20}\n"
    assert result_of("bytearray(500 << 20)\nprint(1)", small) == ""
    assert result_of("open('file', 'wb').write(bytes(1 << 19))\nprint(1)", small) == "1\n"
    assert (
        result_of(
            "open('file', 'wb', buffering=0).write(bytes(1 << 21))\nopen('file', 'ab').write(b'1' * "
            "99999)\nprint(1)",
            small,
        )
        == ""
    )
    assert result_of("while True: print('x' * 9999)", small) == ""
    assert result_of("import os\nfor _ in range(99): os.dup(0)\nprint(1)", small) == ""
    children = (
        "import os, time\nfor _ in range({}):\n    if not os.fork():\n        time.sleep({})\n       "
        " os._exit(0)\n{}print(1)"
    )
    waits = "while True:\n    try: os.wait()\n    except OSError: break\n"
    roomy = replace(limits, memory_mb=1024, processes=6, file_mb=1)
    assert (
        result_of(children.format(3, 0.1, waits), roomy) == "1\n"
        and result_of(children.format(20, 0.5, waits), roomy) == ""
    )


@sampled(1)
@pytest.mark.parametrize("limits", WAYS)
def test_a_program_that_takes_too_long_is_ended_with_all_that_it_started(limits: Limits) -> None:
    """Also children that left its session and whose parent is gone."""
    hasty = replace(limits, seconds=0.5)
    mark = f"megarl-test-{os.getpid()}-{limits.isolated}{len(limits.bubblewrap)}"
    code = starts(mark)
    assert result_of(code + "while True: pass", hasty) == ""
    assert result_of(code + "print(1, flush=True)\nos._exit(0)", limits) == "1\n"
    assert not any(mark in path.read_bytes().decode(errors="replace") for path in commands())


def starts(mark: str) -> str:
    """A program that leaves a child in a session of its own, which would go on for ten minutes."""
    child = f"[sys.executable, '-c', 'import time; time.sleep(600)', '{mark}']"
    return f"import os, subprocess, sys\nsubprocess.Popen({child}, start_new_session=True)\n"


def commands() -> Iterator[Path]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal() and (entry / "cmdline").exists():
            yield entry / "cmdline"


def test_nothing_of_the_run_is_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_RUN", "x")
    assert result_of("import os\nprint('SECRET_OF_THE_RUN' in os.environ)", PLAIN) == "False\n"
    assert (
        result_of("print(list({'a', 'b', 'c', 'd'}))", PLAIN)
        == result_of("print(list({'a', 'b', 'c', 'd'}))", PLAIN)
        != ""
    )


@needs_namespaces
def test_what_a_program_in_namespaces_cannot_reach() -> None:
    """Network, other processes, files that it could change, sockets in directories of temporary files; and it
    can work in its own."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        connect = (
            f"import socket\nsocket.create_connection(('127.0.0.1', {server.getsockname()[1]}), 5)\nprint(1)"
        )
        assert result_of(connect, PLAIN) == "1\n"
        assert result_of(connect, ISOLATED) == ""
    kill = f"import os\nos.kill({os.getpid()}, 0)\nprint(1)"
    assert result_of(kill, PLAIN) == "1\n" and result_of(kill, ISOLATED) == ""
    for place in (Path.home(), Path(__file__).parent, Path("/dev/shm")):
        left = place / f"left-by-a-program-{os.getpid()}"
        try:
            # /dev/shm is there, but its own
            written = "1\n" if place == Path("/dev/shm") else ""
            assert (
                result_of(f"open({str(left)!r}, 'w')\nprint(1)", ISOLATED) == written and not left.exists()
            ), place
        finally:
            left.unlink(missing_ok=True)
    there = Path("/tmp") / f"megarl-test-{os.getpid()}"
    there.write_text("x")
    try:
        assert (
            result_of(
                f"import os\nprint(os.path.exists({str(there)!r}), os.listdir('.'), os.getcwd())", ISOLATED
            )
            == "False [] /tmp\n"
        )
    finally:
        there.unlink()
    assert result_of("open('own', 'w').write('x' * 999)\nprint(open('own').read()[:3])", ISOLATED) == "xxx\n"
    assert result_of("import os\nprint(os.getuid() == 0, os.getpid())", ISOLATED) == "False 1\n"
    # capabilities inside are gone, so that nothing can be mounted anew
    status = result_of(
        "print([line for line in open('/proc/self/status') if line.startswith(('CapEff', 'NoNewPrivs'))])",
        ISOLATED,
    )
    assert "CapEff:\\t0000000000000000" in status and "NoNewPrivs:\\t1" in status
    # all files together are bounded, not each alone
    many = (
        "for number in range(20):\n    open(str(number), 'wb', buffering=0).write(bytes(1 << 19))\nprint(1)"
    )
    small = Limits(20.0, file_mb=1)
    assert result_of(many, small) == ""


def test_a_pool_tests_programs() -> None:
    """Through the pool, where the limit of all tests is over while a program runs: it is gone, and the next
    answer is judged."""
    mark = f"megarl-test-pool-{os.getpid()}"
    sleeps = starts(mark) + "import time\ntime.sleep(600)"
    options = {"isolation": "preferred", "code_timeout_s": 600.0}
    pool = RewardPool(
        [
            RewardSpec("code", options, timeout_s=2.0),
            RewardSpec("code", {**options, "partial": True, "timeout_s": 4.0}, 4.0),
        ],
        1,
    )
    try:
        some = starts(mark) + ADDS.replace("print", "while a == 1: pass\nprint")
        tasks = [
            (0, ADDS),
            (0, sleeps),
            (0, ADDS.replace("a + b", "3")),
            (1, some),
            (1, ADDS.replace("a + b", "3")),
        ]
        scores = pool.score([(which, Task(fenced(code), TEXT)) for which, code in tasks])
        found = [(score.value, score.fault) for score in scores]
        assert found == [(1.0, None), (None, "timeout"), (0.0, None), (0.5, None), (0.5, None)]
        assert not any(mark in path.read_bytes().decode(errors="replace") for path in commands())
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("needs", "seconds", "passed"),
    [
        ([9e9, 1, 1, 1], 10.0, 3),  # one that does not end costs itself alone
        ([1, 9e9, 1, 9e9], 10.0, 2),
        ([3.5, 1, 1, 1], 10.0, 4),  # a slow one has what the others left
        ([3.5, 3.5, 0.1, 0.1], 10.0, 3),
        ([3.5, 3.5, 3.5, 0.1], 10.0, 1),  # until there is nothing left
        ([5, 1, 1, 1], 100.0, 3),  # no more than a test may have
        ([9e9] * 4, 10.0, 0),
        ([1], 10.0, 1),
        ([1] * 4, 0.0, 0),
    ],
)
def test_a_test_that_does_not_end_leaves_the_others_their_time(
    needs: list[float], seconds: float, passed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on only where a test runs."""
    now, runs = [0.0], list[float]()

    def takes(code: str, test: forms.Test, limits: Limits) -> bool | None:
        needed = needs[int(test.given)]
        runs.append(limits.seconds)
        now[0] += min(needed, limits.seconds)
        return True if needed <= limits.seconds else None

    monkeypatch.setattr(verdict, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(verdict, "_passes", takes)
    tests = json.dumps({"inputs": list(map(str, range(len(needs)))), "outputs": [""] * len(needs)})
    assert judge(fenced(ADDS), tests, Limits(4.0), partial=True, seconds=seconds) == passed / len(needs)
    assert now[0] <= seconds and max(runs, default=0.0) <= 4.0


def test_isolation_that_is_not_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "isolation", lambda: ("unshare: Operation not permitted", ""))
    with pytest.raises(
        ConfigError, match=r"env\.isolation = 'required': .*unshare: Operation not permitted.*preferred"
    ):
        get_reward(RewardSpec("code"))
    reward = get_reward(RewardSpec("code", {"isolation": "preferred"}))
    assert "could read the expected outputs" in str(reward.notice)
    assert reward.judge(Task(fenced(ADDS), TEXT)) == 1.0


@needs_namespaces
def test_a_run_as_root_is_told_what_that_means(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.os, "geteuid", lambda: 0)
    sandbox.planned_root.cache_clear()
    assert "the run is root" in get_reward(RewardSpec("code")).notice
    monkeypatch.setattr(process.os, "geteuid", lambda: 1000)
    assert get_reward(RewardSpec("code")).notice == ""
    monkeypatch.undo()
    sandbox.planned_root.cache_clear()


def test_bubblewrap_is_taken_where_linux_does_not_grant_our_own_sandbox(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = {"": "mount: Permission denied", "/usr/bin/bwrap": None}
    monkeypatch.setattr(process, "fault_of_isolation", lambda bubblewrap="": faults[bubblewrap])
    monkeypatch.setattr(sandbox.shutil, "which", lambda _: "/usr/bin/bwrap")
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 1000)
    assert get_reward(RewardSpec("code")).settled == {"isolated": True, "bubblewrap": "/usr/bin/bwrap"}
    # a program of a run that is root would keep what is root's
    monkeypatch.setattr(sandbox.os, "geteuid", lambda: 0)
    with pytest.raises(ConfigError, match=r"mount: Permission denied.*install bubblewrap"):
        get_reward(RewardSpec("code"))
    faults[""] = None
    assert get_reward(RewardSpec("code")).settled == {"isolated": True, "bubblewrap": ""}


@pytest.mark.parametrize("fault", [None, "unshare: Operation not permitted"])
def test_the_driver_alone_decides_whether_programs_are_isolated(
    fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "isolation", lambda: (fault, ""))
    section = {
        "reward": "code",
        "isolation": "preferred",
        "on_error": "mask",
        "on_timeout": "zero",
        "processes": 1,
        "timeout_s": 5.0,
    }
    environment = SingleTurn(section)
    try:
        assert environment._pool is not None
        [spec] = environment._pool.specs
        assert spec.options["isolated"] is (fault is None)
    finally:
        environment.close()
    # a process of the pool, also one that takes the place of another, does not look for itself
    monkeypatch.setattr(programs, "isolation", lambda: pytest.fail("it looked for itself"))
    get_reward(spec)


def test_programs_that_can_be_isolated_no_more_are_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer is neither scored 0 nor run without protection: the error leaves its sample out."""

    def refuse(*_: object) -> None:
        raise OSError(28, "mount: No space left on device")

    monkeypatch.setattr(sandbox, "_build", refuse)
    spec = RewardSpec("code", {"isolation": "preferred", "isolated": True})
    mark = tmp_path / "was-run"
    score = score_of(get_reward(spec), Task(fenced(f"open({str(mark)!r}, 'w')"), TEXT), spec)
    assert (score.value, score.fault) == (
        None,
        "outage",
    ) and "mount: No space left on device" in score.message
    assert not mark.exists()


def test_a_program_that_cannot_be_started_is_no_wrong_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process.sys, "executable", "/no/such/python")
    with pytest.raises(RewardError, match=r"no program can be started: FileNotFoundError"):
        judge(fenced(ADDS), TEXT, PLAIN)


CALLS_LINUX = "import ctypes, os, time\nlibc = ctypes.CDLL(None)\n"


@needs_namespaces
def test_a_program_cannot_end_its_supervisor_and_go_on() -> None:
    """A signal to its group reaches over namespaces; with its parent gone, and no wish to die with it, it
    would run for ever."""
    mark = f"megarl-test-group-{os.getpid()}"
    code = (
        f"{starts(mark)}{CALLS_LINUX}libc.prctl(1, 0)\nos.kill(0, 9)\nprint(os.getppid(), "
        "flush=True)\ntime.sleep(600)"
    )
    assert result_of(code, Limits(1.0)) == ""
    assert not any(mark in path.read_bytes().decode(errors="replace") for path in commands())
    assert result_of(f"{CALLS_LINUX}print(os.getppid())", ISOLATED) == "0\n"


@needs_namespaces
def test_a_program_gets_no_namespaces_of_its_own() -> None:
    """In which it could mount file systems that have no limit."""
    new_user = 0x10000000
    code = f"{CALLS_LINUX}print(libc.unshare({new_user}))"
    assert result_of(code, PLAIN) == "0\n" and result_of(code, ISOLATED) == "-1\n"
    empty = "for number in range({}): open(str(number), 'w').close()\nprint(1)"
    assert result_of(empty.format(500), ISOLATED) == "1\n" and result_of(empty.format(5000), ISOLATED) == ""


@sampled(1)
@pytest.mark.parametrize("limits", WAYS)
def test_programs_that_multiply_or_share_memory_out_are_ended(limits: Limits) -> None:
    small = replace(limits, memory_mb=96, processes=8, file_mb=1)
    mark = f"megarl-test-bomb-{os.getpid()}-{limits.isolated}{len(limits.bubblewrap)}"
    # no more than 256 of them, should nothing stop it
    assert result_of(f"{starts(mark)}import time\nfor _ in range(8): os.fork()\ntime.sleep(600)", small) == ""
    hold = (
        "import os, time\nfor _ in range({}):\n    if not os.fork(): break\nheld = bytearray(40 << "
        "20)\ntime.sleep(0.5)\nprint(1)"
    )
    assert "1" in result_of(hold.format(0), small) and result_of(hold.format(3), small) == ""
    assert not any(mark in path.read_bytes().decode(errors="replace") for path in commands())


def test_a_process_that_the_first_look_misses_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    find, looks = process._descendants, list[int]()

    def children_alone(number: int = 0) -> list[int]:
        looks.append(number)
        if looks.count(process.signal.SIGSTOP) > 2 or not number:
            return find(number)
        found = [
            int(each) for each in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()
        ]
        process._send(found, number)
        return found

    monkeypatch.setattr(process, "_descendants", children_alone)
    mark = f"megarl-test-missed-{os.getpid()}"
    assert (
        result_of(f"{starts(mark)}import os, time\nos.fork()\ntime.sleep(600)", Limits(0.5, isolated=False))
        == ""
    )
    assert not any(mark in path.read_bytes().decode(errors="replace") for path in commands())


@sampled(1)
@pytest.mark.parametrize("limits", WAYS)
def test_a_program_may_treat_its_files_as_it_likes(limits: Limits) -> None:
    """It closes them, writes for ever and hears of no error, or leaves them to a child that goes on: the end
    comes in time."""
    assert result_of("import os\nos.close(0)\nos.close(2)\nprint(1)", limits) == "1\n"
    assert result_of("import os\nos.close(1)", limits) == ""
    hasty = replace(limits, seconds=0.5, file_mb=1)
    deaf = "import os\nwhile True:\n    try: os.write(1, b'x' * 99999)\n    except OSError: pass"
    assert result_of(deaf, hasty) == ""
    leaves = (
        "import os, time\nif not os.fork():\n    os.setsid()\n    time.sleep(600)\nprint(1, "
        "flush=True)\nos._exit(0)"
    )
    assert result_of(leaves, limits) == "1\n"


def test_why_namespaces_are_not_granted_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(1, "mount: Operation not permitted")

    monkeypatch.setattr(sandbox, "_build", refuse)
    with pytest.raises(RewardError, match=r"no program can be started: .*mount: Operation not permitted"):
        result_of("print(1)", ISOLATED)
    assert result_of("print(1)", PLAIN) == "1\n"


def test_isolation_is_looked_for_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    find = fault_of_isolation.__wrapped__
    assert find() == fault_of_isolation()
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setattr(process.sys, "executable", "/no/such/python")
    assert "FileNotFoundError" in str(find())
    monkeypatch.setattr(process.sys, "executable", "/bin/false")
    assert find() == "exit code 1"
