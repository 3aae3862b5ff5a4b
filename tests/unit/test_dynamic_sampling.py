"""Dynamic sampling: which groups have a signal, filling a step from the order of the data, and whole runs
that are resumed."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.cli import report
from megarl.data.sampler import MixtureSampler, ResumableSampler
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import RewardError
from megarl.rollout.collector import Rollouts
from megarl.rollout.dynamic_sampling import DynamicSampling, Filled, Signal, joined, signals
from megarl.rollout.samples import sampling_seeds, seeds_from
from megarl.run.run import run
from tests.tiers import slow
from tests.unit.driver_runs import Crash, PolicyMaker, comparable, make_config, rows
from tests.unit.reference_policy import ReferencePolicy

GENERATIONS = 3
ANSWER = st.tuples(st.sampled_from([0.0, 1.0, 0.5, math.nan]), st.booleans(), st.booleans())
"""How right an answer is, whether it was scored, whether it was cut off."""


def slow_signal(answers: list[tuple[float, bool, bool]], without_truncated: bool) -> Signal:
    """By the words of the definition, one answer after another."""
    known = [(value, cut_off) for value, scored, cut_off in answers if scored and value == value]
    if len(known) < 2 or (without_truncated and all(cut_off for _, cut_off in known)):
        return Signal.UNUSABLE
    values = {value for value, _ in known}
    if len(values) > 1:
        return Signal.SOME
    return {0.0: Signal.ALL_WRONG, 1.0: Signal.ALL_RIGHT}.get(values.pop(), Signal.ALIKE)


def batch_of(groups: list[list[tuple[float, bool, bool]]], first: int = 0, **columns: Any) -> Rollouts:
    """Samples as a collector gives them, of records that are numbered by their ordinals; an answer is as long
    as its record's number."""
    answers = [answer for group in groups for answer in group]
    lengths = torch.tensor(
        [2 + (first + number) % 5 for number in range(len(groups)) for _ in range(GENERATIONS)]
    )
    ids = torch.where(
        torch.arange(int(lengths.max())) < lengths[:, None],
        torch.arange(len(answers))[:, None] + 100 * first,
        -1,
    )
    samples: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            "prompt_ids": ids[:, :2],
            "prompt_lengths": torch.full_like(lengths, 2),
            "token_mask": (ids != -1).float(),
            # the reward is shaped, so that no two answers have the same
            "reward": torch.arange(len(answers))
            + torch.tensor([value for value, _, _ in answers]).nan_to_num(),
            "accuracy": torch.tensor([value for value, _, _ in answers]),
            "sample_mask": torch.tensor([float(scored) for _, scored, _ in answers]),
            "masked": torch.tensor([not scored for _, scored, _ in answers]),
            "truncated": torch.tensor([cut_off for _, _, cut_off in answers]),
            "response_text": [str(first * GENERATIONS + number) for number in range(len(answers))],
            **columns,
        }
    )
    records: Any = [first + number for number in range(len(groups)) for _ in range(GENERATIONS)]
    return Rollouts(samples, records, {"asked": len(groups)})


@given(
    groups=st.lists(st.lists(ANSWER, min_size=GENERATIONS, max_size=GENERATIONS), max_size=6),
    without_truncated=st.booleans(),
)
@settings(max_examples=200)
def test_signals_are_those_of_a_slow_form(
    groups: list[list[tuple[float, bool, bool]]], without_truncated: bool
) -> None:
    answers = [answer for group in groups for answer in group]
    accuracies = torch.tensor([value for value, _, _ in answers], dtype=torch.float32)
    scored = torch.tensor([scored for _, scored, _ in answers], dtype=torch.bool)
    cut_off = torch.tensor([cut_off for _, _, cut_off in answers], dtype=torch.bool)
    trained = scored & ~cut_off if without_truncated else scored
    assert signals(accuracies, scored, trained, GENERATIONS) == [
        slow_signal(group, without_truncated) for group in groups
    ]


def test_values_that_differ_by_rounding_are_alike() -> None:
    ones = torch.ones(3, dtype=torch.bool)
    third = torch.tensor([1 / 3, 1 / 3 + 3e-8, 1 / 3])
    assert signals(third, ones, ones, 3) == [Signal.ALIKE]
    assert signals(third + torch.tensor([0, 1e-4, 0]), ones, ones, 3) == [Signal.SOME]


