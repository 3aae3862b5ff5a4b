"""Open a Hugging Face or Megatron checkpoint with its config and its manifest."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from converters.check import check_plausible
from converters.checkpoint.artifacts import HF_DIRECTORY, config_hash, read_config
from converters.checkpoint.manifest import ConversionManifest, dtype_name, read_manifest
from converters.checkpoint.quantized import DequantizedSource, open_dequantized
from converters.checkpoint.source import HuggingFaceSource
from converters.checkpoint.work import Answer
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.files.reading import identity_of
from converters.foreign.agreement import check_agreement
from converters.foreign.hf_config import derived_config
from converters.foreign.master_weights import optimizer_beside
from converters.foreign.opening import canonical, read_settings, tensors_of, token_entries, vocab_size_of
from converters.foreign.options import MODEL_WEIGHTS, OpeningOptions
from converters.foreign.settings import ForeignSettings
from converters.foreign.view import EMBEDDING
from converters.mapping.logical import HuggingFaceModel, MegatronModel
from converters.mapping.rule import HuggingFaceTensor
from converters.mapping.rules import hf_tensors, missing_names
from converters.model_config.prediction_layers import as_stored
from converters.torch_dist.keys import is_of_optimizer
from converters.torch_dist.location import find_checkpoint
from converters.torch_dist.reader import StoredTensors, TorchDistCheckpoint

MEGATRON, HUGGING_FACE = "megatron", "huggingface"


@dataclass(frozen=True)
class MegatronCheckpoint:
    """A ``torch_dist`` checkpoint with the config of its model.

    Attributes:
        directory: directory of the checkpoint itself.
        model: the model's tensors.
        hf_directory: directory with config, tokenizer and so on; None if there is none.
        config: contents of ``config.json``.
        config_hash: SHA-256 of ``config.json``; None if the config was derived.
        manifest: manifest of the conversion that wrote the checkpoint, if any.
        config_is_made: the config was derived from the trainer's settings.
        unanswered: command line flags for values that a derived config lacks, and that an export needs.
        padding_is_free: padding rows of the vocabulary may have any values, because other trainers initialize
            them arbitrarily.
        stored: the tensors as they are stored.
        weights: the selected weights (``OpeningOptions``).
        absent_predictors: number of multi-token-prediction layers in the config that the checkpoint of a
            training run lacks; 0 for a conversion.
    """

    directory: Path
    model: MegatronModel
    hf_directory: Path | None
    config: dict[str, Any]
    manifest: ConversionManifest | None
    stored: TorchDistCheckpoint
    config_is_made: bool = False
    unanswered: tuple[str, ...] = ()
    padding_is_free: bool = False
    weights: str = MODEL_WEIGHTS
    config_hash: str | None = None
    absent_predictors: int = 0

    @property
    def recorded_files(self) -> dict[str, str]:
        """File -> hash in the manifest, for files in ``hf_directory``. Empty without a manifest, or if
        ``hf_directory`` is outside of the checkpoint."""
        own = self.manifest is not None and self.hf_directory == self.directory / HF_DIRECTORY
        return self.manifest.files if self.manifest is not None and own else {}

    def dtype_before(self, name: str, stored: torch.dtype) -> torch.dtype:
        """Return the dtype that a tensor had before an import widened it to the dtype of its stack of layers.

        Args:
            name: Hugging Face tensor name.
            stored: dtype in the checkpoint; returned if the tensor was not widened.
        """
        return stored if self.manifest is None else self.manifest.dtype_before(name, stored)

    def identity(self) -> list[Any]:
        """Return name, size and modification time of each file; they change when the weights change."""
        # Master weights are stored in the optimizer's files.
        places = [
            self.directory,
            *([] if self.weights == MODEL_WEIGHTS else optimizer_beside(self.directory)),
        ]
        files: list[Path] = []
        for place in places:
            files += sorted(filter(Path.is_file, place.iterdir()))
        return identity_of(files)


def open_megatron(path: Path, options: OpeningOptions | None = None) -> MegatronCheckpoint:
    """Open a Megatron checkpoint.

    Args:
        path: the checkpoint, or a trainer's directory that contains it (``find_checkpoint``).
        options: values that the checkpoint lacks, and which weights to read.

    Raises:
        ConversionError: there is no checkpoint, its model is unknown, or config, settings and options
            contradict each other.
    """
    options = options or OpeningOptions()
    directory = find_checkpoint(path)
    checkpoint = TorchDistCheckpoint(directory)
    tensors, settings = tensors_of(checkpoint, options.weights), read_settings(checkpoint, options)
    hf_directory = options.hf_directory or _stored_config(directory, path)
    # Hash before reading, so that a change in between is detected at the end of an export.
    hash_of_config = None if hf_directory is None else config_hash(hf_directory)
    config = (
        _made_config(directory, settings, options, tensors)
        if hf_directory is None
        else _given_config(hf_directory, options)
    )
    described = read_architecture(config, options.ignored_config_keys)
    architecture = as_stored(described, tensors)
    # A wrong number in the config could request terabytes, so check it before using its sizes.
    check_plausible(architecture, {key: tensors.shape(key) for key in tensors}, str(directory), stacked=True)
    if settings is not None:
        check_agreement(settings, architecture, options.ignored_settings)
    made = hf_directory is None
    # Hashes in a manifest are of the model weights, not of the master weights.
    manifest = read_manifest(directory) if options.weights == MODEL_WEIGHTS else None
    return MegatronCheckpoint(
        directory,
        MegatronModel(canonical(tensors, architecture), architecture),
        options.tokenizer if made else hf_directory,
        config,
        manifest,
        checkpoint,
        config_is_made=made,
        unanswered=("--eos-token-id",)
        if made and config.get("eos_token_id") is None and options.eos_token_ids is None
        else (),
        padding_is_free=settings is not None and manifest is None,
        weights=options.weights,
        config_hash=hash_of_config,
        absent_predictors=described.prediction_layers - architecture.prediction_layers
        if manifest is None
        else 0,
    )


@dataclass(frozen=True)
class Opened:
    """An opened checkpoint of either format."""

    path: Path
    model: HuggingFaceModel | MegatronModel
    manifest: ConversionManifest | None
    megatron: MegatronCheckpoint | None = None

    @property
    def files(self) -> Path | None:
        """Directory with the files next to the weights; None if there is none."""
        return self.path if self.megatron is None else self.megatron.hf_directory

    @property
    def recorded_files(self) -> dict[str, str]:
        """File -> hash that a conversion recorded, for files next to the weights; empty if none are
        recorded."""
        if self.megatron is not None:
            return self.megatron.recorded_files
        return {} if self.manifest is None else self.manifest.files

    @property
    def config(self) -> dict[str, Any] | None:
        """Contents of ``config.json``; None if the config was derived from a trainer's settings."""
        if self.megatron is None:
            return read_config(self.path)
        return None if self.megatron.config_is_made else self.megatron.config

    @functools.cached_property
    def tensors(self) -> dict[str, HuggingFaceTensor]:
        """Hugging Face tensors that the checkpoint contains, by name."""
        return {
            tensor.name: tensor for tensor in hf_tensors(self.model.architecture) if self.model.holds(tensor)
        }

    def dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """Return the dtype of a tensor; if an import widened it, the original dtype."""
        stored = self.model.dtype(tensor)
        # Exports do not widen, so another dtype than the manifest's is a difference.
        return stored if self.megatron is None else self.megatron.dtype_before(tensor.name, stored)


