"""What decides about the bytes of a conversion, by name: unfinished work is taken up only where nothing of it has changed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

from converters.manifest import tool_version
from converters.rule import Rule

WEIGHTS = "the weights of the source (name, size or time of change of a file)"
RULES = "the rules of the family (the program, or a --family-file)"
THE_REST = "the program, which lays out the same files otherwise"
"""Name of all that follows from what has a name of its own."""


def fingerprints(facts: Mapping[str, Any]) -> dict[str, str]:
    """A hash of each fact, by its name; facts are what JSON can say."""
    return {name: hashlib.sha256(json.dumps(fact, sort_keys=True, default=str).encode()).hexdigest() for name, fact in facts.items()}


def fingerprint_of_rules(rules: Iterable[Rule]) -> list[str]:
    """Changes when another tensor, or another part of one, would be written in the place of one that is there already."""
    digest = hashlib.sha256()
    for rule in rules:
        digest.update(repr(rule).encode())
    return [tool_version(), digest.hexdigest()]


def changed(before: object, now: Mapping[str, str]) -> list[str]:
    """Names of what differs between two results of :func:`fingerprints`.

    Args:
        before: as an earlier run wrote it down, whatever release that was of.
        now: of this run.
    """
    if not isinstance(before, Mapping):  # one fingerprint of everything
        return [THE_REST]
    names = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
    # the rest follows from the others where one of them has changed
    return [name for name in names if name != THE_REST] or names
