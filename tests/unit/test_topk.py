"""The most likely tokens and log-probabilities of further tokens on one rank: against sorting, and against
float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megarl.distributed.batch_checks import check_scored_tokens
from megarl.errors import BatchError
from megarl.models.engine import logprobs
from megarl.models.engine.context import ContextShare
from megarl.models.engine.heads import LogprobHead, TopkHead
from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.engine.microbatches import HOST_LENGTHS, WANTED, MicroBatch, Shapes
from megarl.models.engine.model_input import lay_out
from megarl.models.engine.output_layer import Request
from megarl.models.engine.topk import largest_tokens
from megarl.models.generation.sampling import SamplingSettings
from tests.unit import logit_passes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sorted_tokens(row: list[float], count: int) -> list[int]:
    """By falling logit, then by rising token."""
    return sorted(range(len(row)), key=lambda token: (-row[token], token))[:count]


@settings(max_examples=150)
@given(
    columns=st.integers(1, 12),
    padding=st.integers(0, 3),
    levels=st.sampled_from([1, 2, 4, 1000]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31),
    data=st.data(),
)
def test_the_largest_are_those_of_a_sort_and_the_lower_token_wins(
    columns: int, padding: int, levels: int, dtype: torch.dtype, seed: int, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, columns))
    # of few levels, so that many logits are equal
    logits = ((normal(5, columns + padding, seed=seed) * levels).round() / levels).to(dtype)
    logits[:, columns:] = 100.0
    found = largest_tokens(logits, VocabularyShard(columns), count)
    assert found.tolist() == [sorted_tokens(row, count) for row in logits[:, :columns].tolist()]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_of_both_signs_are_equal_and_infinities_have_their_places(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -0.0, torch.inf, -torch.inf, -1.0, -0.0, 0.0, -2.0]]).to(dtype)
    assert largest_tokens(logits, VocabularyShard(8), 8).tolist() == [[2, 0, 1, 5, 6, 4, 7, 3]]
    assert largest_tokens(logits[:0], VocabularyShard(8), 3).shape == (0, 3)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = normal(7, 11, seed=3).float()
    whole = largest_tokens(logits, VocabularyShard(11), 4)
    monkeypatch.setattr(logprobs, "CHUNK_BYTES", {"cpu": 2 * 4 * 11})
    assert torch.equal(largest_tokens(logits, VocabularyShard(11), 4), whole)


@settings(max_examples=80)
@given(
    columns=st.integers(1, 9),
    padding=st.integers(0, 3),
    count=st.integers(1, 5),
    temperature=st.floats(0.3, 3.0),
    with_entropies=st.booleans(),
    overwrite=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_log_probabilities_of_further_tokens_and_their_gradients_equal_float64(
    columns: int,
    padding: int,
    count: int,
    temperature: float,
    with_entropies: bool,
    overwrite: bool,
    seed: int,
) -> None:
    leaf = (2 * normal(6, columns + padding, seed=seed)).requires_grad_()
    generator = torch.Generator().manual_seed(seed)
    targets, further = (torch.randint(columns, shape, generator=generator) for shape in ((6,), (6, count)))
    weights = normal(6, count + 2, seed=seed + 1)
    sampling = SamplingSettings(temperature=temperature)
    scores = vocab_parallel_scores(
        leaf * 1,
        targets,
        VocabularyShard(columns),
        sampling,
        overwrite=overwrite,
        with_entropies=with_entropies,
        further=further,
    )
    parts = [scores.logprobs[:, None], scores.further]
    exact = leaf.detach().clone().requires_grad_()
    logarithms = (exact[:, :columns] / temperature).log_softmax(-1)
    expected = [logarithms.gather(1, targets[:, None]), logarithms.gather(1, further)]
    if with_entropies:
        parts.append(scores.entropies[:, None])
        expected.append(-(logarithms.exp() * logarithms).sum(-1, keepdim=True))
    found, wanted = torch.cat(parts, dim=1), torch.cat(expected, dim=1)
    for values in (found, wanted):
        (values * weights[:, : values.shape[1]]).sum().backward()
    torch.testing.assert_close(found.detach(), wanted.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(leaf.grad, exact.grad, atol=1e-12, rtol=1e-12)
    assert leaf.grad[:, columns:].eq(0).all()


def test_a_target_among_the_further_tokens_has_its_bits() -> None:
    logits, targets = (9 * normal(50, 17, seed=1)).float(), torch.arange(50) % 17
    scores = vocab_parallel_scores(
        logits, targets, VocabularyShard(17), SamplingSettings(temperature=0.7), further=targets[:, None]
    )
    assert torch.equal(scores.further[:, 0], scores.logprobs)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 50])
@pytest.mark.parametrize("with_entropies", [False, True])
def test_further_tokens_in_chunks_of_positions_equal_float64(
    chunk_size: int | None, with_entropies: bool
) -> None:
    hidden, weight = normal(7, 5, seed=1).requires_grad_(), normal(11, 5, seed=2).requires_grad_()
    generator = torch.Generator().manual_seed(3)
    targets, further = (torch.randint(11, shape, generator=generator) for shape in ((7,), (7, 3)))
    asked = Request(
        None,
        targets,
        VocabularyShard(11),
        SamplingSettings(temperature=0.8),
        chunk_size,
        with_entropies,
        further,
    )
    scores = asked.scores(asked.output(hidden, weight, None))
    weights = normal(7, 5, seed=4)
    parts = [
        scores.logprobs[:, None],
        scores.further,
        *([scores.entropies[:, None]] if with_entropies else []),
    ]
    (torch.cat(parts, dim=1) * weights[:, : 4 + with_entropies]).sum().backward()
    exact = [leaf.detach().clone().requires_grad_() for leaf in (hidden, weight)]
    logarithms = (F.linear(*exact) / 0.8).log_softmax(-1)
    wanted = [logarithms.gather(1, targets[:, None]), logarithms.gather(1, further)]
    wanted += [-(logarithms.exp() * logarithms).sum(-1, keepdim=True)] if with_entropies else []
    (torch.cat(wanted, dim=1) * weights[:, : 4 + with_entropies]).sum().backward()
    for one, other in zip(parts, wanted, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    for one, other in zip((hidden, weight), exact, strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk_size", [None, 2, 50])
@torch.no_grad()
def test_a_request_finds_the_most_likely_tokens(chunk_size: int | None) -> None:
    hidden, weight = normal(7, 5, seed=1).float(), normal(11, 5, seed=2).float()
    targets = torch.arange(7)
    asked = Request(
        None, targets, VocabularyShard(11), SamplingSettings(temperature=0.8), chunk_size, largest=4
    )
    scores = asked.scores(asked.output(hidden, weight, None))
    logarithms = (F.linear(hidden, weight) / 0.8).log_softmax(-1)
    assert scores.largest.tolist() == logarithms.topk(4).indices.tolist()
    torch.testing.assert_close(scores.further, logarithms.topk(4).values)
    torch.testing.assert_close(scores.logprobs, logarithms.gather(1, targets[:, None]).squeeze(1))


LENGTHS = [5, 1, 3]


def micro_batch(packed: bool, wanted: Tensor | None, **columns: Tensor) -> MicroBatch:
    ids = torch.randint(1, 13, (3, 5), generator=torch.Generator().manual_seed(5)) * (
        torch.arange(5) < torch.tensor(LENGTHS)[:, None]
    )
    data = {"input_ids": ids, "input_lengths": torch.tensor(LENGTHS), HOST_LENGTHS: LENGTHS, **columns}
    return MicroBatch(data if wanted is None else {**data, WANTED: wanted}, packed, 12 if packed else 5)


def by_token(tokens: Tensor, positions: Tensor) -> Tensor:
    """[n, t, 13] logits that the token and its position say."""
    table = normal(13, 7, 13, seed=6).float()
    return table[tokens, positions.clamp(max=6)]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_rows_get_their_own_tokens_back(packed: bool, masked: bool) -> None:
    """Entry i is by the distribution of token i+1, whatever way the rows lie in front of the model."""
    wanted = torch.rand(3, 5, generator=torch.Generator().manual_seed(7)) < 0.6 if masked else None
    further = torch.randint(13, (3, 5, 2), generator=torch.Generator().manual_seed(8), dtype=torch.int32)
    laid = lay_out(micro_batch(packed, wanted, tokens=further), ContextShare(), Shapes(packed_multiple=3))
    logits = by_token(laid.tokens, laid.positions)
    rows = laid.micro_batch
    expected = by_token(rows.input_ids, torch.arange(5).expand(3, 5)).log_softmax(-1)[:, :-1]
    inside = torch.arange(1, 5) < torch.tensor(LENGTHS)[:, None]
    if wanted is not None:
        inside = inside & wanted[:, 1:]

    def scored(head: LogprobHead | TopkHead) -> tuple[Tensor, Request | None]:
        request = head.asks(laid)
        return (logits if request is None else request.rows(logits)[None]).clone(), request

    head = LogprobHead(VocabularyShard(13), further="tokens")
    output, request = scored(head)
    found = head.next_token_scores(output, laid, request).further
    torch.testing.assert_close(found[inside], expected.gather(2, further[:, :-1].long())[inside])

    topk = TopkHead(LogprobHead(VocabularyShard(13), largest=3))
    output, request = scored(topk)
    tensors = topk(output, laid, request).tensors
    best = expected.topk(3)
    assert tensors["topk_indices"].shape == tensors["topk_logits"].shape == (3, 5, 3)
    assert torch.equal(tensors["topk_indices"][:, :-1][inside], best.indices[inside])
    torch.testing.assert_close(tensors["topk_logits"][:, :-1][inside], best.values[inside])
    beyond = torch.nn.functional.pad(
        torch.arange(1, 5) < torch.tensor(LENGTHS)[:, None], (0, 1)
    ).logical_not()
    assert tensors["topk_indices"][beyond].eq(0).all() and tensors["topk_logits"][beyond].eq(0).all()
    assert torch.equal(
        tensors["logprobs"],
        LogprobHead(VocabularyShard(13))(*scored(topk)[:1], laid, request).tensors["logprobs"],
    )


def test_a_stage_without_the_tokens_asks_for_none() -> None:
    laid = lay_out(micro_batch(False, torch.ones(3, 5, dtype=torch.bool)), ContextShare(), Shapes())
    asked = LogprobHead(VocabularyShard(13), further="tokens").asks(laid)
    assert asked is not None and asked.further is None


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (torch.zeros(2, 3), "integer tensor"),
        (torch.zeros(2, 3, dtype=torch.int64), "integer tensor"),
        (torch.zeros(2, 3, 0, dtype=torch.int64), "integer tensor"),
        (torch.full((2, 3, 4), 13), r"tokens\[0, 0, 0\] = 13: token ids lie in \[0, 13\)"),
        (torch.full((2, 3, 4), -1), r"= -1: token ids"),
    ],
)
def test_tokens_out_of_range_are_refused(tokens: Tensor, said: str) -> None:
    with pytest.raises(BatchError, match=said):
        check_scored_tokens({"tokens": tokens}, "tokens", 13)
    check_scored_tokens({"tokens": torch.full((2, 3, 4), 12, dtype=torch.int32)}, "tokens", 13)


@pytest.mark.parametrize("variant", ["alone", "further tokens"])
def test_further_tokens_cost_no_further_pass_over_the_logits(variant: str) -> None:
    """Counted by torch's dispatcher, forward and backward: a few numbers a token more."""
    assert logit_passes.passes_of_pytorch(variant) == pytest.approx(logit_passes.BY_PYTORCH, abs=0.02)
