"""What an export will write, worked out from the index alone."""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.account import account
from converters.architecture import Architecture
from converters.artifacts import refuse_changed_files
from converters.check import is_excused, repeated_tensors
from converters.errors import ConversionError
from converters.export_files import Parts, WrittenTensor, in_files
from converters.fingerprints import RULES, THE_REST, WEIGHTS, fingerprint_of_rules, fingerprints
from converters.logical import MegatronModel
from converters.lora import LoraAdapter
from converters.lora_model import merge_export
from converters.manifest import MANIFEST_FILE, Manifest, dtype_name
from converters.narrowing import kept_dtype
from converters.opening import MegatronCheckpoint
from converters.rule import HuggingFaceTensor, Place, Rule
from converters.rules import all_rules, hf_tensors

DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportPlan:
    """What an export will do.

    Attributes:
        checkpoint: the source.
        written: every stored tensor, in the order of the files.
        left_out: keys of the checkpoint without a counterpart that were excused.
        dtype: that was asked for.
        missing: Hugging Face tensors that the checkpoint does not have, and is excused for.
        adapter: that is merged into the tensors of the checkpoint.
        max_shard_bytes: largest file, bytes of tensors.
    """

    checkpoint: MegatronCheckpoint
    written: tuple[WrittenTensor, ...]
    left_out: tuple[str, ...]
    dtype: torch.dtype | None = None
    missing: tuple[str, ...] = ()
    adapter: LoraAdapter | None = None
    max_shard_bytes: int = DEFAULT_SHARD_BYTES

    @property
    def notes(self) -> dict[str, Any]:
        """What the conversion will say of itself that follows from the plan."""
        return {} if self.adapter is None else self.adapter.notes()

    @property
    def model(self) -> MegatronModel:
        """The source's tensors."""
        return self.checkpoint.model

    @property
    def architecture(self) -> Architecture:
        """Of the model."""
        return self.model.architecture

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size for tensor in self.written)

    @functools.cached_property
    def files(self) -> dict[str, list[WrittenTensor]]:
        """Tensors by file."""
        files: dict[str, list[WrittenTensor]] = {}
        for tensor in self.written:
            files.setdefault(tensor.file, []).append(tensor)
        return files

    @property
    def main_dtype(self) -> torch.dtype:
        """The dtype that most bytes have."""
        sizes: Counter[torch.dtype] = Counter()
        for tensor in self.written:
            sizes[tensor.dtype] += tensor.size
        return max(sizes, key=lambda dtype: sizes[dtype])

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """Changes with whatever changes the bytes that will be written; by the name of what decides about them."""
        return fingerprints(
            {
                WEIGHTS: self.checkpoint.identity(),
                "config.json": self.checkpoint.config,
                RULES: fingerprint_of_rules(all_rules(self.architecture)),
                "--source-weights": self.checkpoint.weights,
                "--dtype": str(self.dtype),
                "--max-shard-size": self.max_shard_bytes if len(self.files) > 1 else None,
                "--allow-missing": [self.missing, self.left_out],
                "--lora": [] if self.adapter is None else self.adapter.identity(),
                THE_REST: [[tensor.name, tensor.shape, dtype_name(tensor.dtype), tensor.file, tensor.offset] for tensor in self.written],
            }
        )


