"""Opens whatever a user points at: a Hugging Face directory or a Megatron checkpoint, with its config and its manifest."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.architecture import read_architecture
from converters.artifacts import HF_DIRECTORY, read_config
from converters.errors import ConversionError
from converters.logical import HuggingFaceModel, MegatronModel
from converters.manifest import Manifest, read_manifest
from converters.source import HuggingFaceSource
from converters.torch_dist.find import find_checkpoint
from converters.torch_dist.reader import TorchDistCheckpoint

MEGATRON, HUGGING_FACE = "megatron", "huggingface"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A ``torch_dist`` checkpoint with what says which model it is.

    Attributes:
        directory: of the checkpoint itself.
        model: its tensors.
        hf_directory: config, tokenizer and so on.
        config: the parsed ``config.json``.
        manifest: of the conversion that made it, if one did.
    """

    directory: Path
    model: MegatronModel
    hf_directory: Path
    config: dict[str, Any]
    manifest: Manifest | None

    def identity(self) -> list[list[str | int]]:
        """Changes when the files do."""
        files = sorted(path for path in self.directory.iterdir() if path.is_file()) + sorted(self.hf_directory.glob("*.json"))
        return [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]


def open_megatron(path: Path, hf_directory: Path | None = None) -> MegatronCheckpoint:
    """Open a Megatron checkpoint.

    Args:
        path: of the checkpoint, or a directory that trainers keep one in (:func:`converters.torch_dist.find.find_checkpoint`).
        hf_directory: where its ``config.json`` is; by default what was stored with it.

    Raises:
        ConversionError: there is no checkpoint, or nothing says which model it holds.
    """
    directory = find_checkpoint(path)
    hf_directory = hf_directory or _stored_config(directory, path)
    config = read_config(hf_directory)
    model = MegatronModel(TorchDistCheckpoint(directory), read_architecture(config))
    return MegatronCheckpoint(directory, model, hf_directory, config, read_manifest(directory))


def _stored_config(directory: Path, given: Path) -> Path:
    for place in (directory / HF_DIRECTORY, directory, given / HF_DIRECTORY, directory.parent / HF_DIRECTORY):
        if (place / "config.json").is_file():
            return place
    raise ConversionError(
        f"{directory} does not say which model it is ({HF_DIRECTORY}/config.json is missing)", "pass --hf-config DIRECTORY of the model"
    )


def open_huggingface(source: HuggingFaceSource) -> HuggingFaceModel:
    """The tensors of a Hugging Face checkpoint.

    Raises:
        ConversionError: it has no config, or one that cannot be carried over.
    """
    return HuggingFaceModel(source, read_architecture(read_config(source.directory)))


def kind_of(path: Path) -> str:
    """Which format a directory has: ``megatron`` or ``huggingface``.

    Raises:
        ConversionError: neither.
    """
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return HUGGING_FACE
    if not path.is_dir():
        raise ConversionError(f"{path} is no directory", "give the directory of a Hugging Face model or of a Megatron checkpoint")
    find_checkpoint(path)
    return MEGATRON
