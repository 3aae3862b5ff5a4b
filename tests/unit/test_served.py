"""What tells engines with wrong weights from rounding: the test over refits, and what a check compares."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.algorithms.served import ENGINE_CHECK_ERROR, RoundingTest, ServedCheck
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MismatchError
from tests.tiers import sample_seed

FLOOR = 1e-4


def test_rounding_is_no_alarm() -> None:
    """10,000 refits whose errors are spread over a factor of ten."""
    draw = random.Random(sample_seed())
    for usual, floor in ((3e-5, FLOOR), (3e-4, FLOOR), (0.02, 0.05), (0.15, 0.05)):
        test = RoundingTest(floor)
        alarms = sum(test.is_alarmed(usual * draw.lognormvariate(0, 0.4)) for _ in range(10_000))
        assert not alarms, (usual, sample_seed())


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_scores_of_other_kernels_are_no_alarm(precision: str) -> None:
    """10,000 drawn vectors of scores, of tokens likely and unlikely: the same logits in float64, and rounded
    where kernels round them."""
    draw = torch.Generator().manual_seed(sample_seed())
    policy, engines = Scorer(0.0), Engines(0.0)
    check = check_of(engines, policy, precision=precision)
    dtype, largest = getattr(torch, precision), 0.0
    for _ in range(200):
        logits = torch.randn(100, 6, 31, generator=draw, dtype=torch.float64) * 3
        exact = logits.log_softmax(2)[..., 7].float()
        # hidden states and the output layer's sums are rounded, each for itself
        rounded = logits * (1 + torch.randn(logits.shape, generator=draw) * torch.finfo(dtype).eps / 2)
        theirs = rounded.to(dtype).float().log_softmax(2)[..., 7]
        for policy.said, engines.said in zip(exact.split(2), theirs.split(2), strict=True):
            check.check()
            largest = max(largest, check.metrics[ENGINE_CHECK_ERROR])
    assert 0 < largest < 16 * check._test.floor, (largest, sample_seed())


@given(usual=st.floats(1e-7, 5e-4), factor=st.floats(17, 1e6))
def test_a_jump_is_an_alarm_at_once(usual: float, factor: float) -> None:
    test = RoundingTest(FLOOR)
    assert not any(test.is_alarmed(usual) for _ in range(5))
    assert test.is_alarmed(max(usual, FLOOR) * factor)


def test_what_stays_larger_is_an_alarm_soon() -> None:
    test = RoundingTest(FLOOR)
    assert not any(test.is_alarmed(2e-4) for _ in range(9))
    assert [test.is_alarmed(8.1e-4) for _ in range(3)] == [False, False, True]


@pytest.mark.parametrize("error", [float("nan"), float("inf")])
def test_no_number_is_an_alarm(error: float) -> None:
    assert RoundingTest(FLOOR).is_alarmed(error)


class Scorer:
    """A policy, or engines: log-probabilities that follow from tokens and one weight."""

    version = 3
    said: torch.Tensor | None = None

    def __init__(self, weight: float, ranks: int = 1) -> None:
        self.weight, self.ranks, self.asked = weight, ranks, list[Any]()

    def prepare_for_lp_inference(self) -> None: ...

    def get_logprobs(self, data: Any) -> dict[str, torch.Tensor]:
        return {"logprobs": self.scored(data)}

    def scored(self, data: Any) -> torch.Tensor:
        self.asked.append(data)
        if self.said is not None:
            return self.said
        return -(data["input_ids"].float() + self.weight) / 10

    def weight_digests(self) -> Any:
        return {"a": 1, "b": 2}


class Engines(Scorer):
    digests: Any = None
    others: Sequence[float] = ()

    def score(self, data: Any) -> list[torch.Tensor]:
        own = self.scored(data)
        return [own, *(own - apart for apart in self.others)]

    def weight_digests(self) -> Any:
        return self.digests


def samples() -> BatchedDataDict[Any]:
    """Three rows of which the second one does not count."""
    lengths = torch.tensor([6, 5, 3])
    places = torch.arange(6)
    return BatchedDataDict(
        {
            "input_ids": (places + 1) * (places < lengths[:, None]),
            "input_lengths": lengths,
            "token_mask": ((places >= 2) & (places < lengths[:, None])).float(),
            "sample_mask": torch.tensor([1.0, 0.0, 1.0]),
        }
    )


def check_of(
    engines: Engines,
    policy: Scorer,
    sequences: int = 8,
    on_difference: str = "stop",
    precision: str = "float32",
) -> ServedCheck:
    section: Any = {"sequences": sequences, "on_difference": on_difference}
    check = ServedCheck(section, policy, engines, precision, seed=1)  # type: ignore[arg-type]
    check.check()
    assert not engines.asked, "before the first batch there is nothing to score"
    check.remember(samples(), 1)
    return check


def test_rows_that_count_are_scored_but_for_their_last_token() -> None:
    engines, policy = Engines(0.0), Scorer(0.0)
    check = check_of(engines, policy)
    check.check()
    assert check.metrics == {ENGINE_CHECK_ERROR: 0.0}
    for asked in (*engines.asked, *policy.asked):
        assert asked["input_lengths"].tolist() == [5, 2]
        assert asked["input_ids"].tolist() == [[1, 2, 3, 4, 5, 0], [1, 2, 0, 0, 0, 0]]
        # the second one's only sampled token is its last
        assert asked["token_mask"].sum(dim=1).tolist() == [3.0, 0.0]


def test_sequences_are_drawn_by_seed_and_step() -> None:
    engines = Engines(0.0)
    check = check_of(engines, Scorer(0.0), sequences=1)
    drawn = []
    for step in [1, 2, 3, 4, 5, 6, 1]:
        check.remember(samples(), step)
        check.check()
        drawn.append(engines.asked[-1]["input_lengths"].tolist())
    assert drawn[0] == drawn[-1] and {tuple(each) for each in drawn} == {(5,), (2,)}


def test_other_log_probabilities_are_named() -> None:
    check = check_of(Engines(5.0), Scorer(0.0))
    with pytest.raises(
        MismatchError, match=r"of 3 given tokens differ from the policy's by 0\.5 .* version 3"
    ):
        check.check()


@pytest.mark.parametrize("apart", [0.5, float("nan")])
def test_one_of_many_engines_is_named(apart: float) -> None:
    engines = Engines(0.0)
    engines.others = [*[0.0] * 40, apart, *[0.0] * 40]
    check = check_of(engines, Scorer(0.0))
    with pytest.raises(
        MismatchError,
        match=rf"engine 41's log-probabilities of 3 given tokens differ from the policy's by {apart} ",
    ):
        check.check()


def test_a_warning_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    check = check_of(Engines(5.0), Scorer(0.0), on_difference="warn")
    check.check()
    assert "differ from the policy's by 0.5 on average" in caplog.text and check.metrics == {
        ENGINE_CHECK_ERROR: pytest.approx(0.5)
    }


@pytest.mark.parametrize(
    ("digests", "said"),
    [
        ([{"a": 1, "b": 2}, {"a": 1, "b": 2}], None),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 3}], "1 of 2 weights in the engines differ from the policy's: b"),
        ([{"a": 1}], "1 of 2 weights in the engines differ from the policy's: b"),
        (
            [{"a": 1, "b": 2}, {"a": 1, "b": 2, "b of rank 1": 3}],
            "1 of 2 weights in the engines differ from the policy's: b of rank 1",
        ),
        ([{"a": 0, "b": 0}], "2 of 2 weights in the engines differ from the policy's: a, b"),
    ],
)
def test_weights_that_differ_are_named(digests: Any, said: str | None) -> None:
    engines = Engines(0.0)
    check = check_of(engines, Scorer(0.0))
    engines.digests = digests
    if said is None:
        return check.check()
    with pytest.raises(MismatchError, match=said):
        check.check()
    # before the first batch, as at a start and behind a resume, there is nothing to score
    with pytest.raises(MismatchError, match=said):
        check_of(engines, Scorer(0.0))
    assert not engines.asked, "what differs by its bits need not be scored"
    check_of(engines, Scorer(0.0), sequences=0).check()
