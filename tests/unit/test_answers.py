"""Verifiers that find a final answer in a response: GSM8K, multiple choice, DAPO's rule, and forms, against
tables by hand."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megarl.config import check
from megarl.config.validate import validate_config
from megarl.errors import ConfigError
from megarl.rollout import answers
from megarl.rollout.environment import Turn
from megarl.rollout.reward_pool import RewardPool
from megarl.rollout.rewards import REWARDS, RewardSpec, Task, get_reward
from megarl.rollout.single_turn import SingleTurn
from megarl.time_limit import time_limit
from tests.tables import read_table
from tests.unit.config_samples import complete, raw_grpo

# their columns are written there
TABLES: dict[str, list[list[Any]]] = read_table("final_answers.yaml")


@pytest.mark.parametrize(("response", "answer", "strict", "flexible"), TABLES["gsm8k"])
def test_gsm8k(response: str, answer: str, strict: float, flexible: float) -> None:
    assert answers.gsm8k(response, answer) == strict
    assert answers.gsm8k(response, answer, "flexible") == flexible
    assert answers.fault_of_gsm8k(answer) is None


@pytest.mark.parametrize(("response", "letter"), TABLES["letters"])
def test_multichoice(response: str, letter: str | None) -> None:
    for reference in ("A", "B", "(C)", "I"):
        assert answers.multichoice(response, reference) == float(reference.strip("()") == letter), reference


@pytest.mark.parametrize(
    ("begin", "repeated", "end"),
    [
        ("", "\\boxed{", ""),
        ("", "\\boxed{ ", "\\boxed{B}"),
        ("answer is ", " ", "x"),
        ("Answer: B or ", " ", "x"),
        ("#### 7", " ", "x"),
        ("#### 7 or ", " ", "x"),
        ("7", " ", "x 8"),
        ("7 or maybe", " ", "x 8"),
    ],
)
def test_the_time_to_score_grows_as_the_length(begin: str, repeated: str, end: str) -> None:
    """A response of 200,000 characters takes milliseconds, and took minutes when time grew as the square."""
    response = begin + repeated * (200_000 // len(repeated)) + end
    with time_limit(20.0):
        assert answers.multichoice(response, "B") == float("B" in begin + end)
        for method in ("strict", "flexible"):
            answers.gsm8k(response, "#### 7", method)


@pytest.mark.parametrize(("response", "answer", "score"), TABLES["dapo"])
def test_the_rule_of_dapo(response: str, answer: str, score: float) -> None:
    assert answers.dapo_match(response, answer) == score


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>a\nb</think>\nc", 1),
        ("\n<think></think>c", 1),
        ("<think>a</think>", 0),
        ("<think>a</think> \n", 0),
        ("c<think>a</think>c", 0),
        ("<think>a<think>b</think>c", 0),
        ("<think>a</think>b</think>c", 0),
        ("</think>a<think>c", 0),
        ("a</think>c", 0),
        ("", 0),
    ],
)
def test_a_response_that_thinks_first(response: str, score: float) -> None:
    assert answers.thinks_first(response) == score
    assert get_reward(RewardSpec("format")).judge(Task(response, "")) == score


# response after a prompt that ends in <think>, score
OPENED_BY_PROMPT = [
    ("two and two\n</think>\n\n4", 1),
    ("</think>4", 1),
    ("two and two\n</think>\n", 0),
    ("two and two 4", 0),
    ("a</think>b</think>c", 0),
    ("<think>a</think>c", 0),
    ("", 0),
]


@pytest.mark.parametrize(("response", "score"), OPENED_BY_PROMPT)
def test_thinking_that_the_prompt_has_opened(response: str, score: float) -> None:
    reward = get_reward(RewardSpec("format"))
    for prompt in ("user: 2+2?\nassistant: <think>\n", "<think>", "a<think> b</think>\n<think>"):
        assert reward.judge(Task(response, "", prompt=prompt)) == score, prompt
    # neither a closed thinking nor a question about the tag opens it
    for prompt in ("", "<think>\n\n</think>\n\n", "What does <think> mean?", "user: <think>\nassistant:"):
        assert reward.judge(Task(response, "", prompt=prompt)) == answers.thinks_first(response), prompt


def test_the_environment_hands_the_prompt_to_the_format(environments: list[SingleTurn]) -> None:
    config = raw_grpo()
    config["env"] = {
        "rewards": {"form": {"reward": "format"}, "right": {"reward": "exact_match", "weight": 10}},
        "processes": 1,
    }
    environments.append(SingleTurn(complete(config)["env"]))
    record: Any = SimpleNamespace(index=0, answer="4", env_name=None, fields={})
    responses = ["two and two\n</think>\n\n4"] * 2
    turn = Turn([record] * 2, responses, [[1]] * 2, [None] * 2, prompts=["2+2? <think>\n", "2+2?"])
    assert list(environments[0].step(turn).rewards) == [1.0, 0.0]


def test_references_that_say_nothing_are_found() -> None:
    for reference in ("", "seventy-two", "#### ", "#### 1/2", "72 #### x"):
        assert answers.fault_of_gsm8k(reference) is not None, reference
    for reference in ("", "b", "AB", "A and B", "1"):
        assert answers.fault_of_choice(reference) is not None, reference
    assert answers.fault_of_text("dollars") is not None and answers.fault_of_text("x = 3") is None


@pytest.fixture
def environments() -> Iterator[list[SingleTurn]]:
    """Those that are put in are closed in the end."""
    made: list[SingleTurn] = []
    yield made
    for environment in made:
        environment.close()


def test_verifiers_by_name_and_option(environments: list[SingleTurn]) -> None:
    """Each with its options, all in one pool, through the configuration."""
    config = raw_grpo()
    rewards = {
        "math": {},
        "dapo": {"reward": "math", "math_verify_impl": "dapo_math_verify", "weight": 10},
        "gsm8k": {"weight": 100},
        "last": {"reward": "gsm8k", "gsm8k_method": "flexible", "weight": 1000},
        "form": {"reward": "format", "pattern": r"<a>.*</a>", "weight": 0.5},
    }
    config["env"] = {"rewards": rewards, "processes": 1}
    filled = complete(config)
    assert check(filled) == []
    environments.append(SingleTurn(filled["env"]))
    responses = [r"\boxed{12}", "Answer: 12", "#### 12", "<a>\n12\n</a>", "none"]
    records: list[Any] = [
        SimpleNamespace(index=row, answer="12", env_name=None, fields={}) for row in range(5)
    ]
    result = environments[0].step(Turn(records, responses, [[1]] * 5, [None] * 5))
    assert list(result.rewards) == [1001.0, 1011.0, 1101.0, 1001.5, 0.0]
    assert (
        environments[0].fault_of_reference("x^2")
        == "gsm8k: no number follows ####, and it is not a number itself"
    )


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"reward": "gsm8k", "math_verify_impl": "dapo_math_verify"}, "the reward 'gsm8k' does not read it"),
        ({"reward": "math", "math_verify_impl": "sympy"}, r"env\.math_verify_impl = 'sympy'"),
        (
            {"reward": "format", "pattern": "(a"},
            r"env\.pattern = '\(a': it is not a valid regular expression: missing \)",
        ),
        ({"reward": None, "gsm8k": {"gsm8k_method": "loose"}}, r"env\.gsm8k\.gsm8k_method = 'loose'"),
    ],
)
def test_options_that_make_no_sense_are_refused(env: dict[str, Any], message: str) -> None:
    config = raw_grpo()
    config["env"] |= env
    with pytest.raises(ConfigError, match=message):
        validate_config(config)


def test_a_pattern_that_takes_for_ever_scores_0() -> None:
    """The engine of regular expressions listens to no alarm, so the process is ended, and another one goes
    on."""
    pool = RewardPool([RewardSpec("format", {"pattern": "(a+)+b"}, timeout_s=0.5)], 1)
    try:
        late, good = pool.score([(0, Task("a" * 60, "")), (0, Task("aab", ""))])
    finally:
        pool.close()
    assert (late.fault, late.value, good.value) == ("timeout", None, 1.0)


def test_the_names_of_nemo_rl_are_there(tmp_path: Path) -> None:
    """``env.math`` with its number of workers and implementation."""
    config = raw_grpo()
    config["env"] = {"math": {"num_workers": 8, "math_verify_impl": "hf_math_verify"}}
    filled = complete(config)
    assert check(filled) == [] and filled["env"]["math"]["processes"] == 8
    assert {"math", "gsm8k", "multichoice", "exact_match", "format"} <= set(REWARDS)
