"""Heads: what is computed from a micro-batch's logits. The same log-probabilities serve the log-prob pass and every loss.

Legend: b micro-batch rows, S padded sequence length, V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_logprobs
from megarl.models.engine.microbatches import MicroBatch
from megarl.models.engine.normalizers import Normalizers


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Result of one micro-batch.

    Attributes:
        loss: differentiable scalar, this micro-batch's share of the global loss; None where nothing is trained.
        tensors: per-row results, detached.
        metrics: numbers or 0-d tensors, to be reduced as the loss declares; read only after the pass, so that no micro-batch waits for
            the device.
    """

    loss: torch.Tensor | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)


class Head(Protocol):
    """Turns a shard of logits [b, S, V] and the micro-batch they come from into a result."""

    def __call__(self, logits: torch.Tensor, micro_batch: MicroBatch) -> HeadOutput: ...


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Log-probabilities of the tokens that are there.

    Attributes:
        shard: which vocabulary columns this rank holds.
        temperature: the sampling temperature; logits are divided by it, here as in generation.
    """

    shard: VocabularyShard
    temperature: float = 1.0

    def next_token_logprobs(self, logits: torch.Tensor, micro_batch: MicroBatch) -> torch.Tensor:
        """[b, S-1] float32: entry i is the log-probability of token i+1 given tokens up to i."""
        # rolling the targets instead of cutting the logits keeps them contiguous: no copy of the largest tensor there is
        targets = micro_batch.input_ids.roll(-1, dims=1)
        return vocab_parallel_logprobs(logits, targets, self.shard, self.temperature)[:, :-1]

    def __call__(self, logits: torch.Tensor, micro_batch: MicroBatch) -> HeadOutput:
        """``logprobs`` [b, S] float32: column 0 and everything beyond ``input_lengths`` exactly 0."""
        logprobs = F.pad(self.next_token_logprobs(logits, micro_batch), (1, 0))
        positions = torch.arange(logprobs.shape[1], device=logprobs.device)
        inside = positions[None, :] < micro_batch.data["input_lengths"][:, None]
        return HeadOutput(tensors={"logprobs": logprobs.detach().where(inside, torch.zeros_like(logprobs))})


@dataclass(frozen=True, slots=True)
class LossHead:
    """A loss of the contract, fed with the same log-probabilities.

    Attributes:
        loss_fn: called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and ``next_token_logprobs`` [b, S-1].
        logprobs: makes the log-probabilities.
        normalizers: of the global batch.
    """

    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]]
    logprobs: LogprobHead
    normalizers: Normalizers

    def __call__(self, logits: torch.Tensor, micro_batch: MicroBatch) -> HeadOutput:
        loss, metrics = self.loss_fn(
            micro_batch.data,
            self.normalizers.valid_sequences,
            self.normalizers.valid_tokens,
            next_token_logprobs=self.logprobs.next_token_logprobs(logits, micro_batch),
        )
        # a schedule may free the loss's storage after its backward pass, and a metric may be the loss itself
        kept = {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}
        return HeadOutput(loss=loss, metrics=kept)
