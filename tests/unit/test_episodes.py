"""Conversations of several turns: exact tokens, ends, pace, and what goes wrong in environments."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from megarl.config.sections import SamplesConfig
from megarl.data.chat_template import PASSTHROUGH_TEMPLATE
from megarl.data.datasets import Example
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import BatchError, RewardError
from megarl.key import defaults_of
from megarl.observe.sample_files import SampleFiles, read_samples
from megarl.rollout import collector as collectors
from megarl.rollout.collector import Rollouts
from megarl.rollout.environment import EnvironmentReturn, StopReason, Turn
from megarl.rollout.environments import NamedEnvironments
from megarl.rollout.message_env import EnvironmentLostError, MessageEnv, MessageEnvironment, Step
from megarl.rollout.sample_log import SampleLog
from megarl.rollout.samples import sampling_seeds, seed_of_turn
from megarl.rollout.turn_threads import Call, TurnThreads
from tests.templates import tokenizer_of
from tests.unit.scripted import ScriptedEngine, ScriptedStream, collector_of, logprob_of

SECTION: dict[str, Any] = {
    "threads": 8,
    "step_timeout_s": 20.0,
    "tool_parser": None,
    "on_bad_call": "observe",
    "on_tool_error": "observe",
    "options": {},
}


class Counting(MessageEnv):
    """Says how often it was answered, and is done when the record says so."""

    def reset(self, record: Example) -> None:
        self.heard: list[str] = []

    def step(self, message: Any) -> Step:
        self.heard.append(message["content"])
        wanted = self.record.fields["turns"]
        said = [f"No {len(self.heard)}.", {"role": "user", "content": f"No {len(self.heard)}."}][
            len(self.heard) % 2
        ]
        return Step(
            said,
            reward=len(self.heard) / 8,
            done=len(self.heard) == wanted,
            metrics={"heard": len(message["content"])},
        )


def records_of(tokenizer: Any, turns: list[int]) -> list[Example]:
    text = "<|im_start|>user\nAsk {}.<|im_end|>\n<|im_start|>assistant\n"
    ids = [
        tokenizer(text.format("x" * place), add_special_tokens=False)["input_ids"]
        for place in range(len(turns))
    ]
    return [
        Example(place, tuple(ids[place]), (), str(place), fields={"turns": count})
        for place, count in enumerate(turns)
    ]


def odd_words(prompt: list[int], seed: int) -> list[int]:
    """A response of single letters, which the tokenizer itself would merge, that depends on prompt and
    seed."""
    tokenizer = tokenizer_of("qwen2.5")
    drawn = random.Random(f"{seed} {prompt}")
    letters = [
        tokenizer.convert_tokens_to_ids(letter) for letter in drawn.choices("onst", k=drawn.randint(1, 9))
    ]
    return [*letters, tokenizer.eos_token_id]


def collected(
    wanted: list[int], environment: Any, generations: int = 2, stream: Any = None, **limits: Any
) -> tuple[Rollouts, Any, Any]:
    collector, engine, tokenizer = collector_of(environment, odd_words, **limits)
    records = records_of(tokenizer, wanted)
    seeds = sampling_seeds(3, 1, len(wanted), generations)
    if stream is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(collectors, "Waves", lambda *arguments, **options: stream(engine))
            return collector.collect(records, generations, seeds, weight_version=1), engine, tokenizer
    return collector.collect(records, generations, seeds, weight_version=1), engine, tokenizer


def by_hand(
    tokenizer: Any, record: Example, seed: int, turns: int
) -> tuple[list[int], list[int], list[float]]:
    """Tokens, mask and log-probabilities of a conversation with ``Counting``, one after another."""
    ids, mask, logprobs = (
        list(record.prompt_ids),
        [0] * len(record.prompt_ids),
        [0.0] * len(record.prompt_ids),
    )
    for turn in range(turns):
        own = seed if turn == 0 else seed_of_turn(seed, turn)
        said = odd_words(ids, own)
        ids, mask, logprobs = (
            ids + said,
            mask + [1] * len(said),
            logprobs + [logprob_of(token, own) for token in said],
        )
        if turn + 1 < turns:
            observed = f"\n<|im_start|>user\nNo {turn + 1}.<|im_end|>\n<|im_start|>assistant\n"
            seen = tokenizer(observed, add_special_tokens=False)["input_ids"]
            ids, mask, logprobs = ids + seen, mask + [0] * len(seen), logprobs + [0.0] * len(seen)
    return ids, mask, logprobs


TURNS = [1, 3, 2, 9]


def test_rows_are_what_was_sampled_and_observed_token_by_token() -> None:
    rollouts, engine, tokenizer = collected(TURNS, MessageEnvironment(Counting, SECTION))
    samples, records = rollouts.samples, records_of(tokenizer, TURNS)
    seeds = sampling_seeds(3, 1, 4, 2)
    canonical = 0
    for row in range(8):
        turns = min(TURNS[row // 2], 4)
        ids, mask, logprobs = by_hand(tokenizer, records[row // 2], seeds[row], turns)
        end = len(ids)
        assert samples["input_lengths"][row] == end and samples["input_ids"][row, :end].tolist() == ids
        assert samples["token_mask"][row].tolist() == mask + [0] * (samples["token_mask"].shape[1] - end)
        np.testing.assert_array_equal(
            samples["generation_logprobs"][row, :end].numpy(), np.array(logprobs, np.float32)
        )
        assert samples["generation_lengths"][row] == sum(mask) and samples["turns"][row] == turns
        assert samples["reward"][row] == sum(turn / 8 for turn in range(1, turns + 1))
        canonical += tokenizer(tokenizer.decode(ids), add_special_tokens=False)["input_ids"] == ids
    assert canonical < 8, "no response that the tokenizer would write otherwise"
    assert not samples["truncated"].any() and not samples["masked"].any()
    assert rollouts.metrics["episodes/done"] == 6 and rollouts.metrics["episodes/turns"] == 2
    assert rollouts.metrics["heard"] == sum(len(text) for text in _heard(rollouts, tokenizer))
    assert len(engine.calls) == 4 and [len(call) for call in engine.calls] == [8, 6, 4, 2]


def _heard(rollouts: Rollouts, tokenizer: Any) -> list[str]:
    samples = rollouts.samples
    counts = samples["token_mask"] != 0
    return [
        tokenizer.decode(samples["input_ids"][row][counts[row]].tolist(), skip_special_tokens=True)
        for row in range(samples.size)
    ]


class Silent(MessageEnv):
    """Says nothing to the first response."""

    answered = 0

    def step(self, message: Any) -> Step:
        self.answered += 1
        return Step(
            ["", "on", ""][self.answered - 1], reward=2.0**self.answered / 10, done=self.answered == 3
        )


def test_a_logged_turn_has_its_own_reward_where_nothing_was_observed(tmp_path: Path) -> None:
    """Two responses without a token between them are one piece of the sample log, with both rewards."""
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = PASSTHROUGH_TEMPLATE
    collector, *_ = collector_of(MessageEnvironment(Silent, SECTION), odd_words, tokenizer=tokenizer)
    rollouts = collector.collect(records_of(tokenizer, [3]), 1, [5], weight_version=1)
    section: Any = defaults_of(SamplesConfig)
    with SampleFiles(tmp_path) as files:
        SampleLog(files, section, tokenizer).train(1, rollouts, torch.zeros(1))
    [row] = read_samples(tmp_path / "train_step_1.jsonl")
    said = [(turn["role"], turn.get("reward")) for turn in row["turns"]]
    assert said == [("assistant", pytest.approx(0.6)), ("environment", None), ("assistant", 0.8)]
    assert row["turns"][1]["text"] == "on" and row["turns"][0]["text"].count("<|im_end|>") == 2


def test_one_turn_is_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that may have several turns and ends with the first has the rows of one that may have
    one."""
    one, *_ = collected([1, 1, 1], MessageEnvironment(Counting, SECTION), turns=1)
    several, *_ = collected([1, 1, 1], MessageEnvironment(Counting, SECTION), turns=4)
    assert {*several.samples} - {*one.samples} == {"turns", "ended", "turn_rewards", "token_rewards"}
    assert all(_equal(one.samples[name], several.samples[name]) for name in one.samples)


