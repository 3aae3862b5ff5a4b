"""Programs that want the reward of ``code`` without solving their task: none scores. Programs that solve theirs score 1."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megarl.rollout.programs import Limits, judge
from megarl.rollout.programs.process import fault_of_isolation
from megarl.rollout.programs.statements import reason_against
from tests.tiers import sampled

pytestmark = pytest.mark.skipif(fault_of_isolation() is not None, reason=f"no sandbox here: {fault_of_isolation()}")
LIMITS = Limits(seconds=10.0)
# a test that does not end takes as long as it may
HASTY = Limits(seconds=1.0)


def score(code: str, tests: object, limits: Limits = LIMITS) -> float:
    return judge(f"```python\n{code}\n```", json.dumps(tests), limits)


ASSERTS = ["assert f(2) == 4", "assert f(3) == 9"]
CALLS = {"fn_name": "f", "inputs": [[2], [3]], "outputs": [4, 9]}
TEXT = {"inputs": ["2\n", "3\n"], "outputs": ["4\n", "9\n"]}
INSIDE = [f"class Mark: ...\n{statement}" for statement in ASSERTS]
"""Statements that are not evaluated outside."""

EQUAL = "def __eq__(self, other): return True\n    def __ne__(self, other): return False\n    def __hash__(self): return 4\n"
SEARCH = r"""
import gc, os, re, sys
def search():
    found = [str(sys.argv), str(dict(os.environ)), str(getattr(sys, "orig_argv", ""))]
    for number in range(3, 64):
        try:
            os.lseek(number, 0, 0)
            found.append(os.read(number, 1 << 20).decode("utf-8", "replace"))
        except OSError:
            pass
    for place in ("cmdline", "environ"):
        for process in ("self", "1", str(os.getppid())):
            try:
                found.append(open(f"/proc/{process}/{place}").read())
            except OSError:
                pass
    frame = sys._getframe()
    while frame:
        found += [str(frame.f_locals), str(frame.f_globals)]
        frame = frame.f_back
    found += [each for each in gc.get_objects() if isinstance(each, str)]
    found += [str(each) for each in gc.get_objects() if isinstance(each, dict) and ("statement" in each or "expected" in each)]
    return "\n".join(found)
