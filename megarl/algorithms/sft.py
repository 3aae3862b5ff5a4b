"""Supervised fine-tuning: minimises the negative log-likelihood of answers given their prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

from megarl.algorithms.algorithm import Parts
from megarl.algorithms.supervised import Supervised, SupervisedConfig

if TYPE_CHECKING:
    from torch import Tensor


class SFTConfig(SupervisedConfig):
    """Configuration of supervised fine-tuning."""


class SFT(Supervised):
    """Supervised fine-tuning. A step trains on one global batch of records."""

    SECTIONS = MappingProxyType({"sft": SFTConfig})

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.loss_functions import NLLLoss

        super().__init__(parts, NLLLoss())

    def validated(self) -> Sequence[str]:
        """Return the names of the validation metrics."""
        return ("loss",)

    def weight(self, batch: Mapping[str, Tensor]) -> float:
        """Return the number of target tokens in a batch."""
        return float((batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(1)).sum())

    def validate(self) -> dict[str, float]:
        """Return ``loss`` (mean over target tokens), ``perplexity`` and ``samples`` for the first
        ``val_batches`` global batches."""
        found = super().validate()
        # math.exp overflows above 709.
        return {**found, "perplexity": math.exp(min(found["loss"], 700.0))} if found else {}
