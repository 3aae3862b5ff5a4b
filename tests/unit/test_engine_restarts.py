"""Engines that are killed or hang are started anew and asked again: the samples are those of engines that
nothing happened to.

The engine is a process of its own, which really ends, or really stops; the policy beside it is played, and
keeps its weights.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.algorithms.refit import Refit
from megarl.data.datasets import Example
from megarl.data.tokenization import get_tokenizer
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.token_batches import pad_rows
from megarl.errors import BatchError, DeadlineError, MegarlError, RefitError, WorkerError, WorkerLostError
from megarl.models.generation.interfaces import RolloutEngine
from megarl.observe.timing import PhaseTimer
from megarl.rollout.collector import Collector
from megarl.rollout.environment import EnvironmentReturn, Turn
from megarl.rollout.samples import sampling_seeds
from tests.tiers import sampled
from tests.unit.reference_policy import ReferencePolicy

# what it answers follows from weights, prompt and seed
ENGINE = """
import hashlib, json, os, sys
weights = None
for line in sys.stdin:
    call = json.loads(line)
    if call["signal"]:
        os.kill(os.getpid(), call["signal"])
    answer = None
    if call["method"] == "load":
        weights = call["weights"]
    if call["method"] == "generate":
        rows = [repr([weights, *row]).encode() for row in call["rows"]]
        drawn = [hashlib.blake2b(row, digest_size=4).digest() for row in rows]
        answer = [[5 + byte % 20 for byte in row] for row in drawn]
    print(json.dumps(answer), flush=True)
