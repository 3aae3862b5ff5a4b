"""Read tensors of ``torch_dist`` checkpoints in sections, from any program and with any sharding."""

from __future__ import annotations

import itertools
import math
import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from converters.checkpoint.boxes import Box, intersection, part, read_bytes, relative, shape_of, whole
from converters.checkpoint.safetensors_file import OpenFiles
from converters.errors import ConversionError
from converters.files.reading import unusable_names
from converters.files.restricted import DAMAGED
from converters.torch_dist.index import read_index
from converters.torch_dist.items import RawTensor, find_tensor, read_raw
from converters.torch_dist.location import INDEX_FILE


@dataclass(frozen=True, slots=True)
class _Chunk:
    """A stored box of a tensor, and the location of its archive."""

    box: Box
    file: str
    offset: int
    length: int


@dataclass(frozen=True, slots=True)
class _Stored:
    """A stored tensor.

    Attributes:
        shape, dtype: full shape, and dtype.
        leading: number of leading dimensions in which every chunk has size 1.
        chunks: index in these dimensions -> chunks.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    leading: int
    chunks: Mapping[tuple[int, ...], tuple[_Chunk, ...]]


class StoredTensors(Protocol):
    """Interface of the tensors in a checkpoint, or in a view of one. The methods behave as in
    ``TorchDistCheckpoint``.

    Attributes:
        directory: name of the checkpoint in messages.
    """

    @property
    def directory(self) -> Path: ...
    def __iter__(self) -> Iterator[str]: ...
    def __contains__(self, key: str) -> bool: ...
    def shape(self, key: str) -> tuple[int, ...]: ...
    def dtype(self, key: str) -> torch.dtype: ...
    def read(self, key: str, box: Box) -> Tensor: ...
    def is_saved(self, key: str, box: Box) -> bool: ...


class TorchDistCheckpoint:
    """Tensors of a checkpoint directory. Thread-safe.

    Args:
        directory: directory with ``.metadata``.

    Raises:
        ConversionError: the index is missing or damaged, or names files outside of the directory.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        index = read_index(directory)
        try:
            self._tensors = {
                key: _stored(key, entry, index.storage_data)
                for key, entry in index.state_dict_metadata.items()
                if isinstance(entry, TensorStorageMetadata)
            }
            self.objects = tuple(key for key in index.state_dict_metadata if key not in self._tensors)
            self._object_places = {
                place.fqn: where
                for place, where in index.storage_data.items()
                if place.fqn not in self._tensors
            }
        # Re-raise it: a ConversionError is a ValueError, which DAMAGED includes.
        except ConversionError:
            raise
        # A pickle can set any attribute to any value.
        except DAMAGED as error:
            raise ConversionError(
                f"{directory / INDEX_FILE} is damaged ({type(error).__name__}: {error})",
                "fetch or write the checkpoint again",
            ) from error
        names = set[str]()
        for stored in self._tensors.values():
            for chunks in stored.chunks.values():
                names.update(chunk.file for chunk in chunks)
        # The index is untrusted, so check that no file name leads out of the directory.
        problems = unusable_names(directory, names)
        if problems:
            raise ConversionError(
                f"the index of {directory} names files that cannot be used",
                "fetch the checkpoint again",
                problems,
            )
        self._files = OpenFiles()
        self._found: dict[tuple[str, int], RawTensor] = {}
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[str]:
        """Yield the keys of all tensors, sorted."""
        return iter(sorted(self._tensors))

    def __contains__(self, key: str) -> bool:
        return key in self._tensors

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a stored tensor, with the leading dimensions of layers and experts."""
        return self._entry(key).shape

    def dtype(self, key: str) -> torch.dtype:
        """Return the dtype of a stored tensor."""
        return self._entry(key).dtype

    def read(self, key: str, box: Box) -> Tensor:
        """Read a box of a stored tensor, assembled from its chunks.

        Returns:
            A new contiguous CPU tensor with the stored dtype.

        Raises:
            ConversionError: the tensor does not exist, a part of the box was not saved, or a file is damaged.
        """
        stored = self._entry(key)
        if len(box) != len(stored.shape) or any(
            not 0 <= start <= stop <= size for (start, stop), size in zip(box, stored.shape, strict=True)
        ):
            raise ConversionError(
                f"{key} has shape {list(stored.shape)}; there is no {box} in it", "read inside the tensor"
            )
        # Count elements: the pieces are known not to overlap, so that as many elements as the box has are all
        # of them.
        pieces = overlaps(box, self._candidates(stored, box))
        missing = missing_elements(box, pieces)
        if missing:
            raise ConversionError(
                f"{self.directory}: {missing} elements of {key} {list(stored.shape)} were "
                + ("never saved" if missing > 0 else "saved more than once"),
                "the checkpoint is incomplete; save it again",
            )
        # Usually there is one chunk, which needs no copy.
        if len(pieces) == 1:
            return self._read_piece(key, stored, *pieces[0])
        out = torch.empty(shape_of(box), dtype=stored.dtype)
        for common, chunk in pieces:
            part(out, relative(common, box)).copy_(self._read_piece(key, stored, common, chunk))
        return out

    def read_object(self, key: str) -> bytes:
        """Return the bytes of an object that is not a tensor, as ``torch.save`` wrote it.

        Raises:
            ConversionError: the object does not exist, or its file is missing or too short.
        """
        place = self._object_places.get(key)
        # The path comes from the index, which is untrusted.
        if place is None or unusable_names(self.directory, [str(place.relative_path)]):
            raise ConversionError(
                f"{self.directory} has no object {key!r}", "check that the checkpoint is complete"
            )
        path, content = self.directory / str(place.relative_path), bytearray(place.length)
        with self._files.use(path) as descriptor:
            read_bytes(descriptor, place.offset, memoryview(content), f"{key} in {path}")
        return bytes(content)

    def is_saved(self, key: str, box: Box) -> bool:
        """Return whether every element of a box was saved exactly once; reads only the index."""
        return missing_elements(box, overlaps(box, self._candidates(self._entry(key), box))) == 0

    def _candidates(self, stored: _Stored, box: Box) -> list[_Chunk]:
        leading = box[: stored.leading]
        # Find one layer of a stack by its index: a search would examine the pieces of all layers.
        if set(shape_of(leading)) <= {1}:
            return list(stored.chunks.get(tuple(start for start, _ in leading), ()))
        return list(itertools.chain.from_iterable(stored.chunks.values()))

    def _read_piece(self, key: str, stored: _Stored, box: Box, chunk: _Chunk) -> Tensor:
        inside = relative(box, chunk.box)
        with self._files.use(self.directory / chunk.file) as descriptor:
            return read_raw(descriptor, self._locate(key, stored, chunk, descriptor), inside, key)

    def _locate(self, key: str, stored: _Stored, chunk: _Chunk, descriptor: int) -> RawTensor:
        place = (chunk.file, chunk.offset)
        # The lock protects the table. Two threads may look up the same tensor, which only costs a second
        # read.
        with self._lock:
            raw = self._found.get(place)
        if raw is None:
            raw = find_tensor(
                descriptor, chunk.offset, chunk.length, f"{key} in {self.directory / chunk.file}"
            )
            # Two saves to one directory may have left an index and files that do not match.
            if raw.shape != shape_of(chunk.box) or raw.dtype != stored.dtype:
                raise ConversionError(
                    f"{key}: the index says {stored.dtype} {list(shape_of(chunk.box))}, {chunk.file} has "
                    f"{raw.dtype} {list(raw.shape)}",
                    "index and files do not belong together; fetch or write the checkpoint again",
                )
            with self._lock:
                self._found[place] = raw
        return raw

    def _entry(self, key: str) -> _Stored:
        if key not in self._tensors:
            raise ConversionError(
                f"{self.directory} has no tensor {key!r}",
                "check that the checkpoint is complete and of this family",
            )
        return self._tensors[key]


def overlaps(box: Box, pieces: Iterable[Any]) -> list[tuple[Box, Any]]:
    """Return the pieces that overlap a box, by their attribute ``box``, each after the overlapping range."""
    found = []
    for piece in pieces:
        common = intersection(box, piece.box)
        if common is not None:
            found.append((common, piece))
    return found


def missing_elements(box: Box, pieces: Iterable[tuple[Box, Any]]) -> int:
    """Return the number of a box's elements that are in none of its pieces; it is negative if some elements
    are in several pieces."""
    return math.prod(shape_of(box)) - sum(math.prod(shape_of(common)) for common, _ in pieces)


def _stored(key: str, entry: TensorStorageMetadata, places: Mapping[Any, Any]) -> _Stored:
    shape = tuple(entry.size)
    if (
        not isinstance(key, str)
        or not isinstance(entry.properties.dtype, torch.dtype)
        or not _are_sizes(shape)
    ):
        raise ValueError(f"{key!r} of shape {shape}")
    chunks = []
    for number, described in enumerate(entry.chunks):
        # The index may also contain the number of the chunk, which changes the key.
        place = places.get(MetadataIndex(key, described.offsets)) or places.get(
            MetadataIndex(key, described.offsets, number)
        )
        if place is None:
            raise ConversionError(
                f"the index names no file for {key} at {list(described.offsets)}",
                "write the checkpoint again",
            )
        if getattr(place, "transform_descriptors", None):
            raise ConversionError(
                f"{key} is stored with {place.transform_descriptors}",
                "save the checkpoint without compression",
            )
        # The index is an untrusted file: reject negative numbers and other types before they are used as
        # offsets.
        if not _are_sizes((*described.offsets, *described.sizes, place.offset, place.length)):
            raise ValueError(f"a piece of {key!r} at {described.offsets}")
        box = tuple(
            (first, first + size) for first, size in zip(described.offsets, described.sizes, strict=True)
        )
        chunks.append(_Chunk(box, str(place.relative_path), place.offset, place.length))
    # Count the leading dimensions in which every chunk has size 1, such as layers and experts; chunks are
    # looked up by their index there.
    leading = 0
    while leading < len(shape) - 1 and all(
        chunk.box[leading][1] - chunk.box[leading][0] == 1 for chunk in chunks
    ):
        leading += 1
    by_place: defaultdict[tuple[int, ...], list[_Chunk]] = defaultdict(list)
    for chunk in chunks:
        by_place[tuple(start for start, _ in chunk.box[:leading])].append(chunk)
    # Chunks with different leading indices cannot overlap.
    for group in by_place.values():
        _check_apart(key, shape, [chunk.box for chunk in group])
    return _Stored(
        shape, entry.properties.dtype, leading, {place: tuple(group) for place, group in by_place.items()}
    )


def _are_sizes(values: tuple[Any, ...]) -> bool:
    return all(isinstance(value, int) and 0 <= value < 2**63 for value in values)


def _check_apart(key: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Reject chunks that overlap or exceed their tensor, because completeness is checked by counting
    elements."""
    outside = [box for box in boxes if intersection(box, whole(shape)) != box and 0 not in shape_of(box)]
    overlapping = next(_overlapping(boxes), None)
    if outside or overlapping:
        raise ConversionError(
            f"the index gives {key} {list(shape)} pieces that "
            + (f"overlap: {overlapping}" if overlapping else f"exceed it: {outside[0]}"),
            "the index is damaged; fetch or write the checkpoint again",
        )


def _overlapping(boxes: list[Box]) -> Iterator[tuple[Box, Box]]:
    """Yield pairs of overlapping boxes. Boxes that begin after another's end in the first dimension are not
    compared with it, because a tensor of many ranks has many chunks."""
    ordered = sorted(boxes)
    for number, one in enumerate(ordered):
        for other in itertools.islice(ordered, number + 1, None):
            # Boxes are sorted by their first index, so no later box can overlap this one.
            if one and other[0][0] >= one[0][1]:
                break
            if intersection(one, other) is not None:
                yield one, other