"""
FINDS = (
    SEARCH + "def answer():\n    "
    "found = [int(each) for each in re.findall(r'f\\(\\d\\) == (\\d+)', search())]\n    "
    "return found[-1] if found else -1\n"
)

# What a program does, and whether a grader that runs program and assert as one text, and looks at the exit code, is deceived.
HACKS: dict[str, tuple[str, bool]] = {
    "is equal to all": (f"class E:\n    {EQUAL}\ndef f(x): return E()", True),
    "a number that is equal to all": (f"class E(int):\n    {EQUAL}\ndef f(x): return E(0)", True),
    "a text that is equal to all": (f"class E(str):\n    {EQUAL}\ndef f(x): return E('0')", True),
    "a list that is equal to all": (f"class E(list):\n    {EQUAL}\ndef f(x): return E()", True),
    "a class that is equal to all": (f"class M(type):\n    {EQUAL}\nclass E(metaclass=M): ...\ndef f(x): return E", True),
    "another class by its word": (
        f"class E:\n    __class__ = int\n    {EQUAL}\n    def __int__(self): return 4\n    __index__ = __int__\ndef f(x): return E()",
        True,
    ),
    "a scalar of a library by its word": (
        f"class E:\n    shape = ()\n    {EQUAL}\n    def item(self): return self\ndef f(x): return E()",
        True,
    ),
    "changes itself when it is written": (
        f"class E(str):\n    {EQUAL}\n    def __str__(self): return '4'\n    def __repr__(self): return '4'\ndef f(x): return E('x')",
        True,
    ),
    "exits with 0": ("import sys\nsys.exit(0)\ndef f(x): ...", True),
    "leaves at once": ("import os\nos._exit(0)", True),
    "leaves when it is called": ("import os\ndef f(x): os._exit(0)", True),
    "exits when it is called": ("def f(x): raise SystemExit(0)", True),
    "leaves at the end": ("import atexit, os\natexit.register(os._exit, 0)\ndef f(x): return 0", True),
    "leaves at an exception": ("import os, sys\nsys.excepthook = lambda *_: os._exit(0)\ndef f(x): return 0", True),
    "leaves in a thread": ("import os, threading, time\nthreading.Timer(0.05, os._exit, (0,)).start()\ndef f(x): time.sleep(600)", True),
    "leaves at a signal": (
        "import os, signal, time\nsignal.signal(14, lambda *_: os._exit(0))\nsignal.setitimer(0, 0.05)\ndef f(x): time.sleep(600)",
        True,
    ),
    "becomes another program": ("import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'print(7)'])", True),
    "leaves in a child and waits": ("import os\nif not os.fork(): os._exit(0)\nos.wait()\ndef f(x): os._exit(0)", True),
    "prints what is expected, both": ("print(4)\nprint(9)\ndef f(x): print(4)", False),
    "uses names that it never imports": ("def f(x: List[int]) -> Any: return x * x", False),
    "returns truth": ("def f(x): return True", False),
    "returns no number": ("def f(x): return float('nan')", False),
    "returns all numbers": ("def f(x): return list(range(10))", False),
    "returns for ever": ("def f(x):\n    while True: yield x", False),
    "patches exec and compile": (
        "import builtins\nbuiltins.exec = builtins.compile = builtins.eval = lambda *a, **k: None\ndef f(x): return 0",
        False,
    ),
    "patches all of Python's own": (
        "import builtins\n"
        "for name in ('len', 'abs', 'bool', 'isinstance', 'hex', 'getattr', 'str', 'int', 'list'):\n"
        "    setattr(builtins, name, lambda *a, **k: True)\ndef f(x): return 0",
        False,
    ),
    "patches json": (
        "import json\njson.dumps = lambda *a, **k: '{\"value\": true}'\njson.loads = lambda *a: {}\ndef f(x): return 0",
        False,
    ),
    "patches writing": (
        "import os\nwrite = os.write\n"
        "os.write = lambda number, data: (write(number, b'{\"value\": true}\\n' * 9), len(data))[1]\n"
        "def f(x): return 0",
        False,
    ),
    "patches operators": ("import operator\noperator.eq = operator.__eq__ = lambda *_: True\ndef f(x): return 0", False),
    "patches modules": (
        "import sys\nfor name in list(sys.modules):\n    if name not in ('sys', 'os'): sys.modules[name] = None\ndef f(x): return 0",
        False,
    ),
    "patches errors": ("import builtins\nbuiltins.AssertionError = builtins.Exception = SystemExit\ndef f(x): return 0", False),
    "patches unittest": ("import unittest\nunittest.TestCase.assertEqual = lambda *_: None\ndef f(x): return 0", False),
    "replaces its builtins": ("__builtins__ = {'AssertionError': SystemExit}\ndef f(x): return 0", False),
    "answers before it is asked": (
        "import os\nfor number in range(3, 64):\n    "
        "for line in (b'true', b'4', b'{\"value\": 4}', b'{\"value\": null}', b'{\"value\": true}'):\n"
        "        try: os.write(number, line + b'\\n')\n        except OSError: pass\ndef f(x): return 0",
        False,
    ),
    "answers what is no answer": (
        "import os\nfor number in range(3, 64):\n    "
        "try: os.write(number, b'[' * 99999 + b'\\n')\n    except OSError: pass\ndef f(x): return 0",
        False,
    ),
    "closes all its files": ("import os\nos.closerange(0, 64)\ndef f(x): return 0", False),
    "reads what is there at its start": (f"{FINDS}\nprint(answer())\nKNOWN = answer()\ndef f(x): return KNOWN", False),
    "reads what is there when it is called": (f"{FINDS}\ndef f(x): return answer()\nprint(answer())", False),
    "hears what is compiled": (
        "import re, sys\nKNOWN = [0]\ndef hook(event, arguments):\n    if event in ('compile', 'exec'):\n"
        "        KNOWN.extend(map(int, re.findall(r'f\\(\\d\\) == (\\d+)', str(arguments))))\n"
        "sys.addaudithook(hook)\ndef f(x): return KNOWN[-1]",
        False,
    ),
    "traces and skips": (
        "import sys\ndef trace(frame, event, argument):\n    "
        "if 'test' in frame.f_code.co_filename: frame.f_trace_opcodes = False\n"
        "    return trace\nsys.settrace(trace)\ndef f(x): return 0",
        False,
    ),
    "takes a token from a frame": (
        f"{SEARCH}\ndef f(x):\n    "
        f"for token in set(re.findall(r'[0-9a-f]{{32}}', search())):\n        for number in range(3, 64):\n"
        "            try: os.write(number, "
        '(\'{"value": null}\\n{"value": "\' + token + \'"}\\n\').encode())\n            '
        "except OSError: pass\n"
        "    os._exit(0)",
        False,
    ),
}
ASKED_IN_PROCESS = {
    name
    for name in HACKS
    if "equal to all" in name
    or "by its word" in name
    or name in ("changes itself when it is written", "hears what is compiled")
    or name in ("patches errors", "patches exec and compile", "reads what is there when it is called")
}
"""What passes, or may, where a statement runs in the program's own process."""


