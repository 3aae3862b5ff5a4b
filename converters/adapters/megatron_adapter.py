"""Read the adapters of a ``torch_dist`` checkpoint with PEFT's names and shapes.

There are three formats. Megatron-Bridge's LoRA has one adapter per fused layer: query, key and value share
``lora_A``, and their ``lora_B`` are rows of one matrix. Its CanonicalLoRA has an adapter for each part, like
PEFT. The third format is written by ``converters.adapters.to_megatron``: like LoRA, but each part has its own
range of ranks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.adapters.lora_config import LoraConfig, read_lora_config
from converters.checkpoint.artifacts import HF_DIRECTORY
from converters.checkpoint.boxes import Box, single, whole
from converters.checkpoint.manifest import MANIFEST_FILE, ConversionManifest, TensorHashes, read_manifest
from converters.checkpoint.source import ADAPTER_CONFIG
from converters.errors import ConversionError
from converters.files.reading import read_json_object
from converters.foreign.settings import RUN_CONFIG_FILE, find_run_config, read_section
from converters.foreign.view import CanonicalTensors
from converters.mapping.layouts import runs_of
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, is_expert
from converters.mapping.rules import all_rules, hf_tensors
from converters.model_config.architecture import Architecture
from converters.torch_dist.keys import StoredPlace, is_of_optimizer, stored_place
from converters.torch_dist.location import find_checkpoint
from converters.torch_dist.reader import TorchDistCheckpoint

PEFT_PREFIX = "base_model.model."
_SIDES = ("linear_in", "linear_out")
_LAYER = re.compile(r"(decoder|mtp)\.layers\.")
PARTS = {Kind.QKV: ("adapter_q", "adapter_k", "adapter_v"), Kind.GATED: ("adapter_gate", "adapter_up")}
"""Kind of fused layer -> names of its parts' adapters in Megatron-Bridge's CanonicalLoRA."""


def linears(architecture: Architecture, *, of_experts: bool = False) -> list[Rule]:
    """Return the rules of linear weights in transformer layers, which may have an adapter.

    Args:
        architecture: architecture of the model.
        of_experts: return only weights of routed experts; False returns only the others. Megatron-Bridge has
            one adapter for all experts of a rank, PEFT one per expert.
    """
    return [
        rule
        for rule in all_rules(architecture)
        if _LAYER.match(rule.megatron_name)
        and rule.megatron_name.endswith(".weight")
        and is_expert(rule.megatron_name) == of_experts
        if all(len(part.shape) == 2 and part.name.endswith(".weight") for part in rule.parts)
    ]


def peft_name(part: HuggingFaceTensor, factor: str) -> str:
    """Return PEFT's name for a factor (``lora_A`` or ``lora_B``) of a tensor's adapter."""
    return f"{PEFT_PREFIX}{part.name.removesuffix('.weight')}.{factor}.weight"


def stored_factor(
    rule: Rule, architecture: Architecture, side: str, part: int | None = None, *, stacked: bool
) -> StoredPlace:
    """Return the location of a factor in a ``torch_dist`` checkpoint.

    Args:
        rule: rule of the linear layer's weight.
        architecture: architecture of the model.
        side: ``linear_in`` or ``linear_out``.
        part: index of the part of a fused layer, if parts have their own adapters; None for the whole layer.
        stacked: layers are stacked along a leading dimension.
    """
    place = stored_place(rule, architecture, stacked=stacked)
    of_part = "" if part is None else f"{PARTS[rule.kind][part]}."
    return StoredPlace(
        f"{place.key.removesuffix('weight')}adapter.{of_part}{side}.weight", place.index, place.grid
    )


def parts_of(rule: Rule) -> range:
    """Return the indices of the parts of a fused layer, which may have their own adapters; empty for other
    layers."""
    return range(len(PARTS.get(rule.kind, ())))


Block = tuple[int, int]
"""Range of ranks (start, stop) that a part uses in the adapter of its fused layer."""
FORM_NOTE, SHARED, BLOCKS = "adapter_form", "shared", "blocks"
_CHANGED = (
    f"import the adapter again; or remove {MANIFEST_FILE} if it was trained further: its adapters are "
    "then those of fused layers"
)


def block(part: int, rank: int, form: str) -> Block:
    """Return the range of ranks that a part uses: all in the shared format, else its own block."""
    return (0, rank) if form == SHARED else (part * rank, (part + 1) * rank)


def blocks_of(manifest: ConversionManifest, rules: Iterable[Rule], stored_rank: int) -> dict[str, Block]:
    """Return Hugging Face tensor name -> range of ranks, for each part with an adapter.

    Args:
        manifest: manifest of the checkpoint.
        rules: rules of the layers with adapters.
        stored_rank: rank of the stored adapters.

    Raises:
        ConversionError: the manifest is not one of adapters, or its ranks do not match the stored ones.
    """
    form = manifest.notes.get(FORM_NOTE)
    ranks = {
        record.shape[0]
        for name, record in manifest.tensors.items()
        if name.endswith(".lora_A.weight") and len(record.shape) == 2
    }
    if form not in (SHARED, BLOCKS) or len(ranks) != 1:
        raise ConversionError(
            f"{MANIFEST_FILE} records {FORM_NOTE} = {form!r} and the ranks {sorted(ranks)}", _CHANGED
        )
    rank = ranks.pop()
    found = {}
    for rule in rules:
        for number, part in enumerate(rule.parts):
            if peft_name(part, "lora_A") in manifest.tensors:
                found[part.name] = block(number, rank, form)
    if max((stop for _, stop in found.values()), default=0) > stored_rank:
        raise ConversionError(
            f"{MANIFEST_FILE} records rank {rank} for each part, but {stored_rank} is stored", _CHANGED
        )
    return found


def require_as_written(
    adapter: MegatronAdapter, manifest: ConversionManifest, path: Path, between: Iterable[tuple[str, Tensor]]
) -> None:
    """Check that a checkpoint of adapters still matches its manifest.

    Args:
        adapter: the checkpoint.
        manifest, path: the manifest and its file.
        between: (key, values that must be zero).

    Raises:
        ConversionError: the checkpoint was changed.
    """
    changed, names = [key for key, values in between if torch.count_nonzero(values)], adapter.keys()
    for name in names:
        hashes = TensorHashes([name])
        hashes.update(name, adapter.read(name))
        if name not in manifest.tensors or hashes.digests()[name] != manifest.tensors[name].sha256:
            changed.append(name)
    changed += [f"missing: {name}" for name in manifest.tensors if name not in names]
    if changed:
        raise ConversionError(
            f"{adapter.directory} does not match its {path.name}", _CHANGED, list(dict.fromkeys(changed))
        )


_KNOWN = ("LoRA", "CanonicalLoRA")


def said_of(
    directory: Path, kept: Path | None, rank: int, names: Sequence[str], architecture: Architecture
) -> tuple[Path, Mapping[str, Any], Any]:
    """Find the file that records the type and scale of a checkpoint's adapters.

    Args:
        directory: directory of the checkpoint.
        kept: PEFT config that a conversion has stored; None if the checkpoint comes from a trainer.
        rank: rank of the stored adapters.
        names: PEFT's names of the factors.
        architecture: architecture of the base model.

    Returns:
        The file, the adapter's config in PEFT's format, and the tensor-parallel size with which the adapters
            were saved.

    Raises:
        ConversionError: no file records the scale, or it records another rank or an unknown type.
    """
    if kept is not None:
        # A conversion writes unsharded factors, hence tensor-parallel size 1.
        return kept, read_json_object(kept, (f"{kept} does not exist", "import the adapter again")), 1
    path = find_run_config(directory)
    if path is None:
        raise ConversionError(
            f"the scale (alpha) of the adapters in {directory} is not recorded",
            f"put the {RUN_CONFIG_FILE} of Megatron-Bridge next to them",
        )
    section, model = read_section(path, "peft"), read_section(path, "model")
    kind = str(section.get("_target_", "")).rpartition(".")[2]
    if kind not in _KNOWN:
        raise ConversionError(
            f"{path}: peft = {kind or section}, known are {' and '.join(_KNOWN)}",
            "let the trainer merge the adapters",
        )
    if section.get("dim") != rank:
        raise ConversionError(
            f"{path}: dim = {section.get('dim')!r}, the stored adapters have rank {rank}",
            "use the file of this run",
        )
    return (
        path,
        _made_config(section, model, names, architecture),
        model.get("tensor_model_parallel_size") or 1,
    )


def _made_config(
    section: Mapping[str, Any], model: Mapping[str, Any], names: Sequence[str], architecture: Architecture
) -> dict[str, Any]:
    """Return a PEFT config for adapters that Megatron-Bridge trained."""
    return {
        "base_model_name_or_path": model.get("hf_model_id"),
        "bias": "none",
        "fan_in_fan_out": False,
        # PEFT sets this in every adapter that it saves.
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": section.get("alpha"),
        "lora_dropout": section.get("dropout") or 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": section["dim"],
        "target_modules": _targets(names, architecture),
        "task_type": "CAUSAL_LM",
        "use_dora": False,
        "use_rslora": False,
    }


def _targets(names: Sequence[str], architecture: Architecture) -> list[str]:
    """Return ``target_modules`` for PEFT's config: the last part of a name if all modules with that last part
    have an adapter, else the full name."""
    modules = {name.removeprefix(PEFT_PREFIX).rpartition(".lora_")[0] for name in names}
    others = {tensor.name.removesuffix(".weight") for tensor in hf_tensors(architecture)} - modules
    targets = set()
    for module in modules:
        end = module.rpartition(".")[2]
        # Use the short name only if it matches no module without an adapter.
        targets.add(module if any(other.endswith(f".{end}") for other in others) else end)
    return sorted(targets)


# When Megatron-Core saves the gate and up halves of a SwiGLU layer separately, it appends ``_w`` and ``_v``.
_ADAPTER = re.compile(r"(.+)\.adapter\.(?:adapter_\w+\.)?linear_(?:in|out)\.weight(?:_[wv])?")
# A key without a layer number: layers are stacked along a leading dimension.
_STACKED = re.compile(r"decoder\.layers\.[a-z]")
_FIX = (
    "use the config of the model that was trained (--hf-config DIRECTORY); adapters of Megatron-Bridge's "
    "LoRA and CanonicalLoRA are known"
)


@dataclass(frozen=True, slots=True)
class _Factor:
    """A factor in PEFT's form: consecutive runs of rows of a stored tensor, and a range of its columns."""

    place: StoredPlace
    runs: tuple[tuple[int, int], ...]
    columns: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(stop - start for start, stop in self.runs), self.columns[1] - self.columns[0]


