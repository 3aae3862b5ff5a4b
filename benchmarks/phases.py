"""Phases of a step in wall and CPU seconds; time outside of all phases is the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from benchmarks.timing import Spent

STEP, REST = "step", "rest"


class Phases:
    """Phases of many steps. Phases of one step that have the same name are added up; phases must not be
    nested.

    Args:
        names: names of all phases; a phase that a step does not have takes no time.
    """

    def __init__(self, *names: str) -> None:
        self.spent = {name: Spent() for name in (STEP, *names, REST)}
        self._names = names
        self._open: dict[str, Spent] = {}

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as a phase; unknown names count as rest."""
        with self._open.setdefault(name, Spent()).repeat():
            yield

    def passed(self, sequences: object) -> None:
        """Do nothing. A driver's timer counts the sequences of a phase here, but a benchmark knows them."""

    @contextlib.contextmanager
    def step(self, counts: bool = True) -> Iterator[None]:
        """Time a whole step, and if it ``counts``, add its phases to ``spent``."""
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
