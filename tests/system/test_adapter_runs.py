"""Whole runs that train adapters, by each algorithm but GRPO, of which the quickstart has one: the base stays
what it is, the export is merged, and a killed run of PPO, whose critic has an adapter of its own, ends as if
nobody had disturbed it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.checkpoint.manifest import verify
from megarl.checkpoint.restricted import read_plain_index
from tests.system.whole_runs import ON_TORCH, STEPS, Launches, Material, comparable, read_rows, write_config
from tests.tiers import slow

pytestmark = [slow, pytest.mark.timeout(1800)]
PEFT = {"enabled": True, "dim": 4, "alpha": 8}
PAIRS = [
    {"prompt": f"{n}+{3 * n % 7}=", "chosen": str(n + 3 * n % 7), "rejected": "9876543"[: 1 + n % 3]}
    for n in range(16)
]


def configuration(directory: Path, algorithm: str, material: Material, **changes: Any) -> Path:
    """With adapters of the policy, and of a critic."""
    directory.mkdir(exist_ok=True)
    sections: dict[str, Any] = {"policy": {"peft": PEFT}, **changes}
    if algorithm == "dpo":
        file = directory / "pairs.jsonl"
        file.write_text("\n".join(map(json.dumps, PAIRS)))
        base = write_config(directory / "base.yaml", "sft", material, data={})
        keys = {"prompt_key": "prompt", "chosen_key": "chosen", "rejected_key": "rejected"}
        sections |= {
            "algorithm": "dpo",
            "sft": None,
            "dpo": {"max_num_steps": STEPS, "reference_policy_kl_penalty": 0.3},
        }
        sections |= {"data": {"train": {"path": str(file), **keys}}}
        sections["policy"] = {**sections["policy"], "train_global_batch_size": 4, "train_micro_batch_size": 2}
    else:
        base = write_config(directory / "base.yaml", algorithm, material)
    if algorithm == "ppo":
        sections = {"critic": {"peft": {**PEFT, "dim": 3}}, **sections}
    if algorithm == "distillation":
        sections |= {"teacher": {"model_name": str(material.taught)}}
        sections["policy"] = {**sections["policy"], "model_name": str(material.model)}
    config = directory / f"{algorithm}.yaml"
    config.write_text(
        yaml.safe_dump({"defaults": str(base), "checkpointing": {"export_hf": True}, **sections})
    )
    return config


def base_of(algorithm: str, material: Material) -> Path:
    return material.model if algorithm in ("sft", "dpo", "distillation") else material.taught


def check_merged(exported: Path, base: Path, kind: Any = AutoModelForCausalLM) -> None:
    """The export is what PEFT makes of the base and the adapter inside, and no longer the base."""
    merged = PeftModel.from_pretrained(
        kind.from_pretrained(base, dtype=torch.float32), exported / "adapter"
    ).merge_and_unload()  # type: ignore[operator]
    weights, plain = (
        load_file(exported / "model.safetensors"),
        kind.from_pretrained(base, dtype=torch.float32).state_dict(),
    )
    for name, tensor in merged.state_dict().items():
        if name in weights:
            torch.testing.assert_close(weights[name].float(), tensor, atol=1e-5, rtol=1e-4)
    assert any(
        not torch.equal(weights[name], plain[name]) for name in weights if name.endswith("q_proj.weight")
    )
    assert all(torch.equal(weights[name], plain[name]) for name in weights if name.endswith("norm.weight"))


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "distillation", "ppo"])
def test_a_run_trains_adapters(
    algorithm: str, backend: str, tmp_path: Path, material: Material, launches: Launches
) -> None:
    changes: dict[str, Any] = {} if backend == "megatron" else ON_TORCH[backend]
    policy = {**changes.get("policy", {}), "peft": PEFT}
    run = launches.finish(
        configuration(tmp_path / "config", algorithm, material, policy=policy), tmp_path / "run"
    )
    if algorithm == "ppo":
        # All of the base, which for the critic has no output layer; both ranks have norms and padding.
        base = load_file(base_of(algorithm, material) / "model.safetensors")
        frozen = sum(tensor.nbytes for name, tensor in base.items() if name != "lm_head.weight") / 1024
        [read] = re.findall(r"from the policy's workers: ([\d.]+) KiB", launches.all[-1].output())
        assert frozen < float(read) < 1.01 * frozen
    rows = [row for row in read_rows(run) if "train/loss" in row]
    assert len(rows) == STEPS - (algorithm == "ppo") and rows[-1]["train/loss"] != rows[0]["train/loss"]
    assert all(row["train/grad_norm"] > 0 for row in rows)
    last = run / "checkpoints" / f"step_{STEPS}"
    assert verify(last) == []
    check_merged(run / "hf" / f"step_{STEPS}", base_of(algorithm, material))
    for role in ("policy", "critic") if algorithm == "ppo" else ("policy",):
        stored = [
            key
            for key in read_plain_index(last / role / "weights").state_dict_metadata
            if ".lora_" not in key and ".adapter." not in key
        ]
        assert all(
            role == "critic" and key.endswith(("score.weight", "output_layer.weight")) for key in stored
        ), stored


def test_a_killed_run_of_two_adapters_ends_as_undisturbed(
    tmp_path: Path, material: Material, launches: Launches
) -> None:
    config = configuration(tmp_path / "config", "ppo", material)
    whole = launches.finish(config, tmp_path / "whole")
    launch = launches.start(config, tmp_path / "run")
    launch.kill_when(launch.writing(2))
    launches.finish(config, tmp_path / "run")
    assert comparable(tmp_path / "run") == comparable(whole)
    for role in ("policy", "critic"):
        files = [
            {
                path.name: path.read_bytes()
                for path in sorted((run / "checkpoints" / f"step_{STEPS}" / role).rglob("*.distcp"))
            }
            for run in (whole, tmp_path / "run")
        ]
        assert files[0] and files[0] == files[1], role
