"""Supervised fine-tuning: the negative log-likelihood of answers, given their prompts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, NotRequired

from typing_extensions import TypedDict

from megarl.algorithms.algorithm import ACTOR, Algorithm, Parts
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key


class SFTConfig(TypedDict):
    """Supervised fine-tuning."""

    max_num_steps: Annotated[int, Key("steps of the run.", AT_LEAST_1)]
    max_num_epochs: NotRequired[
        Annotated[
            int | None,
            Key("passes over the training data after which the run ends even so; null for no such end.", AT_LEAST_1, default=None),
        ]
    ]
    val_period: NotRequired[Annotated[int, Key("steps between validations; 0 for none.", AT_LEAST_0, default=0)]]
    val_batches: NotRequired[Annotated[int | None, Key("global batches of a validation; null for all.", AT_LEAST_1, default=None)]]
    val_global_batch_size: NotRequired[Annotated[int, Key("samples of a global batch of a validation.", AT_LEAST_1)]]
    val_micro_batch_size: NotRequired[Annotated[int, Key("samples of a forward pass on one data-parallel rank.", AT_LEAST_1)]]
    val_at_start: NotRequired[Annotated[bool, Key("validate before the first step.", default=False)]]
    val_at_end: NotRequired[Annotated[bool, Key("validate after the last step.", default=False)]]


class SFT(Algorithm):
    """One step trains on one global batch."""

    SECTIONS: ClassVar[Mapping[str, Any]] = MappingProxyType({"sft": SFTConfig})
    GENERATES = False

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.loss_functions import NLLLoss

        super().__init__(parts)
        self.config = parts.config["sft"]
        self.policy = parts.models[ACTOR]
        self.global_batch_size = parts.config["policy"]["train_global_batch_size"]
        self.pad_token_id = parts.tokenizer.pad_token_id
        self.train_data, self.validation_data = parts.train_data, parts.validation_data
        self.timer, self.skipped = parts.timer, parts.skipped
        self.loss_fn = NLLLoss()

    def step(self, step: int) -> dict[str, float]:
        """Train on the next global batch."""
        from megarl.algorithms.train_results import step_metrics, trained_sequences
        from megarl.distributed.token_batches import supervised_batch

        examples = self.train_data.select(self.sampler.take(self.global_batch_size))
        batch = supervised_batch(examples, self.pad_token_id)
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, [example.index for example in examples])
            self.policy.finish_training()
            self.timer.passed(trained_sequences(batch, result, self.loss_fn))
        return {**step_metrics(result, self.loss_fn), "epoch": self.sampler.epoch, "num_tokens": int(batch["input_lengths"].sum())}

    def validate(self) -> dict[str, float]:
        """``loss`` (mean over answer tokens), ``perplexity`` and ``samples`` of the first ``val_batches`` global batches."""
        from megarl.algorithms.train_results import step_metrics
        from megarl.distributed.token_batches import supervised_batch

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
