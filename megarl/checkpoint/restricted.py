"""Reads the two kinds of file that torch writes as pickles, so that neither can run code: see :mod:`converters.restricted`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from converters.errors import ConversionError
from converters.restricted import load_plain
from converters.torch_dist.index import INDEX_FILE as METADATA_FILE
from converters.torch_dist.index import read_index
from megarl.errors import CheckpointError

__all__ = ["METADATA_FILE", "RestrictedReader", "read_plain"]


def read_plain(path: Path) -> dict[str, Any]:
    """What is no tensor of an optimizer checkpoint: hyperparameters, counters, the schedule.

    Raises:
        CheckpointError: the file is missing, damaged, or holds more than plain values.
    """
    try:
        plain: dict[str, Any] = load_plain(path)
    except ConversionError as error:
        raise CheckpointError(str(error)) from error
    return plain


class RestrictedReader(dcp.FileSystemReader):
    """DCP's reader, with an index that cannot run code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = read_index(Path(self.path))
        except ConversionError as error:
            raise CheckpointError(str(error)) from error
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata
