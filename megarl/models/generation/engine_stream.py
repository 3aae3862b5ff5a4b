"""Single requests to engines that are workers of a cluster: an engine accepts further requests while it
completes others.

An engine's worker is called repeatedly with the new requests, works for a while, and returns the completed
ones. So one thread drives all engines, and a prompt waits at most ``TURN_SECONDS`` until its engine receives
it.
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
"""Maximum seconds of one call, if nothing is completed earlier; then the engine receives further requests."""

GATHER_SECONDS = 0.5
"""Seconds between fetches of completions if no new requests depend on them. An engine is idle for a few ms
between calls."""

# Seconds after which an outstanding call is awaited alone, until its deadline.
_PATIENCE_SECONDS = 5.0


class Group(Protocol):
    """The methods of a group of engines that a stream calls; see
    ``megarl.models.generation.engine_group.EngineGroup``."""

    @property
    def engines(self) -> int:
        """Number of engines."""
        ...

    def call_engine(self, method: str, engine: int, **options: Any) -> Any:
        """Call one engine and return the future."""
        ...

    def results(self, futures: list[Any]) -> list[Any]:
        """Wait for futures and return their results."""
        ...


class EngineStream:
    """A stream of requests to a group of engines.

    Args:
        group: engines that have the newest weights.
        check: raises an error for a batch on which an engine would fail.
        pad_token_id: pads prompts.
        options: options of every call.
        gathers: fetch completions together every ``GATHER_SECONDS``, because no request follows a completion.
    """

    in_waves = False

    def __init__(
        self,
        group: Group,
        check: Callable[[BatchedDataDict[Any]], None],
        pad_token_id: int,
        options: Mapping[str, Any],
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
        """Submit requests. Requests of one number go to the same engine, whose cache holds the beginning of
        their conversation."""
        for number, request in requests.items():
            self._new[number % len(self._new)][number] = request

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Return the completions that have arrived; see ``RequestStream``.

        Raises:
            BatchError: a request cannot be used.
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
            # Take all calls that are ready by now: returning them one at a time would leave the other engines
            # idle.
            if ready and waiting:
                ready += ray_calls.wait(waiting, len(waiting), 0.0)[0]
            # Await a call that hangs until its deadline, whose error names the engine.
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
        """Interrupt requests and return their partial completions; see ``RequestStream.interrupt``."""
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
        """Call each engine that has requests and no call in progress."""
        # Make one call per engine at a time, because an engine's worker has one thread.
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
            # Do not wait when requests are given up, because the engines must be free at once.
            wait_s=0.0 if given_up else self._turn_seconds,
            **self._options,
        )
        self._calls[call] = engine, time.monotonic()
        return call

    def _completed(self, call: Any) -> dict[int, Completion]:
        """Wait for a call and return the completions in its result."""
        engine, _ = self._calls.pop(call)
        [answers] = self._group.results([call])
        found = {
            number: Completion(np.asarray(tokens, np.int64), np.asarray(logprobs, np.float32), cut)
            for number, tokens, logprobs, cut in answers
        }
        self._open[engine] -= found.keys()
        return found
