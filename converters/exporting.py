"""Export a ``torch_dist`` checkpoint to Hugging Face safetensors, chunk by chunk, without a Hugging Face
reference model.

The plan is computed from headers alone, and gives the file and the byte offset of every tensor.
"""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.adapters.lora_model import merge_export
from converters.check import account, is_excused, repeated_tensors
from converters.checkpoint.artifacts import (
    artifacts,
    copy_artifacts,
    file_hashes,
    refuse_changed_config,
    refuse_changed_files,
    write_config,
)
from converters.checkpoint.boxes import read_box, whole, write_bytes
from converters.checkpoint.manifest import (
    MANIFEST_FILE,
    ConversionManifest,
    TensorRecord,
    dtype_name,
    fingerprints,
    read_manifest,
)
from converters.checkpoint.narrowing import Narrowing, kept_dtype, main_dtype
from converters.checkpoint.quantized import open_dequantized
from converters.checkpoint.safetensors_file import DTYPE_NAMES, OpenFiles
from converters.checkpoint.staging import Staging, check_apart, others_than
from converters.checkpoint.work import ConversionResult, RunOptions, row_ranges
from converters.conversion import Chunk, Conversion, Plan, Rows, convert
from converters.errors import ConversionError
from converters.families.vision import MEGATRON_PREFIX
from converters.mapping.rule import HuggingFaceTensor, Rule, TensorLocation, parts_in
from converters.mapping.rules import all_rules, missing_names
from converters.opening import MegatronCheckpoint, open_huggingface
from converters.untouched import Completed

