"""The page of evidence, made from ``tests/data/evidence.yaml``: ``python -m tests.evidence`` writes
``tests/EVIDENCE.md``.

A row names the tests that show its claim. ``unit/test_evidence.py`` refuses a page that is out of date, or
names a test that is not there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).parent
PAGE = TESTS / "EVIDENCE.md"
_FILE = re.compile(r"`((?:unit|dist|system|launch)/test_[\w{},*-]+\.py)`")


def tables() -> dict[str, Any]:
    """Return the tables by their titles, each with ``intro``, ``columns`` and ``rows``."""
    found: dict[str, Any] = yaml.safe_load((TESTS / "data/evidence.yaml").read_text(encoding="utf-8"))
    return found


def page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Evidence",
        "",
        (
            "Written by `python -m tests.evidence` from `tests/data/evidence.yaml`. Shown on CPUs over gloo, "
            "unless a row says otherwise."
        ),
    ]
    for title, table in tables().items():
        lines += ["", f"## {title}", "", table["intro"], ""]
        for cells in (table["columns"], ["---"] * len(table["columns"]), *table["rows"]):
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def named_tests() -> Iterator[str]:
    """Yield the files of tests that the page names, as patterns below ``tests/``."""
    for name in _FILE.findall(page()):
        before, _, rest = name.partition("{")
        choices, _, after = rest.partition("}")
        yield from (f"{before}{choice}{after}" for choice in choices.split(",")) if rest else [name]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
