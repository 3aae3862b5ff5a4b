"""A training step over the length of its sequences, against a bare loop on transformers and against the shortest length.

The bare loop is the limit at each length. ``growth`` says how many times as much a token costs as in the shortest sequences: above 1 by
attention's square, below where fixed costs are shared by more tokens.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.options import ONE_RANK, Options
from benchmarks.point import Metric, Point, sides
from benchmarks.steps import compare_steps, difference


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Backends x lengths; two rows, one micro-batch."""
    from benchmarks import tiny
    from benchmarks.ranks import Ranks
    from benchmarks.subject import NARROW, Work, batch_of, model_of, policy_of

    lengths = options.tokens or ((64, 128) if quick else (64, 256, 2048))
    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        model = model_of(options, Path(directory) / "model", max(lengths), **NARROW)
        for backend in tiny.BACKENDS:
            first: list[float] = []
            for length in lengths:
                work = Work(2, length)
                policy = policy_of(model, backend, work, device=options.device)
                measured = ranks.run(1, compare_steps, policy, work, ONE_RANK, ("bare",), 2 if quick else 3, options.device)
                spent, tokens = measured[0].spent, int(batch_of(model, work)["input_lengths"].sum())
                a_token = [took / tokens for took in spent["worker"].cpu]
                first = first or a_token
                metrics = sides("step", spent["worker"], "the bare step", spent["bare"])
                metrics["growth"] = Metric.ratio("the cost of a token in the shortest sequences", a_token, first)
                metrics["loss_difference"] = Metric.of("largest relative difference", [difference(measured, options.device)])
                yield Point({"backend": backend, "length": length}, metrics)
