"""Readers for files that torch writes as pickles, restricted so that no file can run code; see
``converters.files.restricted``."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from converters.errors import ConversionError
from converters.files.restricted import load_plain
from converters.torch_dist.index import read_index
from converters.torch_dist.location import INDEX_FILE as METADATA_FILE
from megarl.checkpoint.storage import read_again
from megarl.errors import UnusableCheckpointError
from megarl.patched import patched

__all__ = ["METADATA_FILE", "read_plain", "read_plain_index", "restricted_loading"]


def read_plain(path: Path) -> dict[str, Any]:
    """Return the non-tensor part of an optimizer checkpoint: hyperparameters, counters, schedule.

    Raises:
        UnusableCheckpointError: the file is missing, damaged, or contains more than plain values.
    """
    try:
        return read_again(lambda: load_plain(path), str(path))
    except ConversionError as error:
        raise UnusableCheckpointError(str(error)) from error


@contextlib.contextmanager
def restricted_loading() -> Iterator[None]:
    """Restrict every DCP reader that is created within the context, by any library.

    A checkpoint's ``.metadata`` may name only the classes of DCP's own metadata, entries that are not tensors
    must be plain values, and reads are retried after transient storage failures.
    """
    load_bytes = DefaultLoadPlanner.load_bytes

    def load_plain_bytes(self: DefaultLoadPlanner, read_item: Any, value: io.BytesIO) -> None:
        try:
            load_plain(value, f"the object {read_item.storage_index.fqn} of the checkpoint")
        except ConversionError as error:
            raise UnusableCheckpointError(str(error)) from error
        # Rewind, because DCP reads the stream again from its start.
        value.seek(0)
        load_bytes(self, read_item, value)

    with patched(
        (dcp.FileSystemReader, "read_metadata", _read_metadata),
        (dcp.FileSystemReader, "read_data", _read_data),
        (DefaultLoadPlanner, "load_bytes", load_plain_bytes),
    ):
        yield


def read_plain_index(directory: Path) -> Metadata:
    """Return the index of a checkpoint.

    Call it before a library reads the index, so that a bad index raises megarl's error: a library would wrap
    the error, differently in each torch version.

    Raises:
        UnusableCheckpointError: the index is missing, damaged, or names a class that no index needs.
    """
    try:
        return read_again(lambda: read_index(directory), str(directory / METADATA_FILE))
    except ConversionError as error:
        raise UnusableCheckpointError(str(error)) from error


_dcp_read_data = dcp.FileSystemReader.read_data


def _read_data(self: dcp.FileSystemReader, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
    return read_again(lambda: _dcp_read_data(self, plan, planner), str(self.path))


def _read_metadata(self: dcp.FileSystemReader, *args: Any, **kwargs: Any) -> Metadata:
    metadata = read_plain_index(Path(self.path))
    # The rest of DCP's own read_metadata.
    if metadata.storage_meta is None:
        metadata.storage_meta = StorageMeta()
    metadata.storage_meta.load_id = self.load_id
    return metadata
