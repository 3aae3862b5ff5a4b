"""JSON files of a checkpoint: an object, or an error that says which file is wrong and how."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.errors import ConversionError
from converters.regular_file import require_regular

DEEPEST = 64
"""Levels of lists and objects in each other that a file may have; no config has more than a few."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        FileNotFoundError: there is no such file.
        ConversionError: it cannot be read, holds something else, or nests deeper than ``DEEPEST`` levels.
    """
    try:
        content = json.loads(require_regular(path).read_text(encoding="utf-8"))
    except (FileNotFoundError, ConversionError):
        raise
    # json gives up with a RecursionError on what nests too deeply
    except (OSError, ValueError, RecursionError) as error:
        raise ConversionError(f"{path} cannot be read as JSON ({error})", "fetch or write the file again") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{path} holds a {type(content).__name__}, not a JSON object", "fetch or write the file again")
    check_depth(content, str(path))
    return content


def check_depth(content: Any, what: str) -> None:
    """Refuse what nests so deeply that comparing or printing it fails.

    Args:
        content: of parsed JSON.
        what: to call it by in errors.

    Raises:
        ConversionError: it nests deeper than ``DEEPEST`` levels.
    """
    level, depth = [content], 0
    while level:
        if depth > DEEPEST:
            raise ConversionError(f"{what} nests deeper than {DEEPEST} levels", "fetch or write the file again")
        children = [value.values() if isinstance(value, Mapping) else value for value in level if isinstance(value, (Mapping, list, tuple))]
        level, depth = [child for several in children for child in several], depth + 1
