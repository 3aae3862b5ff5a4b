"""How long training stands still for a checkpoint that is written beside it, against one copy of the checkpoint's bytes. One rank.

The stall ends when the tensors lie in shared memory, which the rank has from an earlier save, and the process that writes their files has
opened it. That the checkpoint becomes whole is waited for outside of what is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.checkpoints import BACKEND, alone, bytes_of, content_of, forget, model_of_size, parts_of, save, trained_worker
from benchmarks.options import Options
from benchmarks.point import Metric, Point, sides
from benchmarks.timing import Spent, collector_off

if TYPE_CHECKING:
    from megarl.checkpoint.manager import CheckpointManager
    from megarl.checkpoint.node_memory import OwnMemory, OwnWrite

_LONGEST_S = 120.0


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """One point."""
    import torch

    from megarl.checkpoint.manager import CheckpointManager
    from megarl.checkpoint.node_memory import OwnMemory

    repeats = 1 if quick else 3
    with alone() as directory:
        model = model_of_size(directory / "model", quick, options)
        worker, manager = trained_worker(model), CheckpointManager({"checkpoint_dir": directory / BACKEND})
        memory = OwnMemory(manager.checkpoint_dir)
        content = content_of(save(worker, manager, 1))
        source = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        target = torch.empty_like(source)
        stalls, copies, behind = Spent(), Spent(), []
        with collector_off():
            for turn in range(1 + repeats):
                with stalls.repeat(turn > 0):
                    path, write = _begin(worker, manager, memory, 2 + turn, len(content))
                behind.append(write.wait(_LONGEST_S))
                saved = manager.finalize_checkpoint(path, is_sealed=True)
                manager.verify_checkpoint(saved)
                forget(saved)
                with copies.repeat(turn > 0):
                    target.copy_(source)
        worker.backend.close()
        metrics = {**sides("stall", stalls, "one copy of the bytes", copies), **bytes_of(content)}
        yield Point({"backend": BACKEND}, {**metrics, "behind_seconds": Metric.of("s until all is on the disk", behind[1:])})


def _begin(worker: Any, manager: CheckpointManager, memory: OwnMemory, step: int, needed: int) -> tuple[Path, OwnWrite]:
    """What a run does before it goes on."""
    path = manager.init_tmp_checkpoint(step, {"step": step, "sampler": {}})
    assert memory.take(needed), f"there is no memory for {needed} bytes"
    worker.save_checkpoint(*parts_of(memory.directories("actor")))
    memory.hold()
    return path, memory.write(path)
