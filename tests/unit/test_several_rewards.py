"""Several rewards of a sample: weights, parts, what cannot be scored, what judges right from wrong,
environments with names."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megarl.config import check
from megarl.config.validate import validate_config
from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import BatchError, ConfigError, RewardError
from megarl.rollout import collector
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.environments import find_faults, make_environment
from megarl.rollout.episodes import Episode, check_answer
from megarl.rollout.rewards import RewardSpec, get_reward, overlong_penalty
from megarl.rollout.single_turn import SingleTurn
from megarl.rollout.trajectory import Segment
from megarl.run.run import run
from tests.tables import read_table
from tests.tiers import slow
from tests.unit.config_samples import complete, raw_grpo
from tests.unit.driver_runs import PolicyMaker, make_config, rows

USERS = """
import time

def vowels(response, answer):
    if response.startswith("raises"):
        raise KeyError(answer)
    if response.startswith("sleeps"):
        time.sleep(60)
    return sum(letter in "aeiou" for letter in response) / 3

def judged(prompt, response, record):
    assert isinstance(record, dict)
    said = {"acc": {"score": 1.0, "acc": 2.0}, "none": {"acc": 1.0}}
    return said.get(response, {"score": len(prompt) - record["index"], "acc": record["level"] == response})
"""


@pytest.fixture
def users(tmp_path: Path) -> str:
    """Path of a user's rewards, to be followed by a name."""
    path = tmp_path / "users.py"
    path.write_text(USERS)
    return f"{path}:"


@pytest.fixture
def made() -> Iterator[list[Any]]:
    """Environments that are put in are closed in the end."""
    environments: list[Any] = []
    yield environments
    for environment in environments:
        environment.close()


