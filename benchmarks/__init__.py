"""Benchmarks of megarl, as ratios to a limit or a baseline measured in the same run: ``python -m benchmarks
list``.

Each case is one file of ``benchmarks.cases`` and offers ``measure(quick) -> Iterator[Point]``. It alternates
between megarl and its baseline, and checks that their numbers agree. Absolute times differ between machines,
so only the ratios are comparable, and their interpretation is left to the reader.
"""
