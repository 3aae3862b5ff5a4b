"""Tables that ship beside this package's code, as JSON, which is read at every start."""

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
"""Published sizes of much-used models: content of ``config.json`` by Hugging Face id, without what neither
the rules, the memory plan nor the converters read. A dry run sizes them before anything is downloaded."""
FOREIGN_KEYS: Mapping[str, Mapping[str, str]] = _read("other_trainers.json")
"""By trainer, or an earlier megarl: its dotted key to megarl's key, of which the value is the same, or to a
sentence. ``{value}`` is what stands at the key, ``{algorithm}`` the section of the run's algorithm."""
