"""A stream of single requests to engines that run as workers of a cluster. An engine accepts further requests
while it completes others.

An engine's worker is called again and again: a call delivers new requests, lets the engine run for a while,
and returns completions. So one thread serves all engines, and a request waits at most ``TURN_SECONDS`` until
its engine receives it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from megarl.distributed import ray_calls
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.generation.stream import Completion, Request, batch_of_requests

TURN_SECONDS = 0.05
"""Maximum duration of one call in seconds. It returns earlier if a request is completed."""

GATHER_SECONDS = 0.5
"""Duration of one call in seconds if no new requests depend on completions. Longer calls are better then,
because an engine is idle for a few ms between calls."""

# Seconds after which a call without a result is awaited until its deadline.
_PATIENCE_SECONDS = 5.0


class Group(Protocol):
    """The methods of an ``EngineGroup`` that a stream uses."""

    @property
    def engines(self) -> int:
        """Number of engines."""
        ...

    def call_engine(self, method: str, engine: int, **options: Any) -> Any:
        """Call a method of one engine, and return the future."""
        ...

    def results(self, futures: list[Any]) -> list[Any]:
        """Wait for futures and return their results."""
        ...


class EngineStream:
    """A stream of requests to a group of engines.

    Args:
        group: engines that have the current weights.
        check: raises an error for a batch that would make an engine fail.
        pad_token_id: token that pads prompts.
        options: keyword arguments of every call.
        gathers: collect completions for ``GATHER_SECONDS`` per call, because the caller submits no request in
            reaction to a completion.
    """

    in_waves = False

    def __init__(
        self,
        group: Group,
        check: Callable[[BatchedDataDict[Any]], None],
        pad_token_id: int,
        options: Mapping[str, object],
        *,
        gathers: bool = False,
    ) -> None:
        self._group, self._check, self._pad = group, check, pad_token_id
        self._options = {**options, **({"gathers": True} if gathers else {})}
        self._turn_seconds = GATHER_SECONDS if gathers else TURN_SECONDS
        self._new: list[dict[int, Request]] = [{} for _ in range(group.engines)]
        self._open: list[set[int]] = [set() for _ in range(group.engines)]
        self._calls: dict[Any, tuple[int, float]] = {}
        self._arrived: dict[int, Completion] = {}

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Submit requests. All requests with the same number go to the same engine, whose prefix cache
        contains the earlier turns of their conversation."""
        for number, request in requests.items():
            self._new[number % len(self._new)][number] = request

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Return the completions that have arrived; see ``RequestStream.poll``.

        Raises:
            BatchError: a request is invalid.
            WorkerError, DeadlineError: an engine died or hangs.
        """
        until = None if timeout_s is None else time.monotonic() + timeout_s
        found, self._arrived = self._arrived, {}
        while not found:
            self._call()
            if not self._calls:
                break
            left = 1.0 if until is None else max(until - time.monotonic(), 0.0)
            ready, waiting = ray_calls.wait(list(self._calls), 1, left)
            # Take all calls that have returned by now. One at a time would leave the other engines idle.
            if ready and waiting:
                ready += ray_calls.wait(waiting, len(waiting), 0.0)[0]
            # If nothing returned, await calls that seem to hang: at the deadline, this raises an error that
            # names the engine.
            ready = ready or [
                call
                for call, (_, begun) in self._calls.items()
                if time.monotonic() - begun > _PATIENCE_SECONDS
            ]
            for call in ready:
                found |= self._completed(call)
            if until is not None and time.monotonic() >= until:
                break
        return found

    def abort(self, numbers: Iterable[int]) -> None:
        """Abort requests, and wait until their engines have stopped them."""
        given_up = set(numbers)
        self.interrupt(given_up)
        self._arrived = {number: each for number, each in self._arrived.items() if number not in given_up}

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        """Interrupt requests, and return their partial completions; see ``RequestStream.interrupt``."""
        given_up = set(numbers)
        for call in list(self._calls):
            self._arrived |= self._completed(call)
        parts: dict[int, Completion] = {}
        for engine, numbers_of in enumerate(self._open):
            self._new[engine] = {
                number: request for number, request in self._new[engine].items() if number not in given_up
            }
            if numbers_of & given_up:
                parts |= self._completed(self._exchange(engine, {}, sorted(numbers_of & given_up)))
        return parts

    def _call(self) -> None:
        """Call each engine that has requests and is not in a call."""
        # One call per engine at a time, because an engine's worker has one thread.
        busy = {engine for engine, _ in self._calls.values()}
        for engine, new in enumerate(self._new):
            if engine not in busy and (new or self._open[engine]):
                self._exchange(engine, new, [])
                self._new[engine] = {}

    def _exchange(self, engine: int, new: Mapping[int, Request], given_up: list[int]) -> Any:
        numbers = sorted(new)
        data = None
        if new:
            data = batch_of_requests([new[number] for number in numbers], self._pad)
            # Check here, because an engine would die of a prompt that it cannot take.
            self._check(data)
        self._open[engine] = (self._open[engine] | set(numbers)) - set(given_up)
        call = self._group.call_engine(
            "exchange",
            engine,
            numbers=numbers,
            data=data,
            given_up=given_up,
            # A call that aborts requests returns at once, so that the engines are free immediately.
            wait_s=0.0 if given_up else self._turn_seconds,
            **self._options,
        )
        self._calls[call] = engine, time.monotonic()
        return call

    def _completed(self, call: Any) -> dict[int, Completion]:
        """Wait for a call, and return its completions."""
        engine, _ = self._calls.pop(call)
        [answers] = self._group.results([call])
        found = {
            number: Completion(np.asarray(tokens, np.int64), np.asarray(logprobs, np.float32), cut)
            for number, tokens, logprobs, cut in answers
        }
        self._open[engine] -= found.keys()
        return found
