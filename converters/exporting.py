"""Export: ``torch_dist`` checkpoint -> Hugging Face safetensors, without a Hugging Face reference, one chunk of a tensor at a time.

The plan says what an export will write, which tensor stands in which file and where; it is worked out from the index alone, before a byte
is written.
"""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from converters.adapters.lora import LoraAdapter
from converters.adapters.lora_model import merge_export
from converters.check import account, is_excused, repeated_tensors
from converters.checkpoint.artifacts import (
    TEMPLATES_DIRECTORY,
    artifacts,
    copy_artifacts,
    file_hashes,
    refuse_changed_config,
    refuse_changed_files,
    write_config,
)
from converters.checkpoint.files import require_space
from converters.checkpoint.manifest import (
    MANIFEST_FILE,
    RULES,
    THE_REST,
    WEIGHTS,
    ConversionManifest,
    HeldAgainst,
    TensorHashes,
    TensorRecord,
    dtype_name,
    excused_notes,
    fingerprint_of_rules,
    fingerprints,
    not_finite_note,
)
from converters.checkpoint.narrowing import Narrowing, kept_dtype
from converters.checkpoint.safetensors_file import NAMES, read_box, whole, write_bytes
from converters.checkpoint.safetensors_header import OpenFiles
from converters.checkpoint.staging import Staging, check_apart
from converters.checkpoint.work import (
    READ_BYTES,
    ConversionResult,
    Piece,
    Progress,
    RunOptions,
    check_records,
    peak_memory,
    row_ranges,
    run_pieces,
    say_why_anew,
    workers_within,
)
from converters.errors import ConversionError
from converters.mapping.logical import MegatronModel
from converters.mapping.places import rows_in
from converters.mapping.rule import HuggingFaceTensor, Rule, TensorLocation
from converters.mapping.rules import all_rules, hf_tensors
from converters.model_config.architecture import Architecture
from converters.opening import MegatronCheckpoint

Parts = tuple[tuple[HuggingFaceTensor, TensorLocation], ...]
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
    def blocks(self) -> dict[int, list[tuple[HuggingFaceTensor, TensorLocation]]]:
        """Parts by the expert whose block of the tensor they are in, where their rows do not lie one behind the other; else empty.

        Such a block is put together as a whole.
        """
        blocks: dict[int, list[tuple[HuggingFaceTensor, TensorLocation]]] = {}
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


DEFAULT_SHARD_BYTES = 5_000_000_000


@dataclass(frozen=True)
class ExportPlan:
    """Export plan: what an export will do.

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
        """Return what the conversion will say of itself that follows from the plan."""
        return {} if self.adapter is None else self.adapter.notes()

    @property
    def model(self) -> MegatronModel:
        """The source's tensors."""
        return self.checkpoint.model

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
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

    @property
    def fingerprint_of_files(self) -> dict[str, str]:
        """Changes with the files beside the weights, which the part writes that is the last to be done."""
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


def _stored(rules: list[Rule], manifest: ConversionManifest | None) -> list[tuple[TensorLocation, Parts]]:
    """Return what is stored: every tensor alone under its name, or where the source of the import had it."""
    together: dict[str, list[tuple[HuggingFaceTensor, TensorLocation]]] = {}
    for rule in rules:
        for part in rule.parts:
            place = part.places[0]
            described = manifest.places.get(part.name) if manifest is not None else None
            for other in part.alternatives:
                if other.written and described is not None and other.name == described["name"]:
                    place = other
            together.setdefault(place.name, []).append((part, place))
    return [(TensorLocation(name, parts[0][1].shape), tuple(parts)) for name, parts in together.items()] + _repeated(rules, manifest)


def _repeated(rules: list[Rule], manifest: ConversionManifest | None) -> list[tuple[TensorLocation, Parts]]:
    """Tensors that the source stored a second time under another name."""
    parts = {part.name: part for rule in rules for part in rule.parts}
    again: list[tuple[TensorLocation, Parts]] = []
    for name, original in (manifest.also_stored if manifest is not None else {}).items():
        if original in parts and name not in parts:
            place = TensorLocation(name, parts[original].shape)
            again.append((place, ((parts[original], place),)))
    return again


