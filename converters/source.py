"""Reads Hugging Face safetensors checkpoints, headers and slices only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from converters.errors import ConversionError

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
# Weights, configs and tokenizers at the top level of a repository; no pickles, no code, no second copies in other formats.
_HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"]
_HUB_IGNORED = ["*/*", "consolidated*", "adapter_*"]


def open_source(model_name: str | Path, revision: str | None = None) -> HuggingFaceSource:
    """Open a checkpoint.

    Args:
        model_name: a local directory or a hub id such as ``Qwen/Qwen2.5-0.5B``. Of a hub repository only safetensors, JSON and tokenizer
            files are downloaded.
        revision: branch, tag or commit of a hub repository.

    Raises:
        ConversionError: there is no such directory or repository, or it holds no readable safetensors checkpoint.
    """
    directory = Path(model_name).expanduser()
    if directory.is_dir():
        return HuggingFaceSource(directory)
    name = str(model_name)
    if isinstance(model_name, Path) or directory.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1:
        raise ConversionError(f"model directory {name!r} does not exist", "give an existing directory or a hub id")
    return HuggingFaceSource(_download(name, revision))


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repository, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED))
    # The hub client raises its own errors, those of its HTTP library and those of the file system; all mean the same here.
    except Exception as error:
        raise ConversionError(
            f"{repository!r} (revision {revision or 'default'}) is no local directory and could not be fetched from the hub "
            f"({type(error).__name__}: {error})",
            "check the name and the network, or download the model and give its directory",
        ) from error


class HuggingFaceSource:
    """A directory with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files it names.

    As in transformers, the single file wins where both exist. Files are mapped into memory when first needed, and stay open.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._file_of = self._read_layout()

    def names(self) -> list[str]:
        """Names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        """Whether there is a tensor of that name."""
        return name in self._file_of

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header.

        Raises:
            ConversionError: there is no such tensor, or its file is damaged.
        """
        return tuple(self._entry(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor, from the header.

        Raises:
            ConversionError: there is no such tensor, its file is damaged, or torch has no such dtype.
        """
        stored = self._entry(name).get_dtype()
        if stored not in _DTYPES:
            raise ConversionError(f"{name} is stored as {stored}, which is not supported", f"store it as one of {', '.join(_DTYPES)}")
        return _DTYPES[stored]

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
        shape = self.shape(name)
        if slices is None:
            # Row 0 of a zero-dimensional tensor does not exist, so that slicing cannot serve here.
            return self._open(self._file_of[name]).get_tensor(name).clone(memory_format=torch.contiguous_format)
        for dimension, part in enumerate(slices):
            if dimension >= len(shape) or part.step not in (None, 1) or not _inside(part, shape[dimension]):
                raise ConversionError(f"{name} has shape {list(shape)}; dimension {dimension} has no {part}", "read inside the tensor")
        return self._entry(name)[slices].clone(memory_format=torch.contiguous_format)

    def read_json(self, name: str) -> dict[str, Any] | None:
        """A JSON object of the directory, such as ``config.json``; None where the file does not exist.

        Raises:
            ConversionError: the file holds something else.
        """
        path = self.directory / name
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConversionError(f"{path} cannot be read as JSON ({error})", "fetch or write the file again") from error
        if not isinstance(content, dict):
            raise ConversionError(f"{path} holds a {type(content).__name__}, not a JSON object", "fetch or write the file again")
        return content

    def _read_layout(self) -> dict[str, str]:
        """File name by tensor name."""
        if not self.directory.is_dir():
            raise ConversionError(f"model directory {str(self.directory)!r} does not exist", "give an existing directory or a hub id")
        if (self.directory / _SINGLE).exists():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        index = self.read_json(_INDEX)
        if index is not None:
            return self._check_index(index.get("weight_map"))
        pickles = sorted(path.name for path in self.directory.glob("*.bin"))
        raise ConversionError(
            f"{self.directory} has neither {_SINGLE} nor {_INDEX}" + (f", only {pickles[0]}" if pickles else ""),
            "save the model with save_pretrained of a recent transformers; only safetensors are read, since other formats may run code",
        )

    def _check_index(self, weight_map: object) -> dict[str, str]:
        """The index as it stands, once every file it names is known to lie in the directory."""
        path = self.directory / _INDEX
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ConversionError(f"{path} has no weight_map", "fetch or write the index again")
        problems = []
        for file_name in sorted({str(value) for value in weight_map.values()}):
            plain = PurePosixPath(file_name).name == file_name and "\\" not in file_name and file_name.endswith(".safetensors")
            if not plain:
                problems.append(f"{file_name!r} is not the plain name of a safetensors file in the directory")
            elif not (self.directory / file_name).is_file():
                problems.append(f"{file_name} does not exist")
        if problems:
            raise ConversionError(f"{path} names files that cannot be used", "fetch the checkpoint again", problems)
        return {str(name): str(file_name) for name, file_name in weight_map.items()}

    def _entry(self, name: str) -> Any:
        if name not in self._file_of:
            raise ConversionError(f"{self.directory} has no tensor {name!r}", "check that the checkpoint is complete and of this family")
        return self._open(self._file_of[name]).get_slice(name)

    def _open(self, file_name: str) -> Any:
        """The mapped file. On first use its header is compared with the index."""
        if file_name in self._files:
            return self._files[file_name]
        path = self.directory / file_name
        try:
            opened = safe_open(path, framework="pt", device="cpu")
        except (SafetensorError, OSError) as error:
            raise ConversionError(f"{path} is not a readable safetensors file ({error})", "fetch or write the file again") from error
        indexed = {name for name, place in self._file_of.items() if place == file_name}
        absent = sorted(indexed - set(opened.keys()))
        if absent:
            raise ConversionError(f"{path} lacks tensors that {_INDEX} says are in it", "fetch the checkpoint again", absent)
        self._files[file_name] = opened
        return opened


def _inside(part: slice, length: int) -> bool:
    start = 0 if part.start is None else part.start
    stop = length if part.stop is None else part.stop
    return 0 <= start <= stop <= length
