"""Reward functions by name and import path, and the pool of processes that computes them."""

from __future__ import annotations

import os
import random
import selectors
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl import redaction
from megarl.config.environments import BUILT_IN_REWARDS, check_reward, environment_class
from megarl.data.datasets import Example
from megarl.errors import BatchError, ConfigError, RewardError, StateError
from megarl.import_path import forget_objects, load_object
from megarl.rollout import reward_pool
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.environments import find_faults, make_environment
from megarl.rollout.reward_pool import RewardPool, Score
from megarl.rollout.rewards import REWARDS, RewardSpec, Task, get_reward
from megarl.rollout.single_turn import SingleTurn
from tests.tiers import sampled, slow
from tests.unit.config_samples import complete, raw_grpo
from tests.unit.scripted import collector_of

USERS = """
import os, subprocess, sys, time

print("imported")

def reward(response, answer):
    print("judging", response)
    if response == "raises":
        raise KeyError("no such thing")
    if response == "leaves":
        sys.exit(0)
    if response == "dies":
        os.kill(os.getpid(), 9)
    if response == "hangs":
        while True:
            try:
                time.sleep(60)
            except BaseException:
                pass
    if response == "sleeps":
        time.sleep(60)
    if response == "babbles":
        for file in range(3, 20):
            try:
                os.write(file, b"[1]\\n")
            except OSError:
                pass
    if response == "closes":
        os.closerange(3, 20)
        time.sleep(60)
    if response == "naps":
        time.sleep(0.2)
    if response == "huge":
        return 1e300
    if response == "forks" and not os.fork():
        return 0.5
    if response == "forks":
        os.wait()
    if response == "reads":
        child = subprocess.run(["cat"], capture_output=True, text=True).stdout
        return float(sys.stdin.read() == child == "")
    if response == "dies once" and not os.path.exists(answer):
        open(answer, "w").close()
        os._exit(3)
    return {"nan": float("nan"), "text": "many", "none": None}.get(response, len(response) / 8)

def fault(answer):
    if answer == "trouble":
        raise OSError("no disk")
    return "it is empty" if not answer else None

reward.fault_of_reference = fault
number = 3
"""


def judged(name: str, response: str, answer: str, **options: Any) -> Any:
    """What a built-in reward makes of a response."""
    return get_reward(RewardSpec(name, options)).judge(Task(response, answer))


def pool_of(name: str, processes: int, timeout_s: float) -> RewardPool:
    """A pool of one reward."""
    return RewardPool([RewardSpec(name, timeout_s=timeout_s)], processes)


def scored(pool: RewardPool, pairs: Sequence[tuple[str, str]]) -> list[Score]:
    """What a pool of one reward makes of responses and reference answers."""
    return pool.score([(0, Task(*pair)) for pair in pairs])


@pytest.fixture
def users(tmp_path: Path) -> str:
    """Import path of a user's reward."""
    path = tmp_path / "my rewards.py"
    path.write_text(USERS)
    return f"{path}:reward"


@pytest.mark.parametrize(
    ("response", "answer", "stripped", "literal"),
    [
        ("12", "12", 1, 1),
        (" 12\n", "12", 1, 0),
        ("12", " 12", 1, 0),
        ("1 2", "12", 0, 0),
        ("", "", 1, 1),
        ("12.", "12", 0, 0),
    ],
)
def test_exact_match(response: str, answer: str, stripped: float, literal: float) -> None:
    assert judged("exact_match", response, answer) == stripped
    assert judged("exact_match", response, answer, strip=False) == literal


MATHEMATICS = [
    (r"so the answer is $\frac{1}{2}$", "0.5", 1.0),
    (r"\boxed{12}", "12", 1.0),
    ("It is 13.", "12", 0.0),
    (r"$x^2+2x+1$", r"$(x+1)^2$", 1.0),
    ("no idea", "12", 0.0),
    ("", "12", 0.0),
    (r"$\frac{1}{$", "12", 0.0),
]


@pytest.mark.parametrize(("response", "answer", "expected"), MATHEMATICS)
def test_math_verify(response: str, answer: str, expected: float) -> None:
    assert judged("math_verify", response, answer) == expected == judged("math", response, answer)


