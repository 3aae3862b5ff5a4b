"""Memory of a process over 200 training steps, against itself after the first 50 and against a bare loop's over as many.

Garbage is collected and free blocks are given back before each look, so that what is left is in use: a list that grows, a graph that is
kept, a group that nobody closes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.options import Options
from benchmarks.point import Metric, Point

if TYPE_CHECKING:
    from benchmarks.subject import Work
    from megarl.models.policy import PolicyConfig

LOOKS = 4


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Backends, one rank."""
    from benchmarks import tiny
    from benchmarks.ranks import Ranks
    from benchmarks.subject import NARROW, Work, model_of, policy_of

    steps = 20 if quick else 200
    work = Work(4, options.tokens[0] if options.tokens else 32)
    with tempfile.TemporaryDirectory() as directory:
        model = model_of(options, Path(directory) / "model", work.length, **NARROW)
        for backend in tiny.BACKENDS:
            # a process of its own, that has allocated nothing for another backend
            with Ranks(options.device) as ranks:
                [seen] = ranks.run(1, _memory, policy_of(model, backend, work, device=options.device), work, steps, options.device)
                yield Point({"backend": backend, "steps": steps}, _metrics(seen))


def _metrics(seen: dict[str, list[float]]) -> dict[str, Metric]:
    return {
        "memory_to_first_quarter": Metric.ratio("the memory after a quarter of the steps", seen["worker"][-1:], seen["worker"][:1]),
        "bare_memory_to_first_quarter": Metric.ratio(
            "the bare loop's memory after a quarter of the steps", seen["bare"][-1:], seen["bare"][:1]
        ),
        "grown": Metric.of("MiB from a quarter of the steps to their end", [seen["worker"][-1] - seen["worker"][0]]),
        "bare_grown": Metric.of("MiB of the bare loop, likewise", [seen["bare"][-1] - seen["bare"][0]]),
        "memory": Metric.of("MiB in use, at each quarter", seen["worker"]),
        "last_quarter_step": Metric.ratio("CPU seconds of the second quarter's steps", seen["last"], seen["second"]),
    }


def _memory(config: PolicyConfig, work: Work, steps: int, device: str) -> dict[str, list[float]]:
    """MiB in use at each quarter of the steps, of the worker's process and then of a bare loop's steps in it; seconds of two quarters."""
    import time

    from benchmarks import tiny
    from benchmarks.bare_loop import BareLoop
    from benchmarks.memory import in_use
    from benchmarks.steps import step_of
    from benchmarks.subject import batch_of

    batch = batch_of(Path(config["model_name"]), work)
    worker = tiny.worker_of(config)
    step = step_of(worker, batch, work.rows)
    seen: dict[str, list[float]] = {"worker": [], "bare": []}
    quarters = []
    for _ in range(LOOKS):
        begun = time.process_time()
        for _ in range(steps // LOOKS):
            step()
        quarters.append(time.process_time() - begun)
        seen["worker"].append(in_use(device))
    worker.backend.close()
    bare = BareLoop(Path(config["model_name"]), work.rows, device)
    for _ in range(LOOKS):
        for _ in range(steps // LOOKS):
            bare.step(batch)
        seen["bare"].append(in_use(device))
    return {**seen, "second": quarters[1:2], "last": quarters[-1:]}
