"""Mismatch between generation and training, against a slow loop; the threshold that stops a run."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, seed
from hypothesis import strategies as st

from megarl.errors import MismatchError
from megarl.rollout.samples import check_mismatch, masked_far_apart, mismatch_metrics

ROWS = st.lists(st.tuples(st.floats(-9, 0), st.floats(-9, 0), st.booleans()), max_size=30)


@seed(5)
@given(ROWS)
def test_figures_are_those_of_a_slow_loop(tokens: list[tuple[float, float, bool]]) -> None:
    columns = [
        torch.tensor([token[column] for token in tokens], dtype=torch.float64).view(1, -1)
        for column in range(3)
    ]
    counted = [abs(one - other) for one, other, counts in tokens if counts]
    expected = {
        "mismatch_mean": sum(counted) / len(counted) if counted else 0.0,
        "mismatch_max": max(counted, default=0.0),
        "mismatch_share_above_0.05": sum(value > 0.05 for value in counted) / len(counted)
        if counted
        else 0.0,
        "token_mult_prob_error": sum(map(math.exp, counted)) / len(counted) if counted else 1.0,
    }
    assert mismatch_metrics(*columns) == pytest.approx(expected, rel=1e-12)


def test_what_is_masked_does_not_count_and_what_is_no_number_does() -> None:
    one, other = torch.tensor([[-1.0, torch.nan, -2.0]]), torch.tensor([[-1.0, -1.0, -2.5]])
    assert mismatch_metrics(one, other, torch.tensor([[1, 0, 0]])) == mismatch_metrics(
        one, one, torch.zeros(1, 3)
    )
    spoilt = mismatch_metrics(one, other, torch.ones(1, 3))
    assert spoilt["mismatch_max"] == spoilt["token_mult_prob_error"] == torch.inf
    with pytest.raises(MismatchError):
        check_mismatch(spoilt, 1e9, 1)


def test_the_threshold_says_what_it_found() -> None:
    metrics = mismatch_metrics(torch.tensor([[-1.0, -1.0]]), torch.tensor([[-1.0, -1.5]]), torch.ones(1, 2))
    bound = metrics["token_mult_prob_error"]
    check_mismatch(metrics, bound, 3)
    check_mismatch(metrics, None, 3)
    said = (
        r"step 3: token_mult_prob_error = 1\.324 is above grpo\.max_token_mult_prob_error = 1\.3; .* by "
        r"0\.25 on average.* 50\.0% of"
    )
    with pytest.raises(MismatchError, match=said):
        check_mismatch(metrics, 1.3, 3)


def test_sequences_that_are_far_apart_are_masked() -> None:
    """Means of exp(|difference|) of 1, e, infinity (not a number), and e in a row that does not count
    anyway."""
    generation = torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [torch.nan, -1.0], [-1.0, -1.0]])
    policy = torch.tensor([[-1.0, -9.0], [-2.0, 0.0], [-1.0, -1.0], [-2.0, 0.0]])
    token_mask = torch.tensor([[1.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]])
    sample_mask = torch.tensor([1.0, 1.0, 1.0, 0.0])
    mask, metrics = masked_far_apart(generation, policy, token_mask, sample_mask, 2.7, 1)
    assert mask.tolist() == [1.0, 0.0, 0.0, 0.0]
    assert metrics == {"num_masked_seqs_by_logprob_error": 2.0, "max_seq_mult_prob_error": torch.inf}
    mask, metrics = masked_far_apart(generation[:2], policy[:2], token_mask[:2], sample_mask[:2], 2.8, 1)
    assert mask.tolist() == [1.0, 1.0]
    assert metrics == pytest.approx(
        {"num_masked_seqs_by_logprob_error": 0.0, "max_seq_mult_prob_error": math.e}
    )


def test_the_error_of_a_sequence_is_the_mean_over_its_tokens() -> None:
    """Probabilities apart by factors of 1, 1 and 7: on average 3, whereas the geometric mean is 1.9, and the
    largest one 7."""
    generation = torch.tensor([[0.0, -1.0, -2.0, -1.0, -9.0], [0.0, -1.0, -1.0, -1.0, 0.0]])
    policy = torch.tensor([[0.0, -1.0, -2.0, -1.0 - math.log(7), 0.0], [0.0, -1.0, -1.0, -1.0, 0.0]])
    token_mask = torch.tensor([[0.0, 1.0, 1.0, 1.0, 0.0]] * 2)
    for one, other in ((generation, policy), (policy, generation)):
        for threshold, kept in ((2.99, 0.0), (3.01, 1.0)):
            mask, metrics = masked_far_apart(one, other, token_mask, torch.ones(2), threshold, 1)
            assert mask.tolist() == [kept, 1.0]
            assert metrics["max_seq_mult_prob_error"] == pytest.approx(3.0)


def test_a_step_of_which_nothing_is_left_is_refused() -> None:
    one, other = torch.zeros(2, 3), torch.full((2, 3), 1.0)
    with pytest.raises(
        MismatchError,
        match=r"step 7: all 2 sequences .*seq_logprob_error_threshold = 1\.5.*lowest with 2\.718",
    ):
        masked_far_apart(one, other, torch.ones(2, 3), torch.ones(2), 1.5, 7)
    mask, metrics = masked_far_apart(one, other, torch.ones(2, 3), torch.zeros(2), 1.5, 7)
    assert mask.tolist() == [0.0, 0.0] and metrics["num_masked_seqs_by_logprob_error"] == 0
