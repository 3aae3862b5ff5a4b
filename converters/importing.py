"""Import a Hugging Face checkpoint to a ``torch_dist`` checkpoint of Megatron-Core, chunk by chunk, without
building a model.

The plan is computed from headers alone, and lists everything that the import will write.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

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
from converters.checkpoint.manifest import ConversionManifest, TensorRecord, dtype_name, read_manifest
from converters.checkpoint.narrowing import Narrowing, kept_dtype
from converters.checkpoint.quantized import DequantizedSource, drop_quantization
from converters.checkpoint.source import HuggingFaceSource
from converters.checkpoint.staging import Staging, check_apart, others_than_converted
from converters.checkpoint.work import ConversionResult, RunOptions, row_ranges
from converters.conversion import Chunk, Conversion, Plan, Rows, convert
from converters.errors import ConversionError
from converters.families.read import config_notes, read_architecture
from converters.mapping.layouts import padded_vocab_size, runs_of
from converters.mapping.logical import HuggingFaceModel, shape_of_parameter
from converters.mapping.places import locate
from converters.mapping.rule import Rule, parts_in
from converters.mapping.rules import all_rules, missing_names
from converters.model_config.architecture import Architecture
from converters.model_config.megatron_settings import megatron_settings
from converters.model_config.prediction_layers import as_stored
from converters.torch_dist.items import read_item
from converters.torch_dist.keys import StoredPlace, extra_state_keys, is_stacked, stored_place
from converters.torch_dist.writer import ItemFile, StoredItem, StoredTensor, finish_checkpoint, write_common

# The division into files depends only on the model, so that the number of threads does not change the output.
_FILES, _SMALLEST_FILE, _LARGEST_FILE = 32, 16 * 2**20, 512 * 2**20


@dataclass(frozen=True, kw_only=True)
class ImportPlan(Plan):
    """Plan of an import.

    Attributes:
        rules: rules of the parameters to write, in order.
        stacked: layers are stacked along a leading dimension.
        padded_vocab: number of rows of the written embedding.
        also_stored: copy -> original, for tensors that the source stores twice.
        config_notes: notes on the config for the user.
        config: contents of the source's ``config.json``.
        config_hash: SHA-256 of that file.
    """

    model: HuggingFaceModel
    config: Mapping[str, Any]
    config_hash: str
    rules: tuple[Rule, ...]
    stacked: bool
    padded_vocab: int
    also_stored: Mapping[str, str]
    config_notes: tuple[str, ...] = ()

    @property
    def notes(self) -> dict[str, Any]:
        """Notes for the manifest that follow from the plan."""
        source, notes = self.model.source, {}
        if isinstance(source, DequantizedSource):
            notes.update(source.notes())
        if self.config_notes:
            notes["config.json"] = "; ".join(self.config_notes)
        if unread := source.unread_files():
            notes["not_read"] = f"{', '.join(unread)}: not part of the checkpoint (left by an earlier save?)"
        return notes | super().notes

    def place(self, rule: Rule) -> StoredPlace:
        """Return the location of a parameter in the checkpoint."""
        return stored_place(rule, self.architecture, stacked=self.stacked)

    def shape(self, rule: Rule) -> tuple[int, ...]:
        """Return the full shape of a parameter."""
        return shape_of_parameter(rule, self.padded_vocab)

    def dtype(self, rule: Rule) -> torch.dtype:
        """Return the dtype of a parameter in the checkpoint."""
        return self._stored[self.place(rule).key].dtype

    def size(self, rule: Rule) -> int:
        """Return the size of a parameter in the checkpoint in bytes."""
        return torch.Size(self.shape(rule)).numel() * self.dtype(rule).itemsize

    @property
    def tensors(self) -> list[StoredTensor]:
        """Tensors of the checkpoint."""
        return list(self._stored.values())

    @property
    def object_names(self) -> list[str]:
        """Names of the module states that the checkpoint contains."""
        names: list[str] = []
        for rule in self.rules:
            names += extra_state_keys(self.place(rule))
        return names

    @functools.cached_property
    def files(self) -> list[tuple[str, list[Rule]]]:
        """(file name, rules of its parameters) of each item file."""
        goal = min(_LARGEST_FILE, max(_SMALLEST_FILE, sum(map(self.size, self.rules)) // _FILES))
        files: list[tuple[str, list[Rule]]] = []
        # Start with a full file, so that the first parameter opens one.
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
        """Name -> fingerprint of everything that determines the output."""
        files = list[Any]()
        for name, rules in self.files:
            files.append([name, [rule.megatron_name for rule in rules]])
        rest = [
            [[tensor.key, tensor.shape, dtype_name(tensor.dtype)] for tensor in self.tensors],
            files,
            {name: dtype_name(dtype) for name, dtype in self.dtypes.items()},
        ]
        options = {"--vocab-multiple": self.padded_vocab}
        return self.fingerprint_with(self.model.source.identity(), self.config, self.rules, rest, **options)

    @functools.cached_property
    def _stored(self) -> dict[str, StoredTensor]:
        """Key -> stored tensor. All layers of a stacked tensor get the same dtype, to which all of them
        convert exactly."""
        dtypes: dict[str, torch.dtype] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for rule in self.rules:
            place = self.place(rule)
            shapes[place.key] = (*place.grid, *self.shape(rule))
            for part in rule.parts:
                own = self.dtypes[part.name]
                # Parameters stored in one tensor share a dtype; the widest keeps all values exact.
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
    """Plan an import.

    Args:
        source: the Hugging Face checkpoint.
        dtype: dtype of all tensors; None keeps each tensor's dtype.
        vocab_multiple: pad the vocabulary with zero rows to a multiple of this.
        allow_missing: patterns (``*`` and ``?``) of names that may have no counterpart.
        lora: directory of an adapter to merge.
        allow_unsupported: import the model even if Megatron-Core cannot compute it.
        ignore_config_keys: keys of ``config.json`` to ignore.

    Raises:
        ConversionError: config and weights do not belong together, or the model is not supported.
    """
    # Hash before reading, so that a change in between is detected at the end.
    hash_of_config = config_hash(source.directory)
    config = source.read_json("config.json")
    if config is None:
        raise ConversionError(
            f"{source.directory} has no config.json", "give the directory of a complete model"
        )
    if vocab_multiple < 1:
        raise ConversionError(
            f"vocab-multiple = {vocab_multiple}: at least 1 is needed", "leave it out, or pass 128"
        )
    architecture = as_stored(read_architecture(config, ignore_config_keys), source.names())
    if not allow_unsupported:
        _require_support(architecture)
    # A wrong number in the config could request terabytes, so check it before using its sizes.
    check_plausible(architecture, source.shapes(), str(source.directory), stacked=False)
    check_source(source, architecture, excused=allow_missing)
    if dtype is not None and isinstance(source, DequantizedSource):
        # Dequantise to float32, so that values are rounded only once, to the requested dtype.
        source.dequantized_dtype = torch.float32
    model = HuggingFaceModel(source, architecture)
    adapter = None
    if lora is not None:
        model, adapter = merge_import(model, lora, dtype)
    rules = [rule for rule in all_rules(architecture) if _is_whole(rule, source, allow_missing)]
    dtypes: dict[str, torch.dtype] = {}
    accounted = set[str]()
    for part in parts_in(rules):
        dtypes[part.name] = kept_dtype(part, model.dtype(part), dtype)
        accounted.update(place.name for place in part.places)
    # The manifest records these copies, so that an export writes them again.
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
        missing=missing_names(architecture, dtypes),
        adapter=adapter,
        dtype_asked=dtype,
        config_notes=tuple(config_notes(config, ignore_config_keys)),
    )


def _require_support(architecture: Architecture) -> None:
    """Reject a model that Megatron-Core cannot compute. Reward models with a score head pass, because
    trainers have their own model class for them."""
    if architecture.head is not None:
        return
    try:
        megatron_settings(architecture)
    except ConversionError as error:
        raise ConversionError(
            error.what, f"{error.fix}; --allow-unsupported imports it anyway", error.details
        ) from error


def _is_whole(rule: Rule, source: HuggingFaceSource, excused: tuple[str, ...]) -> bool:
    """Return whether the source has all tensors of a parameter. An excused parameter may be missing, but not
    incomplete."""
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
    """Write the checkpoint of a plan. An interrupted import is resumed.

    Args:
        plan: result of ``plan_import``.
        target: directory to create.
        options: threads, memory limit and so on.
        common_state: other state to store in ``common.pt``; None for none.

    Raises:
        ConversionError: the target cannot be written, the source is damaged, or the memory does not suffice.
    """
    directory = plan.model.source.directory
    check_apart(directory, target)
    artifacts(directory)  # Fail now on files that could not be copied at the end.
    # The plan may be older than the files.
    refuse_changed_config(directory, plan.config_hash, directory)
    begin = functools.partial(_Import, plan, common_state)
    return convert(begin, target, options, plan.fingerprint, others_than_converted, len(plan.tensors))


class _Import(Conversion):
    """An import in progress; a piece is an item file with all its parameters."""

    verb, kind = "import", "file"

    def __init__(self, plan: ImportPlan, common_state: Mapping[str, Any] | None, staging: Staging) -> None:
        directory = plan.model.source.directory
        # If an export wrote the source, the files next to its weights must be unchanged too.
        manifest = read_manifest(directory)
        if manifest is not None:
            refuse_changed_files(directory, directory, manifest.files)
        super().__init__(plan, staging, Narrowing(asked=True), manifest, directory)
        self._import, self._common_state, self._rules = plan, common_state, dict(plan.files)
        self.pieces = {name: list(parts_in(rules)) for name, rules in plan.files}
        self.files = [[name] for name in self.pieces]

    def size(self, name: str) -> int:
        return sum(map(self._import.size, self._rules[name]))

    def file_of(self, name: str) -> Path:
        return self.staging.directory / name

    def chunks(self, name: str) -> Iterator[Chunk]:
        for rule in self._rules[name]:
            yield from self._chunks_of(rule)

    def _chunks_of(self, rule: Rule) -> Iterator[Chunk]:
        """Yield the chunks of a parameter, which are ranges of its rows."""
        plan = self._import
        shape, place, runs = (
            plan.shape(rule),
            plan.place(rule),
            runs_of(rule, plan.architecture.head_dim, plan.padded_vocab),
        )
        for start, stop in row_ranges(shape, plan.dtype(rule).itemsize):
            rows = []
            for run in runs:
                low, high = max(start, run.position), min(stop, run.position + run.length)
                if low < high:
                    rows.append(
                        Rows(
                            rule.parts[run.part],
                            run.start + low - run.position,
                            slice(low - start, high - start),
                        )
                    )
            offsets = (*place.index, start, *[0] * (len(shape) - 1))
            yield Chunk(place.key, offsets, (stop - start, *shape[1:]), plan.dtype(rule), rows)

    def put(self, name: str, chunks: Iterator[tuple[Chunk, Tensor]]) -> dict[str, Any]:
        file = ItemFile(self.file_of(name))
        try:
            for chunk, tensor in chunks:
                file.add(
                    chunk.key,
                    chunk.offsets,
                    # An item has all dimensions of the stored tensor; those of layers and experts have size
                    # 1.
                    tensor.reshape(*[1] * (len(chunk.offsets) - tensor.dim()), *tensor.shape),
                )
        finally:
            file.close()
        return {"items": list(map(dataclasses.astuple, file.items))}

    def read_chunk(self, record: Mapping[str, Any], number: int, chunk: Chunk) -> Tensor:
        item = _item(record["items"][number])
        return read_item(self.staging.directory / item.file, item.begin, item.length, item.key).reshape(
            chunk.shape
        )

    def write_rest(self, digests: Mapping[str, str], notes: dict[str, Any]) -> None:
        plan, directory = self._import, self.staging.directory
        # In the order of the plan, not of the threads, so that the index is deterministic.
        items = list[StoredItem]()
        for name in self.pieces:
            items += map(_item, self.finished[name]["items"])
        finish_checkpoint(directory, plan.tensors, items, plan.object_names)
        if self._common_state is not None:
            write_common(directory, self._common_state)
        source, beside = plan.model.source, directory / HF_DIRECTORY
        copy_artifacts(source.directory, beside)
        # Check the copy, because the source could still change after a check.
        refuse_changed_config(beside, plan.config_hash, source.directory)
        # After the check, because this changes the file.
        if isinstance(source, DequantizedSource):
            drop_quantization(beside)
        tensors, places = {}, {}
        for part in parts_in(plan.rules):
            tensors[part.name] = TensorRecord(
                dtype_name(plan.dtypes[part.name]), part.shape, digests[part.name]
            )
            place = locate(part, source)
            if place.name != part.name:
                places[part.name] = dataclasses.asdict(place)
        family, also_stored, files = plan.architecture.family, dict(plan.also_stored), file_hashes(beside)
        ConversionManifest(
            source.name, family, tensors, also_stored, places, notes, plan.missing, plan.left_out, files
        ).write(directory)


def _item(described: Sequence[Any]) -> StoredItem:
    # JSON has turned tuples into lists.
    key, offsets, sizes, *place = described
    return StoredItem(key, tuple(offsets), tuple(sizes), *place)
