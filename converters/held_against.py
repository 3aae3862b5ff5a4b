"""Holds what a conversion reads against the manifest of what it reads, tensor by tensor on the way."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from converters.errors import ChangedSourceError
from converters.exact import cast
from converters.manifest import MANIFEST_FILE, Manifest, TensorHashes, dtype_called, dtype_name


class HeldAgainst:
    """The manifest of a source, where a conversion made it, against the bytes that are read of it.

    A tensor that is written in the dtype that the manifest says is hashed for the new manifest anyway; one that is written in another
    dtype is hashed a second time, in the old one.

    Args:
        manifest: of the source; None, as of a model that no conversion made, holds nothing against it.
        directory: of the source, for errors.
        dtypes: of each Hugging Face tensor as it is written.
        other: names of tensors that are not written as they are read, such as those that an adapter is merged into.
    """

    def __init__(self, manifest: Manifest | None, directory: Path, dtypes: Mapping[str, torch.dtype], other: Container[str] = ()) -> None:
        known = manifest.tensors if manifest is not None else {}
        self._directory = directory
        self._records = {name: known[name] for name in dtypes if name in known and name not in other}
        self._unknown = [name for name in dtypes if manifest is not None and name not in known]
        self._cast = {
            name: dtype_called(record.dtype) for name, record in self._records.items() if record.dtype != dtype_name(dtypes[name])
        }

    def hashes(self, names: Iterable[str]) -> TensorHashes:
        """Hashes of those tensors that are written in another dtype than the manifest says."""
        return TensorHashes([name for name in names if name in self._cast])

    def update(self, hashes: TensorHashes, name: str, rows: Tensor) -> None:
        """Take rows of a tensor, as they were read, into its hash, where it has one in ``hashes``."""
        if name in self._cast:
            hashes.update(name, cast(rows, self._cast[name]))

    def refuse_changed(self, written: Mapping[str, str], before: Mapping[str, str]) -> None:
        """Refuse a source that is not what its manifest says.

        Args:
            written: digests of the tensors as they were written.
            before: of :meth:`hashes`.

        Raises:
            ChangedSourceError: with the names.
        """
        changed = [name for name, record in self._records.items() if (before if name in self._cast else written)[name] != record.sha256]
        changed += [f"{name}, which it does not know" for name in self._unknown]
        if changed:
            raise ChangedSourceError(
                f"{self._directory} is not what its {MANIFEST_FILE} says",
                f"convert again; or remove {MANIFEST_FILE} if the weights were changed on purpose",
                changed,
            )
