"""Heads: what is computed from what the output layer gives for a micro-batch. The same log-probabilities serve the log-prob pass and every
loss.

Legend: b micro-batch rows, S their length; n rows and t tokens in front of the model (``megarl.models.engine.model_input``), V
vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_logprobs
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.normalizers import Normalizers
from megarl.models.engine.output_layer import Request
from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Result of one micro-batch.

    Attributes:
        loss: differentiable scalar, this micro-batch's share of the global loss; None where nothing is trained.
        tensors: per-row results, detached.
        metrics: numbers or 0-d tensors, to be reduced as the loss declares; read only after the pass, so that no micro-batch waits for
            the device.
        gradient_peaks: once the backward pass is through, the largest absolute entry of the loss's gradient by the log-probabilities, 0-d.
    """

    loss: torch.Tensor | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    gradient_peaks: list[torch.Tensor] = field(default_factory=list)


class Head(Protocol):
    """Turns the output layer's answer for a micro-batch into a result."""

    def asks(self, model_input: ModelInput) -> Request | None:
        """What the output layer is asked for; None for the logits of all positions."""

    def __call__(self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None) -> HeadOutput:
        """The result.

        Args:
            output: what the output layer answered to ``request``: without one the shard of logits [n, t, V].
            model_input: what went in.
            request: as ``asks`` gave it; None also where the output layer answers none.
        """


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Log-probabilities of the tokens that are there, or of those of them that the micro-batch wants (``ModelInput.scored``).

    Attributes:
        shard: which vocabulary columns this rank holds.
        sampling: how tokens are drawn in generation, and so scored here.
        chunk_size: positions whose logits are there at a time (``policy.logprob_chunk_size``); None for all of a micro-batch.
    """

    shard: VocabularyShard
    sampling: SamplingSettings = MODEL_ITSELF
    chunk_size: int | None = None

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        index = model_input.scored
        if index is None and self.chunk_size is None:
            return None
        targets = model_input.targets.flatten()
        return Request(index, targets if index is None else targets.index_select(0, index), self.shard, self.sampling, self.chunk_size)

    def next_token_logprobs(self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None) -> torch.Tensor:
        """[b, S-1] float32: entry i is the log-probability of token i+1 given tokens up to i; 0 where the request leaves it out."""
        if request is not None:
            return model_input.to_rows(model_input.spread(request.logprobs(output), request.index))
        # every position has a target, also a last one: cutting the logits instead would copy the largest tensor there is
        return model_input.to_rows(vocab_parallel_logprobs(output, model_input.targets, self.shard, self.sampling, overwrite=True))

    def __call__(self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None) -> HeadOutput:
        """``logprobs`` [b, S] float32: column 0, everything beyond ``input_lengths`` and what the request leaves out exactly 0."""
        logprobs = F.pad(self.next_token_logprobs(output, model_input, request), (1, 0))
        positions = torch.arange(logprobs.shape[1], device=logprobs.device)
        inside = positions[None, :] < model_input.micro_batch.data["input_lengths"][:, None]
        return HeadOutput(tensors={"logprobs": logprobs.detach().where(inside, torch.zeros_like(logprobs))})


@dataclass(frozen=True, slots=True)
class LossHead:
    """A loss (``LossFunction``), fed with the same log-probabilities.

    Attributes:
        loss_fn: called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and ``next_token_logprobs`` [b, S-1].
        logprobs: makes the log-probabilities.
        normalizers: of the global batch.
    """

    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]]
    logprobs: LogprobHead
    normalizers: Normalizers

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        return self.logprobs.asks(model_input)

    def __call__(self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None) -> HeadOutput:
        logprobs, peaks = self.logprobs.next_token_logprobs(output, model_input, request), []
        if logprobs.requires_grad and logprobs.numel():
            logprobs.register_hook(lambda gradient: peaks.append(gradient.detach().abs().amax()))
        loss, metrics = self.loss_fn(
            model_input.micro_batch.data,
            self.normalizers.valid_sequences,
            self.normalizers.valid_tokens,
            next_token_logprobs=logprobs,
        )
        # a schedule may free the loss's storage after its backward pass, and a metric may be the loss itself
        kept = {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in metrics.items()}
        return HeadOutput(loss=loss, metrics=kept, gradient_peaks=peaks)
