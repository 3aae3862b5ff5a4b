"""Rewards of responses that are complete, while others are still sampled."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.data.datasets import Example
from megarl.errors import RewardError
from megarl.models.generation.stream import Completion
from megarl.rollout import collector as collectors
from megarl.rollout.collector import Rollouts
from megarl.rollout.environments import NamedEnvironments
from megarl.rollout.samples import sampling_seeds
from megarl.rollout.single_turn import ScoresAhead, SingleTurn
from tests.templates import tokenizer_of
from tests.unit.scripted import ScriptedEngine, ScriptedStream, collector_of

REWARD = """
import os

def reward(response, answer, **fields):
    with open(os.path.join(os.path.dirname(__file__), "scored"), "a") as log:
        log.write(f"{fields['index']} {response}\\n")
    if response.startswith("s") and fields["index"] == 2:
        raise ValueError("a response it cannot read")
    return len(response) / 8
"""
SECONDS = 60.0


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(REWARD)
    return tmp_path / "mine.py"


@pytest.fixture
def environments(path: Path) -> Iterator[list[SingleTurn]]:
    """Two of them."""
    section = {
        "environment": "single_turn",
        "strip": True,
        "processes": 1,
        "timeout_s": 20.0,
        "on_error": "mask",
        "on_timeout": "zero",
    }
    made = [SingleTurn({**section, "options": {}, "reward": f"{path}:reward"}) for _ in range(2)]  # type: ignore[typeddict-item]
    yield made
    for each in made:
        each.close()


def words(prompt: list[int], seed: int) -> list[int]:
    """Short responses, so that some to one prompt are equal."""
    tokenizer = tokenizer_of("qwen2.5")
    drawn = random.Random(f"{seed}")
    letters = [
        tokenizer.convert_tokens_to_ids(letter) for letter in drawn.choices("ons", k=drawn.randint(1, 2))
    ]
    return [*letters, tokenizer.eos_token_id]


def collected(environment: Any, stream: Any = None, **changes: Any) -> Rollouts:
    collector, engine, tokenizer = collector_of(environment, words, turns=1)
    ids = tuple(tokenizer("<|im_start|>user\nSay.<|im_end|>\n", add_special_tokens=False)["input_ids"])
    records = [Example(place, ids, (), str(place), env_name=f"e{place % 2}") for place in range(4)]
    seeds = sampling_seeds(3, 1, 4, 6)
    with pytest.MonkeyPatch.context() as patch:
        if stream is not None:
            patch.setattr(collectors, "Waves", lambda *_, **__: stream(engine))
        for name, value in changes.items():
            object.__setattr__(collector, name, value)
        return collector.collect(records, 6, seeds, weight_version=1)


class Waits(ScriptedStream):
    """Completes its last request once all others have been scored."""

    def __init__(self, engine: ScriptedEngine, log: Path) -> None:
        super().__init__(engine, lambda: random.random() * 0.01)
        self.log, self.asked = log, 0

    def submit(self, requests: Any) -> None:
        super().submit(requests)
        self.asked += len(requests)

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        if len(self.waiting) == 1:
            until = time.monotonic() + SECONDS
            while not self.log.exists() or len(self.log.read_text().splitlines()) < self.asked - 1:
                assert time.monotonic() < until, (
                    "the other responses are not scored while this one is sampled"
                )
                time.sleep(0.005)
        return super().poll(timeout_s)


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        # a response that met another environment has no such reward
        return (
            torch.equal(one.nan_to_num(nan=-7.0), other.nan_to_num(nan=-7.0))
            if one.is_floating_point()
            else torch.equal(one, other)
        )
    return list(one) == list(other)


@pytest.mark.parametrize("named", [False, True])
def test_responses_are_scored_while_others_are_sampled_and_all_is_as_it_was(
    named: bool, path: Path, environments: list[SingleTurn]
) -> None:
    met = NamedEnvironments(dict(zip(("e0", "e1"), environments, strict=True))) if named else environments[0]
    log = path.parent / "scored"
    expected = collected(met)
    lines = log.read_text().splitlines()
    assert len(set(lines)) < len(lines) == 24, "no two responses to a prompt are the same text"
    for _ in range(2):
        log.unlink()
        found = collected(met, lambda engine: Waits(engine, log))
        assert sorted(log.read_text().splitlines()) == sorted(lines)
        assert found.samples.keys() == expected.samples.keys()
        assert all(equal(found.samples[name], expected.samples[name]) for name in expected.samples)
        assert found.metrics == expected.metrics
        assert found.metrics["reward_errors"] > 0


def test_groups_in_threads_of_their_own_are_not_scored_ahead(environments: list[SingleTurn]) -> None:
    """What has begun for one group would be taken by another."""
    environment, begun = environments[0], list[Any]()
    environment.score_ahead = begun.append  # type: ignore[method-assign]
    collected(
        environment,
        lambda engine: ScriptedStream(engine, lambda: random.random() * 0.01),
        judging=nullcontext(),
    )
    assert not begun
    # One response is complete long before the others: on a busy machine, random delays could all pass before
    # the first poll.
    delays = itertools.chain([0.0], itertools.repeat(0.5))
    collected(environment, lambda engine: ScriptedStream(engine, lambda: next(delays)))
    assert begun


def test_what_fails_ahead_fails_when_it_is_taken() -> None:
    def fails(tasks: Any) -> list[float]:
        raise RewardError("the pool is broken")

    ahead: ScoresAhead[int, float] = ScoresAhead(fails)
    ahead.begin([("a", 1)])
    with pytest.raises(RewardError, match="the pool is broken"):
        ahead.take()
    assert ahead.take() == {}
