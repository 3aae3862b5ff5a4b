"""``torch_dist`` checkpoint -> Hugging Face safetensors: no Hugging Face reference needed, one chunk of a tensor at a time."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from converters.artifacts import copy_artifacts, write_config
from converters.boxes import read_box, write_bytes
from converters.errors import ConversionError
from converters.export_plan import ExportPlan, WrittenTensor, index_of, is_hf_directory
from converters.manifest import MANIFEST_FILE, Manifest, TensorHashes, TensorRecord, dtype_name
from converters.narrowing import Narrowing
from converters.rule import Place
from converters.space import require_space
from converters.staging import Staging, check_apart
from converters.work import Outcome, Piece, Progress, peak_memory, row_ranges, run_pieces, workers_within


def export_model(
    plan: ExportPlan,
    target: Path,
    *,
    workers: int = 2,
    max_memory: int | None = None,
    overwrite: bool = False,
    progress: TextIO | None = None,
) -> Outcome:
    """Write the Hugging Face directory that a plan describes. A run that was killed goes on where it ended.

    Args:
        plan: from :func:`converters.export_plan.plan_export`.
        target: directory to make.
        workers: threads; the bytes do not depend on them.
        max_memory: bytes that may be resident; fewer workers run where they would not fit. None for no bound.
        overwrite: replace an existing Hugging Face directory.
        progress: where to say how far it is; None says nothing.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    check_apart(plan.checkpoint.directory, target)
    if plan.checkpoint.hf_directory == plan.checkpoint.directory:
        raise ConversionError(f"{plan.checkpoint.directory} keeps config.json among its own files", "pass --hf-config DIRECTORY")
    workers = workers_within(workers, max_memory)
    staging = Staging(target, plan.fingerprint, overwrite=overwrite, is_ours=is_hf_directory)
    try:
        writer = _Writer(plan, staging)
        resumed = sum(tensor.size for tensor in plan.written if tensor.name in writer.finished)
        require_space(staging.directory, plan.size - resumed)
        shown = Progress(plan.size, f"export {target.name}", progress)
        shown.skip(resumed)
        waiting = [tensor for tensor in plan.written if tensor.name not in writer.finished]
        try:
            run_pieces([Piece(tensor.size, functools.partial(writer.write, tensor)) for tensor in waiting], workers, shown)
        finally:
            writer.close()
        shown.finish()
        _refuse_changed(plan, writer.finished)
        notes = {**writer.narrowing.summary(), **({"left_out": list(plan.left_out)} if plan.left_out else {})}
        _write_rest(plan, staging.directory, writer.finished, notes)
        staging.finish()
    except BaseException:
        staging.close()
        raise
    return Outcome(target, len(plan.written), plan.size, resumed, workers, peak_memory(), notes)


