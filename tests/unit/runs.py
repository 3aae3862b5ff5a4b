"""Directories of made-up runs, written by what writes those of real ones."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import yaml

from megarl.checkpoint.manager import CheckpointManager
from megarl.observe.sinks import open_sinks

TOTAL = 40


def make_run(run_dir: Path, steps: int = 30, algorithm: str = "grpo", seed: int = 0, **more: float) -> Path:
    """Configuration and metrics of a run; ``more`` are further training metrics."""
    draw = random.Random(seed)
    run_dir.mkdir(parents=True, exist_ok=True)
    config = {
        "algorithm": algorithm,
        algorithm: {"max_num_steps": TOTAL},
        "policy": {"model_name": "owner/tiny", "megatron_cfg": {"enabled": True}},
        "checkpointing": {"enabled": True, "checkpoint_dir": str(run_dir / "checkpoints")},
    }
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config))
    with open_sinks({}, run_dir) as sinks:
        if algorithm == "grpo":
            sinks.log({"validation/accuracy": 0.25, "timing/step_s": 9.0}, 0)
        for step in range(1, steps + 1):
            sinks.log(
                _row(draw, step, algorithm) | {f"train/{name}": value for name, value in more.items()}, step
            )
    return run_dir


def _row(draw: random.Random, step: int, algorithm: str) -> dict[str, Any]:
    row = {
        "train/loss": draw.gauss(0, 1),
        "train/grad_norm": draw.random(),
        "train/lr": 1e-6,
        "timing/train_s": 1.5,
        "timing/step_s": 3.75,
        "performance/tokens_per_s": 1000.0 + step,
        "performance/memory_gib": 4.0,
        "performance/peak_memory_gib": 4.0 + step / 10,
    }
    if step % 10 == 0:
        row |= {"timing/checkpoint_s": 5.0, "timing/step_s": 8.75}
    if algorithm == "grpo":
        row |= {
            "train/reward": step / 100,
            "train/kl_penalty": 0.001 * step,
            "timing/generation_s": 2.0,
            "train/generation_length": 100.0,
        }
    return row


def add_checkpoint(run_dir: Path, step: int) -> Path:
    """A whole checkpoint of 5000 bytes of weights."""
    manager = CheckpointManager({"checkpoint_dir": run_dir / "checkpoints"})
    begun = manager.init_tmp_checkpoint(step, {"step": step})
    (begun / "weights").write_bytes(bytes(range(250)) * 20)
    return manager.finalize_checkpoint(begun)
