"""Facts of checkpoints, plans and families, as ``megarl convert inspect``, ``plan`` and ``families`` print them."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from converters.checkpoint.manifest import dtype_name
from converters.checkpoint.quantized import DequantizedSource
from converters.checkpoint.work import BYTES_A_WORKER, Answer, resident_memory
from converters.exporting import ExportPlan
from converters.families import FAMILIES
from converters.foreign.options import OpeningOptions
from converters.importing import ImportPlan
from converters.mapping.logical import HuggingFaceModel, MegatronModel
from converters.mapping.rules import hf_tensors
from converters.opening import HUGGING_FACE, MEGATRON, Opened, open_any

_EMBEDDING = "embedding.word_embeddings.weight"


def describe(opened: Opened) -> dict[str, Any]:
    """Format, family, sizes, dtypes and layout of a checkpoint.

    Returns:
        ``path``, ``format``, ``family``, ``parameters`` and ``bytes`` of the tensors that are there, ``dtypes`` (tensors by dtype),
        ``tied_embeddings``, ``architecture`` (as ``Architecture``); where it applies ``missing`` (names), what quantised weights were, of
        Megatron's ``layers`` (stacked or indexed), ``padded_vocabulary`` and ``optimizer_state``, of conversions ``converted_from`` and
        ``manifest_tensors``.
    """
    architecture = opened.model.architecture
    dtypes: Counter[str] = Counter()
    elements = size = 0
    for tensor in opened.tensors.values():
        dtype, count = opened.model.dtype(tensor), torch.Size(tensor.shape).numel()
        dtypes[dtype_name(dtype)] += 1
        elements += count
        size += count * dtype.itemsize
    missing = [tensor.name for tensor in hf_tensors(architecture) if tensor.name not in opened.tensors]
    facts: dict[str, Any] = {
        "path": str(opened.path),
        "format": MEGATRON if opened.megatron is not None else HUGGING_FACE,
        "family": architecture.family,
        "parameters": elements,
        "bytes": size,
        "dtypes": dict(dtypes),
        "tied_embeddings": architecture.tied_embeddings,
    }
    if missing:
        facts["missing"] = missing
    if isinstance(opened.model, HuggingFaceModel) and isinstance(opened.model.source, DequantizedSource):
        facts |= opened.model.source.notes()
    if isinstance(opened.model, MegatronModel):
        facts["layers"] = "stacked" if opened.model.stacked else "indexed"
        if _EMBEDDING in opened.model.checkpoint:
            facts["padded_vocabulary"] = opened.model.checkpoint.shape(_EMBEDDING)[0]
        facts |= {"optimizer_state": any(key.startswith("optimizer.") for key in opened.model.checkpoint)}
    if opened.manifest is not None:
        facts |= {"converted_from": opened.manifest.source, "manifest_tensors": len(opened.manifest.tensors)}
    return facts | {"architecture": asdict(architecture)}


def describe_plan(plan: ImportPlan | ExportPlan, workers: int) -> dict[str, Any]:
    """Return what a conversion would write."""
    stored = plan.tensors if isinstance(plan, ImportPlan) else plan.written
    tensors = [{"key": one.key, "shape": list(one.shape), "dtype": dtype_name(one.dtype), "bytes": one.size} for one in stored]
    return {
        "direction": "import" if isinstance(plan, ImportPlan) else "export",
        "family": plan.architecture.family,
        "tensors": tensors,
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "files": [name for name, _ in plan.files] if isinstance(plan, ImportPlan) else list(plan.files),
        "peak_memory": resident_memory() + workers * BYTES_A_WORKER,
    }


def inspect_path(path: Path, options: OpeningOptions) -> Answer:
    """Say what a checkpoint is. Arguments and errors as of ``open_any``."""
    facts = describe(open_any(path, options))
    lines = [f"{key.replace('_', ' ')}: {value}" for key, value in facts.items() if key != "architecture"]
    return 0, facts, "\n".join([*lines, "architecture:", *(f"  {key}: {value}" for key, value in facts["architecture"].items())])


def list_families() -> Answer:
    """List the families that can be converted."""
    families = [
        {"model_type": family.model_type, "class": family.architecture_class, "config_keys": sorted(family.config_keys)}
        for family in FAMILIES.values()
    ]
    return 0, {"families": families}, "\n".join(f"{family['model_type']:<16} {family['class']}" for family in families)
