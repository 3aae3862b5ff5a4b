"""Deadlines of worker calls, by phase: time limits that follow from how long a phase has taken, and the run's
position when a call is late."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import MappingProxyType

from megarl.config.nested import at
from megarl.config.sections import DeadlinesConfig

STEP, LOGPROBS, GENERATE, SAVE, LOAD, REFIT, VALIDATE = (
    "step",
    "logprobs",
    "generate",
    "save",
    "load",
    "refit",
    "validate",
)
PHASES = (STEP, LOGPROBS, GENERATE, SAVE, LOAD, REFIT, VALIDATE)
"""Phases with a deadline of their own, ``deadlines.PHASE_s``."""

_PHASE_OF: Mapping[str, str] = MappingProxyType(
    {
        "train": STEP,
        "get_logprobs": LOGPROBS,
        "get_reference_policy_logprobs": LOGPROBS,
        "get_topk_logits": LOGPROBS,
        "get_values": LOGPROBS,
        "generate": GENERATE,
        "exchange": GENERATE,
        "save_checkpoint": SAVE,
        "export_hf": SAVE,
        "load_checkpoint": LOAD,
        **dict.fromkeys(
            (
                "prepare_refit_info",
                "mailbox",
                "connect",
                "begin_refit",
                "get_part_ipc_handles",
                "hand_over_weights",
                "update_from_policy",
                "init_collective",
                "broadcast_weights_for_collective",
                "update_from_broadcast",
                "offload_before_refit",
                "offload_after_refit",
            ),
            REFIT,
        ),
    }
)
# Only these phases process batches of a validation; a save or a refit then takes as long as at any other
# time.
_VALIDATED = (STEP, LOGPROBS, GENERATE)
_REMEMBERED = 10
_NAMES = {STEP: "train"}


@dataclass
class RunPosition:
    """The driver's position in a run, for messages about workers that fail or are late.

    Attributes:
        step: number of the current step; None before the first one, and without a run.
    """

    step: int | None = None


position = RunPosition()
"""Position of this process, which drives one run at a time."""
# Batches of a validation have other sizes than those of training. The flag is per thread, because one thread
# may validate while another one trains.
_validates = ContextVar("validates", default=False)


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """Report failures inside the block as failures of this step."""
    before, position.step = position.step, step
    try:
        yield
    finally:
        position.step = before


@contextlib.contextmanager
def validating() -> Iterator[None]:
    """Count worker calls that this thread makes inside the block as calls of a validation."""
    token = _validates.set(True)
    try:
        yield
    finally:
        _validates.reset(token)


@dataclass
class Call:
    """A call of workers that has not returned yet.

    Attributes:
        method: of the workers; "" if unknown.
        phase: of the run; the method's name if it belongs to no phase.
        step: step in which it was made; None outside of the steps.
        begun: monotonic seconds.
    """

    method: str
    phase: str
    step: int | None = None
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, method: str) -> Call:
        """Return a call that begins now, at the run's current position."""
        phase = _PHASE_OF.get(method, method)
        return cls(method, VALIDATE if _validates.get() and phase in _VALIDATED else phase, position.step)

    def __str__(self) -> str:
        """Return for example ``train, step 12``, ``generate (validation), step 12``, ``save_checkpoint, step
        12``."""
        validates = self.phase == VALIDATE
        phase = _PHASE_OF[self.method] if validates else self.phase
        name = f"{_NAMES.get(phase, phase)}{' (validation)' if validates else ''}"
        return name if self.step is None else f"{name}, step {self.step}"


@dataclass
class _Durations:
    """Seconds that the calls of a phase have taken.

    Attributes:
        last: the last ten times.
        first: by method, the slowest first time of new workers, in which they compile, allocate and connect.
    """

    last: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    first: dict[str, float] = field(default_factory=dict)


_Measured = dict[str, _Durations]
_kept: dict[str, _Measured] | None = None


@contextlib.contextmanager
def keeping_durations() -> Iterator[None]:
    """Let a rebuilt group of workers inside the block know how long the phases of the earlier group with its
    name took: both belong to one launch."""
    global _kept
    # Start empty for each launch, because another launch may have other models and batch sizes.
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