@slow
def test_mathematics_in_processes() -> None:
    """The same scores in order, however many processes; what takes too long is stopped there."""
    with_bomb = [*MATHEMATICS, (r"\boxed{9^{9^{9^{9}}}}", "5", None)]
    pool = pool_of("math_verify", 2, 8.0)
    try:
        scores = scored(pool, [(response, answer) for response, answer, _ in with_bomb])
    finally:
        pool.close()
    assert [score.value for score in scores] == [expected for _, _, expected in with_bomb]
    assert scores[-1] == Score(None, "timeout", "no reply within 8 s")


def test_a_module_that_takes_long_is_named_while_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("megarl.import_path._SLOW_S", 0.0)
    slow = tmp_path / "slow.py"
    # it goes on when it has been named
    waits = (
        "for thread in threading.enumerate():\n    if isinstance(thread, threading.Timer):\n        "
        "thread.join()"
    )
    slow.write_text(f"import threading\n{waits}\nx = 1\n")
    assert load_object(f"{slow}:x", "env.reward") == 1
    assert [record.getMessage() for record in caplog.records if record.name == "megarl.import_path"] == [
        (
            f"env.reward: {slow} is still being imported after 0 s; megarl waits for it. Fix: move "
            "slow code out of the module's top level"
        )
    ]


def test_unknown_rewards_are_refused(users: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(REWARDS) == set(BUILT_IN_REWARDS)
    with pytest.raises(
        ConfigError, match=r"env\.reward = 'exakt': it must be exact_match, math, .* or an import path"
    ):
        get_reward(RewardSpec("exakt"))
    with pytest.raises(ConfigError, match=r"has no rewart.*write one of its names \(.*reward"):
        get_reward(RewardSpec(users.replace(":reward", ":rewart")))
    own = tmp_path / "my_reward.py"
    own.write_text("import re\nfrom math import sqrt\n\n\ndef reward(response):\n    return 0.0\n")
    with pytest.raises(ConfigError, match=r"write one of its names \(reward\)"):
        get_reward(RewardSpec(f"{own}:rewart"))
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    own.rename(elsewhere / "not_loaded.py")
    monkeypatch.chdir(elsewhere)
    with pytest.raises(ConfigError, match=r"Fix: write not_loaded\.py:reward$"):
        get_reward(RewardSpec("not_loaded:reward"))
    with pytest.raises(ConfigError, match=r"it is int, which cannot be called"):
        get_reward(RewardSpec(users.replace(":reward", ":number")))
    with pytest.raises(ConfigError, match=r"there is no file"):
        get_reward(RewardSpec(f"{tmp_path}/absent.py:reward"))
    with pytest.raises(ConfigError, match=r"fails: ModuleNotFoundError"):
        get_reward(RewardSpec("no.such.module:reward"))
    broken = tmp_path / "broken.py"
    broken.write_text("import os\nraise ValueError('not today')\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails: ValueError: not today\. Fix: correct"):
        pool_of(f"{broken}:reward", 1, 1.0)
    with pytest.raises(
        ConfigError,
        match=r"there is no value for its parameter 'p'\. Fix: use these names: prompt, response or "
        r"completion",
    ):
        check_reward("os.path:basename", columns=())
    with pytest.raises(ConfigError, match=r"it does not take the response"):
        broken.write_text("def reward(prompt, answer):\n    return 1.0\n")
        check_reward(f"{broken}:reward", columns=())
    forget_objects()
    broken.write_text("open('no such table')\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails: FileNotFoundError: .*no such table"):
        get_reward(RewardSpec(f"{broken}:reward"))
    broken.write_text("raise SystemExit(0)\n")
    with pytest.raises(ConfigError, match=r"broken\.py fails: SystemExit: 0"):
        get_reward(RewardSpec(f"{broken}:reward"))


FAULTS: Mapping[str, tuple[str | None, str]] = {
    "raises": ("error", "KeyError: 'no such thing' (my rewards.py, line 9)"),
    "leaves": ("error", "SystemExit: 0 (my rewards.py, line 11)"),
    "dies": ("outage", "its process died (signal 9)"),
    "nan": ("error", "it returned nan, and a finite number is wanted"),
    "huge": ("error", "it returned 1e+300, and a finite number is wanted"),
    "text": ("error", "it returned 'many', and a number is wanted"),
    "none": ("error", "it returned None, and a number is wanted"),
    "hangs": ("timeout", "no reply within 1.5 s"),
    "sleeps": ("timeout", "no reply within 1.5 s"),
}


def test_a_function_that_fails_harms_no_other_response(users: str, capfd: pytest.CaptureFixture[str]) -> None:
    good = ["a", "bb", "ccc\n", "dddd \ud800", '"', ""]
    responses = [each for pair in zip([*FAULTS], [*good, "x", "y", "z"], strict=True) for each in pair] + [
        "end"
    ]
    pool = pool_of(users, 3, 1.5)
    try:
        for _ in range(2):
            scores = scored(pool, [(response, "answer") for response in responses])
            for response, score in zip(responses, scores, strict=True):
                expected = Score(None, *FAULTS[response]) if response in FAULTS else Score(len(response) / 8)  # type: ignore[arg-type]
                assert score == expected, response
        assert pool.score([]) == []
        alive = [process.child.pid for process in pool._processes]
    finally:
        pool.close()
    for pid in alive:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, signal.SIG_DFL)
    said = capfd.readouterr()
    assert "judging end" in said.err and not said.out