def open_any(path: Path, options: OpeningOptions | None = None) -> Opened:
    """Open a checkpoint of either format. The options apply to Megatron checkpoints.

    Raises:
        ConversionError: the checkpoint has neither format, or is damaged.
    """
    if kind_of(path) == MEGATRON:
        checkpoint = open_megatron(path, options)
        return Opened(path, checkpoint.model, checkpoint.manifest, checkpoint)
    ignored = (options or OpeningOptions()).ignored_config_keys
    return Opened(path, open_huggingface(open_dequantized(path), ignored), read_manifest(path))


def _stored_config(directory: Path, given: Path) -> Path | None:
    # Prefer the checkpoint's own config to one that a trainer stores for all its checkpoints.
    places = (directory / HF_DIRECTORY, directory, given / HF_DIRECTORY, directory.parent / HF_DIRECTORY)
    return next((place for place in places if (place / "config.json").is_file()), None)


def _given_config(hf_directory: Path, options: OpeningOptions) -> dict[str, Any]:
    """Return the config in a directory.

    Raises:
        ConversionError: the options contradict the config.
    """
    config = read_config(hf_directory)
    if options.tokenizer is not None:
        raise ConversionError(
            f"{hf_directory} already says which config and tokenizer belong to the model",
            "leave --tokenizer out",
        )
    # A vision-language model has its text settings in a section.
    said = (config.get("text_config") or config).get("vocab_size")
    if options.vocab_size not in (None, said):
        raise ConversionError(
            f"vocab-size = {options.vocab_size}, but {hf_directory / 'config.json'} says {said!r}",
            "leave --vocab-size out",
        )
    return config


