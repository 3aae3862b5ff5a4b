"""Starts programs under the watch of ``sitecustomize``, and reads what it has found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megarl import env


@dataclass(frozen=True, slots=True)
class PickleWatch:
    """What one program and its processes unpickled.

    Attributes:
        directory: where they say it; it has to be there.
    """

    directory: Path

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables of the program."""
        path = os.pathsep.join(
            [str(Path(__file__).parent), str(Path(__file__).parents[2]), env.text("PYTHONPATH", "") or ""]
        )
        return {"PYTHONPATH": path.rstrip(os.pathsep), "MEGARL_TEST_PICKLES": str(self.directory)}

    def watched(self) -> list[str]:
        """Command lines of the processes that were watched."""
        return [path.read_text().strip() for path in self.directory.glob("watched-*")]

    def found(self) -> list[str]:
        """What was unpickled where it should not have been, with the stacks."""
        return [path.read_text() for path in self.directory.glob("unpickled-*")]
