"""Why a result must not be quoted, read from the facts that it states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.cases import CASES

# cores that other programs may have kept busy: a shell, a monitor
OTHERS = 0.15
# what the kernel's one-minute average may say beyond the case's own, where a result does not know what others
# did
ROOM = 0.5


def marks_of(result: Mapping[str, Any]) -> list[str]:
    """Reasons, in words; none for a result that can be quoted."""
    return [*disturbances_of(result), *(["quick sizes"] if result.get("quick") else [])]


def disturbances_of(result: Mapping[str, Any]) -> list[str]:
    """Reasons why its numbers are not those of a commit on an idle machine, whatever the sizes."""
    failed = [] if result.get("success", True) else ["failed"]
    load = _of_the_load(result)
    return [*failed, *of_no_commit(result), *([load] if load else [])]


def is_loaded(result: Mapping[str, Any]) -> bool:
    """Return whether other programs ran beside it, so that CPU seconds say more than wall seconds."""
    return bool(_of_the_load(result))


def of_no_commit(result: Mapping[str, Any]) -> list[str]:
    """The reason why no commit says which code ran, if there is one."""
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
