"""A common view of stored models in both formats: Hugging Face tensors that can be read by rows.

Converting, verifying and comparing use it, so each has a single implementation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from converters.checkpoint.boxes import Box, single, whole
from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.formulas import formula_of_parameter
from converters.mapping.layouts import runs_of
from converters.mapping.places import locate, read_part
from converters.mapping.rule import HuggingFaceTensor, Kind, Rule, TensorLocation
from converters.mapping.rules import all_rules
from converters.model_config.architecture import Architecture
from converters.torch_dist.keys import StoredPlace, are_stacked, stored_place
from converters.torch_dist.reader import StoredTensors


class Merging(Protocol):
    """Interface of changes that are merged into tensors while they are read."""

    def __contains__(self, name: str) -> bool:
        """Return whether a Hugging Face tensor is changed."""
        ...

    def merge(self, name: str, rows: Tensor, start: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return rows of a tensor with the change merged in.

        Args:
            name: Hugging Face tensor name.
            rows: base rows, from index ``start`` on.
            start: index of the first row.
            dtype: dtype of the result; None for that of ``rows``.
        """
        ...


ChooseDtype = Callable[[str, torch.dtype], torch.dtype]
"""Returns the dtype to which a merged tensor is rounded: (name, stored dtype) -> dtype."""


