"""Which parametrisations of a dear test run: few always, all of them with ``MEGARL_TEST_SLOW=1``, fewer again on the newest Megatron-Core
(``--newest-megatron``).

The parity fuzzer goes through the same products at random, so that what is left out is not left alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest

from megarl import env

slow = pytest.mark.skipif(not env.flag("MEGARL_TEST_SLOW"), reason="MEGARL_TEST_SLOW=1 runs it")
# Runs again where the newest Megatron-Core is installed; with keywords, only where each parameter named has one of the values given.
newest_megatron = pytest.mark.newest_megatron


def pairs_covered(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few rows of the product of ``axes`` among which any two values of different axes stand together at least once.

    As many rows as the two longest axes have pairs, or a few more; the same ones in every process.
    """
    pairs_of = {row: frozenset(itertools.combinations(enumerate(row), 2)) for row in itertools.product(*map(tuple, axes))}
    missing = set().union(*pairs_of.values())
    chosen = []
    while missing:
        best = max(pairs_of, key=lambda row: len(pairs_of[row] & missing))
        missing -= pairs_of[best]
        chosen.append(best)
    return chosen


def each_value(*axes: Iterable[Any]) -> list[tuple[Any, ...]]:
    """Few rows of the product of ``axes``, as many as the longest has values: each value of each axis stands in one of them at least."""
    values = [tuple(axis) for axis in axes]
    return [tuple(axis[number % len(axis)] for axis in values) for number in range(max(map(len, values)))]


def rest_is_slow(chosen: Iterable[tuple[Any, ...]], everything: Iterable[tuple[Any, ...]]) -> list[Any]:
    """Parameters for ``pytest.mark.parametrize``: ``everything``, of which all that is not ``chosen`` is slow.

    Raises:
        ValueError: something is chosen that does not exist, and so would never run.
    """
    rows, wanted = list(everything), set(chosen)
    if not wanted <= set(rows):
        raise ValueError(f"chosen, but none of the cases: {sorted(map(str, wanted - set(rows)))}; choose from the cases")
    return [pytest.param(*row, id="-".join(map(str, row)), marks=() if row in wanted else slow) for row in rows]
