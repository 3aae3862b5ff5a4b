"""Deadlines of worker calls, by phase of a run. A time limit follows from how long the phase has taken
before. Also tracks the run's current step, for messages about late calls."""

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
"""Phases with their own deadline, the configuration key ``deadlines.PHASE_s``."""

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
# Phases whose calls take another time in validation, because they process its batches. A save or a refit does
# not.
_VALIDATED = (STEP, LOGPROBS, GENERATE)
# Number of a phase's last durations that determine its limit.
_REMEMBERED = 10
# Names of phases in messages, where they differ from the configuration's.
_NAMES = {STEP: "train"}


@dataclass
class RunPosition:
    """The current step of the driver's run, for messages about workers that fail or are late.

    Attributes:
        step: number of the current step; None before the first step, and without a run.
    """

    step: int | None = None


position = RunPosition()
"""Current step of the run that this process drives. A process drives only one run at a time."""
# Set while this thread validates. A context variable, because another thread may train meanwhile.
_validates = ContextVar("validates", default=False)


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """Set the current step inside the block, so that messages name it."""
    before, position.step = position.step, step
    try:
        yield
    finally:
        position.step = before


@contextlib.contextmanager
def validating() -> Iterator[None]:
    """Assign worker calls that this thread makes inside the block to the phase ``validate``."""
    token = _validates.set(True)
    try:
        yield
    finally:
        _validates.reset(token)


@dataclass
class Call:
    """A call of workers that has not returned yet.

    Attributes:
        method: method of the workers; "" if unknown.
        phase: phase of the run; the method's name if it belongs to no phase.
        step: step in which the call was made; None outside steps.
        begun: start time in monotonic seconds.
    """

    method: str
    phase: str
    step: int | None = None
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, method: str) -> Call:
        """Return a call that starts now, in the current step."""
        phase = _PHASE_OF.get(method, method)
        return cls(method, VALIDATE if _validates.get() and phase in _VALIDATED else phase, position.step)

    def __str__(self) -> str:
        """Return a description such as ``train, step 12``, ``generate (validation), step 12`` or
        ``save_checkpoint, step 12``."""
        validates = self.phase == VALIDATE
        phase = _PHASE_OF[self.method] if validates else self.phase
        name = f"{_NAMES.get(phase, phase)}{' (validation)' if validates else ''}"
        return name if self.step is None else f"{name}, step {self.step}"


@dataclass
class _Durations:
    """Durations of the calls of a phase, in seconds.

    Attributes:
        last: the last ten durations.
        first: for each method, the slowest first call of new workers, which includes compiling, allocating
            and connecting.
    """

    last: deque[float] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    first: dict[str, float] = field(default_factory=dict)


_Measured = dict[str, _Durations]
_kept: dict[str, _Measured] | None = None


@contextlib.contextmanager
def keeping_durations() -> Iterator[None]:
    """Pass measured durations on to later worker groups of the same name inside the block. It encloses one
    launch, in which a group of workers may be rebuilt."""
    global _kept
    # Start without durations, because another launch may have other models and batch sizes.
    before, _kept = _kept, {}
    try:
        yield
    finally:
        _kept = before


class PhaseDeadlines:
    """Time limits of calls. The limit is ``multiple`` times the slowest of the phase's last ten calls, at
    least ``least_s`` and at most the configured limit of the phase.

    The first call of each method of new workers has its own limit, because workers compile and allocate in
    it, which may take many times as long as later calls. If earlier workers' first calls were measured, these
    count as well. If none was measured, the limit is ``first_s``, or the configured limit of the phase if
    less. ``least_s`` would end healthy runs there, and workers that make no progress are noticed after
    ``look_s`` in any case. A method that belongs to no phase has the limit of a step.

    Args:
        limits: configured limit of each phase in seconds; an absent phase has the limit of a step.
        least_s, multiple, first_s: see above.
        measured: durations of earlier workers, updated in place; None if there are none.
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
        """Build the time limits from the ``deadlines`` section of a configuration.

        Args:
            section: the ``deadlines`` section.
            name: name of the worker group, under which ``keeping_durations`` stores measured durations; ""
                stores none.
        """
        # Groups of the same name share this dictionary, so that measurements of new workers count at once.
        measured = _kept.setdefault(name, {}) if _kept is not None and name else None
        limits = {phase: at(section, f"{phase}_s") for phase in PHASES}
        return cls(limits, section["least_s"], section["multiple"], section["first_s"], measured)

    @property
    def longest_s(self) -> float:
        """The longest configured limit of any phase, in seconds."""
        return max(self._limits.values())

    @property
    def look_s(self) -> float:
        """Seconds without a reply after which workers are checked, and their call is aborted if one is
        stopped or none makes progress."""
        return self._least_s

    def new_workers(self) -> None:
        """Treat the workers as new, so that the next call of each method is a first call again."""
        self._seen.clear()
        self._counted.clear()

    def bound_s(self, call: Call) -> float:
        """Return the time limit of a call in seconds from its start."""
        return self._bound(call)[0]

    def key(self, call: Call) -> str:
        """Return the configuration key that determines ``bound_s``, for messages."""
        return f"deadlines.{self._bound(call)[1]}"

    def _bound(self, call: Call) -> tuple[float, str]:
        phase = call.phase if call.phase in self._limits else STEP
        limit = self._limits[phase], f"{phase}_s"
        if not call.method:
            # Without a method name, durations are not measured.
            return limit
        durations = self._measured.get(call.phase, _Durations())
        known = list(durations.last)
        # Look at the method, not the phase: the first training pass compiles, even if other methods of the
        # phase have run.
        if (call.phase, call.method) not in self._seen:
            if call.method not in durations.first:
                return min((self._first_s, "first_s"), limit)
            known.append(durations.first[call.method])
        # Tuples compare by their seconds first, so min and max also select the key of the applicable limit.
        return min(max((self._least_s, "least_s"), (self._multiple * max(known), "multiple")), limit)

    def took(self, call: Call, seconds: float) -> None:
        """Record the duration of a successful call. If a call's results are fetched in parts, it counts
        once."""
        durations = self._measured.setdefault(call.phase, _Durations())
        counted, is_first = self._counted.get(call.phase, (None, False))
        if counted is call:
            # The results of one call are often fetched worker by worker. Count one duration for all of them;
            # otherwise many short ones would reduce the time limit.
            durations.last[-1] = max(durations.last[-1], seconds)
        else:
            durations.last.append(seconds)
            is_first = (call.phase, call.method) not in self._seen
        if is_first:
            durations.first[call.method] = max(durations.first.get(call.method, 0.0), seconds)
        self._seen.add((call.phase, call.method))
        self._counted[call.phase] = call, is_first
