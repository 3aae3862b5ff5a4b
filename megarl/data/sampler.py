"""The order in which records are used: a pure function of seed and epoch, and a small state that can be saved and resumed."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from megarl.errors import DataError, UnusableCheckpointError


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """A permutation of ``range(size)`` that depends on the arguments alone, not on the Python or library version.

    Fisher-Yates over ``random.Random.random``, whose sequence for a seed Python promises to keep.
    """
    order = list(range(size))
    if shuffle:
        draw = random.Random(f"{seed}:{epoch}").random
        for last in range(size - 1, 0, -1):
            other = int(draw() * (last + 1))
            order[last], order[other] = order[other], order[last]
    return order


class ResumableSampler:
    """Hands out record indices epoch after epoch; every record once an epoch.

    A batch may run over the end of an epoch. The state is small JSON; after ``load_state`` the next index is exactly the one that would
    have come next.
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True, data_fingerprint: str = "") -> None:
        """Args:
            size: number of records, 1 or more.
            seed: the run's seed.
            shuffle: False keeps the stored order in every epoch.
            data_fingerprint: digest of the records, kept in the state and compared on resume.

        Raises:
            DataError: there are no records.
        """
        if size < 1:
            raise DataError(f"a sampler over {size} records has nothing to hand out, at least 1 is needed. Fix: give data with records")
        self.size = size
        self._identity = {"size": size, "seed": seed, "shuffle": shuffle, "data_fingerprint": data_fingerprint}
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = epoch_order(size, seed, 0, shuffle)

    @property
    def epoch(self) -> int:
        """Epochs that are finished."""
        return self._epoch

    def take(self, count: int) -> list[int]:
        """The next ``count`` indices."""
        taken: list[int] = []
        while len(taken) < count:
            chunk = self._order[self._position : self._position + count - len(taken)]
            taken += chunk
            self._position += len(chunk)
            if self._position == self.size:
                self._go_to(self._epoch + 1, 0)
        return taken

    def state(self) -> dict[str, Any]:
        """JSON-ready state: where the next index stands, and what the order was made from."""
        return {**self._identity, "epoch": self._epoch, "position": self._position}

    def differs_in(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Return what differs in a state of other data or another order: name to (value here, value there); empty where it is of these."""
        return {key: (value, state.get(key)) for key, value in self._identity.items() if state.get(key) != value}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go to the place that ``state()`` described.

        Raises:
            UnusableCheckpointError: the state is of other data, another seed or another shuffling, or is broken.
        """
        for key, (here, there) in self.differs_in(state).items():
            raise UnusableCheckpointError(
                f"the checkpoint's sampler has {key} = {there!r}, this run has {here!r}; the data order would differ. "
                "Fix: resume with the same data, seed and shuffle, start in a new run_dir, or begin other data with "
                "checkpointing.accept_changes=true"
            )
        epoch, position = state.get("epoch"), state.get("position")
        if not isinstance(epoch, int) or not isinstance(position, int) or epoch < 0 or not 0 <= position < self.size:
            raise UnusableCheckpointError(
                f"the checkpoint's sampler stands at epoch {epoch!r}, position {position!r}; expected epoch >= 0 and position in "
                f"[0, {self.size}). Fix: resume from an earlier checkpoint"
            )
        self._go_to(epoch, position)

    def _go_to(self, epoch: int, position: int) -> None:
        if epoch != self._epoch:
            self._order = epoch_order(self.size, self._seed, epoch, self._shuffle)
        self._epoch, self._position = epoch, position