def plan_export(
    checkpoint: MegatronCheckpoint,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_missing: tuple[str, ...] = (),
    lora: Path | None = None,
) -> ExportPlan:
    """Work out an export.

    Args:
        checkpoint: the Megatron checkpoint.
        dtype: of all tensors; None keeps what the checkpoint has, and where the import had to widen a tensor, what it was before.
        max_shard_bytes: largest safetensors file, bytes of tensors; a larger single tensor gets a file of its own.
        allow_missing: patterns (``*`` and ``?``) of names on either side that need no counterpart on the other.
        lora: directory of a PEFT adapter to merge.

    Raises:
        ConversionError: the checkpoint does not hold the model that its config describes.
    """
    if max_shard_bytes < 1:
        raise ConversionError(f"max-shard-size = {max_shard_bytes}: at least one byte is needed", "leave it out, or pass 5GB")
    if checkpoint.unanswered:
        raise ConversionError(
            f"nothing says the special tokens of {checkpoint.directory}, whose config is made of its trainer's settings",
            f"pass {', '.join(checkpoint.unanswered)} (or none), or --tokenizer DIRECTORY with a generation_config.json",
        )
    adapter = None
    if lora is not None:
        checkpoint, adapter = merge_export(checkpoint, lora, dtype)
    model = checkpoint.model
    rules, left_out = account(model, allow_missing)
    _check_manifest(checkpoint, rules, allow_missing)
    stored = _stored(rules, checkpoint.manifest)
    written: list[tuple[str, tuple[int, ...], torch.dtype, Parts]] = []
    for place, parts in stored:
        dtypes = {kept_dtype(part, _dtype(model, checkpoint.manifest, part), dtype) for part, _ in parts}
        if len(dtypes) > 1:
            raise ConversionError(f"{place.name} is made of tensors of different dtypes", "pass --dtype to choose one")
        written.append((place.name, place.shape, dtypes.pop(), parts))
    there = {part.name for rule in rules for part in rule.parts}
    missing = tuple(part.name for part in hf_tensors(model.architecture) if part.name not in there)
    return ExportPlan(checkpoint, tuple(in_files(written, max_shard_bytes)), left_out, dtype, missing, adapter, max_shard_bytes)


def _check_manifest(checkpoint: MegatronCheckpoint, rules: list[Rule], excused: tuple[str, ...]) -> None:
    """Refuse files and tensors that are not those of the conversion which made the checkpoint.

    Raises:
        ConversionError: a file beside the weights was changed, there are other tensors, or the manifest says what no model of the family
            does.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        return
    if checkpoint.hf_directory is not None:
        refuse_changed_files(checkpoint.hf_directory, checkpoint.directory, checkpoint.recorded_files)
    there = {name for rule in rules for name in rule.hf_names}
    problems = [f"{name!r} is in the checkpoint, and it does not know it" for name in sorted(there - set(manifest.tensors))]
    gone = [name for name in manifest.tensors if name not in there and not is_excused([name], (*excused, *manifest.excused))]
    problems += [f"{name!r} is in it, and not in the checkpoint" for name in gone]
    known = repeated_tensors(checkpoint.model.architecture)
    doubled = [(name, original) for name, original in manifest.also_stored.items() if known.get(name) != original]
    problems += [f"{name!r} repeats {original!r}, which no {manifest.family} model does" for name, original in doubled]
    if problems:
        raise ConversionError(
            f"{checkpoint.directory / MANIFEST_FILE} and the checkpoint do not belong together",
            f"import again, or remove {MANIFEST_FILE} if the weights were changed on purpose",
            problems,
        )


def _stored(rules: list[Rule], manifest: Manifest | None) -> list[tuple[Place, Parts]]:
    """What is stored: every tensor alone under its name, or where the source of the import had it."""
    together: dict[str, list[tuple[HuggingFaceTensor, Place]]] = {}
    for rule in rules:
        for part in rule.parts:
            place = part.places[0]
            described = manifest.places.get(part.name) if manifest is not None else None
            for other in part.alternatives:
                if other.written and described is not None and other.name == described["name"]:
                    place = other
            together.setdefault(place.name, []).append((part, place))
    return [(Place(name, parts[0][1].shape), tuple(parts)) for name, parts in together.items()] + _repeated(rules, manifest)


def _repeated(rules: list[Rule], manifest: Manifest | None) -> list[tuple[Place, Parts]]:
    """Tensors that the source stored a second time under another name."""
    parts = {part.name: part for rule in rules for part in rule.parts}
    again: list[tuple[Place, Parts]] = []
    for name, original in (manifest.also_stored if manifest is not None else {}).items():
        if original in parts and name not in parts:
            place = Place(name, parts[original].shape)
            again.append((place, ((parts[original], place),)))
    return again


def _dtype(model: MegatronModel, manifest: Manifest | None, part: HuggingFaceTensor) -> torch.dtype:
    """What a tensor is stored in; what it was in before an import widened it, to keep one dtype in a stack of layers."""
    stored = model.dtype(part)
    return stored if manifest is None else manifest.dtype_before(part.name, stored)
