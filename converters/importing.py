"""Hugging Face checkpoint -> ``torch_dist`` checkpoint of Megatron-Core: model-free, one chunk of a tensor at a time."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from converters.artifacts import HF_DIRECTORY, artifacts, copy_artifacts, file_hashes, refuse_changed_config, refuse_changed_files
from converters.errors import ConversionError
from converters.exact import cast
from converters.held_against import HeldAgainst
from converters.import_plan import ImportPlan
from converters.layouts import runs_of
from converters.manifest import Manifest, TensorHashes, TensorRecord, dtype_name, excused_notes, read_manifest
from converters.narrowing import Narrowing
from converters.places import locate
from converters.quantized import DequantizedSource, drop_quantization
from converters.rule import HuggingFaceTensor, Rule
from converters.space import require_space
from converters.staging import Staging, check_apart
from converters.torch_dist.find import is_checkpoint
from converters.torch_dist.items import read_item
from converters.torch_dist.writer import ItemFile, StoredItem, finish_checkpoint, write_common
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


def import_model(
    plan: ImportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008  # frozen
    common_state: Mapping[str, Any] | None = None,
) -> Outcome:
    """Write the checkpoint that a plan describes. A run that was killed goes on where it ended.

    Args:
        plan: from :func:`converters.import_plan.plan_import`.
        target: directory to make.
        options: how.
        common_state: what is no tensor, for ``common.pt``; by default nothing.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    check_apart(plan.model.source.directory, target)
    artifacts(plan.model.source.directory)  # refuses what cannot be copied at the end
    workers, progress = workers_within(options.workers, options.max_memory), options.progress
    with Staging(target, plan.fingerprint, overwrite=options.overwrite, is_ours=is_checkpoint) as staging:
        total = sum(map(plan.size, plan.rules))
        shown = Progress(total, f"import {target.name}", progress)
        anew = say_why_anew(staging.started_anew_because_of, shown)
        narrowing = Narrowing(asked=True)
        held = _held_against(plan)
        finished = _finished_files(plan, staging, narrowing, workers, progress)
        resumed = sum(plan.size(rule) for name, rules in plan.files if name in finished for rule in rules)
        require_space(staging.directory, total - resumed)
        shown.skip(resumed)
        pieces = [
            Piece(sum(map(plan.size, rules)), functools.partial(_write_file, plan, staging, name, rules, narrowing, finished, held))
            for name, rules in plan.files
            if name not in finished
        ]
        run_pieces(pieces, workers, shown)
        shown.finish()
        digests = {name: digest for file in finished.values() for name, digest in file.digests.items()}
        held.refuse_changed(digests, {name: digest for file in finished.values() for name, digest in file.before.items()})
        notes = {**narrowing.summary(), **_not_finite(finished.values()), **plan.notes}
        items = [item for name, _ in plan.files for item in finished[name].items]
        finish_checkpoint(staging.directory, plan.tensors, items, plan.object_names)
        if common_state is not None:
            write_common(staging.directory, common_state)
        beside = staging.directory / HF_DIRECTORY
        copy_artifacts(plan.model.source.directory, beside)
        if isinstance(plan.model.source, DequantizedSource):
            drop_quantization(beside)
        refuse_changed_config(beside, plan.config)
        _manifest(plan, digests, notes, file_hashes(beside)).write(staging.directory)
        staging.finish()
    notes = {**notes, **excused_notes(plan.missing, plan.left_out), **anew}
    return Outcome(target, len(plan.tensors), total, resumed, workers, peak_memory(), notes)


@dataclass(frozen=True)
class _FinishedFile:
    items: list[StoredItem]
    digests: dict[str, str]
    not_finite: list[str]
    before: dict[str, str]
    """Hashes as of :class:`HeldAgainst`."""


def _held_against(plan: ImportPlan) -> HeldAgainst:
    """The manifest of the source, and the files that were copied beside its weights."""
    directory = plan.model.source.directory
    manifest = read_manifest(directory)
    if manifest is not None:
        refuse_changed_files(directory, directory, manifest.files)
    return HeldAgainst(manifest, directory, plan.dtypes, () if plan.adapter is None else plan.adapter.factors)


def _not_finite(finished: Iterable[_FinishedFile]) -> dict[str, Any]:
    """A note of tensors with NaN or infinity: they are carried over as they are, and no model works with them."""
    names = sorted(name for file in finished for name in file.not_finite)
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return {"not_finite": f"NaN or infinity in {shown}"} if names else {}


def _manifest(plan: ImportPlan, digests: dict[str, str], notes: dict[str, Any], files: dict[str, str]) -> Manifest:
    """What the checkpoint will say of itself."""
    tensors, places = {}, {}
    for rule in plan.rules:
        for part in rule.parts:
            tensors[part.name] = TensorRecord(dtype_name(plan.dtypes[part.name]), part.shape, digests[part.name])
            place = locate(part, plan.model.source)
            if place.name != part.name:
                places[part.name] = dataclasses.asdict(place)
    source = plan.model.source
    return Manifest(
        source.name, plan.architecture.family, tensors, dict(plan.also_stored), places, notes, plan.missing, plan.left_out, files
    )