class _Writer:
    """The safetensors files, each as large as it will be from the beginning, filled tensor by tensor."""

    def __init__(self, plan: ExportPlan, staging: Staging) -> None:
        self._plan, self._staging = plan, staging
        self.narrowing = Narrowing(asked=plan.dtype is not None)
        self._descriptors: dict[str, int] = {}
        self._data_begins: dict[str, int] = {}
        for file, tensors in plan.files.items():
            header = plan.header(file)
            descriptor = os.open(staging.directory / file, os.O_RDWR | os.O_CREAT, 0o644)
            os.ftruncate(descriptor, len(header) + sum(tensor.size for tensor in tensors))
            os.pwrite(descriptor, header, 0)
            self._descriptors[file], self._data_begins[file] = descriptor, len(header)
        self.finished: dict[str, dict[str, str]] = self._still_good()

    def write(self, tensor: WrittenTensor) -> None:
        """One stored tensor, and the hashes of the Hugging Face tensors in it into ``finished`` and the journal."""
        hashes = TensorHashes([part.name for part, _ in tensor.parts])
        for position, chunk in self._chunks(tensor, hashes):
            write_bytes(self._descriptors[tensor.file], self._begin(tensor) + position, chunk)
        digests = self.finished[tensor.name] = hashes.digests()
        record = {"tensor": tensor.name, "digests": digests, "errors": self.narrowing.error_of(digests)}
        self._staging.record(record, self._staging.directory / tensor.file)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def _begin(self, tensor: WrittenTensor) -> int:
        return self._data_begins[tensor.file] + tensor.offset

    def _chunks(self, tensor: WrittenTensor, hashes: TensorHashes) -> Iterator[tuple[int, Tensor]]:
        """Bytes to write and where, counted from the beginning of the tensor."""
        for part, place in tensor.parts:
            row_bytes = torch.Size(part.shape[1:]).numel() * tensor.dtype.itemsize
            begin = _row_of(place) * row_bytes
            for start, stop in row_ranges(part.shape[0], row_bytes):
                rows = self.narrowing.cast(part.name, self._plan.model.read(part, start, stop), tensor.dtype)
                hashes.update(part.name, rows)
                yield begin + start * row_bytes, rows

    def _still_good(self) -> dict[str, dict[str, str]]:
        """Tensors that an earlier run wrote and that still are as they were written."""
        written = {tensor.name: tensor for tensor in self._plan.written}
        good = {}
        for record in self._staging.records:
            tensor = written[record["tensor"]]
            hashes = TensorHashes([part.name for part, _ in tensor.parts])
            for part, place in tensor.parts:
                row_bytes = torch.Size(part.shape[1:]).numel() * tensor.dtype.itemsize
                begin = self._begin(tensor) + _row_of(place) * row_bytes
                for start, stop in row_ranges(part.shape[0], row_bytes):
                    shape = (stop - start, *part.shape[1:])
                    box = tuple((0, size) for size in shape)
                    descriptor = self._descriptors[tensor.file]
                    hashes.update(part.name, read_box(descriptor, begin + start * row_bytes, tensor.dtype, shape, box, tensor.name))
            if hashes.digests() == record["digests"]:
                good[tensor.name] = record["digests"]
                self.narrowing.recall(record["errors"])
        return good


def _row_of(place: Place) -> int:
    """The first row of a part in its stored tensor, counted over the axis of experts too."""
    return place.start if place.index is None else place.index * place.shape[1] + place.start


def _refuse_changed(plan: ExportPlan, digests: dict[str, dict[str, str]]) -> None:
    """A checkpoint that has a manifest still is what that says; what training saves has none."""
    records = plan.checkpoint.manifest.tensors if plan.checkpoint.manifest is not None else {}
    changed = [
        part.name
        for tensor in plan.written
        for part, _ in tensor.parts
        if part.name in records
        and records[part.name].dtype == dtype_name(tensor.dtype)
        and records[part.name].sha256 != digests[tensor.name][part.name]
    ]
    if changed:
        raise ConversionError(
            f"{plan.checkpoint.directory} is not what its {MANIFEST_FILE} says",
            f"import again; or remove {MANIFEST_FILE} if the weights were changed on purpose",
            changed,
        )


def _write_rest(plan: ExportPlan, directory: Path, digests: dict[str, dict[str, str]], notes: dict[str, Any]) -> None:
    """Index, config, tokenizer, manifest."""
    index = index_of(plan)
    if index is not None:
        (directory / "model.safetensors.index.json").write_text(index, encoding="utf-8")
    copy_artifacts(plan.checkpoint.hf_directory, directory)
    write_config(directory, plan.main_dtype)
    own = {part.name: (part, tensor) for tensor in plan.written for part, _ in tensor.parts}
    tensors = {name: TensorRecord(dtype_name(tensor.dtype), part.shape, digests[tensor.name][name]) for name, (part, tensor) in own.items()}
    manifest = plan.checkpoint.manifest
    also_stored = dict(manifest.also_stored) if manifest is not None else {}
    places = dict(manifest.places) if manifest is not None else {}
    Manifest(plan.checkpoint.directory.name, plan.architecture.family, tensors, also_stored, places, notes).write(directory)
