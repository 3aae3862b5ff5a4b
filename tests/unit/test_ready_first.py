"""Batches of groups that are complete first: requests over pauses, ages, what a checkpoint and a ledger
keep."""

from __future__ import annotations

import json
import math
import random
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.algorithms.ahead import HeldEngines
from megarl.algorithms.ready_first import Ledger, Order, ReadyFirst, Replay
from megarl.algorithms.rollout_source import WaitingBatches
from megarl.algorithms.sampled_batch import Sampling, groups_of, load_batches
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.deadlines import VALIDATE, Call
from megarl.errors import MegarlError, RewardError, UnusableCheckpointError, WorkerError
from megarl.models.generation.shared_stream import SharedStream
from megarl.models.generation.stream import Completion, Request
from megarl.observe.timing import PhaseTimer
from megarl.rollout.collector import Rollouts

STOP, WIDTH = 7, 40


def following(tokens: list[int]) -> int:
    """What is sampled behind some tokens, whoever asks and how often."""
    return (sum((place + 1) * token for place, token in enumerate(tokens)) * 31 + len(tokens)) % 11


def whole(prompt: list[int], most: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) - len(prompt) < most:
        tokens.append(following(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


class SlowStream:
    """Samples some tokens of some requests at each of so many polls; its log-probabilities tell the version
    of its weights."""

    in_waves = False

    def __init__(
        self,
        draw: random.Random,
        most: int,
        fails_at: int | None = None,
        polls: float = math.inf,
        version: int = 0,
    ) -> None:
        self.version = version
        self.draw, self.most, self.left, self.polls, self.fails_at = draw, most, polls, 0, fails_at
        self.open: dict[int, tuple[Request, list[int]]] = {}

    def submit(self, requests: Mapping[int, Request]) -> None:
        if self.fails_at == 0:
            raise WorkerError("the engine died")
        self.open |= {number: (request, []) for number, request in requests.items()}

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        self.polls += 1
        if self.polls == self.fails_at:
            raise WorkerError("the engine died")
        found: dict[int, Completion] = {}
        if not self.left:
            return found
        self.left -= 1
        for number, (request, tokens) in list(self.open.items()):
            bound = self.most if request.max_new_tokens is None else min(self.most, request.max_new_tokens)
            for _ in range(self.draw.randrange(3)):
                tokens.append(following([*request.prompt.tolist(), *tokens]))
                if tokens[-1] == STOP or len(tokens) == bound:
                    del self.open[number]
                    found[number] = self._said(tokens, tokens[-1] != STOP)
                    break
        return found

    def abort(self, numbers: Iterable[int]) -> None:
        self.interrupt(numbers)

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        return {
            number: self._said(self.open.pop(number)[1], False) for number in numbers if number in self.open
        }

    def _said(self, tokens: list[int], truncated: bool) -> Completion:
        return Completion(
            np.array(tokens, np.int64),
            np.array([-token / 10 - self.version for token in tokens], np.float32),
            truncated,
        )


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 10_000), pauses=st.integers(0, 4), drains=st.booleans(), texts=st.booleans())
def test_what_is_sampled_over_pauses_is_what_is_sampled_at_once(
    seed: int, pauses: int, drains: bool, texts: bool
) -> None:
    draw = random.Random(seed)
    polls = iter([draw.randrange(1, 6) for _ in range(pauses)])
    # what a pause waits for is sampled in it
    bounded = not drains and not texts
    streams: list[SlowStream] = []

    def connect() -> SlowStream:
        streams.append(
            SlowStream(
                draw, WIDTH, polls=next(polls, math.inf) if bounded else math.inf, version=len(streams)
            )
        )
        return streams[-1]

    shared = SharedStream(connect, WIDTH, stops_at_texts=texts, drains=drains)
    views = [shared.view() for _ in range(2)]
    prompts = {
        (view, number): [draw.randrange(11) for _ in range(draw.randrange(1, 5))]
        for view in range(2)
        for number in range(3)
    }
    for (view, number), prompt in prompts.items():
        bound = draw.choice([None, 1, 9])
        views[view].submit({number: Request(np.array(prompt, np.int64), seed=5, max_new_tokens=bound)})
        prompts[view, number] = whole(prompt, bound or WIDTH)
    for version in range(pauses):
        shared.resume(version)
        # until it has sampled what it may, or nothing is left to sample
        while streams[-1].left and shared._open and (streams[-1].open or not streams[-1].polls):
            threading.Event().wait(0.001)
        shared.pause()
        if not bounded:
            break
    shared.resume(pauses)
    found: dict[tuple[int, int], Completion] = {}
    for place, view in enumerate(views):
        while len([key for key in found if key[0] == place]) < 3:
            found |= {(place, number): each for number, each in view.poll().items()}
    shared.pause()
    shared.close()
    for key, completion in found.items():
        assert completion.tokens.tolist() == prompts[key], key
        assert completion.versions is not None
        np.testing.assert_allclose(
            completion.logprobs, -completion.tokens / 10 - completion.versions, rtol=1e-6
        )
        assert (np.diff(completion.versions) >= 0).all()
        assert completion.truncated == (completion.tokens[-1] != STOP)


