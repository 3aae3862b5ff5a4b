"""Engines that say what a script tells them, and what else conversations of several turns are tried with."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from megarl.data.chat_template import ChatTemplate
from megarl.data.datasets import Example
from megarl.data.observations import ObservationEncoder
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.generation.stream import Completion, Request
from megarl.observe.timing import PhaseTimer
from megarl.rollout.collector import Collector
from megarl.rollout.episodes import EpisodeLimits
from tests.templates import stop_ids, tokenizer_of

Script = Callable[[list[int], int], list[int]]
"""Prompt and seed to the tokens of a response."""


def logprob_of(token: int, seed: int) -> float:
    """Some number that tells token and seed."""
    return -(token % 97 + seed % 89 / 100) / 100


class ScriptedEngine:
    """Completes prompts by a script, whole batches at a time."""

    def __init__(self, script: Script, stops: Iterable[int]) -> None:
        self.script, self.stops = script, set(stops)
        self.calls: list[list[list[int]]] = []

    def prepare_for_generation(self) -> None: ...

    def finish_generation(self) -> None: ...

    def generate(self, data: Mapping[str, Any], greedy: bool = False) -> BatchedDataDict[Any]:
        rows, scores = [], []
        lengths, seeds = data["input_lengths"].tolist(), data["sampling_seeds"].tolist()
        self.calls.append([data["input_ids"][row, :length].tolist() for row, length in enumerate(lengths)])
        for prompt, seed in zip(self.calls[-1], seeds, strict=True):
            said = self.script(prompt, seed)
            rows.append(prompt + said)
            scores.append([0.0] * len(prompt) + [logprob_of(token, seed) for token in said])
        width = max(map(len, rows))
        return BatchedDataDict(
            {
                "output_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
                "logprobs": torch.tensor([row + [0.0] * (width - len(row)) for row in scores]),
                "unpadded_sequence_lengths": torch.tensor(list(map(len, rows))),
                "generation_lengths": torch.tensor(
                    [len(row) - length for row, length in zip(rows, lengths, strict=True)]
                ),
            }
        )


class ScriptedStream:
    """Completes requests one by one, each after a time of its own."""

    in_waves = False

    def __init__(self, engine: ScriptedEngine, seconds: Callable[[], float]) -> None:
        self.engine, self.seconds = engine, seconds
        self.waiting: dict[int, tuple[float, Request]] = {}
        self.busy_s = 0.0

    def submit(self, requests: Mapping[int, Request]) -> None:
        self.waiting |= {
            number: (time.monotonic() + self.seconds(), request) for number, request in requests.items()
        }

    def abort(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self.waiting.pop(number, None)

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            ready = [number for number, (due, _) in self.waiting.items() if due <= time.monotonic()]
            if ready or (until is not None and time.monotonic() >= until):
                return {number: self._completed(self.waiting.pop(number)[1]) for number in ready}
            time.sleep(0.0005)

    def _completed(self, request: Request) -> Completion:
        seed = request.seed or 0
        said = self.engine.script(request.prompt.tolist(), seed)
        cut = request.max_new_tokens is not None and len(said) > request.max_new_tokens
        said = said[: request.max_new_tokens]
        logprobs = np.array([logprob_of(token, seed) for token in said], np.float32)
        return Completion(
            np.array(said, np.int64), logprobs, cut or not said or said[-1] not in self.engine.stops
        )


def shuffled(records: list[Example], seed: int) -> list[Example]:
    found = list(records)
    random.Random(seed).shuffle(found)
    return found


def collector_of(
    environment: Any, script: Script, template: str = "qwen2.5", tokenizer: Any = None, **limits: Any
) -> tuple[Collector, ScriptedEngine, Any]:
    """A collector with a scripted engine, the engine, and the tokenizer."""
    tokenizer = tokenizer or tokenizer_of(template)
    stops = sorted({*stop_ids(template, tokenizer), tokenizer.eos_token_id})
    engine = ScriptedEngine(script, stops)
    encoder = ObservationEncoder(tokenizer, ChatTemplate(tokenizer), stops)
    bounds = EpisodeLimits(**{"turns": 4, "length": 10_000, **limits})
    return (
        Collector(engine, tokenizer, environment, PhaseTimer(), stops, None, bounds, encoder),
        engine,
        tokenizer,
    )  # type: ignore[arg-type]
