"""The order in which records are used. It is a pure function of seed and epoch, with a small state for
checkpoints."""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

from megarl.errors import DataError, UnusableCheckpointError


def epoch_order(size: int, seed: int, epoch: int, shuffle: bool = True) -> array[int]:
    """Return a permutation of ``range(size)`` that depends only on the arguments, not on the version of
    Python or a library.

    This is a Fisher-Yates shuffle with ``random.Random.random``, whose sequence for a given seed Python
    guarantees. The result takes 8 bytes per record; a list would take 40.
    """
    order = array("q", range(size))
    if shuffle:
        # A text seed is hashed, so that no two pairs of seed and epoch share an order, as with their sum.
        # shuffle() is avoided: its result may change with Python's version.
        draw = random.Random(f"{seed}:{epoch}").random
        for last in range(size - 1, 0, -1):
            other = int(draw() * (last + 1))
            order[last], order[other] = order[other], order[last]
    return order


class Sampler(ABC):
    """Yields record indices. Its state can be saved and restored between any two indices.

    Attributes:
        identity: everything that determines the order, as JSON types.
    """

    identity: Mapping[str, Any]

    @property
    @abstractmethod
    def epoch(self) -> int:
        """Number of completed passes over all records."""

    @property
    @abstractmethod
    def taken(self) -> int:
        """Number of indices returned so far; this is also the ordinal, from 0, of the next one."""

    @abstractmethod
    def take(self, count: int) -> list[int]:
        """Return the next ``count`` indices."""

    @abstractmethod
    def _place(self) -> dict[str, Any]:
        """Return the current position, to be stored in a checkpoint."""

    @abstractmethod
    def _go_to_place(self, state: Mapping[str, Any]) -> None:
        """Restore a position that ``_place`` returned.

        Raises:
            UnusableCheckpointError: the state is malformed.
        """

    def state(self) -> dict[str, Any]:
        """Return the state as JSON types: ``identity`` and the current position."""
        return {**self.identity, **self._place()}

    def differs_in(self, state: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Compare ``identity`` with that of a state. Return a mapping from each differing name to (value
        here, value there)."""
        return {
            key: (value, state.get(key)) for key, value in self.identity.items() if state.get(key) != value
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state.

        Raises:
            UnusableCheckpointError: the state belongs to other data, weights, seed or shuffling, or is
                malformed.
        """
        for key, (here, there) in self.differs_in(state).items():
            raise UnusableCheckpointError(
                f"the checkpoint's sampler has {key} = {there!r}, this run has {here!r}; the data order "
                "would differ. "
                "Fix: resume with the same data, seed and shuffle, start in a new run_dir, or begin other "
                "data with "
                "checkpointing.accept_changes=true"
            )
        self._go_to_place(state)


class ResumableSampler(Sampler):
    """Yields each record index once per epoch, epoch after epoch. A batch may cross the end of an epoch."""

    def __init__(self, size: int, seed: int, shuffle: bool = True, data_fingerprint: str = "") -> None:
        """Args:
            size: number of records, at least 1.
            seed: seed of the run.
            shuffle: False keeps the stored order in every epoch.
            data_fingerprint: digest of the records, stored in the state and compared on resume.

        Raises:
            DataError: there are no records.
        """
        if size < 1:
            raise DataError(
                f"a sampler has {size} records, at least 1 is needed. Fix: give data with records"
            )
        self.size = size
        self.identity = {"size": size, "seed": seed, "shuffle": shuffle, "data_fingerprint": data_fingerprint}
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = 0
        self._position = 0
        self._order = epoch_order(size, seed, 0, shuffle)

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def taken(self) -> int:
        """Number of indices returned so far."""
        return self._epoch * self.size + self._position

    def go_to(self, taken: int) -> None:
        """Move to the position after ``taken`` indices."""
        self._go_to(*divmod(taken, self.size))

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` indices."""
        taken: list[int] = []
        while len(taken) < count:
            chunk = self._order[self._position : self._position + count - len(taken)]
            taken += chunk
            self._position += len(chunk)
            # Start the next epoch now rather than at the next call, so that a saved position is always below
            # the size.
            if self._position == self.size:
                self._go_to(self._epoch + 1, 0)
        return taken

    def _place(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "position": self._position}

    def _go_to_place(self, state: Mapping[str, Any]) -> None:
        epoch, position = state.get("epoch"), state.get("position")
        if (
            not isinstance(epoch, int)
            or not isinstance(position, int)
            or epoch < 0
            or not 0 <= position < self.size
        ):
            raise UnusableCheckpointError(
                f"the checkpoint's sampler stands at epoch {epoch!r}, position {position!r}; expected epoch "
                ">= 0 and position in "
                f"[0, {self.size}). Fix: resume from an earlier checkpoint"
            )
        self._go_to(epoch, position)

    def _go_to(self, epoch: int, position: int) -> None:
        if epoch != self._epoch:
            self._order = epoch_order(self.size, self._seed, epoch, self._shuffle)
        self._epoch, self._position = epoch, position


class MixtureSampler(Sampler):
    """Mixes several sources by weight. Within a source, each record occurs once per epoch of that source.

    After n indices, a source with share w of the weights has had more than w n - 1 and fewer than w n + 1 of
    them. To achieve this, the next index comes from the source that is due soonest among those that lag
    behind (R. Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980). The choice uses
    integer arithmetic and no random numbers. Indices of consecutive sources are consecutive.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        weights: Sequence[float],
        seed: int,
        shuffle: bool = True,
        data_fingerprint: str = "",
    ) -> None:
        """Args:
            sizes: number of records per source.
            weights: weight per source, above 0. Taken as exact decimals: 0.1 means one tenth, not the nearest
                binary fraction.
            seed: seed of the run.
            shuffle: False keeps the stored order of each source in every epoch.
            data_fingerprint: digest of all records, stored in the state and compared on resume.

        Raises:
            DataError: a source has no records, or a weight is not above 0.
        """
        # repr gives the decimal as written; Fraction(0.1) would be the nearest binary fraction, and shares
        # would drift.
        exact = [Fraction(repr(weight)) for weight in weights]
        if min(exact, default=1) <= 0 or len(exact) != len(sizes):
            raise DataError(
                f"weights {list(weights)} of {len(sizes)} sources: each needs one that is more than 0. Fix: "
                "correct the weights"
            )
        total = sum(exact)
        common = math.lcm(*(weight.denominator for weight in exact)) * total.denominator
        # Integers, so that no share drifts however long the run is.
        self._whole = [int(weight * common) for weight in exact]
        self._total = sum(self._whole)
        self._offsets = [0, *accumulate(sizes)]
        # A different seed per source: two sources of the same size would otherwise have the same order.
        self._samplers = [
            ResumableSampler(size, seed + _APART * place, shuffle, data_fingerprint)
            for place, size in enumerate(sizes)
        ]
        self.identity = {
            "sizes": list(sizes),
            # Normalised, because weights 1 and 2 give the same order as 2 and 4; as text, because JSON has no
            # fractions.
            "weights": [str(weight / total) for weight in exact],
            "seed": seed,
            "shuffle": shuffle,
            "data_fingerprint": data_fingerprint,
        }

    @property
    def epoch(self) -> int:
        """Number of indices returned so far divided by the number of records of all sources, rounded down."""
        return self.taken // self._offsets[-1]

    @property
    def taken(self) -> int:
        """Number of indices returned so far from all sources together."""
        return sum(self._taken())

    def _taken(self) -> list[int]:
        return [sampler.taken for sampler in self._samplers]

    def take(self, count: int) -> list[int]:
        """Return the next ``count`` indices."""
        taken = self._taken()
        number = sum(taken)
        chosen = []
        for _ in range(count):
            number += 1
            source = self._next(number, taken)
            taken[source] += 1
            chosen.append(source)
        drawn = [iter(sampler.take(chosen.count(source))) for source, sampler in enumerate(self._samplers)]
        return [self._offsets[source] + next(drawn[source]) for source in chosen]

    def _next(self, number: int, taken: Sequence[int]) -> int:
        """Return the source of the index with this number, counted from 1.

        With k sources and share w, sources with w n - taken >= 1 / (2k - 2) lag behind; the one with the
        smallest (1 - 1 / (2k - 2) - (w n - taken)) / w is due first. To stay in integers, both sides are
        multiplied by the sum of weights and by 2k - 2.
        """
        if len(taken) == 1:
            return 0
        spread = 2 * len(taken) - 2
        behind = [
            spread * (weight * number - given * self._total)
            for weight, given in zip(self._whole, taken, strict=True)
        ]
        # Never empty: the lags add up to one index, so one of them is at least 1 / k, and k <= 2k - 2 for k
        # >= 2.
        eligible = [source for source, lag in enumerate(behind) if lag >= self._total]
        return min(
            eligible,
            key=lambda source: (
                Fraction((spread - 1) * self._total - behind[source], self._whole[source]),
                source,
            ),
        )

    def _place(self) -> dict[str, Any]:
        return {"taken": self._taken()}

    def _go_to_place(self, state: Mapping[str, Any]) -> None:
        taken = state.get("taken")
        if (
            not isinstance(taken, list)
            or len(taken) != len(self._samplers)
            or not all(type(each) is int and each >= 0 for each in taken)
        ):
            raise UnusableCheckpointError(
                f"the checkpoint's sampler has taken = {taken!r}, expected {len(self._samplers)} whole "
                "numbers of at least 0. "
                "Fix: resume from an earlier checkpoint"
            )
        for sampler, count in zip(self._samplers, taken, strict=True):
            sampler.go_to(count)


# Offset between the seeds of sources, larger than any seed of a run.
_APART = 2**64
