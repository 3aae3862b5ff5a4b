"""Read the index ``.metadata`` of a distributed checkpoint without running code, and write it."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import IO

from torch.distributed.checkpoint.metadata import Metadata

from converters.errors import ConversionError
from converters.files.reading import require_regular
from converters.files.restricted import DAMAGED, index_name, unpickle
from converters.torch_dist.location import INDEX_FILE


def read_index(directory: Path) -> Metadata:
    """Read the index of a checkpoint.

    Raises:
        ConversionError: the index is missing, damaged, or names a class that no index needs.
    """
    path = directory / INDEX_FILE
    try:
        with require_regular(path).open("rb") as file:
            index = unpickle(file, index_name, str(path))
    except FileNotFoundError as error:
        raise ConversionError(
            f"{path} does not exist", "give the directory of a distributed checkpoint"
        ) from error
    # Re-raise it: a ConversionError is a ValueError, which DAMAGED includes.
    except ConversionError:
        raise
    except (OSError, *DAMAGED) as error:
        raise ConversionError(
            f"{path} cannot be read ({type(error).__name__}: {error})", "fetch or write the checkpoint again"
        ) from error
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ConversionError(
            f"{path} is not the index of a checkpoint", "fetch or write the checkpoint again"
        )
    return index


def write_index(index: Metadata, file: IO[bytes]) -> None:
    """Write an index in the format of ``torch.distributed.checkpoint``."""
    pickle.dump(index, file)
