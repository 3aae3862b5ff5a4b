"""A save as a run makes it, until the checkpoint has its name, against one raw write of its bytes with fsync. One rank."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checkpoints import BACKEND, alone, bytes_of, content_of, forget, model_of_size, save, trained_worker, write_raw
from benchmarks.options import Options
from benchmarks.point import Point, sides
from benchmarks.timing import Spent, collector_off


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """One point."""
    from megarl.checkpoint.manager import CheckpointManager

    repeats = 1 if quick else 3
    with alone() as directory:
        model = model_of_size(directory / "model", quick, options)
        worker, manager = trained_worker(model), CheckpointManager({"checkpoint_dir": directory / BACKEND})
        first = save(worker, manager, 1)
        content = content_of(first)
        saves, writes = Spent(), Spent()
        with collector_off():
            for turn in range(repeats):
                with saves.repeat():
                    saved = save(worker, manager, 2 + turn)
                with writes.repeat():
                    write_raw(directory / "raw", content)
                manager.verify_checkpoint(saved)
                forget(saved)
                (directory / "raw").unlink()
        worker.backend.close()
        yield Point({"backend": BACKEND}, {**sides("save", saves, "a raw write with fsync", writes), **bytes_of(content)})