"""
PATIENCE_S = 2.0
"""Of calls that hang; every other one answers at once."""


class PlayedPolicy:
    """A policy on the engine's devices, whose weights are a number; it is told to move as often as a real one
    would be."""

    def __init__(self) -> None:
        self.weights, self.moves = 0, list[str]()
        self.mailboxes: dict[str, Any] = {}
        self.worker_group = SimpleNamespace(get_all_worker_results=lambda futures: futures)

    def prepare_refit_info(self) -> dict[str, Any]:
        return {}

    def send_slices(self, wanted: Any) -> list[str]:
        return []

    def hand_over_weights(self, session: int, ticket: int, most: float | None) -> list[Any]:
        return []

    def offload_before_refit(self) -> None:
        self.moves.append("before refit")

    def offload_after_refit(self) -> None:
        self.moves.append("leaves")

    def prepare_for_lp_inference(self) -> None:
        self.moves.append("returns")


class EngineProcess(RolloutEngine):
    """An engine in a process.

    Args:
        policy: whose weights it loads.
        faults: by method, the signal that its process sends itself at the next call of it; used up one after
            the other.
        starts_that_fail: how many restarts go wrong.
    """

    def __init__(self, policy: PlayedPolicy, faults: dict[str, list[int]], starts_that_fail: int = 0) -> None:
        self._policy, self._faults, self._starts_that_fail = policy, faults, starts_that_fail
        self._version: int | None = None
        self._hangs = False
        self._start()

    def _start(self) -> None:
        command = [sys.executable, "-S", "-c", ENGINE]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        self._hangs = False

    def _call(self, method: str, **arguments: Any) -> Any:
        due = self._faults.get(method, [])
        number = due.pop(0) if due else 0
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            self.process.stdin.write(
                json.dumps({"method": method, "signal": number, **arguments}).encode() + b"\n"
            )
        except BrokenPipeError:
            raise WorkerError(f"{method}: the engine's process is gone") from None
        ready, _, _ = select.select(
            [self.process.stdout], [], [], PATIENCE_S if number == signal.SIGSTOP else None
        )
        if not ready:
            self._hangs = True
            raise DeadlineError(f"{method}: no answer")
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            raise WorkerError(f"{method}: the engine's process died")
        return json.loads(line)

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def ranks(self) -> int:
        return 1

    @property
    def connected(self) -> bool:
        return True

    def disconnect(self) -> None:
        pass

    def init_collective(self, ip: str, port: int, world_size: int) -> list[Any]:
        raise NotImplementedError

    def prepare_refit_info(self, state_dict_info: dict[str, Any]) -> None:
        pass

    def meet(self, mailboxes: Any) -> int:
        return 1

    def update_weights_from_policy(self, ticket: int) -> list[Any]:
        self._version = None
        self._call("load", weights=self._policy.weights)
        return [self._policy.weights]

    def results(self, futures: list[Any]) -> list[Any]:
        return futures

    def loaded(self, versions: list[Any]) -> None:
        self._version = versions[0] if versions else None

    def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._call("prepare")
        return True

    def generate(self, data: Any, greedy: bool, *, sampling: Any = None) -> Any:
        if self._version is None:
            raise RefitError("the engine has no complete weights")
        prompts = [
            ids[:length].tolist()
            for ids, length in zip(data["input_ids"], data["input_lengths"], strict=True)
        ]
        if any(99 in prompt for prompt in prompts):
            raise BatchError("99 is no token")
        answers = self._call(
            "generate", rows=list(zip(prompts, data["sampling_seeds"].tolist(), strict=True))
        )
        ids, lengths = pad_rows(
            [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)], 0
        )
        return BatchedDataDict(
            {
                "output_ids": ids,
                "unpadded_sequence_lengths": lengths,
                "generation_lengths": lengths - data["input_lengths"],
                "logprobs": torch.zeros(ids.shape),
            }
        )

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        self._call("finish")
        return True

    def is_alive(self) -> bool:
        return not self._hangs and self.process.poll() is None

    def restart(self, policy: Any = None) -> None:
        assert policy is self._policy
        self.shutdown()
        self._version = None
        policy.offload_after_refit()
        if self._starts_that_fail:
            self._starts_that_fail -= 1
            raise WorkerLostError("the engine died while it started")
        self._start()
        self._call("finish")
        policy.prepare_for_lp_inference()

    def shutdown(self) -> bool:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()
        return True


class Even:
    """Rewards answers that begin with an even token."""

    def step(self, turn: Turn) -> EnvironmentReturn:
        rewards = [1.0 - len(text) % 2 for text in turn.responses]
        return EnvironmentReturn(rewards, [True] * len(rewards), [False] * len(rewards))


@pytest.fixture
def running() -> Iterator[list[EngineProcess]]:
    engines: list[EngineProcess] = []
    yield engines
    for engine in engines:
        engine.shutdown()


class Rollout:
    """Two steps of a run: samples with the first weights, other weights, samples with these."""

    def __init__(
        self, model: str, faults: dict[str, list[int]], most: int, starts_that_fail: int = 0
    ) -> None:
        self.policy = PlayedPolicy()
        self.engine = EngineProcess(
            self.policy, {method: list(numbers) for method, numbers in faults.items()}, starts_that_fail
        )
        self.told: list[MegarlError] = []
        self.refit = Refit(
            self.policy, self.engine, colocated=True, max_restarts=most, on_restart=self.told.append
        )  # type: ignore[arg-type]
        self.timer = PhaseTimer()
        tokenizer = get_tokenizer({"name": model})
        self.collector = Collector(None, tokenizer, Even(), self.timer, None, self.refit)  # type: ignore[arg-type]

    def step(
        self, step: int, prompts: tuple[tuple[int, ...], ...] = ((5, 6, 7), (8,))
    ) -> BatchedDataDict[Any]:
        records = [Example(place, ids, (), "2") for place, ids in enumerate(prompts)]
        samples = self.collector.collect(
            records, 3, sampling_seeds(11, step, 2, 3), weight_version=step - 1
        ).samples
        self.policy.weights, self.refit.stale = step, True
        return samples

    def steps(self) -> list[BatchedDataDict[Any]]:
        return [self.step(1), self.step(2)]


def equal(one: BatchedDataDict[Any], other: BatchedDataDict[Any]) -> bool:
    assert set(one) == set(other)
    return all(
        torch.equal(one[name], other[name]) if torch.is_tensor(one[name]) else one[name] == other[name]
        for name in one
    )


# the calls of a step: the weights' memory, the weights, the cache's memory, answers, rest
MOMENTS = [
    ("prepare", [0, 9]),
    ("prepare", [0, 0, 9]),
    ("load", [9]),
    ("load", [0, 9]),
    ("generate", [9]),
    ("generate", [0, 9]),
]
MOMENTS += [
    ("finish", [9]),
    ("finish", [0, 9]),
    ("generate", [0, 9, 9]),
    ("generate", [0, int(signal.SIGSTOP)]),
]


@sampled(4)
@pytest.mark.parametrize(
    ("method", "numbers"),
    MOMENTS,
    ids=[f"{method}-{'-'.join(map(str, numbers))}" for method, numbers in MOMENTS],
)
def test_lost_engines_cost_time_alone(
    model: str, running: list[EngineProcess], method: str, numbers: list[int]
) -> None:
    undisturbed = Rollout(model, {}, 0)
    running.append(undisturbed.engine)
    expected = undisturbed.steps()
    assert not equal(*expected), "new weights and seeds give other samples"
    run = Rollout(model, {method: numbers}, 3)
    running.append(run.engine)
    first = run.engine.process.pid
    samples = run.steps()
    lost = sum(number != 0 for number in numbers)
    assert all(map(equal, samples, expected))
    assert run.refit.restarts == len(run.told) == lost and run.engine.process.pid != first
    with pytest.raises(ProcessLookupError):
        os.kill(first, 0)
    # each answer counts once, and the time that a restart takes has a name
    assert [len(each) for each in run.timer.take_sequences().values()] == [2]
    assert run.timer.collect()["engine_restart_s"] > 0
    # moved as a restart says, and else no more often than for its refits
    assert run.policy.moves.count("returns") == lost


@pytest.mark.parametrize("most", [0, 2])
def test_in_the_end_the_loss_ends_the_run(model: str, running: list[EngineProcess], most: int) -> None:
    run = Rollout(model, {"generate": [9] * 9}, most)
    running.append(run.engine)
    with pytest.raises(WorkerError, match="generate: the engine's process died"):
        run.step(1)
    assert run.refit.restarts == len(run.told) == most


@pytest.mark.parametrize("most", [1, 2])
def test_a_start_that_fails_counts(model: str, running: list[EngineProcess], most: int) -> None:
    run = Rollout(model, {"generate": [9]}, most, starts_that_fail=1)
    running.append(run.engine)
    if most == 1:
        with pytest.raises(WorkerLostError, match="while it started"):
            run.step(1)
    else:
        undisturbed = Rollout(model, {}, 0)
        running.append(undisturbed.engine)
        assert equal(run.step(1), undisturbed.step(1))
    assert run.refit.restarts == most


@pytest.mark.parametrize("most", [0, 3])
def test_engines_whose_node_is_lost_are_not_started_there_again(
    model: str, running: list[EngineProcess], most: int
) -> None:
    """They would wait for a node that does not come back, once for each start; the run looks for other
    places."""
    run = Rollout(model, {"generate": [9]}, most)
    running.append(run.engine)
    run.refit.lost_nodes = lambda: ["n7"]
    with pytest.raises(
        WorkerLostError,
        match=r"^node n7 is lost, with devices of the engines: generate: the engine's process died",
    ):
        run.step(1)
    assert run.refit.restarts == len(run.told) == 0


def test_an_error_of_living_engines_ends_the_run_as_it_is(model: str, running: list[EngineProcess]) -> None:
    run = Rollout(model, {}, 3)
    running.append(run.engine)
    first = run.engine.process.pid
    with pytest.raises(BatchError, match="99 is no token"):
        run.step(1, ((99,), (8,)))
    assert run.refit.restarts == 0 and run.engine.process.pid == first


def test_a_policy_that_generates_itself_has_nothing_to_start_anew(model: str) -> None:
    class Lost(ReferencePolicy):
        def __init__(self) -> None:
            pass

        def prepare_for_generation(self, *args: Any, **kwargs: Any) -> bool:
            raise WorkerLostError("[dp0] worker process died")

    collector = Collector(Lost(), get_tokenizer({"name": model}), Even(), PhaseTimer())  # type: ignore[arg-type]
    with pytest.raises(WorkerLostError):
        collector.collect([Example(0, (5,), (), "2")])
