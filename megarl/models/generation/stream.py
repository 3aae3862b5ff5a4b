"""Streams of single requests: prompts are submitted to engines and completions are fetched as they arrive,
whereas ``generate`` processes a batch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.token_batches import pad_arrays
from megarl.errors import BatchError


# These are tuples because one of each is made per turn, and creating a frozen dataclass takes five times as
# long.
class Request(NamedTuple):
    """A prompt to complete.

    Attributes:
        prompt: [P] int64, the prompt's tokens.
        seed: seed of its random numbers; None if the engine may choose them.
        max_new_tokens: maximum tokens of the completion, in addition to the configured limits; None for the
            configured limits alone.
        stop_strings: strings that end the completion, in addition to the configured ones; None for the
            configured ones alone.
    """

    prompt: np.ndarray
    seed: int | None = None
    max_new_tokens: int | None = None
    stop_strings: Sequence[str] | None = None


class Completion(NamedTuple):
    """Response of an engine to a prompt.

    Attributes:
        tokens: [n] int64, the sampled tokens, including the stop token.
        logprobs: [n] float32, log-probability of each token when it was sampled.
        truncated: True if a length limit ended the completion, not a stop.
        versions: [n] int64, number of training steps of the weights that sampled each token; None if the
            engines' weights did not change.
    """

    tokens: np.ndarray
    logprobs: np.ndarray
    truncated: bool
    versions: np.ndarray | None = None


class RequestStream(Protocol):
    """A stream of requests to engines that are ready, by the caller's numbers.

    Attributes:
        in_waves: True if ``poll`` completes all waiting requests together. Then a result depends on the other
            waiting requests, but only by rounding; for bitwise equal results a caller submits the same
            requests before each ``poll``.
    """

    in_waves: bool

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Submit requests."""
        ...

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Return the completions that have arrived since the last call, by the numbers of their requests.

        Args:
            timeout_s: seconds to wait for the first completion; None to wait without limit.
        """
        ...

    def abort(self, numbers: Iterable[int]) -> None:
        """Abort requests: no ``poll`` returns them any more."""
        ...

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        """Interrupt requests and return the partial completion of each. A request that is completed meanwhile
        is not among them; the next ``poll`` returns it."""
        ...


class Generates(Protocol):
    """An object that completes a batch; see ``GenerationInterface.generate``."""

    def generate(self, data: BatchedDataDict[Any], greedy: bool) -> BatchedDataDict[Any]:
        """Complete every prompt."""
        ...


class Waves:
    """A stream to an object with ``generate``: each ``poll`` is one call, for all requests submitted since
    the last one.

    If a call raises, its requests keep waiting, so that they can be retried with a new engine.

    Args:
        engine: an engine that is ready to generate.
        pad_token_id: pads prompts.
        stop_token_ids: tokens that end a completion.
        greedy: always take the most likely token.
        sampling: replaces the configured temperature, top-p and top-k; None keeps the configured ones.
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
        """Keep requests for the next wave."""
        self._waiting.update(requests)

    def abort(self, numbers: Iterable[int]) -> None:
        """Forget requests."""
        for number in numbers:
            self._waiting.pop(number, None)

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        """Forget requests and return no partial completions: a wave is completed as a whole."""
        self.abort(numbers)
        return {}

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Complete the waiting requests, in the order of their numbers.

        Raises:
            BatchError: the generated rows do not continue the prompts row by row.
        """
        if not self._waiting:
            return {}
        # Sort by number, so that a batch does not depend on the order in which requests came.
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

    def _completions(self, output: Mapping[str, Any], requests: Sequence[Request]) -> list[Completion]:
        ids, logprobs = output["output_ids"].numpy(), output["logprobs"].numpy()
        ends = output["unpadded_sequence_lengths"].tolist()
        # Prefer the engine's own answer, because an engine that also stops at texts knows more.
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
                # The engine ignored the bound. Shorten the response, whose beginning does not depend on what
                # follows.
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


def _check_continues(output: Mapping[str, Any], prompts: torch.Tensor, lengths: torch.Tensor) -> None:
    """Raise a BatchError if the rows of an output do not continue the prompts in their order."""
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
