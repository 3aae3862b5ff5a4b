"""A launch that knows when its time is over stops while another step and its checkpoint would still fit, and
never later."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megarl.run.time_left import ENDING_SECONDS, TimeLeft, read_time, time_left

SECONDS = st.floats(min_value=0.01, max_value=5000)


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@given(
    st.lists(SECONDS, min_size=1, max_size=30),
    st.lists(SECONDS, max_size=30),
    st.floats(min_value=0, max_value=20_000),
)
def test_where_another_step_may_begin_it_and_its_checkpoint_end_in_time(
    steps: list[float], saves: list[float], limit: float
) -> None:
    """As long as neither is slower than the slowest of the last ten; and it is not refused where twice as
    much would fit."""
    clock = Clock()
    left = TimeLeft(clock.now + limit, "limit", clock)
    for seconds in steps:
        left.took(step_s=seconds)
    for seconds in saves:
        left.took(save_s=seconds)
    slowest = max(steps[-10:]) + max(saves[-10:] or steps[-10:])
    if left.reason is None:
        assert slowest + ENDING_SECONDS <= limit + 1e-6
    else:
        assert limit < 2 * (slowest + ENDING_SECONDS)


def test_it_asks_for_no_more_than_a_fifth_above_what_was_measured() -> None:
    clock = Clock()
    left = TimeLeft(clock.now + 100.0, "limit", clock)
    assert left.reason is None and left.needed_s == ENDING_SECONDS
    for seconds in (30.0, 20.0, 10.0):
        left.took(step_s=seconds)
    assert left.needed_s == pytest.approx(1.2 * 60 + ENDING_SECONDS), (
        "a save that was never measured counts like the slowest step"
    )
    left.took(save_s=5.0)
    assert left.needed_s == pytest.approx(1.2 * 35 + ENDING_SECONDS)
    clock.now += 48.0
    assert left.reason is None
    clock.now += 0.001
    assert (
        left.reason is not None
        and left.reason.startswith("limit ")
        and "another step and its checkpoint may take 52 s" in left.reason
    )
    for _ in range(10):
        left.took(step_s=1.0)
    assert left.reason is None, "what was slow more than ten steps ago is forgotten"


def test_times_that_users_write() -> None:
    assert read_time("+3:45", now=100.0) == 100.0 + 3 * 3600 + 45 * 60
    assert read_time("+0:00:07", now=100.0) == 107.0
    assert read_time("1970-01-02T00:00:00+00:00", now=100.0) == 86400.0
    assert read_time("1970-01-02 01:30+01:30", now=100.0) == 86400.0
    assert read_time("2026-11-26T18:30", now=0.0) == time.mktime((2026, 11, 26, 18, 30, 0, 0, 0, -1))


@pytest.mark.parametrize(
    "text", ["", "soon", "18:30", "3:45", "+3", "+3:61", "+3:45:61", "-1:00", "2026-13-01", "99999-01-01"]
)
def test_what_is_no_time_is_refused_with_the_way_to_write_it(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a time\. Fix: write 2026-11-26T18:30, or \+3:45"):
        read_time(text)


def test_a_time_that_is_over_is_refused() -> None:
    with pytest.raises(ValueError, match="is in the past"):
        read_time("2001-01-01")


def test_the_earlier_limit_counts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)
    assert time_left(None) is None
    soon, later = time.time() + 5.0, int(time.time() + 5000.0)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(later))
    only_slurm, given_too = time_left(None), time_left(soon)
    assert only_slurm is not None and only_slurm.reason is None
    assert given_too is not None and (given_too.reason or "").startswith("--stop-at ")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1000")
    assert time_left(None) is None and "SLURM_JOB_END_TIME = 1000 is in the past" in caplog.text
    monkeypatch.setenv("SLURM_JOB_END_TIME", "tomorrow")
    with pytest.raises(ValueError, match="SLURM_JOB_END_TIME = 'tomorrow'"):
        time_left(None)