_STORED_NAMES = {getattr(torch, name): stored for stored, name in DTYPE_NAMES.items()}
Parts = tuple[tuple[HuggingFaceTensor, TensorLocation], ...]
"""Hugging Face tensors in a stored tensor, each with its location there."""


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to be written to a safetensors file.

    Attributes:
        key, shape, dtype: name, shape and dtype in the file.
        parts: Hugging Face tensors that it contains, with their locations; usually one.
        file: name of the file.
        offset: byte offset, from the end of the header.
    """

    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    parts: Parts
    file: str
    offset: int

    @property
    def blocks(self) -> dict[int, list[tuple[HuggingFaceTensor, TensorLocation]]]:
        """Expert -> its parts, if their rows are not consecutive in the stored tensor; else empty. Such an
        expert's block is assembled in memory and written as a whole."""
        blocks: dict[int, list[tuple[HuggingFaceTensor, TensorLocation]]] = {}
        # Interleaved rows are not ranges of the file, so all parts of one expert are written together.
        if any(not place.is_consecutive for _, place in self.parts):
            for part, place in self.parts:
                assert place.index is not None, place
                blocks.setdefault(place.index, []).append((part, place))
        return blocks

    @property
    def size(self) -> int:
        """Size in bytes."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def in_files(
    tensors: Sequence[tuple[str, tuple[int, ...], torch.dtype, Parts]], max_bytes: int
) -> list[WrittenTensor]:
    """Assign tensors to files of at most ``max_bytes``, in order. In each file wide dtypes come first, so
    that all tensors are aligned.

    Args:
        tensors: (name, shape, dtype, parts) of each tensor.
        max_bytes: maximum bytes of tensors per file.
    """
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
        file = (
            "model.safetensors" if len(groups) == 1 else f"model-{index:05d}-of-{len(groups):05d}.safetensors"
        )
        offset = 0
        for number in sorted(group, key=lambda number: -tensors[number][2].itemsize):
            name, shape, dtype, parts = tensors[number]
            written.append(WrittenTensor(name, shape, dtype, parts, file, offset))
            offset += written[-1].size
    return written


def header_of(tensors: Sequence[WrittenTensor]) -> bytes:
    """Return the header of a safetensors file with these tensors, with its length in front."""
    entries = {
        tensor.key: {
            "dtype": _STORED_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [tensor.offset, tensor.offset + tensor.size],
        }
        for tensor in tensors
    }
    # Older releases of transformers do not load a file whose metadata does not name the format.
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    # The format wants tensors to begin at a multiple of 8 bytes, and lets the header end in spaces.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def index_of(tensors: Sequence[WrittenTensor]) -> str | None:
    """Return the contents of ``model.safetensors.index.json``; None if there is a single file."""
    # Loaders find a single file without an index.
    if len({tensor.file for tensor in tensors}) == 1:
        return None
    weight_map = {tensor.key: tensor.file for tensor in sorted(tensors, key=lambda tensor: tensor.key)}
    size = sum(tensor.size for tensor in tensors)
    return json.dumps({"metadata": {"total_size": size}, "weight_map": weight_map}, indent=2) + "\n"


def _others_than_exported(directory: Path) -> list[str]:
    """Return the files of a directory that no export has written."""
    manifest = read_manifest(directory)
    beside = map(re.escape, (MANIFEST_FILE, *(() if manifest is None else manifest.files)))
    weights = r"model[^/]*\.safetensors(\.index\.json)?"
    return others_than(re.compile("|".join((weights, *beside))), MANIFEST_FILE, directory)


DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """Plan of an export.

    Attributes:
        checkpoint: the source.
        written: all tensors to write, in the order of the files.
        max_shard_bytes: maximum bytes of tensors per file.
    """

    checkpoint: MegatronCheckpoint
    written: tuple[WrittenTensor, ...]
    max_shard_bytes: int

    @property
    def notes(self) -> dict[str, Any]:
        """Notes for the manifest that follow from the plan."""
        checkpoint, notes = self.checkpoint, super().notes
        if checkpoint.absent_predictors and not self.architecture.prediction_layers:
            notes["prediction_layers"] = (
                f"{checkpoint.absent_predictors} counted in config.json are missing from the checkpoint, "
                "because training leaves them out, and from the export; --untouched-from DIRECTORY of the "
                "model that was trained adds them"
            )
        if checkpoint.config_is_made:
            tokens = (f"{key} = {value}" for key, value in checkpoint.config.items() if "_token_id" in key)
            notes["config.json"] = f"made from the trainer's settings, except {', '.join(tokens)}"
            if checkpoint.hf_directory is None:
                notes["not_written"] = (
                    "tokenizer, chat template, generation_config.json; --hf-config DIRECTORY of the model "
                    "that was trained gives them, and its own config.json"
                )
        return notes

    @functools.cached_property
    def files(self) -> dict[str, list[WrittenTensor]]:
        """File name -> tensors."""
        files: dict[str, list[WrittenTensor]] = {}
        for tensor in self.written:
            files.setdefault(tensor.file, []).append(tensor)
        return files

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """Name -> fingerprint of everything that determines the output."""
        rest = [
            [tensor.key, tensor.shape, dtype_name(tensor.dtype), tensor.file, tensor.offset]
            for tensor in self.written
        ]
        # With a single file, the size limit has no effect.
        shard_size = self.max_shard_bytes if len(self.files) > 1 else None
        options = {"--source-weights": self.checkpoint.weights, "--max-shard-size": shard_size}
        begun = self.model.begun.source.identity() if isinstance(self.model, Completed) else []
        weights = [*self.checkpoint.identity(), *begun]
        return self.fingerprint_with(
            weights, self.checkpoint.config, all_rules(self.architecture), rest, **options
        )

    @property
    def fingerprint_of_files(self) -> dict[str, str]:
        """Hashes of the files that are copied next to the weights, such as the tokenizer. Any part of a
        conversion may be the one that copies them, so the hashes must be equal for all parts."""
        directory = self.checkpoint.hf_directory
        return fingerprints(
            {
                "the files beside the weights (of the checkpoint, --hf-config or --tokenizer)": {}
                if directory is None
                else file_hashes(directory)
            }
        )


def plan_export(
    checkpoint: MegatronCheckpoint,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_missing: tuple[str, ...] = (),
    lora: Path | None = None,
    untouched_from: Path | None = None,
) -> ExportPlan:
    """Plan an export.

    Args:
        checkpoint: the Megatron checkpoint.
        dtype: dtype of all tensors; None keeps the checkpoint's dtypes, and narrows tensors that an import
            has widened to their original dtype.
        max_shard_bytes: maximum bytes of tensors per file; a larger tensor gets a file of its own.
        allow_missing: patterns (``*`` and ``?``) of names that may have no counterpart.
        lora: directory of an adapter to merge.
        untouched_from: the model that training started from; provides the parts that training leaves
            unchanged.

    Raises:
        ConversionError: the checkpoint does not contain the model that its config describes.
    """
    if max_shard_bytes < 1:
        raise ConversionError(
            f"max-shard-size = {max_shard_bytes}: at least one byte is needed", "leave it out, or pass 5GB"
        )
    if checkpoint.unanswered:
        raise ConversionError(
            f"the special tokens of {checkpoint.directory} are unknown: its config is made from "
            "its trainer's settings",
            (
                "pass --hf-config DIRECTORY of the model that was trained, with its tokenizer; or without "
                f"one {', '.join(checkpoint.unanswered)} (or none), or --tokenizer DIRECTORY with a "
                "generation_config.json"
            ),
        )
    if untouched_from is not None:
        completed = Completed(checkpoint.model, open_huggingface(open_dequantized(untouched_from)))
        checkpoint = replace(checkpoint, model=completed)
    elif checkpoint.model.architecture.vision is not None and not is_excused([_OF_TOWER], allow_missing):
        _require_tower(checkpoint)
    adapter = None
    if lora is not None:
        checkpoint, adapter = merge_export(checkpoint, lora, dtype)
    model = checkpoint.model
    rules, left_out = account(model, allow_missing)
    _check_manifest(checkpoint, rules, allow_missing)
    stored = _stored(rules, checkpoint.manifest)
    written: list[tuple[str, tuple[int, ...], torch.dtype, Parts]] = []
    dtypes: dict[str, torch.dtype] = {}
    for place, parts in stored:
        kept = set()
        for part, _ in parts:
            before = checkpoint.dtype_before(part.name, model.dtype(part))
            dtypes[part.name] = kept_dtype(part, before, dtype)
            kept.add(dtypes[part.name])
        if len(kept) > 1:
            raise ConversionError(
                f"{place.name} is made of tensors of different dtypes", "pass --dtype to choose one"
            )
        written.append((place.name, place.shape, kept.pop(), parts))
    return ExportPlan(
        checkpoint=checkpoint,
        model=model,
        written=tuple(in_files(written, max_shard_bytes)),
        dtypes=dtypes,
        left_out=left_out,
        missing=missing_names(model.architecture, dtypes),
        adapter=adapter,
        dtype_asked=dtype,
        max_shard_bytes=max_shard_bytes,
    )


_OF_TOWER = "model.visual.pos_embed.weight"


def _require_tower(checkpoint: MegatronCheckpoint) -> None:
    """Reject a training checkpoint of a vision-language model, which lacks the vision tower. transformers
    would initialize the tower randomly."""
    if not any(key.startswith(MEGATRON_PREFIX) for key in checkpoint.model.checkpoint):
        raise ConversionError(
            f"{checkpoint.directory} holds only the text part of a vision-language model, as "
            "training writes it",
            (
                "pass --untouched-from DIRECTORY of the model that was trained, or --allow-missing "
                "'model.visual.*' to leave its tower out"
            ),
        )


def _check_manifest(checkpoint: MegatronCheckpoint, rules: list[Rule], excused: tuple[str, ...]) -> None:
    """Check that a checkpoint still matches the manifest of the conversion that wrote it.

    Raises:
        ConversionError: a file next to the weights was changed, tensors were added or removed, or the
            manifest contradicts the family.
    """
    manifest = checkpoint.manifest
    if manifest is None:
        return
    if checkpoint.hf_directory is not None:
        refuse_changed_files(checkpoint.hf_directory, checkpoint.directory, checkpoint.recorded_files)
    there = {part.name for part in parts_in(rules)}
    problems = []
    for name in sorted(there - set(manifest.tensors)):
        problems.append(f"{name!r} is in the checkpoint, but not in {MANIFEST_FILE}")
    for name in manifest.tensors:
        if name not in there and not is_excused([name], (*excused, *manifest.excused)):
            problems.append(f"{name!r} is in {MANIFEST_FILE}, but not in the checkpoint")
    known = repeated_tensors(checkpoint.model.architecture)
    for name, original in manifest.also_stored.items():
        if known.get(name) != original:
            problems.append(f"{name!r} repeats {original!r}, which no {manifest.family} model does")
    if problems:
        raise ConversionError(
            f"{checkpoint.directory / MANIFEST_FILE} and the checkpoint do not belong together",
            f"import again, or remove {MANIFEST_FILE} if the weights were changed on purpose",
            problems,
        )


def _stored(rules: list[Rule], manifest: ConversionManifest | None) -> list[tuple[TensorLocation, Parts]]:
    """Return the tensors to write, and their parts. A tensor is written under its own name, or in the stack
    in which the source of an import had it."""
    together: dict[str, list[tuple[HuggingFaceTensor, TensorLocation]]] = {}
    known = {}
    for part in parts_in(rules):
        known[part.name] = part
        place = part.places[0]
        described = manifest.places.get(part.name) if manifest is not None else None
        for other in part.alternatives:
            if other.written and described is not None and other.name == described["name"]:
                place = other
        together.setdefault(place.name, []).append((part, place))
    stored = [(TensorLocation(name, parts[0][1].shape), tuple(parts)) for name, parts in together.items()]
    # Write again the tensors that the source stored a second time under another name.
    for name, original in (manifest.also_stored if manifest is not None else {}).items():
        if original in known and name not in known:
            place = TensorLocation(name, known[original].shape)
            stored.append((place, ((known[original], place),)))
    return stored


def export_model(
    plan: ExportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
) -> ConversionResult:
    """Write the Hugging Face directory of a plan. An interrupted export is resumed.

    Args:
        plan: result of ``plan_export``.
        target: directory to create.
        options: threads, memory limit and so on.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    check_apart(plan.checkpoint.directory, target)
    if plan.checkpoint.hf_directory is not None:
        check_apart(plan.checkpoint.hf_directory, target, may_be_inside=True)
        artifacts(plan.checkpoint.hf_directory)  # Fail now on files that could not be copied at the end.
        if plan.checkpoint.config_hash is not None:
            refuse_changed_config(
                plan.checkpoint.hf_directory, plan.checkpoint.config_hash, plan.checkpoint.hf_directory
            )
    # All other files there would be copied too, including the stored tensors.
    if plan.checkpoint.hf_directory == plan.checkpoint.directory:
        raise ConversionError(
            f"{plan.checkpoint.directory} holds its config.json in the checkpoint directory itself",
            "pass --hf-config DIRECTORY",
        )
    # Any part may be the last, which writes all files except the weights. So all parts must agree on these
    # files.
    fingerprint = plan.fingerprint if options.part is None else plan.fingerprint | plan.fingerprint_of_files
    return convert(
        lambda staging: _Export(plan, staging, options),
        target,
        options,
        fingerprint,
        _others_than_exported,
        len(plan.written),
    )


