"""Choices for cases that can be measured in more than one size: device, model, layouts, tokens, rows."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from math import prod

AXES = {"tp": "tensor", "pp": "pipeline", "cp": "context", "dp": "data"}


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks of each parallel axis."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    dp: int = 1

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return prod(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        """Return the axes with more than one rank, as the command line has them."""
        return (
            ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1)
            or "one rank"
        )


ONE_RANK = Layout()


def layout_of(text: str) -> Layout:
    """``tp=2,pp=2``; axes that are not named have one rank.

    Raises:
        ValueError: an axis or a number makes no sense.
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
    """``128,512``: sizes, one after another.

    Raises:
        ValueError: one of them is no number above 0.
    """
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", text):
        raise ValueError(
            f"{text!r}: not a list of numbers above 0. Fix: write them with commas between, as 128,512"
        )
    return tuple(int(word) for word in text.split(","))


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a run of cases; None leaves the choice to the case.

    Attributes:
        device: ``cpu`` or ``cuda``.
        model: a recipe, or a Hugging Face ``config.json`` or its directory, of which a model with random
            weights is made.
        layout: the one layout to measure.
        tokens: lengths of sequences.
        rows: of data.
    """

    device: str = "cpu"
    model: str | None = None
    layout: Layout | None = None
    tokens: tuple[int, ...] | None = None
    rows: tuple[int, ...] | None = None

    @property
    def chosen(self) -> list[str]:
        """Names of the options that are not left to the case."""
        return [field.name for field in fields(self) if getattr(self, field.name) != field.default]


AS_EACH_CASE_HAS_IT = Options()
