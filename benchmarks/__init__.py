"""Costs of megarl, as ratios to a limit or a baseline that the same run measures: ``python -m benchmarks
list``.

A case lives in one file of ``benchmarks.cases`` and offers ``measure(quick) -> Iterator[Point]``. It takes
turns between the thing and its baseline, checks their numbers against each other, and leaves judgement of the
ratios to the reader: absolute times differ between machines.
"""
