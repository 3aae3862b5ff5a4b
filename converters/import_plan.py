"""What an import will write, worked out from headers alone."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from converters.architecture import Architecture, read_architecture
from converters.check import check_source, is_excused, stored_twice
from converters.errors import ConversionError
from converters.fingerprints import RULES, THE_REST, WEIGHTS, fingerprint_of_rules, fingerprints
from converters.layouts import padded_vocab_size
from converters.logical import HuggingFaceModel, shape_of_parameter
from converters.lora import LoraAdapter
from converters.lora_model import merge_import
from converters.manifest import dtype_name
from converters.megatron_settings import megatron_settings
from converters.narrowing import kept_dtype
from converters.plausible import check_plausible
from converters.prediction_layers import as_stored
from converters.quantized import DequantizedSource
from converters.rule import Rule
from converters.rules import all_rules, hf_tensors
from converters.source import HuggingFaceSource
from converters.torch_dist.keys import StoredPlace, extra_state_keys, is_stacked, stored_place
from converters.torch_dist.writer import StoredTensor

# the sizes of files follow from the model alone: bytes must not depend on the workers
_FILES, _SMALLEST_FILE, _LARGEST_FILE = 32, 16 * 2**20, 512 * 2**20


@dataclass(frozen=True)
class ImportPlan:
    """What an import will do.

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
        config: the parsed ``config.json`` of the source.
    """

    model: HuggingFaceModel
    config: Mapping[str, Any]
    rules: tuple[Rule, ...]
    stacked: bool
    padded_vocab: int
    dtypes: Mapping[str, torch.dtype]
    also_stored: Mapping[str, str]
    left_out: tuple[str, ...]
    missing: tuple[str, ...] = ()
    adapter: LoraAdapter | None = None
    dtype_asked: torch.dtype | None = None

    @property
    def notes(self) -> dict[str, Any]:
        """What the conversion will say of itself that follows from the plan."""
        source = self.model.source
        dequantized = source.notes() if isinstance(source, DequantizedSource) else {}
        return {**dequantized, **({} if self.adapter is None else self.adapter.notes())}

    @property
    def architecture(self) -> Architecture:
        """Of the model."""
        return self.model.architecture

    def place(self, rule: Rule) -> StoredPlace:
        """Of a parameter in the checkpoint."""
        return stored_place(rule, self.architecture, stacked=self.stacked)

    def shape(self, rule: Rule) -> tuple[int, ...]:
        """Of a whole parameter."""
        return shape_of_parameter(rule, self.padded_vocab)

    def dtype(self, rule: Rule) -> torch.dtype:
        """Of a parameter in the checkpoint."""
        return self._stored[self.place(rule).key].dtype

    def size(self, rule: Rule) -> int:
        """Bytes of a parameter in the checkpoint."""
        return torch.Size(self.shape(rule)).numel() * self.dtype(rule).itemsize

    @property
    def tensors(self) -> list[StoredTensor]:
        """Of the checkpoint."""
        return list(self._stored.values())

    @property
    def object_names(self) -> list[str]:
        """Of the modules' states in the checkpoint."""
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
) -> ImportPlan:
    """Work out an import.

    Args:
        source: the Hugging Face checkpoint.
        dtype: of all tensors; None keeps every tensor's own.
        vocab_multiple: the vocabulary is padded with zero rows to a multiple of this.
        allow_missing: patterns (``*`` and ``?``) of names on either side that need no counterpart on the other.
        lora: directory of a PEFT adapter to merge.
        allow_unsupported: import a model although no Megatron-Core model computes what it computes.

    Raises:
        ConversionError: config and weights do not belong together, something cannot be carried over, or no Megatron-Core model computes it.
    """
    config = source.read_json("config.json")
    if config is None:
        raise ConversionError(f"{source.directory} has no config.json", "give the directory of a whole model")
    if vocab_multiple < 1:
        raise ConversionError(f"vocab-multiple = {vocab_multiple}: at least 1 is needed", "leave it out, or pass 128")
    architecture = as_stored(read_architecture(config), source.names())
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
        rules=tuple(rules),
        stacked=is_stacked(architecture),
        padded_vocab=padded_vocab_size(architecture.vocab_size, 1, vocab_multiple),
        dtypes=dtypes,
        also_stored=also_stored,
        left_out=tuple(name for name in source.names() if name not in accounted and name not in also_stored),
        missing=tuple(part.name for part in hf_tensors(architecture) if part.name not in dtypes),
        adapter=adapter,
        dtype_asked=dtype,
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
