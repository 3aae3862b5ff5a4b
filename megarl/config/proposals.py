"""Search for changes of keys after which a configuration satisfies all rules at once, among the values that
the violated rules propose."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from megarl.config.nested import put
from megarl.config.sections import Config
from megarl.errors import ConfigError, Violation

Changes = Mapping[str, object]
# Maximum number of validations, each of which takes a few milliseconds.
_MOST_TRIALS = 400
# Maximum number of candidates, of different rules, in one fix.
_MOST_STEPS = 3


Followers = Mapping[str, Sequence[str]]
"""Key -> the keys that are written as a reference to it, and so change with it."""


def valid(
    given: Mapping[str, Any],
    examine: Callable[[Mapping[str, Any]], tuple[Config, list[Violation]]],
    followers: Callable[[], Followers],
) -> Config:
    """Return the configuration with its defaults, or raise its violations with tested proposals.

    Args:
        given: the configuration as plain containers.
        examine: returns a configuration with its defaults, and its violations.
        followers: returns the keys that are written as references to other keys; called only if there are
            violations.

    Raises:
        ConfigError: there are violations; each proposal was tested on the whole configuration.
    """
    completed, violations = examine(given)
    if not violations:
        return completed
    # Only candidates need the references, for which the files are read again.
    follow = followers() if any(violation.candidates for violation in violations) else {}

    def violations_after(changes: Mapping[str, object]) -> list[Violation]:
        raw, pending = dict(given), dict(changes)
        while pending:
            key, value = pending.popitem()
            raw = put(raw, key, value)
            # Keys written as references to this key change with it.
            pending |= {other: value for other in follow.get(key, ()) if other not in changes}
        return examine(raw)[1]

    raise ConfigError(with_proposals(violations, violations_after))


def with_proposals(
    violations: Sequence[Violation], violations_after: Callable[[Changes], Sequence[Violation]]
) -> list[Violation]:
    """Return the violations with fixes that work together: with all of them applied, none of the violated
    keys breaks a rule, and no other key newly breaks one.

    A violation keeps its own fix text if it has no candidates, or if none of them works.

    Args:
        violations: violations of a configuration.
        violations_after: returns the violations that remain after changes of dotted keys.
    """
    search = _Search(violations, violations_after)
    groups: dict[str, Changes] = {}
    for key in dict.fromkeys(violation.key for violation in violations if violation.candidates):
        before = {violation.key for violation in search.after(search.chosen)}
        group = search.settle(key) if key in before else None
        if group is not None:
            # One change may fix several keys, which then have the same fix text.
            gone = before - {violation.key for violation in search.after(search.chosen)}
            groups |= dict.fromkeys(gone, group)
    return [
        dataclasses.replace(violation, fix=_text(violation.key, groups[violation.key]))
        if violation.key in groups
        else violation
        for violation in violations
    ]


def _text(key: str, changes: Changes) -> str:
    if list(changes) == [key]:
        return f"write {json.dumps(changes[key])}"
    return f"write {' and '.join(f'{name}={json.dumps(value)}' for name, value in changes.items())}"


class _Search:
    """Search for changes, which fixes one key after another and keeps the changes found for earlier keys.

    Attributes:
        chosen: changes of all keys that are fixed so far.
    """

    def __init__(
        self, violations: Sequence[Violation], violations_after: Callable[[Changes], Sequence[Violation]]
    ) -> None:
        self.chosen: dict[str, object] = {}
        self._open = {violation.key for violation in violations}
        self._violations_after = violations_after
        # Cache of violations by the changes as JSON; those without changes are known.
        self._known: dict[str, Sequence[Violation]] = {"{}": violations}

    def after(self, changes: Changes) -> Sequence[Violation]:
        """Return the violations that remain after changes; results are cached."""
        name = json.dumps(changes, sort_keys=True)
        if name not in self._known:
            self._known[name] = self._violations_after(changes)
        return self._known[name]

    def settle(self, key: str) -> Changes | None:
        """Fix one key with as few changes as possible, and add them to ``chosen``. Return the changes, or
        None if there are none that work."""
        # Iterative deepening finds the fix with the fewest changes.
        for steps in range(1, _MOST_STEPS + 1):
            found = self._mended(key, self.chosen, steps)
            if found is not None:
                group = {name: value for name, value in found.items() if name not in self.chosen}
                self._open -= {key, *group}
                self.chosen = found
                return group
        return None

    def _mended(self, key: str, changes: dict[str, object], steps: int) -> dict[str, object] | None:
        """Return ``changes`` with at most ``steps`` more changes, after which neither ``key``, nor a changed
        key, nor a key that was valid before breaks a rule; None if there are no such changes."""
        if len(self._known) > _MOST_TRIALS:
            return None
        # Ignore violations of keys that are still to be fixed.
        tolerated = self._open - {key, *changes}
        faults = [violation for violation in self.after(changes) if violation.key not in tolerated]
        if not faults:
            return changes
        if steps:
            for candidate in _candidates(faults, faults[0].key):
                if candidate.keys().isdisjoint(changes):
                    found = self._mended(key, {**changes, **candidate}, steps - 1)
                    if found is not None:
                        return found
        return None


def _candidates(faults: Collection[Violation], key: str) -> Iterator[Changes]:
    """Yield the candidate fixes in all violations of a key."""
    for fault in faults:
        if fault.key == key:
            yield from fault.candidates
