"""Adapters that go to vLLM by themselves: it answers what transformers answers from the policy's merged
export, token for token."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.refit import connect, refit_policy_generation
from megarl.config.defaults import complete_policy
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.models.generation.vllm.generation import VllmGeneration
from megarl.models.policy.lm_policy import Policy
from tests.dist.batches import make_batch
from tests.dist.peft_jobs import saved_by_peft
from tests.system.vllm_engines import (
    MAKE,
    POLICIES,
    PROMPTS,
    SAMPLING,
    dense_model,
    engines,
    greedy_answers,
    rows_of,
)
from tests.system.whole_runs import ROOT
from tests.tiers import slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj"]
PEFT: dict[str, Any] = {
    "enabled": True,
    "dim": 3,
    "alpha": 5.0,
    "use_rslora": True,
    "target_modules": TARGETS,
}
REFITS_AFTER = (0, 1, 2, 6)
LORA = {"enable_lora": True, "load_format": "auto"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return dense_model(
        tmp_path_factory.mktemp("vllm") / "qwen2",
        intermediate_size=112,
        num_hidden_layers=4,
        initializer_range=0.2,
    )


def adapted_policy(name: str, model: Path, **peft: Any) -> Policy:
    backend, world, changes = POLICIES[name]
    config = MAKE[backend](model, gbs=8, mbs=2, lr=0.02, **changes)
    config["generation"] |= {**SAMPLING, "backend": "vllm", "vllm_cfg": dict(LORA)}
    config["peft"] = {**PEFT, **peft}
    return Policy(
        RayVirtualCluster([world], use_gpus=False, name=name), config, None, init_reference_model=False
    )


def adapted_engines(model: Path, name: str, peft: dict[str, Any] = PEFT, **options: Any) -> VllmGeneration:
    section = complete_policy({"peft": peft})["peft"]
    return engines(model, name, changes=LORA, adapter=section, **options)


@slow
def test_factors_are_where_vllm_computes_with_them_or_the_refit_fails(model: Path, tmp_path: Path) -> None:
    """With B = 0 each log-probability has the bits of the base's; then answers are those of PEFT's merged
    model, and nothing is left of earlier factors."""
    adapter = saved_by_peft(model, tmp_path / "adapter", TARGETS)
    command = [sys.executable, "-m", "tests.system.adapter_engine", str(model), str(adapter)]
    words = {
        "MEGARL_DEVICE": "cpu",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_CI_ENV": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, **words}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    # of 4 layers: query, key and value in one; output; gate and up in one; all but the last of an MLP
    assert said["bound"] == [12, 16]
    assert said["zero"] == said["base"] and said["again"] == said["trained"]
    merged: Any = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), adapter
    )
    merged.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert said["trained"][0] == greedy_answers(tmp_path / "merged")
    assert len({str(said[name][0]) for name in ("base", "trained", "twice")}) == 3
    assert (
        "without the adapter of model.layers.0.cross_attn.o_proj" in said["no module"]
        and "(12 of 16 modules)" in said["no module"]
    )
    assert (
        "without the adapter of model.layers.9." in said["some modules"]
        and "(4 of 20 modules)" in said["some modules"]
    )


@slow
@pytest.mark.parametrize(
    ("name", "ranks"), [("megatron-tp2-pp2", 1), ("dtensor-tp2", 1), ("megatron-tp1", 2)]
)
def test_answers_are_those_of_the_merged_export_at_every_step(
    local_ray: int, model: Path, tmp_path: Path, name: str, ranks: int
) -> None:
    """Colocated and apart; before the first step those of the base."""
    colocated = adapted_engines(model, "colocated", colocated=True, tensor_parallel=ranks, places=ranks)
    apart = adapted_engines(model, "apart", colocated=False)
    policy = adapted_policy(name, model)
    info = policy.prepare_refit_info() or {}
    assert len(info) == 4 * 4 * 2 and all(".lora_" in each for each in info)
    for generation in (colocated, apart):
        generation.prepare_refit_info(info)
    connect(policy, apart)
    answers = set()
    for before, steps in zip((0, *REFITS_AFTER), REFITS_AFTER, strict=False):
        for step in range(before, steps):
            policy.prepare_for_training()
            policy.train(BatchedDataDict(make_batch(8, 13, seed=step)), NLLLoss())
        policy.prepare_for_lp_inference()
        refit_policy_generation(policy, apart, colocated_inference=False)
        refit_policy_generation(policy, colocated, colocated_inference=True)
        policy.prepare_for_lp_inference()
        policy.export_hf(tmp_path / str(steps))
        expected = greedy_answers(tmp_path / str(steps))
        for generation in (colocated, apart):
            assert (
                rows_of(generation.generate(PROMPTS, greedy=True)) == expected and generation.version == steps
            )
        answers.add(str(expected))
        drawn = apart.generate(BatchedDataDict({**PROMPTS, "sampling_seeds": torch.tensor([11, 3, 5])}))
        check = BatchedDataDict(
            {"input_ids": drawn["output_ids"], "input_lengths": drawn["unpadded_sequence_lengths"]}
        )
        scored = policy.get_logprobs(check)["logprobs"]
        torch.testing.assert_close(
            torch.where(drawn["logprobs"] != 0, scored, 0), drawn["logprobs"], atol=1e-4, rtol=0
        )
    assert len(answers) == len(REFITS_AFTER)
    for each in (colocated, apart):
        each.shutdown()
    assert policy.shutdown()
