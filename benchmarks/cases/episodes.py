"""Conversations with slow environments: each conversation at its own pace, against all of them waiting for
the slowest one at each turn.

There are 256 conversations of 1 to 8 turns. The environment replies after an exponentially distributed time
of mean 0.25 s and at most 2 s, sampled with fixed seeds. The engine, which is a script, completes each
request after 5 ms. No run can be shorter than the longest sequence of waits in one conversation.

The driver's CPU seconds are measured for 256 conversations of four turns of 256, 512 or 1,024 sampled tokens,
whose environment replies at once. They are compared with those of as many responses in conversations of one
turn, which encode no observation and send no second prompt: both cost the same for turns of any length. The
CPU seconds of as many responses that a reward function scores, collected as in a GRPO step, are compared with
building the same columns directly from what was generated, without an object per response.
"""

from __future__ import annotations

import gc
import random
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from benchmarks.point import Metric, Point
from megarl.config.environments import EnvConfig
from megarl.data.chat_template import ChatTemplate
from megarl.data.datasets import Example
from megarl.data.observations import ObservationEncoder
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.parcels import inside
from megarl.distributed.token_rows import TokenRows
from megarl.key import defaults_of
from megarl.models.generation.stream import Completion, Request
from megarl.observe.timing import PhaseTimer
from megarl.rollout.collector import Collector
from megarl.rollout.environment import Turn
from megarl.rollout.episodes import Episode, EpisodeLimits, EpisodeRunner
from megarl.rollout.message_env import MessageEnv, MessageEnvironment, Step
from megarl.rollout.single_turn import SingleTurn
from megarl.rollout.texts import decode_rows
from megarl.rollout.trajectory import Segment, batch_of

EPISODES, TURNS, MEAN_S, MOST_S, ENGINE_S = 256, 8, 0.25, 2.0, 0.005
REPEATS, QUICK_REPEATS = 3, 1
WORDS, ALL_TURNS = (256, 512, 1024), 4
"""Tokens of a response, and turns of the conversations whose CPU seconds are measured."""
CPU_REPEATS = 15
CPU = "CPU us of the driver a sampled token"
SAID = np.random.default_rng(0).integers(5, 60, max(WORDS))
"""The longest response, without special tokens."""

# ChatML's marks are single tokens here, as in the tokenizers that are published with it.
MARKS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def delays_of(episode: int) -> list[float]:
    """Return the seconds that the environment waits before each of its replies in a conversation."""
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


class _Quick(MessageEnv):
    turns, answered = ALL_TURNS, 0

    def step(self, message: Mapping[str, Any]) -> Step:
        self.answered += 1
        return Step(f"answer {self.answered}", reward=1.0, done=self.answered == self.turns)


class _One(_Quick):
    turns = 1


class _Stream:
    """A stream that completes each request ``seconds`` after it was submitted, or in waves: all of them
    together."""

    def __init__(self, *, in_waves: bool, seconds: float = ENGINE_S, words: int = WORDS[0]) -> None:
        self.in_waves, self._seconds = in_waves, seconds
        self._completion = Completion(SAID[:words], np.zeros(words, np.float32), truncated=False)
        self._waiting: dict[int, float] = {}

    def submit(self, requests: Mapping[int, Request]) -> None:
        self._waiting |= dict.fromkeys(requests, time.monotonic() + self._seconds)

    def abort(self, numbers: Iterable[int]) -> None:
        """Do nothing: requests are never aborted here."""

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        first = min(self._waiting.values())
        left = (max(self._waiting.values()) if self.in_waves else first) - time.monotonic()
        time.sleep(max(left if timeout_s is None else min(left, timeout_s), 0.0))
        ready = [number for number, due in self._waiting.items() if due <= time.monotonic()]
        for number in ready:
            del self._waiting[number]
        return dict.fromkeys(ready, self._completion)


class _Engines:
    def __init__(self, stream: _Stream) -> None:
        self.stream = stream

    def ready(self) -> _Stream:
        return self.stream

    def replace_lost(self, error: Exception) -> None:
        raise error

    def finish(self, episodes: Any) -> None:
        """Do nothing: no resources are held."""


def _encoder() -> ObservationEncoder:
    from megarl.quickstart.material import make_tokenizer

    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": MARKS})
    tokenizer.chat_template = TEMPLATE
    return ObservationEncoder(
        tokenizer, ChatTemplate(tokenizer), {int(tokenizer.convert_tokens_to_ids(MARKS[1]))}
    )


def _led(
    kind: type[MessageEnv], stream: _Stream, count: int, turns: int, encoder: ObservationEncoder
) -> tuple[float, float]:
    """Return the wall and CPU seconds of ``count`` conversations, including the batch that is built from
    them."""
    environment = MessageEnvironment(kind, {**defaults_of(EnvConfig), "environment": "own"})  # type: ignore[typeddict-item]
    runner = EpisodeRunner(
        _Engines(stream), environment, encoder.tokenizer, PhaseTimer(), EpisodeLimits(turns), encoder
    )
    prompt = np.arange(5, 25)
    episodes = [Episode(Example(number, (), (), ""), [Segment(prompt)], number) for number in range(count)]
    begun, spent = time.perf_counter(), time.process_time()
    runner.run(episodes)
    batch_of([episode.segment for episode in episodes], 0)
    seconds = time.perf_counter() - begun, time.process_time() - spent
    wanted = turns * count if kind is not _Slow else sum(len(delays_of(number)) for number in range(count))
    if sum(sum(episode.rewards) for episode in episodes) != wanted:
        raise RuntimeError("a conversation has not had all of its turns")
    return seconds


