"""Checkpoints of one rank: a save, a load, and how long an asynchronous save stalls training.

Each is compared with the same bytes by themselves: one raw write with fsync, one raw read, one copy. Only
Megatron is measured, because the other backends would take as long again.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides
from benchmarks.timing import Spent, collector_off, spent_in_turn
from converters.files.atomic import write_bytes_durably

if TYPE_CHECKING:
    from megarl.checkpoint.manager import CheckpointManager
    from megarl.checkpoint.node_memory import OwnMemory, OwnWrite

BACKEND = "megatron"
_LONGEST_S = 120.0


def measure_save(quick: bool, options: Options) -> Iterator[Point]:
    """Yield the time of a save, until the checkpoint has its final name."""
    with _trained(quick, options) as (worker, manager, directory):
        content = _content_of(_save(worker, manager, 1))
        saves, writes = Spent(), Spent()
        with collector_off():
            for turn in range(1 if quick else 3):
                with saves.repeat():
                    saved = _save(worker, manager, 2 + turn)
                with writes.repeat():
                    write_bytes_durably(directory / "raw", content)
                assert manager.get_latest_checkpoint_path() == saved
                shutil.rmtree(saved)
                (directory / "raw").unlink()
        yield _point(sides("save", saves, "a raw write with fsync", writes), content)


def measure_load(quick: bool, options: Options) -> Iterator[Point]:
    """Yield the times of verifying a checkpoint byte by byte and of loading it. Both read from the page
    cache."""
    from benchmarks.memory import use_pages

    with _trained(quick, options) as (worker, manager, _):
        saved = _save(worker, manager, 1)
        use_pages()
        spent = spent_in_turn(
            {
                "verify": manager.get_latest_checkpoint_path,
                "load": lambda: worker.load_checkpoint(*_parts_of(saved)),
                "raw": lambda: _content_of(saved),
            },
            repeats=1 if quick else 3,
        )
        read = "a raw read"
        metrics = {
            **sides("load", spent["load"], read, spent["raw"]),
            **sides("verify", spent["verify"], read, spent["raw"]),
        }
        yield _point(metrics, _content_of(saved))


def measure_stall(quick: bool, options: Options) -> Iterator[Point]:
    """Yield the stall of training by an asynchronous save.

    The stall ends when the tensors are in shared memory, which the rank keeps from an earlier save, and the
    process that writes the files has opened this memory. The time until the checkpoint is complete is not
    measured as part of the stall.
    """
    import torch

    from megarl.checkpoint.node_memory import OwnMemory

    with _trained(quick, options) as (worker, manager, _):
        memory = OwnMemory(manager.checkpoint_dir)
        content = _content_of(_save(worker, manager, 1))
        # Copy into a bytearray, because torch.frombuffer warns of memory that must not be written.
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        target = torch.empty_like(source)
        stalls, copies, behind = Spent(), Spent(), []
        with collector_off():
            for turn in range(2 if quick else 4):
                # The first repeat does not count, because it creates the memory that later ones use again.
                with stalls.repeat(turn > 0):
                    path, write = _begin(worker, manager, memory, 2 + turn, len(content))
                behind.append(write.wait(_LONGEST_S))
                saved = manager.finalize_checkpoint(path, is_sealed=True)
                assert manager.get_latest_checkpoint_path() == saved
                shutil.rmtree(saved)
                with copies.repeat(turn > 0):
                    target.copy_(source)
        behind_seconds = {"behind_seconds": Metric.of("s until all is on the disk", behind[1:])}
        yield _point({**sides("stall", stalls, "one copy of the bytes", copies), **behind_seconds}, content)


def _point(metrics: dict[str, Metric], content: bytes) -> Point:
    return Point(
        {"backend": BACKEND},
        {**metrics, "mebibytes": Metric.of("MiB of a checkpoint", [len(content) / 2**20])},
    )


@contextlib.contextmanager
def _trained(quick: bool, options: Options) -> Iterator[tuple[Any, CheckpointManager, Path]]:
    """Yield a worker of one rank after one step, so that its optimizer has states, with the manager of its
    checkpoints and a directory.

    The model is the chosen one. By default it has four million weights, which make a checkpoint of some 70
    MB, or half a million weights in a quick run.
    """
    import torch.distributed as dist

    from benchmarks import tiny
    from benchmarks.steps import step_of
    from benchmarks.subject import NARROW, Work, batch_of, model_of
    from megarl.checkpoint.manager import CheckpointManager

    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        dist.init_process_group("gloo", init_method=f"file://{directory / 'store'}", rank=0, world_size=1)
        try:
            model = model_of(options, directory / "model", tiny.LENGTH, **(NARROW if quick else {}))
            worker = tiny.worker_of(tiny.policy_config(model, micro_batch=4, backend=BACKEND))
            work = Work(tiny.ROWS, 8)
            step_of(worker, batch_of(model, work), work.rows)()
            yield worker, CheckpointManager({"checkpoint_dir": directory / BACKEND}), directory
            worker.backend.close()
        finally:
            dist.destroy_process_group()


def _save(worker: Any, manager: CheckpointManager, step: int) -> Path:
    """Write a checkpoint as a run does: begin, write, sync, hash and rename it. Return its path."""
    path = manager.init_tmp_checkpoint(step, {"step": step, "sampler": {}})
    worker.save_checkpoint(*_parts_of(path))
    return manager.finalize_checkpoint(path)


def _begin(
    worker: Any, manager: CheckpointManager, memory: OwnMemory, step: int, needed: int
) -> tuple[Path, OwnWrite]:
    """Begin an asynchronous save, up to where a run continues training. Return the checkpoint's path and the
    write in progress."""
    path = manager.init_tmp_checkpoint(step, {"step": step, "sampler": {}})
    assert memory.take(needed), f"there is no memory for {needed} bytes"
    worker.save_checkpoint(*_parts_of(memory.directories("actor")))
    memory.hold()
    return path, memory.write(path)


def _parts_of(checkpoint: Path) -> tuple[str, str]:
    """Return the directories of the weights and the optimizer in a checkpoint."""
    return str(checkpoint / "policy" / "weights"), str(checkpoint / "policy" / "optimizer")


def _content_of(checkpoint: Path) -> bytes:
    """Return the bytes of all files of a checkpoint, concatenated."""
    return b"".join(path.read_bytes() for path in sorted(checkpoint.rglob("*")) if path.is_file())
