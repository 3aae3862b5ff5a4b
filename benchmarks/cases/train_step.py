"""A training step of a real worker against a plain loop on transformers with fused Adam, and against torch's
FSDP2 on as many ranks.

Weights, data, micro-batches and optimizer are the same. In ``weights``, five million weights process 1,024
tokens in eight micro-batches, so that the cost per weight and per call dominates, on one rank and in each
layout of two. In ``tokens``, half a million weights process 2,048 tokens, on one rank. On two ranks the
worker and FSDP2 have two cores and the plain loop has one, so the core-seconds show the overhead of dividing
the work.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.options import ONE_RANK, Layout, Options
from benchmarks.point import Point

if TYPE_CHECKING:
    from benchmarks.subject import Work

BACKENDS = ("megatron", "dtensor", "fsdp1")
LAYOUTS = (ONE_RANK, Layout(tp=2), Layout(dp=2), Layout(pp=2))


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """Yield one point for each size, backend, layout and number of micro-batches."""
    from benchmarks.ranks import Ranks
    from benchmarks.steps import compare_steps, metrics_of
    from benchmarks.subject import batch_of, config_of, fits, policy_of

    repeats = 2 if quick else 3
    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        for size, model, works in _sizes(quick, options, Path(directory)):
            for backend in BACKENDS:
                # With the size "tokens" one layout is enough: layouts differ most in what is paid per weight
                # and per call.
                for layout in (
                    (options.layout,) if options.layout else LAYOUTS[:1] if size == "tokens" else LAYOUTS
                ):
                    for work in works:
                        if not fits(backend, work, layout) or layout.ranks > ranks.most:
                            continue
                        policy = policy_of(model, backend, work, layout, options.device)
                        measured = ranks.run(
                            layout.ranks,
                            compare_steps,
                            policy,
                            work,
                            layout,
                            ("bare", "fsdp2"),
                            repeats,
                            options.device,
                        )
                        parameters = {
                            "size": size,
                            "backend": backend,
                            "layout": str(layout),
                            "micro_batches": work.micro_batches,
                        }
                        lengths = batch_of(model, work)["input_lengths"].tolist()
                        metrics = metrics_of(measured, config_of(model), lengths, options.device)
                        yield Point({**parameters, "tokens": work.rows * work.length}, metrics)


def _sizes(quick: bool, options: Options, directory: Path) -> Iterator[tuple[str, Path, tuple[Work, ...]]]:
    from benchmarks.subject import NARROW, Work, model_of

    if options.model or options.tokens:
        lengths = options.tokens or (1024,)
        model = model_of(options, directory / "chosen", max(lengths))
        yield "chosen", model, tuple(Work(8, length) for length in lengths)
        return
    yield "weights", model_of(options, directory / "weights", 64), (Work(16, 64, 8),)
    if not quick:
        yield "tokens", model_of(options, directory / "tokens", 64, **NARROW), (Work(32, 64, 1),)
