"""Supervised fine-tuning: the negative log-likelihood of answers, given their prompts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl.algorithms.loss_functions import NLLLoss
from megarl.algorithms.skipped_batches import SkippedBatches
from megarl.algorithms.train_results import step_metrics
from megarl.distributed.token_batches import supervised_batch

if TYPE_CHECKING:
    from megarl.config.sections import SFTConfig
    from megarl.data.datasets import Dataset
    from megarl.data.sampler import ResumableSampler
    from megarl.models.policy.interfaces import PolicyInterface
    from megarl.observe.timing import PhaseTimer


@dataclass
class SFT:
    """One step trains on one global batch.

    Attributes:
        policy: what is trained.
        config: the ``sft`` section.
        global_batch_size: samples a step.
        pad_token_id: fills rows up.
        train_data: prompts and answers.
        validation_data: the same, never trained on; None for no validation.
        sampler: the order of the training data.
        timer: told the phases of a step.
        skipped: keeps batches that could not be trained on.
    """

    policy: PolicyInterface
    config: SFTConfig
    global_batch_size: int
    pad_token_id: int
    train_data: Dataset
    validation_data: Dataset | None
    sampler: ResumableSampler
    timer: PhaseTimer
    loss_fn: NLLLoss = field(default_factory=NLLLoss)
    skipped: SkippedBatches = field(default_factory=SkippedBatches)

    def step(self, step: int) -> dict[str, float]:
        """Train on the next global batch."""
        examples = self.train_data.select(self.sampler.take(self.global_batch_size))
        batch = supervised_batch(examples, self.pad_token_id)
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, [example.index for example in examples])
            self.policy.finish_training()
        return {**step_metrics(result, self.loss_fn), "epoch": self.sampler.epoch, "num_tokens": int(batch["input_lengths"].sum())}

    def validate(self) -> dict[str, float]:
        """``loss`` (mean over answer tokens), ``perplexity`` and ``samples`` of the first ``val_batches`` global batches."""
        if self.validation_data is None:
            return {}
        size = self.config["val_global_batch_size"]
        batches = self.config.get("val_batches")
        examples = self.validation_data.examples[: None if batches is None else batches * size]
        loss_sum = tokens = 0.0
        self.policy.prepare_for_training()
        for start in range(0, len(examples), size):
            batch = supervised_batch(examples[start : start + size], self.pad_token_id, rows=size)
            result = self.policy.train(batch, self.loss_fn, eval_mode=True, gbs=size, mbs=self.config["val_micro_batch_size"])
            batch_tokens = float((batch["token_mask"][:, 1:] * batch["sample_mask"].unsqueeze(1)).sum())
            loss_sum += step_metrics(result, self.loss_fn)["loss"] * batch_tokens
            tokens += batch_tokens
        loss = loss_sum / tokens
        return {"loss": loss, "perplexity": math.exp(min(loss, 700.0)), "samples": len(examples)}