def _dtype(model: MegatronModel, manifest: ConversionManifest | None, part: HuggingFaceTensor) -> torch.dtype:
    """Return what a tensor is stored in; what it was in before an import widened it, to keep one dtype in a stack of layers."""
    stored = model.dtype(part)
    return stored if manifest is None else manifest.dtype_before(part.name, stored)


def export_model(
    plan: ExportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
) -> ConversionResult:
    """Write the Hugging Face directory that a plan describes. A run that was killed goes on where it ended.

    Args:
        plan: from ``plan_export``.
        target: directory to make.
        options: how.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    check_apart(plan.checkpoint.directory, target)
    if plan.checkpoint.hf_directory is not None:
        check_apart(plan.checkpoint.hf_directory, target, may_be_inside=True)
        artifacts(plan.checkpoint.hf_directory)  # refuses what cannot be copied at the end
        if plan.checkpoint.config_hash is not None:
            refuse_changed_config(plan.checkpoint.hf_directory, plan.checkpoint.config_hash, plan.checkpoint.hf_directory)
    if plan.checkpoint.hf_directory == plan.checkpoint.directory:
        raise ConversionError(f"{plan.checkpoint.directory} keeps config.json among its own files", "pass --hf-config DIRECTORY")
    workers, progress = workers_within(options.workers, options.max_memory), options.progress
    fingerprint = plan.fingerprint if options.part is None else plan.fingerprint | plan.fingerprint_of_files
    with Staging(target, fingerprint, overwrite=options.overwrite, is_ours=is_hf_directory, part=options.part) as staging:
        files = [tensors for number, tensors in enumerate(plan.files.values()) if options.has(number)]
        tensors = [tensor for file in files for tensor in file]
        total = sum(tensor.size for tensor in tensors)
        shown = Progress(total, f"export {target.name}", progress)
        notes: dict[str, Any] = {**say_why_anew(staging.started_anew_because_of, shown)}
        writer = _Writer(plan, staging, files)
        writer.check(workers, progress, staging.records)
        resumed = sum(tensor.size for tensor in tensors if tensor.name in writer.finished)
        require_space(staging.directory, total - resumed)
        shown.skip(resumed)
        waiting = [tensor for tensor in tensors if tensor.name not in writer.finished]
        try:
            run_pieces([Piece(tensor.size, functools.partial(writer.write, tensor)) for tensor in waiting], workers, shown)
        finally:
            writer.close()
        shown.finish()
        waits_for: tuple[int, ...] = ()
        with staging.all_parts_but_the_last() as others:
            if others is not None:
                waits_for = options.parts_to_wait_for(others, functools.partial(writer.check, workers, progress), writer.incomplete)
            if others is None or waits_for:
                staging.leave()
            else:
                notes = {**_finish(plan, staging, writer), **notes}
    return ConversionResult(target, len(plan.written), total, resumed, workers, peak_memory(), notes, waits_for)


def _finish(plan: ExportPlan, staging: Staging, writer: _Writer) -> dict[str, Any]:
    """Write what makes the files a model, and give it its name. Returns what the conversion says of itself."""
    writer.close()
    digests = {name: digest for each in writer.finished.values() for name, digest in each.items()}
    writer.held.refuse_changed(digests, writer.before)
    notes = {**writer.narrowing.summary(), **not_finite_note(writer.not_finite), **plan.notes}
    _write_rest(plan, staging.directory, digests, notes)
    staging.finish()
    return {**notes, **excused_notes(plan.missing, plan.left_out)}


class _Writer:
    """The safetensors files, each as large as it will be from the beginning, filled tensor by tensor."""

    def __init__(self, plan: ExportPlan, staging: Staging, own_files: Sequence[Sequence[WrittenTensor]]) -> None:
        self._plan, self._staging = plan, staging
        self.narrowing = Narrowing(asked=plan.dtype is not None)
        self._files = OpenFiles(writing=True)
        self._headers = {file: header_of(tensors) for file, tensors in plan.files.items()}
        for tensors in own_files:
            path, header = staging.directory / tensors[0].file, self._headers[tensors[0].file]
            path.touch(0o644)
            with self._files.use(path) as descriptor:
                os.ftruncate(descriptor, len(header) + sum(tensor.size for tensor in tensors))
                write_bytes(descriptor, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
        dtypes = {part.name: tensor.dtype for tensor in plan.written for part, _ in tensor.parts}
        merged = () if plan.adapter is None else plan.adapter.changed
        self.held = HeldAgainst(plan.checkpoint.manifest, plan.checkpoint.directory, dtypes, merged)
        self.finished: dict[str, dict[str, str]] = {}
        self.before: dict[str, str] = {}
        self.not_finite: set[str] = set()

    def write(self, tensor: WrittenTensor) -> None:
        """One stored tensor, and the hashes of the Hugging Face tensors in it into ``finished`` and the journal."""
        names = [part.name for part, _ in tensor.parts]
        hashes, before = TensorHashes(names), self.held.hashes(names)
        for position, chunk in self._chunks(tensor, hashes, before):
            with self._files.use(self._staging.directory / tensor.file) as descriptor:
                write_bytes(descriptor, self._begin(tensor) + position, chunk)
        digests = self.finished[tensor.name] = hashes.digests()
        self.before |= before.digests()
        self.not_finite |= hashes.not_finite
        record = {
            "tensor": tensor.name,
            "digests": digests,
            "not_finite": sorted(hashes.not_finite),
            "errors": self.narrowing.error_of(digests),
            "before": before.digests(),
        }
        self._staging.record(record, self._staging.directory / tensor.file)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _begin(self, tensor: WrittenTensor) -> int:
        return len(self._headers[tensor.file]) + tensor.offset

    def _chunks(self, tensor: WrittenTensor, hashes: TensorHashes, before: TensorHashes) -> Iterator[tuple[int, Tensor]]:
        """Bytes to write and where, counted from the beginning of the tensor."""
        for position, shape, pieces in _layout(tensor):
            chunk = torch.zeros(shape, dtype=tensor.dtype)
            for part, start, stop, place in pieces:
                target = chunk if place is None else rows_in(chunk, place)
                row_bytes = torch.Size(part.shape[1:]).numel() * self._plan.model.dtype(part).itemsize
                for first, last in row_ranges(stop - start, row_bytes, READ_BYTES):
                    rows = self._plan.model.read(part, start + first, start + last)
                    self.held.update(before, part.name, rows)
                    rows = self.narrowing.cast(part.name, rows, tensor.dtype)
                    hashes.update(part.name, rows)
                    target[first:last].copy_(rows)
            yield position, chunk

    def check(self, workers: int, progress: TextIO | None, records: Sequence[Mapping[str, Any]]) -> None:
        """Take the tensors into ``finished`` that an earlier run, or another part, has recorded and that still are as they were written."""
        written = {tensor.name: tensor for tensor in self._plan.written}

        def check(record: Mapping[str, Any]) -> None:
            tensor = written[record["tensor"]]
            try:
                if self._digests_of(tensor) != record["digests"]:
                    return
            except ConversionError:  # a file of another part is gone or was cut off
                return
            self.finished[tensor.name] = record["digests"]
            self.before |= record["before"]
            self.not_finite.update(record["not_finite"])
            self.narrowing.recall(record["errors"])

        check_records([Piece(written[record["tensor"]].size, functools.partial(check, record)) for record in records], workers, progress)

    def incomplete(self) -> list[int]:
        """Numbers of the files that are not whole, or in which a tensor is not finished."""
        return [
            number
            for number, (file, tensors) in enumerate(self._plan.files.items())
            if any(tensor.name not in self.finished for tensor in tensors) or not self._is_whole(file, tensors)
        ]

    def _is_whole(self, file: str, tensors: Sequence[WrittenTensor]) -> bool:
        header, path = self._headers[file], self._staging.directory / file
        with path.open("rb") as opened:
            begins_so = opened.read(len(header)) == header
        return begins_so and path.stat().st_size == len(header) + sum(tensor.size for tensor in tensors)

    def _digests_of(self, tensor: WrittenTensor) -> dict[str, str]:
        """Hashes of the Hugging Face tensors in a stored tensor as it stands in its file."""
        hashes = TensorHashes([part.name for part, _ in tensor.parts])
        for position, shape, pieces in _layout(tensor):
            chunk = self._read(tensor, position, shape)
            for part, _, _, place in pieces:
                hashes.update(part.name, chunk if place is None else rows_in(chunk, place))
        return hashes.digests()

    def _read(self, tensor: WrittenTensor, position: int, shape: tuple[int, ...]) -> Tensor:
        """Return what was written, from a byte of a stored tensor on."""
        with self._files.use(self._staging.directory / tensor.file) as descriptor:
            return read_box(descriptor, self._begin(tensor) + position, tensor.dtype, shape, whole(shape), tensor.name)


class _Rows(NamedTuple):
    """Rows of a Hugging Face tensor, and where in a block they are; None where they are all of the chunk."""

    part: HuggingFaceTensor
    start: int
    stop: int
    place: TensorLocation | None


def _layout(tensor: WrittenTensor) -> Iterator[tuple[int, tuple[int, ...], list[_Rows]]]:
    """The chunks of a stored tensor: the first byte, counted from its beginning, the shape, and what it is put together from."""
    shape = tensor.shape[1:]
    for index, parts in tensor.blocks.items():
        position = index * torch.Size(shape).numel() * tensor.dtype.itemsize
        yield position, shape, [_Rows(part, 0, part.shape[0], place) for part, place in parts]
    for part, place in () if tensor.blocks else tensor.parts:
        row_bytes = torch.Size(part.shape[1:]).numel() * tensor.dtype.itemsize
        for start, stop in row_ranges(part.shape[0], row_bytes):
            yield (_row_of(place) + start) * row_bytes, (stop - start, *part.shape[1:]), [_Rows(part, start, stop, None)]


def _row_of(place: TensorLocation) -> int:
    """The first row of a part in its stored tensor, counted over the axis of experts too."""
    return place.start if place.index is None else place.index * place.shape[1] + place.start


def _write_rest(plan: ExportPlan, directory: Path, digests: dict[str, str], notes: dict[str, Any]) -> None:
    """Index, config, tokenizer, manifest."""
    index = index_of(plan.written)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    if plan.checkpoint.hf_directory is not None:
        copy_artifacts(plan.checkpoint.hf_directory, directory)
        if plan.checkpoint.config_hash is not None:
            refuse_changed_config(directory, plan.checkpoint.config_hash, plan.checkpoint.hf_directory)
    if plan.checkpoint.config_is_made:
        (directory / "config.json").write_text(json.dumps(plan.checkpoint.config, indent=2) + "\n", encoding="utf-8")
    write_config(directory, plan.main_dtype)
    own = {part.name: (part, tensor) for tensor in plan.written for part, _ in tensor.parts}
    tensors = {name: TensorRecord(dtype_name(tensor.dtype), part.shape, digests[name]) for name, (part, tensor) in own.items()}
    manifest = plan.checkpoint.manifest
    also_stored = dict(manifest.also_stored) if manifest is not None else {}
    places = dict(manifest.places) if manifest is not None else {}
    source, family = plan.checkpoint.directory.name, plan.architecture.family
    files = file_hashes(directory)
    ConversionManifest(source, family, tensors, also_stored, places, notes, plan.missing, plan.left_out, files).write(directory)
