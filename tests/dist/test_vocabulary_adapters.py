"""Adapters of embedding and output layer against PEFT, over the ranks that divide the vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, peft_jobs, reference, refit_jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_close, prompts
from tests.dist.layouts import CONFIG, DTENSOR
from tests.dist.layouts import LAYOUTS as LAYOUTS_OF
from tests.dist.layouts import layout as named
from tests.dist.test_peft import check_trained
from tests.dist.test_refit import BUDGET, stored
from tests.dist.test_refit import check as refits_are_exports
from tests.models import make_tiny
from tests.tiers import newest_megatron, sampled

BOTH = ["embed_tokens", "lm_head", "q_proj", "down_proj"]
LAYOUTS = ["tp1", "tp2", "tp2-sp", "pp2", "dp2", "tp2-pp2", "tp2-sp-dp2", "cp2", "pp2-vpp2"]
CASES: list[tuple[str, list[str], dict[str, Any]]] = [(layout, BOTH, {}) for layout in LAYOUTS]
CASES += [
    ("tp2-sp", ["embed_tokens", "o_proj"], {}),
    ("tp2", ["lm_head"], {"recompute": True, "batching": "packed"}),
]
CASES += [(layout, BOTH, {"logprob_chunk_size": 5}) for layout in ("tp1", "tp2-sp", "pp2")]
TORCH_CASES: list[tuple[str, list[str], dict[str, Any]]] = [(layout, BOTH, {}) for layout in DTENSOR.split()]
TORCH_CASES += [
    ("tp2-sp", ["embed_tokens", "o_proj"], {}),
    ("tp2", ["lm_head"], {"recompute": True, "batching": "packed"}),
]
TORCH_CASES += [(layout, BOTH, {"logprob_chunk_size": 5}) for layout in ("dp1", "tp2-sp", "tp2-dp2")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("vocabulary") / "model", "llama", tied=False, seed=7, layers=4)


def configured(
    model: Path, root: Path, layout: str, targets: list[str], backend: str = "megatron", **changes: Any
) -> tuple[int, dict[str, Any], Path]:
    adapter = peft_jobs.saved_by_peft(model, root / "adapter", targets)
    world, placed = named(layout, padded=True) if backend == "megatron" else LAYOUTS_OF[backend][layout]
    placed = {key: value for key, value in placed.items() if key not in ("first", "last")}
    chunk = changes.pop("logprob_chunk_size", None)
    config = CONFIG[backend](model, **{**placed, "gbs": 12, "mbs": 3, "clip": 0.5, **changes}) | {
        "logprob_chunk_size": chunk
    }
    return world, peft_jobs.with_adapters(config, adapter_path=str(adapter), target_modules=targets), adapter


@sampled(2)
@pytest.mark.parametrize(("layout", "targets", "changes"), TORCH_CASES, ids=str)
def test_they_have_adapters_on_dtensor(
    pool: WorkerPool, model: Path, tmp_path: Path, layout: str, targets: list[str], changes: dict[str, Any]
) -> None:
    world, config, adapter = configured(model, tmp_path, layout, targets, "dtensor", **changes)
    check_trained(pool, world, config, model, adapter)


@newest_megatron()
@sampled(2)
@pytest.mark.parametrize(("layout", "targets", "changes"), CASES, ids=str)
def test_embedding_and_output_layer_have_adapters(
    pool: WorkerPool, model: Path, tmp_path: Path, layout: str, targets: list[str], changes: dict[str, Any]
) -> None:
    world, config, adapter = configured(model, tmp_path, layout, targets, **changes)
    check_trained(pool, world, config, model, adapter)


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("megatron", "tp2-sp"), ("megatron", "pp2"), ("dtensor", "tp2-sp"), ("dtensor", "dp2")],
)
def test_they_are_exported_as_peft_reads_them(
    pool: WorkerPool, model: Path, tmp_path: Path, backend: str, layout: str
) -> None:
    batch = make_batch(rows=12, length=12, seed=1)
    world, config, _ = configured(model, tmp_path, layout, BOTH, backend)
    expected = pool.run(world, peft_jobs.train_and_export, config, batch, NLLLoss(), tmp_path / "out")[0]
    beside = PeftModel.from_pretrained(mixtures.load(model), tmp_path / "out" / "adapter").eval()
    for whole in (mixtures.load(tmp_path / "out"), beside):
        torch.testing.assert_close(reference.logprobs(whole, batch), expected, atol=2e-5, rtol=0)
    again = {**config, "peft": {**config["peft"], "adapter_path": str(tmp_path / "out" / "adapter")}}
    for first, base in pool.run(world, peft_jobs.logprobs_of_new_adapters, again, batch):
        torch.testing.assert_close(first, expected, atol=2e-5, rtol=0)
        assert (first - base).abs().max() > 0.1


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "before", "after"),
    [
        *(("megatron", *both) for both in (("tp2-sp", "tp2-sp"), ("dp2", "tp2-sp"), ("tp2", "pp2"))),
        *(("dtensor", *both) for both in (("tp2-sp", "tp2-sp"), ("dp2", "tp2-sp"), ("tp2", "dp1"))),
    ],
)
def test_a_checkpoint_of_them_resumes_in_any_layout(
    pool: WorkerPool, model: Path, tmp_path: Path, backend: str, before: str, after: str
) -> None:
    """Of another number of ranks, which pads the vocabulary otherwise."""
    batches = [make_batch(12, 12, seed) for seed in (1, 2, 3)]
    world, config, _ = configured(model, tmp_path, before, BOTH, backend)
    expected = pool.run(world, peft_jobs.save_on_the_way, config, batches, NLLLoss(), tmp_path)[0]
    (tmp_path / "again").mkdir()
    world, config, _ = configured(model, tmp_path / "again", after, BOTH, backend)
    losses, factors = pool.run(world, peft_jobs.resume, config, batches, NLLLoss(), tmp_path)[0]
    if before == after:
        assert losses == expected[0] and all(
            torch.equal(factors[name], tensor) for name, tensor in expected[1].items()
        )
    torch.testing.assert_close(losses, expected[0], atol=1e-6, rtol=1e-5)
    check_close(factors, expected[1])


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_an_engine_reads_them_merged_and_new_ones_change_no_bit(
    pool: WorkerPool, model: Path, backend: str
) -> None:
    config = CONFIG[backend](model, gbs=12, mbs=2, tp=2, sp=True, multiple=2)
    adapted = peft_jobs.with_adapters(config, target_modules=BOTH)
    refits_are_exports(pool.run(2, refit_jobs.refits, adapted, BUDGET), stored(model))
    batch = make_batch(rows=6, length=12, seed=3)
    found = pool.run(2, peft_jobs.logprobs_of_new_adapters, adapted, batch)
    for (first, base), expected in zip(found, pool.run(2, jobs.logprobs, config, batch), strict=True):
        assert torch.equal(first, expected) and torch.equal(base, expected)


@sampled(1)
@pytest.mark.parametrize(
    ("backend", "layout"),
    [("megatron", "tp2"), ("megatron", "pp2"), ("dtensor", "tp2"), ("dtensor", "dp1"), ("dtensor", "dp2")],
)
def test_the_policy_generates_with_them(
    pool: WorkerPool, model: Path, tmp_path: Path, backend: str, layout: str
) -> None:
    world, config, adapter = configured(model, tmp_path, layout, BOTH, backend)
    whole: Any = PeftModel.from_pretrained(peft_jobs.load(model), adapter)
    batch = prompts()
    expected = reference.greedy(whole.merge_and_unload(), batch, 8, [2])
    assert expected != reference.greedy(mixtures.load(model), batch, 8, [2])
    for rows in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in rows] == expected


@pytest.mark.parametrize(("backend", "layout"), [("megatron", "tp1"), ("dtensor", "dp1")])
def test_tied_ones_another_base_and_dropped_logits_are_refused(
    pool: WorkerPool, model: Path, tmp_path: Path, backend: str, layout: str
) -> None:
    tied = CONFIG[backend](make_tiny(tmp_path / "tied", "qwen3", tied=True, seed=7))
    _, config, adapter = configured(model, tmp_path, layout, BOTH, backend)
    factors = load_file(adapter / "adapter_model.safetensors")
    for target in ("embed_tokens", "lm_head"):
        [said] = pool.run(1, jobs.build_error, peft_jobs.with_adapters(tied, target_modules=[target]))
        assert "are one matrix (tie_word_embeddings)" in said
    [said] = pool.run(
        1,
        jobs.build_error,
        {**config, "peft": {**config["peft"], "dropout": 0.1, "dropout_position": "post"}},
    )
    assert "policy.peft.dropout_position = 'post'" in said
    factors["base_model.model.lm_head.base_layer.weight"] += 1
    save_file(factors, adapter / "adapter_model.safetensors")
    [said] = pool.run(1, jobs.build_error, config)
    assert "with another lm_head than that of the model" in said
