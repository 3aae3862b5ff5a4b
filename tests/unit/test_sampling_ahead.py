"""Batches sampled during training: which weights sample which step, what is done together, and what a
checkpoint keeps of it."""

from __future__ import annotations

import math
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.ahead import HeldEngines, SamplingAhead
from megarl.algorithms.rollout_source import WaitingBatches
from megarl.algorithms.sampled_batch import DIRECTORY, Sampling, load_batches, save_batches
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.deadlines import STEP, VALIDATE, Call
from megarl.errors import RewardError, UnusableCheckpointError, WorkerError, WorkerLostError
from megarl.observe.timing import ENGINE_IDLE, GENERATION, PhaseTimer
from megarl.rollout.collector import Rollouts
from megarl.rollout.samples import effective_share


class PlayedRefit:
    """Engines that have the weights of the step that was trained last, from when they are told."""

    def __init__(self) -> None:
        self.trained = self.engines_have = 0
        self.replaced: list[Exception] = []
        self.alive = True
        self.generation = SimpleNamespace(is_alive=lambda: self.alive)

    def bring_up_to_date(self) -> None:
        self.engines_have = self.trained

    def replace_lost_engines(self, error: Exception) -> None:
        self.replaced.append(error)


def ahead_of(
    sample: Any, lag: int, last: int | None, refit: PlayedRefit, waiting: WaitingBatches, timer: Any = None
) -> SamplingAhead:
    engines = HeldEngines(refit)  # type: ignore[arg-type]

    def asking(step: int) -> Any:
        # as a collector does before it asks engines
        engines.bring_up_to_date()
        return sample(step)

    ahead = SamplingAhead(asking, lag, last, engines, waiting, timer or PhaseTimer(), PhaseTimer())
    ahead.engines = engines  # type: ignore[attr-defined]
    return ahead


@given(lag=st.integers(1, 5), steps=st.integers(1, 9), begun=st.integers(0, 4), kept=st.integers(0, 5))
def test_weights_follow_from_the_step(lag: int, steps: int, begun: int, kept: int) -> None:
    """Of a run that goes on behind ``begun`` steps with ``kept`` batches that waited: these are not sampled
    again, the others once."""
    refit, sampled = PlayedRefit(), list[tuple[int, int]]()
    refit.trained = begun
    waiting: Any = WaitingBatches({begun + 1 + each: "kept" for each in range(min(kept, lag, steps))})
    had = set(waiting)
    ahead = ahead_of(
        lambda step: sampled.append((step, refit.engines_have)) or f"batch {step}",
        lag,
        begun + steps,
        refit,
        waiting,
    )
    for step in range(begun + 1, begun + steps + 1):
        assert ahead.next(step) == ("kept" if step in had else f"batch {step}")
        refit.trained = step
        ahead.settle()
        assert set(waiting) == set(range(step + 1, min(step + lag, begun + steps) + 1))
    ahead.close()
    # the first step has to sample for itself whatever nobody sampled for it
    assert sorted(sampled) == [
        (step, max(step - 1 - lag, begun)) for step in range(begun + 1, begun + steps + 1) if step not in had
    ]


def test_a_step_trains_while_the_next_one_is_sampled() -> None:
    """Each waits for the other in the middle, which only those who work at the same time live through."""
    refit, meets = PlayedRefit(), threading.Barrier(2, timeout=60)
    ahead = ahead_of(lambda step: meets.wait() if step > 1 else step, 1, None, refit, WaitingBatches())
    assert ahead.next(1) == 1
    meets.wait()
    refit.trained = 1
    ahead.settle()
    ahead.close()


def test_engines_keep_their_weights_while_they_sample() -> None:
    refit, held = PlayedRefit(), threading.Event()
    found: list[int] = []

    def sample(step: int) -> str:
        if step > 1:
            assert held.wait(60)
            ahead.engines.bring_up_to_date()  # type: ignore[attr-defined]
            found.append(refit.engines_have)
        return "batch"

    ahead = ahead_of(sample, 1, None, refit, WaitingBatches())
    ahead.next(1)
    refit.trained = 1
    held.set()
    ahead.settle()
    assert found == [0]
    ahead.engines.bring_up_to_date()  # type: ignore[attr-defined]
    assert refit.engines_have == 1
    ahead.close()


