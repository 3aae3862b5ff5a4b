"""Code that imports and exports share: resumable pieces of work, and the steps that complete a conversion."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from converters.adapters.lora import LoraAdapter
from converters.checkpoint.exact import cast
from converters.checkpoint.manifest import (
    RULES,
    THE_REST,
    WEIGHTS,
    ConversionManifest,
    HeldAgainst,
    TensorHashes,
    excused_notes,
    fingerprint_of_rules,
    fingerprints,
    not_finite_note,
)
from converters.checkpoint.narrowing import Narrowing
from converters.checkpoint.staging import Staging
from converters.checkpoint.work import (
    READ_BYTES,
    ConversionResult,
    Piece,
    Progress,
    RunOptions,
    row_ranges,
    run_pieces,
    workers_within,
)
from converters.errors import ConversionError
from converters.files.process import status_bytes
from converters.files.reading import require_space
from converters.mapping.logical import LogicalModel
from converters.mapping.places import rows_in
from converters.mapping.rule import HuggingFaceTensor, Rule, TensorLocation
from converters.model_config.architecture import Architecture


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of an import or an export.

    Attributes:
        model: the source.
        dtypes: Hugging Face tensor name -> dtype in which it is written.
        left_out: excused names of the source without a counterpart.
        missing: excused Hugging Face tensors that the source lacks.
        adapter: adapter that is merged into ``model``.
        dtype_asked: dtype requested for all tensors; None keeps each tensor's dtype.
    """

    model: LogicalModel
    dtypes: Mapping[str, torch.dtype]
    left_out: tuple[str, ...]
    missing: tuple[str, ...] = ()
    adapter: LoraAdapter | None = None
    dtype_asked: torch.dtype | None = None

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
        return self.model.architecture

    @property
    def notes(self) -> dict[str, Any]:
        """Notes for the manifest that follow from the plan."""
        return {} if self.adapter is None else self.adapter.notes()

    def fingerprint_with(
        self, weights: Any, config: Any, rules: Iterable[Rule], rest: Any, **options: Any
    ) -> dict[str, str]:
        """Return name -> fingerprint of everything that determines the output. Options have their flags as
        names."""
        facts = {
            WEIGHTS: weights,
            "config.json": config,
            RULES: fingerprint_of_rules(rules),
            "--dtype": str(self.dtype_asked),
            **options,
            "--allow-missing": [self.missing, self.left_out],
            "--lora": [] if self.adapter is None else self.adapter.identity(),
            THE_REST: rest,
        }
        return fingerprints(facts)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a Hugging Face tensor, and their position in a chunk.

    Attributes:
        part: the tensor.
        start: index of the first row.
        place: position in the chunk: a range of its rows, a tensor location, or None for the whole chunk.
    """

    part: HuggingFaceTensor
    start: int
    place: slice | TensorLocation | None = None

    def of(self, chunk: Tensor) -> Tensor:
        """Return the view of a chunk that contains these rows."""
        if isinstance(self.place, TensorLocation):
            return rows_in(chunk, self.place)
        return chunk if self.place is None else chunk[self.place]


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows of a stored tensor that are read, cast and written in one step.

    Attributes:
        key: name of the stored tensor.
        offsets: position. For ``torch_dist`` an offset per dimension; for safetensors the byte offset in the
            file.
        shape, dtype: shape (without the dimensions of layers and experts) and dtype of the chunk.
        rows: the rows that it contains; other rows are padding.
    """

    key: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: list[Rows]


Records = Sequence[Mapping[str, Any]]