def _equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else list(one) == list(other)


class Late(Counting):
    """Takes its time."""

    def step(self, message: Any) -> Step:
        time.sleep(random.random() * 0.01)
        return super().step(message)


@pytest.mark.parametrize("in_waves", [True, False])
def test_neither_pace_nor_order_changes_a_batch(in_waves: bool) -> None:
    expected, *_ = collected([1, 4, 2, 3, 4, 2, 1, 3], MessageEnvironment(Counting, SECTION))
    for _ in range(3):
        stream = None if in_waves else lambda engine: ScriptedStream(engine, lambda: random.random() * 0.01)
        found, *_ = collected([1, 4, 2, 3, 4, 2, 1, 3], MessageEnvironment(Late, SECTION), stream=stream)
        assert found.samples.keys() == expected.samples.keys()
        assert all(_equal(found.samples[name], expected.samples[name]) for name in expected.samples)
        assert found.metrics == expected.metrics


def test_no_conversation_waits_for_another() -> None:
    """Each pair of conversations would need the other's second turn to wait, were there a barrier: the slow
    one ends last."""
    order: list[tuple[int, int]] = []
    lock, fast_ended = threading.Lock(), threading.Event()

    class Watched(Counting):
        def step(self, message: Any) -> Step:
            if self.record.index == 0 and not self.heard:
                assert fast_ended.wait(20), "the other conversation waits for this one"
            step = super().step(message)
            with lock:
                order.append((self.record.index, len(self.heard)))
            if step.done and self.record.index == 1:
                fast_ended.set()
            return step

    collected(
        [2, 3],
        MessageEnvironment(Watched, SECTION),
        1,
        stream=lambda engine: ScriptedStream(engine, lambda: 0.0),
    )
    assert order == [(1, 1), (1, 2), (1, 3), (0, 1), (0, 2)]