@pytest.mark.parametrize("last", [None, 2])
def test_a_validation_goes_on_beside_the_next_step_with_its_weights(last: int | None) -> None:
    """Behind the sampling, where something is sampled: behind the last batch nothing is."""
    refit, trains = PlayedRefit(), threading.Event()
    asked: list[tuple[Any, int]] = []
    ahead = ahead_of(
        lambda step: asked.append((step, refit.engines_have)) or step, 1, last, refit, WaitingBatches()
    )
    ahead.next(1)
    refit.trained = 1
    ahead.settle()
    assert ahead.validated() is None

    def validate() -> list[Any]:
        assert trains.wait(60)
        ahead.engines.bring_up_to_date()  # type: ignore[attr-defined]
        assert Call.of("generate").phase == VALIDATE
        asked.append(("validation", refit.engines_have))
        return ["figures"]

    ahead.validate_beside(validate)
    assert ahead.next(2) == 2
    assert Call.of("train").phase == STEP, "of this thread, which trains"
    refit.trained = 2
    trains.set()
    ahead.settle()
    assert asked == [(1, 0), (2, 0), *([] if last else [(3, 1)]), ("validation", 1)]
    found = [ahead.validated() for _ in range(2)]
    assert found == [["figures"], None], "a run that stops here asks once more, for the next step"
    if last is None:
        ahead.next(3)
        assert ahead.validated() is None
        ahead.settle()
    ahead.close()


def test_a_validation_that_fails_ends_the_step() -> None:
    refit = PlayedRefit()
    ahead = ahead_of(lambda step: step, 1, None, refit, WaitingBatches())

    def validate() -> Any:
        raise RewardError("no scorer")

    ahead.validate_beside(validate)
    ahead.next(1)
    with pytest.raises(RewardError, match="no scorer"):
        ahead.settle()
    assert not ahead.engines.held  # type: ignore[attr-defined]
    ahead.close()


def failing(error: Exception) -> Any:
    def sample(step: int) -> str:
        if step > 1:
            raise error
        return "batch"

    return sample


def test_what_fails_meanwhile_ends_the_step() -> None:
    ahead = ahead_of(failing(RewardError("no signal")), 1, None, PlayedRefit(), WaitingBatches())
    ahead.next(1)
    with pytest.raises(RewardError, match="no signal"):
        ahead.settle()
    ahead.close()


def test_engines_lost_meanwhile_are_not_given_other_weights() -> None:
    """New ones would get the weights that are being trained; the run goes back to its checkpoint, where the
    old ones are."""
    refit, error = PlayedRefit(), WorkerError("killed")
    engines = HeldEngines(refit)  # type: ignore[arg-type]
    engines.replace_lost_engines(error)
    assert refit.replaced == [error]
    engines.held = True
    with pytest.raises(WorkerError, match="killed"):
        engines.replace_lost_engines(error)
    refit.alive = False
    with pytest.raises(WorkerLostError, match=r"sampled during training.* are gone: killed"):
        engines.replace_lost_engines(error)
    assert refit.replaced == [error]


def test_engines_lost_between_steps_are_replaced() -> None:
    """The policy has the weights that they are to have, and nothing of the step is lost."""
    refit, errors = PlayedRefit(), [WorkerError("killed"), WorkerError("killed again")]
    up_to_date = refit.bring_up_to_date
    ahead = ahead_of(lambda step: step, 1, None, refit, WaitingBatches({1: "kept"}))

    def failing_at_first() -> None:
        if len(refit.replaced) < len(errors):
            raise errors[len(refit.replaced)]
        up_to_date()

    refit.bring_up_to_date = failing_at_first  # type: ignore[method-assign]
    assert ahead.next(1) == "kept"
    ahead.settle()
    assert refit.replaced == errors
    ahead.close()


def test_what_was_timed_beside_is_in_the_step() -> None:
    clock = iter(float(second) for second in range(100))
    timer, own = PhaseTimer(lambda: next(clock)), PhaseTimer(lambda: 0.0)
    with own.phase(GENERATION):
        pass
    timer.merge(own, {ENGINE_IDLE: 0.25})
    seconds = timer.collect()
    assert seconds["generation_s"] == 0 and seconds["engine_idle_s"] == 0.25
    assert "generation_s" not in own.collect()