def test_a_request_that_no_engine_has_begun_has_the_weights_that_sample_it() -> None:
    shared = SharedStream(lambda: SlowStream(random.Random(1), WIDTH), WIDTH)
    view = shared.view()
    shared.resume(3)
    shared.pause()
    view.submit({0: Request(np.array([1, 2], np.int64))})
    shared.resume(4)
    assert (view.poll()[0].versions == 4).all()
    shared.pause()
    shared.close()
    with pytest.raises(MegarlError, match="the run ends"):
        view.poll()
    shared.resume(5)
    assert shared._thread is None, "nothing begins any more"


@pytest.mark.parametrize("fails_at", [0, 3])
def test_requests_outlive_their_engines(fails_at: int) -> None:
    """Those that are lost as requests are handed in, too."""
    streams = iter(
        [SlowStream(random.Random(1), WIDTH, fails_at), SlowStream(random.Random(1), WIDTH)],
    )
    shared = SharedStream(lambda: next(streams), WIDTH)
    view = shared.view()
    view.submit({0: Request(np.array([4, 4], np.int64))})
    shared.resume(0)
    while not shared.failed:
        time.sleep(0.001)
    with pytest.raises(WorkerError, match="died"):
        shared.pause()
    shared.resume(1)
    assert view.poll()[0].tokens.tolist() == whole([4, 4], WIDTH)
    shared.pause()
    shared.close()


class Records(list[Any]):
    def select(self, indices: list[int]) -> list[Any]:
        return [SimpleNamespace(index=index) for index in indices]


class Counting:
    """The order of the data: 0, 1, 2, ..."""

    epoch, identity = 0, {"seed": 1}

    def __init__(self, taken: int = 0) -> None:
        self.taken = taken

    def take(self, count: int) -> list[int]:
        self.taken += count
        return list(range(100 + self.taken - count, 100 + self.taken))


class Engines:
    """Groups that are complete when they are let go."""

    def __init__(self) -> None:
        self.gates: dict[int, threading.Event] = {}
        self.begun: list[int] = []
        self.resumed: list[int] = []
        self.refits: list[int] = []
        self.changed = threading.Condition()
        self.error: Exception | None = None

    def collect(self, index: int, ordinal: int, version: int, timer: PhaseTimer) -> Rollouts:
        with self.changed:
            gate = self.gates.setdefault(ordinal, threading.Event())
            self.begun.append(ordinal)
            self.changed.notify_all()
        gate.wait()
        if self.error is not None:
            raise self.error
        samples = BatchedDataDict(
            {"ordinal": torch.tensor([ordinal]), "weight_version": torch.tensor([version])}
        )
        return Rollouts(samples, [SimpleNamespace(index=index)], {})  # type: ignore[list-item]

    def finish(self, ordinal: int) -> None:
        with self.changed:
            self.gates.setdefault(ordinal, threading.Event()).set()


def joined(groups: list[Rollouts]) -> Rollouts:
    columns = {name: torch.cat([group.samples[name] for group in groups]) for name in groups[0].samples}
    return Rollouts(BatchedDataDict(columns), [group.records[0] for group in groups], {})


def made(directory: Path, engines: Engines, order: Order, last: int | None, taken: int = 0) -> ReadyFirst:
    shared: Any = SimpleNamespace(
        resume=engines.resumed.append, pause=lambda: None, close=lambda: None, failed=False
    )
    shared.take_busy_seconds = lambda: 0.0
    refit: Any = SimpleNamespace(bring_up_to_date=lambda: engines.refits.append(len(engines.refits)))
    sampler: Any = Counting(taken)
    return ReadyFirst(
        order,
        engines.collect,
        joined,
        shared,
        HeldEngines(refit),
        sampler,
        last,
        PhaseTimer(),
        PhaseTimer(),
        Ledger(directory / "ledger", {"seed": 1}),
    )


