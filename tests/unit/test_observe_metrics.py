"""Metric reduction, phase timing and hiding of secrets."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.observe.metrics import Reduction, default_reduction, reduce_metrics, reduce_values
from megarl.observe.timing import PhaseTimer
from megarl.redaction import HIDDEN, redacted

finite = st.floats(-1e6, 1e6)


@given(st.lists(finite, min_size=1, max_size=9), st.sampled_from(list(Reduction)))
def test_reduction_equals_a_plain_loop(values: list[float], reduction: Reduction) -> None:
    low = high = values[0]
    total = 0.0
    for value in values:
        total += value
        low = value if value < low else low
        high = value if value > high else high
    expected = {
        Reduction.SUM: total,
        Reduction.MEAN: total / len(values),
        Reduction.MIN: low,
        Reduction.MAX: high,
    }[reduction]
    assert reduce_values(values, reduction) == pytest.approx(expected, rel=1e-9, abs=1e-6)


@given(st.permutations([1e16, 1.0, -1e16, 3.25, 0.1, 0.1]))
def test_sum_does_not_depend_on_rank_order(values: list[float]) -> None:
    assert reduce_values(values, Reduction.SUM) == math.fsum([1.0, 3.25, 0.1, 0.1])


@pytest.mark.parametrize("reduction", list(Reduction))
@pytest.mark.parametrize("position", [0, 1, 2])
def test_nan_is_seen_wherever_it_stands(reduction: Reduction, position: int) -> None:
    values = [1.0, 2.0]
    values.insert(position, math.nan)
    assert math.isnan(reduce_values(values, reduction))


def test_infinities_and_overflow_follow_ieee() -> None:
    assert math.isnan(reduce_values([math.inf, -math.inf], Reduction.SUM))
    assert reduce_values([1e308, 1e308, 1e308], Reduction.SUM) == math.inf
    assert reduce_values([math.inf, 2.0], Reduction.MIN) == 2.0


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", Reduction.SUM),
        ("lr", Reduction.MEAN),
        ("wd", Reduction.MEAN),
        ("reward", Reduction.MEAN),
        ("global_valid_seqs", Reduction.MEAN),
        ("global_valid_toks", Reduction.MEAN),
        ("grad_norm", Reduction.MEAN),
        ("probs_ratio_min", Reduction.MIN),
        ("train/probs_ratio_max", Reduction.MAX),
        ("train/lr", Reduction.MEAN),
        ("maximum", Reduction.SUM),
        ("lr_scale", Reduction.SUM),
    ],
)
def test_default_reduction(name: str, expected: Reduction) -> None:
    assert default_reduction(name) is expected


def test_declared_reductions_win_and_empty_metrics_vanish() -> None:
    metrics = {
        "loss": [1.0, 2.5, -0.5],
        "lr": [3e-4] * 3,
        "ratio_max": [1.0, 7.0, 3.0],
        "grad_norm": [2.0, 4.0],
        "entropy": [],
    }
    reduced = reduce_metrics(metrics, {"ratio_max": Reduction.MIN, "grad_norm": Reduction.SUM})
    assert reduced == {"loss": 3.0, "lr": pytest.approx(3e-4), "ratio_max": 1.0, "grad_norm": 6.0}
    assert reduce_metrics({}) == {}


def test_no_values_is_an_error() -> None:
    with pytest.raises(ValueError, match="of no values"):
        reduce_values([], Reduction.SUM)


class Clock:
    """Seconds under the test's control."""

    def __init__(self) -> None:
        self.now = 5.0

    def __call__(self) -> float:
        return self.now


def test_phases_add_up_and_nest_without_double_counting() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    for seconds in (1.0, 0.5):
        with timer.phase("generation"):
            clock.now += seconds
    with timer.phase("train"):
        clock.now += 2.0
        with timer.phase("optimizer"):
            clock.now += 0.25
    clock.now += 0.125
    collected = timer.collect()
    assert collected == {"generation_s": 1.5, "train/optimizer_s": 0.25, "train_s": 2.25, "step_s": 3.875}
    assert timer.collect() == {"step_s": 0.0}


def test_phase_counts_when_it_raises() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with pytest.raises(RuntimeError), timer.phase("outer"), timer.phase("inner"):
        clock.now += 1.0
        raise RuntimeError
    with timer.phase("next"):
        clock.now += 1.0
    assert timer.collect() == {"outer/inner_s": 1.0, "outer_s": 1.0, "next_s": 1.0, "step_s": 2.0}


def test_open_phase_is_split_between_steps() -> None:
    clock = Clock()
    timer = PhaseTimer(clock)
    with timer.phase("checkpoint"):
        clock.now += 1.0
        first = timer.collect()
        clock.now += 3.0
    assert first == {"checkpoint_s": 1.0, "step_s": 1.0}
    assert timer.collect() == {"checkpoint_s": 3.0, "step_s": 3.0}


def test_secrets_are_hidden_and_nothing_else() -> None:
    config = {
        "env_vars": {"HF_TOKEN": "abc", "WANDB_API_KEY": "def", "PATH": "/bin"},
        "data": {
            "prompt_key": "question",
            "answer_key": "answer",
            "max_new_tokens": 7,
            "pad_token_id": 0,
            "token": None,
        },
        "list": [{"password": "x"}, 3],
    }
    hidden = redacted(config)
    assert hidden["env_vars"] == {"HF_TOKEN": HIDDEN, "WANDB_API_KEY": HIDDEN, "PATH": "/bin"}
    assert hidden["data"] == config["data"]
    assert hidden["list"] == [{"password": HIDDEN}, 3]
    assert config["env_vars"]["HF_TOKEN"] == "abc"


def test_room_imports_without_torch_ray_or_matplotlib() -> None:
    code = (
        "import sys, megarl.observe.metrics, megarl.observe.sinks, megarl.observe.plots\n"
        "import megarl.observe.console, megarl.checkpoint.manager\n"
        "print(sorted({'torch', 'ray', 'matplotlib', 'wandb', 'numpy'} & set(sys.modules)))"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert shown.strip() == "[]"
