"""Opens an adapter, whichever side it was saved by; from then on its tensors have PEFT's names and forms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from converters.adapters.megatron_adapter import MegatronAdapter
from converters.adapters.peft_directory import PeftDirectory, is_peft_directory
from converters.architecture import Architecture
from converters.boxes import Box
from converters.errors import ConversionError
from converters.lora_config import LoraConfig
from converters.torch_dist.find import find_checkpoint


class AdapterSource(Protocol):
    """The tensors of an adapter.

    Attributes:
        config: how they change weights.
        raw_config: what PEFT's ``adapter_config.json`` says, or would.
    """

    config: LoraConfig
    raw_config: Mapping[str, Any]

    def files(self) -> list[Path]:
        """All that it is read from; it changes with them."""
        ...

    def keys(self) -> list[str]:
        """Names of all tensors."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor: [rank, in] of ``lora_A``, [out, rank] of ``lora_B``."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """Stored dtype of a tensor."""
        ...

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor, or a box of it, as a fresh contiguous CPU tensor."""
        ...


def open_adapter(directory: Path, architecture: Architecture) -> AdapterSource:
    """Open an adapter of a model.

    Args:
        directory: of PEFT, or a ``torch_dist`` checkpoint of adapters.
        architecture: of the base model.

    Raises:
        ConversionError: there is none, it is damaged, or it is of a form that is not known here.
    """
    if not is_peft_directory(directory) and is_megatron(directory):
        return MegatronAdapter(directory, architecture)
    return PeftDirectory(directory)


def is_megatron(directory: Path) -> bool:
    """Whether there is a ``torch_dist`` checkpoint."""
    try:
        find_checkpoint(directory)
    except (ConversionError, OSError):
        return False
    return True