def test_tokens_of_a_conversation_are_bounded() -> None:
    free, _, _tokenizer = collected([4, 4, 4], MessageEnvironment(Counting, SECTION))
    prompts = free.samples["prompt_lengths"]
    for most in (1, 5, 23, 40):
        rollouts, *_ = collected([4, 4, 4], MessageEnvironment(Counting, SECTION), tokens=most)
        samples = rollouts.samples
        behind = samples["input_lengths"] - samples["prompt_lengths"]
        assert int(behind.max()) <= most and samples["truncated"].all()
        assert rollouts.metrics["episodes/tokens"] == 6
        for row in range(6):
            end, start = int(samples["input_lengths"][row]), int(prompts[row])
            # what fits is the beginning of what would be said without the bound; an observation that nothing
            # could follow is left out
            assert (
                samples["input_ids"][row, start:end].tolist()
                == free.samples["input_ids"][row, start:end].tolist()
            )
            assert samples["token_mask"][row, end - 1] == 1
    length = int(prompts.max()) + 3
    rollouts, *_ = collected([4, 4, 4], MessageEnvironment(Counting, SECTION), length=length)
    assert int(rollouts.samples["input_lengths"].max()) == length and rollouts.samples["truncated"].any()


class Odd(MessageEnv):
    """Fails as its record says."""

    closed: ClassVar[Counter[str]] = Counter()
    released: ClassVar[threading.Event] = threading.Event()
    came_back: ClassVar[list[str]] = []

    def reset(self, record: Example) -> None:
        if record.fields["how"] == "reset":
            raise RuntimeError("no board")

    def step(self, message: Any) -> Any:
        how = self.record.fields["how"]
        if how == "raises":
            raise ValueError("odd move")
        if how == "exits":
            raise SystemExit(3)
        if how == "gone":
            raise ConnectionError("the server is gone")
        if how == "lost":
            raise EnvironmentLostError("killed")
        if how == "hangs":
            # those of the test that it hangs in: it comes back in the middle of another one
            released, came_back = self.released, self.came_back
            released.wait(60)
            came_back.append(how)
        if how == "long":
            return Step("a " * 5_000_000)
        return {"silent": Step(""), "fine": Step("go on", reward=0.25), "wrong": 7, "none": None}[how]

    def close(self) -> None:
        self.closed[self.record.fields["how"]] += 1


@pytest.fixture
def hanging() -> Iterator[list[str]]:
    """Calls hang while a test runs; those that have come back."""
    Odd.released, Odd.came_back = threading.Event(), []
    yield Odd.came_back
    Odd.released.set()


