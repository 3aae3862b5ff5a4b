"""The quickstart's task with a tool, and its first one by adapters and by a hybrid, from a fresh model to the summary."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.system.whole_runs import LONGEST_WAIT_S, ROOT
from tests.tiers import slow


@slow
def test_a_tiny_model_learns_to_call_the_calculator(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.quickstart", "--task", "calculator", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    directory = tmp_path / "calculator-seed-1"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["accuracy_without_tool"] < 0.3 and summary["accuracy_before"] < 0.5 < 0.9 < summary["accuracy_after"]
    assert abs(summary["accuracy_transformers"] - summary["accuracy_after"]) <= 1 / 256 and summary["tool_calls"] > 0.9
    rows = [json.loads(line) for line in (directory / "grpo" / "metrics.jsonl").read_text().splitlines()]
    last = [row for row in rows if "train/turns" in row][-1]
    assert last["train/turns"] > 1.9 and last["train/tool_calls"] > 240 and last["train/mismatch_max"] < 1e-4


@slow
def test_a_tiny_model_learns_by_adapters(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.quickstart", "--adapter", "lora", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    directory = tmp_path / "lora-seed-1"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.5 < 0.75 < summary["accuracy_after"]
    assert abs(summary["accuracy_transformers"] - summary["accuracy_after"]) <= 1 / 256
    assert (Path(summary["model"]) / "adapter" / "adapter_model.safetensors").is_file()


@slow
def test_a_tiny_hybrid_learns(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megarl.quickstart", "--family", "qwen3_5", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LONGEST_WAIT_S, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    directory = tmp_path / "qwen3_5-seed-1"
    summary = json.loads((directory / "summary.json").read_text())
    assert summary["accuracy_before"] < 0.45 and summary["accuracy_before"] + 0.15 < summary["accuracy_after"]
    assert abs(summary["accuracy_transformers"] - summary["accuracy_after"]) <= 1 / 256
    assert json.loads((Path(summary["model"]) / "config.json").read_text())["model_type"] == "qwen3_5_text"
