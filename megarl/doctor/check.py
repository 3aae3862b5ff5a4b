"""One result of the doctor."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import partialmethod


class Verdict(Enum):
    """The result of a check; only FAILED keeps megarl from working."""

    OK = "ok"
    ABSENT = "absent"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check.

    Attributes:
        room: kind of the check: ``versions``, ``devices``, ``builds``, ``system``, ``network``, ``cluster``
            or ``storage``.
        name: the thing that was checked.
        verdict: the result.
        found: what was found, with its unit and, if it is insufficient, the bound.
        fix: a command or an instruction; empty if nothing needs to be done.
    """

    room: str
    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of checks, which creates their results."""

    name: str

    def of(self, verdict: Verdict, name: str, found: str, fix: str = "") -> Check:
        """Return a check of this kind."""
        return Check(self.name, name, verdict, found, fix)

    ok = partialmethod(of, Verdict.OK)
    absent = partialmethod(of, Verdict.ABSENT)
    warning = partialmethod(of, Verdict.WARNING)
    failed = partialmethod(of, Verdict.FAILED)
