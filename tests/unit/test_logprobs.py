"""Vocab-parallel log-probabilities on one rank against float64: values, gradients, chunks, padding columns,
extreme logits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from megarl.models.engine import logprobs
from megarl.models.engine.heads import LogprobHead
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.generation.sampling import SamplingSettings, choose_tokens
from tests.kept_tokens import expected_entropies
from tests.kept_tokens import expected_logprobs as expected_among_kept


def expected_logprobs(logits: Tensor, targets: Tensor, size: int, temperature: float) -> Tensor:
    """A plain float64 formula over the true vocabulary."""
    return (
        (logits[..., :size].double() / temperature).log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)
    )


def random_logits(*shape: int, seed: int, scale: float = 3.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def random_targets(*shape: int, size: int, seed: int) -> Tensor:
    return torch.randint(size, shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 4),
    columns=st.integers(1, 9),
    padding=st.integers(0, 3),
    temperature=st.floats(0.05, 20.0),
    seed=st.integers(0, 2**31),
)
def test_values_and_gradients_equal_float64(
    rows: int, columns: int, padding: int, temperature: float, seed: int
) -> None:
    logits = random_logits(rows, 5, columns + padding, seed=seed).requires_grad_()
    targets = random_targets(rows, 5, size=columns, seed=seed + 1)
    weights = random_logits(rows, 5, seed=seed + 2)
    measured = vocab_parallel_scores(
        logits, targets, VocabularyShard(columns), SamplingSettings(temperature=temperature)
    ).logprobs
    (measured * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected = expected_logprobs(exact, targets, columns, temperature)
    (expected * weights.double()).sum().backward()
    assert measured.dtype == torch.float32
    bound = 2e-5 * max(1.0, 1.0 / temperature)
    torch.testing.assert_close(measured.detach().double(), expected.detach(), atol=bound, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=bound, rtol=1e-4)
    assert logits.grad[..., columns:].eq(0).all()


@pytest.mark.parametrize("start", [0, 5])
def test_a_part_of_the_vocabulary_scores_its_own_tokens_alone(start: int) -> None:
    """What a rank adds to the others': the logit of a target that is its own, else 0, less its own
    normaliser."""
    logits, targets = random_logits(6, 5, seed=41).requires_grad_(), torch.tensor([0, 4, 5, 7, 9, 11])
    exact = logits.detach().double().requires_grad_()
    places = targets - start
    own = torch.nn.functional.one_hot(places.clamp(0, 4), 5) * ((places >= 0) & (places < 5))[:, None]
    expected = (own * exact).sum(-1) - exact.logsumexp(-1)
    expected.sum().backward()
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(12, start)).logprobs
    measured.sum().backward()
    torch.testing.assert_close(measured.double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6, rtol=1e-5)
    # a rank that has padding alone: nothing of it is in a maximum or a sum
    assert logprobs._local_statistics(logits.detach(), targets, VocabularyShard(4, 5), 1.0, None)[:2].unique(
        dim=1
    ).tolist() == [
        [-torch.inf],
        [0],
    ]


@settings(max_examples=80)
@given(
    columns=st.integers(1, 9),
    padding=st.integers(0, 3),
    temperature=st.floats(0.3, 3.0),
    top_k=st.one_of(st.none(), st.integers(1, 11)),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    seed=st.integers(0, 2**31),
)
def test_tokens_that_sampling_leaves_out_have_no_part(
    columns: int, padding: int, temperature: float, top_k: int | None, top_p: float, seed: int
) -> None:
    sampling = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = random_logits(6, columns + padding, seed=seed, scale=2).requires_grad_()
    targets = random_targets(6, size=columns, seed=seed + 1)
    weights = random_logits(6, seed=seed + 2)
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(columns), sampling).logprobs
    (measured * weights).sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected = expected_among_kept(exact[:, :columns], targets, sampling)
    (expected * weights.double()).sum().backward()
    torch.testing.assert_close(measured.detach().double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=2e-5, rtol=1e-4)


@settings(max_examples=80)
@given(
    columns=st.integers(1, 9),
    padding=st.integers(0, 3),
    temperature=st.floats(0.3, 3.0),
    top_k=st.one_of(st.none(), st.integers(1, 11)),
    top_p=st.sampled_from([1.0, 0.9, 0.5, 0.05]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 2**31),
)
def test_entropies_and_their_gradients_equal_float64(
    columns: int,
    padding: int,
    temperature: float,
    top_k: int | None,
    top_p: float,
    dtype: torch.dtype,
    seed: int,
) -> None:
    sampling = SamplingSettings(temperature=temperature, top_k=top_k, top_p=top_p)
    logits = random_logits(6, columns + padding, seed=seed, scale=2).to(dtype).requires_grad_()
    targets = random_targets(6, size=columns, seed=seed + 1)
    of_logprobs, of_entropies = random_logits(2, 6, seed=seed + 2).to(dtype)
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(columns), sampling, with_entropies=True)
    (measured.logprobs * of_logprobs + measured.entropies * of_entropies).sum().backward()
    exact = logits.detach().double().requires_grad_()
    given = exact[:, :columns], targets, sampling
    expected = expected_entropies(*given)
    (expected_among_kept(*given) * of_logprobs.double() + expected * of_entropies.double()).sum().backward()
    bound = 1e-12 if dtype == torch.float64 else 3e-5
    assert measured.entropies.dtype == dtype
    torch.testing.assert_close(
        measured.entropies.detach().double(), expected.detach(), atol=bound, rtol=bound
    )
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=bound, rtol=bound)
    assert logits.grad[:, columns:].eq(0).all()


def test_the_gradient_of_an_entropy_is_minus_p_times_log_p_plus_entropy() -> None:
    logits = random_logits(4, 9, seed=30).double().requires_grad_()
    found = vocab_parallel_scores(
        logits, random_targets(4, size=9, seed=31), VocabularyShard(9), with_entropies=True
    )
    found.entropies.sum().backward()
    logarithms = logits.detach().log_softmax(-1)
    entropies = -(logarithms.exp() * logarithms).sum(-1, keepdim=True)
    torch.testing.assert_close(
        logits.grad, -logarithms.exp() * (logarithms + entropies), atol=1e-15, rtol=1e-12
    )


def test_log_probabilities_are_the_same_to_the_bit_with_entropies() -> None:
    logits, targets = random_logits(5, 9, seed=32), random_targets(5, size=9, seed=33)
    for sampling in (SamplingSettings(), SamplingSettings(temperature=0.7, top_k=5, top_p=0.8)):
        plain = vocab_parallel_scores(logits, targets, VocabularyShard(9), sampling).logprobs
        assert torch.equal(
            vocab_parallel_scores(
                logits, targets, VocabularyShard(9), sampling, with_entropies=True
            ).logprobs,
            plain,
        )


@pytest.mark.parametrize(
    ("row", "entropy"),
    [
        ([0.0, 0.0, 0.0, 0.0], 4.0),
        ([-torch.inf, 2.0, 2.0, 2.0], 3.0),
        ([-torch.inf, -torch.inf, 5.0, -torch.inf], 1.0),
        ([1e30, -1e30, 0.0, 1.0], 1.0),
        ([3e4, 3e4, -3e4, 0.0], 2.0),
    ],
)
def test_entropies_of_certain_forbidden_and_huge_logits(row: list[float], entropy: float) -> None:
    logits = torch.tensor([row]).requires_grad_()
    found = vocab_parallel_scores(logits, torch.tensor([2]), VocabularyShard(4), with_entropies=True)
    found.entropies.sum().backward()
    assert float(found.entropies.detach()) == pytest.approx(torch.tensor(entropy).log().item(), abs=1e-6)
    torch.testing.assert_close(logits.grad, torch.zeros(1, 4), atol=1e-6, rtol=0)


def test_what_is_drawn_is_scored_alike() -> None:
    logits = random_logits(400, 23, seed=20, scale=2)
    uniforms = torch.rand(400, dtype=torch.float64, generator=torch.Generator().manual_seed(21))
    sampling = SamplingSettings(temperature=0.8, top_k=9, top_p=0.7)
    tokens, drawn = choose_tokens(logits, uniforms, sampling)
    scored = vocab_parallel_scores(logits, tokens, VocabularyShard(23), sampling).logprobs
    torch.testing.assert_close(scored, drawn, atol=2e-6, rtol=0)
    among_all = vocab_parallel_scores(
        logits, tokens, VocabularyShard(23), SamplingSettings(temperature=0.8)
    ).logprobs
    assert (drawn - among_all).min() > 0 and (drawn - among_all).mean() > 0.1


@pytest.mark.parametrize("rubbish", [float("inf"), float("nan"), -float("inf"), 3e38])
def test_padding_columns_never_count(rubbish: float) -> None:
    logits = random_logits(7, 13, seed=0)
    targets = random_targets(7, size=11, seed=1)
    clean = vocab_parallel_scores(logits[:, :11], targets, VocabularyShard(11)).logprobs
    logits[:, 11:] = rubbish
    logits.requires_grad_()
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(11)).logprobs
    measured.sum().backward()
    assert torch.equal(measured, clean)
    assert logits.grad.isfinite().all()
    assert logits.grad[:, 11:].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_logits_lose_nothing_in_the_forward_pass(dtype: torch.dtype) -> None:
    logits = random_logits(17, 101, seed=2, scale=8).to(dtype).requires_grad_()
    targets = random_targets(17, size=101, seed=3)
    measured = vocab_parallel_scores(
        logits, targets, VocabularyShard(101), SamplingSettings(temperature=0.7)
    ).logprobs
    torch.testing.assert_close(
        measured.double(), expected_logprobs(logits.detach(), targets, 101, 0.7), atol=2e-5, rtol=0
    )
    measured.sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected_logprobs(exact, targets, 101, 0.7).sum().backward()
    assert logits.grad.dtype is dtype
    spacing = {torch.bfloat16: 2**-8, torch.float16: 2**-11}[dtype]
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-6, rtol=1.01 * spacing)


@pytest.mark.parametrize("largest", [1e4, -1e4, 1e30])
def test_huge_logits_neither_overflow_nor_vanish(largest: float) -> None:
    logits = (random_logits(6, 10, seed=4) + largest).requires_grad_()
    targets = random_targets(6, size=10, seed=5)
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(10)).logprobs
    measured.sum().backward()
    exact = logits.detach().double().requires_grad_()
    expected = expected_logprobs(exact, targets, 10, 1.0)
    expected.sum().backward()
    torch.testing.assert_close(measured.detach().double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits.grad.double(), exact.grad, atol=1e-5, rtol=1e-5)


def test_a_token_that_cannot_be_has_minus_infinity_and_others_stay_exact() -> None:
    logits = random_logits(3, 7, seed=6)
    logits[:, 2] = -torch.inf
    logits[:, 0] = -torch.inf
    targets = torch.tensor([2, 4, 6])
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(7)).logprobs
    assert measured[0] == -torch.inf
    torch.testing.assert_close(
        measured[1:].double(), expected_logprobs(logits, targets, 7, 1.0)[1:], atol=1e-5, rtol=0
    )


def test_a_vocabulary_of_one_token_is_certain() -> None:
    logits = random_logits(4, 1, seed=7).requires_grad_()
    measured = vocab_parallel_scores(logits, torch.zeros(4, dtype=torch.int64), VocabularyShard(1)).logprobs
    measured.sum().backward()
    assert measured.eq(0).all() and logits.grad.eq(0).all()


@pytest.mark.parametrize("kept", [{}, {"top_k": 4, "top_p": 0.9}], ids=["all", "some"])
@pytest.mark.parametrize("rows_a_chunk", [1, 2, 3, 6, 7, 8, 100])
def test_chunk_size_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch, rows_a_chunk: int, kept: dict[str, Any]
) -> None:
    def run(with_entropies: bool) -> tuple[Tensor, Tensor]:
        logits = random_logits(7, 13, seed=8).requires_grad_()
        measured = vocab_parallel_scores(
            logits,
            random_targets(7, size=12, seed=9),
            VocabularyShard(12),
            SamplingSettings(temperature=1.3, **kept),
            with_entropies=with_entropies,
        )
        values = measured.logprobs if measured.entropies is None else measured.logprobs + measured.entropies
        (values * torch.arange(7)).sum().backward()
        return values.detach(), logits.grad

    whole = [*run(False), *run(True)]
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", rows_a_chunk * 13 * 4)
    for one, other in zip([*run(False), *run(True)], whole, strict=True):
        assert torch.equal(one, other)


def test_a_row_larger_than_a_chunk_still_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logprobs.CHUNK_BYTES, "cpu", 1)
    logits, targets = random_logits(3, 50, seed=10), random_targets(3, size=50, seed=11)
    measured = vocab_parallel_scores(logits, targets, VocabularyShard(50)).logprobs
    torch.testing.assert_close(
        measured.double(), expected_logprobs(logits, targets, 50, 1.0), atol=1e-5, rtol=0
    )


def test_logits_are_not_written_to() -> None:
    logits = random_logits(5, 9, seed=12)
    before = logits.clone()
    vocab_parallel_scores(logits, random_targets(5, size=9, seed=13), VocabularyShard(9))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("order", ["rows apart", "rows in another order", "columns apart"])
def test_logits_that_are_not_contiguous(order: str) -> None:
    source = {
        "rows apart": random_logits(4, 6, 12, seed=14)[..., 2:11],
        "rows in another order": random_logits(6, 4, 9, seed=14).transpose(0, 1),
        "columns apart": random_logits(9, 4, 6, seed=14).permute(1, 2, 0),
    }[order]
    targets = random_targets(4, 6, size=9, seed=15)
    for overwrite in (False, True):
        leaf = source.clone().requires_grad_()
        placed = torch.empty_strided(source.shape, source.stride()).copy_(leaf)
        measured = vocab_parallel_scores(placed, targets, VocabularyShard(9), overwrite=overwrite).logprobs
        measured.sum().backward()
        exact = source.double().requires_grad_()
        expected = expected_logprobs(exact, targets, 9, 1.0)
        expected.sum().backward()
        torch.testing.assert_close(measured.detach().double(), expected.detach(), atol=1e-5, rtol=0)
        torch.testing.assert_close(leaf.grad.double(), exact.grad, atol=1e-5, rtol=0)


@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("kept", [{}, {"top_k": 4, "top_p": 0.9}], ids=["all", "some"])
def test_a_gradient_over_the_logits_is_the_same_in_their_memory(kept: dict[str, Any], padding: int) -> None:
    targets, found = random_targets(7, size=12, seed=9), []
    for overwrite in (False, True):
        leaf = random_logits(7, 12 + padding, seed=8).requires_grad_()
        logits = leaf * 1
        measured = vocab_parallel_scores(
            logits,
            targets,
            VocabularyShard(12),
            SamplingSettings(temperature=1.3, **kept),
            overwrite=overwrite,
        ).logprobs
        (measured * torch.arange(7)).sum().backward(retain_graph=True)
        assert torch.equal(logits, leaf.grad if overwrite else leaf)
        found += [measured.detach(), leaf.grad]
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        measured.sum().backward()


def test_a_loss_has_its_gradient_written_over_the_logits() -> None:
    leaf = random_logits(1, 4, 9, seed=22).requires_grad_()
    logits = leaf * 1
    model_input: Any = SimpleNamespace(
        targets=random_targets(1, 4, size=9, seed=23), to_rows=lambda values: values
    )
    LogprobHead(VocabularyShard(9)).next_token_logprobs(logits, model_input).sum().backward()
    assert torch.equal(logits, leaf.grad)


def test_temperatures_divide_as_python_numbers_do() -> None:
    logits = random_logits(50, 101, seed=18)
    for temperature in (0.7, 1.3, 1e-3, 3.0, 1 / 3):
        assert torch.equal(logits / temperature, logprobs._divided(logits.clone(), temperature))


def test_a_cpu_runs_the_pytorch_code_unless_it_is_told_not_to(monkeypatch: pytest.MonkeyPatch) -> None:
    def choose(device: str) -> object:
        return logprobs.kernels.__wrapped__("logprob_kernels", "MEGARL_LOGPROB_KERNEL", device)

    monkeypatch.delenv("MEGARL_LOGPROB_KERNEL", raising=False)
    assert choose("cpu") is None
    monkeypatch.setenv("MEGARL_LOGPROB_KERNEL", "0")
    assert choose("cpu") is None and choose("cuda") is None


def test_gradient_of_a_weighted_sum_is_exact_by_finite_differences() -> None:
    logits = random_logits(2, 6, seed=16, scale=1)
    targets = torch.tensor([1, 4])
    leaf = logits.clone().requires_grad_()
    vocab_parallel_scores(leaf, targets, VocabularyShard(5), SamplingSettings(temperature=0.9)).logprobs[
        1
    ].backward()
    for column in range(6):
        step = torch.zeros_like(logits, dtype=torch.float64)
        step[1, column] = 1e-6
        up = expected_logprobs(logits.double() + step, targets, 5, 0.9)[1]
        down = expected_logprobs(logits.double() - step, targets, 5, 0.9)[1]
        assert float(leaf.grad[1, column]) == pytest.approx(float((up - down) / 2e-6), abs=1e-6)
    assert leaf.grad[0].eq(0).all()
