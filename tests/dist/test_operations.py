"""Operations and host syncs of a micro-batch, counted: few, and the same for any number of packed
sequences."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks import tiny
from benchmarks.cases.operations import (
    TOKENS,
    batched_products,
    counting,
    counts_of,
    mixture_counts,
    require_as_many,
    require_few,
    require_fewer,
)
from megarl.parity.pool import WorkerPool
from tests.tiers import newest_megatron, slow


@newest_megatron
def test_a_packed_micro_batch_has_few_operations_and_waits_for_nothing(
    pool: WorkerPool, tmp_path: Path
) -> None:
    model = tiny.save_model(tmp_path / "model", TOKENS)
    counts = {sequences: counts_of(pool, model, sequences) for sequences in (2, 16)}
    require_few(counts)
    require_fewer(counts_of(pool, model, 2, compiled=True), counts[2])


@slow
@newest_megatron
def test_grouped_experts_have_as_many_operations_whatever_their_number(
    pool: WorkerPool, tmp_path: Path
) -> None:
    mixtures = {experts: mixture_counts(pool, tmp_path / str(experts), experts) for experts in (4, 8)}
    require_as_many(mixtures)
    loop = [kinds["loop"]["train_operations"] for kinds in mixtures.values()]
    assert loop[0] < loop[1]


@newest_megatron
def test_adapters_add_no_products_token_by_token(pool: WorkerPool, tmp_path: Path) -> None:
    """With a frozen weight, torch can choose a batched product, which reads the weight once a token."""
    model = tiny.save_model(tmp_path / "model", TOKENS)
    peft = {"enabled": True, "dim": 2, "alpha": 4, "target_modules": []}
    assert batched_products(pool, model) == batched_products(pool, model, peft=peft)
    # Log-probabilities in float32 have an output layer of ours.
    changes = {"precision": "bfloat16", "megatron_cfg": {"float32_logits": True}}
    assert batched_products(pool, model, **changes) == batched_products(pool, model, peft=peft, **changes)


def test_what_is_counted() -> None:
    """One line a sync; operations without views; backward passes."""
    tensor, host = torch.ones(3, requires_grad=True), torch.device("cpu")
    with counting() as count:
        (tensor * 2.0).sum().backward()
        tensor.detach()[1:].view(2, 1).t()
    assert count.operations == {"mul": 2, "sum": 1, "ones_like": 1}
    assert count.syncs.total() == 0, count.syncs
    with counting() as count:
        float(tensor.detach()[0])
        bool(tensor.detach()[0] > 0)
        tensor.tolist()
        tensor.cpu()
        tensor.to(host)
        torch.tensor([1, 2], device=host)
        tensor.detach().nonzero()
    assert count.syncs.total() == 7, count.syncs
    with counting() as count:
        torch.tensor([1, 2]).to(host, non_blocking=True)
        tensor.to(torch.float64)
    assert count.syncs.total() == 0, count.syncs
