"""Implementation of ``megarl convert adapter``: convert an adapter without its base model, between PEFT's
format and ``torch_dist`` checkpoints."""

from __future__ import annotations

import functools
import json
import re
import shutil
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from converters.adapters.megatron_adapter import BLOCKS, MegatronAdapter
from converters.adapters.peft_directory import WEIGHTS_FILE, PeftDirectory, is_peft_directory
from converters.adapters.to_megatron import plan_adapter, write_megatron_adapter
from converters.checkpoint.artifacts import HF_DIRECTORY, read_config
from converters.checkpoint.boxes import bytes_of
from converters.checkpoint.manifest import MANIFEST_FILE, WEIGHTS, fingerprints
from converters.checkpoint.source import ADAPTER_CONFIG
from converters.checkpoint.staging import Staging, check_apart, follow_umask, others_than
from converters.checkpoint.work import Answer
from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.files.reading import identity_of
from converters.torch_dist.location import find_checkpoint, holds_checkpoint

# peft (0.21, with transformers 5) takes modules of these names for experts, also those of dense layers in a
# mixture-of-experts model.
_OF_EXPERTS = re.compile(r".*\.(gate_proj|up_proj|down_proj)\.lora_[AB]\.weight")
_others = functools.partial(others_than, re.compile(f"{ADAPTER_CONFIG}|{WEIGHTS_FILE}"), ADAPTER_CONFIG)


def open_megatron_adapter(
    directory: Path, hf_directory: Path | None, ignored: Collection[str] = ()
) -> MegatronAdapter:
    """Open the adapters of a ``torch_dist`` checkpoint.

    Args:
        directory: the checkpoint, or a trainer's directory that contains it.
        hf_directory: directory with the ``config.json`` of the base model; None if the checkpoint contains
            it.
        ignored: keys of that ``config.json`` to ignore.

    Raises:
        ConversionError: the base model's config is missing, or ``MegatronAdapter`` rejects the checkpoint.
    """
    checkpoint = find_checkpoint(directory)
    places = (
        [hf_directory] if hf_directory is not None else [checkpoint / HF_DIRECTORY, directory / HF_DIRECTORY]
    )
    place = next((place for place in places if (place / "config.json").is_file()), None)
    if place is None:
        raise ConversionError(
            f"{hf_directory or checkpoint} does not name the base model of the adapters (no config.json)",
            "pass --hf-config DIRECTORY, with the config.json of the base model",
        )
    return MegatronAdapter(checkpoint, read_architecture(read_config(place), ignored))


def write_peft_adapter(adapter: MegatronAdapter, target: Path, *, overwrite: bool = False) -> dict[str, Any]:
    """Write an adapter as a PEFT directory. All its tensors are in memory at once, because safetensors writes
    a file in one call.

    Args:
        adapter: adapter to write.
        target: directory to create.
        overwrite: replace an existing adapter.

    Returns:
        ``tensors``: number of tensors; ``bytes``: their size.

    Raises:
        ConversionError: PEFT would misread the adapter, or the target cannot be written.
    """
    kept = adapter.origin.name == ADAPTER_CONFIG  # A config that came from PEFT is copied unchanged.
    misread = (
        sorted(filter(_OF_EXPERTS.fullmatch, adapter.keys())) if adapter.has_experts and not kept else []
    )
    if misread:
        raise ConversionError(
            f"{adapter.directory} holds adapters of the dense layers of a mixture of experts, "
            "whose names PEFT mistakes for names of experts",
            "merge them: give the base model, and with --lora this directory",
            misread,
        )
    # With --overwrite, a target inside the source or around it would destroy the source.
    check_apart(adapter.directory, target)
    plan = fingerprints({WEIGHTS: identity_of(adapter.files())})
    with Staging(target, plan, overwrite=overwrite, others_in=_others) as staging:
        tensors = {name: adapter.read(name) for name in sorted(adapter.keys())}
        save_file(tensors, staging.directory / WEIGHTS_FILE, metadata={"format": "pt"})
        if kept:
            shutil.copyfile(adapter.origin, staging.directory / ADAPTER_CONFIG)
        else:
            (staging.directory / ADAPTER_CONFIG).write_text(
                json.dumps(adapter.raw_config, indent=2) + "\n", encoding="utf-8"
            )
        follow_umask(staging.directory, staging.directory / ADAPTER_CONFIG)
        staging.finish()
    return {"tensors": len(tensors), "bytes": sum(tensor.nbytes for tensor in tensors.values())}


