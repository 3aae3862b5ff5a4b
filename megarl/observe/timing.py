"""Measure the seconds of each phase of a step, and record the sequences that a phase processed."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megarl.errors import StateError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GENERATION, TRAIN, TRAIN_CRITIC = "generation", "train", "train_critic"
"""Phases whose FLOPs are not those of a forward pass."""

ROLLOUT_WAIT, ENGINE_IDLE = "rollout_wait", "engine_idle"
"""Asynchronous runs: seconds that a step waits for responses of the engines, and seconds that the engines
wait for the step."""


VALIDATION_BESIDE = "validation_beside"
"""Seconds that the engines spend on a validation while a later step trains."""

LOGPROBS, LOGPROBS_BESIDE = "logprobs", "logprobs_beside"
"""Seconds of computing the policy's log-probabilities, and the part of it that overlaps with sampling on
separate engines."""


def beside_training(phases: Collection[str]) -> frozenset[str]:
    """Return the phases that do not add to a step's duration, because they overlap with other phases: work of
    separate engines during training, and of the policy while these engines sample."""
    of_engines = {GENERATION, ENGINE_IDLE, VALIDATION_BESIDE} if ENGINE_IDLE in phases else ()
    return frozenset((LOGPROBS_BESIDE, *of_engines))


STEP_SECONDS = "step_s"
"""Key of the step's total wall time in the result of ``PhaseTimer.collect``."""


@dataclass(frozen=True, slots=True)
class Sequences:
    """Sequences that a phase processed.

    Attributes:
        lengths: [B] int64; number of tokens of each row, prompt and response.
        prompt_lengths: [B] int64; number of prompt tokens of each row. Only for generation.
        prompts: [P] int64; number of tokens of each distinct prompt. Only for generation.
        positions: number of positions computed, including padding; None if not counted.
        scored: number of tokens whose log-probabilities were computed; None if all.
    """

    lengths: NDArray[np.int64]
    prompt_lengths: NDArray[np.int64] | tuple[()] = ()
    prompts: NDArray[np.int64] | tuple[()] = ()
    positions: int | None = None
    scored: int | None = None


class PhaseTimer:
    """Adds up wall time per phase until ``collect`` is called. Not thread-safe.

    Phases may be nested. An inner phase is reported as ``outer/inner`` and is included in its outer phase, so
    the top-level phases add up to at most the step's time.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        on_change: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Args:
        clock: returns monotonic seconds; tests replace it.
        on_change: called with the path of the phase that runs from now on; empty for none."""
        self._clock, self._on_change = clock, on_change
        self._seconds: dict[str, float] = {}
        self._sequences: dict[str, list[Sequences]] = {}
        self._open: list[tuple[str, float]] = []
        self._step_start = clock()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the block as a phase, even if it raises."""
        path = f"{self._open[-1][0]}/{name}" if self._open else name
        self._open.append((path, self._clock()))
        self._on_change(path)
        try:
            yield
        finally:
            path, start = self._open.pop()
            self._add(path, self._clock() - start)
            self._on_change(self._open[-1][0] if self._open else "")

    def passed(self, sequences: Sequences) -> None:
        """Record sequences that the current phase has processed.

        Raises:
            StateError: no phase is open.
        """
        if not self._open:
            raise StateError(
                "sequences are counted for a phase, but no phase is open. Fix: call passed() "
                "inside the block of phase()"
            )
        self._sequences.setdefault(self._open[-1][0], []).append(sequences)

    def merge(self, other: PhaseTimer, seconds: Mapping[str, float]) -> None:
        """Add the phases and sequences of another timer and reset it. Also add ``seconds`` (phase ->
        duration), measured for concurrent work."""
        collected = other.collect()
        # The other timer's total is not a phase.
        del collected[STEP_SECONDS]
        for name, value in {
            **{name.removesuffix("_s"): value for name, value in collected.items()},
            **seconds,
        }.items():
            self._add(name, value)
        self.count(other)

    def count(self, other: PhaseTimer) -> None:
        """Add the sequences of another timer, but not its durations."""
        # Durations of concurrent phases do not add up to the step's time.
        for phase, sequences in other.take_sequences().items():
            self._sequences.setdefault(phase, []).extend(sequences)

    def take_sequences(self) -> dict[str, list[Sequences]]:
        """Return phase -> sequences recorded since the last call, and reset them. An inner phase has the key
        ``outer/inner``."""
        taken, self._sequences = self._sequences, {}
        return taken

    def collect(self) -> dict[str, float]:
        """Return the seconds of each phase since the last call, as ``{"generation_s": ...,
        "train/optimizer_s": ..., "step_s": ...}``, and reset them.

        ``step_s`` is the wall time since the last call. An open phase is split: its time so far is in this
        result, the rest in the next one.
        """
        now = self._clock()
        for path, start in self._open:
            self._add(path, now - start)
        # From now on, an open phase counts for the next step.
        self._open = [(path, now) for path, _ in self._open]
        collected = {f"{path}_s": seconds for path, seconds in self._seconds.items()}
        collected[STEP_SECONDS] = now - self._step_start
        self._seconds = {}
        self._step_start = now
        return collected

    def _add(self, path: str, seconds: float) -> None:
        self._seconds[path] = self._seconds.get(path, 0.0) + seconds
