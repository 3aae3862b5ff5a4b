"""The lines a person sees."""

from __future__ import annotations

import io
import re
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from megarl.observe.console import TrainingConsole
from megarl.observe.step_line import format_number, format_seconds, phase_seconds, step_fields

FULL = {
    "train/loss": -0.0371,
    "train/reward": 0.0667,
    "train/grad_norm": 1.2345,
    "train/tokens_per_s": 2310.4,
    "timing/generation_s": 2.1,
    "timing/train_s": 1.8,
    "timing/logprobs_s": 0.21,
    "timing/train/optimizer_s": 1.0,
    "timing/step_s": 4.2,
}


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def shown(terminal: bool, width: int = 100, quiet: bool = False, total: int = 20) -> str:
    stream, clock = io.StringIO(), Clock()
    console = Console(
        file=stream,
        force_terminal=terminal,
        width=width,
        highlight=False,
        color_system="standard" if terminal else None,
    )
    with TrainingConsole(total, "GRPO [tiny] on cpu", quiet=quiet, console=console, clock=clock) as view:
        for step in range(1, total + 1):
            clock.now += 4.2
            view.step(step, FULL)
            if step == 10:
                view.validation(step, {"accuracy": 0.4123, "num_samples": 64, "text": "skip", "list": [1]})
                view.note("checkpoint [saved] step_10")
    return stream.getvalue()


def test_piped_output_is_one_plain_line_a_step_within_100_columns() -> None:
    text = shown(terminal=False)
    lines = text.splitlines()
    assert "\x1b" not in text and "\r" not in text
    assert max(map(len, lines)) <= 100
    steps = [line for line in lines if re.match(r"step +\d+/20 ", line)]
    assert len(steps) == 20
    assert steps[9] == (
        "step 10/20  loss -0.0371  reward 0.067  grad 1.23   4.2s  (gen 2.1 train 1.8)  2.3k tok/s  ETA 42s"
    )


def test_title_notes_and_validation_are_taken_literally() -> None:
    text = shown(terminal=False)
    assert "GRPO [tiny] on cpu  20 steps" in text
    assert "checkpoint [saved] step_10" in text
    assert "validation after step 10  accuracy 0.412  num_samples 64\n" in text
    assert text.splitlines()[-1] == "finished: step 20/20 in 1m24s"


def test_each_of_several_validation_sets_has_a_line() -> None:
    stream = io.StringIO()
    metrics = {"accuracy": 0.5, "samples": 20, "reward_errors": 3, "reward_timeouts": 0}
    of_sets = {
        "validation/samples": 8,
        "validation/mean@8": 0.25,
        "validation/reward_errors": 0,
        "aime/reward/right": 0.75,
        "aime/samples": 12,
    }
    with TrainingConsole(20, "GRPO", console=Console(file=stream, width=100)) as view:
        view.validation(10, {**metrics, **of_sets})
    assert stream.getvalue().splitlines()[1:4] == [
        "validation after step 10  accuracy 0.500  samples 20  reward_errors 3",
        "  validation  samples 8  mean@8 0.250",
        "  aime  reward/right 0.750  samples 12",
    ]


def test_terminal_gets_a_bar_and_is_given_back() -> None:
    text = shown(terminal=True, width=80)
    assert "training" in text and "20/20" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # cursor hidden and shown again
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    step_lines = [part for part in re.split(r"[\r\n]", plain) if re.match(r"step +\d+/20", part)]
    assert len(step_lines) == 20
    assert max(len(line.rstrip()) for line in step_lines) <= 80


def test_terminal_is_given_back_after_an_exception() -> None:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=80)
    with pytest.raises(RuntimeError), TrainingConsole(5, "t", console=console):
        raise RuntimeError
    assert stream.getvalue().count("\x1b[?25h") == 1
    assert "finished" not in stream.getvalue()


def test_quiet_shows_nothing() -> None:
    assert shown(terminal=False, quiet=True) == "" == shown(terminal=True, quiet=True)