class MegatronAdapter:
    """The adapters of a ``torch_dist`` checkpoint, as an ``AdapterSource``.

    Args:
        directory: the checkpoint, or a trainer's directory that contains it.
        architecture: architecture of the base model.

    Raises:
        ConversionError: there are no adapters, their scale is not recorded, or some do not match the model or
            have no PEFT equivalent.

    Attributes:
        rank: rank of the stored adapters.
        family: family of the base model.
        has_experts: the base model is a mixture-of-experts model.
        left_out: keys of base weights that are stored with the adapters.
        origin: file that records the scale.
    """

    def __init__(self, directory: Path, architecture: Architecture) -> None:
        self.directory = find_checkpoint(directory)
        checkpoint = TorchDistCheckpoint(self.directory)
        # Optimizer state has the same keys after a prefix, but is not part of the adapter.
        found = {key for key in checkpoint if _ADAPTER.fullmatch(key) and not is_of_optimizer(key)}
        if not found:
            raise ConversionError(
                f"{self.directory} holds no adapters", "give a PEFT adapter, or a checkpoint of LoRA training"
            )
        self._architecture, self.family, self.has_experts = (
            architecture,
            architecture.family,
            architecture.mixture is not None,
        )
        self._stacked = any(map(_STACKED.match, found))
        rules = linears(architecture)
        grids = {}
        for rule in rules:
            for part in (None, *parts_of(rule)):
                for side in _SIDES:
                    place = self._place(rule, side, part)
                    grids[place.key] = place.grid
        self._tensors = CanonicalTensors(checkpoint, grids)
        self._refuse_unknown(found, grids)
        self.rank = self._common_rank(rules)
        manifest = read_manifest(self.directory)
        blocks = None if manifest is None else blocks_of(manifest, rules, self.rank)
        self._factors: dict[str, _Factor] = {}
        problems: list[str] = []
        for rule in rules:
            problems += self._add(rule, blocks)
        if problems:
            raise ConversionError(f"the adapters in {self.directory} do not fit the model", _FIX, problems)
        self.left_out = self._beside(checkpoint, found)
        kept = self.directory / HF_DIRECTORY / ADAPTER_CONFIG
        said = said_of(
            self.directory,
            kept if manifest is not None else None,
            self.rank,
            list(self._factors),
            architecture,
        )
        self.origin, self.raw_config, cut = said
        self.config: LoraConfig = read_lora_config(self.origin, self.raw_config)
        # These are separate adapters of gate and up, whose rows Megatron-Bridge treats as rows of both.
        apart = []
        for rule in rules:
            if rule.kind is Kind.GATED:
                apart += [self._place(rule, "linear_out", part) for part in parts_of(rule)]
        if cut != 1 and any(map(self._has, apart)):
            raise ConversionError(
                f"{self.directory} holds adapters of gate and up saved with "
                f"tensor_model_parallel_size = {cut}: Megatron-Bridge (0.3.1) then exchanges their "
                "rows, and the checkpoint does not record which release wrote it",
                "save it with tensor parallelism 1, or let Megatron-Bridge write the PEFT adapter",
            )
        # Last, because it reads every value.
        if manifest is not None and blocks is not None:
            require_as_written(self, manifest, self.directory / MANIFEST_FILE, self._between(rules, blocks))

    def files(self) -> list[Path]:
        """See ``AdapterSource``."""
        return [*sorted(filter(Path.is_file, self.directory.iterdir())), self.origin]

    def keys(self) -> list[str]:
        """See ``AdapterSource``."""
        return list(self._factors)

    def shape(self, name: str) -> tuple[int, ...]:
        """See ``AdapterSource``."""
        return self._factors[name].shape

    def dtype(self, name: str) -> torch.dtype:
        """See ``AdapterSource``."""
        return self._tensors.dtype(self._factors[name].place.key)

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """See ``AdapterSource``."""
        factor = self._factors[name]
        (first, last), (left, right) = whole(factor.shape) if box is None else box
        # torch.cat rejects an empty list, so begin with an empty tensor of the right width and dtype.
        pieces, position = [torch.empty(0, right - left, dtype=self.dtype(name))], 0
        for start, stop in factor.runs:
            low, high = max(first, position), min(last, position + stop - start)
            if low < high:
                rows = (start + low - position, start + high - position)
                pieces.append(
                    self._read(factor.place, rows, (factor.columns[0] + left, factor.columns[0] + right))
                )
            position += stop - start
        return torch.cat(pieces)

    def _read(self, place: StoredPlace, rows: tuple[int, int], columns: tuple[int, int]) -> Tensor:
        box = (*single(place.index), rows, columns)
        return self._tensors.read(place.key, box).reshape(rows[1] - rows[0], columns[1] - columns[0])

    def _place(self, rule: Rule, side: str, part: int | None = None) -> StoredPlace:
        return stored_factor(rule, self._architecture, side, part, stacked=self._stacked)

    def _has(self, place: StoredPlace) -> bool:
        if place.key not in self._tensors:
            return False
        shape = self._tensors.shape(place.key)
        own = shape[len(place.grid) :]
        return shape[: len(place.grid)] == place.grid and self._tensors.is_saved(
            place.key, (*single(place.index), *whole(own))
        )

    def _common_rank(self, rules: list[Rule]) -> int:
        # The shape of linear_in is [..., rank, in], after the leading axes of stacked layers.
        ranks = {}
        for rule in rules:
            for part in (None, *parts_of(rule)):
                key = self._place(rule, "linear_in", part).key
                if key in self._tensors and len(self._tensors.shape(key)) >= 2:
                    ranks[key] = self._tensors.shape(key)[-2]
        if len(set(ranks.values())) != 1:
            listing = [f"{key}: rank {rank}" for key, rank in sorted(ranks.items())]
            raise ConversionError(f"the adapters in {self.directory} have several ranks", _FIX, listing)
        return next(iter(ranks.values()))

    def _add(self, rule: Rule, blocks: dict[str, Block] | None) -> Iterator[str]:
        """Add the factors of a layer, and yield the problems found."""
        found = [
            part
            for part in (None, *parts_of(rule))
            if any(self._has(self._place(rule, side, part)) for side in _SIDES)
        ]
        # None stands for one adapter on the whole fused layer.
        if found[:1] == [None] and len(found) > 1:
            module = self._place(rule, "linear_in").key.partition(".adapter.")[0]
            yield f"{module}: has an adapter for the whole layer and others for its parts"
            return
        columns, runs = rule.parts[0].shape[1], runs_of(rule, self._architecture.head_dim, 0)
        # Sort by the rows of the part: gated attention stores a group's queries before its gates.
        runs = tuple(sorted(runs, key=lambda run: run.start))
        for part in found:
            down, up = (self._place(rule, side, part) for side in _SIDES)
            rows = rule.rows if part is None else rule.parts[part].shape[0]
            faults = list(self._faults({down: (self.rank, columns), up: (rows, self.rank)}))
            yield from faults
            for number, tensor in () if faults else enumerate(rule.parts):
                block: Block | None = (0, self.rank)
                own: tuple[Block, ...] = ((0, rows),)
                if part is None:
                    block = block if blocks is None else blocks.get(tensor.name)
                    own = tuple(
                        (run.position, run.position + run.length) for run in runs if run.part == number
                    )
                if block is not None and part in (None, number):
                    self._factors[peft_name(tensor, "lora_A")] = _Factor(down, (block,), (0, columns))
                    self._factors[peft_name(tensor, "lora_B")] = _Factor(up, own, block)

    def _faults(self, wanted: dict[StoredPlace, tuple[int, int]]) -> Iterator[str]:
        for place, shape in wanted.items():
            at = f" of layer {place.index[0]}" if place.index else ""
            if place.key not in self._tensors:
                yield f"missing: {place.key}"
            elif self._tensors.shape(place.key) != (*place.grid, *shape):
                found = list(self._tensors.shape(place.key))
                yield (
                    f"shape: {place.key} is {found}, rank {self.rank} and the config ask for "
                    f"{[*place.grid, *shape]}"
                )
            elif not self._has(place):
                yield f"missing: {place.key}{at}, which was not saved"

    def _refuse_unknown(self, found: set[str], known: Collection[str]) -> None:
        unknown = [key for key in found if key.removesuffix("_w").removesuffix("_v") not in known]
        experts = [key for key in unknown if ".experts." in key]
        if experts:
            raise ConversionError(
                f"{self.directory} holds adapters of experts ({experts[0]}): Megatron-Bridge has "
                "one for all experts of a rank, which PEFT's format cannot express, and adapters "
                "of single experts are not read here",
                (
                    "let the trainer write them or merge them: megarl's export hf/step_N has adapter/, in "
                    "PEFT's form"
                ),
            )
        if unknown:
            raise ConversionError(
                f"{self.directory} holds adapters of layers that the model does not have",
                _FIX,
                sorted(unknown),
            )

    def _beside(self, checkpoint: TorchDistCheckpoint, found: set[str]) -> tuple[str, ...]:
        # Look for both layouts: the base may be stacked or not, independently of the adapters.
        base = set()
        for rule in all_rules(self._architecture):
            for stacked in (True, False):
                base.add(stored_place(rule, self._architecture, stacked=stacked).key)
        others, unknown = [], []
        for key in checkpoint:
            if key in found or is_of_optimizer(key) or key.startswith(("rng_state", "rerun_state")):
                continue
            others.append(key)
            if key not in base and "opt_param_scheduler" not in key:
                unknown.append(key)
        if unknown:
            raise ConversionError(
                f"{self.directory} holds more than adapters and the base model", _FIX, unknown
            )
        return tuple(others)

    def _between(self, rules: list[Rule], blocks: dict[str, Block]) -> Iterator[tuple[str, Tensor]]:
        """Yield (key, values that must be zero): in the blocks format, a part's rows in the ranks of other
        parts."""
        for rule in rules:
            up = self._place(rule, "linear_out")
            if not self._has(up):
                continue
            stored = self._read(up, (0, rule.rows), (0, self.rank))
            for run in runs_of(rule, self._architecture.head_dim, 0):
                start, stop = blocks.get(rule.parts[run.part].name, (0, 0))
                rows = stored[run.position : run.position + run.length]
                yield up.key, torch.cat([rows[:, :start], rows[:, stop:]], dim=1)
