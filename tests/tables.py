"""Tables of cases that are data: YAML and lines of JSON in ``tests/data``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

DATA = Path(__file__).parent / "data"


def read_table(name: str) -> Any:
    """What a YAML file of ``tests/data`` holds; ``TESTS`` in it is the directory of the tests."""
    text = (DATA / name).read_text(encoding="utf-8")
    return yaml.load(text.replace("TESTS/", f"{DATA.parent}/"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
