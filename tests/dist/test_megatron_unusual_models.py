"""Models for which Megatron-Core's own constructors have no arguments, against one process of plain
transformers: llama3 rope scaling with other bounds than Llama 3's, one expert a token with the weight 1,
experts whose width the tensor-parallel ranks do not divide."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures, reference, test_megatron_experts
from tests.dist.batches import make_batch
from tests.dist.checks import check_generated, prompts, transformers_greedy
from tests.dist.layouts import LAYOUTS as LAYOUTS_OF_ALL
from tests.dist.training import check_training
from tests.models import make_tiny, policy_config
from tests.tiers import sampled

LAYOUTS = {**test_megatron_experts.LAYOUTS, **LAYOUTS_OF_ALL["megatron"]}
ROPE_LAYOUTS = ["tp1", "tp2-sp", "pp2-uneven", "cp2"]
MIXTURE_LAYOUTS = ["tp2-sp", "ep2-dp2", "pp2-ep2"]
# so short that of five frequencies some are left alone, some divided and some in between
SHORT = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 0.5,
    "high_freq_factor": 6.0,
    "original_max_position_embeddings": 48,
}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"rope_parameters": SHORT, "max_position_embeddings": 192}),
    "mixtral": ("mixtral", {"num_experts_per_tok": 1}),
    "qwen3_moe": ("qwen3_moe", {"num_experts_per_tok": 1}),
    "odd": ("mixtral", {"intermediate_size": 27}),
    "odd-mixed": ("qwen3_moe", {"moe_intermediate_size": 27, "mlp_only_layers": [2]}),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("unusual")
    return {
        name: make_tiny(root / name, family, tied=False, seed=seed, **changes)
        for seed, (name, (family, changes)) in enumerate(CHANGES.items(), 31)
    }


def test_the_frequencies_are_of_all_three_kinds(models: dict[str, Path]) -> None:
    """... and the scaling shows in the log-probabilities, so that the comparisons below mean something."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig.from_pretrained(models["llama"])
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1.0 / 5000.0 ** (torch.arange(0, 10, 2) / 10)
    ratio = (plain / scaled).tolist()
    assert (
        any(value == 1 for value in ratio)
        and any(value == 4 for value in ratio)
        and any(1.01 < value < 3.99 for value in ratio)
    )


def check_logprobs_equal_transformers(pool: WorkerPool, model: Path, layout: str) -> None:
    world, changes = LAYOUTS[layout]
    batch = make_batch(rows=8, length=19, seed=3)
    expected = reference.logprobs(mixtures.load(model), batch, temperature=0.7)
    for result in pool.run(world, jobs.logprobs, policy_config(model, temperature=0.7, **changes), batch):
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)


@sampled(1)
@pytest.mark.parametrize("layout", ROPE_LAYOUTS)
def test_other_llama3_scaling(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    check_logprobs_equal_transformers(pool, models["llama"], layout)
    check_training(pool, "megatron", world, models["llama"], "pg", mbs=2, clip=0.5, **changes)


@sampled(1)
@pytest.mark.parametrize("layout", ROPE_LAYOUTS)
def test_other_llama3_scaling_generates(pool: WorkerPool, models: dict[str, Path], layout: str) -> None:
    world, changes = LAYOUTS[layout]
    expected = transformers_greedy(models["llama"], prompts(), 8, [])
    config = policy_config(models["llama"], generation={"stop_token_ids": []}, **changes)
    check_generated(pool, world, config, prompts(), True, expected)


@sampled(3)
@pytest.mark.parametrize("layout", ["tp2-sp", "ep2-dp2"])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "odd", "odd-mixed"])
def test_mixtures_log_probabilities(
    pool: WorkerPool, models: dict[str, Path], name: str, layout: str
) -> None:
    check_logprobs_equal_transformers(pool, models[name], layout)


@sampled(1)
@pytest.mark.parametrize("layout", MIXTURE_LAYOUTS)
@pytest.mark.parametrize(
    ("name", "options"),
    [
        # the weight 1 teaches the router nothing; what transformers leaves of that zero by rounding Adam
        # would make as large as any step
        ("mixtral", {"freeze_router": True}),
        ("mixtral", {"balancing": "aux_loss", "aux": 0.7, "z": 0.3}),
        ("qwen3_moe", {"balancing": "seq_aux_loss", "aux": 0.5}),
        ("odd", {}),
        ("odd-mixed", {}),
    ],
    ids=str,
)
def test_mixtures_train(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, name: str, options: dict[str, Any], layout: str
) -> None:
    world, changes = LAYOUTS[layout]
    config = policy_config(models[name], mbs=2, clip=0.5, **changes, **options)
    mixtures.check_training(pool, world, models[name], config, NLLLoss())


@sampled(1)
@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_a_router_with_the_weight_one_gets_no_gradient(
    pool: WorkerPool, models: dict[str, Path], tmp_path: Path, dispatcher: str
) -> None:
    before = mixtures.weights_of(mixtures.load(models["mixtral"]), tmp_path / "before")
    config = policy_config(models["mixtral"], ep=2, weight_decay=0.0, dispatcher=dispatcher)
    for result in pool.run(2, jobs.train, config, [make_batch(rows=8, length=12, seed=1)] * 2, NLLLoss()):
        for name, tensor in result["weights"].items():
            assert torch.equal(tensor, before[name]) == name.endswith(".gate.weight"), name
