"""Rendezvous of the ranks that exchange weights: each rank has a connection to the policy's rank 0.

Over it a rank identifies itself and receives rank 0's decision. A wrong world size, a rank that joins twice,
or another model is then an error on every side within the deadline, instead of a collective that hangs. At
the end of a refit, ranks exchange their errors over it.

The connection also reveals that a process is gone. gloo does not always do so: an operation whose peer dies
during a transfer waits for its own timeout, on either side, and neither ``abort`` nor the peer's closed
connection ends it (torch 2.13). Rank 0 detects every lost rank and then leaves, which all other ranks detect.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import socket
import time
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import torch.distributed as dist

from megarl.distributed.rendezvous import listening_socket
from megarl.distributed.run_secret import proof, proves
from megarl.errors import RefitError
from megarl.weight_sync.line import Line, can_be_read

HANDSHAKE_SECONDS = 60.0
HEARD_SECONDS = 5.0
_HELLO_SECONDS = 5.0
_OTHER_RUN = "start both sides from one driver, which gives them its secret (MEGARL_RUN_SECRET)"
# Increment this with any change of the messages, because driver, policy and engines may run different
# versions.
PROTOCOL = 6


class Terms(TypedDict):
    """Values that must be equal on a rank and on the policy's rank 0; ``manifest`` is its digest."""

    protocol: int
    world_size: int
    manifest: str
    device: str


class Hello(Terms):
    """Message of a connecting rank."""

    rank: int
    stage: int
    buffer_bytes: int


class Verdict(TypedDict):
    """Decision of the policy's rank 0; ``store`` is the port of the torch store, unless there is an error."""

    error: str
    world_size: int
    stages: int
    buffer_bytes: int
    runs: Sequence[tuple[int, int]]
    store: NotRequired[int]


@dataclass(frozen=True, slots=True)
class Members:
    """Numbering of the members: 0 is the policy's rank 0, then come the engine ranks, then the senders of
    later pipeline stages.

    Attributes:
        world_size: number of engine ranks, plus one.
        stages: number of the policy's pipeline stages; each has one sender.
    """

    world_size: int
    stages: int

    @property
    def count(self) -> int:
        """Number of all members."""
        return self.world_size + self.stages - 1

    def number(self, rank: int, stage: int) -> int:
        """Return the member number of an engine rank (``stage`` 0), or of the sender of a later stage. The
        sender of stage 0 has rank 0."""
        return self.world_size - 1 + stage if stage else rank

    def name(self, number: int) -> str:
        """Return a member's name for messages."""
        return (
            f"rank {number}" if number < self.world_size else f"pipeline stage {number - self.world_size + 1}"
        )

    def objection(self, said: Hello, own: Terms, here: Container[int]) -> str:
        """Return why a connecting rank is rejected; empty if it is accepted.

        Args:
            said: the rank's hello message.
            own: values that must be equal on both sides.
            here: numbers of the members that have already joined.
        """
        rank, stage = said["rank"], said["stage"]
        name = f"pipeline stage {stage}" if stage else f"rank {rank}"
        # Compare these first: if size or model differs, later objections would only be consequences.
        wrong = [
            f"{key} {said.get(key)!r} instead of {value!r}"
            for key, value in own.items()
            if said.get(key) != value
        ]
        if wrong:
            return f"{name} expects {', '.join(wrong)}: give both sides the same"
        if not 0 <= stage < self.stages:
            return (
                f"{name} is outside the {self.stages} stages that the policy's first rank has: give all "
                "its ranks one layout"
            )
        if not stage and not 0 < rank < self.world_size:
            return (
                f"{name} is outside the {self.world_size} ranks that the policy expects: number the "
                "engines' ranks from 1"
            )
        if self.number(rank, stage) in here:
            return f"{name} connected twice: give every rank of every engine its own number"
        return ""

    def names(self, numbers: Collection[int]) -> str:
        """Return the names of several members for messages."""
        ranks, missing = [], []
        for number in sorted(numbers):
            if number < self.world_size:
                ranks.append(number)
            else:
                missing.append(f"the sender of {self.name(number)}")
        if ranks:
            missing.insert(0, f"ranks {ranks} of {self.world_size}")
        return " and ".join(missing)


