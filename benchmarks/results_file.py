"""Results on disk: a file holds a list of results, a directory holds one file per case."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from converters.files.atomic import whole_file


class ResultsError(ValueError):
    """A path holds no results where some are required; the message contains the fix."""


def write(results: Sequence[dict[str, Any]], out: Path, earlier: Sequence[dict[str, Any]] = ()) -> None:
    """Write all results to ``FILE.json``, or each to a file of its case's name in a directory. No file is
    ever half written.

    Args:
        results: results of this run.
        out: the file or directory.
        earlier: results of other runs, which are kept before the new ones.
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
    """Return all results of a file, or of a directory's files in the order of their names; other files there
    are ignored.

    Raises:
        ResultsError: there are no results.
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
    """Return the results of earlier runs; empty if there is no such path, or if it is a directory without
    results, because the next run is then the first.

    Raises:
        ResultsError: the path is a file without results.
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
