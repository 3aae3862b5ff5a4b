"""Experts in the ranks of vLLM's models after refits, bit for bit what vLLM's own loader makes of the same
checkpoint."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, MixtralConfig, Qwen3MoeConfig

from benchmarks.cases.messages import slices_read
from converters.checkpoint.source import open_source
from megarl.weight_sync.manifest import Manifest
from tests.models import VOCABULARY
from tests.tiers import slow

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")

# what vLLM's kernels on a CPU take
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
LATENT = {
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
}
GROUPS = {
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "topk_method": "noaux_tc",
}


def config_of(family: str, experts: int) -> Any:
    if family == "qwen3_moe":
        return Qwen3MoeConfig(
            **SIZES, moe_intermediate_size=64, num_experts=experts, num_key_value_heads=2, head_dim=32
        )
    if family == "mixtral":
        return MixtralConfig(**SIZES, num_local_experts=experts, num_key_value_heads=2)
    return DeepseekV3Config(
        **SIZES, **LATENT, **GROUPS, moe_intermediate_size=64, n_routed_experts=experts, num_key_value_heads=4
    )


def save(family: str, experts: int, seed: int, directory: Path) -> None:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_of(family, experts), dtype=torch.float32)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.rand_like(buffer))
    model.save_pretrained(directory)


# family, experts, ranks, and what these divide
CASES: dict[str, tuple[str, int, int, str]] = {
    "alone": ("qwen3_moe", 8, 1, "tensor"),
    "cut": ("qwen3_moe", 8, 2, "tensor"),
    "divided-unevenly": ("qwen3_moe", 7, 2, "experts"),
    "mixtral-divided": ("mixtral", 8, 2, "experts"),
    "deepseek-cut": ("deepseek_v3", 8, 2, "tensor"),
    "deepseek-divided": ("deepseek_v3", 8, 2, "experts"),
    "stages": ("mixtral", 4, 2, "stages"),
}


@slow
@pytest.mark.parametrize("case", CASES)
def test_refits_leave_the_bits_of_a_checkpoint_and_no_experts_of_others_wait(
    tmp_path: Path, case: str
) -> None:
    family, experts, ranks, divided = CASES[case]
    for step in range(2):
        save(family, experts, step, tmp_path / str(step))
    source = open_source(tmp_path / "0")
    manifest = Manifest.of((name, source.read(name)) for name in source.names())
    layers: dict[str, int] = {}
    for tensor in manifest.tensors:
        layer, found, _ = tensor.name.partition(".experts.")
        layers[layer] = layers.get(layer, 0) + (tensor.nbytes if found else 0)
    results = results_of(ranks, divided, tmp_path)
    routed = sum(re.search(r"\.experts\.\d+\.", tensor.name) is not None for tensor in manifest.tensors)
    for rank, result in enumerate(results):
        # a rank of a stage has the experts of its layers alone
        assert result["stacked"] == (routed if divided != "stages" else routed * (2 - rank) // 3)
        for refit in result["refits"]:
            assert refit["bits"] == result["loaded"][refit["step"]], (rank, refit["step"])
            stacks = 3 * result["stacked"] // (3 * experts)
            assert refit["calls"] == result["others"] + stacks
        assert result["loaded"][0] != result["loaded"][1]
    if divided != "stages":
        wanted = slices_read(
            manifest, 4 if family == "deepseek_v3" else 2, ranks, experts if divided == "experts" else 0
        )
        assert ranks == 1 or [result["reads"] for result in results] == [
            {name: where.plain() for name, where in slices.items()} for slices in wanted
        ]
        largest = max(layers.values()) // experts * -(-experts // ranks)
        rest = sum(tensor.nbytes for tensor in manifest.tensors if "experts." not in tensor.name)
        assert all(
            refit["kept"] <= largest + rest // ranks for result in results for refit in result["refits"]
        )


def results_of(ranks: int, divided: str, directory: Path) -> list[Mapping[str, Any]]:
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_CI_ENV": "1", "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "tests.system.expert_ranks"]
    running = [
        subprocess.Popen(
            [*command, str(rank), str(ranks), divided, str(directory)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    ends = [process.communicate(timeout=500)[1] for process in running]
    assert [process.returncode for process in running] == [0] * ranks, ends
    return [json.loads((directory / f"{rank}.json").read_text()) for rank in range(ranks)]
