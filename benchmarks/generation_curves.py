"""``python -m benchmarks.generation_curves``: the quickstart's reinforcement with answers of the policy, and of vLLM colocated and apart.

All runs start from the same model. Two engines draw different random numbers, so that their answers, and what is learned from them, are
equal in distribution only: each way is run with several seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.reinforcement import reinforced

WAYS: Mapping[str, Sequence[str]] = {"megatron": (), "vllm": ("vllm.yaml",), "vllm-apart": ("vllm-apart.yaml",)}
ACCURACY = "validation/accuracy"
MISMATCH = ("train/mismatch_mean", "train/mismatch_max", "train/mismatch_share_above_0.05", "train/token_mult_prob_error")
DRAWN = (ACCURACY, "train/reward", "train/mismatch_max")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0; the figures and the picture lie where ``--out`` says."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.generation_curves", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="one run of each way for each seed (default 1 2 3)")
    parser.add_argument("--work", type=Path, default=Path("runs/generation"), help="directory of the runs (default runs/generation)")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generation"), help="FILE.json and FILE.png (without suffix)")
    chosen = parser.parse_args(arguments)
    from megarl.observe.plots import overlay_runs

    runs = {way: {seed: _summary(_run(way, seed, chosen.work)) for seed in chosen.seeds} for way in WAYS}
    after = {way: statistics.mean(each["accuracy"][-1] for each in of_way.values()) for way, of_way in runs.items()}
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    result = {"mean_accuracy_after": after, "runs": runs}
    chosen.out.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    overlay_runs([chosen.work / _name(way, chosen.seeds[0]) for way in WAYS], DRAWN, chosen.out.with_suffix(".png"))
    json.dump(after, sys.stdout, indent=1)
    sys.stdout.write("\n")
    return 0


def _name(way: str, seed: int) -> str:
    return f"{way}-{seed}"


def _run(way: str, seed: int, work: Path) -> list[dict[str, Any]]:
    return reinforced(work, _name(way, seed), WAYS[way], [f"seed={seed}"])


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Greedy accuracy at every validation, and the largest that each metric of the mismatch was at any step."""
    accuracy = [row[ACCURACY] for row in rows if row.get(ACCURACY) is not None]
    return {"accuracy": accuracy, "steps": max(row["step"] for row in rows), "largest": {name: _largest(rows, name) for name in MISMATCH}}


def _largest(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    return max(float(row[name]) for row in rows if row.get(name) is not None)


if __name__ == "__main__":
    sys.exit(main())
