"""Reader of Hugging Face safetensors checkpoints, by headers and slices only; torch is imported with the
first tensor."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from converters.checkpoint.safetensors_file import OpenFiles, SafetensorsFile
from converters.errors import ConversionError
from converters.files.kinds import misplaced_kind, unfinished_download
from converters.files.reading import identity_of, read_json_object, unusable_names
from converters.torch_dist.location import holds_checkpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from converters.checkpoint.boxes import Box

ADAPTER_CONFIG = "adapter_config.json"
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
# Fetch weights, configs, tokenizers, code and what describes them at the top level of a repository, and chat
# templates. Leave out pickles and second copies. The code is only copied: a tokenizer's config may name it.
_HUB_PATTERNS = [
    *("*.safetensors", "*.json", "*.model", "*.jinja", "merges.txt", "vocab.txt"),
    *("*.py", "README.md", "LICENSE*", "NOTICE*"),
]
_TEMPLATES = "additional_chat_templates"
# These patterns match every directory but that of the templates. Patterns have no "not", so one pattern for
# each letter matches the names that differ from there on.
_OTHER_DIRECTORIES = [f"{_TEMPLATES}[!/]*/*", f"{_TEMPLATES}/*/*"]
for _length, _letter in enumerate(_TEMPLATES):
    # The first of these directories has an empty name, which no path has.
    _OTHER_DIRECTORIES += [f"{_TEMPLATES[:_length]}[!{_letter}]*/*", f"{_TEMPLATES[:_length]}/*"]
# Mistral's repositories have a second copy of the weights, consolidated*. An adapter is not part of the base
# model.
_HUB_IGNORED = [*_OTHER_DIRECTORIES, "consolidated*", "adapter_*"]

# Trainers save these forms in pieces that transformers cannot read.
_SHARDED = (
    (
        "global_step*/*_states.pt",
        "DeepSpeed ZeRO",
        "join it with its zero_to_fp32.py, with --safe_serialization",
    ),
    ("*/*.distcp", "FSDP", "join it with accelerate merge-weights"),
    (
        "*_rank_*.pt",
        "FSDP in one file per rank",
        "join it with the program of its trainer that writes Hugging Face's format",
    ),
    ("blobs/sha256*", "ollama (GGUF)", "give the safetensors model that it was made of"),
)


def locate_source(model_name: str | Path, revision: str | None = None) -> Path:
    """Return the directory of a checkpoint, and download a hub repository first. Arguments and errors are
    those of ``open_source``."""
    directory = Path(model_name).expanduser()
    if directory.is_dir():
        return directory
    if directory.is_file():
        kind = misplaced_kind(directory)
        raise ConversionError(
            f"{directory} is {'a file' if kind is None else kind[0]}, not the directory of a model",
            f"give {directory.parent}, which must hold config.json too" if kind is None else kind[1],
        )
    name = str(model_name)
    # Never ask the hub for what can only be a path: ids of the hub are NAME or OWNER/NAME.
    if (
        isinstance(model_name, Path)
        or directory.is_absolute()
        or name.startswith((".", "~"))
        or name.count("/") > 1
    ):
        raise ConversionError(
            f"model directory {name!r} does not exist", "give an existing directory or a hub id"
        )
    return _download(name, revision)


def _download(repository: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(
                repository, revision=revision, allow_patterns=_HUB_PATTERNS, ignore_patterns=_HUB_IGNORED
            )
        )
    # The hub client raises its own errors, and those of its HTTP library and of the file system. All of them
    # mean the same here.
    except Exception as error:
        raise ConversionError(
            f"{repository!r} (revision {revision or 'default'}) is no local directory and could not be "
            "fetched from the hub "
            f"({type(error).__name__}: {error})",
            "check the name and the network, or download the model and give its directory",
        ) from error


def open_source(model_name: str | Path, revision: str | None = None) -> HuggingFaceSource:
    """Open a checkpoint.

    Args:
        model_name: a local directory or a hub id such as ``Qwen/Qwen2.5-0.5B``. From a hub repository, only
            safetensors, JSON and tokenizer files are downloaded.
        revision: branch, tag or commit of a hub repository.

    Raises:
        ConversionError: there is no such directory or repository, or it holds no readable safetensors
            checkpoint.
    """
    return HuggingFaceSource(locate_source(model_name, revision))


class HuggingFaceSource:
    """A directory with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files that the
    index names.

    As in transformers, the single file is used if both exist. Headers are read when they are first needed.
    Several threads may read at once.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        self._open_files = OpenFiles()
        self._lock = threading.Lock()
        # Set it to empty first: ``_read_layout`` opens the single file, and compares it with what is known
        # about it.
        self._file_of: dict[str, str] = {}
        self._file_of = self._read_layout()

    @property
    def name(self) -> str:
        """Name of the checkpoint: id and commit of a hub repository, otherwise the directory's name."""
        snapshot = re.search(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})$", self.directory.as_posix())
        return "{}/{}@{}".format(*snapshot.groups()) if snapshot else self.directory.name

    def identity(self) -> list[list[str | int]]:
        """Return name, size and modification time of each weight file, which change when the weights
        change."""
        return identity_of(self.files())

    def files(self) -> list[Path]:
        """Return the weight files, sorted."""
        return sorted(map(self.directory.joinpath, set(self._file_of.values())))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor of that name."""
        return name in self._file_of

    def check_files(self) -> None:
        """Open every file.

        Raises:
            ConversionError: a file is damaged, or its tensors do not match the index.
        """
        for file_name in sorted(set(self._file_of.values())):
            unknown = sorted(
                name for name in set(self._open(file_name).keys()) if self._file_of.get(name) != file_name
            )
            if unknown:
                what = f"{self.directory / file_name} holds tensors that {_INDEX} does not list for it"
                raise ConversionError(what, "fetch the checkpoint again", unknown)

    def unread_files(self) -> list[str]:
        """Return the names of safetensors files in the directory that are not part of the checkpoint, such as
        shards of an earlier save."""
        read = {*self._file_of.values()}
        return sorted(
            path.name for path in self.directory.glob("model*.safetensors") if path.name not in read
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from the header.

        Raises:
            ConversionError: there is no such tensor, or its file is damaged.
        """
        return self._file(name).shape(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor, by name. Errors are those of ``shape``."""
        return {name: self.shape(name) for name in self.names()}

    def dtype_name(self, name: str) -> str:
        """Return the stored dtype of a tensor, in torch's notation (``torch.float32``), from the header.

        Raises:
            ConversionError: there is no such tensor, its file is damaged, or torch has no such dtype.
        """
        return f"torch.{self._file(name).dtype_name(name)}"

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor. Errors are those of ``dtype_name``."""
        import torch

        return getattr(torch, self.dtype_name(name).removeprefix("torch."))

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor, or a slice of it without reading other bytes.

        Args:
            name: name of the tensor.
            slices: one slice for each leading dimension, with start and stop inside the tensor and no step;
                omitted dimensions are read completely.

        Returns:
            A fresh contiguous CPU tensor of the stored dtype that shares no memory with the file.

        Raises:
            ConversionError: there is no such tensor, its file is damaged, or a slice exceeds the tensor.
        """
        return self._file(name).read(name, self.box(name, slices))

    def box(self, name: str, slices: tuple[slice, ...] | None) -> Box:
        """Return the ranges that slices select in all dimensions of the tensor. Arguments and errors are
        those of ``read``."""
        shape, slices = self.shape(name), slices or ()
        for dimension, part in enumerate(slices):
            if dimension >= len(shape) or part.step not in (None, 1) or not _inside(part, shape[dimension]):
                raise ConversionError(
                    f"{name} has shape {list(shape)}; dimension {dimension} has no {part}",
                    "read inside the tensor",
                )
        asked = tuple(part.indices(size)[:2] for part, size in zip(slices, shape, strict=False))
        return (*asked, *((0, size) for size in shape[len(asked) :]))

    def read_json(self, name: str) -> dict[str, Any] | None:
        """Return a JSON object of the directory, such as ``config.json``, or None if the file does not exist.

        Raises:
            ConversionError: the file does not hold a JSON object.
        """
        try:
            return read_json_object(self.directory / name)
        except FileNotFoundError:
            return None

    def _read_layout(self) -> dict[str, str]:
        """Return the file names by tensor name."""
        if not self.directory.is_dir():
            raise ConversionError(
                f"model directory {str(self.directory)!r} does not exist",
                "give an existing directory or a hub id",
            )
        if (self.directory / ADAPTER_CONFIG).exists():
            # transformers would fetch the base model from elsewhere, and apply the adapter.
            raise ConversionError(
                f"{self.directory} holds a PEFT adapter ({ADAPTER_CONFIG})",
                (
                    "give the directory of the base model, and with --lora that of the adapter; "
                    "megarl convert adapter converts the adapter alone"
                ),
            )
        if (self.directory / _SINGLE).exists():
            return dict.fromkeys(self._open(_SINGLE).keys(), _SINGLE)
        index = self.read_json(_INDEX)
        if index is not None:
            return self._check_index(index.get("weight_map"))
        if holds_checkpoint(self.directory):
            raise ConversionError(
                f"{self.directory} is a checkpoint of Megatron-Core (torch_dist)",
                "megarl convert export reads it",
            )
        raise self._no_weights()

    def _no_weights(self) -> ConversionError:
        """Return an error that describes what the directory holds instead of the expected files."""
        what = f"{self.directory} has neither {_SINGLE} nor {_INDEX}"
        for name in (_SINGLE, _INDEX):
            path = self.directory / name
            if path.is_symlink():
                return ConversionError(
                    f"{path} leads to {os.readlink(path)}, which does not exist", "fetch the model again"
                )
            if (unfinished := unfinished_download(path)) is not None:
                return ConversionError(
                    f"{what}, only {unfinished}, an unfinished download", "fetch the model again"
                )
        # The user may have given a directory above the model, or models--OWNER--NAME of the hub's cache.
        inside: list[Path] = []
        for pattern in ("*/config.json", "snapshots/*/config.json"):
            for path in self.directory.glob(pattern):
                if any(path.parent.glob("model*.safetensors")):
                    inside.append(path.parent)
        if inside:
            return ConversionError(
                f"{what}; its subdirectory {max(inside).relative_to(self.directory)} holds a model",
                f"give {max(inside)}",
            )
        for pattern, whose, fix in _SHARDED:
            if any(self.directory.glob(pattern)):
                return ConversionError(f"{what}, only a checkpoint of {whose} ({pattern})", fix)
        found = list[str]()
        for pattern in ("*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth"):
            found += (path.name for path in self.directory.glob(pattern))
        found.sort()
        first = found[0] if found else ""
        if first.startswith("model-") and first.endswith(".safetensors"):
            return ConversionError(
                f"{what}, only {len(found)} shards such as {first}",
                f"fetch {_INDEX} too, which says which tensor is in which shard",
            )
        if first.startswith("consolidated") and first.endswith(".safetensors"):
            return ConversionError(
                f"{what}, only {first}, in the format of Mistral's own code",
                "fetch the model's transformers format",
            )
        if any(name.endswith(".gguf") for name in found):
            return ConversionError(
                f"{what}, only {first}, a model of llama.cpp",
                "give the safetensors model that it was made of",
            )
        return ConversionError(
            what + (f", only {first}" if found else ""),
            (
                "save the model with save_pretrained of a recent transformers; only safetensors are read, "
                "since "
                "other formats may run code"
            ),
        )

    def _check_index(self, weight_map: object) -> dict[str, str]:
        """Return the index unchanged, after checking that every file it names is in the directory."""
        path = self.directory / _INDEX
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ConversionError(f"{path} has no weight_map", "fetch or write the index again")
        files = {str(name): str(file_name) for name, file_name in weight_map.items()}
        problems = unusable_names(self.directory, {*files.values()}, "safetensors file", ".safetensors")
        if problems:
            raise ConversionError(
                f"{path} names files that cannot be used", "fetch the checkpoint again", problems
            )
        return files

    def _file(self, name: str) -> SafetensorsFile:
        if name not in self._file_of:
            raise ConversionError(
                f"{self.directory} has no tensor {name!r}",
                "check that the checkpoint is complete and of this family",
            )
        return self._open(self._file_of[name])

    def _open(self, file_name: str) -> SafetensorsFile:
        """Return the open file. On first use, compare its header with the index."""
        with self._lock:
            if file_name in self._files:
                return self._files[file_name]
            path = self.directory / file_name
            # aria2 gives a file its full length at once, so that the file's size does not show an unfinished
            # download.
            if (self.directory / f"{file_name}.aria2").exists():
                raise ConversionError(
                    f"{path} is an unfinished download ({file_name}.aria2)",
                    "let the download end, or fetch it again",
                )
            opened = SafetensorsFile(path, self._open_files)
            indexed = {name for name, place in self._file_of.items() if place == file_name}
            absent = sorted(indexed - set(opened.keys()))
            if absent:
                raise ConversionError(
                    f"{path} lacks tensors that {_INDEX} lists for it", "fetch the checkpoint again", absent
                )
            self._files[file_name] = opened
            return opened


def _inside(part: slice, length: int) -> bool:
    start = 0 if part.start is None else part.start
    stop = length if part.stop is None else part.stop
    return 0 <= start <= stop <= length
