"""Core-seconds of a training step on 1, 2, 4 and 8 data-parallel ranks against one rank, on the same batch
with equal losses.

A machine of two cores cannot show how fast eight ranks are, but it shows the overhead of dividing the work:
without overhead the core-seconds stay the same. torch's FSDP2 on as many ranks, measured alternately with the
worker, shows the overhead of the usual alternative. The numbers of ranks are measured one after another.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.options import ONE_RANK, Layout, Options
from benchmarks.point import Metric, Point
from benchmarks.steps import TOLERANCE, Measured, compare_steps, difference
from benchmarks.timing import Spent, over_ranks

ROWS = 8


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for each backend and number of ranks. The batch does not grow with the ranks."""
    from benchmarks import tiny
    from benchmarks.ranks import Ranks
    from benchmarks.subject import Work, model_of, policy_of

    repeats = 2 if quick else 3
    work = Work(ROWS, options.tokens[0] if options.tokens else 64)
    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        model = model_of(options, Path(directory) / "model", work.length)
        for backend in tiny.BACKENDS:
            alone: list[Measured] = []
            for layout in (
                ONE_RANK,
                *(Layout(dp=count) for count in ((2,) if quick else (2, 4, 8)) if count <= ranks.most),
            ):
                policy = policy_of(model, backend, work, layout, options.device)
                measured = ranks.run(
                    layout.ranks, compare_steps, policy, work, layout, ("fsdp2",), repeats, options.device
                )
                # The first layout is that of a single rank.
                alone = alone or measured
                yield Point(
                    {"backend": backend, "ranks": layout.ranks}, _metrics(measured, alone, options.device)
                )


def _metrics(ranks: Sequence[Measured], alone: Sequence[Measured], device: str) -> dict[str, Metric]:
    worker, fsdp2 = (_side(ranks, side) for side in ("worker", "fsdp2"))
    single = _side(alone, "worker")
    pairs = zip(ranks[0].losses["worker"], alone[0].losses["worker"], strict=True)
    off = max(difference(ranks, device), *(abs(one - other) / other for one, other in pairs))
    assert off < TOLERANCE[device], f"losses differ by {off:.2e} from those of one rank"
    to_one_rank = Metric.ratio("core-seconds of one rank", worker.cpu, single.cpu)
    if len(ranks) > len(os.sched_getaffinity(0)):
        # With fewer cores than ranks, the machine decides how ranks wait for a core: on two cores the same
        # code took 3.1 and 4.8 times as much.
        to_one_rank = Metric.of(
            "ratio, not judged with fewer cores than ranks, to core-seconds of one rank", to_one_rank.samples
        )
    return {
        "core_seconds_to_one_rank": to_one_rank,
        "fsdp2_core_seconds_to_one_rank": Metric.ratio(
            "core-seconds of torch's FSDP2 on one rank", fsdp2.cpu, _side(alone, "fsdp2").cpu
        ),
        "core_seconds_to_fsdp2": Metric.ratio(
            "core-seconds of torch's FSDP2 on as many ranks", worker.cpu, fsdp2.cpu
        ),
        "wall_to_one_rank": Metric.of(
            "times one rank's wall seconds, with this machine's cores", _over(worker.wall, single.wall)
        ),
        "core_seconds": Metric.of("CPU s", worker.cpu),
        "seconds": Metric.of("s", worker.wall),
        "loss_difference": Metric.of("largest relative difference of the losses of a step", [off]),
    }


def _side(ranks: Sequence[Measured], side: str) -> Spent:
    return over_ranks([rank.spent[side] for rank in ranks])


def _over(one: Sequence[float], other: Sequence[float]) -> list[float]:
    return [here / there for here, there in zip(one, other, strict=True)]
