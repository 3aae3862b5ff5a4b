"""Adapters of experts on Megatron against PEFT, whichever ranks experts are divided and cut over, in both
forms in which they are published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, peft_jobs, reference, refit_jobs, scoring_jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_close, check_equal, prompts
from tests.dist.layouts import layout as named
from tests.dist.test_peft import check_trained
from tests.dist.test_refit import BUDGET, stored
from tests.dist.test_refit import check as refits_are_exports
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron, sampled

# an adapter of each stack of transformers (PEFT's target_parameters), or of each matrix of an expert by
# itself
FORMS: dict[str, dict[str, Any]] = {
    "stacks": {
        "target_modules": ["o_proj"],
        "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
    },
    "one stack": {"target_modules": ["o_proj"], "target_parameters": ["experts.gate_up_proj"]},
    "apart": {
        "target_modules": ["o_proj", "*.experts.*.gate_proj", "*.experts.*.up_proj", "*.experts.*.down_proj"]
    },
    "some apart": {"target_modules": ["*.experts.*.up_proj", "model.layers.2.mlp.experts.*.down_proj"]},
}
OVER_EXPERTS = [
    "tp1",
    "ep2",
    "etp2",
    "tp2-sp",
    "tp2-sp-ep2",
    "tp2-sp-etp2",
    "tp2-sp-ep2-dp2",
    "etp2-ep2",
    "pp2-ep2",
    "dp2",
    "cp2-ep2",
]
EXPERTS = [("qwen3_moe", form, layout) for form in FORMS for layout in OVER_EXPERTS]
EXPERTS += [
    ("gpt_oss", "stacks", "ep2"),
    ("gpt_oss", "one stack", "tp2-sp-ep2"),
    ("mixtral", "stacks", "etp2-dp2"),
]
EXPERTS += [
    ("deepseek_v3", "apart", "tp2-sp-ep2"),
    ("deepseek_v3", "stacks", "pp2-ep2"),
    ("qwen2_moe", "some apart", "etp2"),
]
OPTIONS_OF_EXPERTS: list[tuple[str, str, dict[str, Any]]] = [
    ("stacks", "ep2", {"recompute": True, "batching": "packed"}),
    ("stacks", "ep2", {"grouped": True, "rank": 4}),
    ("some apart", "dp2", {"grouped": True, "rank": 4}),
    ("apart", "etp2", {"distributed_optimizer": False, "batching": "dynamic"}),
    ("stacks", "tp2-sp-etp2", {"distributed_optimizer": False}),
    ("stacks", "tp2-sp-ep2", {"dispatcher": "allgather"}),
]


def with_experts(
    model: Path, root: Path, form: str, layout: str, rank: int = 3, **changes: Any
) -> tuple[int, dict[str, Any], Path]:
    """Ranks, configuration, and the adapter that it begins with."""
    said = FORMS[form]
    targets = [
        name.replace("*.experts.*.", r"experts\.\d+\.").replace(".*.", r"\.\d+\.")
        for name in said["target_modules"]
    ]
    patterns = (
        said
        if "target_parameters" in said
        else {"target_modules": rf".*({'|'.join(targets)})", "target_parameters": None}
    )
    adapter = peft_jobs.saved_by_peft(
        model, root / "adapter", (), apart="apart" in form, **{"r": rank, **patterns}
    )
    world, placed = named(layout, padded=True)
    config = policy_config(model, **{**placed, "gbs": 12, "mbs": 3, "clip": 0.5, **changes})
    return world, peft_jobs.with_adapters(config, adapter_path=str(adapter), dim=rank, **said), adapter


@newest_megatron(layout=["tp2-sp-ep2", "etp2-ep2"])
@sampled(3)
@pytest.mark.parametrize(("family", "form", "layout"), EXPERTS)
def test_experts_have_adapters(pool: WorkerPool, tmp_path: Path, family: str, form: str, layout: str) -> None:
    model = make_tiny(tmp_path / "model", family, tied=False, seed=5)
    world, config, adapter = with_experts(model, tmp_path, form, layout)
    check_trained(pool, world, config, model, adapter, apart="apart" in form)


@sampled(1)
@pytest.mark.parametrize(("form", "layout", "changes"), OPTIONS_OF_EXPERTS, ids=str)
def test_options_change_nothing_of_experts(
    pool: WorkerPool, tmp_path: Path, form: str, layout: str, changes: dict[str, Any]
) -> None:
    model = make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5)
    world, config, adapter = with_experts(model, tmp_path, form, layout, **changes)
    check_trained(pool, world, config, model, adapter, apart="apart" in form)


@sampled(1)
@pytest.mark.parametrize(
    ("form", "layout", "changes"),
    [("stacks", "tp2-sp-ep2", {}), ("stacks", "ep2", {"grouped": True, "rank": 4}), ("apart", "pp2-ep2", {})],
    ids=str,
)
def test_two_models_share_a_base_of_experts(
    pool: WorkerPool, tmp_path: Path, form: str, layout: str, changes: dict[str, Any]
) -> None:
    model = make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5)
    world, config, _ = with_experts(model, tmp_path, form, layout, **changes)
    arguments = config, [make_batch(rows=12, length=12, seed=seed) for seed in (1, 2)], NLLLoss()
    alone = pool.run(world, jobs.train, *arguments)
    shared = pool.run(world, scoring_jobs.train_on_shared_base, *arguments, config)
    for expected, (found, taken, frozen, sees) in zip(alone, shared, strict=True):
        check_equal(found["weights"], expected["weights"])
        assert taken == frozen > 0
        assert sees


@sampled(1)
@pytest.mark.parametrize(
    ("form", "layout"),
    [("stacks", "tp2-sp-ep2"), ("one stack", "pp2-ep2"), ("apart", "etp2-ep2"), ("apart", "pp2-ep2")],
)
def test_an_export_has_the_adapters_of_experts_as_peft_reads_them(
    pool: WorkerPool, tmp_path: Path, form: str, layout: str
) -> None:
    model, batch = (
        make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5),
        make_batch(rows=12, length=12, seed=1),
    )
    world, config, _ = with_experts(model, tmp_path, form, layout)
    expected = pool.run(world, peft_jobs.train_and_export, config, batch, NLLLoss(), tmp_path / "out")[0]
    merged = reference.logprobs(mixtures.load(tmp_path / "out"), batch)
    # PEFT itself puts adapters of single experts into those of stacks
    beside = reference.logprobs(
        PeftModel.from_pretrained(mixtures.load(model), tmp_path / "out" / "adapter").eval(), batch
    )
    torch.testing.assert_close(merged, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(beside, expected, atol=2e-5, rtol=0)
    again = {**config, "peft": {**config["peft"], "adapter_path": str(tmp_path / "out" / "adapter")}}
    for first, base in pool.run(world, peft_jobs.logprobs_of_new_adapters, again, batch):
        torch.testing.assert_close(first, expected, atol=2e-5, rtol=0)
        assert (first - base).abs().max() > 0.1


@sampled(1)
@pytest.mark.parametrize(
    ("form", "before", "after"),
    [
        ("stacks", "ep2", "ep2"),
        ("stacks", "tp2-sp-ep2", "etp2"),
        ("apart", "etp2", "pp2-ep2"),
        ("apart", "tp2-sp-etp2", "tp2-sp-etp2"),
    ],
)
def test_a_checkpoint_of_experts_adapters_resumes_in_any_layout(
    pool: WorkerPool, tmp_path: Path, form: str, before: str, after: str
) -> None:
    model, batches = (
        make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5),
        [make_batch(12, 12, seed) for seed in (1, 2, 3)],
    )
    world, config, _ = with_experts(model, tmp_path, form, before)
    expected = pool.run(world, peft_jobs.save_on_the_way, config, batches, NLLLoss(), tmp_path)[0]
    world, placed = named(after, padded=True)
    config = {**policy_config(model, **{**placed, "gbs": 12, "mbs": 3, "clip": 0.5}), "peft": config["peft"]}
    losses, factors = pool.run(world, peft_jobs.resume, config, batches, NLLLoss(), tmp_path)[0]
    if before == after:
        assert losses == expected[0] and all(
            torch.equal(factors[name], tensor) for name, tensor in expected[1].items()
        )
    torch.testing.assert_close(losses, expected[0], atol=1e-6, rtol=1e-5)
    check_close(factors, expected[1])


@sampled(1)
@pytest.mark.parametrize(
    ("form", "layout"),
    [("stacks", "tp2-sp-ep2"), ("apart", "ep2"), ("stacks", "tp2-sp-etp2"), ("apart", "pp2-ep2")],
)
def test_an_engine_reads_experts_with_their_adapters(
    pool: WorkerPool, tmp_path: Path, form: str, layout: str
) -> None:
    """Before the first step to the bit those of the base; afterwards the export's."""
    model = make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5, layers=4)
    world, placed = named(layout, padded=True)
    placed = {key: value for key, value in placed.items() if key not in ("first", "last")}
    config = peft_jobs.with_adapters(policy_config(model, gbs=12, mbs=2, **placed), **FORMS[form])
    refits_are_exports(pool.run(world, refit_jobs.refits, config, BUDGET), stored(model))