def section(rewards: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    defaults = {
        "environment": "single_turn",
        "strip": True,
        "processes": 2,
        "timeout_s": 1.0,
        "on_error": "mask",
        "on_timeout": "zero",
    }
    return {**defaults, "options": {}, "reward": None, "rewards": rewards, **changes}


def turn(
    responses: Sequence[str],
    answer: str = "abc",
    names: Sequence[str | None] = (),
    prompts: Sequence[str] = (),
) -> Turn:
    """A batch; a response has as many tokens as characters."""
    names = names or [None] * len(responses)
    records: list[Any] = [
        SimpleNamespace(index=row, answer=answer, env_name=name, fields={"level": "hard"})
        for row, name in enumerate(names)
    ]
    return Turn(
        records, responses, [[5] * len(response) for response in responses], [None] * len(responses), prompts
    )


def test_a_sample_gets_the_sum_of_rewards_times_weights(users: str, made: list[Any]) -> None:
    """Against a loop, with weights and responses of a random seed."""
    seed = random.randrange(2**32)
    draw = random.Random(seed)
    weights = {"right": draw.uniform(-2, 2), "vowels": draw.uniform(-2, 2), "short": draw.uniform(-2, 2)}
    made.append(
        SingleTurn(
            section(
                {
                    "vowels": {"reward": f"{users}vowels", "weight": weights["vowels"]},
                    "short": {
                        "reward": "overlong",
                        "weight": weights["short"],
                        "max_response_length": 9,
                        "overlong_buffer_length": 4,
                    },
                    "right": {"reward": "exact_match", "weight": weights["right"]},
                }
            )
        )
    )
    responses = ["abc", *("".join(draw.choices("abcde ", k=draw.randrange(13))) for _ in range(20))]
    expected = []
    for response in responses:
        parts = {
            "vowels": sum(letter in "aeiou" for letter in response) / 3,
            "short": 0.0 if len(response) <= 5 else -1.0 if len(response) > 9 else (5 - len(response)) / 4,
            "right": 1.0 if response.strip() == "abc" else 0.0,
        }
        expected.append((sum(weights[name] * value for name, value in parts.items()), parts))
    result = made[0].step(turn(responses))
    assert result.rewards == pytest.approx([reward for reward, _ in expected], abs=1e-12), seed
    assert {name: list(column) for name, column in result.parts.items()} == {
        name: pytest.approx([parts[name] for _, parts in expected]) for name in ("vowels", "short", "right")
    }, seed
    assert result.masked == [False] * 21 and not any(result.metrics.values())
    # the first that tells right from wrong is the user's, which says nothing of accuracy beside its number
    assert list(result.accuracies) == pytest.approx([parts["vowels"] for _, parts in expected]), seed


@slow
def test_what_cannot_be_scored_is_masked_and_what_takes_too_long_scores_0(
    users: str, made: list[Any]
) -> None:
    rewards = {"right": {"reward": "exact_match"}, "vowels": {"reward": f"{users}vowels", "weight": 0.5}}
    made.append(SingleTurn(section(rewards)))
    result = made[0].step(turn(["abc", "raises", "sleeps", "aie"]))
    assert (list(result.rewards), list(result.masked)) == (
        [1 + 0.5 / 3, 0.0, 0.0, 0.5],
        [False, True, False, False],
    )
    assert result.parts == {"right": [1.0, None, 0.0, 0.0], "vowels": [1 / 3, None, 0.0, 1.0]}
    assert result.metrics == {
        **{"reward_errors": 1, "reward_errors/right": 0, "reward_errors/vowels": 1},
        **{"reward_timeouts": 1, "reward_timeouts/right": 0, "reward_timeouts/vowels": 1},
    }
    # the other rewards of a sample that took too long count
    made.append(
        SingleTurn(
            section({**rewards, "long": {"reward": "length", "weight": -1.0, "max_response_length": 12}})
        )
    )
    assert made[1].step(turn(["sleeps"])).rewards == [0.5]


def test_a_function_that_keeps_failing_is_said_in_a_line_a_batch(
    users: str, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """The first ones one by one, with what becomes of a policy whose bad responses are left out; once, and
    not of a built-in reward."""
    made.append(SingleTurn(section(reward=f"{users}vowels")))
    made[0].step(turn(["a", "raises", "raises"]))
    assert (len(caplog.messages), caplog.text.count("neither rewarded nor punished")) == (3, 1)
    caplog.clear()
    made[0].step(turn(["raises", "a", "raises", "raises"]))
    assert caplog.messages == [
        caplog.messages[0],
        (
            "2 further rewards of this batch could not be computed, the first of record 2: KeyError: 'abc' "
            "(users.py, line 6)"
        ),
    ]
    caplog.clear()
    made[0].step(turn(["a", "raises"]))
    said = (
        "1 rewards of this batch could not be computed, the first of record 1: KeyError: 'abc' "
        "(users.py, line 6)"
    )
    assert caplog.messages == [said], "none was told one by one before"


def test_each_reward_may_take_its_own_time(users: str, made: list[Any], tmp_path: Path) -> None:
    """The limit of one is above what the other has in all, alarm and moment of grace included."""
    path = tmp_path / "slow.py"
    path.write_text("import time\ndef slow(response, answer):\n    time.sleep(1.5)\n    return 1.0\n")
    rewards = {
        "hasty": {"reward": f"{path}:slow", "timeout_s": 0.2},
        "patient": {"reward": f"{path}:slow", "timeout_s": 60.0},
    }
    made.append(SingleTurn(section(rewards)))
    assert made[0].step(turn(["a"])).parts == {"hasty": [0.0], "patient": [1.0]}


def test_a_run_in_which_nothing_can_be_scored_ends(users: str, made: list[Any]) -> None:
    made.append(SingleTurn(section(reward=f"{users}vowels")))
    for batch in (["raises"], ["raises"], ["a", "raises"], ["raises"], ["raises"]):
        assert made[0].step(turn(batch)).masked == [response == "raises" for response in batch]
    with pytest.raises(
        RewardError,
        match=r"no response of 3 batches in a row could be scored; .*fault of the last batch is: KeyError: "
        r"'abc' \(users\.py, line 6\)\. Fix",
    ):
        made[0].step(turn(["raises"]))


def test_a_function_of_prompt_response_and_record(
    users: str, made: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    made.append(SingleTurn(section(reward=f"{users}judged")))
    result = made[0].step(turn(["hard", "easy", "acc", "none"], prompts=["1234", "12", "", ""]))
    assert (list(result.rewards), list(result.masked)) == ([4.0, 1.0, 0.0, 0.0], [False, False, True, True])
    assert list(result.accuracies)[:2] == [1.0, 0.0]
    assert "it returned acc = 2.0, and a number from 0 to 1 is wanted" in caplog.text
    assert "it returned the keys acc, and score is wanted" in caplog.text
    # without texts of prompts
    assert made[0].step(turn(["hard"])).rewards == [0.0]


def test_prompts_are_decoded_where_a_reward_reads_them(users: str, made: list[Any]) -> None:
    class Prompts(Sequence[str]):
        asked = 0

        def __len__(self) -> int:
            return 2

        def __getitem__(self, row: Any) -> Any:
            self.asked += 1
            return "12"

    prompts = Prompts()
    named = {"read": section(reward=f"{users}judged"), "unread": section(reward="exact_match")}
    made.append(make_environment({**section(), **named}))
    made[0].step(turn(["a", "b"], names=["unread", "unread"], prompts=prompts))
    assert prompts.asked == 0
    assert made[0].step(turn(["a", "b"], names=["unread", "read"], prompts=prompts)).rewards == [0.0, 1.0]
    assert prompts.asked == 1


@pytest.mark.parametrize(
    ("length", "penalty"),
    [
        (0, 0.0),
        (79, 0.0),
        (80, 0.0),
        (81, -0.05),
        (90, -0.5),
        (99, -0.95),
        (100, -1.0),
        (101, -1.0),
        (10**6, -1.0),
    ],
)
def test_overlong_penalty(length: int, penalty: float) -> None:
    """Equation 13 with L_max = 100 and L_cache = 20."""
    assert overlong_penalty(length, 100, 20) == pytest.approx(penalty, abs=1e-15)
    assert str(overlong_penalty(0, 100, 20)) == "0.0"


def test_rewards_that_shape_are_no_accuracy(users: str, made: list[Any]) -> None:
    short = {"reward": "length", "max_response_length": 10}
    made.append(SingleTurn(section({"short": short, "right": {"reward": "exact_match", "weight": 3.0}})))
    result = made[0].step(turn(["abc", "b"]))
    assert (list(result.rewards), list(result.accuracies)) == (pytest.approx([2.7, -0.1]), [1.0, 0.0])
    made.append(SingleTurn(section({"short": short})))
    assert list(made[1].step(turn(["abc"])).accuracies) == [-0.3]
    made.append(SingleTurn(section(reward="exact_match")))
    assert made[2].step(turn(["abc"])).accuracies == [] and made[2].step(turn(["abc"])).parts == {}


def test_a_function_of_lists_may_leave_a_response_to_another(tmp_path: Path, made: list[Any]) -> None:
    """As rewards of several tasks do for TRL: the same for each response."""
    (tmp_path / "tasks.py").write_text(
        "def short(completions):\n    return [1.0 if len(text) < 3 else None for text in completions]\n"
        "def long(completions):\n    return [2.0 if 3 < len(text) < 9 else None for text in completions]\n"
    )
    names = {name: {"reward": f"{tmp_path / 'tasks.py'}:{name}"} for name in ("short", "long")}
    made.append(SingleTurn(section(names)))
    result = made[0].step(turn(["ab", "abcd", "much too long"]))
    assert (list(result.rewards), list(result.masked)) == ([1.0, 2.0, 0.0], [False, False, True])
    assert result.parts == {"short": [1.0, None, None], "long": [None, 2.0, None]}
    assert result.accuracies[:2] == [1.0, 2.0] and result.metrics["reward_errors"] == 1
    for _ in range(9):
        assert made[0].step(turn(["ab", "ab"])).masked == [False, False]
    made.append(SingleTurn(section(reward=names["short"]["reward"])))
    assert made[1].step(turn(["ab", "abcd"])).masked == [False, True]


def test_the_data_s_own_index_is_passed_on_and_the_reference(tmp_path: Path, made: list[Any]) -> None:
    (tmp_path / "own.py").write_text(
        "def reward(response, record):\n    return record['index'] + record['answer']"
    )
    made.append(SingleTurn(section(reward=f"{tmp_path / 'own.py'}:reward")))
    asked = turn(["abc"])
    asked.records[0].fields, asked.records[0].answer = {"index": 100, "answer": 5}, 7
    assert made[0].step(asked).rewards == [107]


def test_each_record_meets_the_environment_that_it_names(users: str, made: list[Any]) -> None:
    named = {
        "words": section({"right": {"reward": "exact_match"}, "vowels": {"reward": f"{users}vowels"}}),
        "own": section(reward=f"{users}judged"),
    }
    made.append(make_environment({**section(), **named}))
    result = made[0].step(
        turn(
            ["abc", "hard", "raises", "aie"],
            names=["words", "own", "words", "words"],
            prompts=["1", "22", "333", "4"],
        )
    )
    assert (list(result.rewards), list(result.masked)) == (
        [1 + 1 / 3, 1.0, 0.0, 1.0],
        [False, False, True, False],
    )
    assert {name: list(column) for name, column in result.parts.items()} == {
        "words": [1 + 1 / 3, None, 0.0, 1.0],
        "words/right": [1.0, None, None, 0.0],
        "words/vowels": [1 / 3, None, None, 1.0],
        "own": [None, 1.0, None, None],
    }
    assert list(result.accuracies) == [1.0, 1.0, 0.0, 0.0]
    assert (result.metrics["reward_errors"], result.metrics["reward_errors/vowels"]) == (1, 1)
    with pytest.raises(
        RewardError,
        match=r"record 0 names the environment 'other', but the environments are words, own\. Fix",
    ):
        made[0].step(turn(["a"], names=["other"]))
    with pytest.raises(RewardError, match=r"record 0 names the environment None"):
        made[0].step(turn(["a"]))
    find = find_faults(made[0], 5.0)
    assert find("1", "words") is None and find("1") == "its record names none of words, own"
    assert (
        find("1", "other") == "its record names the environment 'other', but the environments are words, own"
    )
    made.append(make_environment({**section(), "only": section(reward="math_verify")}))
    assert made[1].step(turn([r"\boxed{4}"], answer="4")).rewards == [1.0]
    assert find_faults(made[1], 5.0)("1") is None and "no mathematical" in str(find_faults(made[1], 5.0)(""))


def samples_of(*rewards: float) -> BatchedDataDict[Any]:
    masked = [False] * len(rewards)
    return BatchedDataDict({"reward": torch.tensor(rewards), "masked": torch.tensor(masked)})


def answered(result: EnvironmentReturn, row: int) -> Episode:
    parts = {name: values[row] for name, values in result.parts.items()}
    return Episode(
        Example(row, (), (), ""), [Segment(np.empty(0, np.int64))], last=(result, row), parts=parts
    )


def test_parts_and_accuracies_become_columns_and_means() -> None:
    nan = float("nan")
    result = EnvironmentReturn(
        [1.0, 0.0, 2.0],
        [True] * 3,
        [False, True, False],
        accuracies=[1.0, None, 0.0],
        parts={"a": [3.0, None, 4.0]},
    )
    columns = collector._further_columns([answered(result, row) for row in range(3)])
    assert {name: column.tolist() for name, column in columns.items()} == {
        "accuracy": pytest.approx([1.0, nan, 0.0], nan_ok=True),
        "reward/a": pytest.approx([3.0, nan, 4.0], nan_ok=True),
    }
    first, second = BatchedDataDict(columns), samples_of(1.0, 0.5)
    first["masked"], first["reward/a"][1] = torch.tensor([False, True, False]), 100.0
    second["reward/a"], second["reward/b"] = torch.tensor([5.0, nan]), torch.tensor([nan, nan])
    assert collector.part_metrics([first, second]) == {"reward/a": 4.0}
    assert collector.accuracies_of(first).tolist()[0] == 1.0 and collector.accuracies_of(second).tolist() == [
        1.0,
        0.5,
    ]
    with pytest.raises(BatchError, match=r"returned 1 numbers of reward/a for 3 responses"):
        check_answer(EnvironmentReturn([1.0] * 3, [True] * 3, [False] * 3, parts={"a": [1.0]}), 3)


WRONG: list[tuple[dict[str, Any], str]] = read_table("several_rewards.yaml")["wrong"]


@pytest.mark.parametrize(("env", "message"), WRONG, ids=[message for _, message in WRONG])
def test_rewards_that_make_no_sense_are_refused(env: dict[str, Any], message: str) -> None:
    config = raw_grpo()
    config["env"] |= env
    with pytest.raises(ConfigError, match=message):
        validate_config(config)


def test_an_environment_with_a_name_has_what_stands_around_it() -> None:
    config = raw_grpo()
    config["env"] = {
        "timeout_s": 7.0,
        "num_workers": 3,
        "math": {"num_workers": 2},
        "short": {"rewards": {"exact_match": {"weight": 2}}},
    }
    filled = complete(config)["env"]
    assert check(complete(config)) == []
    assert (filled["math"]["reward"], filled["math"]["processes"], filled["math"]["timeout_s"]) == (
        "math",
        2,
        7.0,
    )
    assert (filled["short"]["reward"], filled["short"]["processes"], filled["short"]["on_error"]) == (
        None,
        3,
        "zero",
    )


def test_environments_with_tools_share_what_is_written_around_them() -> None:
    raw = raw_grpo()
    raw["grpo"]["max_rollout_turns"] = 3
    raw["env"] = {
        "tools": {"calculator": {}},
        "max_tool_calls": 2,
        "tool_parser": "hermes",
        "sums": {"environment": "tools", "reward": "math"},
        "own": {"environment": "tools", "reward": "math", "tools": {"python": {}}, "max_tool_calls": 5},
        "plain": {"reward": "math"},
    }
    env = complete(raw)["env"]
    assert env["sums"]["tools"] == {"calculator": {}} and env["sums"]["max_tool_calls"] == 2
    assert env["own"]["tools"] == {"python": {}} and env["own"]["max_tool_calls"] == 5
    assert env["plain"]["tools"] == {} and env["plain"]["max_tool_calls"] is None


def test_a_spec_has_the_options_of_its_reward_alone() -> None:
    given = {"reward": "exact_match", "strip": False, "timeout_s": 2.0, "processes": 3}
    assert RewardSpec.of_section(given) == RewardSpec("exact_match", {"strip": False}, 2.0)
    assert get_reward(RewardSpec("length", {"max_response_length": 4})).tells_right_from_wrong is False


def test_a_run_with_two_rewards_says_the_mean_of_each(tmp_path: Path, model: str, data: str) -> None:
    """A whole GRPO run, one of the rewards a user's, in an environment with a name."""
    path = tmp_path / "users.py"
    path.write_text("def first(prompt, response, record):\n    return float(response[:1] == prompt[:1])\n")
    config = make_config("grpo", tmp_path / "run", model, data, max_num_steps=2)
    short = {"reward": "length", "weight": 0.25, "max_response_length": 3}
    config["env"] = {
        "sums": {"rewards": {"first": {"reward": f"{path}:first", "weight": 2.0}, "short": short}}
    }
    config["checkpointing"]["enabled"] = False
    assert run(config, PolicyMaker()) == 0
    logged = rows(tmp_path / "run")
    train = [row for row in logged if "train/reward" in row]
    validation = [row for row in logged if "validation/accuracy" in row]
    assert len(train) == 2 and validation
    for row in train:
        assert row["train/reward"] == pytest.approx(
            2 * row["train/reward/sums/first"] + 0.25 * row["train/reward/sums/short"], abs=1e-6
        )
        assert (
            row["train/reward"] == pytest.approx(row["train/reward/sums"])
            and -1 <= row["train/reward/sums/short"] < 0
        )
        assert row["train/accuracy"] == pytest.approx(row["train/reward/sums/first"])
        assert row["train/reward_errors"] == row["train/reward_errors/first"] == 0
    for row in validation:
        assert row["validation/accuracy"] == pytest.approx(row["validation/reward/sums/first"])


@pytest.mark.parametrize("keeps", [False, True])
def test_rewards_read_special_tokens_where_they_are_kept(
    tmp_path: Path, made: list[SingleTurn], keeps: bool
) -> None:
    (tmp_path / "ends.py").write_text(
        "def reward(prompt, response):\n    return float(prompt[-3:] + response == '<s>7<|im_end|>')\n"
    )
    made.append(SingleTurn(section(reward=f"{tmp_path}/ends.py:reward", keep_special_tokens=keeps)))
    turn = Turn(
        [SimpleNamespace(answer="7", index=0)], ["7"], [[1]], [None], ["2+5?"], ["7<|im_end|>"], ["2+5?<s>"]
    )
    assert made[0].step(turn).rewards == [float(keeps)]
