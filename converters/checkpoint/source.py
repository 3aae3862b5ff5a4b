"""Reads Hugging Face safetensors checkpoints, headers and slices only."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from converters.checkpoint.headers import HuggingFaceHeaders, locate_source
from converters.checkpoint.safetensors_file import Box, SafetensorsFile, whole
from converters.errors import ConversionError


def open_source(model_name: str | Path, revision: str | None = None) -> HuggingFaceSource:
    """Open a checkpoint.

    Args:
        model_name: a local directory or a hub id such as ``Qwen/Qwen2.5-0.5B``. Of a hub repository only safetensors, JSON and tokenizer
            files are downloaded.
        revision: branch, tag or commit of a hub repository.

    Raises:
        ConversionError: there is no such directory or repository, or it holds no readable safetensors checkpoint.
    """
    return HuggingFaceSource(locate_source(model_name, revision))


class HuggingFaceSource(HuggingFaceHeaders[SafetensorsFile]):
    """The tensors beside their headers. Safe to be read from several threads."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, SafetensorsFile)

    def dtype_name(self, name: str) -> str:
        """See ``HuggingFaceHeaders``."""
        return str(self.dtype(name))

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor, from the header.

        Raises:
            ConversionError: there is no such tensor, its file is damaged, or torch has no such dtype.
        """
        return self._file(name).dtype(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """A tensor or a slice of it, touching only the bytes of that slice.

        Args:
            name: of the tensor.
            slices: one a leading dimension, each with start and stop inside the tensor and no step; missing ones mean everything.

        Returns:
            A fresh contiguous CPU tensor of the stored dtype that shares no memory with the file.

        Raises:
            ConversionError: there is no such tensor, its file is damaged, or a slice leaves the tensor.
        """
        return self._file(name).read(name, self.box(name, slices))

    def box(self, name: str, slices: tuple[slice, ...] | None) -> Box:
        """Return what ``read`` is asked for, on every dimension of the tensor. Arguments and errors as there."""
        shape, slices = self.shape(name), slices or ()
        for dimension, part in enumerate(slices):
            if dimension >= len(shape) or part.step not in (None, 1) or not _inside(part, shape[dimension]):
                raise ConversionError(f"{name} has shape {list(shape)}; dimension {dimension} has no {part}", "read inside the tensor")
        asked = tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=False))
        return (*asked, *whole(shape[len(asked) :]))


def _inside(part: slice, length: int) -> bool:
    start = 0 if part.start is None else part.start
    stop = length if part.stop is None else part.stop
    return 0 <= start <= stop <= length
