"""The most likely tokens, and a loss over a teacher's, in every layout and kind of micro-batch, against plain
transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.distillation_loss import DistillationLossFn
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference, topk_jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained, run_reference
from tests.dist.remembered import remembered
from tests.dist.test_scoring import BATCHING, LAYOUTS, config_for
from tests.models import VOCABULARY, policy_config
from tests.tiers import newest_megatron, sampled

FAMILIES = {"vpp": "qwen3-tied-four", "dtensor-tp2": "qwen2-tied", "fsdp1": "qwen3"}


def model_for(layout: str, models: dict[str, Path]) -> Path:
    return models[next((family for part, family in FAMILIES.items() if part in layout), "llama")]


def language_config(layout: str, model: Path, batching: str, **changes: Any) -> tuple[int, dict[str, Any]]:
    world, config = config_for(layout, model, batching, **changes)
    return world, {**config, "reward_model_cfg": None}


# logits cut over ranks


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_of_equal_logits_the_lower_token_wins_on_every_rank(
    pool: WorkerPool, world: int, dtype: torch.dtype
) -> None:
    """Logits of few levels, so that ties cross ranks; the columns that only fill are the largest, and never
    chosen."""
    columns, size = 5 * world, 5 * world - 6
    logits = torch.randint(-2, 2, (40, columns), generator=torch.Generator().manual_seed(world)).to(dtype)
    logits[0] = 0.0
    logits[1, ::2] = -torch.inf
    logits[:, size:] = 9.0
    for count in (1, 4, size):
        rows = logits[:, :size].tolist()
        expected = [
            sorted(range(size), key=lambda token, row=row: (-row[token], token))[:count] for row in rows
        ]
        for found in pool.run(world, topk_jobs.largest_of_shards, logits, size, count):
            assert found.tolist() == expected


@pytest.mark.parametrize("world", [2, 3])
def test_log_probabilities_of_given_tokens_and_their_gradients_equal_float64(
    pool: WorkerPool, world: int
) -> None:
    columns, size, generator = 6 * world, 6 * world - 7, torch.Generator().manual_seed(world)
    logits = 3 * torch.randn(9, columns, generator=generator, dtype=torch.float64)
    targets, further = (torch.randint(size, shape, generator=generator) for shape in ((9,), (9, 4)))
    weights = torch.randn(9, 5, generator=generator, dtype=torch.float64)
    exact = logits.clone().requires_grad_()
    expected = (
        (exact[:, :size] / 0.7).log_softmax(-1).gather(1, torch.cat([targets[:, None], further], dim=1))
    )
    (expected * weights).sum().backward()
    results = pool.run(world, topk_jobs.scores_of_shards, logits, targets, further, weights, size)
    for values, _ in results:
        torch.testing.assert_close(values, expected.detach(), atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(
        torch.cat([gradient for _, gradient in results], dim=1), exact.grad, atol=1e-12, rtol=1e-12
    )


# workers


@remembered
def logarithms(model: Path, batch: dict[str, Tensor], temperature: float) -> Tensor:
    """[B, S, V] of plain transformers."""
    mask = torch.arange(batch["input_ids"].shape[1])[None] < batch["input_lengths"][:, None]
    with torch.no_grad():
        logits = reference.load(model)(input_ids=batch["input_ids"], attention_mask=mask.long()).logits
    return (logits.float() / temperature).log_softmax(-1)


@newest_megatron(layout=["tp2-sp-pp2-uneven"])
@sampled(5)
@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_most_likely_tokens_equal_transformers(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, batching: str, skips: bool
) -> None:
    model, batch = model_for(layout, tiny_models), make_batch(rows=7, length=13, seed=3)
    expected = logarithms(model, batch, 0.7)
    chunk = {"logprob_chunk_size": 5} if skips and "pp2" not in layout else {}
    world, config = language_config(layout, model, batching, temperature=0.7)
    follows = torch.arange(1, 14)[None] < batch["input_lengths"][:, None]
    if skips:
        wanted = (batch["token_mask"] * batch["sample_mask"][:, None]) != 0
        follows = follows & torch.nn.functional.pad(wanted[:, 1:], (0, 1))
    for found in pool.run(world, topk_jobs.topk, {**config, **chunk}, batch, 5, skips):
        logits, tokens = found["topk_logits"], found["topk_indices"]
        assert (
            logits.dtype == torch.float32
            and tokens.dtype == torch.int64
            and logits.shape == tokens.shape == (7, 13, 5)
        )
        # of two that are equal to rounding, either may be first
        torch.testing.assert_close(logits[follows], expected.topk(5).values[follows], atol=1e-5, rtol=0)
        torch.testing.assert_close(logits[follows], expected.gather(2, tokens)[follows], atol=1e-5, rtol=0)
        assert all(len(set(row)) == 5 for row in tokens[follows].tolist())
        assert logits[~follows].eq(0).all() and tokens[~follows].eq(0).all()
        assert torch.equal(found["logprobs"], found["plain"])


def test_too_many_tokens_are_refused(pool: WorkerPool, tiny_models: dict[str, Path]) -> None:
    world, config = language_config("tp2", tiny_models["llama"], "fixed")
    batch = make_batch(rows=4, length=6)
    for said in pool.run(world, topk_jobs.refusals, config, batch, [0, VOCABULARY + 1, VOCABULARY]):
        assert (
            said[0].startswith("BatchError: k = 0")
            and "Fix" in said[0]
            and said[1].startswith(f"BatchError: k = {VOCABULARY + 1}")
        )
        assert said[2] == "no error"
    cut = {**config, "generation": {**config["generation"], "top_p": 0.9}}
    for said in pool.run(world, topk_jobs.refusals, cut, batch, [3]):
        assert said[0].startswith(
            "ConfigError: policy.generation: top_k = None, top_p = 0.9 leave tokens out"
        )


LOSSES = {
    "forward-rest": DistillationLossFn({"kl_type": "forward"}),
    "reverse-renormalize": DistillationLossFn({"kl_type": "reverse", "outside_topk": "renormalize"}),
    "mixed-rest": DistillationLossFn({"kl_type": "mixed", "mixed_kl_weight": 0.3}),
}


def distillation_batch(seed: int) -> dict[str, Tensor]:
    """With the three most likely tokens of a teacher that is none of the models."""
    batch = make_batch(12, 12, seed)
    teacher = (
        (2 * torch.randn(12, 12, VOCABULARY, generator=torch.Generator().manual_seed(seed)))
        .log_softmax(-1)
        .topk(3)
    )
    return {**batch, "teacher_topk_logits": teacher.values, "teacher_topk_indices": teacher.indices}


@newest_megatron(layout=["tp2-sp-pp2-uneven"])
@sampled(3)
@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("batching", BATCHING)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, batching: str, loss: str, chunk: int | None
) -> None:
    model, batches = model_for(layout, tiny_models), [distillation_batch(seed) for seed in (1, 2, 3)]
    described = policy_config(model, gbs=12, temperature=0.8)
    expected = run_reference(model, described, batches, LOSSES[loss], kind="distillation")
    world, config = language_config(layout, model, batching, gbs=12, temperature=0.8)
    check_trained(
        pool.run(world, jobs.train, {**config, "logprob_chunk_size": chunk}, batches, LOSSES[loss]), *expected
    )
