"""Log-probabilities of finished parts of a batch, computed while other parts are still sampled."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from megarl.algorithms.scored_ahead import ScoredAhead
from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import BatchError, WorkerError
from megarl.models.generation.stream import Completion
from megarl.observe.timing import LOGPROBS_BESIDE, PhaseTimer
from megarl.rollout import collector as collectors
from megarl.rollout.collector import PREV_LOGPROBS, Rollouts
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.samples import sampling_seeds
from tests.templates import tokenizer_of
from tests.unit.scripted import ScriptedEngine, ScriptedStream, collector_of

PROMPTS, GENERATIONS, SECONDS = 5, 3, 60.0


class Judge:
    """Rewards; every fourth response is left out of training."""

    def step(self, turn: Turn) -> EnvironmentReturn:
        rows = len(turn.records)
        return EnvironmentReturn([1.0] * rows, [True] * rows, [row % 4 == 3 for row in range(rows)])


class Policy:
    """A real model, and the batches that it was given."""

    def __init__(self, vocabulary: int) -> None:
        torch.manual_seed(1)
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
        self.model = Qwen2ForCausalLM(
            Qwen2Config(vocab_size=vocabulary, num_key_value_heads=2, **sizes)
        ).eval()
        self.rows: list[int] = []
        self.before: Callable[[], None] = lambda: None

    def prepare_for_lp_inference(self) -> None: ...

    def get_logprobs(self, data: BatchedDataDict[Any], *, skip_masked: bool) -> BatchedDataDict[Any]:
        assert skip_masked
        self.before()
        ids = data["input_ids"]
        with torch.inference_mode():
            logits = self.model(input_ids=ids).logits.float().log_softmax(-1)
        found = torch.zeros(ids.shape)
        found[:, 1:] = logits[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
        self.rows.append(len(ids))
        return BatchedDataDict({"logprobs": found * data["token_mask"]})


@pytest.fixture
def policy() -> Policy:
    return Policy(len(tokenizer_of("qwen2.5")))


@pytest.fixture
def scorer_of(policy: Policy) -> Iterator[Callable[[int], ScoredAhead]]:
    made: list[ScoredAhead] = []

    def make(parts: int) -> ScoredAhead:
        made.append(ScoredAhead(policy, parts, tokenizer_of("qwen2.5").pad_token_id, PhaseTimer()))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for each in made:
        each.close()


def words(prompt: list[int], seed: int) -> list[int]:
    tokenizer, drawn = tokenizer_of("qwen2.5"), random.Random(f"{seed}")
    letters = drawn.choices("ons", k=drawn.randint(1, 9))
    return [*(tokenizer.convert_tokens_to_ids(letter) for letter in letters), tokenizer.eos_token_id]


def collected(scorer: ScoredAhead | None, stream: Any = None, **changes: Any) -> Rollouts:
    collector, engine, tokenizer = collector_of(Judge(), words, turns=1)
    records = [
        Example(place, tuple(tokenizer("Say" + " on" * place)["input_ids"]), (), "")
        for place in range(PROMPTS)
    ]
    stream = stream or (lambda engine: ScriptedStream(engine, lambda: random.random() * 0.02))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectors, "Waves", lambda *_, **__: stream(engine))
        for name, value in {"scorer": scorer, "encoder": None, **changes}.items():
            object.__setattr__(collector, name, value)
        seeds = sampling_seeds(3, 1, PROMPTS, GENERATIONS)
        return collector.collect(records, GENERATIONS, seeds, weight_version=1)


def afterwards(policy: Policy, samples: BatchedDataDict[Any], sizes: list[int]) -> torch.Tensor:
    """The same parts, scored once all of the batch is known."""
    found, first = torch.zeros(samples["input_ids"].shape), 0
    for size in sizes:
        rows = slice(first, first + size)
        width = int(samples["input_lengths"][rows].max())
        part = {name: samples[name][rows, :width] for name in ("input_ids", "token_mask")}
        found[rows, :width] = policy.get_logprobs(BatchedDataDict(part), skip_masked=True)["logprobs"]
        first += size
    return found * samples["sample_mask"][:, None]


@pytest.mark.parametrize(("parts", "sizes"), [(1, [15]), (2, [6, 9]), (3, [3, 6, 6]), (5, [3] * 5)])
def test_whoever_is_faster_the_bits_are_those_of_the_parts(
    parts: int, sizes: list[int], policy: Policy, scorer_of: Callable[[int], ScoredAhead]
) -> None:
    plain = collected(None).samples
    assert PREV_LOGPROBS not in plain
    expected = afterwards(policy, plain, sizes)
    assert 0 < int((expected != 0).sum()) < int((plain["token_mask"] != 0).sum()), "some rows are left out"
    scorer = scorer_of(parts)
    for _ in range(3):
        policy.rows.clear()
        found = collected(scorer).samples
        assert sorted(policy.rows) == sorted(sizes)
        assert torch.equal(found.pop(PREV_LOGPROBS), expected)
        assert found.keys() == plain.keys() and torch.equal(found["input_ids"], plain["input_ids"])


class Waits(ScriptedStream):
    """Completes its last request once all parts but that one's have been scored."""

    def __init__(self, engine: ScriptedEngine, policy: Policy, parts: int) -> None:
        super().__init__(engine, lambda: random.random() * 0.01)
        self.policy, self.parts = policy, parts

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        if len(self.waiting) == 1:
            until = time.monotonic() + SECONDS
            while len(self.policy.rows) < self.parts - 1:
                assert time.monotonic() < until, "no part is scored while this one is sampled"
                time.sleep(0.001)
        return super().poll(timeout_s)


