"""Options of cases that can be measured in more than one size: device, model, layout, tokens, rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import prod

AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Number of ranks on each parallel axis."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Number of ranks of the whole job."""
        return prod(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        """Return the axes that have more than one rank, in the notation of the command line."""
        return (
            ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
            or "one rank"
        )


ONE_RANK = Layout()


def layout_of(text: str) -> Layout:
    """Parse a layout such as ``tp=2,pp=2``; axes that are not named have one rank.

    Raises:
        ValueError: an axis or a number is invalid.
    """
    parts = [part.strip() for part in text.split(",")]
    found: dict[str, int] = {}
    for part in parts:
        matched = re.fullmatch(r"(\w+)=([1-9]\d*)", part)
        if matched is None or matched[1] not in AXES or matched[1] in found:
            raise ValueError(
                f"layout {text!r}: {part!r} is no axis with its ranks. Fix: write each of {', '.join(AXES)} "
                "at most once, as tp=2"
            )
        found[matched[1]] = int(matched[2])
    return Layout(**found)


def numbers_of(text: str) -> tuple[int, ...]:
    """Parse sizes that are separated by commas, such as ``128,512``.

    Raises:
        ValueError: one of them is not a number above 0.
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(
            f"{text!r}: not a list of numbers above 0. Fix: write them with commas between, as 128,512"
        )
    return tuple(int(word) for word in text.split(","))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run of cases. The case decides on options that are None.

    Attributes:
        device: ``cpu`` or ``cuda``.
        model: a recipe, or a Hugging Face ``config.json`` or its directory; the case creates a model with
            random weights from it.
        layout: the only layout to measure.
        tokens: lengths of sequences.
        rows: numbers of rows of data.
    """

    device: str = "cpu"
    model: str | None = None
    layout: Layout | None = None
    tokens: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @property
    def chosen(self) -> list[str]:
        """Names of the options that are set."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


AS_EACH_CASE_HAS_IT = Options()
