"""Random faults in many runs, noted in a journal so that a soak that was ended goes on where it was."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.fault import Draw, FaultError


@dataclass(frozen=True, slots=True)
class Entry:
    """A run of a soak that is done.

    Attributes:
        number: of its draw.
        subject: name of its configuration.
        faults: as they are written.
        rows: of the fault matrix, one a fault.
        passed: all that was promised is true.
        said: what happened, or what was not true.
        seconds: that it took.
    """

    number: int
    subject: str
    faults: tuple[str, ...]
    rows: tuple[str, ...]
    passed: bool
    said: str
    seconds: float


class Journal:
    """The file of a soak: a line on what it is, and one for every run that is done.

    Args:
        path: of the file, which need not be there.
        identity: of the soak: seed and configurations; those of another one are refused.

    Raises:
        FaultError: the file is of another soak.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        self._path = path
        self.entries: list[Entry] = []
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        # what was being written when the soak was killed is no entry
        whole = [line for line in lines if line.endswith("\n")]
        if not whole:
            path.write_text("")
            self._append(dict(identity))
            return
        if json.loads(whole[0]) != json.loads(json.dumps(dict(identity))):
            raise FaultError(
                f"{path} is the journal of another soak: {whole[0].strip()}. Fix: the same seed and "
                "configurations, or --work"
            )
        if len(whole) < len(lines):
            os.truncate(path, len("".join(whole).encode()))
        for line in whole[1:]:
            read = json.loads(line)
            self.entries.append(
                Entry(**{**read, "faults": tuple(read["faults"]), "rows": tuple(read["rows"])})
            )

    @property
    def faults(self) -> int:
        """Faults of all runs that are done."""
        return sum(len(entry.faults) for entry in self.entries)

    def add(self, entry: Entry) -> None:
        """Note a run; it is on the disk when this returns."""
        self.entries.append(entry)
        self._append({name: getattr(entry, name) for name in Entry.__slots__})

    def _append(self, line: Mapping[str, Any]) -> None:
        with self._path.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())


def left_to_do(journal: Journal, draws: Iterator[Draw], number_of_faults: int) -> Iterator[Draw]:
    """The draws that are not done, until so many faults have been.

    Args:
        journal: grows while this is gone through.
        draws: all of them, from the first.
        number_of_faults: of the whole soak.
    """
    done = {entry.number for entry in journal.entries}
    for drawn in draws:
        if journal.faults >= number_of_faults:
            return
        if drawn.number not in done:
            yield drawn


def counted(entries: Sequence[Entry]) -> str:
    """A table of faults by kind and configuration: those in runs that passed, of all."""
    subjects = list(dict.fromkeys(entry.subject for entry in entries))
    kinds = sorted({_kind(fault) for entry in entries for fault in entry.faults})
    lines = ["| kind | " + " | ".join(subjects) + " | all |", "|---" * (len(subjects) + 2) + "|"]
    for kind in [*kinds, ""]:
        cells = [_cell(entries, kind, {subject}) for subject in subjects]
        lines.append(
            f"| {kind or 'all'} | " + " | ".join(cells) + f" | {_cell(entries, kind, set(subjects))} |"
        )
    return "\n".join(lines)


def _cell(entries: Sequence[Entry], kind: str, subjects: set[str]) -> str:
    of_all = [
        (entry.passed, fault) for entry in entries if entry.subject in subjects for fault in entry.faults
    ]
    found = [passed for passed, fault in of_all if kind in ("", _kind(fault))]
    return f"{sum(found)} of {len(found)}" if found else ""


def _kind(fault: str) -> str:
    """Its kind, with who or what it was about where that makes another promise."""
    name, _, rest = fault.partition(":")
    said = dict(part.split("=") for part in rest.split(",") if part)
    if name == "kill":
        return f"kill {'driver' if said['rank'] == 'driver' else 'worker'}"
    return f"eio {said['on']}" if name == "eio" else name
