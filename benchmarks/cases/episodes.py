"""Conversations with environments that take their time: each at its own pace, against all waiting for the slowest of each turn.

256 conversations of 1 to 8 turns; the environment answers after an exponential time of mean 0.25 s, at most 2 s, drawn by fixed seeds, and
the engine, which is a script, each request after 5 ms. Nothing can end before the longest chain of one conversation's answers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from benchmarks.point import Metric, Point
from megarl.config.environments import EnvConfig
from megarl.data.datasets import Example
from megarl.key import defaults_of
from megarl.models.generation.stream import Completion, Request
from megarl.observe.timing import PhaseTimer
from megarl.rollout.episodes import Episode, EpisodeLimits, EpisodeRunner
from megarl.rollout.message_env import MessageEnv, MessageEnvironment, Step
from megarl.rollout.trajectory import Segment

EPISODES, TURNS, MEAN_S, MOST_S, ENGINE_S = 256, 8, 0.25, 2.0, 0.005
REPEATS, QUICK_REPEATS = 3, 1
WORDS = 24
"""Tokens of a response."""


def delays_of(episode: int) -> list[float]:
    """Seconds of each of a conversation's answers."""
    drawn = random.Random(episode)
    return [min(drawn.expovariate(1 / MEAN_S), MOST_S) for _ in range(drawn.randint(1, TURNS))]


class _Slow(MessageEnv):
    def reset(self, record: Example) -> None:
        self._delays = delays_of(record.index)
        self._answered = 0

    def step(self, message: Mapping[str, Any]) -> Step:
        time.sleep(self._delays[self._answered])
        self._answered += 1
        return Step("go on", reward=1.0, done=self._answered == len(self._delays))


class _Stream:
    """Completes each request ``ENGINE_S`` after it came; in waves, all of them together."""

    def __init__(self, *, in_waves: bool) -> None:
        self.in_waves = in_waves
        self._waiting: dict[int, float] = {}

    def submit(self, requests: Mapping[int, Request]) -> None:
        self._waiting |= dict.fromkeys(requests, time.monotonic() + ENGINE_S)

    def abort(self, numbers: Iterable[int]) -> None:
        """Nothing is aborted here."""

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        first = min(self._waiting.values())
        left = (max(self._waiting.values()) if self.in_waves else first) - time.monotonic()
        time.sleep(max(left if timeout_s is None else min(left, timeout_s), 0.0))
        ready = [number for number, due in self._waiting.items() if due <= time.monotonic()]
        for number in ready:
            del self._waiting[number]
        said = np.full(WORDS, 7, np.int64)
        return {number: Completion(said, np.zeros(WORDS, np.float32), truncated=False) for number in ready}


class _Engines:
    def __init__(self, *, in_waves: bool) -> None:
        self.stream = _Stream(in_waves=in_waves)

    def ready(self) -> _Stream:
        return self.stream

    def replace_lost(self, error: Exception) -> None:
        raise error

    def finish(self, episodes: Any) -> None:
        """Nothing is held."""


class _Encoder:
    def encode(self, messages: Any, last: int | None) -> list[int]:
        return [5, 6, 7]


class _Words:
    """Decodes without a tokenizer: the case is about waiting."""

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return ["word"] * len(rows)


def measure(quick: bool) -> Iterator[Point]:
    """Wall and CPU seconds of both ways."""
    section = {**defaults_of(EnvConfig), "environment": "own"}
    chains = [sum(delays) + ENGINE_S * len(delays) for delays in map(delays_of, range(EPISODES))]
    tokens = WORDS * sum(len(delays_of(episode)) for episode in range(EPISODES))
    wall: dict[bool, list[float]] = {False: [], True: []}
    cpu: list[float] = []
    for _ in range(QUICK_REPEATS if quick else REPEATS):
        for in_waves in (False, True):
            environment = MessageEnvironment(_Slow, section)
            runner = EpisodeRunner(
                _Engines(in_waves=in_waves),
                environment,
                _Words(),
                PhaseTimer(),
                EpisodeLimits(TURNS),
                _Encoder(),  # type: ignore[arg-type]
            )
            prompt = np.arange(5, 25)
            episodes = [Episode(Example(number, (), (), ""), Segment(prompt), number) for number in range(EPISODES)]
            begun, spent = time.perf_counter(), time.process_time()
            runner.run(episodes)
            wall[in_waves].append(time.perf_counter() - begun)
            if not in_waves:
                cpu.append(time.process_time() - spent)
            if sum(episode.reward for episode in episodes) * WORDS != tokens:
                raise RuntimeError("a conversation has not had all of its turns")
    longest = [max(chains)] * len(wall[False])
    yield Point(
        {"episodes": EPISODES, "turns": f"1 to {TURNS}"},
        {
            "pace": Metric.ratio("the longest chain", wall[False], longest),
            "barrier": Metric.ratio("each at its own pace", wall[True], wall[False]),
            "longest_seconds": Metric.of("s", longest),
            "cpu": Metric.of("CPU us of the driver a sampled token", [1e6 * each / tokens for each in cpu]),
        },
    )
