"""Result of a check of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partialmethod


class Verdict(Enum):
    """Result of a check. Only FAILED means that megarl cannot work."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """Outcome of one check.

    Attributes:
        room: kind of check: ``versions``, ``devices``, ``builds``, ``system``, ``network``, ``cluster`` or
            ``storage``.
        name: what was checked.
        verdict: result.
        found: what was found, with its unit and, if it is insufficient, the bound.
        fix: command or instruction; empty if nothing needs to be done.
    """

    room: str
    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """Factory for the results of one kind of check."""

    name: str

    def of(self, verdict: Verdict, name: str, found: str, fix: str = "") -> Check:
        """Return a result of this kind."""
        return Check(self.name, name, verdict, found, fix)

    ok = partialmethod(of, Verdict.OK)
    absent = partialmethod(of, Verdict.ABSENT)
    warning = partialmethod(of, Verdict.WARNING)
    failed = partialmethod(of, Verdict.FAILED)
