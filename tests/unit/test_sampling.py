"""Choosing tokens against a slow loop: top-k with ties, top-p, boundaries of the uniform number, seeds; and
when an answer stops."""

from __future__ import annotations

import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megarl.errors import BatchError
from megarl.models.generation.sampling import SamplingSettings, choose_tokens, uniform_numbers
from megarl.models.generation.stopping import StopRules, stop_strings_of_rows

JUST_BELOW_1 = math.nextafter(1.0, 0.0)


def kept_tokens(logits: list[float], top_k: int | None, top_p: float) -> list[tuple[int, float]]:
    """(token, probability) of what top-k and then top-p leave, in vocabulary order, by loops in Python
    floats."""
    largest = max(logits)
    weights = [math.exp(value - largest) for value in logits]
    total = math.fsum(weights)
    probabilities = [weight / total for weight in weights]
    candidates = list(range(len(logits)))
    if top_k is not None and top_k < len(logits):
        bound = sorted(probabilities, reverse=True)[top_k - 1]
        candidates = [token for token in candidates if probabilities[token] >= bound]
    if top_p < 1:
        candidates = _nucleus(probabilities, candidates, top_k, top_p)
    return [(token, probabilities[token]) for token in candidates]


def _nucleus(probabilities: list[float], candidates: list[int], top_k: int | None, top_p: float) -> list[int]:
    """What top-p leaves of those that top-k left, of which the first ``top_k`` share the whole probability;
    ties stay together."""
    ranked = sorted(candidates, key=lambda token: -probabilities[token])[:top_k]
    mass = math.fsum(probabilities[token] for token in ranked)
    before, last = 0.0, ranked[0]
    for token in ranked:
        if before >= top_p:
            break
        last = token
        before += probabilities[token] / mass
    return [token for token in candidates if probabilities[token] >= probabilities[last]]


def by_hand(logits: list[float], uniform: float, top_k: int | None, top_p: float) -> tuple[int, float]:
    """(token, how far the threshold is from the nearest boundary between two tokens)."""
    kept = kept_tokens(logits, top_k, top_p)
    threshold = uniform * math.fsum(probability for _, probability in kept)
    passed, chosen, distance = 0.0, kept[-1][0], math.inf
    found = False
    for token, probability in kept:
        passed += probability
        distance = min(distance, abs(passed - threshold))
        if not found and passed > threshold:
            chosen, found = token, True
    return chosen, distance


def draw(logits: torch.Tensor, uniform: float, **options: object) -> int:
    tokens, _ = choose_tokens(
        logits[None], torch.tensor([uniform], dtype=torch.float64), SamplingSettings(**options)
    )  # type: ignore[arg-type]
    return int(tokens)


@settings(max_examples=300)
@given(
    logits=st.lists(st.sampled_from([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0]), min_size=1, max_size=9),
    uniform=st.floats(0, 1, exclude_max=True),
    top_k=st.one_of(st.none(), st.integers(1, 12)),
    top_p=st.sampled_from([1.0, 0.99, 0.9, 0.61, 0.37, 1e-9]),
)
def test_equals_the_slow_loop(logits: list[float], uniform: float, top_k: int | None, top_p: float) -> None:
    expected, distance = by_hand(logits, uniform, top_k, top_p)
    measured = draw(torch.tensor(logits), uniform, top_k=top_k, top_p=top_p)
    kept = [token for token, _ in kept_tokens(logits, top_k, top_p)]
    # float32 probabilities may decide differently only on the very edge, and there never for a token that was
    # left out
    assert measured == expected or (distance < 1e-6 and measured in kept)


@settings(max_examples=100)
@given(seed=st.integers(0, 2**31), top_k=st.one_of(st.none(), st.integers(1, 30)), top_p=st.floats(0.01, 1.0))
def test_a_token_that_was_left_out_is_never_drawn(seed: int, top_k: int | None, top_p: float) -> None:
    logits = torch.randn(23, generator=torch.Generator().manual_seed(seed)) * 4
    kept = {token for token, _ in kept_tokens(logits.tolist(), top_k, top_p + 1e-6)}
    for uniform in (0.0, 1e-300, 0.25, 0.5, 0.999, JUST_BELOW_1):
        assert draw(logits, uniform, top_k=top_k, top_p=top_p) in kept