class _Export(Conversion):
    """An export in progress; a piece is a stored tensor. Files are allocated at full length first, and filled
    tensor by tensor."""

    verb, kind = "export", "tensor"

    def __init__(self, plan: ExportPlan, staging: Staging, options: RunOptions) -> None:
        checkpoint = plan.checkpoint
        super().__init__(
            plan,
            staging,
            Narrowing(asked=plan.dtype_asked is not None),
            checkpoint.manifest,
            checkpoint.directory,
        )
        # Opened for writing, and for reading back what an earlier run has written.
        self._export, self._opened = plan, OpenFiles(os.O_RDWR)
        self._headers, self.files = {}, []
        for file, tensors in plan.files.items():
            self._headers[file] = header_of(tensors)
            self.files.append([tensor.key for tensor in tensors])
        self._tensors, self.pieces = {}, {}
        for tensor in plan.written:
            self._tensors[tensor.key] = tensor
            self.pieces[tensor.key] = [part for part, _ in tensor.parts]
        for number in filter(options.has, range(len(self.files))):
            path, header, length = self._file(number)
            # Keep the bytes of an existing file, which may be finished work.
            path.touch(0o644)
            with self._opened.use(path) as descriptor:
                # Allocate the full length as a hole, so that threads can write at any offset.
                os.ftruncate(descriptor, length)
                write_bytes(descriptor, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))

    def _file(self, number: int) -> tuple[Path, bytes, int]:
        """Return path, header and length in bytes of a file."""
        tensors = [self._tensors[name] for name in self.files[number]]
        header = self._headers[tensors[0].file]
        return self.file_of(tensors[0].key), header, len(header) + sum(tensor.size for tensor in tensors)

    def size(self, name: str) -> int:
        return self._tensors[name].size

    def file_of(self, name: str) -> Path:
        return self.staging.directory / self._tensors[name].file

    def is_whole(self, number: int) -> bool:
        path, header, length = self._file(number)
        with path.open("rb") as opened:
            return opened.read(len(header)) == header and path.stat().st_size == length

    def chunks(self, name: str) -> Iterator[Chunk]:
        tensor = self._tensors[name]
        begin, dtype, shape = len(self._headers[tensor.file]) + tensor.offset, tensor.dtype, tensor.shape[1:]
        for index, parts in tensor.blocks.items():
            position = index * torch.Size(shape).numel() * dtype.itemsize
            yield Chunk(
                name, (begin + position,), shape, dtype, [Rows(part, 0, place) for part, place in parts]
            )
        for part, place in () if tensor.blocks else tensor.parts:
            row_bytes = torch.Size(part.shape[1:]).numel() * dtype.itemsize
            for start, stop in row_ranges(part.shape, dtype.itemsize):
                # In a stack of experts, the rows of all previous experts come first.
                row = place.start + start + (0 if place.index is None else place.index * place.shape[1])
                position = row * row_bytes
                yield Chunk(
                    name, (begin + position,), (stop - start, *part.shape[1:]), dtype, [Rows(part, start)]
                )

    def put(self, name: str, chunks: Iterator[tuple[Chunk, Tensor]]) -> dict[str, Any]:
        for chunk, tensor in chunks:
            with self._opened.use(self.file_of(name)) as descriptor:
                write_bytes(descriptor, chunk.offsets[0], tensor)
        return {}

    def read_chunk(self, record: Mapping[str, Any], number: int, chunk: Chunk) -> Tensor:
        with self._opened.use(self.file_of(chunk.key)) as descriptor:
            return read_box(
                descriptor, chunk.offsets[0], chunk.dtype, chunk.shape, whole(chunk.shape), chunk.key
            )

    def write_rest(self, digests: Mapping[str, str], notes: dict[str, Any]) -> None:
        _write_rest(self._export, self.staging.directory, digests, notes)


