"""A stream of requests that several callers share, and that continues after a refit.

A thread drives the engines between ``resume`` and ``pause``. After a pause the engines have no requests, so
they can load weights or run validation. Tokens that were already sampled are kept: when a request continues,
they become part of its prompt, and the engines read them with the new weights.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import cast

import numpy as np

from megarl.errors import MegarlError
from megarl.models.generation.sampling import seed_of
from megarl.models.generation.stream import Completion, Request, RequestStream

# Maximum seconds of a poll, during which new requests wait; also the time to wait for more requests of a
# wave.
_LOOK_SECONDS = 0.05


@dataclass(slots=True)
class _Open:
    """A request that is not completed yet.

    Attributes:
        request: the request as submitted.
        caller: the view of the caller that waits for it.
        number: the caller's number of the request.
        pieces: the tokens sampled so far, one partial completion per version of the weights.
    """

    request: Request
    caller: SharedView
    number: int
    pieces: list[Completion] = field(default_factory=list)

    def add(self, piece: Completion, version: int) -> None:
        """Append tokens that were sampled with weights of ``version``."""
        if len(piece.tokens):
            versions = np.full(len(piece.tokens), version, np.int64)
            self.pieces.append(piece._replace(versions=versions))

    def rest(self, most: int) -> Request:
        """Return a request for the remaining tokens. It gets a new seed, because an engine starts the random
        numbers of each request from the beginning.

        Args:
            most: configured maximum number of tokens of a completion.
        """
        request = self.request
        if not self.pieces:
            return request
        tokens = np.concatenate([request.prompt, *(piece.tokens for piece in self.pieces)])
        done = len(tokens) - len(request.prompt)
        bound = most if request.max_new_tokens is None else min(most, request.max_new_tokens)
        seed = None if request.seed is None else seed_of(f"{request.seed}+{done}")
        return Request(tokens, seed, bound - done, request.stop_strings)

    def completed(self, truncated: bool) -> Completion:
        """Concatenate all partial completions."""
        nothing = Completion(np.zeros(0, np.int64), np.zeros(0, np.float32), truncated, np.zeros(0, np.int64))
        pieces = [nothing, *self.pieces]
        return Completion(
            np.concatenate([piece.tokens for piece in pieces]),
            np.concatenate([piece.logprobs for piece in pieces]),
            truncated,
            np.concatenate([cast("np.ndarray", piece.versions) for piece in pieces]),
        )


class SharedView:
    """One caller's interface to a shared stream; see ``RequestStream``."""

    in_waves = False

    def __init__(self, shared: SharedStream) -> None:
        self._shared = shared
        self.found: dict[int, Completion] = {}

    def submit(self, requests: Mapping[int, Request]) -> None:
        """Submit requests. While the stream is paused, they wait."""
        self._shared.submit(self, requests)

    def poll(self, timeout_s: float | None = None) -> dict[int, Completion]:
        """Return the completions that have arrived; see ``RequestStream.poll``.

        Raises:
            MegarlError: the stream was closed.
        """
        return self._shared.take(self, timeout_s)

    def abort(self, numbers: Iterable[int]) -> None:
        """Drop requests, by number: their responses are not delivered, although the engines may still
        complete them."""
        self._shared.forget(self, set(numbers))

    def interrupt(self, numbers: Iterable[int]) -> dict[int, Completion]:
        """Do nothing and return no completions, because one of several callers must not stop the engines."""
        del numbers
        return {}