@pytest.mark.parametrize(("form", "layout"), [("stacks", "ep2"), ("apart", "tp2-sp-etp2")])
def test_new_adapters_of_experts_change_no_bit(
    pool: WorkerPool, tmp_path: Path, form: str, layout: str
) -> None:
    model, batch = (
        make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5),
        make_batch(rows=6, length=12, seed=3),
    )
    world, placed = named(layout, padded=True)
    config = policy_config(model, **placed)
    plain = pool.run(world, jobs.logprobs, config, batch)
    found = pool.run(
        world, peft_jobs.logprobs_of_new_adapters, peft_jobs.with_adapters(config, **FORMS[form]), batch
    )
    for (first, base), expected in zip(found, plain, strict=True):
        assert torch.equal(first, expected) and torch.equal(base, expected)


@sampled(1)
@pytest.mark.parametrize(("form", "layout"), [("stacks", "ep2"), ("apart", "etp2"), ("one stack", "pp2-ep2")])
def test_the_policy_generates_with_adapters_of_experts(
    pool: WorkerPool, tmp_path: Path, form: str, layout: str
) -> None:
    model, batch = make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5), prompts()
    world, config, adapter = with_experts(model, tmp_path, form, layout)
    whole: Any = PeftModel.from_pretrained(peft_jobs.load(model, apart="apart" in form), adapter)
    expected = reference.greedy(whole.merge_and_unload(), batch, 8, [2])
    assert expected != reference.greedy(mixtures.load(model), batch, 8, [2])
    for rows in pool.run(world, jobs.generate, config, batch, True):
        assert [row["ids"] for row in rows] == expected


def test_some_experts_of_a_layer_are_refused(pool: WorkerPool, tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=5)
    config = peft_jobs.with_adapters(policy_config(model), target_modules=["*.experts.3.up_proj"])
    [said] = pool.run(1, jobs.build_error, config)
    assert (
        "layers.0.mlp.experts.3.up_proj an adapter, but not all of model.layers.0.mlp.experts.*.up_proj"
        in said
    )
    config["peft"] |= {"target_modules": [], "target_parameters": ["experts.up_proj"]}
    [said] = pool.run(1, jobs.build_error, config)
    assert (
        "'experts.up_proj' names no stack of experts" in said
        and "(experts.gate_up_proj, experts.down_proj)" in said
    )