class LogicalModel(ABC):
    """A stored model.

    Attributes:
        architecture: defines the model's tensors and shapes.
        adapter: (merged adapter, function that chooses the dtype of merged tensors), or None.
    """

    architecture: Architecture
    adapter: tuple[Merging, ChooseDtype] | None = None

    @abstractmethod
    def holds(self, tensor: HuggingFaceTensor) -> bool:
        """Return whether a tensor is stored completely; reads no values."""

    @abstractmethod
    def stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """Return the dtype in which a tensor is stored."""

    @abstractmethod
    def stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        """Return the rows ``start`` to ``stop`` of a tensor as stored, without a merged adapter."""

    def dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """Return the dtype that ``read`` returns for a tensor."""
        stored = self.stored_dtype(tensor)
        return (
            self.adapter[1](tensor.name, stored)
            if self.adapter is not None and tensor.name in self.adapter[0]
            else stored
        )

    def read(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        """Return the rows ``start`` to ``stop`` of a tensor as a new contiguous CPU tensor, with the adapter
        merged."""
        rows = self.stored_rows(tensor, start, stop)
        if self.adapter is None or tensor.name not in self.adapter[0]:
            return rows
        return self.adapter[0].merge(tensor.name, rows, start, self.dtype(tensor))


class HuggingFaceModel(LogicalModel):
    """A Hugging Face checkpoint."""

    def __init__(self, source: HuggingFaceSource, architecture: Architecture) -> None:
        self.source = source
        self.architecture = architecture
        self._places: dict[str, TensorLocation] = {}

    def holds(self, tensor: HuggingFaceTensor) -> bool:
        """Return whether the source has this tensor, under any of its names."""
        return any(place.name in self.source for place in tensor.places)

    def stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """See ``LogicalModel``."""
        return self.source.dtype(self._place(tensor).name)

    def stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        """See ``LogicalModel``."""
        return read_part(tensor, self._place(tensor), self.source, (slice(start, stop),))

    def _place(self, tensor: HuggingFaceTensor) -> TensorLocation:
        # Cached, because every read needs the location.
        if tensor.name not in self._places:
            self._places[tensor.name] = locate(tensor, self.source)
        return self._places[tensor.name]


class MegatronModel(LogicalModel):
    """A ``torch_dist`` checkpoint of Megatron-Core.

    Args:
        checkpoint: its tensors.
        architecture: architecture of the model.
    """

    def __init__(self, checkpoint: StoredTensors, architecture: Architecture) -> None:
        self.checkpoint = checkpoint
        self.architecture = architecture
        self.stacked = are_stacked(checkpoint)
        self._rules: dict[str, tuple[Rule, int]] = {}
        for rule in all_rules(architecture):
            for index, part in enumerate(rule.parts):
                self._rules[part.name] = rule, index

    def holds(self, tensor: HuggingFaceTensor) -> bool:
        """See ``LogicalModel``."""
        return self.has(self._rules[tensor.name][0])

    def stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """See ``LogicalModel``."""
        return self.checkpoint.dtype(self.place(self._rules[tensor.name][0]).key)

    def stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        """See ``LogicalModel``."""
        rule, part = self._rules[tensor.name]
        pieces = []
        # The parameter may have the tensor's rows in another order.
        for run in sorted(
            runs_of(rule, self.architecture.head_dim, self.padded_vocab(rule)), key=lambda run: run.start
        ):
            low, high = max(start, run.start), min(stop, run.stop)
            if run.part == part and low < high:
                first = run.position + low - run.start
                pieces.append(self.read_rows(rule, first, first + high - low))
        # Usually there is one piece, which needs no copy.
        if len(pieces) == 1:
            return pieces[0]
        return (
            torch.cat(pieces)
            if pieces
            else torch.empty((0, *tensor.shape[1:]), dtype=self.stored_dtype(tensor))
        )

    def read_rows(self, rule: Rule, start: int, stop: int) -> Tensor:
        """Return rows of a full Megatron-Core parameter, with padding."""
        shape = self.parameter_shape(rule)
        return self.checkpoint.read(self.place(rule).key, self._box(rule, start, stop)).reshape(
            stop - start, *shape[1:]
        )

    def has(self, rule: Rule) -> bool:
        """Return whether a parameter is stored completely; reads no values.

        Raises:
            ConversionError: the stored tensor has another shape than the config requires.
        """
        key = self.place(rule).key
        return key in self.checkpoint and self.checkpoint.is_saved(
            key, self._box(rule, 0, self.parameter_shape(rule)[0])
        )

    def _box(self, rule: Rule, start: int, stop: int) -> Box:
        place, shape = self.place(rule), self.parameter_shape(rule)
        return (*single(place.index), (start, stop), *whole(shape[1:]))

    def parameter_shape(self, rule: Rule) -> tuple[int, ...]:
        """Return the full shape of a Megatron-Core parameter, with padding.

        Raises:
            ConversionError: the stored tensor has another shape than the config requires.
        """
        place, expected = self.place(rule), shape_of_parameter(rule)
        shape = self.checkpoint.shape(place.key)
        grid, own = shape[: len(place.grid)], shape[len(place.grid) :]
        # The stored embedding may have any number of padding rows.
        fits = own[1:] == expected[1:] and (
            own[:1] >= expected[:1] if rule.kind is Kind.VOCAB else own == expected
        )
        if grid != place.grid or not fits:
            raise ConversionError(
                f"{place.key} has shape {list(shape)}, but the config asks for {[*place.grid, *expected]}, "
                "the last "
                f"{len(expected)} of them {formula_of_parameter(rule, self.architecture)}",
                "use the config that belongs to these weights (--hf-config DIRECTORY)",
            )
        return own

    def padded_vocab(self, rule: Rule) -> int:
        """Return the number of rows of the stored embedding; 0 for other parameters."""
        return self.parameter_shape(rule)[0] if rule.kind is Kind.VOCAB else 0

    def place(self, rule: Rule) -> StoredPlace:
        """Return the location of a parameter in the checkpoint."""
        return stored_place(rule, self.architecture, stacked=self.stacked)


def shape_of_parameter(rule: Rule, padded_vocab: int | None = None) -> tuple[int, ...]:
    """Return the full, unsharded shape of a Megatron-Core parameter. ``padded_vocab`` replaces the vocabulary
    size."""
    first = rule.parts[0].shape
    if rule.kind in (Kind.REPLICATED, Kind.ROW):
        return first
    if rule.kind is Kind.VOCAB and padded_vocab is not None:
        return (padded_vocab, *first[1:])
    return (rule.rows, *first[1:])