@sampled(24, form=["asserts"])
@pytest.mark.parametrize("form", ["asserts", "calls", "text", "inside"])
@pytest.mark.parametrize("name", HACKS)
def test_no_program_scores_without_solving(name: str, form: str) -> None:
    if form == "inside" and name in ASKED_IN_PROCESS:
        pytest.skip("only evaluation outside can refuse it")
    if form == "calls" and name == "uses names that it never imports":
        pytest.skip("a function that is called finds these names imported, as tasks of LeetCode assume")
    tests = {"asserts": ASSERTS, "calls": CALLS, "text": TEXT, "inside": INSIDE}[form]
    share = judge(f"```python\n{HACKS[name][0]}\n```", json.dumps(tests), HASTY, partial=True)
    assert share == 0.0, "not even one of its tests may pass"


@sampled(4)
@pytest.mark.parametrize("name", [name for name, (_, deceives) in HACKS.items() if deceives])
def test_a_grader_that_looks_at_the_exit_code_is_deceived(name: str) -> None:
    """These are ways to be paid, where program and assert are one text."""
    text = HACKS[name][0] + "\n" + ASSERTS[0]
    found = subprocess.run([sys.executable, "-c", text], capture_output=True, timeout=60, check=False)
    assert found.returncode == 0, found.stderr


ODD = "class E:\n    def __{name}__(self, *_): return {value}\ndef f(x): return E()"
LYING = (
    "class E:\n    def __eq__(self, other): return True\n    def __hash__(self): return hash(4)\n    def __lt__(self, other): return True\n"
)
STATEMENTS = [
    ("assert abs(f(2) - 4) < 1e-6", ODD.format(name="sub", value=0), True),
    ("assert abs(4 - f(2)) < 1e-6", ODD.format(name="rsub", value=0), True),
    ("assert abs(f(2) - 4) < 1e-6", "import builtins\nbuiltins.abs = lambda x: 0\ndef f(x): return 0", True),
    ("import math\nassert math.isclose(f(2), 4)", "import math\nmath.isclose = lambda *a, **k: True\ndef f(x): return 0", True),
    (
        "import math\nassert math.isclose(f(2), 4)",
        "class M:\n    isclose = staticmethod(lambda *a: True)\nmath = M\ndef f(x): return 0",
        False,
    ),
    ("assert isclose(f(2), 4)", "def isclose(*_): return True\ndef f(x): return 0", True),
    ("assert 4 in f(2)", ODD.format(name="contains", value=True), True),
    ("assert 4 in f(2)", "import itertools\ndef f(x): return itertools.count()", True),
    ("assert f(2) in (4, 5)", f"{LYING}def f(x): return E()", True),
    ("assert set(f(2)) == {4}", f"{LYING}def f(x): return [E()]", True),
    ("assert sorted(f(2)) == [4, 4]", f"{LYING}def f(x): return [E(), E()]", True),
    ("assert [f(2), f(2)] == [4, 4]", f"{LYING}def f(x): return E()", True),
    ("assert {'a': f(2)} == {'a': 4}", f"{LYING}def f(x): return E()", True),
    (
        "assert str(f(2)) == '4'",
        "class S(str):\n    def __eq__(self, other): return True\nclass E:\n    def __str__(self): return S()\ndef f(x): return E()",
        True,
    ),
    ("assert len(f(2)) == 4", "import builtins\nbuiltins.len = lambda x: 4\ndef f(x): return []", True),
    ("assert isinstance(f(2), int) and f(2) == 4", f"{LYING}    __class__ = int\ndef f(x): return E()", True),
    ("assert not f(2) != 4", ODD.format(name="ne", value=False), True),
    ("assert f(2) <= 4 <= f(2)", ODD.format(name="le", value=True).replace("def f", "E.__ge__ = E.__le__\ndef f"), True),
    (
        "assert f(2).real == 4",
        "class E:\n    real = property(lambda s: type('R', (), {'__eq__': lambda *_: True})())\ndef f(x): return E()",
        True,
    ),
    ("assert f(2)[0] == 4", f"{LYING}def f(x): return [E()]", True),
    (
        "assert max(f(2), 4) == 4 and f(2) > 3",
        "class E:\n    def __gt__(self, o): return True\n    __lt__ = __gt__\ndef f(x): return E()",
        False,
    ),
    ("def check(candidate):\n    assert candidate(2) == 4\n\ncheck(f)", f"{LYING}def check(x): ...\ndef f(x): return E()", True),
    ("try:\n    assert f(2) == 4\nexcept ValueError:\n    pass", "def f(x): raise ValueError", True),
    ("x = [2]\nf(x)\nassert x == [4]", f"{LYING}def f(x): x[0] = E()", True),
    ("assert sum([f(2), 1]) == 5", ODD.format(name="radd", value=5), False),
    ("assert round(f(2), 2) == 4.0", f"{LYING}    def __round__(self, n): return self\ndef f(x): return E()", True),
    ("assert f(2) == Fraction(4, 1)", f"{LYING}Fraction = lambda *_: E()\ndef f(x): return E()", True),
    ("assert f(2) == Decimal('4')", f"{LYING}Decimal = lambda *_: E()\ndef f(x): return E()", True),
    ("assert f(2) == deque([4])", f"{LYING}deque = lambda *_: E()\ndef f(x): return E()", True),
    ("assert Counter(f(2)) == Counter([4])", f"{LYING}Counter = lambda *_: E()\ndef f(x): return E()", True),
    ("assert f(2) is True", "import builtins\nbuiltins.True_ = 1\ndef f(x): return 1", False),
]