class Conversion(ABC):
    """A conversion in progress, divided into named pieces.

    Args:
        plan: plan of the conversion.
        staging: directory to write to.
        narrowing: casts tensors and records the errors.
        manifest: manifest of the source, if it was written by a conversion.
        directory: directory of the source.

    Attributes:
        verb: verb for progress messages.
        kind: key of the piece's name in records.
        pieces: piece -> Hugging Face tensors in it.
        files: names of the pieces in each file.
        finished: piece -> record, for finished pieces.
    """

    verb: str
    kind: str
    pieces: Mapping[str, Sequence[HuggingFaceTensor]]
    files: Sequence[Sequence[str]]

    def __init__(
        self,
        plan: Plan,
        staging: Staging,
        narrowing: Narrowing,
        manifest: ConversionManifest | None,
        directory: Path,
    ) -> None:
        self._plan, self.staging, self._narrowing = plan, staging, narrowing
        self._held = HeldAgainst(
            manifest, directory, plan.dtypes, () if plan.adapter is None else plan.adapter.changed
        )
        self.finished: dict[str, Mapping[str, Any]] = {}

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the size of a piece in bytes."""

    @abstractmethod
    def file_of(self, name: str) -> Path:
        """Return the file that contains a piece."""

    @abstractmethod
    def chunks(self, name: str) -> Iterator[Chunk]:
        """Yield the chunks of a piece, in order."""

    @abstractmethod
    def put(self, name: str, chunks: Iterator[tuple[Chunk, Tensor]]) -> dict[str, Any]:
        """Write the chunks of a piece. Return record entries that are needed to read them back."""

    @abstractmethod
    def read_chunk(self, record: Mapping[str, Any], number: int, chunk: Chunk) -> Tensor:
        """Read back a chunk of a finished piece.

        Args:
            record: record of the piece.
            number: index of the chunk in the piece.
            chunk: the chunk.
        """

    @abstractmethod
    def write_rest(self, digests: Mapping[str, str], notes: dict[str, Any]) -> None:
        """Write the other files of the checkpoint: index, config, tokenizer, manifest.

        Args:
            digests: tensor name -> SHA-256.
            notes: notes for the manifest.
        """

    def is_whole(self, number: int) -> bool:
        """Return whether a file has its full length and the right header."""
        return True

    def write(self, name: str) -> None:
        """Write a piece, and record its hashes."""
        names = [part.name for part in self.pieces[name]]
        hashes, before = TensorHashes(names), self._held.hashes(names)

        def filled(chunk: Chunk) -> Tensor:
            # Rows that the source does not fill are padding of the vocabulary, and must be zero.
            tensor = torch.zeros(chunk.shape, dtype=chunk.dtype)
            for rows in chunk.rows:
                self._fill(rows.of(tensor), rows, hashes, before)
            return tensor

        further = self.put(name, ((chunk, filled(chunk)) for chunk in self.chunks(name)))
        record = {
            self.kind: name,
            **further,
            "digests": hashes.digests(),
            "not_finite": sorted(hashes.not_finite),
            "before": before.digests(),
            "errors": self._narrowing.error_of(names),
        }
        self.finished[name] = record
        # Record a piece only after its bytes are written, because a resume trusts the record.
        self.staging.record(record, self.file_of(name))

    def _fill(self, target: Tensor, rows: Rows, hashes: TensorHashes, before: TensorHashes) -> None:
        part = rows.part
        # A row range of a large matrix may exceed a thread's memory, so read it in steps.
        for first, last in row_ranges(target.shape, self._plan.model.dtype(part).itemsize, READ_BYTES):
            values = self._plan.model.read(part, rows.start + first, rows.start + last)
            # The source's manifest has hashes of the values as read, so hash before the cast.
            self._held.update(before, part.name, values, rows.start + first)
            values = self._narrowing.cast(part.name, values, self._plan.dtypes[part.name])
            hashes.update(part.name, values, rows.start + first)
            # This widens, without loss, if other layers of the stack have a wider dtype.
            target[first:last].copy_(cast(values, target.dtype))

    def check(self, workers: int, progress: TextIO | None, records: Records) -> None:
        """Verify pieces that an earlier run or another part has recorded. Intact ones are added to
        ``finished``.

        Args:
            workers: number of threads.
            progress: stream for progress reports; None for none.
            records: records of the pieces.
        """

        def check(record: Mapping[str, Any]) -> None:
            name = record[self.kind]
            hashes = TensorHashes([part.name for part in self.pieces[name]])
            try:
                for number, chunk in enumerate(self.chunks(name)):
                    tensor = self.read_chunk(record, number, chunk)
                    for rows in chunk.rows:
                        hashes.update(
                            rows.part.name,
                            cast(rows.of(tensor), self._plan.dtypes[rows.part.name]),
                            rows.start,
                        )
            except ConversionError:  # A damaged piece is written again.
                return
            if hashes.digests() == record["digests"]:
                self.finished[name] = record
                # The manifest gives the largest error of all pieces, so recall those of an earlier run.
                self._narrowing.recall(record["errors"])

        pieces = [Piece(self.size(record[self.kind]), functools.partial(check, record)) for record in records]
        shown = Progress(
            sum(piece.size for piece in pieces), "check what is written", progress if pieces else None
        )
        run_pieces(pieces, workers, shown)
        shown.finish()

    def incomplete(self) -> list[int]:
        """Return the numbers of the files that are incomplete or contain an unfinished piece."""
        return [
            number
            for number, names in enumerate(self.files)
            if not (self.finished.keys() >= {*names} and self.is_whole(number))
        ]

    def finish(self) -> dict[str, Any]:
        """Complete the directory and rename it to the target. Return the notes of the conversion."""
        records = self.finished.values()
        digests: dict[str, str] = {}
        before: dict[str, str] = {}
        not_finite = list[str]()
        for record in records:
            digests.update(record["digests"])
            before.update(record["before"])
            not_finite += record["not_finite"]
        # Verify the source first, because the files of ``write_rest`` turn the directory into a loadable
        # checkpoint.
        self._held.refuse_changed(digests, before)
        notes = {**self._narrowing.summary(), **not_finite_note(not_finite), **self._plan.notes}
        self.write_rest(digests, notes)
        self.staging.finish()
        return {**notes, **excused_notes(self._plan.missing, self._plan.left_out)}


def convert(
    begin: Callable[[Staging], Conversion],
    target: Path,
    options: RunOptions,
    fingerprint: Mapping[str, str],
    others_in: Callable[[Path], list[str]],
    tensors: int,
) -> ConversionResult:
    """Run a conversion, or resume one that was interrupted.

    Args:
        begin: creates the conversion in a staging directory.
        target: directory to create.
        options: threads, memory limit and so on.
        fingerprint, others_in: see ``Staging``.
        tensors: number of tensors written, for the result.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    workers, progress = workers_within(options.workers, options.max_memory), options.progress
    with Staging(
        target, fingerprint, overwrite=options.overwrite, others_in=others_in, part=options.part
    ) as staging:
        conversion = begin(staging)
        # Divide the work by file rather than by piece: two processes must not write into one file.
        sizes: dict[str, int] = {}
        for number, names in enumerate(conversion.files):
            if options.has(number):
                sizes |= {name: conversion.size(name) for name in names}
        total = sum(sizes.values())
        shown = Progress(total, f"{conversion.verb} {target.name}", progress)
        notes: dict[str, Any] = {}
        if staging.started_anew_because_of:
            shown.say(
                "an unfinished run is not resumed, because these have changed: "
                f"{', '.join(staging.started_anew_because_of)}"
            )
            notes["started_anew_because_of"] = staging.started_anew_because_of
        check = functools.partial(conversion.check, workers, progress)
        # A crash may have damaged pieces after they were recorded, so verify them before they count as
        # finished.
        check(staging.records)
        resumed = sum(size for name, size in sizes.items() if name in conversion.finished)
        # Fail before the first byte is written, not at the end when the disk is full.
        require_space(staging.directory, total - resumed)
        shown.skip(resumed)
        pieces = [
            Piece(size, functools.partial(conversion.write, name))
            for name, size in sizes.items()
            if name not in conversion.finished
        ]
        run_pieces(pieces, workers, shown)
        shown.finish()
        waits_for: tuple[int, ...] = ()
        # The lock lets exactly one of several parts find that it is the last.
        with staging.all_parts_but_the_last() as others:
            if others is not None:
                waits_for = options.parts_to_wait_for(others, check, conversion.incomplete)
            if others is None or waits_for:
                staging.leave()
            else:
                notes = {**conversion.finish(), **notes}
    return ConversionResult(target, tensors, total, resumed, workers, status_bytes("VmHWM"), notes, waits_for)
