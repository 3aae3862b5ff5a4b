"""``torch_dist`` checkpoint -> Hugging Face safetensors: no Hugging Face reference needed, one chunk of a tensor at a time."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import torch
from torch import Tensor

from converters.artifacts import artifacts, copy_artifacts, file_hashes, refuse_changed_config, write_config
from converters.boxes import read_box, whole, write_bytes
from converters.errors import ConversionError
from converters.export_files import WrittenTensor, header_of, index_of, is_hf_directory
from converters.export_plan import ExportPlan
from converters.held_against import HeldAgainst
from converters.manifest import Manifest, TensorHashes, TensorRecord, dtype_name, excused_notes
from converters.narrowing import Narrowing
from converters.open_files import OpenFiles
from converters.places import rows_in
from converters.rule import HuggingFaceTensor, Place
from converters.space import require_space
from converters.staging import Staging, check_apart
from converters.work import (
    READ_BYTES,
    Outcome,
    Piece,
    Progress,
    RunOptions,
    peak_memory,
    row_ranges,
    run_pieces,
    say_why_anew,
    workers_within,
)


def export_model(
    plan: ExportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008  # frozen
) -> Outcome:
    """Write the Hugging Face directory that a plan describes. A run that was killed goes on where it ended.

    Args:
        plan: from :func:`converters.export_plan.plan_export`.
        target: directory to make.
        options: how.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    check_apart(plan.checkpoint.directory, target)
    if plan.checkpoint.hf_directory is not None:
        check_apart(plan.checkpoint.hf_directory, target, may_be_inside=True)
        artifacts(plan.checkpoint.hf_directory)  # refuses what cannot be copied at the end
    if plan.checkpoint.hf_directory == plan.checkpoint.directory:
        raise ConversionError(f"{plan.checkpoint.directory} keeps config.json among its own files", "pass --hf-config DIRECTORY")
    workers, progress = workers_within(options.workers, options.max_memory), options.progress
    with Staging(target, plan.fingerprint, overwrite=options.overwrite, is_ours=is_hf_directory) as staging:
        shown = Progress(plan.size, f"export {target.name}", progress)
        anew = say_why_anew(staging.started_anew_because_of, shown)
        writer = _Writer(plan, staging)
        writer.check_earlier(workers, progress)
        resumed = sum(tensor.size for tensor in plan.written if tensor.name in writer.finished)
        require_space(staging.directory, plan.size - resumed)
        shown.skip(resumed)
        waiting = [tensor for tensor in plan.written if tensor.name not in writer.finished]
        try:
            run_pieces([Piece(tensor.size, functools.partial(writer.write, tensor)) for tensor in waiting], workers, shown)
        finally:
            writer.close()
        shown.finish()
        digests = {name: digest for each in writer.finished.values() for name, digest in each.items()}
        writer.held.refuse_changed(digests, writer.before)
        notes = {**writer.narrowing.summary(), **plan.notes}
        _write_rest(plan, staging.directory, digests, notes)
        staging.finish()
    notes = {**notes, **excused_notes(plan.missing, plan.left_out), **anew}
    return Outcome(target, len(plan.written), plan.size, resumed, workers, peak_memory(), notes)


