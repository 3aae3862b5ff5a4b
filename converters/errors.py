"""Exceptions of the converters."""

from __future__ import annotations

from collections.abc import Sequence


class ConversionError(ValueError):
    """A model, config or checkpoint cannot be converted. The message gives the problem, the findings and the
    fix.

    Attributes:
        what: the problem, in one line.
        details: all findings, reported together.
        fix: how to fix the problem.
        exit_code: exit code of the command.
    """

    exit_code = 2
    shown = 20

    def __init__(self, what: str, fix: str, details: Sequence[str] = ()) -> None:
        self.what = what
        self.fix = fix
        self.details = tuple(details)
        lines = [f"  - {detail}" for detail in self.details[: self.shown]]
        # A wrong config may cause a problem for each of thousands of tensors.
        if len(self.details) > self.shown:
            lines.append(f"  - and {len(self.details) - self.shown} more")
        listing = "\n" + "\n".join(lines) + "\n" if lines else " "
        super().__init__(f"{what}{':' if lines else '.'}{listing}Fix: {fix}")

    def __reduce__(self) -> tuple[type[ConversionError], tuple[str, str, tuple[str, ...]]]:
        # Exceptions are unpickled from their message alone by default, so a worker's error could not reach
        # the driver.
        return type(self), (self.what, self.fix, self.details)


class ChangedSourceError(ConversionError):
    """The source has changed since the conversion was planned, or contradicts its manifest. Unfinished work
    cannot be resumed."""
