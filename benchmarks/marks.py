"""Reasons why a result must not be quoted, derived from the facts in the result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.cases import CASES

# Other programs, such as a shell or a monitor, may keep this many cores busy.
OTHERS = 0.15
# The kernel's one-minute average may exceed the case's own load by this much, if a result does not record
# what other programs used.
ROOM = 0.5


def marks_of(result: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a result must not be quoted; empty if it may be."""
    return [*disturbances_of(result), *(["quick sizes"] if result.get("quick") else [])]


def disturbances_of(result: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a result's numbers are not those of a commit on an idle machine, whatever its
    sizes."""
    failed = [] if result.get("success", True) else ["failed"]
    load = _of_the_load(result)
    return [*failed, *of_no_commit(result), *([load] if load else [])]


def is_loaded(result: Mapping[str, Any]) -> bool:
    """Return whether other programs ran at the same time, so that CPU seconds are more reliable than wall
    seconds."""
    return bool(_of_the_load(result))


def of_no_commit(result: Mapping[str, Any]) -> list[str]:
    """Return the reason why no commit identifies the code that ran; empty if one does."""
    commit = str(result.get("commit", "unknown"))
    if commit == "unknown":
        return ["commit unknown"]
    return ["the tree differed from its commit"] if commit.endswith("+changes") else []


def _of_the_load(result: Mapping[str, Any]) -> str:
    surroundings = result.get("environment", {})
    others = surroundings.get("others")
    if others is not None:
        return f"other programs kept {others:.2f} cores busy, {OTHERS} is the most" if others > OTHERS else ""
    own = CASES[result["case"]].load if result.get("case") in CASES else float(surroundings.get("cores", 2))
    load = max(float(surroundings.get(key, 0.0)) for key in ("load_before", "load_after"))
    return f"load {load:g}, the case's own is {own:g}" if load > own + ROOM else ""
