"""Is there room on the disk."""

from __future__ import annotations

import shutil
from pathlib import Path

from converters.errors import ConversionError


def require_space(directory: Path, needed: int) -> None:
    """Refuse work that cannot end.

    Args:
        directory: on the disk in question.
        needed: bytes.

    Raises:
        ConversionError: there are fewer free bytes.
    """
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise ConversionError(
            f"{directory}: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free", "free space or choose another disk"
        )
