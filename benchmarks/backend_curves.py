"""``python -m benchmarks.backend_curves``: the same GRPO run on the three backends, drawn over one another, with what they differ by.

Teaches the quickstart's model on Megatron, then trains it by reinforcement on each backend from the same weights, with the same samples and
seeds. Each backend generates its own answers: where two backends drew a different token, everything after it would differ.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reinforcement import reinforced

BACKENDS = ("megatron", "dtensor", "fsdp1")
COMPARED = ("train/loss", "train/grad_norm", "train/reward", "train/approx_entropy", "train/generation_length")
DRAWN = ("train/loss", "train/grad_norm", "train/reward")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; the figures and the picture lie where ``--out`` says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backend_curves", description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="steps of reinforcement (default 20)")
    parser.add_argument("--work", type=Path, default=Path("runs/backends"), help="directory of the runs (default runs/backends)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/backends"), help="FILE.json and FILE.png (without suffix)")
    chosen = parser.parse_args(arguments)
    runs = {backend: _run(backend, chosen.work, chosen.steps) for backend in BACKENDS}
    result = {"steps": chosen.steps, "largest_difference": differences(runs), "curves": _curves(runs)}
    from megarl.observe.plots import overlay_runs

    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    chosen.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    overlay_runs([chosen.work / backend for backend in BACKENDS], DRAWN, chosen.out.with_suffix(".png"))
    json.dump(result["largest_difference"], sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


def _run(backend: str, work: Path, steps: int) -> list[dict[str, Any]]:
    """The metrics of one backend's run, step by step."""
    unmeasured = ["data.validation=null", "grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"]
    return reinforced(work, backend, [f"{backend}.yaml"], [f"grpo.max_num_steps={steps}", *unmeasured])


def differences(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """For each compared metric, the largest difference from the first backend over all steps, relative to that metric's largest value."""
    first, *others = runs.values()
    largest = {}
    for name in COMPARED:
        scale = max(abs(row[name]) for row in first) or 1.0
        pairs = [(row[name], other[name]) for rows in others for row, other in zip(first, rows, strict=True)]
        largest[name] = max(abs(one - other) for one, other in pairs) / scale
    return largest


def _curves(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, dict[str, list[float]]]:
    return {backend: {name: [row[name] for row in rows] for name in COMPARED} for backend, rows in runs.items()}


if __name__ == "__main__":
    sys.exit(main())
