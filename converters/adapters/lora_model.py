"""Open stored models with an adapter merged in."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from converters.adapters.lora import LoraAdapter
from converters.checkpoint.work import row_ranges
from converters.errors import ConversionError
from converters.mapping.logical import ChooseDtype, HuggingFaceModel, LogicalModel
from converters.mapping.rules import hf_tensors

if TYPE_CHECKING:
    from converters.opening import MegatronCheckpoint, Opened

Model = TypeVar("Model", bound=LogicalModel)


def _merged(model: Model, directory: Path, choose_dtype: ChooseDtype) -> tuple[Model, LoraAdapter]:
    adapter = LoraAdapter(directory, model.architecture)
    refuse_other_base(adapter, model)
    # A shallow copy shares the open files, and leaves the base readable without the adapter.
    merged = copy.copy(model)
    merged.adapter = adapter, choose_dtype
    return merged, adapter


def merge_import(
    base: HuggingFaceModel, directory: Path, dtype: torch.dtype | None
) -> tuple[HuggingFaceModel, LoraAdapter]:
    """Return a Hugging Face checkpoint with an adapter merged in, and the adapter.

    Args:
        base: the checkpoint.
        directory: directory of the adapter.
        dtype: dtype to which all tensors will be converted; None keeps each tensor's dtype.

    Raises:
        ConversionError: the adapter is damaged or does not match the model.
    """
    # If another dtype follows, keep the merged sum in float32. Otherwise it would be rounded twice.
    return _merged(base, directory, lambda _, stored: stored if dtype is None else torch.float32)


def merge_export(
    checkpoint: MegatronCheckpoint, directory: Path, dtype: torch.dtype | None
) -> tuple[MegatronCheckpoint, LoraAdapter]:
    """Return a ``torch_dist`` checkpoint with an adapter merged in, and the adapter. Without a requested
    ``dtype``, a tensor that was widened when it was imported is rounded to its original dtype."""

    def choose(name: str, stored: torch.dtype) -> torch.dtype:
        # Merge in float32 if a dtype is requested, so that values are rounded only once.
        return checkpoint.dtype_before(name, stored) if dtype is None else torch.float32

    model, adapter = _merged(checkpoint.model, directory, choose)
    return dataclasses.replace(checkpoint, model=model), adapter


def merge_opened(base: Opened, directory: Path, other: Opened | None) -> Opened:
    """Return an opened checkpoint with an adapter merged in, to be compared with ``other``. Merged tensors
    are rounded to the dtypes of ``other``. The result has no manifest, because the base's does not apply."""

    def choose(name: str, stored: torch.dtype) -> torch.dtype:
        if other is None:
            return stored
        # Use the dtype that the other checkpoint was rounded to; otherwise every merged tensor would differ.
        tensor = other.tensors.get(name)
        return stored if tensor is None else other.dtype(tensor)

    merged: Any
    merged, _ = _merged(base.model, directory, choose)
    checkpoint = (
        None if base.megatron is None else dataclasses.replace(base.megatron, model=merged, manifest=None)
    )
    return dataclasses.replace(base, model=merged, manifest=None, megatron=checkpoint)


def refuse_other_base(adapter: LoraAdapter, base: LogicalModel) -> None:
    """Check that base weights stored in an adapter (PEFT does this for embeddings) equal those of ``base``.

    Raises:
        ConversionError: the weights differ.
    """
    tensors = {tensor.name: tensor for tensor in hf_tensors(base.architecture)}
    for name, stored in adapter.base.items():
        for start, stop in row_ranges(tensors[name].shape, base.dtype(tensors[name]).itemsize):
            own = adapter.source.read(stored, ((start, stop), (0, tensors[name].shape[1])))
            # Widening to float32 is exact, so the stored dtypes may differ.
            if not torch.equal(base.read(tensors[name], start, stop).float(), own.float()):
                raise ConversionError(
                    f"{name} of this model differs from that of the base model in {adapter.directory}",
                    (
                        "use the base model that the adapter was trained on; if its embeddings were trained "
                        "too, merge with peft"
                    ),
                )
