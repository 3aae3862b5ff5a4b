"""Heads, which compute the result of a micro-batch (log-probabilities, values or a loss) from the output of
the output layer. The log-prob pass and all losses use the same log-probabilities.

Shapes: b micro-batch rows of S tokens; n rows of t tokens that enter the model
(``megarl.models.engine.model_input``); V vocabulary columns of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from megarl.algorithms.interfaces import checked_result
from megarl.models.engine.logprobs import TokenScores, VocabularyShard, vocab_parallel_scores
from megarl.models.engine.model_input import ModelInput
from megarl.models.engine.normalizers import Normalizers
from megarl.models.engine.output_layer import Request
from megarl.models.engine.topk import largest_tokens
from megarl.models.generation.sampling import MODEL_ITSELF, SamplingSettings

Metrics = Mapping[str, torch.Tensor | float]
Loss = Callable[..., tuple[torch.Tensor, Metrics]]
"""A ``LossFunction``, of log-probabilities or of values."""


@dataclass(frozen=True, slots=True)
class HeadOutput:
    """Result of a head for one micro-batch.

    Attributes:
        loss: differentiable scalar, this micro-batch's part of the global loss; None without training.
        tensors: per-row results, detached.
        metrics: numbers or 0-d tensors, reduced as the loss declares. They are read after the whole pass, so
            that no micro-batch waits for the device.
        gradient_peaks: filled by the backward pass with 0-d tensors: the largest absolute gradient of the
            loss with respect to each of its inputs (log-probabilities, entropies or values).
    """

    loss: torch.Tensor | None = None
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)
    metrics: Metrics = field(default_factory=dict)
    gradient_peaks: list[torch.Tensor] = field(default_factory=list)


class Head(Protocol):
    """A function from the output of the output layer to the result of a micro-batch."""

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return what the output layer should compute; None for the logits of all positions."""

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """Compute the result of a micro-batch.

        Args:
            output: the output layer's result for ``request``; without a request, this rank's logits [n, t,
                V].
            model_input: the input of the model.
            request: the request from ``asks``; None also if the backend's output layer does not support
                requests.
        """


