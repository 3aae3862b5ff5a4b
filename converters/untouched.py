"""Weights that training leaves unchanged: the vision tower and multi-token-prediction layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.logical import HuggingFaceModel, MegatronModel
from converters.mapping.rule import HuggingFaceTensor, Rule
from converters.model_config.architecture import Architecture
from converters.model_config.prediction_layers import beginnings, copies

_VISION, _PREDICTION = "vision tower", "prediction layer"
_PREFIXES = {"model.visual.": _VISION, "mtp.": _PREDICTION}


class Untouched:
    """Tensors of a checkpoint that training leaves unchanged.

    Args:
        source: the checkpoint; tensors are read on demand.
        architecture: its architecture; needed for multi-token-prediction layers that are numbered after the
            ordinary layers. Their copies of embedding and output layer are excluded, because training changes
            the originals.
    """

    def __init__(self, source: HuggingFaceSource, architecture: Architecture | None = None) -> None:
        self.directory = source.directory
        self._prefixes = _prefixes(architecture)
        repeated = {} if architecture is None else dict(copies(architecture))
        self._names = [
            name for name in source.names() if name.startswith(tuple(self._prefixes)) and name not in repeated
        ]

    def __str__(self) -> str:
        """Return the parts and their numbers of tensors as text; empty if there are none."""
        counts = dict.fromkeys((_VISION, _PREDICTION), 0)
        for name in self._names:
            for prefix, what in self._prefixes.items():
                counts[what] += name.startswith(prefix)
        return " and ".join(f"{what} ({count} tensors)" for what, count in counts.items() if count)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, tensor as stored)."""
        # Open the plain source, because tensors are returned as stored, neither dequantised nor merged.
        # Without any, the directory may not exist any more.
        if not self._names:
            return
        source = HuggingFaceSource(self.directory)
        for name in self._names:
            yield name, source.read(name)


def _prefixes(architecture: Architecture | None) -> dict[str, str]:
    """Return name prefix -> part that training leaves unchanged."""
    if architecture is None:
        return _PREFIXES
    return {**_PREFIXES, **dict.fromkeys(beginnings(architecture), _PREDICTION)}


class Completed(MegatronModel):
    """A checkpoint of a training run, completed with the parts that training left unchanged.

    Args:
        trained: the checkpoint.
        begun: the model that training started from.

    Raises:
        ConversionError: the architectures differ.
    """

    def __init__(self, trained: MegatronModel, begun: HuggingFaceModel) -> None:
        if (
            replace(trained.architecture, prediction_layers=begun.architecture.prediction_layers)
            != begun.architecture
        ):
            raise ConversionError(
                f"--untouched-from {begun.source.directory}: its config.json describes another model than "
                "the checkpoint's",
                "give the directory of the model that was trained",
            )
        # This architecture includes the multi-token-prediction layers, which the trained checkpoint lacks.
        super().__init__(trained.checkpoint, begun.architecture)
        self.begun = begun
        self._prefixes = tuple(_prefixes(begun.architecture))

    def has(self, rule: Rule) -> bool:
        """See ``MegatronModel``."""
        return all(map(self._is_untouched, rule.parts)) or super().has(rule)

    def stored_dtype(self, tensor: HuggingFaceTensor) -> torch.dtype:
        """See ``LogicalModel``."""
        return self.begun.stored_dtype(tensor) if self._is_untouched(tensor) else super().stored_dtype(tensor)

    def stored_rows(self, tensor: HuggingFaceTensor, start: int, stop: int) -> Tensor:
        """See ``LogicalModel``."""
        if self._is_untouched(tensor):
            return self.begun.stored_rows(tensor, start, stop)
        return super().stored_rows(tensor, start, stop)

    def _is_untouched(self, tensor: HuggingFaceTensor) -> bool:
        return tensor.name.startswith(self._prefixes) and self.begun.holds(tensor)
