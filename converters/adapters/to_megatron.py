"""Convert a PEFT adapter to a ``torch_dist`` checkpoint of adapters (format: see
``converters.adapters.megatron_adapter``)."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.adapters.lora import Factors, LoraAdapter
from converters.adapters.lora_config import read_lora_config
from converters.adapters.megatron_adapter import (
    BLOCKS,
    FORM_NOTE,
    SHARED,
    block,
    linears,
    peft_name,
    stored_factor,
)
from converters.checkpoint.artifacts import HF_DIRECTORY, read_config
from converters.checkpoint.boxes import bytes_of
from converters.checkpoint.manifest import (
    RULES,
    WEIGHTS,
    ConversionManifest,
    TensorHashes,
    TensorRecord,
    dtype_name,
    fingerprint_of_rules,
    fingerprints,
)
from converters.checkpoint.source import ADAPTER_CONFIG
from converters.checkpoint.staging import Staging, check_apart, others_than_converted
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.layouts import runs_of
from converters.mapping.rule import Rule
from converters.model_config.architecture import Architecture
from converters.torch_dist.keys import StoredPlace, extra_state_keys, is_stacked
from converters.torch_dist.writer import ItemFile, StoredTensor, finish_checkpoint

_FIX = "merge it instead (import --lora), or train only adapters of linear layers, all of one rank and scale"


@dataclass(frozen=True)
class AdapterPlan:
    """Plan of an adapter conversion.

    Attributes:
        adapter: adapter to convert.
        architecture, config: architecture and ``config.json`` of the base model.
        rules: rules of the linear layers with an adapter.
        stacked: store layers stacked along a leading dimension.
        rank: rank of PEFT's adapters.
        scaling: factor on the product of the factors.
        form: ``shared`` if the parts of every fused layer have the same ``lora_A``, else ``blocks``.
    """

    adapter: LoraAdapter
    architecture: Architecture
    config: Mapping[str, Any]
    rules: tuple[Rule, ...]
    stacked: bool
    rank: int
    scaling: float
    form: str

    @property
    def stored_rank(self) -> int:
        """Rank of each stored adapter; in the ``blocks`` format, the ranks of all parts together."""
        return self.rank * (1 if self.form == SHARED else max(len(rule.parts) for rule in self.rules))

    @property
    def notes(self) -> dict[str, Any]:
        """Format, rank, alpha and layout of the layers, for the manifest."""
        layers = "stacked" if self.stacked else "apart"
        # Megatron-Bridge divides alpha by the stored rank, so alpha has to grow with the number of blocks.
        alpha = self.scaling * self.stored_rank
        return {
            FORM_NOTE: self.form,
            "rank": self.stored_rank,
            "alpha": int(alpha) if alpha.is_integer() else alpha,
            "layers": layers,
        }


def plan_adapter(directory: Path, hf_directory: Path, ignored: Collection[str] = ()) -> AdapterPlan:
    """Check an adapter and plan its conversion.

    Args:
        directory: PEFT directory.
        hf_directory: directory with the ``config.json`` of the base model.
        ignored: keys of that ``config.json`` to ignore.

    Raises:
        ConversionError: the adapter is damaged, does not match the model, or has no exact Megatron
            equivalent.
    """
    config = read_config(hf_directory)
    architecture = read_architecture(config, ignored)
    adapter = LoraAdapter(directory, architecture)
    rules = []
    names: set[str] = set()
    for rule in linears(architecture):
        if not adapter.changed.isdisjoint(rule.hf_names):
            rules.append(rule)
            names.update(rule.hf_names)
    problems = list(_without_form(adapter, names))
    if problems:
        raise ConversionError(f"the adapter in {directory} has no exact form in Megatron", _FIX, problems)
    # ``_without_form`` has checked that all factors have the same rank and scale.
    one = next(iter(adapter.factors.values()))
    form = SHARED if all(_is_shared(adapter, rule) for rule in rules) else BLOCKS
    return AdapterPlan(
        adapter,
        architecture,
        config,
        tuple(rules),
        _may_stack(rules, architecture),
        one.rank,
        one.scaling,
        form,
    )


def write_megatron_adapter(plan: AdapterPlan, target: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write an adapter as a ``torch_dist`` checkpoint, with the factors of one layer in memory at a time.

    Args:
        plan: result of ``plan_adapter``.
        target: directory to create.
        overwrite: replace an existing checkpoint.

    Returns:
        ``tensors``: number of tensors; ``bytes``: their size.

    Raises:
        ConversionError: the target cannot be written.
    """
    check_apart(plan.adapter.directory, target)
    facts = {
        WEIGHTS: plan.adapter.identity(),
        "config.json": plan.config,
        RULES: fingerprint_of_rules(plan.rules),
        FORM_NOTE: plan.form,
    }
    planned = fingerprints(facts)
    with Staging(target, planned, overwrite=overwrite, others_in=others_than_converted) as staging:
        names: list[str] = []
        for one in plan.adapter.factors.values():
            names += (one.down, one.up)
        hashes = TensorHashes(names)
        # torch.distributed.checkpoint names its files __RANK_NUMBER.distcp. This is the only file here.
        file = ItemFile(staging.directory / "__0_0.distcp")
        tensors: dict[str, StoredTensor] = {}
        object_names: list[str] = []
        try:
            for rule in plan.rules:
                for place, tensor in _stored(plan, rule, hashes):
                    tensors[place.key] = StoredTensor(place.key, (*place.grid, *tensor.shape), tensor.dtype)
                    object_names += extra_state_keys(place)
                    file.add(
                        place.key,
                        (*place.index, 0, 0),
                        tensor.reshape(*[1] * len(place.index), *tensor.shape),
                    )
        finally:
            file.close()
        finish_checkpoint(staging.directory, tensors.values(), file.items, object_names)
        beside = staging.directory / HF_DIRECTORY
        beside.mkdir(exist_ok=True)
        (beside / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        # Copy the adapter's config unchanged: reading the checkpoint takes the scale from it, and a
        # conversion back to PEFT returns it.
        shutil.copyfile(plan.adapter.directory / ADAPTER_CONFIG, beside / ADAPTER_CONFIG)
        _manifest(plan, hashes.digests()).write(staging.directory)
        staging.finish()
    return {"tensors": len(tensors), "bytes": sum(one.size for one in tensors.values())}


def _without_form(adapter: LoraAdapter, known: set[str]) -> Iterator[str]:
    """Yield the parts of an adapter without an exact Megatron equivalent. In Megatron only linear layers have
    adapters, all experts share one, and all adapters have the same rank and scale."""
    for name in adapter.replaced:
        yield (
            f"{name}: saved in full (modules_to_save, trainable_token_indices), which adapters in "
            "Megatron cannot hold"
        )
    # The config is stored unchanged, so its patterns must select the same modules under the model's names.
    kept = read_lora_config(adapter.directory / ADAPTER_CONFIG, adapter.source.raw_config)
    kinds: dict[str, set[Any]] = {"rank": set(), "scaling": set(), "dtype": set()}
    for name, factors in adapter.factors.items():
        kinds["rank"].add(factors.rank)
        kinds["scaling"].add(factors.scaling)
        for factor in (factors.down, factors.up):
            kinds["dtype"].add(dtype_name(adapter.source.dtype(factor)))
        module = name.removesuffix(".weight")
        if factors.place is not None or (name not in known and ".experts." in name):
            yield f"{name}: adapters of experts, of which Megatron-Bridge has one for all experts of a rank"
        elif name not in known:
            yield f"{name}: only linear layers of the transformer layers have adapters"
        elif not kept.chooses(module) or kept.scaling_of(module) != factors.scaling:
            yield f"{name}: patterns or target_modules of {ADAPTER_CONFIG} name it as another class does"
    for what, values in kinds.items():
        if len(values) > 1:
            yield (
                f"{what}: {', '.join(map(str, sorted(values)))}; Megatron has one for all adapters of a model"
            )


def _is_shared(adapter: LoraAdapter, rule: Rule) -> bool:
    """Return whether all parts of a fused layer have adapters with the same ``lora_A``."""
    first, *others = (adapter.factors.get(part.name) for part in rule.parts)
    if first is None or None in others:
        return False
    # Compare bits: a NaN then equals itself, and -0 differs from 0.
    expected = bytes_of(adapter.source.read(first.down))
    return all(bytes_of(adapter.source.read(other.down)) == expected for other in others if other is not None)


def _may_stack(rules: Sequence[Rule], architecture: Architecture) -> bool:
    """Return whether the layers can be stacked, which requires equal adapters in all layers."""
    if not is_stacked(architecture):
        return False
    # A stacked tensor has an index for each layer, so every layer needs the adapter.
    places = [stored_factor(rule, architecture, "linear_in", stacked=True) for rule in rules]
    layers = Counter(place.key for place in places)
    return all(layers[place.key] == place.grid[0] for place in places if place.grid)


def _stored(plan: AdapterPlan, rule: Rule, hashes: TensorHashes) -> Iterator[tuple[StoredPlace, Tensor]]:
    """Yield the location and values of both factors of a layer, and hash the adapter's tensors on the way."""
    source, found = plan.adapter.source, [plan.adapter.factors.get(part.name) for part in rule.parts]
    dtype = source.dtype(next(one.down for one in found if one is not None))
    # The ranks of other parts, and parts without an adapter, are zero, so that each part gets only its own
    # product.
    down = torch.zeros(plan.stored_rank, rule.parts[0].shape[1], dtype=dtype)
    up = torch.zeros(rule.rows, plan.stored_rank, dtype=dtype)

    def read(name: str) -> Tensor:
        tensor = source.read(name)
        hashes.update(name, tensor)
        return tensor

    ups: dict[int, Tensor] = {}
    for number, factors in enumerate(found):
        if factors is not None:
            start, stop = block(number, plan.rank, plan.form)
            down[start:stop], ups[number] = read(factors.down), read(factors.up)
    # The rows of a fused layer alternate between its parts, such as query, key and value of each group.
    for run in runs_of(rule, plan.architecture.head_dim, 0):
        if run.part in ups:
            start, stop = block(run.part, plan.rank, plan.form)
            up[run.position : run.position + run.length, start:stop] = ups[run.part][run.start : run.stop]
    for side, factor in (("linear_in", down), ("linear_out", up)):
        yield stored_factor(rule, plan.architecture, side, stacked=plan.stacked), factor


def _manifest(plan: AdapterPlan, digests: dict[str, str]) -> ConversionManifest:
    """Return the manifest of the checkpoint."""
    source = plan.adapter.source
    tensors = {}
    for rule in plan.rules:
        for part in rule.parts:
            factors: Factors | None = plan.adapter.factors.get(part.name)
            for factor, name in () if factors is None else (("lora_A", factors.down), ("lora_B", factors.up)):
                tensors[peft_name(part, factor)] = TensorRecord(
                    dtype_name(source.dtype(name)), source.shape(name), digests[name]
                )
    return ConversionManifest(
        plan.adapter.directory.resolve().name, plan.architecture.family, tensors, notes=plan.notes
    )
