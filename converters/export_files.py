"""The safetensors files of an export, worked out before a byte of them is written: which tensor stands in which, and where."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from converters.artifacts import TEMPLATES_DIRECTORY
from converters.manifest import MANIFEST_FILE
from converters.rule import HuggingFaceTensor, Place
from converters.safetensors_file import NAMES

Parts = tuple[tuple[HuggingFaceTensor, Place], ...]
"""The Hugging Face tensors in a stored tensor, each with its place there."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor as it will stand in a safetensors file.

    Attributes:
        name, shape, dtype: of the stored tensor.
        parts: the Hugging Face tensors in it, each with its place; a tensor stored under its own name is one part.
        file: name of the file.
        offset: of its first byte, from the end of the header.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Parts
    file: str
    offset: int

    @property
    def blocks(self) -> dict[int, list[tuple[HuggingFaceTensor, Place]]]:
        """Parts by the expert whose block of the tensor they are in, where their rows do not lie one behind the other; else empty.

        Such a block is put together as a whole.
        """
        blocks: dict[int, list[tuple[HuggingFaceTensor, Place]]] = {}
        if any(not place.is_consecutive for _, place in self.parts):
            for part, place in self.parts:
                assert place.index is not None, place
                blocks.setdefault(place.index, []).append((part, place))
        return blocks

    @property
    def size(self) -> int:
        """Bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def in_files(tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype, Parts]], max_bytes: int) -> list[WrittenTensor]:
    """Tensors (name, shape, dtype and parts) in order, in as few files as the bound allows, wide dtypes first in each, so that all are
    aligned."""
    groups: list[list[int]] = []
    filled = 0
    for number, (_, shape, dtype, _) in enumerate(tensors):
        size = torch.Size(shape).numel() * dtype.itemsize
        if not groups or filled + size > max_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(number)
        filled += size
    written = []
    for index, group in enumerate(groups, start=1):
        file = "model.safetensors" if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        offset = 0
        for number in sorted(group, key=lambda number: -tensors[number][2].itemsize):
            name, shape, dtype, parts = tensors[number]
            written.append(WrittenTensor(name, shape, dtype, parts, file, offset))
            offset += written[-1].size
    return written


def header_of(tensors: Sequence[WrittenTensor]) -> bytes:
    """The header of the file that holds these tensors, its length in front."""
    entries = {
        tensor.name: {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.size],
        }
        for tensor in tensors
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_of(tensors: Sequence[WrittenTensor]) -> str | None:
    """The text of ``model.safetensors.index.json``; None for a single file."""
    if len({tensor.file for tensor in tensors}) == 1:
        return None
    weight_map = {tensor.name: tensor.file for tensor in sorted(tensors, key=lambda tensor: tensor.name)}
    size = sum(tensor.size for tensor in tensors)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n"


def is_hf_directory(directory: Path) -> bool:
    """Whether a directory is a Hugging Face model that may be replaced."""
    names = {path.name for path in directory.iterdir() if not path.is_dir()}
    others = [path for path in directory.iterdir() if path.is_dir() and path.name != TEMPLATES_DIRECTORY]
    holds_weights = MANIFEST_FILE in names or any(name.endswith(".safetensors") for name in names)
    return "config.json" in names and holds_weights and not others