def test_parts_are_scored_while_others_are_sampled(
    policy: Policy, scorer_of: Callable[[int], ScoredAhead]
) -> None:
    scorer = scorer_of(5)
    collected(scorer, lambda engine: Waits(engine, policy, 5))
    assert policy.rows == [3] * 5
    seconds = scorer._timer.collect()
    assert f"{LOGPROBS_BESIDE}_s" in seconds and "logprobs_s" in seconds
    assert [len(each.lengths) for each in scorer._timer.take_sequences()[LOGPROBS_BESIDE]] == [3] * 5


def test_an_engine_that_takes_requests_is_asked_one_by_one(
    policy: Policy, scorer_of: Callable[[int], ScoredAhead]
) -> None:
    asked: list[dict[str, Any]] = []

    def requests(*arguments: Any, **options: Any) -> ScriptedStream:
        asked.append(options)
        return ScriptedStream(engine, lambda: 0.0)

    _, engine, _ = collector_of(Judge(), words, turns=1)
    generation = SimpleNamespace(takes_requests=True, requests=requests, finish_generation=lambda: True)
    refit = SimpleNamespace(generation=generation, bring_up_to_date=lambda: None)
    assert PREV_LOGPROBS in collected(scorer_of(2), engine=refit).samples
    assert asked[0]["gathers"]


def test_new_engines_get_weights_when_nothing_is_asked_of_the_policy(
    policy: Policy, scorer_of: Callable[[int], ScoredAhead]
) -> None:
    """A refit and a pass at a time would meet in the ranks in any order."""
    scores, replaced = threading.Event(), list[bool]()
    policy.before = lambda: (scores.set(), time.sleep(0.1))  # type: ignore[assignment]

    class Lost(ScriptedStream):
        def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
            if not replaced and len(self.waiting) < 5:
                # eleven of fifteen responses complete one of five parts
                assert scores.wait(SECONDS)
                raise WorkerError("killed")
            return super().poll(timeout_s)

    scorer = scorer_of(5)
    refit = SimpleNamespace(
        generation=SimpleNamespace(finish_generation=lambda: True),
        bring_up_to_date=lambda: None,
        replace_lost_engines=lambda error: replaced.append(
            all(each.done() for each in scorer._coming.values())
        ),
    )
    seconds = itertools.count()
    samples = collected(
        scorer, lambda engine: Lost(engine, lambda: 0.01 * next(seconds)), engine=refit
    ).samples
    assert replaced == [True]
    policy.before = lambda: None
    assert torch.equal(samples[PREV_LOGPROBS], afterwards(policy, samples, [3] * 5))


def test_a_pass_that_fails_ends_the_step(policy: Policy, scorer_of: Callable[[int], ScoredAhead]) -> None:
    def fail() -> None:
        raise BatchError("too long")

    policy.before = fail
    with pytest.raises(BatchError, match="too long"):
        collected(scorer_of(2))
