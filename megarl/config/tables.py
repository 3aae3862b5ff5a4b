"""JSON tables that are shipped in this package."""

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
"""Hugging Face id of popular models -> the part of their published ``config.json`` that the rules, the
memory plan and the converters read. A dry run needs no download for these models."""
FOREIGN_KEYS: Mapping[str, Mapping[str, str]] = _read("other_trainers.json")
"""Name of another trainer, or of an earlier megarl -> its dotted keys, each with the megarl key of the same
meaning, or with a sentence of advice. ``{value}`` stands for the key's value, ``{algorithm}`` for the section
of the run's algorithm."""
