"""Whole programs whose learning rate destroys the model: they stop, say why, and leave no weights that are
not finite."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from converters.command import main as convert
from converters.torch_dist.reader import TorchDistCheckpoint
from tests.system.whole_runs import CONFIGS, LONGEST_WAIT_S, ROOT, Material, make_material, write_config
from tests.tiers import slow

# The first step has a learning rate that trains, the second one of 1e17 or more: Megatron warms up to it,
# torch multiplies.
JUMP = [
    "policy.learning_rate=0.001",
    "policy.scheduler={name: torch.optim.lr_scheduler.StepLR, kwargs: {step_size: 1, gamma: 1.0e+20}}",
]
WARM_UP = [
    "policy.learning_rate=1e20",
    "policy.megatron_cfg.scheduler={lr_warmup_iters: 2, lr_warmup_init: 0.001}",
]
RUINOUS = {"megatron": WARM_UP, "dtensor": JUMP, "fsdp1": JUMP}


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> Material:
    return make_material(tmp_path_factory.mktemp("diverging"), teach=False)


def program(
    directory: Path, backend: str, material: Material, *overrides: str
) -> subprocess.CompletedProcess[str]:
    """A run on two ranks that saves every step."""
    config = write_config(directory / "run.yaml", "sft", material)
    layers = ["--with", str(CONFIGS / f"{backend}.yaml")]
    fixed = [
        f"run_dir={directory / 'run'}",
        "sft.max_num_steps=9",
        "policy.train_micro_batch_size=1",
        "checkpointing.export_hf=false",
    ]
    command = [sys.executable, "-m", "megarl.cli", "train", str(config), *layers, *fixed, *overrides]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )


@slow
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("backend", ["megatron", "dtensor", "fsdp1"])
def test_a_learning_rate_that_destroys_the_model(
    backend: str, precision: str, material: Material, tmp_path: Path
) -> None:
    done = program(tmp_path, backend, material, *RUINOUS[backend], f"policy.precision={precision}")
    assert done.returncode == 1, done.stdout[-2000:] + done.stderr[-4000:]
    assert "3 optimizer steps in a row were skipped, policy.max_consecutive_skips = 3" in done.stderr
    assert "Traceback" not in done.stderr.partition("megarl: ")[2].partition("--- traceback of the worker")[0]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["train/skipped_steps"] == 0 and rows[0]["train/lr"] == pytest.approx(1e-3)
    assert [row["train/skipped_steps"] for row in rows[-2:]] == [1, 1], "the third one ends the run"
    assert list((tmp_path / "run" / "skipped").glob("step_*.json"))
    checkpoints = sorted(
        (tmp_path / "run" / "checkpoints").glob("step_*"), key=lambda path: int(path.name.partition("_")[2])
    )
    assert checkpoints[0].name == "step_1"
    for checkpoint in checkpoints:
        stored = TorchDistCheckpoint(checkpoint / "policy" / "weights")
        for key in stored:
            assert stored.read(key, tuple((0, size) for size in stored.shape(key))).isfinite().all(), (
                f"{checkpoint.name} {key}"
            )
    if (backend, precision) == ("megatron", "float32"):
        # What the error says: from the weights of an earlier checkpoint, with a lower learning rate.
        assert (
            convert(["export", str(checkpoints[0] / "policy" / "weights"), str(tmp_path / "exported")]) == 0
        )
        assert all(
            tensor.isfinite().all()
            for tensor in load_file(tmp_path / "exported" / "model.safetensors").values()
        )
        sane = [
            f"policy.model_name={tmp_path / 'exported'}",
            f"policy.tokenizer.name={material.model}",
            "policy.learning_rate=0.001",
        ]
        again = program(
            tmp_path, backend, material, *sane, f"run_dir={tmp_path / 'again'}", "sft.max_num_steps=2"
        )
        assert again.returncode == 0, again.stderr[-3000:]
        last = json.loads((tmp_path / "again" / "metrics.jsonl").read_text().splitlines()[-1])
        assert (
            last["step"] == 2
            and torch.tensor(last["train/loss"]).isfinite()
            and last["train/skipped_steps"] == 0
        )