def arrive(ready: ReadyFirst, engines: Engines, ordinals: Iterable[int]) -> None:
    """Let groups be complete, one after another."""
    for ordinal in ordinals:
        engines.finish(ordinal)
        with ready._changed:
            ready._changed.wait_for(
                lambda ordinal=ordinal: ordinal in ready._arrived or ready._failure is not None
            )  # type: ignore[misc]


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    prompts=st.integers(1, 3),
    lookahead=st.integers(1, 3),
    more=st.integers(0, 1),
)
def test_each_group_is_trained_on_once_and_before_it_is_too_old(
    tmp_path_factory: pytest.TempPathFactory, seed: int, prompts: int, lookahead: int, more: int
) -> None:
    """In whatever order they are complete; some only when a step waits for them."""
    draw, engines, steps = random.Random(seed), Engines(), 6
    ready = made(
        tmp_path_factory.mktemp("run"),
        engines,
        Order(prompts, lookahead, lookahead + more, drops=False),
        steps,
    )
    trained: list[int] = []

    def finish_some() -> None:
        while not done.is_set():
            with engines.changed:
                waiting = [ordinal for ordinal, gate in engines.gates.items() if not gate.is_set()]
            for ordinal in draw.sample(waiting, min(len(waiting), 1)):
                engines.finish(ordinal)
            done.wait(0.0005)

    done = threading.Event()
    finisher = threading.Thread(target=finish_some, daemon=True)
    finisher.start()
    for step in range(1, steps + 1):
        batch = ready.next(step).rollouts.samples
        assert len(batch["ordinal"]) == prompts and batch["ordinal"].tolist() == sorted(
            batch["ordinal"].tolist()
        )
        assert (step - 1 - batch["weight_version"] <= lookahead + more).all(), f"seed {seed}"
        trained += batch["ordinal"].tolist()
        ready.settle()
    done.set()
    finisher.join()
    ready.close()
    assert sorted(trained) == list(range(steps * prompts))
    assert sorted(engines.begun) == list(range(steps * prompts))


def test_a_step_takes_what_is_complete_first(tmp_path: Path) -> None:
    engines = Engines()
    ready = made(tmp_path, engines, Order(2, 2, 2, drops=False), None)
    ready._fill(1, 0)
    arrive(ready, engines, [3, 1])
    assert ready.next(1).rollouts.samples["ordinal"].tolist() == [1, 3]
    assert ready.metrics == {"rollouts_ready": 0.0, "rollouts_running": 4.0, "rollouts_dropped": 0.0}
    arrive(ready, engines, [5, 4])
    assert ready.next(2).rollouts.samples["ordinal"].tolist() == [4, 5]
    # 0 and 2 were begun two steps ago, and would be too old for the step after this one
    arrive(ready, engines, [7, 6])
    threading.Timer(0.05, lambda: [engines.finish(ordinal) for ordinal in (0, 2)]).start()
    assert ready.next(3).rollouts.samples["ordinal"].tolist() == [0, 2]


def test_old_groups_are_dropped_and_counted(tmp_path: Path) -> None:
    engines = Engines()
    ready = made(tmp_path, engines, Order(1, 2, 2, drops=True), None)
    ready._fill(1, 0)
    for step, ordinal in ((1, 1), (2, 2), (3, 3)):
        arrive(ready, engines, [ordinal])
        assert ready.next(step).rollouts.samples["ordinal"].tolist() == [ordinal]
    arrive(ready, engines, [0, 4])
    assert ready.next(4).rollouts.samples["ordinal"].tolist() == [4]
    assert ready.metrics["rollouts_dropped"] == 1.0


def test_a_checkpoint_has_what_waits_and_what_is_under_way(tmp_path: Path) -> None:
    engines = Engines()
    ready = made(tmp_path, engines, Order(2, 2, 2, drops=False), None)
    ready._fill(1, 0)
    arrive(ready, engines, [2, 0, 3])
    assert ready.next(1).rollouts.samples["ordinal"].tolist() == [0, 2]
    ready.settle()
    (tmp_path / "checkpoint").mkdir()
    ready.save(tmp_path / "checkpoint")
    told = groups_of(tmp_path / "checkpoint")
    assert told == {"arrived": [3], "running": [[1, 101], [4, 104], [5, 105]]}
    again = Engines()
    resumed = made(tmp_path / "resumed", again, Order(2, 2, 2, drops=False), None, taken=6)
    resumed.resume(told, load_batches(tmp_path / "checkpoint", Records()))  # type: ignore[arg-type]
    for ordinal in (1, 4, 5):
        again.finish(ordinal)
    trained = [
        *resumed.next(2).rollouts.samples["ordinal"].tolist(),
        *resumed.next(3).rollouts.samples["ordinal"].tolist(),
    ]
    assert 3 in trained[:2] and sorted(trained) == [1, 3, 4, 5]
    assert sorted(again.begun)[:3] == [1, 4, 5]