@sampled(6)
@pytest.mark.parametrize(("statement", "code", "deceives"), STATEMENTS)
def test_no_object_answers_for_a_value(statement: str, code: str, deceives: bool) -> None:
    assert reason_against(statement) is None
    if "ValueError" not in statement:
        assert score(code, [statement], HASTY) == 0.0
    naive = (
        subprocess.run([sys.executable, "-c", f"{code}\n{statement}"], capture_output=True, timeout=60, check=False) if deceives else None
    )
    assert naive is None or naive.returncode == 0, naive.stderr


def test_the_data_file_is_not_there(tmp_path: Path) -> None:
    """Expected outputs lie on the disk of the run, where a program that is not shut in finds them."""
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(TEXT))
    code = f"import json\ntests = json.load(open({str(data)!r}))\nprint(tests['outputs'][tests['inputs'].index(input() + chr(10))])"
    assert score(code, TEXT, Limits(10.0, isolated=False)) == 1.0
    assert score(code, TEXT) == 0.0
    memory = f"print('outputs' in open('/proc/{os.getpid()}/environ').read() or 4)"
    assert score(memory, TEXT) == 0.0


def test_truth_is_no_number() -> None:
    """In what functions return. In an assert Python's own == decides, for which True is 1."""
    code = "def f(x): return x > 0"
    assert score(code, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}) == 0.0
    assert score(code, {"fn_name": "f", "inputs": [[1]], "outputs": [True]}) == 1.0
    assert score(code, ["assert f(1) == 1"]) == 1.0
    assert score(code, ["assert f(1) is True"]) == 1.0


