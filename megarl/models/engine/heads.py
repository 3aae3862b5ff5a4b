"""Heads: what is computed from what the output layer gives for a micro-batch. The same log-probabilities
serve the log-prob pass and every loss.

Legend: b micro-batch rows, S their length; n rows and t tokens in front of the model
(``megarl.models.engine.model_input``), V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megarl.models.engine.logprobs import TokenScores, VocabularyShard, vocab_parallel_scores
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.normalizers import Normalizers
from megarl.models.engine.output_layer import Request
from megarl.models.engine.topk import largest_tokens
from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Result of one micro-batch.

    Attributes:
        loss: differentiable scalar, this micro-batch's share of the global loss; None where nothing is
            trained.
        tensors: per-row results, detached.
        metrics: numbers or 0-d tensors, to be reduced as the loss declares; read only after the pass, so that
            no micro-batch waits for the device.
        gradient_peaks: once the backward pass is through, the largest absolute entries of the loss's
            gradients by what it reads: the log-probabilities and perhaps the entropies, or the values; 0-d
            each.
    """

    loss: torch.Tensor | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    gradient_peaks: list[torch.Tensor] = field(default_factory=list)


class Head(Protocol):
    """Turns the output layer's answer for a micro-batch into a result."""

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return the request to the output layer; None for the logits of all positions."""

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """The result.

        Args:
            output: what the output layer answered to ``request``: without one the shard of logits [n, t, V].
            model_input: what went in.
            request: as ``asks`` gave it; None also where the output layer answers none.
        """


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Log-probabilities of the tokens that are there, or of those of them that the micro-batch wants
    (``ModelInput.scored``).

    Attributes:
        shard: which vocabulary columns this rank holds.
        sampling: how tokens are sampled in generation, and so scored here.
        chunk_size: positions whose logits are there at a time (``policy.logprob_chunk_size``); None for all
            of a micro-batch.
        with_entropies: make the entropies of the distributions that the tokens count as sampled from, too.
        further: key of a micro-batch [b, S, K] of integers: tokens whose log-probabilities are made too,
            entry i by the distribution that token i+1 is sampled from; None for none.
        largest: make those of this many of the most likely tokens instead; 0 for none.
    """

    shard: VocabularyShard
    sampling: SamplingSettings = MODEL_ITSELF
    chunk_size: int | None = None
    with_entropies: bool = False
    further: str | None = None
    largest: int = 0

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        index = model_input.scored
        # Without a request the product stays the backend's own, with whatever it fuses.
        if index is None and self.chunk_size is None:
            return None
        targets, further = model_input.targets.flatten(), self._further(model_input)
        if index is not None:
            targets = targets.index_select(0, index)
            further = None if further is None else further.index_select(0, index)
        return Request(
            index,
            targets,
            self.shard,
            self.sampling,
            self.chunk_size,
            self.with_entropies,
            further,
            self.largest,
        )

    def _further(self, model_input: ModelInput) -> torch.Tensor | None:
        """Return the further tokens to score, [n x t, K] int64; None on pipeline stages that compute no
        loss."""
        rows = None if self.further is None else model_input.micro_batch.data.get(self.further)
        return None if rows is None else model_input.of_tokens(rows).flatten(0, 1).long()

    def next_token_scores(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> TokenScores:
        """[b, S-1] float32: entry i is of token i+1 given tokens up to i; 0 where the request leaves it out.
        Of further tokens [b, S-1, K]."""
        if request is None:
            scores = self._scores_of_logits(output, model_input)
        else:
            scores = request.scores(output).each(lambda values: model_input.spread(values, request.index))
        return scores.each(model_input.to_rows)

    def _scores_of_logits(self, logits: torch.Tensor, model_input: ModelInput) -> TokenScores:
        """[n, t] of all positions: every one has a target, also a last one; cutting the logits instead would
        copy the largest tensor there is."""
        targets, further = model_input.targets, self._further(model_input)
        if self.largest:
            further = largest_tokens(logits.detach().flatten(0, 1), self.shard, self.largest)
        further = None if further is None else further.view(*targets.shape, -1)
        given = (logits, targets, self.shard, self.sampling)
        scores = vocab_parallel_scores(
            *given, overwrite=True, with_entropies=self.with_entropies, further=further
        )
        return replace(scores, largest=further) if self.largest else scores

    def next_token_logprobs(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> torch.Tensor:
        """The log-probabilities of ``next_token_scores``."""
        return self.next_token_scores(output, model_input, request).logprobs

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """``logprobs`` [b, S] float32: column 0, everything beyond ``input_lengths`` and what the request
        leaves out exactly 0."""
        return HeadOutput(
            tensors={
                "logprobs": _with_first_token(
                    self.next_token_logprobs(output, model_input, request), model_input
                )
            }
        )


def _with_first_token(values: torch.Tensor, model_input: ModelInput) -> torch.Tensor:
    """[b, S] from [b, S-1] of the tokens but the first, detached; column 0 and everything beyond
    ``input_lengths`` exactly 0."""
    logprobs = F.pad(values, (1, 0))
    positions = torch.arange(logprobs.shape[1], device=logprobs.device)
    inside = positions[None, :] < model_input.micro_batch.data["input_lengths"][:, None]
    # where and no product: an infinite value behind the end times 0 would be NaN.
    return logprobs.detach().where(inside, torch.zeros_like(logprobs))


@dataclass(frozen=True, slots=True)
class TopkHead:
    """The most likely tokens at each position, with their log-probabilities, and those of the tokens that
    are there.

    Attributes:
        scores: makes them; its ``largest`` is how many.
    """

    scores: LogprobHead

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        return self.scores.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """``logprobs`` [b, S] as of ``LogprobHead``; ``topk_logits`` [b, S, K] float32 and ``topk_indices``
        [b, S, K] int64, entry i of the distribution of token i+1: 0 where there is no such token, or the
        request leaves it out."""
        found = self.scores.next_token_scores(output, model_input, request)
        assert found.further is not None and found.largest is not None, (
            "the most likely tokens were not asked for"
        )
        followed = torch.arange(1, found.logprobs.shape[1] + 1, device=found.logprobs.device)
        inside = (followed[None, :] < model_input.micro_batch.data["input_lengths"][:, None])[..., None]

        def of_positions(values: torch.Tensor) -> torch.Tensor:
            return F.pad(values.detach().where(inside, torch.zeros_like(values)), (0, 0, 0, 1))

        tensors = {"topk_logits": of_positions(found.further), "topk_indices": of_positions(found.largest)}
        return HeadOutput(tensors={"logprobs": _with_first_token(found.logprobs, model_input), **tensors})


@dataclass(frozen=True, slots=True)
class LossHead:
    """A loss (``LossFunction``), fed with the same log-probabilities.

    Attributes:
        loss_fn: called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and
            ``next_token_logprobs`` [b, S-1]; where the log-probabilities come with entropies, with
            ``next_token_entropies`` [b, S-1] too, and where they come with those of further tokens, with
            ``scored_logprobs`` [b, S-1, K].
        logprobs: makes the log-probabilities.
        normalizers: of the global batch.
    """

    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]]
    logprobs: LogprobHead
    normalizers: Normalizers

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        return self.logprobs.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        scores = self.logprobs.next_token_scores(output, model_input, request)
        given = {"next_token_logprobs": scores.logprobs}
        if scores.entropies is not None:
            given["next_token_entropies"] = scores.entropies
        if scores.further is not None:
            given["scored_logprobs"] = scores.further
        return _loss_of(self.loss_fn, model_input, self.normalizers, **given)