@pytest.mark.parametrize("arrived", [[2, 0], [2, 0, 3]], ids=["none waits", "one waits"])
def test_another_schedule_does_not_lose_what_is_under_way(tmp_path: Path, arrived: list[int]) -> None:
    engines = Engines()
    ready = made(tmp_path, engines, Order(2, 2, 2, drops=False), None)
    ready._fill(1, 0)
    arrive(ready, engines, arrived)
    ready.next(1)
    (tmp_path / "checkpoint").mkdir()
    ready.save(tmp_path / "checkpoint")
    data: Any = Records()
    with pytest.raises(UnusableCheckpointError, match=r"has 4 batches .*schedule: ready_first"):
        WaitingBatches().load(tmp_path / "checkpoint", data)


def test_an_environment_that_fails_ends_the_run(tmp_path: Path) -> None:
    engines = Engines()
    ready = made(tmp_path, engines, Order(1, 1, 1, drops=False), None)
    engines.error = RewardError("no reward")
    engines.finish(0)
    with pytest.raises(RewardError, match="no reward"):
        ready.next(1)


def test_a_step_trains_while_its_weights_are_validated(tmp_path: Path) -> None:
    """Groups that are complete make its batch; engines sample on behind the validation, which has their
    weights until then."""
    engines, trains = Engines(), threading.Event()
    ready = made(tmp_path, engines, Order(1, 2, 2, drops=False), None)
    ready._fill(1, 0)
    arrive(ready, engines, [0, 1])
    ready.next(1)
    ready.settle()
    assert engines.resumed == [0] and ready.validated() is None

    def validate() -> Any:
        assert trains.wait(60)
        ready._engines.bring_up_to_date()
        assert Call.of("generate").phase == VALIDATE
        return [engines.resumed.copy(), engines.refits.copy()]

    ready.validate_beside(validate)
    assert ready.next(2).rollouts.samples["ordinal"].tolist() == [1]
    trains.set()
    ready.settle()
    assert ready.validated() == [[0], [0, 1]], "not the weights of a step that trains meanwhile"
    assert engines.resumed == [0, 1]
    arrive(ready, engines, [2])
    ready.next(3)
    assert ready.validated() is None and engines.refits == [0, 1, 2]
    ready.settle()
    ready.close()


def test_a_validation_that_fails_ends_a_step_that_waits_for_groups(tmp_path: Path) -> None:
    ready = made(tmp_path, Engines(), Order(1, 1, 1, drops=False), None)

    def validate() -> Any:
        raise RewardError("no scorer")

    ready.validate_beside(validate)
    with pytest.raises(RewardError, match="no scorer"):
        ready.next(1)
    ready.close()


def test_a_ledger_repeats_its_batches_and_refuses_others(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path, {"seed": 1, "prompts": 2})
    samples: BatchedDataDict[Any] = BatchedDataDict(
        {"input_ids": torch.arange(6).view(2, 3), "response_text": ["a", "b"]}
    )
    records: Any = [SimpleNamespace(index=4), SimpleNamespace(index=2)]
    ledger.write(1, Sampling(Rollouts(samples, records, {"errors": 1.0}), samples, {}, epoch=3))
    data: Any = Records()
    found = Replay(ledger, data).next(1)
    assert torch.equal(found.rollouts.samples["input_ids"], samples["input_ids"]) and found.epoch == 3
    assert found.rollouts.samples["response_text"] == ["a", "b"] and [
        each.index for each in found.rollouts.records
    ] == [4, 2]
    with pytest.raises(UnusableCheckpointError, match="step 2: the ledger"):
        ledger.read(2, data)
    with pytest.raises(UnusableCheckpointError, match="belongs to a run with seed = 1, and this one has 2"):
        Ledger(tmp_path, {"seed": 2, "prompts": 2}).read(1, data)
    path = tmp_path / "step_1.safetensors"
    content = path.read_bytes()
    for broken in (content[:-1], content[:-1] + bytes([content[-1] ^ 1]), b""):
        path.write_bytes(broken)
        with pytest.raises(UnusableCheckpointError, match="was changed after it was written"):
            ledger.read(1, data)
    path.write_bytes(content)
    for text in ("{", "[]", "3", '{"digest": ""}', '{"digest": "", "columns": 3}'):
        (tmp_path / "step_1.json").write_text(text)
        with pytest.raises(UnusableCheckpointError, match="step 1"):
            ledger.read(1, data)
    (tmp_path / "run.json").write_text(json.dumps([1]))
    with pytest.raises(UnusableCheckpointError, match="step 1"):
        ledger.read(1, data)
