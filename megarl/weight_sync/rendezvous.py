"""Rendezvous of the ranks between which weights are sent: a connection of each rank with the policy's first
rank.

Over this connection a rank identifies itself and receives the first rank's verdict. So a wrong world size, a
rank that joins twice or another model is an error on every side within the deadline, and not a collective
that waits indefinitely. At the end of a refit, the ranks exchange their errors over it.

The connection ends with the process on its other side, and so reveals that the process is gone. gloo does not
reveal it in every case: an operation whose peer dies during the transfer waits until its own timeout, on
either side, and neither ``abort`` nor the peer's closed connection ends it (torch 2.13). The first rank
detects every rank that is gone, and leaves then, which all other ranks detect.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import socket
import time
from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megarl.distributed.rendezvous import listening_socket
from megarl.distributed.run_secret import proof, proves
from megarl.errors import RefitError
from megarl.weight_sync.line import Line, can_be_read

HANDSHAKE_SECONDS = 60.0
HEARD_SECONDS = 5.0
_HELLO_SECONDS = 5.0
_OTHER_RUN = "start both sides from one driver, which gives them its secret (MEGARL_RUN_SECRET)"
# Increment this with any change of the messages, because driver, policy and engines may be installed
# separately.
_PROTOCOL = 6


@dataclass(frozen=True, slots=True)
class Members:
    """Numbers of all members: the policy's first rank, the ranks of the engines, and after them the senders
    of later stages.

    Attributes:
        world_size: number of the engines' ranks, plus one.
        stages: pipeline stages of the policy; each has one sender.
    """

    world_size: int
    stages: int

    @property
    def count(self) -> int:
        """Number of all members."""
        return self.world_size + self.stages - 1

    def number(self, rank: int, stage: int) -> int:
        """Return the number of rank ``rank`` (0 for a sender), or of the sender of a later stage."""
        return self.world_size - 1 + stage if stage else rank

    def name(self, number: int) -> str:
        """Return a member's name for messages."""
        return (
            f"rank {number}" if number < self.world_size else f"pipeline stage {number - self.world_size + 1}"
        )

    def objection(self, said: dict[str, Any], own: dict[str, Any], here: Container[int]) -> str:
        """Return why a rank that connected cannot be accepted; empty if it can.

        Args:
            said: the rank's hello.
            own: values that must be equal on both sides.
            here: numbers of the members that have already joined.
        """
        rank, stage = said["rank"], said["stage"]
        name = f"pipeline stage {stage}" if stage else f"rank {rank}"
        # Compare these first: if both sides differ in size or model, every later objection would be a
        # consequence.
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
        """Return the names of missing members."""
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
    """The connections of the policy's first rank with all others, or the connection of another rank with it.

    Args:
        ip, port: address where the policy's first rank listens, and the only one.
        keeps: this is the policy's first rank.
        seconds: timeout until all members have joined.

    Attributes:
        address: ``ip:port``, for messages.
        members: the members, once all have joined.
        store: store at the same address, with which the members create process groups.

    Raises:
        RefitError: the port is not available, or nobody listens there.
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
            message = (
                f"no group for weights at {self.address}: {what} ({error}); choose another port, or "
                "look at the policy"
            )
            raise RefitError(message) from error

    def _connected(self, port: int) -> socket.socket:
        while True:
            try:
                return socket.create_connection((self._ip, port), timeout=self.left())
            except ConnectionRefusedError:
                if time.monotonic() > self._ends:
                    raise
                # The policy may start later.
                time.sleep(0.05)

    def left(self) -> float:
        """Return the seconds until the deadline."""
        return max(0.1, self._ends - time.monotonic())

    def introduce(self, own: dict[str, Any], rank: int, stage: int, buffer_bytes: int) -> dict[str, Any]:
        """Identify this rank, which is not the policy's first, and return the verdict.

        Args:
            own: values that must be equal on both sides.
            rank: rank of an engine; 0 for a sender.
            stage: pipeline stage of a sender.
            buffer_bytes: bytes that a sender has for a transfer buffer.

        Raises:
            RefitError: no verdict arrives in time, or it is a refusal.
        """
        line, challenge = self._lines[0], secrets.token_hex(16)
        # Prove the exact text that was sent, because JSON encoded again elsewhere may differ in order or
        # spaces.
        hello = json.dumps(
            {"protocol": _PROTOCOL, **own, "rank": rank, "stage": stage, "buffer_bytes": buffer_bytes}
        )
        try:
            # The nonce belongs to this connection only, so that a proof from another connection is useless
            # here.
            nonce = str(line.hear(self.left())["nonce"])
            line.say(
                {"hello": hello, "challenge": challenge, "proof": proof("hello", nonce, challenge, hello)}
            )
            said = line.hear(self.left())
            verdict: dict[str, Any] = json.loads(said["verdict"])
            # Believe a refusal without a proof: a process that can send one can keep this rank out anyway.
            if not verdict["error"] and not proves(
                said["proof"], "verdict", nonce, challenge, said["verdict"]
            ):
                verdict["error"] = f"the policy does not prove that it belongs to this run; {_OTHER_RUN}"
            if not verdict["error"]:
                self.store = self._store(verdict["store"])
        except (dist.DistError, OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
            self.close()
            message = (
                f"no group for weights at {self.address}: the policy gave no verdict within "
                f"{self._seconds:g} s ({error})"
            )
            raise RefitError(message) from error
        return self._accepted(verdict, Members(verdict["world_size"], verdict["stages"]))

    def judge(self, own: dict[str, Any], members: Members, terms: dict[str, Any]) -> dict[str, Any]:
        """Admit the expected members as they connect to the policy's first rank, reject every other
        connection, and send the result to all.

        Args:
            own: values that must be equal on both sides.
            members: the members that must join.
            terms: further settings in the result; its ``buffer_bytes`` becomes the minimum over the sending
                ranks.

        Raises:
            RefitError: a rank is missing, joined twice, or expects something else.
        """
        own, verdict = (
            {"protocol": _PROTOCOL, **own},
            {"error": "", "world_size": members.world_size, "stages": members.stages, **terms},
        )
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
                # Another program has connected.
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
                # From now on wait only a few seconds, for the policy's own ranks, which are still coming and
                # must receive the reason.
                verdict["error"], self._ends = error, time.monotonic() + HEARD_SECONDS
            if verdict["error"]:
                missing.difference_update(range(members.world_size))
        if not verdict["error"]:
            # Bind the port here and pass its descriptor on, so that no other program can take the port in
            # between.
            with listening_socket(self._ip, 0) as listener:
                verdict["store"] = listener.getsockname()[1]
                self.store = self._store(verdict["store"], listener.detach())
        text = json.dumps(verdict)
        # Send the verdict to refused members too, so that they do not wait for their deadline.
        for line, nonce, challenge in came:
            with contextlib.suppress(OSError):
                line.say({"verdict": text, "proof": proof("verdict", nonce, challenge, text)})
        self._server.close()
        return self._accepted(verdict, members)

    def _accept(self) -> Line | None:
        """Return the next connection, or None after the deadline."""
        self._server.settimeout(max(0.01, self._ends - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            return Line(self._server.accept()[0])
        return None

    def _store(self, port: int, listener: int | None = None) -> Any:
        """Return a store on the open port ``listener``, which the store closes later, or without a listener
        the store of the policy's first rank. A store that opened its port itself would be reachable by
        everyone who reaches this host."""
        left = datetime.timedelta(seconds=self.left())
        return dist.TCPStore(
            self._ip,
            port,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=left,
            master_listen_fd=listener,
        )

    def _accepted(self, verdict: dict[str, Any], members: Members) -> dict[str, Any]:
        if verdict["error"]:
            self.close()
            raise RefitError(f"no group for weights at {self.address}: {verdict['error']}")
        self.members = members
        return verdict

    def lost(self) -> list[int]:
        """Return the numbers of the members that are gone, among those that have a connection with this
        rank."""
        return sorted(number for number, line in self._lines.items() if line.is_gone())

    def agree(self, refusal: str, seconds: float) -> dict[int, str]:
        """Exchange refusals between all ranks; return the text of each rank that refused, by number.

        Args:
            refusal: this rank's refusal; empty for none.
            seconds: timeout for the other ranks.

        Raises:
            RefitError: a rank is gone, or does not respond; the policy names these ranks.
        """
        ends, absent = time.monotonic() + seconds, f"the policy at {self.address} or another engine"
        try:
            if not self._keeps:
                self._lines[0].say(refusal)
                return {int(number): str(text) for number, text in self._lines[0].hear(seconds)}
            said = {0: refusal}
            # Receive in order of arrival: in order of rank, one slow rank would hide that another is gone.
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
            # Check again after all have answered: a rank that agreed and then died would lack the version
            # that is served.
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
        """Close the connections and the store; the first rank's close ends the rendezvous for all."""
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self.store = None
        if self._keeps:
            self._server.close()


def _proven(came: Any, nonce: str) -> tuple[dict[str, Any] | None, str]:
    """Return a hello, or None if it does not belong to this run, and the challenge with which its verdict
    must be proven."""
    try:
        hello, challenge = str(came["hello"]), str(came["challenge"])
        said: dict[str, Any] = json.loads(hello)
        return (said if proves(came["proof"], "hello", nonce, challenge, hello) else None), challenge
    except (ValueError, KeyError, TypeError):
        return None, ""
