"""Reward model training: learn a score of a prompt with an answer from pairs of a chosen and a rejected
answer (Bradley-Terry)."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import MappingProxyType

from megarl.algorithms.algorithm import Parts
from megarl.algorithms.supervised import Supervised, SupervisedConfig

logger = logging.getLogger(__name__)


class RMConfig(SupervisedConfig):
    """Reward model training. ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count
    pairs."""


class RM(Supervised):
    """Training of a reward model. A step trains on one global batch of pairs."""

    SECTIONS = MappingProxyType({"rm": RMConfig})
    PAIRS = True
    SCORES = True

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.value_losses import PreferenceLoss

        super().__init__(parts, PreferenceLoss())
        if parts.tokenizer.pad_token_id == parts.tokenizer.eos_token_id:
            logger.warning(
                "policy.tokenizer: %r both pads and ends an answer. Scores are those of the last "
                "token; with an exported model, transformers takes that token for padding and uses "
                "the one before. Fix: give the tokenizer a separate padding token, if that matters",
                parts.tokenizer.eos_token,
            )

    def validated(self) -> Sequence[str]:
        """Return the names of the validation metrics."""
        return sorted(self.loss_fn.metric_reductions.keys() - {"num_valid_samples"})
