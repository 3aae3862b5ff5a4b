"""Sources of data, as the configuration reads them: one or a list, the sets known by name, and keys that go into objects and lists."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

NAMED_SETS: Mapping[str, str] = MappingProxyType(
    {
        "gsm8k": "megarl.data.sets.gsm8k",
        "DAPOMath17K": "megarl.data.sets.dapo_math",
        "DAPOMathAIME2024": "megarl.data.sets.dapo_aime_2024",
        "AIME2024": "megarl.data.sets.aime_2024",
        "AIME2025": "megarl.data.sets.aime_2025",
        "AIME2026": "megarl.data.sets.aime_2026",
        "DeepScaler": "megarl.data.sets.deepscaler",
        "OpenMathInstruct-2": "megarl.data.sets.openmathinstruct_2",
    }
)
"""Modules of the sets that need no keys, by the name that a source has for them. NeMo-RL's names, where it has the set."""

FILE_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson", ".parquet", ".csv", ".tsv"})
"""Endings of a path that is a file for certain: it has neither subset nor split."""

DEFAULT_CACHE_GIB = 100.0
"""Most GiB of tokenized records that are kept for the next start."""

FIELD_KEYS = ("prompt_key", "answer_key", "messages_key", "tools_key", "system_key")
PAIR_KEYS = ("chosen_key", "rejected_key")
PLACE_KEYS = ("path", "name")
_OF_ONE_PLACE = frozenset({*PLACE_KEYS, "subset", "split", *FIELD_KEYS, *PAIR_KEYS, "extra_keys"})
"""Keys of a source that say nothing about the records of another place."""

_STEP = re.compile(r"(?:(?:^|\.)([^.\[\]]+))|\[(-?\d+)\]")


def sources_of(data: Mapping[str, Any], key: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The sources of ``train`` or ``validation`` in a ``data`` section, each with its dotted path in the configuration; none for null."""
    value = data.get(key)
    if isinstance(value, Mapping):
        yield f"data.{key}", value
    elif isinstance(value, list):
        yield from ((f"data.{key}.{place}", source) for place, source in enumerate(value) if isinstance(source, Mapping))


def set_module(source: Mapping[str, Any]) -> str | None:
    """Module of the named set that a source means: one that gives the keys of fields itself is no named set."""
    own_keys = any(source.get(key) is not None for key in ("prompt_key", "messages_key", *PAIR_KEYS))
    return None if own_keys else NAMED_SETS.get(str(source.get("name")))


def is_file(path: str) -> bool:
    """Whether a path says by its ending that it is a file."""
    return Path(path).suffix.lower() in FILE_SUFFIXES


def replaced_keys(written: Mapping[str, Any]) -> frozenset[str]:
    """Return the keys of an inherited source that a source written over it replaces without naming them.

    Another place has other fields; a conversation takes the place of a prompt with an answer, and a prompt that of a
    conversation.
    """
    replaced = set[str]()
    if any(written.get(key) is not None for key in PLACE_KEYS):
        replaced |= _OF_ONE_PLACE
    if written.get("messages_key") is not None:
        replaced |= {"prompt_key", "answer_key"}
    if written.get("prompt_key") is not None:
        replaced.add("messages_key")
    return frozenset(replaced - written.keys())


def fields_of_key(value: str | Sequence[str]) -> Sequence[str]:
    """Return the fields that ``prompt_key`` or ``answer_key`` names: one, or several."""
    return [value] if isinstance(value, str) else value


def key_steps(path: str) -> tuple[str | int, ...] | None:
    """The steps of a key such as ``reward_model.ground_truth`` or ``prompt[0].content``: names of fields and places in lists.

    None for a text that is no such key.
    """
    steps: list[str | int] = []
    place = 0
    while place < len(path):
        match = _STEP.match(path, place)
        if match is None or (place == 0 and match[1] is None):
            return None
        steps.append(match[1] if match[1] is not None else int(match[2]))
        place = match.end()
    return tuple(steps) or None