def filled(
    stream: list[list[tuple[float, bool, bool]]], sampler: Any, prompts: int, batch: int, most: int = 1000
) -> Filled:
    """A step filled from a stream of groups, of which the ordinal names the next one."""

    def collect(indices: list[int], ordinal: int) -> Rollouts:
        assert len(indices) == batch
        found = batch_of([stream[(ordinal + number) % len(stream)] for number in range(batch)], ordinal)
        found.samples["index"] = torch.tensor(indices).repeat_interleave(GENERATIONS)
        return found

    return DynamicSampling(prompts, GENERATIONS, batch, most, False, -1).fill(7, sampler, collect)


@slow
@given(
    stream=st.lists(st.lists(ANSWER, min_size=GENERATIONS, max_size=GENERATIONS), min_size=1, max_size=12),
    prompts=st.integers(1, 4),
    batches=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    before=st.integers(0, 30),
    mixed=st.booleans(),
)
@settings(max_examples=150)
def test_steps_are_filled_alike_however_many_prompts_are_asked_for(
    stream: list[list[tuple[float, bool, bool]]], prompts: int, batches: list[int], before: int, mixed: bool
) -> None:
    """Three steps, each with the next groups of the stream that have a signal: by a loop, and by batches of
    several sizes."""
    stream = [*stream, [(0.0, True, False), (1.0, True, False), (1.0, True, True)]]

    def sampler() -> Any:
        made: Any = MixtureSampler([5, 8], [0.3, 0.7], 1) if mixed else ResumableSampler(7, 1)
        made.take(before)
        return made

    here, expected, ordinal = sampler(), [], before
    for _ in range(3):
        kept: list[tuple[int, int]] = []
        while len(kept) < prompts:
            (index,) = here.take(1)
            if slow_signal(stream[ordinal % len(stream)], False) is Signal.SOME:
                kept.append((ordinal, index))
            ordinal += 1
        expected.append(kept)
    for batch in batches:
        mine = sampler()
        for kept in expected:
            begin = mine.taken
            got = filled(stream, mine, prompts, batch)
            assert got.rollouts.records == [number for number, _ in kept for _ in range(GENERATIONS)]
            samples = got.rollouts.samples
            assert samples["index"].tolist() == [index for _, index in kept for _ in range(GENERATIONS)]
            assert samples["response_text"] == [
                str(number * GENERATIONS + answer) for number, _ in kept for answer in range(GENERATIONS)
            ]
            assert samples["input_ids"].shape[1] == samples["input_lengths"].max(), (
                "as wide as if nothing else had been sampled"
            )
            assert torch.equal(samples["input_ids"] != -1, samples["token_mask"] == 1)
            assert mine.taken == kept[-1][0] + 1, "the next step goes on behind the last prompt of this one"
            judged = mine.taken - begin
            assert len(got.judged["reward"]) == judged * GENERATIONS and "input_ids" not in got.judged
            assert got.metrics["dynamic_sampling_dropped"] == pytest.approx(1 - prompts / judged)
            assert got.metrics["dynamic_sampling_num_gen_batches"] == math.ceil(judged / batch)
            assert got.rollouts.metrics == {"asked": math.ceil(judged / batch) * batch}
        assert mine.state() == here.state()


def test_a_step_that_is_never_full_ends_with_the_shares() -> None:
    group = [(1.0, True, False), (0.0, True, False), (0.0, True, False)]
    right, wrong, half = ([(value, True, False)] * 3 for value in (1.0, 0.0, 0.5))
    unscored = [(0.0, False, False)] * 2 + [(1.0, True, False)]
    sampler = ResumableSampler(100, 1)
    with pytest.raises(RewardError) as stopped:
        filled(
            [group, right, right, right, wrong, half, unscored, right, wrong, right], sampler, 2, 5, most=2
        )
    text = str(stopped.value)
    assert (
        "step 7: only 1 of the 2 groups" in text
        and "found in 10 prompts" in text
        and "max_gen_batches = 2 times 5" in text
    )
    for share in (
        "with a signal: 10.0%",
        "all correct: 50.0%",
        "all incorrect: 20.0%",
        "alike in another way: 10.0%",
        "to train on: 10.0%",
    ):
        assert share in text
    assert sampler.taken == 10
    # the last batch that is allowed may be the one that fills it
    assert (
        filled([right, group], ResumableSampler(100, 1), 2, 2, most=2).metrics[
            "dynamic_sampling_num_gen_batches"
        ]
        == 2
    )


def test_columns_that_not_every_batch_has() -> None:
    group = [(1.0, True, False), (0.0, True, False), (0.0, True, False)]
    first, second = batch_of([group], 0), batch_of([group, group], 1, **{"reward/short": torch.arange(6.0)})
    del first.samples["accuracy"]
    samples = joined([first, second], [0, 2], GENERATIONS, -1).samples
    assert samples["accuracy"].tolist() == [*first.samples["reward"].tolist(), 1.0, 0.0, 0.0]
    assert samples["reward/short"].isnan().tolist() == [True] * 3 + [False] * 3 and samples["reward/short"][
        3:
    ].tolist() == [3, 4, 5]