def test_missing_metrics_and_no_steps() -> None:
    stream = io.StringIO()
    view = TrainingConsole(7, "SFT", console=Console(file=stream))
    view.start(first_step=3)
    view.finish()
    view.finish()
    assert stream.getvalue().splitlines()[0] == "SFT  7 steps, resumed after step 3"
    assert stream.getvalue().count("finished: no step") == 1
    view.start(first_step=7)
    view._finished = False
    view.finish()
    last = stream.getvalue().splitlines()[-1]
    assert last == "already finished (7 of 7 steps); a larger max_num_steps continues it"
    stream.truncate(0)
    view.step(4, {"timing/step_s": 0.5})
    assert re.search(r"step 4/7 +\d\.\d\ds", stream.getvalue())


def test_responses_without_a_reward_are_counted_where_there_are_any() -> None:
    metrics = {"train/loss": 1.0, "train/reward": 0.25, "train/reward_errors": 3, "train/reward_timeouts": 0}
    fields = step_fields(3, 20, metrics, None, 100)
    assert [text for _, text in fields[2:4]] == ["reward 0.250", "reward_errors 3"]
    assert "reward_timeouts" not in str(fields)
    assert "reward" not in str(
        step_fields(3, 20, {**metrics, "train/reward": None, "train/reward_errors": 0}, None, 100)
    )


def test_eta_is_the_median_step_times_the_steps_left() -> None:
    stream, clock = io.StringIO(), Clock()
    view = TrainingConsole(10, "t", console=Console(file=stream), clock=clock)
    view.start()
    for step, seconds in enumerate((100.0, 2.0, 2.0), 1):
        clock.now += seconds
        view.step(step, {"train/loss": 1.0})
    assert stream.getvalue().splitlines()[-1].endswith("ETA 14s")


def test_a_reader_that_goes_away_does_not_stop_the_run() -> None:
    code = (
        "from megarl.observe.console import TrainingConsole\n"
        "import sys\n"
        "view = TrainingConsole(5000, 't')\n"
        "view.start()\n"
        "for step in range(1, 5001): view.step(step, {'train/loss': 1.0})\n"
        "view.finish()\n"
        "sys.stderr.write('trained to the end')\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.readline()
    process.stdout.close()
    assert "trained to the end" in process.stderr.read()
    process.stderr.close()
    assert process.wait() == 0


@given(
    st.integers(40, 140),
    st.dictionaries(
        st.sampled_from(sorted(FULL)), st.floats(allow_nan=True, allow_infinity=True, width=32), max_size=9
    ),
    st.one_of(st.none(), st.floats(0, 1e6)),
)
def test_optional_parts_never_overflow_the_width(
    width: int, metrics: dict[str, float], eta: float | None
) -> None:
    fields = step_fields(123, 4567, metrics, eta, width)
    kinds = [kind for kind, _ in fields]
    line = "  ".join(text for _, text in fields)
    obligatory = "  ".join(text for kind, text in fields if kind in ("progress", "loss", "reward", "grad"))
    assert len(line) <= max(width, len(obligatory))
    assert len(set(kinds)) == len(kinds)
    for kind, name in (("loss", "train/loss"), ("reward", "train/reward"), ("grad", "train/grad_norm")):
        assert (kind in kinds) == (name in metrics)


def test_phases_are_those_of_the_top_level_longest_first() -> None:
    assert phase_seconds(FULL) == {"generation": 2.1, "train": 1.8, "logprobs": 0.21}


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0.00s"),
        (0.42, "0.42s"),
        (4.24, "4.2s"),
        (9.96, "10s"),
        (59.6, "1m00s"),
        (187, "3m07s"),
        (2520, "42m"),
        (7500, "2h05m"),
        (3599, "1h00m"),
        (86399, "1d00h"),
        (273_600, "3d04h"),
        (float("nan"), "?"),
        (-1, "?"),
    ],
)
def test_format_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0.000"),
        (0.0312, "0.0312"),
        (-1.25, "-1.250"),
        (12.34, "12.3"),
        (1234.4, "1,234"),
        (2.1e-5, "2.1e-05"),
        (float("-inf"), "-inf"),
    ],
)
def test_format_number(value: float, text: str) -> None:
    assert format_number(value) == text
