"""One answer of the doctor."""

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
    """One thing that was looked at.

    Attributes:
        room: which kind of thing: ``versions``, ``devices``, ``builds``, ``system``, ``network`` or
            ``storage``.
        name: the thing.
        verdict: how it is.
        found: what was found, with its unit and, where it falls short, the bound.
        fix: a command, or what to do; empty where nothing needs doing.
    """

    room: str
    name: str
    verdict: Verdict
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Room:
    """A kind of things that are looked at, which makes their checks."""

    name: str

    def of(self, verdict: Verdict, name: str, found: str, fix: str = "") -> Check:
        """Return the check of a thing."""
        return Check(self.name, name, verdict, found, fix)

    ok = partialmethod(of, Verdict.OK)
    absent = partialmethod(of, Verdict.ABSENT)
    warning = partialmethod(of, Verdict.WARNING)
    failed = partialmethod(of, Verdict.FAILED)
