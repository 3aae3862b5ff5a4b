"""Parts of a model's directory that training leaves as they are: a vision tower and a layer that predicts
further tokens, where they have names of their own, and the files of the processor of pictures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.logical import HuggingFaceModel, MegatronModel
from converters.mapping.rule import HuggingFaceTensor, Rule

_PREFIXES = {"model.visual.": "vision tower", "mtp.": "prediction layer"}
_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


class Untouched:
    """The tensors of a checkpoint that training leaves as they are.

    Args:
        source: the checkpoint; read when asked for.
    """

    def __init__(self, source: HuggingFaceSource) -> None:
        self._directory = source.directory
        self._names = [name for name in source.names() if name.startswith(tuple(_PREFIXES))]

    def __str__(self) -> str:
        """Return what they are, with their number; empty where there are none."""
        counts = {
            what: sum(name.startswith(prefix) for name in self._names) for prefix, what in _PREFIXES.items()
        }
        return " and ".join(f"{what} ({count} tensors)" for what, count in counts.items() if count)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and tensors, bit for bit."""
        source = HuggingFaceSource(self._directory)
        for name in self._names:
            yield name, source.read(name)

    def copy_files(self, directory: Path) -> None:
        """Copy the files of the processor of pictures."""
        for path in (self._directory / name for name in _FILES):
            if path.is_file():
                shutil.copyfile(path, directory / path.name)


class Completed(MegatronModel):
    """A checkpoint that a training run has written, with what the run left as it was.

    Args:
        trained: the checkpoint.
        begun: the model that the run began with.

    Raises:
        ConversionError: they are of different models.
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
        super().__init__(trained.checkpoint, begun.architecture)
        self.begun = begun

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
        return tensor.name.startswith(tuple(_PREFIXES)) and self.begun.holds(tensor)
