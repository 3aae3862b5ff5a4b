"""Table of whole runs, with the columns that the field publishes; values that were not measured stay
blank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.marks import marks_of
from benchmarks.tables import number

# These map what a point records about its run to headings.
FACTS = {
    "algorithm": "algorithm",
    "model": "model",
    "policy_lag": "policy lag",
    "longest": "longest sequence",
    "mean_length": "mean length",
    "gpus": "GPUs",
    "generation_batch": "generation batch",
    "training_batch": "training batch",
    "generation_layout": "layout, generation",
    "training_layout": "layout, training",
}
# These map metrics of a point to headings.
MEASURED = {"tokens_per_second_per_gpu": "tokens/s/GPU", "step_seconds": "step time, s", "mfu": "MFU"}
HEAD = ("backend", *FACTS.values(), *MEASURED.values(), "not to be quoted")


def whole_runs(results: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return one row for each point that is a whole run."""
    return [_row(result, point) for result in results for point in result["points"] if point.get("run")]


def _row(result: Mapping[str, Any], point: Mapping[str, Any]) -> tuple[str, ...]:
    run, metrics = point["run"], point["metrics"]
    facts = [_written(run.get(fact, "")) for fact in FACTS]
    measured = [number(metrics[name]["median"]) if name in metrics else "" for name in MEASURED]
    return (
        str(run.get("backend", point["parameters"].get("backend", ""))),
        *facts,
        *measured,
        "; ".join(marks_of(result)),
    )


def _written(value: int | float | str) -> str:
    return value if isinstance(value, str) else number(value)
