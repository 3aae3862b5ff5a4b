"""A checkpoint of two ranks loaded by another layout of two ranks, against the layout that wrote it and a raw read of its bytes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoints import content_of, model_of_size, parts_of, trained_worker
from benchmarks.point import Metric, Point
from benchmarks.ranks import Ranks
from benchmarks.timing import Spent, over_ranks, spent_in_turn

RANKS = 2
LAYOUTS = {"tp=2": {"tensor_parallel": 2}, "dp=2": {"ranks": 2}}


def measure(quick: bool) -> Iterator[Point]:
    """From one layout of Megatron to the other."""
    repeats = 1 if quick else 3
    with tempfile.TemporaryDirectory() as directory, Ranks() as ranks:
        model = model_of_size(Path(directory) / "model", quick)
        saved = Path(directory) / "saved"
        (one, other) = LAYOUTS
        same = ranks.run(RANKS, _save_and_load, model, one, saved, True, repeats)
        resharded = ranks.run(RANKS, _save_and_load, model, other, saved, False, repeats)
        yield Point({"from": one, "to": other}, _metrics(same, resharded))


def _metrics(same: list[dict[str, Spent]], resharded: list[dict[str, Spent]]) -> dict[str, Metric]:
    loads = {name: over_ranks([rank["load"] for rank in found]) for name, found in (("same", same), ("other", resharded))}
    raw = over_ranks([rank["raw"] for rank in resharded])
    return {
        "reshard": Metric.ratio("a load by the layout that wrote it", loads["other"].wall, loads["same"].wall),
        "reshard_cpu": Metric.ratio("CPU seconds of a load by the layout that wrote it", loads["other"].cpu, loads["same"].cpu),
        "load": Metric.ratio("a raw read", loads["other"].wall, raw.wall),
        "load_cpu": Metric.ratio("CPU seconds of a raw read", loads["other"].cpu, raw.cpu),
        "load_seconds": Metric.of("s", loads["other"].wall),
        "same_seconds": Metric.of("s of the layout that wrote it", loads["same"].wall),
    }


def _save_and_load(model: Path, layout: str, directory: Path, writes: bool, repeats: int) -> dict[str, Spent]:
    """On every rank: loads of a checkpoint and raw reads of it in turn; the layout that wrote it saves it before."""
    import torch.distributed as dist

    worker = trained_worker(model, **LAYOUTS[layout])
    weights, optimizer = parts_of(directory)
    if writes:
        worker.save_checkpoint(weights, optimizer)
    dist.barrier()
    spent = spent_in_turn(
        {"load": lambda: worker.load_checkpoint(weights, optimizer), "raw": lambda: content_of(directory)}, repeats=repeats
    )
    worker.backend.close()
    return spent