def _write_rest(plan: ExportPlan, directory: Path, digests: Mapping[str, str], notes: dict[str, Any]) -> None:
    """Write index, config, tokenizer and manifest."""
    index = index_of(plan.written)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    if plan.checkpoint.hf_directory is not None:
        copy_artifacts(plan.checkpoint.hf_directory, directory)
        if plan.checkpoint.config_hash is not None:
            refuse_changed_config(directory, plan.checkpoint.config_hash, plan.checkpoint.hf_directory)
    if plan.checkpoint.config_is_made:
        (directory / "config.json").write_text(
            json.dumps(plan.checkpoint.config, indent=2) + "\n", encoding="utf-8"
        )
    # After the comparison above, because this may change the copied ``config.json``.
    write_config(directory, main_dtype((tensor.dtype, tensor.size) for tensor in plan.written))
    tensors = {}
    for tensor in plan.written:
        for part, _ in tensor.parts:
            tensors[part.name] = TensorRecord(dtype_name(tensor.dtype), part.shape, digests[part.name])
    manifest = plan.checkpoint.manifest
    also_stored = dict(manifest.also_stored) if manifest is not None else {}
    places = dict(manifest.places) if manifest is not None else {}
    source, family = plan.checkpoint.directory.name, plan.architecture.family
    # Last, when the files have their final content.
    files = file_hashes(directory)
    ConversionManifest(
        source, family, tensors, also_stored, places, notes, plan.missing, plan.left_out, files
    ).write(directory)