def test_ties_with_the_last_of_top_k_all_stay() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0, -1.0])
    drawn = {draw(logits, number / 100, top_k=2) for number in range(100)}
    assert drawn == {1, 2, 3, 4}


def test_top_k_of_one_is_greedy_when_nothing_ties() -> None:
    logits = torch.randn(19, generator=torch.Generator().manual_seed(1))
    for uniform in (0.0, 0.3, JUST_BELOW_1):
        assert draw(logits, uniform, top_k=1) == int(logits.argmax())


def test_tiny_top_p_keeps_the_most_likely_tokens_alone() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.9])
    assert {draw(logits, uniform, top_p=1e-12) for uniform in (0.0, 0.3, 0.7, JUST_BELOW_1)} == {1, 2}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    logits = torch.tensor([0.1, 0.7, 0.8, 0.9, 1.0, 0.2])
    assert {draw(logits, number / 50, top_k=3, top_p=0.6) for number in range(50)} == {3, 4}


def test_top_p_that_is_reached_exactly_takes_no_further_token() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert {draw(logits, number / 50, top_p=0.75) for number in range(50)} == {0, 1}


def test_ends_of_the_uniform_interval() -> None:
    logits = torch.tensor([-torch.inf, 0.0, -torch.inf, 1.0, -torch.inf])
    assert draw(logits, 0.0) == 1
    assert draw(logits, JUST_BELOW_1) == 3


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 700])
def test_every_size_draws_what_one_sum_over_all_tokens_draws(size: int) -> None:
    """Against the cumulative distribution in float64, whose edges rounding may move."""
    generator = torch.Generator().manual_seed(size)
    logits = torch.randn(40, size, generator=generator) * 3
    uniforms = torch.rand(40, dtype=torch.float64, generator=generator)
    tokens, values = choose_tokens(logits, uniforms, SamplingSettings())
    cumulative = logits.double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(cumulative, uniforms[:, None], right=True).squeeze(1)
    edge = (cumulative - uniforms[:, None]).abs().amin(-1)
    assert (tokens == expected)[edge > 1e-6].all() and (edge > 1e-6).sum() >= 39
    assert values.isfinite().all()


@pytest.mark.parametrize("size", [3, 256, 300])
def test_rows_that_are_no_numbers_get_a_token_and_a_logprob_that_is_none(size: int) -> None:
    logits = torch.full((2, size), torch.nan)
    tokens, values = choose_tokens(logits, torch.tensor([0.0, 0.9], dtype=torch.float64), SamplingSettings())
    assert tokens.ge(0).all() and tokens.lt(size).all() and values.isnan().all()


def test_frequencies_follow_the_probabilities() -> None:
    logits = torch.tensor([0.3, -1.0, 1.7, 0.0, 2.0])
    count = 4001
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, _ = choose_tokens(logits.expand(count, -1), uniforms, SamplingSettings(temperature=1.5, top_k=3))
    probabilities = dict(kept_tokens((logits / 1.5).tolist(), 3, 1.0))
    mass = sum(probabilities.values())
    drawn = Counter(tokens.tolist())
    assert drawn.keys() == probabilities.keys()
    for token, probability in probabilities.items():
        assert drawn[token] == pytest.approx(count * probability / mass, abs=2)


def test_logprobs_are_of_what_can_be_drawn() -> None:
    logits = torch.randn(6, 31, generator=torch.Generator().manual_seed(3)) * 5
    tokens, values = choose_tokens(
        logits, torch.full((6,), 0.4, dtype=torch.float64), SamplingSettings(False, 0.6, 4, 0.8)
    )
    assert values.dtype == torch.float32
    for row, token, value in zip(logits, tokens.tolist(), values.tolist(), strict=True):
        kept = dict(kept_tokens((row / 0.6).tolist(), 4, 0.8))
        assert value == pytest.approx(math.log(kept[token] / math.fsum(kept.values())), abs=1e-5)


