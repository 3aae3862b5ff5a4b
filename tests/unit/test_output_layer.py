"""What an output layer is asked for: log-probabilities a chunk of positions at a time against float64, and
selected positions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from megarl.errors import ModelError
from megarl.models.engine.context import ContextShare
from megarl.models.engine.heads import LogprobHead
from megarl.models.engine.logprobs import VocabularyShard
from megarl.models.engine.microbatches import WANTED, MicroBatch, Shapes, move_to, under_mask
from megarl.models.engine.model_input import lay_out
from megarl.models.engine.output_layer import Request, answer_requests, answers_requests, asking
from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings
from megarl.models.huggingface.passes import forward_backward, output_of
from tests import kept_tokens
from tests.unit.test_logprobs import expected_logprobs

SAMPLINGS = [
    MODEL_ITSELF,
    SamplingSettings(temperature=0.7),
    SamplingSettings(temperature=1.3, top_k=5),
    SamplingSettings(top_p=0.6),
]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def request(
    count: int,
    size: int,
    sampling: SamplingSettings,
    chunk_size: int | None,
    index: Tensor | None = None,
    with_entropies: bool = False,
) -> Request:
    targets = torch.randint(0, size, (count,), generator=torch.Generator().manual_seed(count))
    return Request(index, targets, VocabularyShard(size), sampling, chunk_size, with_entropies)


def with_gradients(asked: Request, *leaves: Tensor | None) -> list[Tensor | None]:
    """Log-probabilities, and entropies, of ``hidden``, ``weight`` and ``bias``, and the gradients of a
    weighted sum of them."""
    own = [None if leaf is None else leaf.detach().clone().requires_grad_() for leaf in leaves]
    assert own[0] is not None and own[1] is not None
    scores = asked.scores(asked.output(own[0], own[1], own[2]))
    found = scores.logprobs if scores.entropies is None else torch.stack([scores.logprobs, scores.entropies])
    (found * torch.arange(1, found.numel() + 1).view(found.shape)).sum().backward()
    return [found.detach(), *(None if leaf is None else leaf.grad for leaf in own)]


@pytest.mark.parametrize("chunk_size", [1, 3, 7, 50])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_chunks_give_what_all_logits_give(biased: bool, sampling: SamplingSettings, chunk_size: int) -> None:
    hidden, weight, bias = normal(7, 5, seed=1), normal(13, 5, seed=2), normal(13, seed=3) if biased else None
    whole = with_gradients(request(7, 11, sampling, None), hidden, weight, bias)
    chunked = with_gradients(request(7, 11, sampling, chunk_size), hidden, weight, bias)
    for one, other in zip(whole, chunked, strict=True):
        torch.testing.assert_close(other, one, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("chunk_size", [None, 1, 3, 50])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_entropies_of_chunks_equal_float64(sampling: SamplingSettings, chunk_size: int | None) -> None:
    hidden, weight = normal(7, 5, seed=1, dtype=torch.float64), normal(11, 5, seed=2, dtype=torch.float64)
    asked = request(7, 11, sampling, chunk_size, with_entropies=True)
    exact = [leaf.clone().requires_grad_() for leaf in (hidden, weight)]
    given = F.linear(*exact), asked.targets, sampling
    expected = torch.stack([kept_tokens.expected_logprobs(*given), kept_tokens.expected_entropies(*given)])
    (expected * torch.arange(1, 15).view(2, 7)).sum().backward()
    found = with_gradients(asked, hidden, weight, None)
    for one, other in zip((expected.detach(), *(leaf.grad for leaf in exact)), found[:3], strict=True):
        torch.testing.assert_close(other, one, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("chunk_size", [2, 7])
def test_chunks_equal_float64(chunk_size: int) -> None:
    hidden, weight = normal(7, 5, seed=1, dtype=torch.float64), normal(11, 5, seed=2, dtype=torch.float64)
    asked = request(7, 11, SamplingSettings(temperature=0.7), chunk_size)
    exact = [leaf.clone().requires_grad_() for leaf in (hidden, weight)]
    expected = expected_logprobs(F.linear(*exact), asked.targets, 11, 0.7)
    (expected * torch.arange(1, 8)).sum().backward()
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.03)):
        found = with_gradients(asked, hidden.to(dtype), weight.to(dtype), None)
        for one, other in zip((expected.detach(), *(leaf.grad for leaf in exact)), found[:3], strict=True):
            assert one is not None and other is not None
            assert float((one - other.double()).norm() / one.norm()) < bound


def test_a_sum_over_many_chunks_loses_nothing() -> None:
    """Added up in bfloat16, products of one position each would soon vanish beside their sum."""
    hidden, weight = torch.ones(2000, 4, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16)
    asked = Request(None, torch.zeros(2000, dtype=torch.int64), VocabularyShard(3), MODEL_ITSELF, 1)
    leaf = weight.clone().requires_grad_()
    asked.output(hidden, leaf, None).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == torch.bfloat16
    torch.testing.assert_close(
        leaf.grad[0], torch.full((4,), 2000 * 2 / 3, dtype=torch.bfloat16), atol=0, rtol=5e-3
    )


@pytest.mark.parametrize("chunk_size", [None, 4])
def test_no_position_at_all(chunk_size: int | None) -> None:
    found, *gradients = with_gradients(
        request(0, 11, MODEL_ITSELF, chunk_size), normal(0, 5, seed=1), normal(11, 5, seed=2), None
    )
    assert found is not None and found.shape == (0,)
    assert gradients[0] is not None and gradients[1] is not None and not gradients[1].any()


class Largest(TorchDispatchMode):
    """Numbers of the largest tensor that an operation inside gives, in memory that was not there before."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        output = function(*arguments, **(keywords or {}))
        given = {each.untyped_storage().data_ptr() for each in arguments if isinstance(each, Tensor)}
        for found in output if isinstance(output, tuple | list) else [output]:
            if isinstance(found, Tensor) and found.untyped_storage().data_ptr() not in given:
                self.numbers = max(self.numbers, found.numel())
        return output