def odd(*how: str, **section: Any) -> tuple[Rollouts, Any]:
    collector, _, tokenizer = collector_of(
        MessageEnvironment(Odd, {**SECTION, **section}), odd_words, turns=3, length=4000
    )
    prompt = records_of(tokenizer, [1])[0].prompt_ids
    records = [Example(place, prompt, (), "", fields={"how": each}) for place, each in enumerate(how)]
    Odd.closed.clear()
    return collector.collect(records, 1, list(range(len(records)))), tokenizer


def test_failures_are_observed_masked_or_end_a_conversation(
    caplog: pytest.LogCaptureFixture, hanging: list[str]
) -> None:
    hows = ("fine", "raises", "gone", "lost", "hangs", "long", "silent", "reset")
    rollouts, tokenizer = odd(*hows, step_timeout_s=1.0)
    assert not hanging
    samples = rollouts.samples
    masked = dict(zip(hows, samples["masked"].tolist(), strict=True))
    assert masked == {how: how in {"gone", "lost", "hangs", "reset"} for how in hows}
    assert samples["turns"].tolist() == [3, 3, 1, 1, 1, 1, 3, 0]
    assert samples["reward"].tolist() == [0.75, *[0.0] * 7]
    text = tokenizer.decode(samples["input_ids"][1].tolist())
    assert text.count("<|im_start|>user\nError: ValueError: odd move<|im_end|>") == 2
    assert {
        name: value for name, value in rollouts.metrics.items() if value and name != "observed_tokens"
    } == {
        "tool_errors": 3,
        "episodes/lost": 3,
        "episodes/late": 1,
        "episodes/tokens": 1,
        "episodes/turns": 3,
    }
    assert samples["sample_mask"].tolist() == [1, 1, 0, 0, 0, 1, 1, 0]
    assert Odd.closed == Counter(dict.fromkeys(hows, 1)) - Counter(["reset"])
    assert (
        "1 of 8 conversations are left out of training, since a step did not return within "
        "env.step_timeout_s = 1 s (the first is of record 4)"
    ) in caplog.text
    assert "record 1: its environment failed on a response: ValueError: odd move" in caplog.text


def test_a_conversation_that_ends_twice_ends_once() -> None:
    """What a call that was given up says at last, an end and a reward, changes nothing; nor does an end that
    ``close`` repeats."""
    released, came_back = threading.Event(), threading.Event()

    class Twice(Counting):
        def step(self, message: Any) -> Step:
            if self.record.index == 1:
                released.wait(20)
                came_back.set()
                return Step("late", reward=100.0, done=True)
            if self.record.index == 0:
                step = super().step(message)
                self.close()
                return Step("a word more", reward=step.reward, done=True)
            if len(self.heard) == 2:
                released.set()
                assert came_back.wait(20)
            return super().step(message)

        def close(self) -> None:
            self.closed = getattr(self, "closed", 0) + 1
            if self.closed > 1:
                raise RuntimeError("closed already")

    section = {**SECTION, "step_timeout_s": 0.3}
    rollouts, *_ = collected(
        [1, 1, 4],
        MessageEnvironment(Twice, section),
        1,
        stream=lambda engine: ScriptedStream(engine, lambda: 0.4),
    )
    samples = rollouts.samples
    assert samples["ended"] == ["done", "late", "done"] and samples["masked"].tolist() == [False, True, False]
    assert samples["reward"].tolist() == [0.125, 0.0, 10 / 8] and samples["turns"].tolist() == [1, 1, 4]
    assert "a word" not in _heard(rollouts, tokenizer_of("qwen2.5"))[0]


def test_rewards_of_conversations_that_have_ended_are_refused() -> None:
    """An environment of batches that answers for all it ever knew, as if those that ended went on."""

    class Stubborn(Batched):
        def __init__(self) -> None:
            super().__init__()
            self.known = 0

        def step(self, turn: Turn) -> EnvironmentReturn:
            said = super().step(turn)
            self.known = max(self.known, len(turn.records))
            return replace(
                said,
                rewards=[1.0] * self.known,
                terminated=[*said.terminated, *[True] * (self.known - len(turn.records))],
            )

    with pytest.raises(
        BatchError,
        match=r"returned \{'rewards': 6, 'terminated': 6\} for 4 responses. Fix: return one of each a "
        r"response",
    ):
        collected([1, 3, 2], Stubborn())


