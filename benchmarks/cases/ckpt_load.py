"""A checkpoint verified, byte by byte, and loaded, against one raw read of its bytes; both from memory. One rank."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.checkpoints import BACKEND, alone, bytes_of, content_of, model_of_size, parts_of, save, trained_worker
from benchmarks.options import Options
from benchmarks.point import Point, sides
from benchmarks.timing import spent_in_turn


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """One point."""
    from benchmarks.memory import use_pages
    from megarl.checkpoint.manager import CheckpointManager

    with alone() as directory:
        model = model_of_size(directory / "model", quick, options)
        worker, manager = trained_worker(model), CheckpointManager({"checkpoint_dir": directory / BACKEND})
        saved = save(worker, manager, 1)
        use_pages()
        spent = spent_in_turn(
            {
                "verify": lambda: manager.verify_checkpoint(saved),
                "load": lambda: worker.load_checkpoint(*parts_of(saved)),
                "raw": lambda: content_of(saved),
            },
            repeats=1 if quick else 3,
        )
        worker.backend.close()
        read = "a raw read"
        metrics = {**sides("load", spent["load"], read, spent["raw"]), **sides("verify", spent["verify"], read, spent["raw"])}
        yield Point({"backend": BACKEND}, {**metrics, **bytes_of(content_of(saved))})