@dataclass(frozen=True, slots=True)
class LogprobHead:
    """Computes log-probabilities of the batch's own tokens, or only of the tokens in ``ModelInput.scored``.

    Attributes:
        shard: the part of the vocabulary whose logits this rank has.
        sampling: the sampling settings of generation. They determine the distribution that is scored.
        chunk_size: number of positions whose logits exist at a time (``policy.logprob_chunk_size``); None for
            all positions of a micro-batch.
        with_entropies: also compute the entropy of the distribution of each token.
        further: key of an integer tensor [b, S, K] in the micro-batch: more tokens to score at each position.
            The tokens at index i are scored under the distribution of token i+1. None for none.
        largest: number K of most likely tokens to score instead of ``further``; 0 for none.
    """

    shard: VocabularyShard
    sampling: SamplingSettings = MODEL_ITSELF
    chunk_size: int | None = None
    with_entropies: bool = False
    further: str | None = None
    largest: int = 0

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return the request for the tokens to score; None if all tokens are scored at once from the full
        logits."""
        index = model_input.scored
        # Without a request, the output layer runs unpatched, including the kernels that the backend fuses
        # into it.
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
        """Return the further tokens to score, [n x t, K] int64; None on pipeline stages without a loss."""
        rows = None if self.further is None else model_input.micro_batch.data.get(self.further)
        return None if rows is None else model_input.of_tokens(rows).flatten(0, 1).long()

    def next_token_scores(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> TokenScores:
        """Compute scores [b, S-1] float32 (for further tokens [b, S-1, K]). Entry i scores token i+1 given
        the tokens up to i. Tokens that the request excludes are 0."""
        if request is None:
            scores = self._scores_of_logits(output, model_input)
        else:
            scores = request.scores(output).each(lambda values: model_input.spread(values, request.index))
        return scores.each(model_input.to_rows)

    def _scores_of_logits(self, logits: torch.Tensor, model_input: ModelInput) -> TokenScores:
        """Compute the scores [n, t] of all positions. The last position is scored too and dropped later:
        slicing the logits would copy the largest tensor of the pass."""
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
        """Compute the log-probabilities of ``next_token_scores`` alone."""
        return self.next_token_scores(output, model_input, request).logprobs

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """Compute ``logprobs`` [b, S] float32. Column 0, positions beyond ``input_lengths`` and tokens that
        the request excludes are exactly 0."""
        return HeadOutput(
            tensors={
                "logprobs": _with_first_token(
                    self.next_token_logprobs(output, model_input, request), model_input
                )
            }
        )


def _with_first_token(values: torch.Tensor, model_input: ModelInput) -> torch.Tensor:
    """Prepend a zero column to values [b, S-1] of all tokens but the first, and zero all positions beyond
    ``input_lengths``. The result is detached."""
    logprobs = F.pad(values, (1, 0))
    positions = torch.arange(logprobs.shape[1], device=logprobs.device)
    inside = positions[None, :] < model_input.micro_batch.data["input_lengths"][:, None]
    # Use ``where``, not a multiplication: an infinite value in the padding times 0 would be NaN.
    return logprobs.detach().where(inside, torch.zeros_like(logprobs))


@dataclass(frozen=True, slots=True)
class TopkHead:
    """Computes the most likely tokens at each position with their log-probabilities, and the
    log-probabilities of the batch's own tokens.

    Attributes:
        scores: computes all log-probabilities; its ``largest`` is the number of most likely tokens.
    """

    scores: LogprobHead

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return the request of ``scores``."""
        return self.scores.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """Compute ``logprobs`` [b, S] as in ``LogprobHead``, ``topk_logits`` [b, S, K] float32 and
        ``topk_indices`` [b, S, K] int64. Entry i of the latter two describes the distribution of token i+1.
        It is 0 if there is no such token or the request excludes it."""
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
    """Computes a loss (``LossFunction``) from the log-probabilities of a ``LogprobHead``.

    Attributes:
        loss_fn: called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and
            ``next_token_logprobs`` [b, S-1]; with entropies also with ``next_token_entropies`` [b, S-1], and
            with further tokens also with ``scored_logprobs`` [b, S-1, K].
        logprobs: computes the log-probabilities.
        normalizers: normalizers of the global batch.
    """

    loss_fn: Loss
    logprobs: LogprobHead
    normalizers: Normalizers

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return the request of ``logprobs``."""
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
    """Computes the scalar output of a reward or value model (``megarl.models.engine.scoring``) at each
    token."""

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return None: values need all positions."""
        return None

    def values(self, output: torch.Tensor, model_input: ModelInput) -> torch.Tensor:
        """Return the values [b, S] float32. Entry i is the output at token i, which depends on the tokens up
        to i; entries beyond ``input_lengths`` are 0. Differentiable.

        Args:
            output: [n, t, 1]. No temperature applies.
            model_input: the input of the model.
        """
        # Convert to float32: returns and advantages are differences of values, which 16 bits would round too
        # coarsely.
        values = model_input.to_token_rows(output.squeeze(-1).float())
        positions = torch.arange(values.shape[1], device=values.device)
        inside = positions[None, :] < model_input.micro_batch.data["input_lengths"][:, None]
        return values.where(inside, torch.zeros_like(values))

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        """Compute ``values`` [b, S] float32, detached."""
        return HeadOutput(tensors={"values": self.values(output, model_input).detach()})


@dataclass(frozen=True, slots=True)
class ValueLossHead:
    """Computes a loss from the values of a ``ValueHead``.

    Attributes:
        loss_fn: called with ``data``, ``global_valid_seqs``, ``global_valid_toks`` and ``values`` [b, S].
        reads: computes the values.
        normalizers: normalizers of the global batch.
    """

    loss_fn: Loss
    reads: ValueHead
    normalizers: Normalizers

    def asks(self, model_input: ModelInput) -> Request | None:
        """Return the request of ``reads``."""
        return self.reads.asks(model_input)

    def __call__(
        self, output: torch.Tensor, model_input: ModelInput, request: Request | None = None
    ) -> HeadOutput:
        return _loss_of(
            self.loss_fn, model_input, self.normalizers, values=self.reads.values(output, model_input)
        )


def _loss_of(
    loss_fn: Loss,
    model_input: ModelInput,
    normalizers: Normalizers,
    **read: torch.Tensor,
) -> HeadOutput:
    """Compute the loss of a micro-batch. ``read`` are the differentiable inputs of the loss, such as
    ``next_token_logprobs``."""
    peaks: list[torch.Tensor] = []
    for values in read.values():
        if values.requires_grad and values.numel():
            # Autograd does not keep the gradient of a tensor that is not a leaf, so reduce it to one number
            # in a hook.
            values.register_hook(lambda gradient: peaks.append(gradient.detach().abs().amax()))
    given = model_input.micro_batch.data, normalizers.valid_sequences, normalizers.valid_tokens
    loss, metrics = checked_result(loss_fn, loss_fn(*given, **read))
    # Clone metrics. A metric may be the loss tensor itself, whose storage a pipeline schedule may free after
    # the backward pass.
    kept = {
        name: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for name, value in metrics.items()
    }
    return HeadOutput(loss=loss, metrics=kept, gradient_peaks=peaks)