def test_greedy_logprobs_are_of_the_whole_scaled_distribution() -> None:
    logits = torch.randn(6, 31, generator=torch.Generator().manual_seed(3)) * 5
    tokens, values = choose_tokens(
        logits, torch.full((6,), 0.4, dtype=torch.float64), SamplingSettings(True, 0.6, 4, 0.8)
    )
    expected = (logits.double() / 0.6).log_softmax(-1).gather(1, tokens[:, None]).squeeze(1)
    torch.testing.assert_close(values.double(), expected, atol=1e-5, rtol=0)


def test_greedy_takes_the_first_of_equals_and_ignores_the_filters() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    tokens, _ = choose_tokens(
        logits, torch.tensor([0.9, 0.9], dtype=torch.float64), SamplingSettings(True, 3.0, 2, 0.1)
    )
    assert tokens.tolist() == [1, 0]


def test_rows_do_not_touch_each_other() -> None:
    logits = torch.randn(9, 17, generator=torch.Generator().manual_seed(4))
    uniforms = torch.rand(9, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    settings_ = SamplingSettings(top_k=6, top_p=0.7)
    together, _ = choose_tokens(logits, uniforms, settings_)
    alone = [int(choose_tokens(logits[[row]], uniforms[[row]], settings_)[0]) for row in range(9)]
    assert together.tolist() == alone


def test_half_precision_logits_are_sampled_in_full() -> None:
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(6)).bfloat16()
    uniforms = torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    assert torch.equal(
        choose_tokens(logits, uniforms, SamplingSettings())[0],
        choose_tokens(logits.float(), uniforms, SamplingSettings())[0],
    )


def test_uniform_numbers_depend_on_their_seed_alone() -> None:
    together = uniform_numbers([5, 2**62, 5, 0], 7)
    assert together.dtype == torch.float64 and together.shape == (4, 7)
    assert torch.equal(together[0], together[2]) and torch.equal(together[1], uniform_numbers([2**62], 7)[0])
    assert torch.equal(together[:, :3], uniform_numbers([5, 2**62, 5, 0], 3))
    assert not torch.equal(together[0], together[3])
    assert together.ge(0).all() and together.lt(1).all()
    assert uniform_numbers([], 7).shape == (0, 7)


class Letters:
    """A tokenizer whose token n is the n-th letter."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(ord("a") + token) for token in tokens)


def test_stop_strings_may_span_tokens_and_differ_by_row() -> None:
    stop = StopRules([25], [("bc",), (), ("zz", "ca")], Letters())

    def finished(rows: list[int], *answers: list[int]) -> list[bool]:
        """Of some rows, where all three have these answers."""
        found: list[bool] = stop.finished(
            np.array(rows), np.array([answers[row][-1] for row in rows]), np.array(answers)
        ).tolist()
        return found

    assert finished([0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 2, 0]) == [True, False, True]
    assert finished([1], [0], [25], [0]) == [True]
    assert finished([2], [1, 2], [1, 2], [0, 2]) == [False]
    # "ca" stops the third row, not the first
    assert finished([0, 2], [2, 0], [25, 25], [2, 0]) == [False, True]


def test_without_stop_strings_no_tokenizer_is_needed() -> None:
    assert (
        not StopRules([], [(), ()], None)
        .finished(np.array([0, 1]), np.array([1, 2]), np.array([[1], [2]]))
        .any()
    )


def test_stop_strings_of_configuration_and_sample_add_up() -> None:
    assert stop_strings_of_rows(["x"], [["y", "z"], None, "w"], 3) == [("x", "y", "z"), ("x",), ("x", "w")]
    assert stop_strings_of_rows(None, None, 2) == [(), ()]


@pytest.mark.parametrize(
    ("configured", "of_samples", "where"),
    [
        (["x", ""], None, r"policy\.generation\.stop_strings has ''"),
        (None, [None, ["y", ""]], r"stop_strings\[1\] has ''"),
        (None, [None, [7]], r"stop_strings\[1\] has 7"),
    ],
)
def test_a_stop_string_that_every_text_contains_is_refused(
    configured: list[str] | None, of_samples: list[list[str] | None] | None, where: str
) -> None:
    with pytest.raises(BatchError, match=where + ": a stop string has at least one character"):
        stop_strings_of_rows(configured, of_samples, 2)
