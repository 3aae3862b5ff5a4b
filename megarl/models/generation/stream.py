"""Streams of requests: prompts are submitted one by one, and completions are fetched as they arrive.
``generate``, in contrast, processes a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.token_batches import pad_arrays
from megarl.errors import BatchError


# Tuples, because one of each is created per conversation turn, and a frozen dataclass takes five times as
# long to create.
class Request(NamedTuple):
    """A prompt for which a completion is requested.

    Attributes:
        prompt: [P] int64, the prompt's tokens.
        seed: sampling seed; None lets the engine choose one.
        max_new_tokens: maximum number of tokens of the completion, in addition to the configured limits; None
            for the configured limits alone.
        stop_strings: strings that end the completion, in addition to the configured ones; None for the
            configured ones alone.
    """

    prompt: np.ndarray
    seed: int | None = None
    max_new_tokens: int | None = None
    stop_strings: Sequence[str] | None = None


class Completion(NamedTuple):
    """An engine's completion of a prompt.

    Attributes:
        tokens: [n] int64, the sampled tokens, including the stop token.
        logprobs: [n] float32, log-probability of each token at sampling time.
        truncated: True if the completion ended at a length limit rather than at a stop token or string.
        versions: [n] int64, version of the weights that sampled each token, as a number of training steps;
            None if the engine's weights did not change meanwhile.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    versions: np.ndarray | None = None


class RequestStream(Protocol):
    """A stream of requests to engines that are ready to generate. The caller gives each request a number.

    Attributes:
        in_waves: True if ``poll`` completes all waiting requests together. A result may then depend on the
            other waiting requests through rounding. For bitwise equal results, submit the same requests
            before each ``poll``.
    """

    in_waves: bool

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Submit requests, by number."""
        ...

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Return the completions that have arrived since the last call, by request number.

        Args:
            timeout_s: seconds to wait for the first completion; None waits without limit.
        """
        ...

    def abort(self, numbers: Iterable[int]) -> None:
        """Abort requests: no later ``poll`` returns them."""
        ...

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        """Stop requests, and return the partial completion of each. A request that completes meanwhile is
        returned by the next ``poll`` instead."""
        ...


class Generates(Protocol):
    """An object that generates responses for a batch; see ``GenerationInterface.generate``."""

    def generate(self, data: BatchedDataDict[Any], greedy: bool) -> BatchedDataDict[Any]:
        """Generate a response to every prompt."""
        ...


class Waves:
    """A stream over an object with ``generate``. Each ``poll`` is one call for all waiting requests.

    If a call raises, its requests remain waiting, so they can be retried with a new engine.

    Args:
        engine: an engine that is ready to generate.
        pad_token_id: token that pads prompts.
        stop_token_ids: tokens that end a completion.
        greedy: always take the most likely token.
        sampling: overrides the configured temperature, top-p and top-k; None keeps these.
    """

    in_waves = True

    def __init__(
        self,
        engine: Generates,
        pad_token_id: int,
        stop_token_ids: Iterable[int],
        *,
        greedy: bool = False,
        sampling: Mapping[str, Any] | None = None,
    ) -> None:
        self._engine, self._pad, self._stops = engine, pad_token_id, list(stop_token_ids)
        self._greedy, self._sampling = greedy, sampling
        self._waiting: dict[int, Request] = {}

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Keep requests until the next ``poll``."""
        self._waiting.update(requests)

    def abort(self, numbers: Iterable[int]) -> None:
        """Drop waiting requests."""
        for number in numbers:
            self._waiting.pop(number, None)

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        """Drop waiting requests, and return nothing: between polls, no request is partially completed."""
        self.abort(numbers)
        return {}

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Complete all waiting requests, in the order of their numbers.

        Raises:
            BatchError: an output row does not start with its prompt.
        """
        if not self._waiting:
            return {}
        # Sort by number, so that the batch does not depend on the order in which requests were submitted.
        numbers = sorted(self._waiting)
        requests = [self._waiting[number] for number in numbers]
        found = self._completed(requests)
        self._waiting = {}
        return dict(zip(numbers, found, strict=True))

    def _completed(self, requests: Sequence[Request]) -> list[Completion]:
        data = batch_of_requests(requests, self._pad)
        # Pass the argument only if it is set, so that a generator without it can serve callers that need no
        # other distribution.
        options: dict[str, Any] = {} if self._sampling is None else {"sampling": self._sampling}
        output = self._engine.generate(data, greedy=self._greedy, **options)
        _check_continues(output, data["input_ids"], data["input_lengths"])
        return self._completions(output, requests)

    def _completions(
        self, output: Mapping[str, torch.Tensor], requests: Sequence[Request]
    ) -> list[Completion]:
        ids, logprobs = output["output_ids"].numpy(), output["logprobs"].numpy()
        ends = output["unpadded_sequence_lengths"].tolist()
        # Prefer the engine's own ``truncated``, because stop strings are not visible here.
        cut = output["truncated"].tolist() if "truncated" in output else None
        found = []
        for row, (request, end) in enumerate(zip(requests, ends, strict=True)):
            start = len(request.prompt)
            tokens, values = ids[row, start:end], logprobs[row, start:end]
            truncated = (
                bool(cut[row]) if cut is not None else not len(tokens) or int(tokens[-1]) not in self._stops
            )
            most = request.max_new_tokens
            if most is not None and len(tokens) > most:
                # The engine ignored the limit. Truncating the response gives the same tokens as the limit
                # would.
                tokens, values, truncated = tokens[:most], values[:most], True
            found.append(Completion(tokens, values, truncated))
        return found


def batch_of_requests(requests: Sequence[Request], pad_token_id: int) -> BatchedDataDict[Any]:
    """Return the requests as one batch for an engine; a column that no request needs is left out."""
    ids, lengths = pad_arrays([request.prompt for request in requests], pad_token_id)
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
    seeds = [request.seed for request in requests]
    # Use seeds only if all rows have one, because a column of seeds has no value for a row without one.
    if None not in seeds:
        data["sampling_seeds"] = torch.tensor(seeds, dtype=torch.int64)
    bounds = [request.max_new_tokens for request in requests]
    if any(bound is not None for bound in bounds):
        unbounded = np.iinfo(np.int64).max
        most = [unbounded if bound is None else bound for bound in bounds]
        data["max_new_tokens"] = torch.tensor(most, dtype=torch.int64)
    stops = [list(request.stop_strings or ()) for request in requests]
    if any(stops):
        data["stop_strings"] = stops
    return data


def _check_continues(
    output: Mapping[str, torch.Tensor], prompts: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Raise BatchError unless each output row starts with the prompt of the same row."""
    ids, ends, new = output["output_ids"], output["unpadded_sequence_lengths"], output["generation_lengths"]
    width = prompts.shape[1]
    fits = (
        ids.shape[0] == prompts.shape[0] and torch.equal(ends.long(), lengths + new) and ids.shape[1] >= width
    )
    if fits:
        outside = torch.arange(width) >= lengths.unsqueeze(1)
        fits = bool(((ids[:, :width] == prompts) | outside).all())
    if not fits:
        raise BatchError(
            f"generated rows {list(ids.shape)} with {ends.tolist()[:8]} tokens, {new.tolist()[:8]} of them "
            "new, "
            f"do not continue the {prompts.shape[0]} prompts of {lengths.tolist()[:8]} tokens row by row. "
            "Fix: the generator must keep the order of the rows and start each with its prompt"
        )