@given(
    seed=st.integers(0, 9),
    steps=st.integers(1, 3),
    prompts=st.integers(1, 5),
    cuts=st.lists(st.integers(0, 15), max_size=4),
)
@settings(max_examples=60)
def test_seeds_follow_the_ordinal_and_are_those_of_a_run_that_drops_nothing(
    seed: int, steps: int, prompts: int, cuts: list[int]
) -> None:
    expected = [each for step in range(1, steps + 1) for each in sampling_seeds(seed, step, prompts, 2)]
    places = sorted({0, steps * prompts, *(cut for cut in cuts if cut <= steps * prompts)})
    found = [seeds_from(seed, begin, end - begin, 2, prompts) for begin, end in itertools.pairwise(places)]
    assert [each for part in found for each in part] == expected


ENVIRONMENT = '''
from megarl.rollout.environment import EnvironmentReturn


class Judge:
    """How right an answer is: by its length, or by its place among the answers to its prompt, or never."""

    def __init__(self, section):
        self.kind = section["options"]["kind"]

    def step(self, turn):
        by_kind = {
            "length": lambda row: float(len(turn.responses[row]) % 2),
            "place": lambda row: float(row % 3 == 1),
            "never": lambda row: 0.0,
        }
        right = [by_kind[self.kind](row) for row in range(len(turn.responses))]
        # a shaped reward, which hardly any two answers have alike
        shaped = [value + 0.001 * sum(map(ord, text)) for value, text in zip(right, turn.responses)]
        rows = len(right)
        metrics = {"judged": rows}
        return EnvironmentReturn(shaped, [True] * rows, [False] * rows, accuracies=right, metrics=metrics)

    def fault_of_reference(self, answer):
        return None

    def close(self):
        pass
'''


def dynamic_run(
    path: Path, model: str, data: str, kind: str, maker: PolicyMaker, **section: Any
) -> dict[str, Any]:
    """Run three steps with an environment of the test; the configuration."""
    config = configured(path, model, data, kind, **section)
    assert run(config, maker) == 0
    return config


def configured(path: Path, model: str, data: str, kind: str, **section: Any) -> dict[str, Any]:
    judge = path.parent / "judge.py"
    judge.write_text(ENVIRONMENT)
    plain = {"max_num_steps": 3, "val_period": 0, "val_at_start": False}
    config = make_config("grpo", path, model, data, **plain, **section)
    config["policy"]["train_global_batch_size"] = 12
    config["checkpointing"]["save_period"] = 1
    return config | {"env": {"environment": f"{judge}:Judge", "options": {"kind": kind}}}


def same_results(one: Path, other: Path, besides: frozenset[str] = frozenset()) -> None:
    """The same metrics and the same weights, to the bit."""
    for rows_of in zip(comparable(one), comparable(other), strict=True):
        mine, theirs = (
            {name: value for name, value in row.items() if name not in besides} for row in rows_of
        )
        assert mine == theirs
    exported = [path / "hf" / "step_3" / "model.safetensors" for path in (one, other)]
    assert exported[0].read_bytes() == exported[1].read_bytes()


SAMPLING = {"use_dynamic_sampling": True, "dynamic_sampling_max_gen_batches": 40}
WITH_BATCHES = frozenset(
    {
        "train/dynamic_sampling_num_gen_batches",
        "train/dynamic_sampling_num_discarded_valid_samples",
        "train/judged",
    }
)


@slow
def test_a_run_that_drops_nothing_is_one_without_dynamic_sampling(
    tmp_path: Path, model: str, data: str
) -> None:
    for name, section in (
        ("plain", {}),
        ("dynamic", SAMPLING),
        ("many at a time", {**SAMPLING, "batch_multiplier": 1.75}),
    ):
        dynamic_run(tmp_path / name, model, data, "place", PolicyMaker(), **section)
    of_sampling = {
        name
        for name in rows(tmp_path / "dynamic")[0]
        if "dynamic_sampling" in name or name == "train/filtered_reward"
    }
    assert len(of_sampling) == 6
    for name in ("dynamic", "many at a time"):
        assert all(row["train/dynamic_sampling_dropped"] == 0 for row in rows(tmp_path / name))
        same_results(tmp_path / name, tmp_path / "plain", frozenset({*of_sampling, "train/judged"}))


class FailingGenerator(PolicyMaker):
    """Makes policies that fail in one of their calls to generate, counted from 1."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at, self.calls = fails_at, 0
        self.seeds: list[list[int]] = []

    def __call__(self, *arguments: Any) -> ReferencePolicy:
        policy = super().__call__(*arguments)
        generate = policy.generate

        def generate_or_fail(request: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.seeds.append(request["sampling_seeds"].tolist())
            if self.calls == self.fails_at:
                raise Crash
            return generate(request, *args, **kwargs)

        policy.generate = generate_or_fail  # type: ignore[method-assign]
        return policy


def test_a_run_is_resumed_in_the_middle_of_a_refill_and_trains_alike_by_batches_of_any_size(
    tmp_path: Path, model: str, data: str
) -> None:
    whole = FailingGenerator()
    dynamic_run(tmp_path / "whole", model, data, "length", whole, **SAMPLING)
    batches = [int(row["train/dynamic_sampling_num_gen_batches"]) for row in rows(tmp_path / "whole")]
    assert max(batches[1:]) > 1 and any(
        row["train/dynamic_sampling_dropped"] > 0 for row in rows(tmp_path / "whole")
    ), "there is a refill"
    dynamic_run(tmp_path / "many", model, data, "length", PolicyMaker(), **SAMPLING, batch_multiplier=2.5)
    same_results(tmp_path / "many", tmp_path / "whole", WITH_BATCHES)
    refilled = next(step for step, count in enumerate(batches, start=1) if step > 1 and count > 1)
    config = configured(tmp_path / "killed", model, data, "length", **SAMPLING)
    with pytest.raises(Crash):
        run(config, FailingGenerator(fails_at=sum(batches[: refilled - 1]) + 2))
    resumed = FailingGenerator()
    assert run(config, resumed) == 0
    same_results(tmp_path / "killed", tmp_path / "whole")
    assert resumed.seeds == whole.seeds[sum(batches[: refilled - 1]) :]


def test_prompts_without_a_signal_are_never_trained_on(tmp_path: Path, model: str, data: str) -> None:
    class Keeping(PolicyMaker):
        batches: list[Any]

        def __call__(self, *arguments: Any) -> ReferencePolicy:
            policy = super().__call__(*arguments)
            train, self.batches = policy.train, []

            def train_and_keep(batch: Any, *args: Any, **kwargs: Any) -> Any:
                self.batches.append(batch)
                return train(batch, *args, **kwargs)

            policy.train = train_and_keep  # type: ignore[method-assign]
            return policy

    maker = Keeping()
    dynamic_run(tmp_path / "run", model, data, "length", maker, **SAMPLING, overlong_filtering=True)
    for batch, row in zip(maker.batches, rows(tmp_path / "run"), strict=True):
        assert len(batch["input_ids"]) == 12
        assert row["train/num_valid_samples"] == batch["sample_mask"].sum() < 12, (
            "what was cut off has no part"
        )
        assert not batch["advantages"][batch["sample_mask"] == 0].any()
        assert 0 <= row["train/accuracy"] <= 1 and row["train/judged"] >= 12


def test_filtered_rewards_are_those_that_are_trained_on(tmp_path: Path, model: str, data: str) -> None:
    config = configured(tmp_path / "run", model, data, "length", **SAMPLING)
    config["logger"] = {"samples": {"num_train_samples": None}}
    assert run(config, PolicyMaker()) == 0
    logged = rows(tmp_path / "run")
    for row in logged:
        lines = (tmp_path / "run" / "samples" / f"train_step_{row['step']}.jsonl").read_text().splitlines()
        rewards = [each["reward"] for each in map(json.loads, lines)]
        assert len(rewards) == 12
        assert row["train/filtered_reward"] == pytest.approx(math.fsum(rewards) / 12, rel=1e-6)
    assert any(row["train/filtered_reward"] != row["train/reward"] for row in logged), (
        "that is the mean over all that were judged"
    )


def test_a_run_that_never_fills_a_step_ends_before_it_trains(
    tmp_path: Path, model: str, data: str, capsys: pytest.CaptureFixture[str]
) -> None:
    maker, config = (
        PolicyMaker(),
        configured(tmp_path / "run", model, data, "never", use_dynamic_sampling=True),
    )
    config["grpo"]["dynamic_sampling_max_gen_batches"] = 3
    with pytest.raises(RewardError) as stopped:
        run(config, maker)
    assert maker.policies[0].trained_steps == 0 and not (tmp_path / "run" / "checkpoints" / "step_1").exists()
    assert report(stopped.value) == 1
    assert "only 0 of the 4 groups of a step were found in 12 prompts" in capsys.readouterr().err
