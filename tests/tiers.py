"""The tiers of the tests: what runs by default, and in which part of ``--all`` the rest runs.

A test belongs to the default tier unless it is marked ``slow``. A test over many parameters is marked
``sampled``: the default tier runs few of its cases, chosen by a seed that changes with every commit, and
``--all`` runs every one. See ``tests/README.md``.
"""

from __future__ import annotations

import itertools
import random
import subprocess
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from megarl import env
from tests.parts import OF_NEWEST, PARTS, Part

ROOT = Path(__file__).parents[1]
SEED_VARIABLE = "MEGARL_TEST_SEED"

slow = pytest.mark.slow
"""Leaves a test, or some of its parameters, to ``--all``."""
newest_megatron = pytest.mark.newest_megatron
"""Runs a test on the newest Megatron-Core as well; with keywords, only where each parameter named has one of
the values given."""


def sampled(cover: str | int, **always: Sequence[Any]) -> pytest.MarkDecorator:
    """Mark a parametrized test of which the default tier runs a sample.

    Args:
        cover: ``"values"``: each value of each parameter is in some case of the sample. ``"pairs"``: any two
            values of two parameters that some case has together are together in a case of the sample. A
            number: as many cases as that, with as many values among them as they can have.
        always: names of parameters with values whose cases are always in the sample.
    """
    if not (cover in {"values", "pairs"} or (isinstance(cover, int) and cover > 0)):
        raise ValueError(f"sampled({cover!r}): 'values', 'pairs' or a number of cases is wanted")
    return pytest.mark.sampled(cover=cover, always=always)


def sample_seed() -> int:
    """The seed of the samples: ``MEGARL_TEST_SEED``, else the number of commits, so that every commit tries
    other cases."""
    if env.text(SEED_VARIABLE):
        return env.integer(SEED_VARIABLE, 0)
    command = ["git", "rev-list", "--count", "HEAD"]
    counted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return int(counted.stdout) if counted.returncode == 0 else 0


def sample(
    rows: Sequence[Mapping[str, Any]],
    cover: str | int,
    seed: str,
    always: Mapping[str, Sequence[Any]] | None = None,
) -> set[int]:
    """Indices of the rows that a sample consists of; the same ones for the same seed.

    Args:
        rows: the parameters of each case by name.
        cover, always: as of ``sampled``.
        seed: any text.
    """
    order = list(range(len(rows)))
    random.Random(seed).shuffle(order)
    chosen = {
        index
        for index in order
        if any(rows[index].get(name) in values for name, values in (always or {}).items())
    }
    most = cover if isinstance(cover, int) else len(rows)
    features = [_features(row, cover) for row in rows]
    missing = set().union(*features) - set().union(*(features[index] for index in chosen))
    while missing and len(chosen) < most:
        best = max(order, key=lambda index: len(features[index] & missing))
        missing -= features[best]
        chosen.add(best)
    if isinstance(cover, int):
        chosen.update([index for index in order if index not in chosen][: max(0, most - len(chosen))])
    return chosen


def _features(row: Mapping[str, Any], cover: str | int) -> frozenset[Hashable]:
    values = [(name, repr(value)) for name, value in sorted(row.items())]
    return frozenset(itertools.combinations(values, 2) if cover == "pairs" and len(values) > 1 else values)


def in_default_tier(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """Those of the collected tests that run by default."""
    return _sampled([item for item in items if item.get_closest_marker("slow") is None], seed)


def _sampled(items: Sequence[pytest.Item], seed: int) -> set[pytest.Item]:
    """The tests without those cases of ``sampled`` ones that no sample needs."""
    chosen = set(items)
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("sampled"):
            tests.setdefault(_test(item), []).append(item)
    for name, cases in tests.items():
        mark = cases[0].get_closest_marker("sampled")
        assert mark is not None
        rows = [_parameters(case) for case in cases]
        kept = sample(rows, seed=f"{seed} {name}", **mark.kwargs)
        chosen -= {case for index, case in enumerate(cases) if index not in kept}
    return chosen


def for_newest_megatron(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those of the collected tests that are marked ``newest_megatron``, in the cases that their marks name.

    Raises:
        pytest.UsageError: a mark names values that no case has.
    """
    chosen = [
        item for item in items if any(_fits(item, mark) for mark in item.iter_markers("newest_megatron"))
    ]
    lost = {_test(item) for item in items if item.get_closest_marker("newest_megatron")} - set(
        map(_test, chosen)
    )
    if lost:
        raise pytest.UsageError(
            f"no case has the values in the newest_megatron mark of {', '.join(sorted(lost))}; correct the "
            "mark"
        )
    return chosen


def in_part(items: Sequence[pytest.Item], name: str, seed: int) -> list[pytest.Item]:
    """Those of the collected tests that a part of ``--all`` runs."""
    part = PARTS[name]
    if part.needs in OF_NEWEST:
        marked = for_newest_megatron(items)
        chosen = _sampled(marked, seed)  # slow ones too: nothing else shows them there
        return [item for item in marked if item in chosen and part.has(item.path)]
    default = in_default_tier(items, seed)
    left = [item for item in items if item not in default and part_of(item.path).files == part.files]
    first, every = part.share
    return left[first::every]


def part_of(path: Path) -> Part:
    """The first part of ``--all`` that has a file's tests, those on the newest Megatron-Core apart.

    Raises:
        ValueError: no part has them.
    """
    for part in PARTS.values():
        if part.needs not in OF_NEWEST and part.has(path):
            return part
    raise ValueError(f"{path} is in no part of tests/parts.py; add it to one")


def _fits(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Whether the parameters of a test are among the values that its mark names."""
    parameters = _parameters(item)
    return all(name in parameters and parameters[name] in values for name, values in mark.kwargs.items())


def _parameters(item: pytest.Item) -> Mapping[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _test(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]