class SharedStream:
    """A stream of requests from several callers, each in its own thread, to the same engines.

    Args:
        connect: returns a stream to engines that are ready and have the current weights.
        most_new_tokens: configured maximum number of tokens of a completion.
        stops_at_texts: stop strings are configured. A stop string that spans a pause would be missed, so a
            pause waits until such requests are completed.
        drains: a pause waits for all requests, so that none continues with new weights.
    """

    def __init__(
        self,
        connect: Callable[[], RequestStream],
        most_new_tokens: int,
        *,
        stops_at_texts: bool = False,
        drains: bool = False,
    ) -> None:
        self._connect, self._most = connect, most_new_tokens
        self._stops_at_texts, self._drains = stops_at_texts, drains
        self._changed = threading.Condition()
        self._open: dict[int, _Open] = {}
        # Requests get new numbers here, because those of different callers may be equal.
        self._new: list[int] = []
        self._with_engines: set[int] = set()
        self._next = 0
        self._pausing = self._closed = False
        self._version = 0
        self._busy_s = 0.0
        self._stream: RequestStream | None = None
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def view(self) -> SharedView:
        """Return an interface to the stream for one caller."""
        return SharedView(self)

    def resume(self, version: int) -> None:
        """Connect to the engines and continue all requests.

        Args:
            version: version of the engines' weights, as the number of training steps.
        """
        if self._closed:
            # The stream may have been closed during a pause, if the run ended during validation.
            return
        # Set both before the thread starts, because it reads them.
        self._version, self._pausing = version, False
        self._stream = self._connect()
        self._thread = threading.Thread(target=self._drive, name="shared-requests", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        """True if the engines failed. Nothing is sampled until the next ``resume``."""
        return self._failure is not None

    def pause(self) -> None:
        """Remove all requests from the engines, and keep the tokens sampled so far.

        Raises:
            MegarlError: the engines failed. Tokens of incomplete requests that were sampled since ``resume``
                are lost. ``resume`` with new engines continues from the tokens before that.
        """
        if self._thread is None:
            return
        self._stop()
        self._thread.join()
        self._thread = None
        try:
            if self._failure is not None:
                raise self._failure
            self._take_parts()
        finally:
            with self._changed:
                self._failure = None
                # Queue the interrupted requests again, before new ones and in their original order.
                self._new = sorted(self._with_engines & self._open.keys()) + self._new
                self._with_engines.clear()

    def close(self) -> None:
        """Make all waiting callers raise MegarlError. Requests that run in engines end when the engines
        do."""
        self._closed = True
        self._stop()

    def _stop(self) -> None:
        with self._changed:
            self._pausing = True
            self._changed.notify_all()

    def _take_parts(self) -> None:
        """Interrupt all requests, and store the tokens that they have sampled."""
        assert self._stream is not None
        # Complete these requests first, because an interrupt would stop them too.
        while any(map(self._is_completed_first, self._with_engines)):
            self._deliver(self._stream.poll(_LOOK_SECONDS))
        parts = self._stream.interrupt(sorted(self._with_engines))
        # Deliver requests that were completed during the interrupt.
        self._deliver(self._stream.poll(0.0))
        for number, part in parts.items():
            if number in self._open:
                self._open[number].add(part, self._version)

    def take_busy_seconds(self) -> float:
        """Return the seconds since the last call in which engines had requests. Call this in a pause."""
        found, self._busy_s = self._busy_s, 0.0
        return found

    def submit(self, caller: SharedView, requests: Mapping[int, Request]) -> None:
        """Queue requests of a caller."""
        with self._changed:
            for number, request in requests.items():
                self._open[self._next] = _Open(request, caller, number)
                self._new.append(self._next)
                self._next += 1
            self._changed.notify_all()

    def take(self, caller: SharedView, timeout_s: float | None) -> dict[int, Completion]:
        """Wait for completions of a caller's requests, and return them."""
        with self._changed:
            self._changed.wait_for(lambda: caller.found or self._closed, timeout_s)
            if self._closed:
                raise MegarlError("the run ends, so the responses that are being sampled are not delivered")
            found, caller.found = caller.found, {}
            return found

    def forget(self, caller: SharedView, numbers: set[int]) -> None:
        """Drop some requests of a caller, so that they are not delivered."""
        with self._changed:
            for key, each in list(self._open.items()):
                if each.caller is caller and each.number in numbers:
                    del self._open[key]
            self._new = [key for key in self._new if key in self._open]

    def _is_completed_first(self, number: int) -> bool:
        """Return whether a pause must wait until this request is completed."""
        found = self._open.get(number)
        return found is not None and (
            self._drains or self._stops_at_texts or bool(found.request.stop_strings)
        )

    def _drive(self) -> None:
        assert self._stream is not None
        try:
            while not self._pausing:
                new = self._taken()
                if new:
                    # Before the call, which may raise: a pause must then queue these requests again.
                    self._with_engines |= new.keys()
                    self._stream.submit(new)
                if self._with_engines:
                    begun = time.perf_counter()
                    # A short poll, so that new requests do not wait for long.
                    self._deliver(self._stream.poll(_LOOK_SECONDS))
                    self._busy_s += time.perf_counter() - begun
        except BaseException as error:
            # An error raised in this thread would be lost, so pause() raises it in the caller's thread.
            self._failure = error

    def _taken(self) -> dict[int, Request]:
        """Return the queued requests. If the engines have no request, wait for one."""
        assert self._stream is not None
        with self._changed:
            if not self._with_engines:
                self._changed.wait_for(lambda: self._new or self._pausing)
            if self._stream.in_waves:
                # Wait a moment for more requests: they would otherwise have to wait for the end of this wave.
                known = -1
                while known != len(self._new) and not self._pausing:
                    known = len(self._new)
                    self._changed.wait(_LOOK_SECONDS)
            if self._pausing:
                return {}
            numbers, self._new = self._new, []
            return {number: self._open[number].rest(self._most) for number in numbers}

    def _deliver(self, found: Mapping[int, Completion]) -> None:
        with self._changed:
            for number, piece in found.items():
                self._with_engines.discard(number)
                # None if the caller has aborted the request meanwhile.
                opened = self._open.pop(number, None)
                if opened is not None:
                    opened.add(piece, self._version)
                    opened.caller.found[opened.number] = opened.completed(piece.truncated)
            if found:
                self._changed.notify_all()
