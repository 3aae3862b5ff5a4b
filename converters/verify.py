"""Verify that a conversion lost nothing; implementation of ``megarl convert verify`` and ``diff``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from converters.adapters.lora_model import merge_opened
from converters.check import account, check_source
from converters.checkpoint.artifacts import changed_files, file_hashes, speaks
from converters.checkpoint.manifest import MANIFEST_FILE
from converters.checkpoint.quantized import DequantizedSource
from converters.checkpoint.work import Answer
from converters.compare import (
    NOT_FINITE,
    Difference,
    config_differences,
    content_problems,
    file_differences,
    object_differences,
    padding_differences,
    setting_differences,
    tensor_differences,
)
from converters.errors import ConversionError
from converters.exporting import export_model, plan_export
from converters.families.hf_config import read_hf_config
from converters.foreign.options import OpeningOptions
from converters.importing import import_model, plan_import
from converters.mapping.logical import HuggingFaceModel, MegatronModel
from converters.mapping.rules import hf_tensors
from converters.model_config.heads import ScoreHead
from converters.opening import Opened, open_any, open_megatron


def problems_of(opened: Opened, excused: Sequence[str], *, is_alone: bool) -> Iterator[Difference]:
    """Yield the faults of one checkpoint: keys and shapes against its config, tied weights, padding, and its
    manifest.

    Args:
        opened: the checkpoint.
        excused: patterns of tensor names that may be missing or unknown.
        is_alone: the checkpoint is not compared with another one. Without a manifest, its values must then be
            finite.
    """
    try:
        if isinstance(opened.model, MegatronModel):
            account(opened.model, tuple(excused))
        else:
            check_source(opened.model.source, opened.model.architecture, excused=excused)
    except ConversionError as error:
        for detail in error.details or (error.what,):
            yield Difference("keys", opened.path.name, detail)
        # The checks below need the right names and shapes to read the tensors.
        return
    if isinstance(opened.model, MegatronModel) and not (
        opened.megatron is not None and opened.megatron.padding_is_free
    ):
        yield from padding_differences(opened.model)
    if opened.manifest is not None or is_alone:
        yield from content_problems(opened, excused)
    if opened.manifest is not None and opened.megatron is not None:
        yield from object_differences(opened.megatron.stored)
    if opened.files is not None and opened.recorded_files:
        for name, change in changed_files(opened.files, opened.recorded_files).items():
            yield Difference("file", name, f"it {change} since the conversion")


def differences(one: Opened, other: Opened, excused: Sequence[str] = ()) -> Iterator[Difference]:
    """Yield the differences of two models: config, files next to the weights, tensors.

    Args:
        one, other: the models.
        excused: patterns (``*`` and ``?``) of tensor names that may exist on one side only.
    """
    yield from config_differences(one.model.architecture, other.model.architecture)
    if one.config is not None and other.config is not None:
        yield from setting_differences(one.config, other.config)
    if one.files is not None and other.files is not None:
        yield from file_differences(one.files, other.files)
    yield from tensor_differences(one, other, excused)


def verify(one: Opened, other: Opened | None = None, excused: Sequence[str] = ()) -> list[Difference]:
    """Return all faults of a checkpoint and its differences from another one; empty if there are none. Every
    tensor is read. Without another checkpoint and a manifest, all values must be finite.

    Args:
        one, other: the checkpoints.
        excused: patterns (``*`` and ``?``) of tensor names that may have no counterpart, in addition to those
            in the manifests.
    """
    opened = [one] if other is None else [one, other]
    alone = (*excused, *recorded_excuses(opened))
    found = list[Difference]()
    for each in opened:
        found += problems_of(each, alone, is_alone=other is None)
    if other is None:
        return found
    # The comparison below reports values that are not finite, so drop these.
    found = [difference for difference in found if difference.kind != "values"]
    # Missing tensors cannot be compared.
    if _has_kind(found, "keys"):
        return found
    agree_on_dtypes(one, other)
    # A tensor that the manifests excuse may be missing on both sides, but not on one, so pass only the
    # caller's patterns.
    return found + list(differences(one, other, excused))


def agree_on_dtypes(one: Opened, other: Opened) -> None:
    """Dequantise quantised weights to the dtype of the other checkpoint, because they have no dtype of their
    own."""
    for this, that in ((one, other), (other, one)):
        source = this.model.source if isinstance(this.model, HuggingFaceModel) else None
        if not isinstance(source, DequantizedSource):
            continue
        tensors = that.tensors
        for name, tensor in this.tensors.items():
            if name in tensors and any(source.is_dequantized(place.name) for place in tensor.places):
                # One tensor is enough, because a source has one dtype for all dequantised tensors.
                source.dequantized_dtype = that.dtype(tensors[name])
                break


def _has_kind(found: Sequence[Difference], *kinds: str) -> bool:
    return any(difference.kind in kinds for difference in found)


def recorded_excuses(opened: Sequence[Opened]) -> tuple[str, ...]:
    """Return the patterns of excused names in the checkpoints' manifests."""
    names: dict[str, None] = {}
    for each in opened:
        if each.manifest is not None:
            names |= dict.fromkeys(each.manifest.excused)
    return tuple(names)