def _write_file(
    plan: ImportPlan,
    staging: Staging,
    name: str,
    rules: list[Rule],
    narrowing: Narrowing,
    finished: dict[str, _FinishedFile],
    held: HeldAgainst,
) -> None:
    """One item file, and what it holds into ``finished`` and the journal."""
    names = [part for rule in rules for part in rule.hf_names]
    hashes, before = TensorHashes(names), held.hashes(names)

    def read(part: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        rows = plan.model.read(part, start, stop)
        held.update(before, part.name, rows)
        rows = narrowing.cast(part.name, rows, plan.dtypes[part.name])
        hashes.update(part.name, rows)
        return rows

    file = ItemFile(staging.directory / name)
    try:
        for rule in rules:
            place = plan.place(rule)
            for start, chunk in _chunks(plan, rule, read):
                file.add(place.key, (*place.index, start, *[0] * (chunk.dim() - 1)), chunk.reshape(*[1] * len(place.index), *chunk.shape))
    finally:
        file.close()
    done = _FinishedFile(file.items, hashes.digests(), sorted(hashes.not_finite), before.digests())
    finished[name] = done
    record = {
        "file": name,
        "items": [dataclasses.astuple(item) for item in done.items],
        "digests": done.digests,
        "not_finite": done.not_finite,
        "before": done.before,
    }
    staging.record({**record, "errors": narrowing.error_of(done.digests)}, staging.directory / name)


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a part of a parameter: from row ``first`` on of the part, at ``place`` in the chunk."""

    part: HuggingFaceTensor
    first: int
    place: slice


def _layout(plan: ImportPlan, rule: Rule) -> Iterator[tuple[int, int, list[_Rows]]]:
    """The chunks of a parameter, as ranges of its rows, with what each is put together from; what that leaves is padding."""
    shape = plan.shape(rule)
    runs = runs_of(rule, plan.architecture.head_dim, plan.padded_vocab)
    for start, stop in row_ranges(shape[0], plan.size(rule) // max(shape[0], 1)):
        rows = []
        for run in runs:
            low, high = max(start, run.position), min(stop, run.position + run.stop - run.start)
            if low < high:
                rows.append(_Rows(rule.parts[run.part], run.start + low - run.position, slice(low - start, high - start)))
        yield start, stop, rows


def _chunks(plan: ImportPlan, rule: Rule, read: Callable[[HuggingFaceTensor, int, int], Tensor]) -> Iterator[tuple[int, Tensor]]:
    """The whole parameter in ranges of rows, put together from rows of its tensors."""
    shape, dtype = plan.shape(rule), plan.dtype(rule)
    for start, stop, wanted in _layout(plan, rule):
        chunk = torch.zeros(stop - start, *shape[1:], dtype=dtype)
        for one in wanted:
            row_bytes = torch.Size(one.part.shape[1:]).numel() * plan.model.dtype(one.part).itemsize
            for first, last in row_ranges(one.place.stop - one.place.start, row_bytes, READ_BYTES):
                chunk[one.place.start + first : one.place.start + last] = cast(read(one.part, one.first + first, one.first + last), dtype)
        yield start, chunk


def _finished_files(
    plan: ImportPlan, staging: Staging, narrowing: Narrowing, workers: int, progress: TextIO | None
) -> dict[str, _FinishedFile]:
    """What an earlier run wrote and what still is as it was written."""
    rules_of = dict(plan.files)
    finished: dict[str, _FinishedFile] = {}

    def check(record: dict[str, Any]) -> None:
        items = [StoredItem(key, tuple(offsets), tuple(sizes), *place) for key, offsets, sizes, *place in record["items"]]
        try:
            if _digests_of(plan, staging.directory, rules_of[record["file"]], items) == record["digests"]:
                finished[record["file"]] = _FinishedFile(items, record["digests"], record["not_finite"], record["before"])
                narrowing.recall(record["errors"])
        except ConversionError:  # damaged meanwhile: written again
            return

    sizes = {name: sum(map(plan.size, rules)) for name, rules in plan.files}
    checks = [Piece(sizes[record["file"]], functools.partial(check, record)) for record in staging.records]
    shown = Progress(sum(piece.size for piece in checks), "check what an earlier run wrote", progress if checks else None)
    run_pieces(checks, workers, shown)
    shown.finish()
    return finished


def _digests_of(plan: ImportPlan, directory: Path, rules: list[Rule], items: list[StoredItem]) -> dict[str, str]:
    """Hashes of the tensors in a written file."""
    hashes = TensorHashes([part for rule in rules for part in rule.hf_names])
    remaining = iter(items)
    for rule in rules:
        leading = len(plan.place(rule).index)
        for _, _, wanted in _layout(plan, rule):
            item = next(remaining)
            chunk = read_item(directory / item.file, item.begin, item.length, item.key).reshape(item.sizes[leading:])
            for one in wanted:
                hashes.update(one.part.name, cast(chunk[one.place], plan.dtypes[one.part.name]))
    return hashes.digests()