@dataclass(frozen=True, slots=True)
class ValueHead:
    """Values of tokens, from a model that scores (``megarl.models.engine.scoring``): what its one output says
    at each token."""

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        return None

    def values(self, output: torch.Tensor, model_input: ModelInput) -> torch.Tensor:
        """[b, S] float32: entry i is the output at token i, from all tokens up to it; 0 beyond
        ``input_lengths``. Differentiable.

        Args:
            output: [n, t, 1]; temperatures are of no concern here.
            model_input: what went in.
        """
        # float32: a 16-bit value would round returns and advantages, which are differences of values.
        values = model_input.to_token_rows(output.squeeze(-1).float())
        positions = torch.arange(values.shape[1], device=values.device)
        inside = positions[None, :] < model_input.micro_batch.data["input_lengths"][:, None]
        return values.where(inside, torch.zeros_like(values))

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """``values`` [b, S] float32."""
        return HeadOutput(tensors={"values": self.values(output, model_input).detach()})


@dataclass(frozen=True, slots=True)
class ValueLossHead:
    """A loss of values, fed with the same values.

    Attributes:
        loss_fn: called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and ``values`` [b, S].
        reads: makes the values.
        normalizers: of the global batch.
    """

    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]]
    reads: ValueHead
    normalizers: Normalizers

    def asks(self, model_input: ModelInput) -> Request | None:
        """See ``Head``."""
        return self.reads.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        return _loss_of(
            self.loss_fn, model_input, self.normalizers, values=self.reads.values(output, model_input)
        )


def _loss_of(
    loss_fn: Callable[..., tuple[torch.Tensor, Mapping[str, Any]]],
    model_input: ModelInput,
    normalizers: Normalizers,
    **read: torch.Tensor,
) -> HeadOutput:
    """The loss of a micro-batch; ``read`` is what it is called with besides the data and the normalisers."""
    peaks: list[torch.Tensor] = []
    for values in read.values():
        if values.requires_grad and values.numel():
            # A hook, because the gradient of a tensor that is no leaf is not kept; the peak is one number,
            # read after the pass.
            values.register_hook(lambda gradient: peaks.append(gradient.detach().abs().amax()))
    loss, metrics = loss_fn(
        model_input.micro_batch.data, normalizers.valid_sequences, normalizers.valid_tokens, **read
    )
    # a schedule may free the loss's storage after its backward pass, and a metric may be the loss itself
    kept = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
    }
    return HeadOutput(loss=loss, metrics=kept, gradient_peaks=peaks)
