"""Verification that a conversion lost nothing, and the output of ``verify`` and ``diff``."""

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
    """Yield the problems of one checkpoint by itself: its keys and shapes against its config, ties, padding,
    its manifest. If it is compared with no other checkpoint and has no manifest, its values must also be
    finite."""
    try:
        if isinstance(opened.model, MegatronModel):
            account(opened.model, tuple(excused))
        else:
            check_source(opened.model.source, opened.model.architecture, excused=excused)
    except ConversionError as error:
        for detail in error.details or (error.what,):
            yield Difference("keys", opened.path.name, detail)
        # Stop here: without the right names and shapes the checks below could not read the tensors.
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
        one, other: the checkpoints.
        excused: patterns (``*`` and ``?``) of names that need no counterpart.
    """
    yield from config_differences(one.model.architecture, other.model.architecture)
    if one.config is not None and other.config is not None:
        yield from setting_differences(one.config, other.config)
    if one.files is not None and other.files is not None:
        yield from file_differences(one.files, other.files)
    yield from tensor_differences(one, other, excused)


def verify(one: Opened, other: Opened | None = None, excused: Sequence[str] = ()) -> list[Difference]:
    """Return all problems of a checkpoint, and all of its differences from another; empty if there are none.

    Every tensor is read. With neither another checkpoint nor a manifest to compare with, the values still
    have to be finite.

    Args:
        one, other: the checkpoints.
        excused: patterns (``*`` and ``?``) of names that need no counterpart, in addition to those that a
            manifest records as excused.
    """
    opened = [one] if other is None else [one, other]
    alone = (*excused, *recorded_excuses(opened))
    found = list[Difference]()
    for each in opened:
        found += problems_of(each, alone, is_alone=other is None)
    if other is None:
        return found
    # Drop these: the comparison below reports values that are not finite.
    found = [difference for difference in found if difference.kind != "values"]
    # Missing tensors cannot be compared.
    if _has_kind(found, "keys"):
        return found
    agree_on_dtypes(one, other)
    # A tensor that the manifests excuse may be missing on both sides, but not on one: pass only the caller's
    # patterns.
    return found + list(differences(one, other, excused))


def agree_on_dtypes(one: Opened, other: Opened) -> None:
    """Set the dtype in which quantised weights are dequantised to that of the other checkpoint, since they
    have no dtype themselves."""
    for this, that in ((one, other), (other, one)):
        source = this.model.source if isinstance(this.model, HuggingFaceModel) else None
        if not isinstance(source, DequantizedSource):
            continue
        tensors = that.tensors
        for name, tensor in this.tensors.items():
            if name in tensors and any(source.is_dequantized(place.name) for place in tensor.places):
                source.dequantized_dtype = that.dtype(tensors[name])
                break


def _has_kind(found: Sequence[Difference], *kinds: str) -> bool:
    return any(difference.kind in kinds for difference in found)


def recorded_excuses(opened: Sequence[Opened]) -> tuple[str, ...]:
    """Return the patterns that the manifests of the checkpoints record as excused."""
    names: dict[str, None] = {}
    for each in opened:
        if each.manifest is not None:
            names |= dict.fromkeys(each.manifest.excused)
    return tuple(names)


def scope(
    opened: Sequence[Opened], found: Sequence[Difference], excused: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """Return descriptions of what ``verify`` checked in one or two checkpoints, and of what it did
    not check."""
    checked, unchecked = (
        ["names, shapes and dtypes of all tensors against config.json"],
        [*_unchecked_files(opened)],
    )
    for each in opened:
        if each.megatron is not None and each.megatron.stored.objects and each.manifest is None:
            unchecked.append(
                f"the {len(each.megatron.stored.objects)} objects of {each.path.name} that are no tensors"
            )
    if any(each.megatron is not None for each in opened):
        checked.append("every element is stored exactly once; rows after the vocabulary are zero")
    if _has_kind(found, "keys"):
        return checked[:1], ["values: not compared, because names or shapes differ", *unchecked]
    for each in opened:
        if each.manifest is not None:
            files = " and files next to the weights" if each.recorded_files else ""
            checked.append(f"the values{files} of {each.path.name} against the hashes in its {MANIFEST_FILE}")
    if len(opened) == 2:
        settings = (
            ""
            if any(each.config is None for each in opened)
            else ", special tokens and defaults of text generation"
        )
        files = "" if any(each.files is None for each in opened) else ", tokenizer and chat templates"
        checked.append(f"config{settings}{files} and values of both, bit for bit")
    elif opened[0].manifest is None:
        checked.append("every value was read" if found else "every value was read and is finite")
        unchecked.insert(
            0, f"whether the values are correct: there is no {MANIFEST_FILE} and no second checkpoint"
        )
    names = [*excused, *recorded_excuses(opened)]
    return checked, [*unchecked, *([f"excused: {', '.join(names)}"] if names else [])]


def _unchecked_files(opened: Sequence[Opened]) -> Iterator[str]:
    """Yield descriptions of the files next to the weights that were compared with nothing."""
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
        yield "tokenizer and other files next to the weights: there are none on one side"
        return
    left, right = hashes
    silent = [
        name for name in sorted({*left, *right}) if not speaks(name) and left.get(name) != right.get(name)
    ]
    if silent:
        yield f"files that differ but do not describe the model: {', '.join(silent)}"


def logits_difference(one: Opened, other: Opened) -> float:
    """Return the largest absolute difference between the two models' logits for random tokens, computed by
    plain transformers in float32 on a CPU.

    A Megatron checkpoint is exported to a temporary directory first. The models are in memory one after the
    other.
    """
    results = list(map(_logits, (one, other)))
    return float((results[0] - results[1]).abs().max())


def known_config(directory: Path) -> Any:
    """Return the transformers config of a model.

    Raises:
        ConversionError: transformers does not know the model type in ``config.json``.
    """
    try:
        return read_hf_config(directory)
    except ValueError as error:
        what = f"--logits: transformers does not compute this model: {str(error).splitlines()[0]}"
        raise ConversionError(what, "leave --logits out") from error


def logits_of(directory: Path, ids: Tensor, head: ScoreHead | None = None) -> Tensor:
    """Return the logits of token ids that plain transformers computes in float32 on a CPU, or the scores of a
    model with a score head."""
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
    # The grouped product of experts, which transformers prefers, does not support every width.
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
            # Dequantise the model first: transformers computes with quantised weights only on a GPU.
            directory, imported = Path(temporary) / "model", Path(temporary) / "imported"
            import_model(plan_import(opened.model.source, allow_unsupported=True), imported)
            export_model(plan_export(open_megatron(imported)), directory)
        architecture = opened.model.architecture
        ids = torch.randint(0, architecture.vocab_size, (2, 16), generator=torch.Generator().manual_seed(0))
        return logits_of(directory, ids, architecture.head)


DIFFERENT = 1


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
        options: settings that a Megatron checkpoint lacks.
        excused: patterns of names that need no counterpart.
        logits: whether to compare also the logits that transformers computes from both.
        lora: directory of a PEFT adapter that is merged into the first checkpoint before the comparison.

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
    alone = "as its config says; it has no manifest to compare its values with"
    right = alone if one.manifest is None else "as its manifest and its config say"
    lines = (
        [f"{len(found)} difference{'' if len(found) == 1 else 's'}", *(f"  {each}" for each in found)]
        if found
        else [f"{facts['tensors']} tensors: {right if other is None else 'equal bit for bit'}"]
    )
    if logits and _has_kind(found, "keys", "missing", "shape"):
        unchecked.append("logits: the models are too different")
    elif logits and any(len(each.tensors) < len(hf_tensors(each.model.architecture)) for each in opened):
        unchecked.append("logits: a model without some of its tensors has none")
    elif logits and other is not None:
        facts["logits_difference"] = logits_difference(one, other)
        lines.append(f"largest difference of logits: {facts['logits_difference']:.3g}")
    lines += [*(f"  checked: {each}" for each in checked), *(f"  not checked: {each}" for each in unchecked)]
    return (DIFFERENT if found else 0), facts, "\n".join(lines)


def diff_paths(first: Path, second: Path, options: OpeningOptions, excused: Sequence[str]) -> Answer:
    """List the differences of two models. Arguments and errors are those of ``verify_paths``."""
    one, other = open_any(first, options), open_any(second, options)
    found = [each for each in differences(one, other, excused) if each.kind != NOT_FINITE]
    facts = {"equal": not found, "differences": list(map(asdict, found))}
    return (DIFFERENT if found else 0), facts, "\n".join(map(str, found)) if found else "no difference"
