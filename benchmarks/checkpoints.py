"""What the cases of checkpoints share: a worker by itself that has trained, saves as a run does, and the bytes that a save leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import AS_EACH_CASE_HAS_IT, Options
from benchmarks.point import Metric

if TYPE_CHECKING:
    from megarl.checkpoint.manager import CheckpointManager

BACKEND = "megatron"
"""That is measured; each of the others would take as long again."""


@contextlib.contextmanager
def alone() -> Iterator[Path]:
    """A process group of one, and a directory; afterwards neither is there."""
    import torch.distributed as dist

    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{Path(directory) / 'store'}", rank=0, world_size=1)
        try:
            yield Path(directory)
        finally:
            dist.destroy_process_group()


def model_of_size(directory: Path, quick: bool, options: Options = AS_EACH_CASE_HAS_IT) -> Path:
    """The model that was chosen; or four million weights, whose checkpoint is some 70 MB, half a million where it is to be quick."""
    from benchmarks import tiny
    from benchmarks.subject import NARROW, model_of

    return model_of(options, directory, tiny.LENGTH, **(NARROW if quick else {}))


def trained_worker(model: Path, micro_batch: int = 4, **layout: Any) -> Any:
    """A worker of this rank after one step, so that its optimizer has a state."""
    from benchmarks import tiny
    from benchmarks.steps import step_of
    from benchmarks.subject import Work, batch_of

    worker = tiny.worker_of(tiny.policy_config(model, micro_batch=micro_batch, backend=BACKEND, **layout))
    work = Work(tiny.ROWS, 8)
    step_of(worker, batch_of(model, work), work.rows)()
    return worker


def save(worker: Any, manager: CheckpointManager, step: int) -> Path:
    """A checkpoint as a run writes it: begun, written, synced, hashed, and given its name."""
    path = manager.init_tmp_checkpoint(step, {"step": step, "sampler": {}})
    worker.save_checkpoint(*parts_of(path))
    return manager.finalize_checkpoint(path)


def parts_of(checkpoint: Path) -> tuple[str, str]:
    """Directories of weights and optimizer in a checkpoint."""
    return str(checkpoint / "policy" / "weights"), str(checkpoint / "policy" / "optimizer")


def content_of(checkpoint: Path) -> bytes:
    """All of its bytes, one file after the other."""
    return b"".join(path.read_bytes() for path in files_of(checkpoint))


def files_of(checkpoint: Path) -> list[Path]:
    """Its files, by name."""
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def write_raw(path: Path, content: bytes) -> None:
    """One file, that is on the disk afterwards."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        remaining = memoryview(content)
        while remaining:
            remaining = remaining[os.write(descriptor, remaining) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def bytes_of(content: bytes) -> dict[str, Metric]:
    """The metric that says how much it is about."""
    return {"mebibytes": Metric.of("MiB of a checkpoint", [len(content) / 2**20])}


def forget(checkpoint: Path) -> None:
    """Remove it, outside of what is measured."""
    shutil.rmtree(checkpoint)
