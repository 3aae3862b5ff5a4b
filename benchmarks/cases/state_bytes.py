"""Bytes of optimizer state, counted tensor by tensor: what a save and a load allocate, and what a GRPO step moves to the host and back.

A save and a load on each rank, against the state gathered in full on every rank, which is what Megatron-Core's checkpoint does. Counts are
the same on every machine.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.point import Metric, Point
from benchmarks.ranks import Ranks

SLICE = 2**18
"""A slice as much smaller than the real one as this model is than a real one: the bound of a load does not depend on it otherwise."""


def measure(quick: bool) -> Iterator[Point]:
    """Saves and loads of Megatron on 1, 2 and 4 data-parallel ranks, in float32 and bfloat16; steps of each backend, in bfloat16."""
    from benchmarks import tiny
    from tests.dist.memory_jobs import load_and_count, save_and_count, step_and_count

    with tempfile.TemporaryDirectory() as directory, Ranks() as ranks:
        model = tiny.save_model(Path(directory) / "model")
        for world in (1, 2) if quick else (1, 2, 4):
            for precision in ("float32", "bfloat16"):
                config = tiny.policy_config(model, micro_batch=1, ranks=world, precision=precision)
                saved = Path(directory) / f"{precision}-{world}"
                counted = ranks.run(world, save_and_count, config, tiny.make_batch(0), saved)
                loaded = ranks.run(world, load_and_count, config, saved, SLICE)
                yield _point(counted, loaded, world, precision, saved)
        for backend in tiny.BACKENDS:
            for reason, asked, engine in (("nothing", False, False), ("the key", True, False), ("an engine", False, True)):
                config = tiny.policy_config(
                    model, micro_batch=1, backend=backend, precision="bfloat16", offload_optimizer_for_logprob=asked
                )
                (moved,) = ranks.run(1, step_and_count, config, engine)
                bytes_moved = Metric.of("bytes of optimizer state a parameter", [moved["bytes a parameter"]])
                yield Point({"backend": backend, "leaves_for": reason}, {"moved": bytes_moved})


def _point(counted: list[dict[str, int]], loaded: list[dict[str, int]], world: int, precision: str, saved: Path) -> Point:
    from converters.torch_dist.reader import TorchDistCheckpoint

    stored = TorchDistCheckpoint(saved / "pieces")
    state = 4 * sum(math.prod(stored.shape(key)) for key in stored)
    most = max(counted, key=lambda rank: rank["pieces"])
    return Point(
        {"data_parallel": world, "precision": precision, "state_bytes": state},
        {
            "writer": Metric.of("ratio to the state gathered in full", [most["pieces"] / most["whole"]]),
            "writer_bytes": Metric.of("bytes of the rank that needs most, what it writes of a tensor", [most["pieces"]]),
            "gathered_bytes": Metric.of("bytes on each rank, gathered in full", [max(rank["whole"] for rank in counted)]),
            "load_bytes": Metric.of("bytes of a load on the rank that needs most, a slice", [max(rank["slices"] for rank in loaded)]),
            "load_gathered_bytes": Metric.of("bytes of a load into all of it on each rank", [max(rank["whole"] for rank in loaded)]),
        },
    )
