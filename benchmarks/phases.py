"""Phases of a step in wall and CPU seconds; what no phase covers is the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.timing import Spent

STEP, REST = "step", "rest"


class Phases:
    """Phases of many steps. Phases of one step that have the same name are added up; they do not contain one
    another.

    Args:
        names: of all phases; those that a step does not have take no time.
    """

    def __init__(self, *names: str) -> None:
        self.spent = {name: Spent() for name in (STEP, *names, REST)}
        self._names = names
        self._open: dict[str, Spent] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a block; names that are no phase count as rest."""
        with self._open.setdefault(name, Spent()).repeat():
            yield

    def passed(self, sequences: object) -> None:
        """A driver's timer counts the sequences of a phase here; a benchmark knows them."""

    @contextlib.contextmanager
    def step(self, counts: bool = True) -> Iterator[None]:
        """Time a whole step, and give its phases out to their lists."""
        self._open = {}
        whole = Spent()
        with whole.repeat():
            yield
        if counts:
            self._add(whole)

    def _add(self, whole: Spent) -> None:
        for kind in ("wall", "cpu"):
            [taken] = getattr(whole, kind)
            of_phases = [sum(getattr(self._open.get(name, Spent()), kind)) for name in self._names]
            for name, seconds in zip(
                (STEP, *self._names, REST), (taken, *of_phases, taken - sum(of_phases)), strict=True
            ):
                getattr(self.spent[name], kind).append(seconds)