class Rendezvous:
    """On the policy's rank 0, the connections to all other ranks; on any other rank, its connection to rank
    0.

    Args:
        ip, port: address at which rank 0 listens.
        keeps: this is the policy's rank 0.
        seconds: timeout until all members have joined.

    Attributes:
        address: ``ip:port``, for messages.
        members: the members, once all have joined.
        store: torch store at the same IP address, with which the members create process groups.

    Raises:
        RefitError: the port cannot be bound, or nobody listens there.
    """

    members: Members
    store: Any = None

    def __init__(self, ip: str, port: int, *, keeps: bool, seconds: float = HANDSHAKE_SECONDS) -> None:
        self.address = f"{ip}:{port}"
        self._ip, self._seconds, self._keeps = ip, seconds, keeps
        self._ends = time.monotonic() + seconds
        self._lines: dict[int, Line] = {}
        try:
            if keeps:
                self._server = listening_socket(ip, port)
            else:
                self._lines[0] = Line(self._connected(port))
        except OSError as error:
            what = "the port cannot be taken" if keeps else "the policy does not answer"
            raise RefitError(
                f"no group for weights at {self.address}: {what} ({error}); choose another port, or "
                "look at the policy"
            ) from error

    def _connected(self, port: int) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self._ip, port), timeout=self.left())
            except ConnectionRefusedError:
                if time.monotonic() > self._ends:
                    raise
                # Retry, because the policy may start later.
                time.sleep(0.05)

    def left(self) -> float:
        """Return the seconds until the deadline, at least 0.1."""
        return max(0.1, self._ends - time.monotonic())

    def introduce(self, own: Terms, rank: int, stage: int, buffer_bytes: int) -> Verdict:
        """Identify this rank to the policy's rank 0 and return its decision.

        Args:
            own: values that must be equal on both sides.
            rank: engine rank; 0 for a sender.
            stage: pipeline stage of a sender.
            buffer_bytes: bytes that a sender has for a transfer buffer.

        Raises:
            RefitError: no decision arrived in time, or rank 0 rejected this rank or another.
        """
        line, challenge = self._lines[0], secrets.token_hex(16)
        # The proof covers the exact text, because re-encoded JSON may differ in order or spaces.
        message: Hello = {**own, "rank": rank, "stage": stage, "buffer_bytes": buffer_bytes}
        hello = json.dumps(message)
        try:
            # The nonce belongs to this connection, so a proof from another connection is useless here.
            nonce = str(line.hear(self.left())["nonce"])
            line.say(
                {"hello": hello, "challenge": challenge, "proof": proof("hello", nonce, challenge, hello)}
            )
            said = line.hear(self.left())
            verdict: Verdict = json.loads(said["verdict"])
            # Accept a rejection without proof: a process that can send one can keep this rank out anyway.
            if not verdict["error"] and not proves(
                said["proof"], "verdict", nonce, challenge, said["verdict"]
            ):
                verdict["error"] = f"the policy does not prove that it belongs to this run; {_OTHER_RUN}"
            if not verdict["error"]:
                self.store = self._store(verdict["store"])
        except (dist.DistError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise RefitError(
                f"no group for weights at {self.address}: the policy gave no verdict within "
                f"{self._seconds:g} s ({error})"
            ) from error
        return self._accepted(verdict, Members(verdict["world_size"], verdict["stages"]))

    def judge(
        self, own: Terms, members: Members, buffer_bytes: int, runs: Sequence[tuple[int, int]]
    ) -> Verdict:
        """On the policy's rank 0, accept the expected members as they connect, reject other connections, and
        send the decision to all.

        Args:
            own: values that must be equal on both sides.
            members: the members that must join.
            buffer_bytes: bytes of this rank's transfer buffer; the decision has the minimum over the senders.
            runs: the consecutive tensors of each stage, see ``Stages``.

        Returns:
            The decision, as every member receives it.

        Raises:
            RefitError: a rank is missing, joined twice, or has other parameters.
        """
        verdict: Verdict = {
            "error": "",
            "world_size": members.world_size,
            "stages": members.stages,
            "buffer_bytes": buffer_bytes,
            "runs": runs,
        }
        missing = set(range(1, members.count))
        came: list[tuple[Line, str, str]] = []
        while missing:
            line = self._accept()
            if line is None:
                late = (
                    f"{members.names(missing)} did not connect within {self._seconds:g} s; start "
                    "world_size - 1 engine ranks"
                )
                verdict["error"] = verdict["error"] or late
                break
            nonce = secrets.token_hex(16)
            try:
                line.say({"nonce": nonce})
                said, challenge = _proven(line.hear(_HELLO_SECONDS), nonce)
            except (OSError, ValueError):
                # A program that is not megarl has connected.
                line.close()
                continue
            came.append((line, nonce, challenge))
            error = f"a process connected that cannot prove to belong to this run; {_OTHER_RUN}"
            if said is not None:
                error = members.objection(said, own, self._lines)
            if said is not None and not error:
                number = members.number(said["rank"], said["stage"])
                self._lines[number] = line
                missing.discard(number)
                if said["stage"]:
                    verdict["buffer_bytes"] = min(verdict["buffer_bytes"], said["buffer_bytes"])
            elif not verdict["error"]:
                # From now on wait only a few seconds, for policy ranks that are still connecting and must
                # receive the reason.
                verdict["error"], self._ends = error, time.monotonic() + HEARD_SECONDS
            if verdict["error"]:
                missing.difference_update(range(members.world_size))
        if not verdict["error"]:
            # Bind the port here and pass on its descriptor, so that no other program can take the port in
            # between.
            with listening_socket(self._ip, 0) as listener:
                verdict["store"] = listener.getsockname()[1]
                self.store = self._store(verdict["store"], listener.detach())
        text = json.dumps(verdict)
        # Send the decision to rejected members too, so that they do not wait for their deadline.
        for line, nonce, challenge in came:
            with contextlib.suppress(OSError):
                line.say({"verdict": text, "proof": proof("verdict", nonce, challenge, text)})
        self._server.close()
        return self._accepted(verdict, members)

    def _accept(self) -> Line | None:
        """Return the next connection, or None at the deadline."""
        self._server.settimeout(max(0.01, self._ends - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            return Line(self._server.accept()[0])
        return None

    def _store(self, port: int, listener: int | None = None) -> Any:
        """Return a store that serves the bound port ``listener`` (which it closes later), or without
        ``listener`` a client of rank 0's store.

        A store that binds its port itself would listen on all interfaces of this host.
        """
        left = datetime.timedelta(seconds=self.left())
        return dist.TCPStore(
            self._ip,
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=left,
            master_listen_fd=listener,
        )

    def _accepted(self, verdict: Verdict, members: Members) -> Verdict:
        if verdict["error"]:
            self.close()
            raise RefitError(f"no group for weights at {self.address}: {verdict['error']}")
        self.members = members
        return verdict

    def lost(self) -> list[int]:
        """Return the numbers of the members whose connection to this rank has ended."""
        return sorted(number for number, line in self._lines.items() if line.is_gone())

    def agree(self, refusal: str, seconds: float) -> dict[int, str]:
        """Exchange failure messages between all ranks; return the messages of the ranks that failed, by
        member number.

        Args:
            refusal: this rank's failure; empty for none.
            seconds: timeout for the other ranks.

        Raises:
            RefitError: a rank is gone or does not respond; on the policy the message names it.
        """
        ends, absent = time.monotonic() + seconds, f"the policy at {self.address} or another engine"
        try:
            if not self._keeps:
                self._lines[0].say(refusal)
                return {int(number): str(text) for number, text in self._lines[0].hear(seconds)}
            said = {0: refusal}
            # Receive in order of arrival: in rank order, a slow rank would hide that another is gone.
            while waiting := [number for number in self._lines if number not in said]:
                absent = self.members.names(waiting)
                if not can_be_read(
                    (self._lines[number].descriptor for number in waiting), ends - time.monotonic()
                ):
                    raise TimeoutError(f"nothing came within {seconds:g} s")
                for number in waiting:
                    absent = self.members.names([number])
                    for message in self._lines[number].pending():
                        said[number] = str(message)
            # Check again after all have replied: a rank that agreed and then died would lack the version that
            # the others serve.
            if lost := self.lost():
                absent = self.members.names(lost)
                raise ConnectionError("it disconnected")
            refusals = {number: text for number, text in said.items() if text}
            for number, line in self._lines.items():
                absent = self.members.names([number])
                line.say(list(refusals.items()))
            return refusals
        except (OSError, ValueError) as error:
            raise RefitError(f"the refit ended without {absent}: {error}") from error

    def close(self) -> None:
        """Close the connections and the store. If rank 0 closes, the rendezvous ends for all."""
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self.store = None
        if self._keeps:
            self._server.close()


def _proven(came: Any, nonce: str) -> tuple[Hello | None, str]:
    """Return a rank's hello message (None if it does not prove that it belongs to this run) and its
    challenge, which the reply must prove."""
    try:
        hello, challenge = str(came["hello"]), str(came["challenge"])
        said: Hello = json.loads(hello)
        return (said if proves(came["proof"], "hello", nonce, challenge, hello) else None), challenge
    except (ValueError, KeyError, TypeError):
        return None, ""