TELLING = """
import logging, os, subprocess, sys

def reward(response, answer):
    secret = os.environ["MEGARL_TEST_API_KEY"]
    print("printed", secret)
    sys.stderr.write(f"written {secret}\\n")
    logging.getLogger("careless").warning("logged %s", secret)
    subprocess.run(["sh", "-c", "echo told by a child $MEGARL_TEST_API_KEY"])
    os.write(2, f"in two parts {secret[:9]}".encode())
    os.write(2, f"{secret[9:]} and the end\\n".encode())
    if response == "raises":
        raise ValueError(f"no answer for {secret}")
    if response == "dies":
        os.write(2, f"the last words {secret}".encode())
        os.kill(os.getpid(), 9)
    return 1.0
"""


def test_what_a_function_prints_and_raises_with_holds_no_secret(
    pools: list[RewardPool],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Its process has the environment of the run, since a judge may need a key of it."""
    secret = "planted-secret-of-a-judge"
    monkeypatch.setattr(redaction, "_learned", set())
    monkeypatch.setenv("MEGARL_TEST_API_KEY", secret)
    (tmp_path / "telling.py").write_text(TELLING)
    pools.append(pool_of(f"{tmp_path / 'telling.py'}:reward", 2, 20.0))
    scores = scored(pools[0], [(response, "") for response in ("good", "raises", "dies", "good")])
    pools[0].close()
    assert [score.message for score in scores[1:3]] == [
        "ValueError: no answer for *** (telling.py, line 13)",
        "its process died (signal 9)",
    ]
    said = capfd.readouterr()
    assert secret not in said.err + said.out and not said.out
    for line in (
        "printed ***",
        "written ***",
        "logged ***",
        "told by a child ***",
        "in two parts *** and the end",
        "the last words ***",
    ):
        assert line in said.err, line


def test_nobody_reads_on_a_command_line_where_a_scorer_is(pools: list[RewardPool]) -> None:
    """Whoever is on the machine may read command lines, and an address may hold a key."""
    url = "http://127.0.0.1:9/judge?api_key=planted-secret"
    pools.append(RewardPool([RewardSpec("http", {"url": url, "timeout_s": 5.0, "attempts": 1})], 2))
    [score] = pools[0].score([(0, Task("a", "b"))])
    assert score.fault == "outage" and "refused" in score.message
    for process in pools[0]._processes:
        words = Path(f"/proc/{process.child.pid}/cmdline").read_bytes()
        assert b"reward_pool" in words and b"secret" not in words


@pytest.fixture
def pools() -> Iterator[list[RewardPool]]:
    """Those that are put in are closed in the end."""
    made: list[RewardPool] = []
    yield made
    for pool in made:
        pool.close()


def wait_until_heard(processes: Sequence[Any]) -> None:
    """Until each process has said something that nobody has read yet."""
    for process in processes:
        with selectors.DefaultSelector() as selector:
            selector.register(process.output, selectors.EVENT_READ)
            assert selector.select(120)


def test_a_driver_that_comes_late_takes_what_is_there(
    users: str, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes have long been ready, and answers long been there, when the driver next looks."""
    pools.append(pool_of(users, 2, 5.0))
    wait_until_heard(pools[0]._processes[1:])
    monkeypatch.setattr(reward_pool, "START_SECONDS", 0.0)
    late = 0.0
    clock, wait = time.monotonic, pools[0]._wait_for_news

    def hold_up() -> Any:
        nonlocal late
        wait_until_heard([process for process in pools[0]._processes if process.given])
        late += 1000.0
        return wait()

    monkeypatch.setattr(reward_pool, "time", SimpleNamespace(monotonic=lambda: clock() + late))
    monkeypatch.setattr(pools[0], "_wait_for_news", hold_up)
    assert [score.value for score in scored(pools[0], [("a", ""), ("bb", "")])] == [1 / 8, 2 / 8]


def test_an_answer_is_taken_for_its_own_task_alone(users: str, pools: list[RewardPool]) -> None:
    """Also where a function forks, and the child comes back from it."""
    pools.append(pool_of(users, 1, 5.0))
    responses = ["a", "forks", "bb", "reads", "ccc"]
    for _ in range(2):
        assert [score.value for score in scored(pools[0], [(each, "") for each in responses])] == [
            1 / 8,
            5 / 8,
            2 / 8,
            1.0,
            3 / 8,
        ]


def test_a_process_that_does_not_read_is_out_of_time(users: str, pools: list[RewardPool]) -> None:
    """More than a pipe holds is sent to it, and the driver does not wait for the pipe."""
    pools.append(pool_of(users, 1, 0.5))
    assert scored(pools[0], [("a", "")]) == [Score(1 / 8)]
    os.kill(pools[0]._processes[0].child.pid, signal.SIGSTOP)
    assert scored(pools[0], [("b" * 10**6, ""), ("cc", "")]) == [
        Score(None, "timeout", "no reply within 0.5 s"),
        Score(2 / 8),
    ]
    assert scored(pools[0], [("b" * 10**6, "")]) == [Score(10**6 / 8)]


def test_a_process_that_died_of_something_else_costs_no_response(
    users: str, pools: list[RewardPool], tmp_path: Path
) -> None:
    pools.append(pool_of(users, 1, 5.0))
    child = pools[0]._processes[0].child
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    assert scored(pools[0], [("a", ""), ("dies once", str(tmp_path / "died"))]) == [
        Score(1 / 8),
        Score(9 / 8),
    ]


@sampled(1)
@pytest.mark.parametrize("kills", [2, 3])
def test_a_process_that_is_killed_while_it_starts_is_replaced(
    kills: int, users: str, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice in a row; a third one is a fault of what is started."""
    pools.append(pool_of(users, 1, 5.0))
    started, begin = list[Any](), pools[0]._started

    def start_or_die() -> Any:
        started.append(begin())
        if len(started) <= kills:
            os.kill(started[-1].child.pid, signal.SIGKILL)
        return started[-1]

    monkeypatch.setattr(pools[0], "_started", start_or_die)
    os.kill(pools[0]._processes[0].child.pid, signal.SIGKILL)
    if kills < reward_pool.STARTS:
        assert scored(pools[0], [("a", ""), ("bb", "")]) == [Score(1 / 8), Score(2 / 8)]
        assert len(started) == kills + 1
        return
    with pytest.raises(RewardError, match="ended before it was ready, with signal 9"):
        scored(pools[0], [("a", "")])


def test_a_pool_that_cannot_be_used_says_so(users: str, pools: list[RewardPool]) -> None:
    with pytest.raises(ValueError, match="a pool of 0 processes"):
        pool_of(users, 0, 1.0)
    pools.append(pool_of(users, 1, 1.0))
    pools[0].close()
    with pytest.raises(StateError, match="the pool of rewards is closed"):
        scored(pools[0], [("a", "")])


def test_a_library_that_has_changed_is_not_a_model_that_is_wrong(
    pools: list[RewardPool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "math_verify").mkdir()
    (tmp_path / "math_verify" / "errors.py").write_text("class TimeoutException(BaseException): ...")
    (tmp_path / "math_verify" / "__init__.py").write_text(
        "def parse(text): ...\ndef verify(gold, target): ..."
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pools.append(pool_of("math_verify", 1, 5.0))
    with pytest.raises(ConfigError, match="says that 1 is not 1"):
        scored(pools[0], [(r"\boxed{1}", "1")])


@sampled(1)
@pytest.mark.parametrize("argument", ["response", "answer"])
def test_a_function_cannot_change_what_it_is_given(
    argument: str, tmp_path: Path, environments: list[SingleTurn]
) -> None:
    path = tmp_path / "greedy.py"
    path.write_text(
        f"def reward(response, answer):\n    {argument} += '!'\n    return len(response + answer)"
    )
    environments.append(SingleTurn(section(f"{path}:reward")))
    given = turn("aa", "bbb")
    assert environments[0].step(given).rewards == environments[0].step(given).rewards == [9.0, 10.0]
    assert (given.responses, given.records[0].answer) == (("aa", "bbb"), "answer")


def records(count: int) -> list[Example]:
    return [Example(7 + row, (1, 2), (3,), "answer") for row in range(count)]


def section(reward: str | None, **changes: Any) -> dict[str, Any]:
    defaults = {
        "environment": "single_turn",
        "strip": True,
        "processes": 2,
        "timeout_s": 1.5,
        "on_error": "raise",
        "on_timeout": "zero",
    }
    return {**defaults, "options": {}, "reward": reward, **changes}


def turn(*responses: str) -> Turn:
    return Turn(records(len(responses)), responses, [[5]] * len(responses), [None] * len(responses))


@pytest.fixture
def environments() -> Iterator[list[SingleTurn]]:
    """Those that are put in are closed in the end."""
    made: list[SingleTurn] = []
    yield made
    for environment in made:
        environment.close()


def test_what_becomes_of_a_response_without_a_reward(
    users: str, environments: list[SingleTurn], caplog: pytest.LogCaptureFixture
) -> None:
    environments.append(SingleTurn(section(users)))
    with pytest.raises(
        RewardError,
        match=r"record 8: no reward, KeyError: 'no such thing'.*ends in 'raises'.*set env\.on_error to zero "
        r"or mask",
    ):
        environments[0].step(turn("aaaa", "raises"))
    result = environments[0].step(turn("aaaa", "sleeps"))
    assert (result.rewards, result.masked, result.metrics) == (
        [0.5, 0.0],
        [False, False],
        {"reward_errors": 0, "reward_timeouts": 1},
    )
    assert "record 8: no reward, no reply within 1.5 s" in caplog.text and "it counts as 0" in caplog.text
    environments.append(SingleTurn(section(users, on_error="mask", on_timeout="raise")))
    result = environments[1].step(turn("nan", "aaaa", "dies"))
    assert (result.rewards, result.masked, result.metrics["reward_errors"]) == (
        [0.0, 0.5, 0.0],
        [True, False, True],
        2,
    )
    with pytest.raises(RewardError, match=r"env\.on_timeout"):
        environments[1].step(turn("sleeps"))
    environments.append(SingleTurn(section(users, on_error="zero")))
    assert environments[2].step(turn("raises")).masked == [False]
    assert (
        environments[2].fault_of_reference("") == "it is empty"
        and environments[2].fault_of_reference("1") is None
    )
    assert find_faults(environments[2], 5.0)("trouble") == "fault_of_reference fails on it: OSError: no disk"
    exact = SingleTurn(section("exact_match"))
    assert exact.step(turn(" answer", "x")).rewards == [1.0, 0.0]
    assert [exact.fault_of_reference(answer) for answer in ("", " \n", "0")] == [
        "it is empty",
        "it is empty",
        None,
    ]
    assert SingleTurn(section("math_verify")).fault_of_reference("") is not None


def test_an_environment_of_ones_own(tmp_path: Path) -> None:
    path = tmp_path / "environment.py"
    path.write_text(
        "class Mine:\n    def __init__(self, section): self.section = section\n    def step(self, turn): "
        "...\n    def close(self): ...\n"
        "    def fault_of_reference(self, answer): return None\nclass Half:\n    def step(self, turn): ...\n"
    )
    made: Any = make_environment(section(None, environment=f"{path}:Mine", options={"depth": 3}))
    assert made.section["options"] == {"depth": 3}
    with pytest.raises(ConfigError, match=r"env\.environment = .*it lacks fault_of_reference, close"):
        make_environment(section(None, environment=f"{path}:Half"))
    path = tmp_path / "misspelt.py"
    path.write_text(
        "import functools\nfrom megarl.rollout.message_env import MessageEnv\nclass Steps(MessageEnv): ...\n"
        "class Partial(MessageEnv): step = functools.partial(print)\n"
    )
    kind: Any = environment_class(f"{path}:Partial")
    assert kind.step.func is print
    with pytest.raises(ConfigError, match=r"it lacks step\. Fix: define it"):
        make_environment(section(None, environment=f"{path}:Steps"))


class Answering:
    """An environment that returns what it is told to."""

    def __init__(self, result: EnvironmentReturn) -> None:
        self.result = result

    def step(self, turn: Turn) -> EnvironmentReturn:
        return self.result


def answered(result: Any, rows: int) -> Any:
    """The samples of so many responses that an environment answers in this way."""
    environment = SimpleNamespace(step=lambda turn: result)
    collector, *_ = collector_of(environment, lambda prompt, seed: [5], turns=1)
    return collector.collect(
        [Example(place, (4,), (), "") for place in range(rows)], 1, list(range(rows))
    ).samples


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (EnvironmentReturn([1.0], [True, True], [False, False]), r"\{'rewards': 1\} for 2 responses"),
        (
            EnvironmentReturn([1.0, 1.0], [True, False], [False, False]),
            "continues after a response, but a conversation has only one turn",
        ),
        (EnvironmentReturn([1.0, float("inf")], [True, True], [False, False]), "the reward inf"),
        (EnvironmentReturn([1.0, float("nan")], [True, True], [False, False]), "the reward nan"),
        (
            EnvironmentReturn([1, torch.tensor(float("nan"))], [True, True], [False, False]),
            r"the reward tensor\(nan\)",
        ),  # type: ignore[list-item]
        (EnvironmentReturn([1.0, 1e300], [True, True], [False, False]), r"the reward 1e\+300"),
        (EnvironmentReturn([1.0, None], [True, True], [True, False]), "the reward None"),
        (EnvironmentReturn([1.0, "1"], [True, True], [False, False]), ("the reward '1'")),  # type: ignore[list-item]
        (
            EnvironmentReturn([1.0, 1.0], [True, True], [0.4, False]),
            (
                r"masked = "
                r"0\.4"
            ),
        ),  # type: ignore[list-item]
        ([1.0, 1.0], r"returned a list\. Fix: return an EnvironmentReturn"),
    ],
)
def test_what_an_environment_returns_has_to_fit(result: EnvironmentReturn, message: str) -> None:
    with pytest.raises(BatchError, match=message):
        answered(result, 2)


def test_numbers_of_any_kind_are_rewards() -> None:
    given = [1, True, 0.5, np.float32(0.25), torch.tensor(2.0), None]
    samples = answered(EnvironmentReturn(given, [True] * 6, [False] * 4 + [np.True_, True]), 6)  # type: ignore[arg-type,list-item]
    assert samples["reward"].tolist() == [1.0, 1.0, 0.5, 0.25, 2.0, 0.0] and samples["masked"].tolist() == [
        False
    ] * 4 + [True, True]


@sampled(1)
@pytest.mark.parametrize("strange", [b'[99, "value", [7.0, null], 0.1]\n', b"not JSON\n", b"[1]\n", b"7\n"])
def test_a_process_that_says_what_nobody_asked_for_is_not_believed(
    users: str, pools: list[RewardPool], strange: bytes
) -> None:
    pools.append(pool_of(users, 1, 5.0))
    pools[0]._processes[0]._received += strange
    assert scored(pools[0], [("a", "")]) == [Score(1 / 8)]


def test_a_function_that_writes_to_or_closes_what_is_not_its_own_is_no_hang(
    users: str, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_pool, "GRACE_SECONDS", 0.2)
    pools.append(pool_of(users, 2, 5.0))
    scores = scored(pools[0], [(each, "") for each in ("a", "babbles", "bb", "closes", "ccc")])
    assert [score.value for score in scores] == [1 / 8, None, 2 / 8, None, 3 / 8]
    assert {score.message for score in scores if score.fault == "error"} == {
        "its process died (its output was closed or invalid)"
    }


def test_responses_that_lie_before_a_process_that_is_ended_lose_nothing(
    users: str, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has its score, in any order of good responses and such that hang or kill."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    monkeypatch.setattr(reward_pool, "GRACE_SECONDS", 0.2)
    pools.append(pool_of(users, 2, 1.0))
    most, wait = 0, pools[0]._wait_for_news

    def look() -> Any:
        nonlocal most
        most = max(most, *(len(process.given) for process in pools[0]._processes))
        return wait()

    monkeypatch.setattr(pools[0], "_wait_for_news", look)
    later = [*draw.choices(["a", "bb", "ccc"], k=100), "dies", "hangs"]
    responses = ["a"] * 20 + draw.sample(later, len(later))
    scores = scored(pools[0], [(each, "") for each in responses])
    expected = {"dies": (None, "outage"), "hangs": (None, "timeout")}
    assert [(score.value, score.fault) for score in scores] == [
        expected.get(each, (len(each) / 8, None)) for each in responses
    ], seed
    assert most > 2, seed


@slow
def test_the_time_of_a_response_begins_when_those_before_it_are_answered(
    users: str, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Together they take longer than one may."""
    monkeypatch.setattr(reward_pool, "GRACE_SECONDS", 0.2)
    monkeypatch.setattr(reward_pool, "_AHEAD_SECONDS", 60.0)
    pools.append(pool_of(users, 1, 1.0))
    pools[0]._seconds[0] = 0.0
    responses = ["naps"] * 10 + ["a"] * 20
    assert [score.value for score in scored(pools[0], [(each, "") for each in responses])] == [
        len(each) / 8 for each in responses
    ]


def test_slow_responses_do_not_lie_before_a_process(
    users: str, pools: list[RewardPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other process would be idle in the end, while they wait."""
    pools.append(pool_of(users, 2, 5.0))
    pools[0]._seconds[0] = 1.0
    given: list[int] = []
    give = pools[0]._give

    def count(process: Any, *arguments: Any) -> None:
        give(process, *arguments)
        given.append(len(process.given))

    monkeypatch.setattr(pools[0], "_give", count)
    assert scored(pools[0], [("naps", "")] * 8) == [Score(4 / 8)] * 8
    assert max(given) == 1


FAILING = """
import os, signal, socket, urllib.request

def reward(response, answer):
    if response == "refused":
        urllib.request.urlopen("http://127.0.0.1:9/judge", timeout=5)
    if response == "wrapped":
        try:
            socket.create_connection(("127.0.0.1", 9))
        except OSError:
            raise ValueError("the judge is away") from None
    if response == "unknown host":
        raise socket.gaierror(-2, "Name or service not known")
    if response == "no module":
        import megarl_no_such_module
    if response == "full disk":
        raise OSError(28, "No space left on device")
    if response == "said":
        from megarl.errors import RewardOutageError
        raise RewardOutageError("the judge is being updated")
    if response == "killed":
        os.kill(os.getpid(), signal.SIGTERM)
    if response == "runs an import":
        exec("import megarl_no_such_module")
    if response == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if response == "leaves":
        os._exit(3)
    if response == "long name":
        open("a" * 5000)
    if response == "number":
        return int(response)
    return None if response == "none" else 0.5
"""
OF_NO_RESPONSE = ["refused", "wrapped", "unknown host", "no module", "full disk", "said", "killed"]
OF_A_RESPONSE = ["runs an import", "crashes", "leaves", "long name", "number", "none"]


@pytest.fixture
def failing(tmp_path: Path) -> str:
    (tmp_path / "failing.py").write_text(FAILING)
    return f"{tmp_path / 'failing.py'}:reward"


def test_by_default_a_response_that_breaks_the_function_scores_0_and_what_it_cannot_cause_is_masked(
    failing: str, environments: list[SingleTurn], caplog: pytest.LogCaptureFixture
) -> None:
    filled = complete({**raw_grpo(), "env": {"reward": failing, "processes": 2}})["env"]
    assert filled["on_error"] == "zero"
    environments.append(SingleTurn(filled))
    responses = ["good", *OF_NO_RESPONSE, *OF_A_RESPONSE]
    result = environments[0].step(turn(*responses))
    masked = [response for response, is_masked in zip(responses, result.masked, strict=True) if is_masked]
    assert masked == OF_NO_RESPONSE
    assert result.rewards == [0.5, *[0.0] * (len(responses) - 1)]
    assert result.metrics == {"reward_errors": len(responses) - 1, "reward_timeouts": 0}


def test_what_no_response_can_cause_counts_as_0_for_none(
    failing: str, environments: list[SingleTurn]
) -> None:
    environments += [
        SingleTurn(section(failing, on_error=decision)) for decision in ("zero", "mask", "raise")
    ]
    for environment in environments[:2]:
        assert environment.step(turn("good", "refused")).masked == [False, True]
    with pytest.raises(
        RewardError, match=r"record 8: no reward, URLError: .*set env\.on_error to zero or mask"
    ):
        environments[2].step(turn("good", "refused"))


def test_a_group_that_fails_as_a_whole_is_held_against_the_function_once_a_step_would_have(
    failing: str, environments: list[SingleTurn]
) -> None:
    """Where a call has the responses to one prompt, whose record may be at fault."""
    environments.append(SingleTurn(section(failing, on_error="mask")))
    environments[0].judges_groups(step_rows=6)
    for _ in range(2):
        assert environments[0].step(turn("number", "number")).masked == [True, True]
        assert environments[0].step(turn("number", "number")).masked == [True, True]
        assert environments[0].step(turn("good", "number")).masked == [False, True]
    with pytest.raises(RewardError, match="failed on each of the 2 responses of a batch"):
        for _ in range(3):
            environments[0].step(turn("number", "number"))


@pytest.mark.parametrize(
    "responses", [["number"] * 3, ["no module"] * 2, ["none", "number"], ["leaves", "crashes"]]
)
@pytest.mark.parametrize("decision", ["zero", "mask"])
def test_a_function_that_fails_on_every_response_ends_the_run(
    responses: list[str], decision: str, failing: str, environments: list[SingleTurn]
) -> None:
    environments.append(SingleTurn(section(failing, on_error=decision)))
    with pytest.raises(
        RewardError,
        match=rf"^the reward \S+:\w+ failed on each of the {len(responses)} responses of a batch.*"
        "The first, of record 7: ",
    ) as caught:
        environments[0].step(turn(*responses))
    traced = {"number": "return int(response)", "no module": "import megarl_no_such_module"}.get(responses[0])
    assert traced is None or (
        traced in str(caught.value) and "Traceback (most recent call last)" in str(caught.value)
    )


def test_an_outage_on_every_response_is_waited_out_for_a_while(
    failing: str, environments: list[SingleTurn]
) -> None:
    environments.append(SingleTurn(section(failing, on_error="zero")))
    for batch in (("refused", "said"), ("refused",)):
        assert all(environments[0].step(turn(*batch)).masked)
    with pytest.raises(RewardError, match="no response of 3 batches in a row could be scored"):
        environments[0].step(turn("refused", "refused"))
