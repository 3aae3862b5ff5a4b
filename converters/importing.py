"""Import: Hugging Face checkpoint -> ``torch_dist`` checkpoint of Megatron-Core, model-free, one chunk of a tensor at a time.

The plan says what an import will write and is worked out from headers alone.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor

from converters.adapters.lora import LoraAdapter
from converters.adapters.lora_model import merge_import
from converters.check import check_plausible, check_source, is_excused, stored_twice
from converters.checkpoint.artifacts import (
    HF_DIRECTORY,
    artifacts,
    config_hash,
    copy_artifacts,
    file_hashes,
    refuse_changed_config,
    refuse_changed_files,
)
from converters.checkpoint.exact import cast
from converters.checkpoint.files import require_space
from converters.checkpoint.manifest import (
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
    read_manifest,
)
from converters.checkpoint.narrowing import Narrowing, kept_dtype
from converters.checkpoint.quantized import DequantizedSource, drop_quantization
from converters.checkpoint.source import HuggingFaceSource
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
from converters.families.read import config_notes, read_architecture
from converters.mapping.layouts import padded_vocab_size, runs_of
from converters.mapping.logical import HuggingFaceModel, shape_of_parameter
from converters.mapping.places import locate
from converters.mapping.rule import HuggingFaceTensor, Rule
from converters.mapping.rules import all_rules, hf_tensors
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.prediction_layers import as_stored
from converters.torch_dist.items import read_item
from converters.torch_dist.keys import StoredPlace, extra_state_keys, is_stacked, stored_place
from converters.torch_dist.location import is_checkpoint
from converters.torch_dist.writer import ItemFile, StoredItem, StoredTensor, finish_checkpoint, write_common

# the sizes of files follow from the model alone: bytes must not depend on the workers
_FILES, _SMALLEST_FILE, _LARGEST_FILE = 32, 16 * 2**20, 512 * 2**20


@dataclass(frozen=True)
class ImportPlan:
    """Import plan: what an import will do.

    Attributes:
        model: the source.
        rules: parameters to write, in order.
        stacked: whether layers are stacked.
        padded_vocab: rows of the embedding.
        dtypes: of each Hugging Face tensor, as it will be kept.
        also_stored: names of the source that say what another tensor says, with that tensor.
        left_out: names without a counterpart that were excused.
        missing: tensors that the source does not have, and is excused for.
        adapter: that is merged into the tensors of ``model``.
        dtype_asked: of all tensors; None keeps every tensor's own.
        config_notes: what a user should know of the config.
        config: the parsed ``config.json`` of the source.
        config_hash: SHA-256 of its bytes.
    """

    model: HuggingFaceModel
    config: Mapping[str, Any]
    config_hash: str
    rules: tuple[Rule, ...]
    stacked: bool
    padded_vocab: int
    dtypes: Mapping[str, torch.dtype]
    also_stored: Mapping[str, str]
    left_out: tuple[str, ...]
    missing: tuple[str, ...] = ()
    adapter: LoraAdapter | None = None
    dtype_asked: torch.dtype | None = None
    config_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> dict[str, Any]:
        """Return what the conversion will say of itself that follows from the plan."""
        source = self.model.source
        dequantized = source.notes() if isinstance(source, DequantizedSource) else {}
        return {**dequantized, **self._notes_of_config, **self._unread_files, **({} if self.adapter is None else self.adapter.notes())}

    @property
    def _notes_of_config(self) -> dict[str, Any]:
        return {"config.json": "; ".join(self.config_notes)} if self.config_notes else {}

    @property
    def _unread_files(self) -> dict[str, Any]:
        unread = self.model.source.unread_files()
        return {"not_read": f"{', '.join(unread)}: not part of the checkpoint (left by an earlier save?)"} if unread else {}

    @property
    def architecture(self) -> Architecture:
        """Architecture of the model."""
        return self.model.architecture

    def place(self, rule: Rule) -> StoredPlace:
        """Place of a parameter in the checkpoint."""
        return stored_place(rule, self.architecture, stacked=self.stacked)

    def shape(self, rule: Rule) -> tuple[int, ...]:
        """Shape of a whole parameter."""
        return shape_of_parameter(rule, self.padded_vocab)

    def dtype(self, rule: Rule) -> torch.dtype:
        """Dtype of a parameter in the checkpoint."""
        return self._stored[self.place(rule).key].dtype

    def size(self, rule: Rule) -> int:
        """Bytes of a parameter in the checkpoint."""
        return torch.Size(self.shape(rule)).numel() * self.dtype(rule).itemsize

    @property
    def tensors(self) -> list[StoredTensor]:
        """Tensors of the checkpoint."""
        return list(self._stored.values())

    @property
    def object_names(self) -> list[str]:
        """Object names of the modules' states in the checkpoint."""
        return [name for rule in self.rules for name in extra_state_keys(self.place(rule))]

    @functools.cached_property
    def files(self) -> list[tuple[str, list[Rule]]]:
        """Item files: name and parameters."""
        goal = min(_LARGEST_FILE, max(_SMALLEST_FILE, sum(map(self.size, self.rules)) // _FILES))
        files: list[tuple[str, list[Rule]]] = []
        filled = goal
        for rule in self.rules:
            if filled >= goal:
                files.append((f"__{len(files)}_0.distcp", []))
                filled = 0
            files[-1][1].append(rule)
            filled += self.size(rule)
        return files

    @functools.cached_property
    def fingerprint(self) -> dict[str, str]:
        """Changes with whatever changes the bytes that will be written; by the name of what decides about them."""
        rest = [
            [[tensor.key, tensor.shape, dtype_name(tensor.dtype)] for tensor in self.tensors],
            [[name, [rule.megatron_name for rule in rules]] for name, rules in self.files],
            {name: dtype_name(dtype) for name, dtype in self.dtypes.items()},
        ]
        return fingerprints(
            {
                WEIGHTS: self.model.source.identity(),
                "config.json": self.config,
                RULES: fingerprint_of_rules(self.rules),
                "--dtype": str(self.dtype_asked),
                "--vocab-multiple": self.padded_vocab,
                "--allow-missing": [self.missing, self.left_out],
                "--lora": [] if self.adapter is None else self.adapter.identity(),
                THE_REST: rest,
            }
        )

    @functools.cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """By key. All layers of a stacked tensor have one dtype, the narrowest that holds every one's values."""
        dtypes: dict[str, torch.dtype] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self.rules:
            place = self.place(rule)
            shapes[place.key] = (*place.grid, *self.shape(rule))
            for part in rule.parts:
                own = self.dtypes[part.name]
                dtypes[place.key] = torch.promote_types(dtypes.get(place.key, own), own)
        return {key: StoredTensor(key, shape, dtypes[key]) for key, shape in shapes.items()}


def plan_import(
    source: HuggingFaceSource,
    *,
    dtype: torch.dtype | None = None,
    vocab_multiple: int = 1,
    allow_missing: tuple[str, ...] = (),
    lora: Path | None = None,
    allow_unsupported: bool = False,
    ignore_config_keys: tuple[str, ...] = (),
) -> ImportPlan:
    """Work out an import.

    Args:
        source: the Hugging Face checkpoint.
        dtype: of all tensors; None keeps every tensor's own.
        vocab_multiple: the vocabulary is padded with zero rows to a multiple of this.
        allow_missing: patterns (``*`` and ``?``) of names on either side that need no counterpart on the other.
        lora: directory of a PEFT adapter to merge.
        allow_unsupported: import a model although no Megatron-Core model computes what it computes.
        ignore_config_keys: keys of ``config.json`` that are known to be harmless.

    Raises:
        ConversionError: config and weights do not belong together, something cannot be carried over, or no Megatron-Core model computes it.
    """
    # before it is read: a change between the two is noticed at the end
    hash_of_config = config_hash(source.directory)
    config = source.read_json("config.json")
    if config is None:
        raise ConversionError(f"{source.directory} has no config.json", "give the directory of a whole model")
    if vocab_multiple < 1:
        raise ConversionError(f"vocab-multiple = {vocab_multiple}: at least 1 is needed", "leave it out, or pass 128")
    architecture = as_stored(read_architecture(config, ignore_config_keys), source.names())
    if not allow_unsupported:
        _require_support(architecture)
    check_plausible(architecture, source.shapes(), str(source.directory), stacked=False)
    check_source(source, architecture, excused=allow_missing)
    if dtype is not None and isinstance(source, DequantizedSource):
        source.dequantized_dtype = torch.float32  # rounded once, to what is asked for
    model = HuggingFaceModel(source, architecture)
    adapter = None
    if lora is not None:
        model = merged = merge_import(model, lora, dtype)
        adapter = merged.adapter
    rules = [rule for rule in all_rules(architecture) if _is_whole(rule, source, allow_missing)]
    dtypes = {part.name: kept_dtype(part, model.dtype(part), dtype) for rule in rules for part in rule.parts}
    accounted = {place.name for rule in rules for part in rule.parts for place in part.places}
    also_stored = stored_twice(source, architecture, allow_missing)
    return ImportPlan(
        model=model,
        config=config,
        config_hash=hash_of_config,
        rules=tuple(rules),
        stacked=is_stacked(architecture),
        padded_vocab=padded_vocab_size(architecture.vocab_size, 1, vocab_multiple),
        dtypes=dtypes,
        also_stored=also_stored,
        left_out=tuple(name for name in source.names() if name not in accounted and name not in also_stored),
        missing=tuple(part.name for part in hf_tensors(architecture) if part.name not in dtypes),
        adapter=adapter,
        dtype_asked=dtype,
        config_notes=tuple(config_notes(config, ignore_config_keys)),
    )


def _require_support(architecture: Architecture) -> None:
    """Refuse what would be converted without loss and could not be trained. A model that scores has no GPTModel, and trainers have one of
    their own for it."""
    if architecture.head is not None:
        return
    try:
        megatron_settings(architecture)
    except ConversionError as error:
        raise ConversionError(error.what, f"{error.fix}; --allow-unsupported imports it all the same", error.details) from error


def _is_whole(rule: Rule, source: HuggingFaceSource, excused: tuple[str, ...]) -> bool:
    """Whether the source has all of a parameter; a parameter that it has none of may be excused, one that it has half of may not."""
    missing = [part.name for part in rule.parts if not any(place.name in source for place in part.places)]
    if not missing:
        return True
    named = [rule.megatron_name, *missing, *(part.places[0].name for part in rule.parts)]
    if len(missing) < len(rule.parts) or not is_excused(named, excused):
        raise ConversionError(
            f"{rule.megatron_name} is made of {', '.join(rule.hf_names)}; missing: {', '.join(missing)}",
            "use complete weights; --allow-missing can leave out whole parameters, not parts of them",
        )
    return False


def import_model(
    plan: ImportPlan,
    target: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 - frozen
    common_state: Mapping[str, Any] | None = None,
) -> ConversionResult:
    """Write the checkpoint that a plan describes. A run that was killed goes on where it ended.

    Args:
        plan: from ``plan_import``.
        target: directory to make.
        options: how.
        common_state: what is no tensor, for ``common.pt``; by default nothing.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    directory = plan.model.source.directory
    check_apart(directory, target)
    artifacts(directory)  # refuses what cannot be copied at the end
    refuse_changed_config(directory, plan.config_hash, directory)
    workers, progress = workers_within(options.workers, options.max_memory), options.progress
    with Staging(target, plan.fingerprint, overwrite=options.overwrite, is_ours=is_checkpoint, part=options.part) as staging:
        files = [(name, rules) for number, (name, rules) in enumerate(plan.files) if options.has(number)]
        total = sum(plan.size(rule) for _, rules in files for rule in rules)
        shown = Progress(total, f"import {target.name}", progress)
        anew = say_why_anew(staging.started_anew_because_of, shown)
        narrowing, held = Narrowing(asked=True), _held_against(plan)
        finished: dict[str, _FinishedFile] = {}
        check = functools.partial(_check_files, plan, staging.directory, finished, narrowing, workers, progress)
        check(staging.records)
        resumed = sum(plan.size(rule) for name, rules in files if name in finished for rule in rules)
        require_space(staging.directory, total - resumed)
        shown.skip(resumed)
        pieces = [
            Piece(sum(map(plan.size, rules)), functools.partial(_write_file, plan, staging, name, rules, narrowing, finished, held))
            for name, rules in files
            if name not in finished
        ]
        run_pieces(pieces, workers, shown)
        shown.finish()
        notes: dict[str, Any] = {**anew}
        waits_for: tuple[int, ...] = ()
        with staging.all_parts_but_the_last() as others:
            if others is not None:
                names = [name for name, _ in plan.files]
                waits_for = options.parts_to_wait_for(others, check, lambda: [names.index(name) for name in names if name not in finished])
            if others is None or waits_for:
                staging.leave()
            else:
                notes = {**_finish(plan, staging, narrowing, held, finished, common_state), **notes}
    return ConversionResult(target, len(plan.tensors), total, resumed, workers, peak_memory(), notes, waits_for)


def _finish(
    plan: ImportPlan,
    staging: Staging,
    narrowing: Narrowing,
    held: HeldAgainst,
    finished: dict[str, _FinishedFile],
    common_state: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Write what makes the item files a checkpoint, and give it its name. Returns what the conversion says of itself."""
    source = plan.model.source
    digests = {name: digest for file in finished.values() for name, digest in file.digests.items()}
    held.refuse_changed(digests, {name: digest for file in finished.values() for name, digest in file.before.items()})
    notes = {**narrowing.summary(), **not_finite_note(name for file in finished.values() for name in file.not_finite), **plan.notes}
    items = [item for name, _ in plan.files for item in finished[name].items]
    finish_checkpoint(staging.directory, plan.tensors, items, plan.object_names)
    if common_state is not None:
        write_common(staging.directory, common_state)
    beside = staging.directory / HF_DIRECTORY
    copy_artifacts(source.directory, beside)
    refuse_changed_config(beside, plan.config_hash, source.directory)
    if isinstance(source, DequantizedSource):
        drop_quantization(beside)
    _manifest(plan, digests, notes, file_hashes(beside)).write(staging.directory)
    staging.finish()
    return {**notes, **excused_notes(plan.missing, plan.left_out)}


@dataclass(frozen=True)
class _FinishedFile:
    items: list[StoredItem]
    digests: dict[str, str]
    not_finite: list[str]
    before: dict[str, str]
    """Hashes as of ``HeldAgainst``."""


def _held_against(plan: ImportPlan) -> HeldAgainst:
    """The manifest of the source, and the files that were copied beside its weights."""
    directory = plan.model.source.directory
    manifest = read_manifest(directory)
    if manifest is not None:
        refuse_changed_files(directory, directory, manifest.files)
    return HeldAgainst(manifest, directory, plan.dtypes, () if plan.adapter is None else plan.adapter.changed)


def _manifest(plan: ImportPlan, digests: dict[str, str], notes: dict[str, Any], files: dict[str, str]) -> ConversionManifest:
    """Return what the checkpoint will say of itself."""
    tensors, places = {}, {}
    for rule in plan.rules:
        for part in rule.parts:
            tensors[part.name] = TensorRecord(dtype_name(plan.dtypes[part.name]), part.shape, digests[part.name])
            place = locate(part, plan.model.source)
            if place.name != part.name:
                places[part.name] = dataclasses.asdict(place)
    source = plan.model.source
    return ConversionManifest(
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


def _check_files(
    plan: ImportPlan,
    directory: Path,
    finished: dict[str, _FinishedFile],
    narrowing: Narrowing,
    workers: int,
    progress: TextIO | None,
    records: Sequence[Mapping[str, Any]],
) -> None:
    """Take into ``finished`` what an earlier run, or another part, has recorded and what still is as it was written."""
    rules_of = dict(plan.files)

    def check(record: Mapping[str, Any]) -> None:
        done = _file_of_record(record)
        try:
            if _digests_of(plan, directory, rules_of[record["file"]], done.items) == record["digests"]:
                finished[record["file"]] = done
                narrowing.recall(record["errors"])
        except ConversionError:  # damaged meanwhile: written again
            return

    sizes = {name: sum(map(plan.size, rules)) for name, rules in plan.files}
    check_records([Piece(sizes[record["file"]], functools.partial(check, record)) for record in records], workers, progress)


def _file_of_record(record: Mapping[str, Any]) -> _FinishedFile:
    items = [StoredItem(key, tuple(offsets), tuple(sizes), *place) for key, offsets, sizes, *place in record["items"]]
    return _FinishedFile(items, record["digests"], record["not_finite"], record["before"])


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
