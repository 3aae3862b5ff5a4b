"""``megarl eval`` as a user starts it: of a checkpoint, and of the exported model, the figures that the run
logged, to the last digit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import megarl
from tests.system.whole_runs import (
    CONFIGS,
    LONGEST_WAIT_S,
    ROOT,
    Material,
    make_material,
    read_rows,
    write_config,
)
from tests.tiers import slow


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("material"))


def with_two_sets(path: Path, material: Material) -> Path:
    """A GRPO run of two steps with five problems at mean@8 and three others, an odd number of rows, at
    mean@3."""
    config = yaml.safe_load(write_config(path, "grpo", material).read_text())
    fields = {"prompt_key": "prompt", "answer_key": "answer", "val_temperature": 0.9}
    config["data"]["validation"] = [
        {"path": str(material.validation), "val_num_generations_per_prompt": 8, **fields},
        {
            "path": str(material.train),
            "val_set": "others",
            "max_samples": 3,
            "val_num_generations_per_prompt": 3,
            "val_top_k": 20,
            **fields,
        },
    ]
    config["grpo"] |= {"max_num_steps": 2, "val_period": 2, "val_at_start": False, "val_batch_size": None}
    config["checkpointing"] |= {"save_period": 2, "metric_name": "validation/validation/mean@8"}
    path.write_text(yaml.safe_dump(config))
    return path


def program(*arguments: str) -> str:
    command = [sys.executable, "-m", "megarl.cli", *arguments]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def of_validation(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name.startswith("validation/")}


@slow
@pytest.mark.parametrize("backend", ["megatron", "fsdp1"])
def test_a_checkpoint_and_its_export_have_the_figures_of_the_run(
    backend: str, material: Material, tmp_path: Path
) -> None:
    """Megatron on tensor parallel 2; FSDP1 on two data-parallel ranks, which share an odd number of rows."""
    run_dir = tmp_path / "run"
    layers, changes = (
        ["--with", str(CONFIGS / f"{backend}.yaml")],
        [f"run_dir={run_dir}", "policy.train_micro_batch_size=4"],
    )
    config = [str(with_two_sets(tmp_path / "grpo.yaml", material)), *layers, *changes]
    said = program("train", *config)
    assert "\n  validation  " in said and "\n  others  " in said and "mean@8_ci95" in said
    logged = of_validation(read_rows(run_dir)[-1])
    assert 0 < logged["validation/validation/mean@8"] < 1 and logged["validation/others/samples"] == 9
    checkpoint, exported = run_dir / "checkpoints" / "step_2", run_dir / "hf" / "step_2"
    for weights in (["--checkpoint", str(checkpoint)], ["--model", str(exported)]):
        path = Path(program("eval", *config, *weights).rpartition("written to ")[2].strip())
        assert path.name == ("step_2.json" if weights[0] == "--checkpoint" else "step_2-2.json")
        result = json.loads(path.read_text())
        assert result["metrics"] == logged
        assert (result["checkpoint"], result["step"]) == (
            (str(checkpoint), 2) if weights[0] == "--checkpoint" else (None, None)
        )
    assert len(read_rows(run_dir)) == 2, "an evaluation logs nothing into the run"


@pytest.fixture(scope="module")
def adapted(material: Material, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an adapter as PEFT writes one, and the model that PEFT merges with it."""
    directory = tmp_path_factory.mktemp("adapted")
    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_pretrained(material.taught, dtype=torch.float32)
    changed: Any = get_peft_model(
        base, LoraConfig(r=4, lora_alpha=8, target_modules=r".*(q|v|o|up)_proj", rank_pattern={"o_proj": 2})
    )
    with torch.no_grad():
        for name, parameter in changed.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape) * 0.1)
    changed.save_pretrained(directory / "adapter")
    changed.merge_and_unload().save_pretrained(directory / "merged")
    AutoTokenizer.from_pretrained(material.taught).save_pretrained(directory / "merged")
    return directory


@slow
def test_an_adapter_has_the_figures_of_the_model_that_peft_merges(
    material: Material, adapted: Path, tmp_path: Path
) -> None:
    config = str(with_two_sets(tmp_path / "grpo.yaml", material))
    options = [
        config,
        "--with",
        str(CONFIGS / "megatron.yaml"),
        f"run_dir={tmp_path / 'run'}",
        "policy.train_micro_batch_size=4",
    ]
    weights = {
        "base": [],
        "merged": ["--model", str(adapted / "merged")],
        "adapter": ["--adapter", str(adapted / "adapter")],
    }
    found = {}
    for name, chosen in weights.items():
        program("eval", *options, *chosen, "--json", str(tmp_path / f"{name}.json"))
        found[name] = json.loads((tmp_path / f"{name}.json").read_text())
    assert found["adapter"]["adapter"] == str(adapted / "adapter") and found["base"]["adapter"] is None
    assert found["adapter"]["metrics"] == found["merged"]["metrics"] != found["base"]["metrics"]


@slow
def test_an_adapter_is_evaluated_from_python(material: Material, adapted: Path) -> None:
    rows = [json.loads(line) for line in material.validation.read_text().splitlines()]
    options: dict[str, Any] = {
        "backend": "dtensor",
        "progress": False,
        "max_total_sequence_length": 40,
        "val_num_generations_per_prompt": 8,
        "val_temperature": 1.0,
    }
    found = [
        megarl.eval(model, rows, "exact_match", adapter=adapter, **options)["metrics"]
        for model, adapter in (
            (material.taught, None),
            (adapted / "merged", None),
            (material.taught, adapted / "adapter"),
        )
    ]
    assert found[2] == found[1] != found[0]