def test_an_error_may_end_a_conversation() -> None:
    rollouts, _ = odd("raises", "fine", "exits", on_tool_error="end")
    assert rollouts.samples["turns"].tolist() == [1, 3, 1] and not rollouts.samples["masked"].any()
    assert rollouts.metrics["episodes/error"] == 2


@pytest.mark.parametrize("works", [0, 1])
def test_an_environment_that_fails_on_every_response_ends_the_run(
    works: int, caplog: pytest.LogCaptureFixture
) -> None:
    """One that has worked once may fail because of the responses."""

    class Misspelt(MessageEnv):
        def step(self, _: Any) -> Step:
            if self.record.index < works:
                return Step(done=True)
            return Step(rewards=1.0)  # type: ignore[call-arg]

    environment = MessageEnvironment(Misspelt, {**SECTION, "threads": 1})
    if works:
        rollouts, *_ = collected([1] * 200, environment, 1, turns=2)
        assert rollouts.metrics["tool_errors"] == 2 * 199
    else:
        with pytest.raises(
            RewardError, match=r"Misspelt\.step raised on each of the first 256 .*'rewards' \("
        ):
            collected([1] * 200, environment, 1, turns=2)
        # A run with small steps is not over before it fails.
        for step_rows, most in ((8, 32), (64, 64), (1024, 256)):
            small = MessageEnvironment(Misspelt, {**SECTION, "threads": 1})
            small.judges_groups(step_rows)
            with pytest.raises(RewardError, match=f"each of the first {most} "):
                collected([1] * 200, small, 1, turns=2)
    told = [record.getMessage() for record in caplog.records if "failed on a response" in record.getMessage()]
    assert len(told) == (3 if works else 12) and "further ones are counted" in told[2] and __file__ in told[0]


def test_answers_that_are_none_are_named() -> None:
    with pytest.raises(BatchError, match=r"Odd\.step returned 7\. Fix: return a Step, as Step\(reward"):
        odd("wrong")
    with pytest.raises(BatchError, match=r"returned None"):
        odd("none")


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ({"reward": torch.ones(2)}, r"the reward tensor\(\[1., 1.\]\). Fix: return a finite number"),
        ({"reward": 10**400}, r"the reward 1000\d+\. Fix"),
        ({"done": np.array([True, False])}, r"Saying\.step returned done = array.*Fix: return True or False"),
        ({"accuracy": 7}, r"Saying\.step returned accuracy = 7\. Fix: return a number from 0 to 1, or None"),
        ({"accuracy": float("nan")}, r"returned accuracy = nan"),
        ({"accuracy": "good"}, r"returned accuracy = 'good'"),
        ({"metrics": None}, r"Saying\.step returned metrics = None\. Fix: return names and numbers"),
        ({"metrics": {"calls": "two"}}, r"the metric 'calls' = 'two'\. Fix: return a number under a text"),
        ({"metrics": {3: 1.0}}, r"the metric 3 = 1\.0"),
        ({"reason": "won"}, r"the reason 'won'\. Fix: return None, or one of done, length"),
    ],
)
def test_fields_of_a_step_that_cannot_be_read_are_named(step: dict[str, Any], message: str) -> None:
    class Saying(MessageEnv):
        def step(self, _: Any) -> Step:
            return Step("More.", **{"done": True, **step})

    with pytest.raises(BatchError, match=message):
        collected([1, 1], MessageEnvironment(Saying, SECTION))


def test_numbers_of_any_library_are_read() -> None:
    class Counted(MessageEnv):
        def step(self, _: Any) -> Step:
            return Step(
                reward=torch.tensor(0.5),  # type: ignore[arg-type]
                accuracy=np.float32(1.0),  # type: ignore[arg-type]
                done=np.bool_(True),  # type: ignore[arg-type]
                metrics={"calls": np.int64(2), "seconds": torch.tensor([0.25])},  # type: ignore[dict-item]
            )

    rollouts, *_ = collected([1, 1], MessageEnvironment(Counted, SECTION), 1)
    assert rollouts.samples["reward"].tolist() == [0.5, 0.5] and rollouts.samples["turns"].tolist() == [1, 1]
    assert rollouts.samples["accuracy"].tolist() == [1.0, 1.0] and rollouts.metrics["calls"] == 4


