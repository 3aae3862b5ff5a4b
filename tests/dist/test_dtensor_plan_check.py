"""Plans that would give wrong gradients without a word are refused; plans that are right train as plain transformers does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, PrepareModuleInput, RowwiseParallel, SequenceParallel

from megarl.algorithms.loss_functions import ClippedPGLossFn, NLLLoss
from megarl.models.dtensor.styles import NormOfParts, VocabularyEmbedding
from tests.dist import dtensor_jobs, fsdp1_jobs
from tests.dist.batches import make_batch
from tests.dist.dtensor_jobs import dtensor_config
from tests.dist.pool import WorkerPool
from tests.dist.test_dtensor_parity import LAYOUTS, check_training, plan_by_names
from tests.dist.test_megatron_parity import PG_LOSS
from tests.dist.worker_jobs import differences
from tests.tiers import sampled, slow

HERE = "tests.dist.test_dtensor_plan_check"
HEAD_NORMS = ("model.layers.*.self_attn.q_norm", "model.layers.*.self_attn.k_norm")


class LookingAtNumbers(ParallelStyle):
    """A style of a user's that cannot run on the meta device, where there are no numbers."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module.register_forward_hook(lambda _, inputs, output: output * (1.0 if output.sum().isfinite().item() else 0.0))
        return module


def with_head_norms() -> dict[str, Any]:
    return {**plan_by_names(), **dict.fromkeys(HEAD_NORMS, "replicated_with_grad_allreduce")}


def without_one() -> dict[str, Any]:
    return {**plan_by_names(), HEAD_NORMS[0]: NormOfParts()}


def unseen() -> dict[str, Any]:
    return {**plan_by_names(), "model.norm": LookingAtNumbers()}


def unseen_and_right() -> dict[str, Any]:
    return {**with_head_norms(), "model.norm": LookingAtNumbers()}


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


def forgetting_the_last_norm() -> dict[str, Any]:
    return {name: style for name, style in over_the_sequence().items() if name != "model.norm"}


@sampled(1)
@pytest.mark.parametrize(
    ("family", "plan", "changes", "words", "others"),
    [
        (
            "qwen3",
            "tests.dist.test_dtensor_parity.plan_by_names",
            {},
            ["layers.0.self_attn.q_norm.weight", "[1, 8, 3, 10] of [1, 8, 6, 10]"],
            [],
        ),
        ("qwen3-tied", f"{HERE}.without_one", {}, ["layers.0.self_attn.k_norm.weight"], ["q_norm"]),
        ("qwen3", f"{HERE}.forgetting_the_last_norm", {"sp": True}, ["model.norm.weight", "[1, 4, 36] of [1, 8, 36]"], ["layers.0"]),
    ],
    ids=str,
)
def test_a_module_that_works_on_a_part_is_named(
    pool: WorkerPool, tiny_models: dict[str, Path], family: str, plan: str, changes: dict[str, Any], words: list[str], others: list[str]
) -> None:
    for message in pool.run(2, dtensor_jobs.run, "build_error", dtensor_config(tiny_models[family], tp=2, plan=plan, **changes)):
        assert message.startswith("ConfigError: policy.dtensor_cfg.custom_parallel_plan"), message
        assert all(word in message for word in words) and not any(word in message for word in others), message


@slow
@pytest.mark.parametrize(
    ("layout", "plan"),
    [("tp2", "with_head_norms"), ("tp2-dp2", "with_head_norms"), ("tp2-sp", "over_the_sequence"), ("tp2-dp2", "unseen_and_right")],
)
def test_a_right_plan_trains_as_transformers(pool: WorkerPool, tiny_models: dict[str, Path], layout: str, plan: str) -> None:
    world, changes = LAYOUTS[layout]
    changes = {**changes, "plan": f"{HERE}.{plan}"}
    check_training(pool, world, tiny_models["qwen3-tied"], ClippedPGLossFn(PG_LOSS), "fixed", {"mbs": 2, "clip": 0.5}, changes)


def steps(config: dict[str, Any], batches: list[dict[str, Any]]) -> list[tuple[str, bool, int]]:
    """For each batch: the error of training on it or nothing, whether a weight moved, how many gradients are still to be compared."""
    worker = dtensor_jobs.build(config, init_reference_model=False)
    outcomes = []
    for batch in batches:
        before, error = fsdp1_jobs.full_weights(worker), ""
        try:
            worker.train(data=fsdp1_jobs.my_share(worker, batch), loss_fn=NLLLoss())
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        moved = bool(differences(before, fsdp1_jobs.full_weights(worker)))
        outcomes.append((error, moved, len(worker.backend._replicas._pending)))
    worker.backend.close()
    return outcomes


def batches() -> list[dict[str, Any]]:
    """One that trains nothing, and two others."""
    empty, *others = [make_batch(rows=12, length=12, seed=seed) for seed in range(3)]
    empty["sample_mask"] = torch.zeros_like(empty["sample_mask"])
    return [empty, *others]


@sampled(1)
@pytest.mark.parametrize("layout", ["tp2", "tp2-dp2"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_gradients_that_differ_are_named_before_anything_moves(
    pool: WorkerPool, tiny_models: dict[str, Path], layout: str, precision: str
) -> None:
    world, changes = LAYOUTS[layout]
    config = dtensor_config(
        tiny_models["qwen3"],
        gbs=12,
        precision=precision,
        torch_optimizer={"name": "torch.optim.SGD", "kwargs": {"lr": 0.1}},
        plan=f"{HERE}.unseen",
        **changes,
    )
    for result in pool.run(world, steps, config, batches()):
        assert result[0][:2] == ("", False), "gradients of zeros say nothing"
        for error, moved, _ in result[1:]:
            assert error.startswith("ConfigError") and "model.layers.0.self_attn.q_norm.weight" in error and not moved


@slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_gradients_that_agree_once_are_not_compared_again(pool: WorkerPool, tiny_models: dict[str, Path], precision: str) -> None:
    config = dtensor_config(tiny_models["qwen3"], tp=2, gbs=12, precision=precision, plan=f"{HERE}.with_head_norms")
    for result in pool.run(4, steps, config, batches()):
        assert [error for error, _, _ in result] == [""] * 3
        assert result[0][2] > 0 and result[2][2] == 0
