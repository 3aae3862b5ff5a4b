"""Stored models with an adapter merged into them as they are read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from converters.adapters.lora import LoraAdapter
from converters.checkpoint.work import row_ranges
from converters.errors import ConversionError
from converters.mapping.logical import HuggingFaceModel, LogicalModel, MegatronModel
from converters.mapping.rule import HuggingFaceTensor
from converters.mapping.rules import hf_tensors

if TYPE_CHECKING:
    from converters.opening import MegatronCheckpoint, Opened

ChooseDtype = Callable[[str, torch.dtype], torch.dtype]
"""From the name of a tensor that an adapter changes and the dtype that it is stored in to the dtype that the merged one is rounded to."""


def merge_import(base: HuggingFaceModel, directory: Path, dtype: torch.dtype | None) -> MergedHuggingFaceModel:
    """A Hugging Face checkpoint with the adapter of a directory in it.

    Args:
        base: the checkpoint.
        directory: of the adapter.
        dtype: that everything is converted to, from the sums in float32; None rounds each of them to the dtype of its tensor.

    Raises:
        ConversionError: the adapter is damaged or does not fit.
    """
    adapter = LoraAdapter(directory, base.architecture)
    refuse_other_base(adapter, base)
    return MergedHuggingFaceModel(base, adapter, lambda name, stored: stored if dtype is None else torch.float32)


def merge_export(checkpoint: MegatronCheckpoint, directory: Path, dtype: torch.dtype | None) -> tuple[MegatronCheckpoint, LoraAdapter]:
    """Merge an adapter into a ``torch_dist`` checkpoint. A tensor that its import widened is rounded to what it was in before."""

    def choose(name: str, stored: torch.dtype) -> torch.dtype:
        if dtype is not None:
            return torch.float32
        return stored if checkpoint.manifest is None else checkpoint.manifest.dtype_before(name, stored)

    adapter = LoraAdapter(directory, checkpoint.model.architecture)
    refuse_other_base(adapter, checkpoint.model)
    return dataclasses.replace(checkpoint, model=MergedMegatronModel(checkpoint.model, adapter, choose)), adapter


def merge_opened(base: Opened, directory: Path, other: Opened | None) -> Opened:
    """An opened checkpoint with an adapter in it, to be compared with ``other``, which may be the result of a conversion with ``--dtype``.
    Its manifest, which is of the base, is left out."""

    def choose(name: str, stored: torch.dtype) -> torch.dtype:
        if other is None:
            return stored
        tensor = other.tensors.get(name)
        return stored if tensor is None else other.dtype(tensor)

    adapter, model = LoraAdapter(directory, base.model.architecture), base.model
    refuse_other_base(adapter, model)
    kind = MergedMegatronModel if isinstance(model, MegatronModel) else MergedHuggingFaceModel
    merged: Any = kind(model, adapter, choose)  # type: ignore[arg-type]
    checkpoint = None if base.megatron is None else dataclasses.replace(base.megatron, model=merged, manifest=None)
    return dataclasses.replace(base, model=merged, manifest=None, megatron=checkpoint)


def refuse_other_base(adapter: LoraAdapter, base: LogicalModel) -> None:
    """Compare the weights of the base model that an adapter holds (PEFT saves those of embeddings with it) with those that are there.

    Raises:
        ConversionError: they are not the same.
    """
    tensors = {tensor.name: tensor for tensor in hf_tensors(base.architecture)}
    for name in adapter.base_names:
        for start, stop in row_ranges(tensors[name].shape, base.dtype(tensors[name]).itemsize):
            if not torch.equal(base.read(tensors[name], start, stop).float(), adapter.base_rows(name, start, stop).float()):
                raise ConversionError(
                    f"{name} of this model is not that of the base model in {adapter.directory}",
                    "use the base model that the adapter was trained on; if its embeddings were trained too, merge with peft",
                )


class _Merging:
    """Merging: what both kinds of models have in common."""

    adapter: LoraAdapter
    choose_dtype: ChooseDtype

    if TYPE_CHECKING:  # what stands beside this class among the bases of those below

        def _stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype: ...

        def _stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor: ...

    def dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """See ``LogicalModel``."""
        stored = self._stored_dtype(tensor)
        return self.choose_dtype(tensor.name, stored) if tensor.name in self.adapter else stored

    def read(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        """See ``LogicalModel``."""
        rows = self._stored_rows(tensor, start, stop)
        return self.adapter.merge(tensor.name, rows, start, self.dtype(tensor)) if tensor.name in self.adapter else rows


class MergedHuggingFaceModel(_Merging, HuggingFaceModel):
    """A Hugging Face checkpoint with an adapter in it."""

    def __init__(self, base: HuggingFaceModel, adapter: LoraAdapter, choose_dtype: ChooseDtype) -> None:
        super().__init__(base.source, base.architecture)
        self.adapter, self.choose_dtype = adapter, choose_dtype

    def _stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        return HuggingFaceModel.dtype(self, tensor)

    def _stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        return HuggingFaceModel.read(self, tensor, start, stop)


class MergedMegatronModel(_Merging, MegatronModel):
    """A ``torch_dist`` checkpoint with an adapter in it."""

    def __init__(self, base: MegatronModel, adapter: LoraAdapter, choose_dtype: ChooseDtype) -> None:
        super().__init__(base.checkpoint, base.architecture, base.stacked)
        self.adapter, self.choose_dtype = adapter, choose_dtype

    def _stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        return MegatronModel.dtype(self, tensor)

    def _stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        return MegatronModel.read(self, tensor, start, stop)