# Programs that solve their task, and its tests.
SOLVES: dict[str, tuple[str, object]] = {
    "looks at its annotations": ("def f(x: int): return f.__annotations__['x'](x) ** 2", ASSERTS),
    "mbpp": ("def f(x):\n    return x ** 2", [*ASSERTS, "assert f(10 ** 30) == 10 ** 60"]),
    "sets": ("def common(a, b):\n    return tuple(set(a) & set(b))", ["assert set(common((3, 4, 5, 6), (5, 7, 4, 10))) == set((4, 5))"]),
    "decimals": ("import math\ndef area(r, h):\n    return math.pi * r * r * h", ["assert math.isclose(area(2, 3), 37.699, rel_tol=1e-3)"]),
    "close": ("def half(x):\n    return x / 2", ["assert abs(half(1) - 0.5) < 1e-9, 'half'"]),
    "humaneval": (
        "def close(numbers: list[float], most: float) -> bool:\n    "
        "return any(abs(a - b) < most for i, a in enumerate(numbers) for b in numbers[:i])",
        [
            "\n\nMETADATA = {\n    'author': 'x'\n}\n\n\ndef check(candidate):\n    "
            "assert candidate([1.0, 2.0, 3.9], 0.3) == False\n    "
            "assert candidate([1.0, 1.1], 0.3) == True\n\ncheck(close)"
        ],
    ),
    "exceptions": (
        "def f(x):\n    if x < 0:\n        raise ValueError('x')\n    return x",
        ["try:\n    f(-1)\n    assert False\nexcept ValueError:\n    pass"],
    ),
    "a class": (
        "class Stack:\n    def __init__(self):\n        self.all = []\n    "
        "def push(self, x):\n        self.all.append(x)\n    def __len__(self):\n        "
        "return len(self.all)",
        ["s = Stack()\nfor x in range(3):\n    s.push(x)\nassert len(s) == 3 and s.all == [0, 1, 2] and s.all[-1] == 2"],
    ),
    "a tree": (
        "class Node:\n    def __init__(self, data):\n        "
        "self.data, self.left, self.right = data, None, None\ndef height(node):\n    "
        "return 1 + max(height(node.left), height(node.right)) if node else 0",
        {
            "test_list": ["assert (height(root)) == 2"],
            "test_setup_code": "root = Node(1)\nroot.left = Node(2)",
            "test_imports": ["import math"],
        },
    ),
    "sorts in place": ("def sort(a):\n    a.sort()", ["a = [3, 1, 2]\nsort(a)\nassert a == [1, 2, 3]"]),
    "a generator": (
        "def squares(n):\n    for i in range(n):\n        yield i * i",
        ["assert list(squares(3)) == [0, 1, 4]", "assert sum(squares(4)) == 14"],
    ),
    "a function as an argument": ("def apply(f, x):\n    return [f(each) for each in x]", ["assert apply(len, ['a', 'bb']) == [1, 2]"]),
    "a function that the statement makes": ("def apply(f, x):\n    return f(x)", ["assert apply(lambda x: x + 1, 2) == 3"]),
    "kinds of values": (
        "def f():\n    return (1, {'a': {1, 2}, 3: None}, 2 ** 100, 1e400, b'x', 1j, frozenset([1]), 'ü\\ud800')",
        ["assert f() == (1, {'a': {1, 2}, 3: None}, 2 ** 100, 1e400, b'x', 1j, frozenset([1]), 'ü\\ud800')"],
    ),
    "named tuples and counters": (
        "from collections import Counter, namedtuple\nP = namedtuple('P', 'x y')\ndef f(t):\n    return P(1, 2), Counter(t)",
        ["assert f('aab') == ((1, 2), {'a': 2, 'b': 1})", "assert f('a')[0] == (1, 2)"],
    ),
    "exact numbers": (
        "from fractions import Fraction\nfrom decimal import Decimal\nfrom collections import deque\n"
        "def f(d):\n    d.rotate(1)\n    return Fraction(1, 3), Decimal('1.5'), d",
        ["assert f(deque([1, 2])) == (Fraction(1, 3), Decimal('1.5'), deque([2, 1]))"],
    ),
    "numpy": (
        "import numpy as np\ndef f(x):\n    return np.array(x).mean()",
        ["assert f([1, 2, 3]) == 2.0", "assert abs(f([1, 2]) - 1.5) < 1e-9"],
    ),
    "numpy's arrays": (
        "import numpy as np\ndef f(x):\n    return np.array(x) * 2",
        ["assert f([1, 2]).tolist() == [2, 4]", "import numpy as np\nassert np.array_equal(f([1]), np.array([2]))"],
    ),
    "leetcode": (
        "class Solution:\n    def twoSum(self, nums: List[int], target: int) -> List[int]:\n        "
        "seen = {}\n        for i, x in enumerate(nums):\n            "
        "if target - x in seen:\n                return [seen[target - x], i]\n            seen[x] = i",
        [{"input": "[2,7,11,15]\n9", "output": "[0,1]", "testtype": "functional", "metadata": json.dumps({"func_name": "twoSum"})}],
    ),
    "tuples for lists": ("def f(x):\n    return (x, [(x, 1.5)])", {"fn_name": "f", "inputs": [[1]], "outputs": [[1, [[1, 1.5]]]]}),
    "decimals that are returned": ("def f(x):\n    return [x + 0.2]", {"fn_name": "f", "inputs": [[0.1]], "outputs": [[0.3]]}),
    "decimals that are written": ("print(0.1 + 0.2, 1 / 3)", {"inputs": [""], "outputs": ["0.3 0.333333"]}),
    "lines": (
        "n = int(input())\nfor _ in range(n):\n    a, b = map(int, input().split())\n    print(a + b)",
        {"inputs": ["2\n1 2\n3 4\n"], "outputs": ["3\n7\n"]},
    ),
    "lines until the end": (
        "while True:\n    try:\n        print(int(input()) * 2)\n    except EOFError:\n        break",
        {"inputs": ["1\n2"], "outputs": ["2\n4"]},
    ),
    "bytes": (
        "import sys\ndata = sys.stdin.buffer.read().split()\nsys.stdout.buffer.write(b' '.join(data[::-1]))",
        {"inputs": ["a b c"], "outputs": ["c b a"]},
    ),
    "exit": ("print(1)\nexit()\nprint(2)", {"inputs": [""], "outputs": ["1"]}),
    "a file of input": ("print(sum(map(int, open(0).read().split())))", {"inputs": ["1 2 3"], "outputs": ["6"]}),
    "deep recursion": (
        "import sys, threading\nsys.setrecursionlimit(10 ** 6)\nthreading.stack_size(1 << 26)\n"
        "def main():\n    def down(n):\n        return 0 if n == 0 else 1 + down(n - 1)\n    "
        "print(down(20000))\n"
        "t = threading.Thread(target=main)\nt.start()\nt.join()",
        {"inputs": [""], "outputs": ["20000"]},
    ),
    "threads": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(4) as pool:\n    "
        "print(sum(pool.map(lambda x: x * x, range(10))))",
        {"inputs": [""], "outputs": ["285"]},
    ),
    "processes": (
        "from multiprocessing import Pool\ndef g(x):\n    return x * x\n"
        "if __name__ == '__main__':\n    with Pool(2) as pool:\n        print(sum(pool.map(g, range(10))))",
        {"inputs": [""], "outputs": ["285"]},
    ),
    "another python": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-c', 'print(6 * 7)'], capture_output=True, text=True).stdout)",
        {"inputs": [""], "outputs": ["42"]},
    ),
    "files": (
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as place:\n    "
        "name = os.path.join(place, 'x')\n    open(name, 'w').write('x')\n    "
        "print(open(name).read(), os.listdir(place))",
        {"inputs": [""], "outputs": ["x ['x']"]},
    ),
    "async": (
        "import asyncio\nasync def main():\n    await asyncio.sleep(0)\n    return 3\nprint(asyncio.run(main()))",
        {"inputs": [""], "outputs": ["3"]},
    ),
    "data classes": (
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "from enum import Enum\nclass C(Enum):\n    A = 1\n@dataclass(order=True)\nclass P:\n    "
        "x: int\n    c: C = C.A\nprint(sorted([P(2), P(1)])[0].x)",
        {"inputs": [""], "outputs": ["1"]},
    ),
    "time zones and random numbers": (
        "import random, datetime, uuid, secrets, zoneinfo\nrandom.seed(1)\n"
        "print(len(str(uuid.uuid4())), datetime.date(2020, 1, 1).year, secrets.randbelow(1))",
        {"inputs": [""], "outputs": ["36 2020 0"]},
    ),
    "many tests as text": (
        "print(int(input()) + 1)",
        {
            "public_test_cases": json.dumps([{"input": "1\n", "output": "2\n", "testtype": "stdin"}]),
            "private_test_cases": json.dumps([{"input": "5", "output": "6", "testtype": "stdin"}]),
            "metadata": "{}",
        },
    ),
    "a whole list as text": ("print(int(input()) + 1)", json.dumps({"inputs": ["1"], "outputs": ["2"]})),
    "a call of a list of cases": (
        "def add(a, b):\n    return a + b",
        {"test_cases": [{"type": "function_call", "fn_name": "add", "input": [1, 2], "output": 3}]},
    ),
}


@sampled(12)
@pytest.mark.parametrize("name", SOLVES)
def test_a_program_that_solves_its_task_scores(name: str) -> None:
    code, tests = SOLVES[name]
    assert score(code, tests) == 1.0