def _made_config(
    directory: Path, settings: ForeignSettings | None, options: OpeningOptions, tensors: StoredTensors
) -> dict[str, Any]:
    """Return a config that is derived from the trainer's settings."""
    if settings is None:
        raise ConversionError(
            f"{directory} does not say which model it is ({HF_DIRECTORY}/config.json is missing)",
            "pass --hf-config DIRECTORY, with the config.json of the model",
        )
    if EMBEDDING not in tensors:
        raise ConversionError(
            f"{directory} has no {EMBEDDING}", "give the checkpoint of a complete language model"
        )
    return derived_config(
        settings, vocab_size_of(settings, options, tensors.shape(EMBEDDING)[0]), token_entries(options)
    )


def open_huggingface(
    source: HuggingFaceSource, ignored_config_keys: tuple[str, ...] = ()
) -> HuggingFaceModel:
    """Open the tensors of a Hugging Face checkpoint.

    Args:
        source: the checkpoint.
        ignored_config_keys: see ``OpeningOptions``.

    Raises:
        ConversionError: the checkpoint has no config, or one that is not supported.
    """
    config = source.read_json("config.json")
    if config is None:
        raise ConversionError(
            f"{source.directory} has no config.json", "give the directory of a complete model"
        )
    architecture = as_stored(read_architecture(config, ignored_config_keys), source.names())
    # A wrong size in the config could request terabytes, so compare with the stored shapes first.
    check_plausible(architecture, source.shapes(), str(source.directory), stacked=False)
    return HuggingFaceModel(source, architecture)


def kind_of(path: Path) -> str:
    """Return the format of a checkpoint: ``megatron`` or ``huggingface``.

    Raises:
        ConversionError: the directory has neither format.
    """
    if any(path.glob("*.safetensors")) or (path / "model.safetensors.index.json").is_file():
        return HUGGING_FACE
    if not path.is_dir():
        raise ConversionError(
            f"{path} is not a directory",
            "give the directory of a Hugging Face model or of a Megatron checkpoint",
        )
    # Raises if there is no Megatron checkpoint either.
    find_checkpoint(path)
    return MEGATRON


def describe(opened: Opened) -> dict[str, Any]:
    """Return format, family, dimensions, dtypes and layout of a checkpoint.

    Returns:
        ``path``, ``format``, ``family``, ``parameters``, ``bytes``, ``dtypes`` (dtype -> number of tensors),
            ``tied_embeddings`` and ``architecture`` (fields of ``Architecture``). If applicable also
            ``missing`` (tensor names) and the format of quantised weights; for Megatron ``layers`` (stacked
            or indexed), ``padded_vocabulary`` and ``optimizer_state``; for conversions ``converted_from`` and
            ``manifest_tensors``.
    """
    architecture = opened.model.architecture
    dtypes: Counter[str] = Counter()
    elements = size = 0
    for tensor in opened.tensors.values():
        dtype, count = opened.model.dtype(tensor), torch.Size(tensor.shape).numel()
        dtypes[dtype_name(dtype)] += 1
        elements += count
        size += count * dtype.itemsize
    missing = list(missing_names(architecture, opened.tensors))
    facts: dict[str, Any] = {
        "path": str(opened.path),
        "format": MEGATRON if opened.megatron is not None else HUGGING_FACE,
        "family": architecture.family,
        "parameters": elements,
        "bytes": size,
        "dtypes": dict(dtypes),
        "tied_embeddings": architecture.tied_embeddings,
    }
    if missing:
        facts["missing"] = missing
    if isinstance(opened.model, HuggingFaceModel) and isinstance(opened.model.source, DequantizedSource):
        facts |= opened.model.source.notes()
    if isinstance(opened.model, MegatronModel):
        facts["layers"] = "stacked" if opened.model.stacked else "indexed"
        rows = opened.model.checkpoint.shape(EMBEDDING)[0] if EMBEDDING in opened.model.checkpoint else 0
        if rows > architecture.vocab_size:
            facts["padded_vocabulary"] = rows
        facts |= {"optimizer_state": any(map(is_of_optimizer, opened.model.checkpoint))}
    if opened.manifest is not None:
        facts |= {"converted_from": opened.manifest.source, "manifest_tensors": len(opened.manifest.tensors)}
    return facts | {"architecture": asdict(architecture)}


def inspect_path(path: Path, options: OpeningOptions) -> Answer:
    """Return the result of ``inspect``; arguments and errors as in ``open_any``."""
    facts = describe(open_any(path, options))
    lines = [f"{key.replace('_', ' ')}: {value}" for key, value in facts.items() if key != "architecture"]
    lines.append("values: not read; verify reads them")
    return (
        0,
        facts,
        "\n".join(
            [*lines, "architecture:", *(f"  {key}: {value}" for key, value in facts["architecture"].items())]
        ),
    )
