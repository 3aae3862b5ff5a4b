"""Directories that disappear at once when removed; a failure to remove one is logged, and never stops
a run."""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

from converters.files.atomic import rename_surely

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = "tmp_"
"""Prefix of the name of every directory that is unfinished or being removed; readers never look inside."""


def remove_directory(directory: Path) -> bool:
    """Rename a directory to a temporary name, so that it disappears at once, then delete its files.

    A file that cannot be deleted is logged and left under the temporary name: deletion never stops a run.

    Returns:
        Whether the directory is gone from its old name.
    """
    # Add a random part to the name, because remains of an earlier removal that failed may still exist.
    doomed = directory.with_name(f"{TEMPORARY_PREFIX}deleted_{directory.name}_{secrets.token_hex(4)}")
    try:
        rename_surely(directory, doomed)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", directory, error)
        return False
    remove_tree(doomed)
    return True


def remove_tree(directory: Path) -> None:
    """Delete a directory that nobody reads; a failure is logged, and leaves the remaining files."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", directory, error)
