"""Read Hugging Face safetensors checkpoints: headers, and slices of tensors. torch is imported with the first
tensor."""

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
# Download weights, configs, tokenizers, code, chat templates and documentation from the top level of a
# repository, but no pickles or second copies. The code is only copied, because a tokenizer's config may refer
# to it.
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

# Sharded formats of trainers, which transformers cannot read: pattern, name, fix.
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
    """Return the directory of a checkpoint; a hub repository is downloaded first. Arguments and errors as in
    ``open_source``."""
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
    # A hub id is NAME or OWNER/NAME, so anything else must be a path.
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
    # Errors of the hub client, its HTTP library and the file system all mean that the download failed.
    except Exception as error:
        raise ConversionError(
            f"no such directory: {repository!r}; and as a hub id (revision {revision or 'default'}) it could "
            f"not be fetched ({type(error).__name__}: {error})",
            "check the name and the network, or download the model and give its directory",
        ) from error


def open_source(model_name: str | Path, revision: str | None = None) -> HuggingFaceSource:
    """Open a checkpoint.

    Args:
        model_name: local directory, or hub id such as ``Qwen/Qwen2.5-0.5B``. Only safetensors, JSON,
            tokenizer and code files of a repository are downloaded.
        revision: branch, tag or commit of a hub repository.

    Raises:
        ConversionError: the directory or repository does not exist, or contains no readable safetensors
            checkpoint.
    """
    return HuggingFaceSource(locate_source(model_name, revision))


class HuggingFaceSource:
    """A directory with ``model.safetensors``, or with ``model.safetensors.index.json`` and the files that it
    lists.

    If both exist, the single file is used, as in transformers. Headers are read on first use. Thread-safe.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[str, SafetensorsFile] = {}
        self._open_files = OpenFiles()
        self._lock = threading.Lock()
        # ``_read_layout`` may open the single file, and ``_open`` compares a header with this attribute.
        self._file_of: dict[str, str] = {}
        self._file_of = self._read_layout()

    @property
    def name(self) -> str:
        """Id and commit of a hub repository, else the name of the directory."""
        snapshot = re.search(r"models--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})$", self.directory.as_posix())
        return "{}/{}@{}".format(*snapshot.groups()) if snapshot else self.directory.name

    def identity(self) -> list[list[str | int]]:
        """Return name, size and modification time of each weight file; they change when the weights
        change."""
        return identity_of(self.files())

    def files(self) -> list[Path]:
        """Return the weight files, sorted."""
        return sorted(map(self.directory.joinpath, set(self._file_of.values())))

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(self._file_of)

    def __contains__(self, name: str) -> bool:
        """Return whether there is a tensor with a name."""
        return name in self._file_of

    def check_files(self) -> None:
        """Open every file and compare its header with the index.

        Raises:
            ConversionError: a file is damaged or does not match the index.
        """
        for file_name in sorted(set(self._file_of.values())):
            unknown = sorted(
                name for name in set(self._open(file_name).keys()) if self._file_of.get(name) != file_name
            )
            if unknown:
                what = f"{self.directory / file_name} holds tensors that {_INDEX} does not list for it"
                raise ConversionError(what, "fetch the checkpoint again", unknown)

    def unread_files(self) -> list[str]:
        """Return the safetensors files in the directory that the index does not list, such as shards of an
        earlier save."""
        read = {*self._file_of.values()}
        return sorted(
            path.name for path in self.directory.glob("model*.safetensors") if path.name not in read
        )

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor.

        Raises:
            ConversionError: the tensor does not exist, or its file is damaged.
        """
        return self._file(name).shape(name)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return name -> shape of all tensors; errors as in ``shape``."""
        return {name: self.shape(name) for name in self.names()}

    def dtype_name(self, name: str) -> str:
        """Return the stored dtype of a tensor as torch prints it (``torch.float32``), without importing
        torch.

        Raises:
            ConversionError: the tensor does not exist, its file is damaged, or the dtype is not supported.
        """
        return f"torch.{self._file(name).dtype_name(name)}"

    def dtype(self, name: str) -> torch.dtype:
        """Return the stored dtype of a tensor; errors as in ``dtype_name``."""
        import torch

        return getattr(torch, self.dtype_name(name).removeprefix("torch."))

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """Read a tensor, or only the bytes of a slice of it.

        Args:
            name: name of the tensor.
            slices: a slice without step for each leading dimension; further dimensions are read in full.

        Returns:
            A new contiguous CPU tensor with the stored dtype.

        Raises:
            ConversionError: the tensor does not exist, its file is damaged, or a slice exceeds the tensor.
        """
        return self._file(name).read(name, self.box(name, slices))

    def box(self, name: str, slices: tuple[slice, ...] | None) -> Box:
        """Convert slices to a (start, stop) range for each dimension of a tensor; arguments and errors as in
        ``read``."""
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
        """Return the JSON object in a file of the directory, such as ``config.json``; None if the file does
        not exist.

        Raises:
            ConversionError: the file contains no JSON object.
        """
        try:
            return read_json_object(self.directory / name)
        except FileNotFoundError:
            return None

    def _read_layout(self) -> dict[str, str]:
        """Return tensor name -> file name."""
        if not self.directory.is_dir():
            raise ConversionError(
                f"model directory {str(self.directory)!r} does not exist",
                "give an existing directory or a hub id",
            )
        if (self.directory / ADAPTER_CONFIG).exists():
            # transformers would download the base model and apply the adapter.
            raise ConversionError(
                f"{self.directory} holds a PEFT adapter ({ADAPTER_CONFIG})",
                (
                    "give the directory of the base model, and with --lora that of the adapter; "
                    "megarl convert adapter converts the adapter alone, and verify compares two adapters"
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
        """Return an error that explains which other format the directory contains."""
        what = f"{self.directory} has neither {_SINGLE} nor {_INDEX}"
        for name in (_SINGLE, _INDEX):
            path = self.directory / name
            # ``exists`` follows links, so a broken link looks like a missing file.
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
        """Check that every file of the index is in the directory, and return the index."""
        path = self.directory / _INDEX
        if not isinstance(weight_map, Mapping) or not weight_map:
            raise ConversionError(f"{path} has no weight_map", "fetch or write the index again")
        files = {str(name): str(file_name) for name, file_name in weight_map.items()}
        # The index is untrusted: a name such as ../x must not be opened.
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
        """Return an opened file. On first use, compare its header with the index."""
        with self._lock:
            if file_name in self._files:
                return self._files[file_name]
            path = self.directory / file_name
            # aria2 allocates the full length at once, so the size does not show an unfinished download.
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
