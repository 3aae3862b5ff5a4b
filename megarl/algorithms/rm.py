"""Reward model: a score of a prompt with an answer, learned from pairs of answers of which one was preferred (Bradley-Terry)."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NotRequired

from typing_extensions import TypedDict

from megarl.algorithms.algorithm import ACTOR, Algorithm, Parts
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key

logger = logging.getLogger(__name__)


class RMConfig(TypedDict):
    """A reward model. ``policy.train_global_batch_size`` and ``policy.train_micro_batch_size`` count pairs."""

    max_num_steps: Annotated[int, Key("steps of the run.", AT_LEAST_1)]
    max_num_epochs: NotRequired[
        Annotated[
            int | None,
            Key("passes over the training data after which the run ends even so; null for no such end.", AT_LEAST_1, default=None),
        ]
    ]
    val_period: NotRequired[Annotated[int, Key("steps between validations; 0 for none.", AT_LEAST_0, default=0)]]
    val_batches: NotRequired[Annotated[int | None, Key("global batches of a validation; null for all.", AT_LEAST_1, default=None)]]
    val_global_batch_size: NotRequired[Annotated[int, Key("pairs of a global batch of a validation.", AT_LEAST_1)]]
    val_micro_batch_size: NotRequired[Annotated[int, Key("pairs of a forward pass on one data-parallel rank.", AT_LEAST_1)]]
    val_at_start: NotRequired[Annotated[bool, Key("validate before the first step.", default=False)]]
    val_at_end: NotRequired[Annotated[bool, Key("validate after the last step.", default=False)]]


class RM(Algorithm):
    """One step trains on one global batch of pairs."""

    SECTIONS: ClassVar[Mapping[str, Any]] = MappingProxyType({"rm": RMConfig})
    GENERATES = False
    PAIRS = True
    SCORES = True

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.value_losses import PreferenceLoss

        super().__init__(parts)
        self.config, policy = parts.config["rm"], parts.config["policy"]
        self.policy = parts.models[ACTOR]
        self.pairs, self.micro_pairs = policy["train_global_batch_size"], policy["train_micro_batch_size"]
        self.pad_token_id = parts.tokenizer.pad_token_id
        self.train_data, self.validation_data = parts.train_data, parts.validation_data
        self.timer, self.skipped = parts.timer, parts.skipped
        # a loss of values is called with these in the place of what the protocol's type says
        self.loss_fn: Any = PreferenceLoss()
        if parts.tokenizer.pad_token_id == parts.tokenizer.eos_token_id:
            logger.warning(
                "policy.tokenizer: %r both pads and ends an answer. Scores here are those of the last token; transformers, which knows "
                "padding by its token alone, reads an exported model at the token before the end. Fix: give the tokenizer a padding token "
                "of its own, where that matters",
                parts.tokenizer.eos_token,
            )

    def step(self, step: int) -> dict[str, float]:
        """Train on the next global batch."""
        from megarl.algorithms.train_results import step_metrics, trained_sequences
        from megarl.distributed.token_batches import supervised_batch

        examples = self.train_data.select(self.sampler.take(self.pairs))
        batch = supervised_batch(examples, self.pad_token_id)
        records = [example.index for example in examples]
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            sizes = {"gbs": 2 * self.pairs, "mbs": 2 * self.micro_pairs}
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, records, **sizes)
            self.policy.finish_training()
            self.timer.passed(trained_sequences(batch, result, self.loss_fn))
        return {**step_metrics(result, self.loss_fn), "epoch": self.sampler.epoch, "num_tokens": int(batch["input_lengths"].sum())}

    def validate(self) -> dict[str, float]:
        """Means over the pairs of the first ``val_batches`` global batches of what ``PreferenceLoss`` measures, and ``samples``, pairs."""
        from megarl.algorithms.train_results import step_metrics
        from megarl.distributed.token_batches import supervised_batch

        if self.validation_data is None:
            return {}
        size, batches = self.config["val_global_batch_size"], self.config["val_batches"]
        pairs = len(self.validation_data) if batches is None else min(batches * size, len(self.validation_data))
        sums: dict[str, float] = {}
        self.policy.prepare_for_training()
        for start in range(0, pairs, size):
            chosen = range(start, min(start + size, pairs))
            batch = supervised_batch(self.validation_data.select(chosen), self.pad_token_id, rows=2 * size)
            result = self.policy.train(batch, self.loss_fn, eval_mode=True, gbs=2 * size, mbs=2 * self.config["val_micro_batch_size"])
            found = step_metrics(result, self.loss_fn)
            for name in self.loss_fn.metric_reductions.keys() - {"num_valid_samples"}:
                sums[name] = sums.get(name, 0.0) + found[name] * len(chosen)
        return {**{name: total / pairs for name, total in sorted(sums.items())}, "samples": pairs}