class PhaseDeadlines:
    """Time limits of calls: ``multiple`` times the slowest of the last ten of a phase, at least ``least_s``,
    at most the limit of the phase.

    The first call of a method of new workers is timed separately, because workers compile and allocate then,
    which may take many times as long as a usual pass. Its limit is ``multiple`` times the slowest first call
    before, too; if none was measured, ``first_s``, and at most the limit of the phase. A limit of ``least_s``
    would end healthy runs there, and workers without progress are noticed after ``look_s`` anyway. Methods
    that belong to no phase have the limit of a step.

    Args:
        limits: seconds by phase; an absent phase has the limit of a step.
        least_s, multiple, first_s: see above.
        measured: durations of earlier workers, which are taken over and updated; None if there were none.
    """

    def __init__(
        self,
        limits: Mapping[str, float],
        least_s: float,
        multiple: float,
        first_s: float = math.inf,
        measured: _Measured | None = None,
    ) -> None:
        self._limits, self._least_s, self._multiple, self._first_s = dict(limits), least_s, multiple, first_s
        self._measured: _Measured = {} if measured is None else measured
        self._seen: set[tuple[str, str]] = set()
        self._counted: dict[str, tuple[Call, bool]] = {}

    @classmethod
    def of(cls, section: DeadlinesConfig, name: str = "") -> PhaseDeadlines:
        """Return the deadlines of the section ``deadlines`` of a configuration.

        Args:
            section: of the configuration.
            name: of the group of workers, by which ``keeping_durations`` keeps the durations; "" keeps
                nothing.
        """
        # Pass the same dictionary to the next group of this name, so that measurements of the new workers
        # count at once.
        measured = _kept.setdefault(name, {}) if _kept is not None and name else None
        limits = {phase: at(section, f"{phase}_s") for phase in PHASES}
        return cls(limits, section["least_s"], section["multiple"], section["first_s"], measured)

    @property
    def longest_s(self) -> float:
        """Seconds that no call may exceed."""
        return max(self._limits.values())

    @property
    def look_s(self) -> float:
        """Seconds without a reply after which workers are given up if one is stopped, or if all make no
        progress."""
        return self._least_s

    def new_workers(self) -> None:
        """Treat the workers as new: each of their methods is called for the first time again."""
        self._seen.clear()
        self._counted.clear()

    def bound_s(self, call: Call) -> float:
        """Return the seconds that a call may take, from its beginning."""
        return self._bound(call)[0]

    def key(self, call: Call) -> str:
        """Return the configuration key that ``bound_s`` comes from."""
        return f"deadlines.{self._bound(call)[1]}"

    def _bound(self, call: Call) -> tuple[float, str]:
        phase = call.phase if call.phase in self._limits else STEP
        limit = self._limits[phase], f"{phase}_s"
        if not call.method:
            # The durations of such calls are never measured.
            return limit
        durations = self._measured.get(call.phase, _Durations())
        known = list(durations.last)
        # Test by method rather than by phase: the first training pass compiles, even if the phase has run
        # other methods.
        if (call.phase, call.method) not in self._seen:
            if call.method not in durations.first:
                return min((self._first_s, "first_s"), limit)
            known.append(durations.first[call.method])
        # Tuples are compared by their seconds first, and the name of the applicable limit is returned as
        # well.
        return min(max((self._least_s, "least_s"), (self._multiple * max(known), "multiple")), limit)

    def took(self, call: Call, seconds: float) -> None:
        """Record the duration of a successful call; a call that is waited for in parts counts once."""
        durations = self._measured.setdefault(call.phase, _Durations())
        counted, is_first = self._counted.get(call.phase, (None, False))
        if counted is call:
            # Results of one call are often fetched worker by worker. Count them as one duration: many short
            # ones would tighten the time limit.
            durations.last[-1] = max(durations.last[-1], seconds)
        else:
            durations.last.append(seconds)
            is_first = (call.phase, call.method) not in self._seen
        if is_first:
            durations.first[call.method] = max(durations.first.get(call.method, 0.0), seconds)
        self._seen.add((call.phase, call.method))
        self._counted[call.phase] = call, is_first