def test_parts_of_rewards_are_summed_over_turns_too() -> None:
    """As the rewards are that they are parts of; an environment with a name is such a part."""
    rollouts, *_ = collected([1, 3], NamedEnvironments({"only": MessageEnvironment(Counting, SECTION)}), 1)
    assert rollouts.samples["turns"].tolist() == [1, 3]
    assert rollouts.samples["reward"].tolist() == [1 / 8, 6 / 8]
    assert rollouts.samples["reward/only"].tolist() == [1 / 8, 6 / 8]


def test_half_characters_of_an_observation_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """JSON can write half of a surrogate pair, which no tokenizer reads; both halves are a character."""

    class Halves(MessageEnv):
        def step(self, _: Any) -> Step:
            if not hasattr(self, "said"):
                self.said = True
                return Step([{"role": "user", "content": "<a \ud800 b \ud83d\ude00"}])
            raise ValueError("\udfff" * 2000)

    rollouts, *_ = collected([1], MessageEnvironment(Halves, SECTION), 1, turns=3)
    text = tokenizer_of("qwen2.5").decode(rollouts.samples["input_ids"][0].tolist())
    assert "<a \ufffd b \U0001f600<" in text and "Error: ValueError: \ufffd" in text
    told = caplog.records[0].getMessage()
    assert "ValueError: " + r"\udfff" * 1000 + f" ({__file__}:" in told


@pytest.mark.usefixtures("hanging")
def test_an_environment_that_always_hangs_ends_the_run() -> None:
    with pytest.raises(RewardError, match=r"did not return within 0\.2 s"):
        odd(*["hangs"] * 9, threads=2, step_timeout_s=0.2)


def test_what_ends_a_run_does_not_wait_for_environments(hanging: list[str]) -> None:
    """An interrupt, for example: a call that is under way is left alone, and conversations are ended."""

    class Interrupted(Odd):
        def step(self, message: Any) -> Any:
            if self.record.fields["how"] == "fine":
                raise KeyboardInterrupt
            return super().step(message)

    collector, _, tokenizer = collector_of(MessageEnvironment(Interrupted, SECTION), odd_words)
    prompt = records_of(tokenizer, [1])[0].prompt_ids
    records = [
        Example(place, prompt, (), "", fields={"how": each}) for place, each in enumerate(["hangs", "fine"])
    ]
    Odd.closed.clear()
    with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            collectors,
            "Waves",
            lambda *arguments, **options: ScriptedStream(ScriptedEngine(odd_words, []), lambda: 0.0),
        )
        collector.collect(records, 1, [1, 2])
    assert not hanging and Odd.closed == Counter(["hangs", "fine"])


def test_a_thread_without_a_call_ends_once_nobody_waits(hanging: list[str]) -> None:
    """So does one whose call was given up, when that comes back."""
    threads, made = TurnThreads(), list[int]()
    begun, released = threading.Event(), Odd.released

    def hang() -> int:
        begun.set()
        return int(released.wait(60))

    known = set(threading.enumerate())
    for number, call in enumerate([hang, lambda: made.append(1)]):
        threads.start(Call(number, call, threads, 2, 20.0))
    assert begun.wait(20) and [ended.number for ended in threads.take(wait=True)] == [1]
    threads.forget()
    released.set()
    for thread in set(threading.enumerate()) - known:
        thread.join(20)
        assert not thread.is_alive(), "one that has nothing to do waits for ever"
    assert made == [1] and threads.busy == 0


