"""Adam in host memory: how many bytes of states it updates per second, against a copy of as many bytes.

A copy reads and writes each byte once. A step does the same with the states, and also reads gradients and
writes weights: if those have 16 bits, 28 bytes cross the bus for the 24 of a copy. States, gradients and
weights are far larger than the caches. Formats below float32, which have fewer bytes, are measured too.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from benchmarks.point import Metric, Point
from benchmarks.timing import spent_in_turn
from megarl.models.engine.host_adam import HostAdam
from megarl.models.engine.low_precision_adam import MOMENTS, Hyperparameters, Shard, StateSettings

FORMATS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("8bit", "8bit"))
CPU = torch.device("cpu")


def measure(quick: bool) -> Iterator[Point]:
    """Yield one point for each format of the moments."""
    count = 2**22 if quick else 2**25
    for formats in FORMATS:
        settings = StateSettings("float32", *formats)
        master = torch.randn(count)
        moments = {name: settings.format_of(name).zeros(count, CPU) for name in MOMENTS}
        shard = Shard("w", 0, master.bfloat16(), torch.randn(count).bfloat16(), moments, master)
        states = [master, *moments.values()]
        # Fill the memory with ones, because the kernel does not allocate pages that were never written.
        source, target = (
            torch.ones(sum(state.nbytes for state in states), dtype=torch.uint8) for _ in range(2)
        )
        numbers = Hyperparameters(1e-4, (0.9, 0.95), 1e-8, 0.1, 1)
        sides = {
            "adam": partial(HostAdam(CPU).step, [(shard, numbers)], settings),
            "copy": partial(target.copy_, source),
        }
        spent = spent_in_turn(sides, repeats=5 if quick else 9)
        adam, copy = spent["adam"], spent["copy"]
        metrics = {
            "of_copy": Metric.ratio("bytes a second of a copy", copy.wall, adam.wall),
            "of_copy_cpu": Metric.ratio("bytes a CPU second of a copy", copy.cpu, adam.cpu),
            "states": Metric.of(
                "GB of states a second", [source.nbytes / seconds / 1e9 for seconds in adam.wall]
            ),
        }
        yield Point(
            {
                "exp_avg": formats[0],
                "exp_avg_sq": formats[1],
                "parameters": count,
                "threads": torch.get_num_threads(),
            },
            metrics,
        )