def are_adapters(paths: Sequence[Path]) -> bool:
    """Return whether ``verify_adapters`` takes these: PEFT adapters, which have no hashes and need a second
    adapter, and adapters that a conversion has written."""
    found = []
    for path in paths:
        kept = find_checkpoint(path) / HF_DIRECTORY if holds_checkpoint(path) else path
        found.append((kept / ADAPTER_CONFIG).is_file() and (len(paths) == 2 or kept != path))
    return len(paths) <= 2 and all(found)


def _in_order(value: Any) -> Any:
    # PEFT writes names of layers from sets, in any order.
    return sorted(value, key=repr) if isinstance(value, list) else value


def verify_adapters(paths: Sequence[Path], hf_directory: Path | None, ignored: Collection[str]) -> Answer:
    """Compare two adapters bit for bit, or check one against the hashes of its conversion.

    Args:
        paths: one or two adapters of either format.
        hf_directory, ignored: as in ``open_megatron_adapter``.

    Raises:
        ConversionError: an adapter is damaged.
    """
    opened: list[Any] = []
    for path in paths:
        # Opening a converted adapter compares all its tensors with the hashes in its conversion.json.
        is_peft = is_peft_directory(path)
        opened.append(PeftDirectory(path) if is_peft else open_megatron_adapter(path, hf_directory, ignored))
    one, other = opened[0], opened[-1]
    names, found = set(one.keys()), list[str]()
    if one is other:
        return 0, {"equal": True, "differences": found}, f"{len(names)} tensors: match {MANIFEST_FILE}"
    for key in sorted({*one.raw_config, *other.raw_config}):
        left, right = one.raw_config.get(key), other.raw_config.get(key)
        if _in_order(left) != _in_order(right):
            found.append(f"config: {key}: {left!r} and {right!r}")
    found += (f"only in one: {name}" for name in sorted(names.symmetric_difference(other.keys())))
    for name in sorted(names.intersection(other.keys())):
        sides = [(each.dtype(name), each.shape(name), bytes_of(each.read(name))) for each in (one, other)]
        if sides[0] != sides[1]:
            found.append(f"values: {name}")
    lines = [f"{len(found)} differences", *found] if found else [f"{len(names)} tensors: equal bit for bit"]
    return int(bool(found)), {"equal": not found, "differences": found}, "\n  ".join(lines)


def convert_adapter(
    source: Path, target: Path, hf_directory: Path | None, *, overwrite: bool, ignored: Collection[str] = ()
) -> Answer:
    """Convert an adapter from PEFT's format to Megatron's, or back; the source's format decides.

    Args:
        source: PEFT directory, or ``torch_dist`` checkpoint of adapters.
        target: directory to create.
        hf_directory: directory with the ``config.json`` of the base model.
        overwrite: replace an existing target of the same kind.
        ignored: keys of ``config.json`` to ignore.

    Returns:
        Exit code, summary for JSON, text for the terminal.

    Raises:
        ConversionError: the adapter cannot be converted exactly, or the target cannot be written.
    """
    if is_peft_directory(source):
        if hf_directory is None:
            raise ConversionError(
                f"{source} does not hold the config of its base model",
                "pass --hf-config DIRECTORY, with the config.json of the base model",
            )
        plan = plan_adapter(source, hf_directory, ignored)
        written = write_megatron_adapter(plan, target, overwrite=overwrite)
        facts = {
            "target": str(target),
            "format": "megatron",
            "family": plan.architecture.family,
            **written,
            **plan.notes,
        }
        if plan.form == BLOCKS:
            facts["blocks"] = (
                f"{plan.stored_rank // plan.rank} of rank {plan.rank}, because query, key and value, and "
                "gate and up, keep their own adapters inside a fused layer; alpha grows with the rank"
            )
    else:
        adapter = open_megatron_adapter(source, hf_directory, ignored)
        written = write_peft_adapter(adapter, target, overwrite=overwrite)
        # The first key is a lora_A, whose first dimension is the rank.
        rank = adapter.shape(next(iter(adapter.keys())))[0]
        facts = {"target": str(target), "format": "peft", "family": adapter.family, **written, "rank": rank}
        if adapter.left_out:
            facts["left_out"] = f"{len(adapter.left_out)} tensors of the base model"
    lines = [
        (
            f"{target}: {facts['format']} adapter of {facts['family']}, {facts['tensors']} tensors, "
            f"{facts['bytes'] / 1e6:.2f} MB"
        )
    ]
    told = ("target", "format", "family", "tensors", "bytes")
    return (
        0,
        facts,
        "\n".join([*lines, *(f"  {key}: {value}" for key, value in facts.items() if key not in told)]),
    )