class Batched:
    """An environment of several turns that is asked for whole batches."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def step(self, turn: Turn) -> EnvironmentReturn:
        self.batches.append([record.index for record in turn.records])
        counts = [(known or 0) + 1 for known in turn.metadata]
        assert counts == list(turn.turns)
        done = [count == record.fields["turns"] for count, record in zip(counts, turn.records, strict=True)]
        return EnvironmentReturn(
            [1.0] * len(counts), done, [False] * len(counts), ["Again."] * len(counts), counts
        )

    def fault_of_reference(self, answer: str) -> None: ...

    def close(self) -> None: ...


def test_environments_of_batches_go_on_too() -> None:
    environment = Batched()
    rollouts, *_ = collected([1, 3, 2], environment)
    assert environment.batches == [[0, 0, 1, 1, 2, 2], [1, 1, 2, 2], [1, 1]]
    assert rollouts.samples["reward"].tolist() == [1, 1, 3, 3, 2, 2]
    with pytest.raises(
        BatchError, match=r"a conversation has only one turn\. Fix: write grpo\.max_rollout_turns"
    ):
        collected([2], Batched(), turns=1)


def test_an_environment_may_call_a_conversation_late_by_a_rule_of_its_own() -> None:
    class Impatient(Batched):
        def step(self, turn: Turn) -> EnvironmentReturn:
            rows = len(turn.records)
            return EnvironmentReturn([None] * rows, [True] * rows, [True] * rows, reasons=["late"] * rows)

    rollouts, *_ = collected([1, 2], Impatient(), 1)
    assert rollouts.samples["ended"] == ["late", "late"] and rollouts.samples["masked"].all()


def test_each_environment_answers_its_own_conversations() -> None:
    named = NamedEnvironments({"a": MessageEnvironment(Counting, SECTION), "b": Batched()})
    collector, _, tokenizer = collector_of(named, odd_words)
    first, second, third = records_of(tokenizer, [2, 3, 1])
    records = [
        Example(place, each.prompt_ids, (), "", env_name=name, fields=each.fields)
        for place, (each, name) in enumerate([(first, "a"), (second, "b"), (third, "a")])
    ]
    samples = collector.collect(records, 1, [1, 2, 3]).samples
    assert samples["reward"].tolist() == [3 / 8, 3.0, 1 / 8] and samples["turns"].tolist() == [2, 3, 1]


class Board(MessageEnv):
    """Begins with a prompt of its own."""

    def reset(self, record: Example) -> Any:
        return [{"role": "system", "content": "Play."}, {"role": "user", "content": f"Board {record.index}"}]

    def step(self, message: Any) -> Step:
        return Step(done=True, reward=1.0, accuracy=0.5)


def test_an_environment_may_begin_the_conversation() -> None:
    rollouts, _, tokenizer = collected([1, 1], MessageEnvironment(Board, SECTION), 1)
    samples = rollouts.samples
    for row in range(2):
        prompt = tokenizer.decode(samples["prompt_ids"][row, : samples["prompt_lengths"][row]].tolist())
        assert prompt == (
            "<|im_start|>system\nPlay.<|im_end|>\n<|im_start|>user\nBoard "
            f"{row}<|im_end|>\n<|im_start|>assistant\n"
        )
    assert samples["accuracy"].tolist() == [0.5, 0.5]


def test_lost_engines_are_asked_again_for_what_is_missing() -> None:
    expected, *_ = collected([2, 3], MessageEnvironment(Counting, SECTION))

    class Dying(ScriptedEngine):
        lives = 1

        def generate(self, data: Any, greedy: bool = False) -> BatchedDataDict[Any]:
            if len(self.calls) == 2 and self.lives:
                self.lives -= 1
                raise RewardError("the engine died")
            return super().generate(data, greedy)

    collector, engine, tokenizer = collector_of(MessageEnvironment(Counting, SECTION), odd_words)
    dying = Dying(odd_words, engine.stops)

    class Refitted:
        generation: Any = dying
        replaced = 0

        def bring_up_to_date(self) -> None: ...

        def replace_lost_engines(self, error: Exception) -> None:
            assert "died" in str(error)
            self.replaced += 1

    refitted = Refitted()
    object.__setattr__(collector, "engine", refitted)
    found = collector.collect(records_of(tokenizer, [2, 3]), 2, sampling_seeds(3, 1, 2, 2), weight_version=1)
    assert refitted.replaced == 1
    assert all(_equal(found.samples[name], expected.samples[name]) for name in expected.samples)


def test_reasons_have_one_word_each() -> None:
    assert len({*StopReason}) == len(StopReason) == 8
