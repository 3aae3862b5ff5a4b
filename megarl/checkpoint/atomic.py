"""Removal of directories: a removed directory disappears at once, and a failure is logged and never stops a
run."""

from __future__ import annotations

import logging
import secrets
import shutil
from pathlib import Path

from converters.files.atomic import rename_surely

logger = logging.getLogger(__name__)

TEMPORARY_PREFIX = "tmp_"
"""Name prefix of directories that are unfinished or being removed; readers never look inside."""


def remove_directory(directory: Path) -> bool:
    """Rename a directory to a temporary name, so that it disappears at once, then delete its files.

    A file that cannot be deleted is logged and stays under the temporary name.

    Returns:
        True if the directory no longer exists under its name.
    """
    # A random suffix, because an earlier removal may have failed and left files.
    doomed = directory.with_name(f"{TEMPORARY_PREFIX}deleted_{directory.name}_{secrets.token_hex(4)}")
    try:
        rename_surely(directory, doomed)
    except OSError as error:
        logger.warning("%s cannot be removed: %s", directory, error)
        return False
    remove_tree(doomed)
    return True


def remove_tree(directory: Path) -> None:
    """Delete a directory that nobody reads. A failure is logged; the remaining files stay."""
    try:
        shutil.rmtree(directory)
    except OSError as error:
        logger.warning("%s cannot be deleted: %s", directory, error)
