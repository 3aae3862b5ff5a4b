"""Results on disk: a file holds a list of them, a directory a file for each case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.files.atomic import whole_file


class ResultsError(ValueError):
    """There are no results where a person said there were; the message says what to do."""


def write(results: Sequence[dict[str, Any]], out: Path, earlier: Sequence[dict[str, Any]] = ()) -> None:
    """All results into ``FILE.json``, or each into a file of its case's name in a directory. No file is ever
    half written.

    Args:
        results: of this run.
        out: where they go.
        earlier: results of other runs that stay there, before them.
    """
    if out.suffix == ".json":
        _write_file([*earlier, *results], out)
        return
    for result in results:
        others = [each for each in earlier if each["case"] == result["case"]]
        _write_file([*others, result], out / f"{result['case']}.json")


def _write_file(results: list[dict[str, Any]], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as file:
        file.write(f"{json.dumps(results, indent=1)}\n".encode())


def read(path: Path) -> list[dict[str, Any]]:
    """Return all results of a file or of the files of a directory, in the order of their names; files of
    another kind there are passed over.

    Raises:
        ResultsError: there are none.
    """
    if not path.exists():
        raise ResultsError(
            f"{path} does not exist. Fix: name a file or directory that 'python -m benchmarks run --out' "
            "wrote"
        )
    results = _results_at(path)
    if not results:
        raise ResultsError(
            f"{path} holds 0 results of cases. Fix: name a file or directory that 'python -m benchmarks run "
            "--out' wrote"
        )
    return results


def read_earlier(path: Path) -> list[dict[str, Any]]:
    """Read the results of earlier runs; empty if there is no such path, or a directory without results: the
    next run is the first.

    Raises:
        ResultsError: it is a file, and holds no results.
    """
    if not path.exists():
        return []
    return _results_at(path) if path.is_dir() else read(path)


def _results_at(path: Path) -> list[dict[str, Any]]:
    paths = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return [result for file in paths for result in _results_in(file)]


def _results_in(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ResultsError(f"{path} is no JSON ({error}). Fix: measure again, or take it away") from error
    if not isinstance(found, list):
        return []
    return [result for result in found if isinstance(result, dict) and {"case", "points"} <= result.keys()]
