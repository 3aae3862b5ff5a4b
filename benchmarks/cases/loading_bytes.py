"""Bytes of a model's files that the ranks of Megatron read, and send to one another, when a policy is built, counted.

Against one rank that reads all and sends all to every other one. Counts are the same on every machine.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks import tiny
from benchmarks.point import Metric, Point
from benchmarks.ranks import Ranks

DENSE: Mapping[str, Mapping[str, Any]] = {
    "dp=4": {},
    "tp=2,dp=2": {"tensor_model_parallel_size": 2},
    "pp=2,dp=2": {"pipeline_model_parallel_size": 2},
    "tp=2,pp=2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
}
SPARSE: Mapping[str, Mapping[str, Any]] = {"ep=2,dp=4": {"expert_model_parallel_size": 2}}
RANKS = 4


def measure(quick: bool) -> Iterator[Point]:
    """Layouts of four ranks: a dense model, and a mixture whose experts are on two halves of the ranks."""
    from tests.dist.jobs import loaded_bytes
    from tests.models import make_tiny

    with tempfile.TemporaryDirectory() as directory, Ranks() as ranks:
        dense = tiny.save_model(Path(directory) / "dense")
        sparse = make_tiny(Path(directory) / "sparse", "qwen3_moe", tied=False, seed=5)
        for model, layouts in ((dense, DENSE), (sparse, SPARSE)):
            for layout, changes in layouts.items():
                config = tiny.policy_config(model, micro_batch=1, ranks=RANKS, megatron_cfg=dict(changes))
                yield _point(layout, ranks.run(RANKS, loaded_bytes, config))


def _point(layout: str, counted: list[dict[str, int]]) -> Point:
    whole = counted[0]["model"]
    metrics = {
        "read": Metric.of("bytes read by all ranks over those of the model", [sum(rank["read"] for rank in counted) / whole]),
        "sent": Metric.of("bytes that ranks get from others over those of the model", [sum(rank["got"] for rank in counted) / whole]),
        "sent_to_all": Metric.of("the same where one rank reads all and sends it to every other one", [float(len(counted) - 1)]),
        "most": Metric.of("bytes of the rank that gets most over those of its own parameters", [max(_share(rank) for rank in counted)]),
    }
    return Point({"layout": layout, "ranks": len(counted), "model_bytes": whole}, metrics)


def _share(rank: Mapping[str, int]) -> float:
    return rank["got"] / rank["own"]