@pytest.mark.parametrize(("chunk_size", "positions"), [(None, 256), (16, 16), (60, 60)])
def test_nothing_is_larger_than_the_logits_of_a_chunk(chunk_size: int | None, positions: int) -> None:
    hidden, weight = normal(256, 8, seed=1), normal(500, 8, seed=2)
    with Largest() as largest:
        with_gradients(request(256, 500, MODEL_ITSELF, chunk_size), hidden, weight, None)
    assert largest.numbers == max(positions * 500, weight.numel())


def test_without_a_gradient_of_the_weight_none_is_made() -> None:
    hidden, weight = normal(6, 4, seed=1).requires_grad_(), normal(300, 4, seed=2)
    with Largest() as largest:
        request(6, 300, MODEL_ITSELF, 1).output(hidden, weight, None).sum().backward()
    assert hidden.grad is not None and largest.numbers < weight.numel()


class Model(nn.Module):
    """A model of one layer, which may divide its logits, as some do."""

    def __init__(self, head: nn.Module, scale: float = 1.0) -> None:
        super().__init__()
        self.embedding, self.head, self.scale = nn.Embedding(11, 5), head, scale

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **unused: Any) -> Any:
        logits = self.head(self.embedding(input_ids))
        return SimpleNamespace(logits=logits if self.scale == 1.0 else logits / self.scale)


def laid_out(mask: Tensor, lengths: list[int]) -> Any:
    ids = torch.randint(1, 11, mask.shape, generator=torch.Generator().manual_seed(5))
    data = {"input_ids": ids, "input_lengths": torch.tensor(lengths)}
    moved = move_to(data, torch.device("cpu"), wanted=under_mask({**data, "token_mask": mask}))
    return lay_out(MicroBatch(moved, False, mask.shape[1]), ContextShare(), Shapes())


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("chunk_size", [None, 2])
def test_a_model_s_own_scale_is_kept_or_refused(chunk_size: int | None, scale: float) -> None:
    torch.manual_seed(1)
    model = Model(nn.Linear(5, 11, bias=False), scale)
    mask = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]])
    given = laid_out(mask, [4, 4])
    (whole,) = forward_backward(model, [given], LogprobHead(VocabularyShard(11)), backward=False)
    answer_requests(model.head)
    head = LogprobHead(VocabularyShard(11), chunk_size=chunk_size)
    if chunk_size is not None and scale != 1.0:
        with pytest.raises(ModelError, match=r"logprob_chunk_size = 2: Model changes its logits.*null"):
            forward_backward(model, [given], head, backward=False)
        return
    (some,) = forward_backward(model, [given], head, backward=False)
    expected = whole.tensors["logprobs"] * torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1]])
    torch.testing.assert_close(some.tensors["logprobs"], expected, atol=1e-6, rtol=0)
    assert expected.count_nonzero() == 3


def test_an_output_layer_of_another_kind_answers_nothing() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = Model(Doubled(5, 11))
    answer_requests(model.head)
    assert not answers_requests(model.head)
    given = laid_out(torch.tensor([[0, 1, 0]]), [3])
    (found,) = forward_backward(model, [given], LogprobHead(VocabularyShard(11)), backward=False)
    assert found.tensors["logprobs"].count_nonzero() == 2
    with pytest.raises(
        ModelError, match=r"Model has an output layer that is no plain linear layer\. Fix: set it to null"
    ):
        forward_backward(model, [given], LogprobHead(VocabularyShard(11), chunk_size=1), backward=False)


def test_who_asks_for_nothing_gets_all_logits() -> None:
    model = Model(nn.Linear(5, 11))
    given = laid_out(torch.tensor([[0, 1, 0]]), [3])
    before = output_of(model, given)
    answer_requests(model.head)
    assert torch.equal(output_of(model, given), before) and before.shape == (1, 3, 11)
    with asking(request(1, 11, MODEL_ITSELF, None, torch.tensor([2]))):
        assert model(given.tokens).logits.shape == (1, 1, 11)
    assert model(given.tokens).logits.shape == (1, 3, 11)


@pytest.mark.parametrize("sequence_first", [False, True])
def test_rows_are_those_of_the_index(sequence_first: bool) -> None:
    hidden = torch.arange(3 * 4 * 2).view(3, 4, 2)
    for index in (None, torch.tensor([1, 4, 11]), torch.tensor([], dtype=torch.int64)):
        given = hidden.transpose(0, 1).contiguous() if sequence_first else hidden
        expected = hidden.reshape(12, 2) if index is None else hidden.reshape(12, 2)[index]
        assert torch.equal(
            request(1, 3, MODEL_ITSELF, None, index).rows(given, sequence_first=sequence_first), expected
        )


def test_the_mask_of_a_batch() -> None:
    data = {"token_mask": torch.tensor([[0.0, 1.0], [1.0, 0.5]])}
    assert under_mask(data).tolist() == [[False, True], [True, True]]
    assert under_mask({**data, "sample_mask": torch.tensor([0.0, 1.0])}).tolist() == [
        [False, False],
        [True, True],
    ]
    moved = move_to(
        {**data, "input_lengths": torch.tensor([2, 2])}, torch.device("cpu"), wanted=under_mask(data)
    )
    assert torch.equal(moved[WANTED], under_mask(data))
