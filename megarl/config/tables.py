"""JSON tables that ship with this package and are read on import."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def _read(name: str) -> Mapping[str, dict[str, Any]]:
    found: Mapping[str, dict[str, Any]] = json.loads(
        Path(__file__).with_name(name).read_text(encoding="utf-8")
    )
    return found


KNOWN_MODELS = _read("known_models.json")
"""Published sizes of popular models: the content of ``config.json`` by Hugging Face id, reduced to what the
rules, the memory plan and the converters read. A dry run uses them before anything is downloaded."""
FOREIGN_KEYS: Mapping[str, Mapping[str, str]] = _read("other_trainers.json")
"""Dotted keys of each other trainer, or earlier megarl. Each maps to a megarl key with the same value, or to
a sentence. ``{value}`` stands for the key's value, ``{algorithm}`` for the section of the run's algorithm."""
