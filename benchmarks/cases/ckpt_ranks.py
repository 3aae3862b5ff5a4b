"""A save by 2 and 4 data-parallel ranks: bytes of the rank that writes most, against all bytes, and its time against one raw write of them.

The bytes are the same on every machine.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.checkpoints import BACKEND, content_of, model_of_size, parts_of, trained_worker, write_raw
from benchmarks.point import Metric, Point, sides
from benchmarks.ranks import Ranks
from benchmarks.timing import Spent, collector_off, over_ranks

RANKS = (2, 4)


def measure(quick: bool) -> Iterator[Point]:
    """One point for each number of ranks."""
    from tests.dist.save_jobs import written

    with tempfile.TemporaryDirectory() as directory, Ranks() as ranks:
        model = model_of_size(Path(directory) / "model", quick)
        for world in RANKS:
            saved = Path(directory) / f"saved-{world}"
            spent = ranks.run(world, _save_and_write, model, world, saved, 1 if quick else 3)
            saves, writes = (over_ranks([rank[name] for rank in spent]) for name in ("save", "raw"))
            by_rank = {name: written(Path(path)) for name, path in zip(("weights", "optimizer"), parts_of(saved), strict=True)}
            shares = {
                f"{name}_of_one": Metric.ratio("the bytes of all ranks", [max(shares.values())], [sum(shares.values())])
                for name, shares in by_rank.items()
            }
            size = Metric.of("MiB of tensors", [sum(map(sum, (shares.values() for shares in by_rank.values()))) / 2**20])
            yield Point(
                {"backend": BACKEND, "data_parallel": world},
                {**shares, **sides("save", saves, "a raw write by one rank with fsync", writes), "mebibytes": size},
            )


def _save_and_write(model: Path, world: int, directory: Path, repeats: int) -> dict[str, Spent]:
    """On every rank: saves, and raw writes of the same bytes by the first one, in turn. The last save stays."""
    import torch.distributed as dist

    worker = trained_worker(model, micro_batch=1, ranks=world)
    spent = {"save": Spent(), "raw": Spent()}
    with collector_off():
        for turn in range(1 + repeats):
            if dist.get_rank() == 0:
                shutil.rmtree(directory, ignore_errors=True)
            dist.barrier()
            with spent["save"].repeat(turn > 0):
                worker.save_checkpoint(*parts_of(directory))
            content = content_of(directory) if dist.get_rank() == 0 else b""
            dist.barrier()
            with spent["raw"].repeat(turn > 0):
                if dist.get_rank() == 0:
                    write_raw(directory.parent / "raw", content)
            if dist.get_rank() == 0:
                (directory.parent / "raw").unlink()
    worker.backend.close()
    return spent
