"""Plain text tables, and numbers formatted for people."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table with a header, a line and the rows, whose columns are as wide as their widest cell."""
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def number(value: float) -> str:
    """Return a number with four digits, without an exponent if possible."""
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def share(value: float) -> str:
    """Return a share as a signed percentage."""
    return f"{100 * value:+.1f} %"
