"""Deadlines of the calls of workers, by phase: bounds that follow from how long a phase has taken, and where a run is when one is late."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

STEP, LOGPROBS, GENERATE, SAVE, LOAD, REFIT, VALIDATE = "step", "logprobs", "generate", "save", "load", "refit", "validate"
PHASES = (STEP, LOGPROBS, GENERATE, SAVE, LOAD, REFIT, VALIDATE)
"""Phases that have a deadline of their own, ``deadlines.PHASE_s``."""

_PHASE_OF: Mapping[str, str] = MappingProxyType(
    {
        "train": STEP,
        "get_logprobs": LOGPROBS,
        "get_reference_policy_logprobs": LOGPROBS,
        "get_topk_logits": LOGPROBS,
        "get_values": LOGPROBS,
        "generate": GENERATE,
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
_VALIDATED = (STEP, LOGPROBS, GENERATE)
_REMEMBERED = 10
_NAMES = {STEP: "train"}


@dataclass
class RunPosition:
    """Where the driver of a run is; for the messages of workers that fail or are late.

    Attributes:
        step: number of the step that it is in; None before the first one, and without a run.
        validates: it is in a validation, whose batches have other sizes than those of training.
    """

    step: int | None = None
    validates: bool = False


position = RunPosition()
"""Of this process, which drives one run at a time."""


@contextlib.contextmanager
def at_step(step: int) -> Iterator[None]:
    """Inside, what fails has failed in this step."""
    before, position.step = position.step, step
    try:
        yield
    finally:
        position.step = before


@contextlib.contextmanager
def validating() -> Iterator[None]:
    """Inside, the calls of workers belong to a validation."""
    before, position.validates = position.validates, True
    try:
        yield
    finally:
        position.validates = before


@dataclass
class Call:
    """A call of workers that is under way.

    Attributes:
        method: of the workers; "" where nobody knows it.
        phase: of the run; the method's name where it belongs to none.
        step: in which it was made; None outside of the steps.
        begun: monotonic seconds.
    """

    method: str
    phase: str
    step: int | None = None
    begun: float = field(default_factory=time.monotonic)

    @classmethod
    def of(cls, method: str) -> Call:
        """One that begins now, where the run is now."""
        phase = _PHASE_OF.get(method, method)
        return cls(method, VALIDATE if position.validates and phase in _VALIDATED else phase, position.step)

    def __str__(self) -> str:
        """For example ``train, step 12``, ``generate (validation), step 12``, ``save_checkpoint, step 12``."""
        name = _NAMES.get(self.phase, self.phase)
        parts = [name if self.phase != VALIDATE else f"{_NAMES.get(_PHASE_OF[self.method], _PHASE_OF[self.method])} (validation)"]
        if self.step is not None:
            parts.append(f"step {self.step}")
        return ", ".join(parts)


class PhaseDeadlines:
    """How long a call may take: ``multiple`` times the slowest of the last ten of its phase, at least ``least_s``, at most the limit of the
    phase.

    A phase that was not gone through yet has its limit: nothing is known of it. Other methods than those of phases have that of a step.

    Args:
        limits: seconds by phase; one that is absent has the limit of a step.
        least_s, multiple: see above.
    """

    def __init__(self, limits: Mapping[str, float], least_s: float, multiple: float) -> None:
        self._limits, self._least_s, self._multiple = dict(limits), least_s, multiple
        self._last: dict[str, deque[float]] = {}
        self._counted: dict[str, Call] = {}

    @classmethod
    def of(cls, section: Mapping[str, float]) -> PhaseDeadlines:
        """As the section ``deadlines`` of a configuration says."""
        return cls({phase: section[f"{phase}_s"] for phase in PHASES}, section["least_s"], section["multiple"])

    @property
    def longest_s(self) -> float:
        """What no call may exceed, seconds."""
        return max(self._limits.values())

    @property
    def look_s(self) -> float:
        """After how many seconds without an answer somebody looks whether the processes still run."""
        return self._least_s

    def bound_s(self, call: Call) -> float:
        """What a call may take, seconds from its beginning on."""
        limit = self._limits.get(call.phase, self._limits[STEP])
        last = self._last.get(call.phase)
        return min(max(self._least_s, self._multiple * max(last)), limit) if last else limit

    def took(self, call: Call, seconds: float) -> None:
        """Note what a call took that went well; one that is waited for in parts counts once."""
        last = self._last.setdefault(call.phase, deque(maxlen=_REMEMBERED))
        if self._counted.get(call.phase) is call:
            last[-1] = max(last[-1], seconds)
        else:
            last.append(seconds)
        self._counted[call.phase] = call
