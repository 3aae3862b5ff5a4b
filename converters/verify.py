"""Proves that a conversion lost nothing, or names what it lost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from converters.check import check_source
from converters.compare import Difference, config_differences, hash_differences, padding_differences, tensor_differences
from converters.errors import ConversionError
from converters.export_plan import account, plan_export
from converters.exporting import export_model
from converters.logical import HuggingFaceModel, MegatronModel
from converters.manifest import Manifest, read_manifest
from converters.opening import MEGATRON, MegatronCheckpoint, kind_of, open_huggingface, open_megatron
from converters.rules import hf_tensors
from converters.source import open_source


@dataclass(frozen=True)
class Opened:
    """A checkpoint of either format."""

    path: Path
    kind: str
    model: HuggingFaceModel | MegatronModel
    manifest: Manifest | None
    megatron: MegatronCheckpoint | None = None


def open_any(path: Path, hf_config: Path | None = None) -> Opened:
    """Open a checkpoint, whatever its format.

    Raises:
        ConversionError: it is neither, or damaged.
    """
    if kind_of(path) == MEGATRON:
        checkpoint = open_megatron(path, hf_config)
        return Opened(path, MEGATRON, checkpoint.model, checkpoint.manifest, checkpoint)
    return Opened(path, "huggingface", open_huggingface(open_source(path)), read_manifest(path))


def problems_of(opened: Opened) -> Iterator[Difference]:
    """What is wrong with one checkpoint by itself: its keys and shapes against its config, ties, padding, its manifest."""
    try:
        if isinstance(opened.model, MegatronModel):
            account(opened.model)
        else:
            check_source(opened.model.source, opened.model.architecture)
    except ConversionError as error:
        for detail in error.details or (error.what,):
            yield Difference("keys", opened.path.name, detail)
        return
    if isinstance(opened.model, MegatronModel):
        yield from padding_differences(opened.model)
    if opened.manifest is not None:
        yield from hash_differences(opened.model, opened.manifest)


def verify(one: Opened, other: Opened | None = None) -> list[Difference]:
    """Everything that is wrong with a checkpoint, and everything in which it differs from another; empty when all is well."""
    found = list(problems_of(one))
    if other is None:
        return found
    found += problems_of(other)
    # what is missing cannot be compared
    if any(difference.kind == "keys" for difference in found):
        return found
    found += config_differences(one.model.architecture, other.model.architecture)
    return found + list(tensor_differences(one.model, other.model))


def tensor_count(opened: Opened) -> int:
    """Hugging Face tensors of the model."""
    return len(hf_tensors(opened.model.architecture))


def logits_difference(one: Opened, other: Opened, tokens: int = 16) -> float:
    """Largest absolute difference of the logits that plain transformers computes from both, in float32 on a CPU, of random tokens.

    A Megatron checkpoint is exported to a temporary directory first. Both models are in memory, one after the other.
    """
    results = [_logits(opened, tokens) for opened in (one, other)]
    return float((results[0] - results[1]).abs().max())


def _logits(opened: Opened, tokens: int) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as temporary:
        directory = opened.path
        if opened.megatron is not None:
            directory = Path(temporary) / "model"
            export_model(plan_export(opened.megatron), directory)
        # the grouped product of experts that transformers prefers does not take every width
        options = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
        model = AutoModelForCausalLM.from_pretrained(directory, **options).eval()
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, opened.model.architecture.vocab_size, (2, tokens), generator=generator)
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits
