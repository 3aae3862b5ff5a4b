"""Megatron-Bridge's ``run_config.yaml``, which it writes into every checkpoint. Plain YAML: nothing in it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from converters.errors import ConversionError
from converters.regular_file import require_regular

RUN_CONFIG_FILE = "run_config.yaml"
_LARGEST = 2**24


def find_run_config(directory: Path) -> Path | None:
    """The file of a checkpoint, in its directory or beside it; None where there is none."""
    return next((path / RUN_CONFIG_FILE for path in (directory, directory.parent) if (path / RUN_CONFIG_FILE).is_file()), None)


def read_section(path: Path, name: str) -> dict[str, Any]:
    """One section: ``model``, or ``peft`` where adapters were trained.

    Raises:
        ConversionError: the file is damaged, too large, or has no such section.
    """
    try:
        if require_regular(path).stat().st_size > _LARGEST:
            raise ConversionError(f"{path} has {path.stat().st_size} bytes, at most {_LARGEST} are read", "pass --hf-config DIRECTORY")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except ConversionError:
        raise
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConversionError(f"{path} cannot be read ({error})", "fetch it again, or pass --hf-config DIRECTORY") from error
    section = content.get(name) if isinstance(content, dict) else None
    if not isinstance(section, dict):
        raise ConversionError(f"{path} has no section {name!r}", "pass --hf-config DIRECTORY of the model")
    return section