class Records:
    """A data set of which records are taken."""

    def select(self, places: list[int]) -> list[Any]:
        return [SimpleNamespace(index=place) for place in places]


def batch(step: int, judged: bool) -> Sampling:
    samples: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": torch.arange(6).view(2, 3) + step,
            "reward": torch.tensor([0.5, math.nan]),
            "response_text": ["an", "ßwer\n"],
            "masked": torch.tensor([False, True]),
        }
    )
    of_all: BatchedDataDict[Any] = BatchedDataDict({"reward": torch.tensor([1.0, 2.0, 3.0])})
    records: Any = [SimpleNamespace(index=7), SimpleNamespace(index=3)]
    return Sampling(
        Rollouts(samples, records, {"reward_faults": 1.0}),
        of_all if judged else samples,
        {"found": 0.1},
        epoch=2,
    )


def test_batches_that_wait_are_in_a_checkpoint(tmp_path: Path) -> None:
    kept = {3: batch(3, judged=True), 12: batch(12, judged=False)}
    save_batches(tmp_path, kept)
    assert len({path.stat().st_mode for path in tmp_path.rglob("*.*")}) == 1, "no file is more private"
    found = load_batches(tmp_path, Records())  # type: ignore[arg-type]
    assert list(found) in ([3, 12], [12, 3])
    for step, before in kept.items():
        after = found[step]
        assert [record.index for record in after.rollouts.records] == [7, 3]
        assert (after.metrics, after.rollouts.metrics, after.epoch) == (
            before.metrics,
            before.rollouts.metrics,
            2,
        )
        assert list(after.rollouts.samples) == list(before.rollouts.samples)
        for name, value in before.rollouts.samples.items():
            other = after.rollouts.samples[name]
            assert (
                torch.equal(other, value) or (name == "reward" and other.isnan()[1])
                if torch.is_tensor(value)
                else other == value
            )
        assert (after.judged is after.rollouts.samples) == (step == 12)
        assert torch.equal(after.judged["reward"][:1], before.judged["reward"][:1])


def test_rows_of_one_prompt_share_their_record_behind_a_checkpoint(tmp_path: Path) -> None:
    """Samples are numbered by prompt and answer so; a step that has a record twice has two prompts."""
    first, other, again = (SimpleNamespace(index=place) for place in (7, 3, 7))
    before = batch(3, judged=False)
    records: Any = [first, first, other, other, again, again]
    save_batches(tmp_path, {3: replace(before, rollouts=replace(before.rollouts, records=records))})
    found = load_batches(tmp_path, Records())[3].rollouts.records  # type: ignore[arg-type]
    assert [record.index for record in found] == [7, 7, 3, 3, 7, 7]
    assert [one is other for one, other in pairwise(found)] == [True, False, True, False, True]


def test_a_checkpoint_without_batches_has_none(tmp_path: Path) -> None:
    save_batches(tmp_path, {})
    assert not (tmp_path / DIRECTORY).exists()
    assert load_batches(tmp_path, Records()) == {}  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["step_3.json", "step_3.safetensors"])
def test_damaged_batches_are_named(tmp_path: Path, name: str) -> None:
    save_batches(tmp_path, {3: batch(3, judged=False)})
    (tmp_path / DIRECTORY / name).write_text("{}")
    with pytest.raises(UnusableCheckpointError, match="wait to be trained on cannot be read"):
        load_batches(tmp_path, Records())  # type: ignore[arg-type]


@given(st.lists(st.floats(-30, 30), min_size=1, max_size=9), st.integers(0, 9))
def test_effective_share(logs: list[float], counted: int) -> None:
    mask = torch.tensor([[float(place < counted) for place in range(len(logs))]])
    weights = [math.exp(value) for value in logs[:counted]]
    expected = sum(weights) ** 2 / (len(weights) * sum(weight**2 for weight in weights)) if weights else 1.0
    assert effective_share(torch.tensor([logs], dtype=torch.float64), mask) == pytest.approx(
        expected, rel=1e-9
    )
