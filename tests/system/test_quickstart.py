"""The quickstart's task with a tool, and its first one by adapters and by a hybrid, from a fresh model to the
summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.system.whole_runs import LONGEST_WAIT_S, ROOT
from tests.tiers import slow


def summary_of(out: Path, flag: str, value: str) -> dict[str, Any]:
    """The summary of a quickstart with one flag, whose exported model answers plain transformers alike."""
    command = [sys.executable, "-m", "megarl.quickstart", flag, value, "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    summary: dict[str, Any] = json.loads((out / f"{value}-seed-1" / "summary.json").read_text())
    assert abs(summary["accuracy_transformers"] - summary["accuracy_after"]) <= 1 / 256
    return summary


@slow
def test_a_tiny_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, "--task", "calculator")
    assert (
        summary["accuracy_without_tool"] < 0.3
        and summary["accuracy_before"] < 0.5 < 0.9 < summary["accuracy_after"]
    )
    assert summary["tool_calls"] > 0.9
    metrics = tmp_path / "calculator-seed-1" / "grpo" / "metrics.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    last = [row for row in rows if "train/turns" in row][-1]
    assert last["train/turns"] > 1.9 and last["train/tool_calls"] > 240 and last["train/mismatch_max"] < 1e-4


@slow
def test_a_tiny_model_learns_by_adapters(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, "--adapter", "lora")
    assert summary["accuracy_before"] < 0.5 < 0.75 < summary["accuracy_after"]
    assert (Path(summary["model"]) / "adapter" / "adapter_model.safetensors").is_file()


@slow
def test_a_tiny_hybrid_learns(tmp_path: Path) -> None:
    summary = summary_of(tmp_path, "--family", "qwen3_5")
    assert summary["accuracy_before"] < 0.45 and summary["accuracy_before"] + 0.15 < summary["accuracy_after"]
    assert json.loads((Path(summary["model"]) / "config.json").read_text())["model_type"] == "qwen3_5_text"