def scope(
    opened: Sequence[Opened], found: Sequence[Difference], excused: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return descriptions of what ``verify`` has checked, and of what it has not checked."""
    checked, unchecked = (
        ["names, shapes and dtypes of all tensors against config.json"],
        [*_unchecked_files(opened)],
    )
    for each in opened:
        if each.megatron is not None and each.megatron.stored.objects and each.manifest is None:
            unchecked.append(
                f"{len(each.megatron.stored.objects)} entries of {each.path.name} that are not tensors "
                "(states of modules, of random numbers and of the run)"
            )
    if any(each.megatron is not None for each in opened):
        checked.append("every element is stored exactly once; rows after the vocabulary are zero")
    if _has_kind(found, "keys"):
        return checked[:1], ["values: not compared, because names or shapes differ", *unchecked]
    for each in opened:
        if each.manifest is not None:
            files = " and files next to the weights" if each.recorded_files else ""
            checked.append(f"the values{files} of {each.path.name} against the hashes in its {MANIFEST_FILE}")
    if len(opened) == 1 and opened[0].manifest is None:
        checked.append("every value was read" if found else "every value was read and is finite")
        unchecked.insert(
            0, f"whether the values are correct: there is no {MANIFEST_FILE} and no second checkpoint"
        )
    names = [*excused, *recorded_excuses(opened)]
    return checked, [*unchecked, *([f"excused: {', '.join(names)}"] if names else [])]


def compared(one: Opened, other: Opened) -> str:
    """Return a list of what ``verify`` compares in two checkpoints, for the terminal."""
    names = ["every value", "config"]
    if one.config is not None and other.config is not None:
        names += ["special tokens", "defaults of text generation"]
    if one.files is not None and other.files is not None:
        names.append("files of tokenizer and chat template")
    return ", ".join(names)


def _unchecked_files(opened: Sequence[Opened]) -> Iterator[str]:
    """Yield descriptions of files next to the weights that were not compared."""
    hashes = [file_hashes(each.files) for each in opened if each.files is not None]
    if len(opened) == 1:
        recorded = opened[0].recorded_files
        later = sorted(set[str]().union(*hashes) - recorded.keys())
        if not recorded:
            yield "tokenizer and other files next to the weights"
        elif later:
            yield f"files added after the conversion: {', '.join(later)}"
        return
    if any(each.config is None for each in opened):
        yield ("special tokens and defaults of text generation: a config is made from its trainer's settings")
    if len(hashes) < 2:
        yield "tokenizer and other files next to the weights: one side has none"
        return
    left, right = hashes
    silent = [
        name for name in sorted({*left, *right}) if not speaks(name) and left.get(name) != right.get(name)
    ]
    if silent:
        yield f"files that differ but do not describe the model: {', '.join(silent)}"


def logits_difference(one: Opened, other: Opened) -> float:
    """Return the largest absolute difference of two models' logits for random tokens, computed by
    transformers in float32 on a CPU. A Megatron checkpoint is exported to a temporary directory. Only one
    model is in memory at a time."""
    results = list(map(_logits, (one, other)))
    return float((results[0] - results[1]).abs().max())


def known_config(directory: Path) -> Any:
    """Return the transformers config of a model.

    Raises:
        ConversionError: transformers does not know the model type.
    """
    try:
        return read_hf_config(directory)
    except ValueError as error:
        what = f"--logits: transformers does not compute this model: {str(error).splitlines()[0]}"
        raise ConversionError(what, "leave --logits out") from error


def logits_of(directory: Path, ids: Tensor, head: ScoreHead | None = None) -> Tensor:
    """Return the logits of token ids, or the scores of a model with a score layer, computed by transformers
    in float32 on a CPU."""
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    config = known_config(directory)
    language = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    scoring = (
        AutoModelForTokenClassification
        if head is not None and head.bias
        else AutoModelForSequenceClassification
    )
    # transformers' grouped matmul for experts does not support every width.
    options: dict[str, Any] = {
        "dtype": torch.float32,
        "attn_implementation": "eager",
        "experts_implementation": "eager",
    }
    model_class: Any = language if head is None else scoring
    model = model_class.from_pretrained(directory, config=config, **options).eval()
    with torch.no_grad():
        logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits


def _logits(opened: Opened) -> Tensor:
    with tempfile.TemporaryDirectory() as temporary:
        directory = opened.path
        if opened.megatron is not None:
            directory = Path(temporary) / "model"
            export_model(plan_export(opened.megatron), directory)
        elif isinstance(opened.model, HuggingFaceModel) and isinstance(
            opened.model.source, DequantizedSource
        ):
            # transformers computes with quantised weights only on a GPU, so dequantise first.
            directory, imported = Path(temporary) / "model", Path(temporary) / "imported"
            import_model(plan_import(opened.model.source, allow_unsupported=True), imported)
            export_model(plan_export(open_megatron(imported)), directory)
        architecture = opened.model.architecture
        # A fixed seed, because both checkpoints must get the same tokens.
        ids = torch.randint(0, architecture.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
        return logits_of(directory, ids, architecture.head)


DIFFERENT = 1
# Models of two families differ in each tensor; diff lists all.
_SHOWN = 20


def verify_paths(
    paths: Sequence[Path],
    options: OpeningOptions,
    excused: Sequence[str],
    *,
    logits: bool,
    lora: Path | None = None,
) -> Answer:
    """Verify one checkpoint, or two against each other.

    Args:
        paths: one or two checkpoints.
        options: values that a Megatron checkpoint lacks.
        excused: patterns of tensor names that may have no counterpart.
        logits: also compare the logits that transformers computes.
        lora: directory of an adapter to merge into the first checkpoint.

    Raises:
        ConversionError: the verification is not possible, or a file is damaged.
    """
    if len(paths) > 2:
        raise ConversionError(
            f"verify takes one or two checkpoints, not {len(paths)}", "leave the others out"
        )
    if logits and len(paths) != 2:
        raise ConversionError(
            "--logits compares two checkpoints, and one was given", "give the second, or leave --logits out"
        )
    opened = [open_any(path, options) for path in paths]
    if lora is not None:
        if logits or len(opened) != 2:
            raise ConversionError(
                "--lora compares the values of two checkpoints",
                "give two checkpoints, and leave --logits out",
            )
        opened[0] = merge_opened(opened[0], lora, opened[1])
    one, other = opened[0], opened[1] if len(opened) == 2 else None
    found = verify(one, other, excused)
    checked, unchecked = scope(opened, found, excused)
    facts: dict[str, Any] = {
        "equal": all(each.kind == NOT_FINITE for each in found),
        "values_checked": not _has_kind(found, "keys") and (other is not None or one.manifest is not None),
        "tensors": None if _has_kind(found, "keys") else len(one.tensors),
        "checked": checked,
        "not_checked": unchecked,
        "differences": list(map(asdict, found)),
    }
    alone = f"match config.json; there is no {MANIFEST_FILE} to compare the values with"
    right = alone if one.manifest is None else f"match {MANIFEST_FILE} and config.json"
    lines = (
        [
            f"{len(found)} difference{'' if len(found) == 1 else 's'}",
            *(f"  {each}" for each in found[:_SHOWN]),
        ]
        if found
        else [f"{facts['tensors']} tensors: {right if other is None else 'equal bit for bit'}"]
    )
    if len(found) > _SHOWN:
        lines.append(f"  and {len(found) - _SHOWN} more; diff and --json list all")
    if logits and _has_kind(found, "keys", "missing", "shape"):
        unchecked.append("logits: the models are too different")
    elif logits and any(len(each.tensors) < len(hf_tensors(each.model.architecture)) for each in opened):
        unchecked.append("logits: a model without some of its tensors has none")
    elif logits and other is not None:
        facts["logits_difference"] = logits_difference(one, other)
        lines.append(f"largest difference of logits: {facts['logits_difference']:.3g}")
    lines += (f"  checked: {each}" for each in checked)
    if other is not None and facts["values_checked"]:
        # The last word, because the list of what was compared does not say with which result.
        facts["compared"] = compared(one, other)
        lines.append(f"  compared: {facts['compared']}: {'equal' if facts['equal'] else 'not equal'}")
    lines += (f"  not checked: {each}" for each in unchecked)
    return (DIFFERENT if found else 0), facts, "\n".join(lines)


def diff_paths(first: Path, second: Path, options: OpeningOptions, excused: Sequence[str]) -> Answer:
    """List the differences of two models; arguments and errors as in ``verify_paths``."""
    one, other = open_any(first, options), open_any(second, options)
    found = [each for each in differences(one, other, excused) if each.kind != NOT_FINITE]
    facts = {"equal": not found, "differences": list(map(asdict, found))}
    return (DIFFERENT if found else 0), facts, "\n".join(map(str, found)) if found else "no difference"