class _Writer:
    """The safetensors files, each as large as it will be from the beginning, filled tensor by tensor."""

    def __init__(self, plan: ExportPlan, staging: Staging) -> None:
        self._plan, self._staging = plan, staging
        self.narrowing = Narrowing(asked=plan.dtype is not None)
        self._files = OpenFiles(writing=True)
        self._data_begins: dict[str, int] = {}
        for file, tensors in plan.files.items():
            header = header_of(tensors)
            (staging.directory / file).touch(0o644)
            with self._files.use(staging.directory / file) as descriptor:
                os.ftruncate(descriptor, len(header) + sum(tensor.size for tensor in tensors))
                write_bytes(descriptor, 0, torch.frombuffer(bytearray(header), dtype=torch.uint8))
            self._data_begins[file] = len(header)
        dtypes = {part.name: tensor.dtype for tensor in plan.written for part, _ in tensor.parts}
        merged = () if plan.adapter is None else plan.adapter.factors
        self.held = HeldAgainst(plan.checkpoint.manifest, plan.checkpoint.directory, dtypes, merged)
        self.finished: dict[str, dict[str, str]] = {}
        self.before: dict[str, str] = {}

    def write(self, tensor: WrittenTensor) -> None:
        """One stored tensor, and the hashes of the Hugging Face tensors in it into ``finished`` and the journal."""
        names = [part.name for part, _ in tensor.parts]
        hashes, before = TensorHashes(names), self.held.hashes(names)
        for position, chunk in self._chunks(tensor, hashes, before):
            with self._files.use(self._staging.directory / tensor.file) as descriptor:
                write_bytes(descriptor, self._begin(tensor) + position, chunk)
        digests = self.finished[tensor.name] = hashes.digests()
        self.before |= before.digests()
        record = {"tensor": tensor.name, "digests": digests, "errors": self.narrowing.error_of(digests), "before": before.digests()}
        self._staging.record(record, self._staging.directory / tensor.file)

    def close(self) -> None:
        """Close the files."""
        self._files.close()

    def _begin(self, tensor: WrittenTensor) -> int:
        return self._data_begins[tensor.file] + tensor.offset

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

    def check_earlier(self, workers: int, progress: TextIO | None) -> None:
        """Take the tensors into ``finished`` that an earlier run wrote and that still are as they were written."""
        written = {tensor.name: tensor for tensor in self._plan.written}

        def check(record: dict[str, Any]) -> None:
            tensor = written[record["tensor"]]
            if self._digests_of(tensor) == record["digests"]:
                self.finished[tensor.name] = record["digests"]
                self.before |= record["before"]
                self.narrowing.recall(record["errors"])

        checks = [Piece(written[record["tensor"]].size, functools.partial(check, record)) for record in self._staging.records]
        shown = Progress(sum(piece.size for piece in checks), "check what an earlier run wrote", progress if checks else None)
        run_pieces(checks, workers, shown)
        shown.finish()

    def _digests_of(self, tensor: WrittenTensor) -> dict[str, str]:
        """Hashes of the Hugging Face tensors in a stored tensor as it stands in its file."""
        hashes = TensorHashes([part.name for part, _ in tensor.parts])
        for position, shape, pieces in _layout(tensor):
            chunk = self._read(tensor, position, shape)
            for part, _, _, place in pieces:
                hashes.update(part.name, chunk if place is None else rows_in(chunk, place))
        return hashes.digests()

    def _read(self, tensor: WrittenTensor, position: int, shape: tuple[int, ...]) -> Tensor:
        """What was written, from a byte of a stored tensor on."""
        with self._files.use(self._staging.directory / tensor.file) as descriptor:
            return read_box(descriptor, self._begin(tensor) + position, tensor.dtype, shape, whole(shape), tensor.name)


class _Rows(NamedTuple):
    """Rows of a Hugging Face tensor, and where in a block they are; None where they are all of the chunk."""

    part: HuggingFaceTensor
    start: int
    stop: int
    place: Place | None


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


def _row_of(place: Place) -> int:
    """The first row of a part in its stored tensor, counted over the axis of experts too."""
    return place.start if place.index is None else place.index * place.shape[1] + place.start


def _write_rest(plan: ExportPlan, directory: Path, digests: dict[str, str], notes: dict[str, Any]) -> None:
    """Index, config, tokenizer, manifest."""
    index = index_of(plan.written)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    if plan.checkpoint.hf_directory is not None:
        copy_artifacts(plan.checkpoint.hf_directory, directory)
        if not plan.checkpoint.config_is_made:
            refuse_changed_config(directory, plan.checkpoint.config)
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
    Manifest(source, family, tensors, also_stored, places, notes, plan.missing, plan.left_out, files).write(directory)