class _Generated:
    """A policy that generates the same responses at each call."""

    def __init__(self, prompt: np.ndarray, rows: int) -> None:
        words = WORDS[0]
        ids = torch.from_numpy(np.tile(np.concatenate([prompt, SAID[:words]]), (rows, 1)))
        logprobs = torch.zeros(ids.shape)
        logprobs[:, len(prompt) :] = -1.0
        self.output = {
            "output_ids": ids,
            "generation_lengths": torch.full((rows,), words),
            "unpadded_sequence_lengths": torch.full((rows,), ids.shape[1]),
            "logprobs": logprobs,
            "truncated": torch.zeros(rows, dtype=torch.bool),
        }

    def prepare_for_generation(self) -> None:
        """Do nothing: no memory is moved."""

    def finish_generation(self) -> None:
        """Do nothing: no memory is moved."""

    def generate(self, data: Any, greedy: bool) -> BatchedDataDict[Any]:
        return BatchedDataDict(dict(self.output))


def _scored_seconds(tokenizer: Any) -> tuple[float, float]:
    """Return the CPU seconds of collecting a step's scored responses, and those of building the same columns
    without episodes."""
    prompt = np.arange(5, 25)
    rows, section = EPISODES * ALL_TURNS, {**defaults_of(EnvConfig), "reward": "exact_match"}
    environment, generated = SingleTurn(section), _Generated(prompt, rows)  # type: ignore[arg-type]
    records = [Example(number, tuple(prompt.tolist()), (), "4") for number in range(EPISODES)]
    collector = Collector(generated, tokenizer, environment, PhaseTimer(), [0])  # type: ignore[arg-type]
    begun = time.process_time()
    samples = collector.collect(records, ALL_TURNS, list(range(rows)), weight_version=0).samples
    collected = time.process_time() - begun

    begun = time.process_time()
    output = generated.generate(None, greedy=False)
    ids, ends = output["output_ids"].numpy(), output["unpadded_sequence_lengths"].numpy()
    is_sampled = inside(len(prompt), ends, ids.shape[1])
    responses = TokenRows(ids[is_sampled], ends - len(prompt))
    texts, of_rows = decode_rows(tokenizer, responses), [each for each in records for _ in range(ALL_TURNS)]
    said = environment.step(Turn(of_rows, texts, responses, [None] * rows))
    columns = {
        "input_ids": output["output_ids"],
        "token_mask": torch.from_numpy(is_sampled).float(),
        "generation_logprobs": output["logprobs"],
        "generation_lengths": output["generation_lengths"],
        "reward": torch.tensor(said.rewards),
        "masked": torch.tensor(said.masked),
    }
    straight = time.process_time() - begun
    if not all(torch.equal(samples[name], column) for name, column in columns.items()):
        raise RuntimeError("what was collected is not what was generated")
    return collected, straight


def measure(quick: bool) -> Iterator[Point]:
    """Yield a point with the wall seconds of both kinds of pace, one for each length of a turn with the CPU
    seconds of several turns and of one, and one with those of scored responses."""
    chains = [sum(delays) + ENGINE_S * len(delays) for delays in map(delays_of, range(EPISODES))]
    encoder = _encoder()
    wall: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(QUICK_REPEATS if quick else REPEATS):
        for in_waves in (False, True):
            wall[in_waves].append(_led(_Slow, _Stream(in_waves=in_waves), EPISODES, TURNS, encoder)[0])
    longest = [max(chains)] * len(wall[False])
    yield Point(
        {"episodes": EPISODES, "turns": f"1 to {TURNS}"},
        {
            "pace": Metric.ratio("the longest chain", wall[False], longest),
            "barrier": Metric.ratio("each at its own pace", wall[True], wall[False]),
            "longest_seconds": Metric.of("s", longest),
        },
    )
    # Disable garbage collection: searching everything that torch and transformers hold takes longer than one
    # of these runs.
    gc.disable()
    yield from [_of_turns(words, encoder) for words in WORDS]
    # Score last, because it uses OpenMP: its threads spin for some milliseconds, which the process's clock
    # counts.
    scored = [_scored_seconds(encoder.tokenizer) for _ in range(CPU_REPEATS)]
    gc.enable()
    yield Point(
        {"responses": EPISODES * ALL_TURNS, "tokens": WORDS[0]},
        {
            "cpu_scored": Metric.of(CPU, [_a_token(each, WORDS[0]) for each, _ in scored]),
            "cpu_episodes": Metric.ratio("the same columns without episodes", *zip(*scored, strict=True)),
        },
    )


def _of_turns(words: int, encoder: ObservationEncoder) -> Point:
    several: list[float] = []
    one: list[float] = []
    for _ in range(CPU_REPEATS):
        stream = _Stream(in_waves=True, seconds=0, words=words)
        several.append(_led(_Quick, stream, EPISODES, ALL_TURNS, encoder)[1])
        one.append(_led(_One, stream, EPISODES * ALL_TURNS, 1, encoder)[1])
    return Point(
        {"episodes": EPISODES, "turns": ALL_TURNS, "tokens_a_turn": words},
        {
            "cpu": Metric.of(CPU, [_a_token(each, words) for each in several]),
            "cpu_turns": Metric.ratio("as many responses of one turn", several, one),
        },
    )


def _a_token(seconds: float, words: int) -> float:
    return 1e6 * seconds / (EPISODES * ALL_TURNS * words)
