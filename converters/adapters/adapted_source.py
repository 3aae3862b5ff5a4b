"""A Hugging Face checkpoint whose tensors are read with a LoRA adapter merged in."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from converters.adapters.lora import LoraAdapter, Member
from converters.adapters.lora_model import refuse_other_base
from converters.check import repeated_tensors
from converters.checkpoint.source import HuggingFaceSource
from converters.mapping.logical import HuggingFaceModel
from converters.mapping.places import locate, rows_in
from converters.mapping.rules import hf_tensors
from converters.model_config.architecture import Architecture


class AdaptedSource(HuggingFaceSource):
    """A checkpoint that is read with an adapter merged in. Tensors that the adapter changes are float32, so
    that the sum of base and adapter is rounded only once, by the reader.

    Args:
        directory: directory of the base model.
        adapter: directory of the adapter.
        architecture: architecture of the base model.

    Raises:
        ConversionError: the checkpoint cannot be read, or the adapter does not match it.
    """

    def __init__(self, directory: Path, adapter: Path, architecture: Architecture) -> None:
        super().__init__(directory)
        self._architecture, self.adapter = architecture, LoraAdapter(adapter, architecture)
        self._changed: dict[str, list[Member]] = {}
        for tensor in hf_tensors(architecture):
            if tensor.name in self.adapter:
                # One stored tensor may contain several tensors that are changed, such as a stack of experts.
                place = locate(tensor, self)
                self._changed.setdefault(place.name, []).append((tensor, place))
        # A tensor that is stored twice has to stay equal to its copy.
        for name, original in repeated_tensors(architecture).items():
            if name in self and original in self._changed:
                self._changed[name] = self._changed[original]

    def require_own_base(self) -> None:
        """Check that base weights stored in the adapter equal those of the checkpoint.

        Raises:
            ConversionError: the weights differ.
        """
        refuse_other_base(
            self.adapter, HuggingFaceModel(HuggingFaceSource(self.directory), self._architecture)
        )

    def dtype_name(self, name: str) -> str:
        """See ``HuggingFaceSource``."""
        return str(torch.float32) if name in self._changed else super().dtype_name(name)

    def read(self, name: str, slices: tuple[slice, ...] | None = None) -> Tensor:
        """See ``HuggingFaceSource``."""
        members = self._changed.get(name)
        if members is None:
            return super().read(name, slices)
        box = self.box(name, slices)
        tensor, place = members[0]
        (first, last), others = box[0], tuple(slice(start, stop) for start, stop in box[1:])
        # The tensor is stored by itself, so that only the requested part is read.
        if place.index is None and place.shape == tensor.shape and tensor.name in self.adapter.factors:
            # Read and merge only the requested box of a plain matrix: the columns of the product are
            # independent.
            block = super().read(name, slices)
            return self.adapter.merge(tensor.name, block, first, torch.float32, columns=box[1])
        # The adapter's rows are those of one logical tensor, whose rows may be interleaved with others in the
        # stored tensor.
        is_stack = place.index is not None
        whole = super().read(name, (slice(first, last),) if is_stack else None).float()
        for tensor, place in members:
            if place.index is None or first <= place.index < last:
                block = whole if place.index is None else whole[place.index - first]
                # Take the first rows of the view: rows_in continues to the end of the stored tensor, which
                # may hold further tensors.
                rows = rows_in(block, place)[: tensor.shape[0]]
                rows.copy_(self.adapter.merge(tensor.name, rows.contiguous(), 0, torch.float32))
        wanted = whole if is_stack else whole[first:last]
        return wanted[(slice(None), *others)].contiguous()
