"""DTensor in every layout and kind of micro-batch against one process of plain transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.models.dtensor.styles import VocabularyEmbedding
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained, run_reference
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.fsdp1_jobs import BATCHING
from tests.dist.layouts import DTENSOR
from tests.dist.layouts import LAYOUTS as LAYOUTS_OF_ALL
from tests.dist.test_megatron_parity import PG_LOSS
from tests.models import make_tiny, policy_config
from tests.tiers import sampled, slow

LAYOUTS = {name: LAYOUTS_OF_ALL["dtensor"][name] for name in DTENSOR.split()}
FAMILIES = ["llama", "qwen2-tied", "qwen3-tied", "mistral", "mistral_window"]
# every family in every layout, and every kind of micro-batch in every layout
CASES = [(family, layout, "fixed") for family in FAMILIES for layout in LAYOUTS if "ring" not in layout]
CASES += [("qwen3-tied", layout, batching) for layout in LAYOUTS for batching in BATCHING if batching != "fixed"]
CASES += [("mistral_window", layout, "packed") for layout in ("cp2-tp2-sp", "cp4-ring")]


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models that other tests share, and Mistral with and without a sliding window."""
    root = tmp_path_factory.mktemp("mistral")
    return {**tiny_models, **{name: make_tiny(root / name, name, tied=False, seed=11) for name in ("mistral", "mistral_window")}}


@sampled(5)
@pytest.mark.parametrize(("family", "layout", "batching"), CASES)
def test_logprobs_equal_transformers(pool: WorkerPool, models: dict[str, Path], family: str, layout: str, batching: str) -> None:
    world, changes = LAYOUTS[layout]
    batch = make_batch(rows=10, length=13, seed=3)
    expected = reference.logprobs_of(models[family], batch, 0.7)
    config = dtensor_config(models[family], batching, temperature=0.7, **changes)
    for result in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        assert result[:, 0].eq(0).all()


@sampled(3)
@pytest.mark.parametrize(("family", "layout", "batching"), CASES)
def test_three_adam_steps_equal_transformers(pool: WorkerPool, models: dict[str, Path], family: str, layout: str, batching: str) -> None:
    world, changes = LAYOUTS[layout]
    check_training(pool, world, models[family], ClippedPGLossFn(PG_LOSS), batching, {"mbs": 2, "clip": 0.5}, changes)


def check_training(
    pool: WorkerPool, world: int, model: Path, loss_fn: Any, batching: str, shared: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Three steps of the layout against the reference; ``shared`` changes concern both."""
    batches = [make_batch(rows=12, length=12, seed=seed) for seed in (1, 2, 3)]
    described = {**shared, "clip": shared.get("clip", 1.0) or 0.0}
    expected = run_reference(model, policy_config(model, gbs=12, **described), batches, loss_fn)
    check_trained(pool.run(world, jobs.train, dtensor_config(model, batching, gbs=12, **shared, **changes), batches, loss_fn), *expected)


@sampled(1)
@pytest.mark.parametrize(
    ("layout", "shared", "changes"),
    [
        ("dp2", {}, {"recompute": True}),
        pytest.param("cp2-tp2-sp", {}, {"recompute": True}, marks=slow),
        ("cp4-ring", {}, {"recompute": True}),
        ("dp2", {"clip": None}, {}),
        ("tp2", {"multiple": 5}, {}),
        ("cp2", {"multiple": 5}, {}),
        pytest.param("cp2-tp2-sp", {"multiple": 5}, {}, marks=slow),
        ("tp2-dp2", {"mbs": 1}, {}),
        ("tp2-dp2", {"mbs": 6}, {}),
        ("dp2", {}, {"offload": True}),
        ("tp2", {}, {"plan": "tests.dist.test_dtensor_parity.plan_by_names"}),
    ],
    ids=str,
)
def test_options_change_nothing(
    pool: WorkerPool, models: dict[str, Path], layout: str, shared: dict[str, Any], changes: dict[str, Any]
) -> None:
    world, sizes = LAYOUTS[layout]
    check_training(pool, world, models["qwen2-tied"], NLLLoss(), "fixed", shared, {**sizes, **changes})


def plan_by_names() -> dict[str, str]:
    """A custom plan in which styles go by their names."""
    names = {"self_attn.q_proj": "colwise", "self_attn.k_proj": "colwise", "self_attn.v_proj": "colwise", "self_attn.o_proj": "rowwise"}
    names |= {"mlp.gate_proj": "colwise", "mlp.up_proj": "colwise", "mlp.down_proj": "rowwise"}
    return {f"model.layers.*.{name}": style for name, style in names.items()}


HEAD_NORMS = ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")


def with_head_norms() -> dict[str, Any]:
    return {**plan_by_names(), **dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce")}


def over_the_sequence() -> dict[str, Any]:
    """Activations between layers divided over the sequence, with every norm."""
    layer, stream = "model.layers.*", Shard(1)
    return {
        **{
            name: ColwiseParallel() if style == "colwise" else RowwiseParallel(output_layouts=stream)
            for name, style in plan_by_names().items()
        },
        **dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce"),
        "model.embed_tokens": VocabularyEmbedding(output_layouts=stream),
        f"{layer}.self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": stream}, desired_input_kwarg_layouts={"hidden_states": Replicate()}
        ),
        f"{layer}.mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
        f"{layer}.input_layernorm": SequenceParallel(),
        f"{layer}.post_attention_layernorm": SequenceParallel(),
        "model.norm": SequenceParallel(use_local_output=True),
        "lm_head": ColwiseParallel(input_layouts=stream),
    }


@slow
@pytest.mark.parametrize(("layout", "plan"), [("tp2", "with_head_norms"), ("tp2-dp2", "with_head_norms"), ("tp2-sp", "over_the_sequence")])
def test_a_written_plan_trains_as_transformers(pool: WorkerPool, models: dict[str, Path], layout: str, plan: str) -> None:
    world, sizes = LAYOUTS[layout]
    changes = {**sizes, "plan": f"tests.dist.test_dtensor_parity.{plan}"}
    check_training(pool, world, models["qwen3-tied"], ClippedPGLossFn(PG_LOSS), "fixed", {"mbs": 2, "clip": 0.5}, changes)
