"""Rendezvous of the ranks that weights are sent between: a connection of each of them with the policy's first
rank.

By it a rank says who it is and hears the first rank's verdict, so that a wrong world size, a rank taken twice
or another model is an error on every side within the deadline, and not a collective that waits indefinitely.
At the end of a refit all agree by it on what went wrong.

It ends with the process on its other side, and so tells that it is gone. gloo does not tell in every case: an
operation whose bytes are on their way while its peer dies waits until its own time is over, on either side,
and neither ``abort`` nor the peer's closed connection ends it (torch 2.13). The first rank sees whoever is
gone, and leaves then; by that all others see it.
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
# Raised with any change of the messages: driver, policy and engines may be installed apart.
_PROTOCOL = 6


@dataclass(frozen=True, slots=True)
class Members:
    """Numbers for all that take part: the policy's first rank, the ranks of the engines, and behind them the
    senders of later stages.

    Attributes:
        world_size: ranks of the engines, and one.
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
        """Return why one that came cannot be taken in; empty where it can.

        Args:
            said: its hello.
            own: what both sides have to have alike.
            here: numbers of those that came before.
        """
        rank, stage = said["rank"], said["stage"]
        name = f"pipeline stage {stage}" if stage else f"rank {rank}"
        # First: where both sides differ in size or model, every later objection would be a consequence.
        wrong = [
            f"{key} {said.get(key)!r} for {value!r}" for key, value in own.items() if said.get(key) != value
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
            return f"{name} came twice: give every rank of every engine its own number"
        return ""

    def names(self, numbers: Collection[int]) -> str:
        """Return the names of those that are missing."""
        ranks = [number for number in sorted(numbers) if number < self.world_size]
        said = [f"ranks {ranks} of {self.world_size}"] if ranks else []
        return " and ".join(
            [
                *said,
                *(
                    f"the sender of {self.name(number)}"
                    for number in sorted(numbers)
                    if number >= self.world_size
                ),
            ]
        )


class Rendezvous:
    """The connections of the policy's first rank, or that of another rank with it.

    Args:
        ip, port: where the policy's first rank listens, on this address alone.
        keeps: this is that rank.
        seconds: longest time until all are there.

    Attributes:
        address: ``ip:port``, for messages.
        members: who takes part, once all have met.
        store: by which those who met make process groups, of the same address.

    Raises:
        RefitError: the port cannot be taken, or nobody listens there.
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
                # the policy may come later
                time.sleep(0.05)

    def left(self) -> float:
        """Return seconds until the deadline."""
        return max(0.1, self._ends - time.monotonic())

    def introduce(self, own: dict[str, Any], rank: int, stage: int, buffer_bytes: int) -> dict[str, Any]:
        """All but the policy's first rank: say who this is, and hear the verdict.

        Args:
            own: what both sides have to have alike.
            rank: of an engine; 0 for a sender.
            stage: of a sender.
            buffer_bytes: that a sender has for a transfer buffer.

        Raises:
            RefitError: there is none in time, or it is a refusal.
        """
        line, challenge = self._lines[0], secrets.token_hex(16)
        # Proven as the very text that was sent: JSON made again elsewhere may order or space it otherwise.
        hello = json.dumps(
            {"protocol": _PROTOCOL, **own, "rank": rank, "stage": stage, "buffer_bytes": buffer_bytes}
        )
        try:
            # a word of this connection alone: what was proven on another one is of no use here
            nonce = str(line.hear(self.left())["nonce"])
            line.say(
                {"hello": hello, "challenge": challenge, "proof": proof("hello", nonce, challenge, hello)}
            )
            said = line.hear(self.left())
            verdict: dict[str, Any] = json.loads(said["verdict"])
            # a refusal is believed without a proof: who can write it can keep this rank out anyway
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
        """The policy's first rank: hear everybody as they come, so that who does not belong here is
        refused at once, and tell them.

        Args:
            own: what both sides have to have alike.
            members: who has to come.
            terms: what is to be told; of ``buffer_bytes`` the least that a sender has.

        Raises:
            RefitError: somebody is missing, came twice, or expects something else.
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
                    f"{members.names(missing)} did not come within {self._seconds:g} s; start world_size "
                    "- 1 engine ranks"
                )
                verdict["error"] = verdict["error"] or late
                break
            nonce = secrets.token_hex(16)
            try:
                line.say({"nonce": nonce})
                said, challenge = _proven(line.hear(_HELLO_SECONDS), nonce)
            except (OSError, ValueError):
                # another program
                line.close()
                continue
            came.append((line, nonce, challenge))
            error = f"somebody came who does not prove to belong to this run; {_OTHER_RUN}"
            if said is not None:
                error = members.objection(said, own, self._lines)
            if said is not None and not error:
                number = members.number(said["rank"], said["stage"])
                self._lines[number] = line
                missing.discard(number)
                if said["stage"]:
                    verdict["buffer_bytes"] = min(verdict["buffer_bytes"], said["buffer_bytes"])
            elif not verdict["error"]:
                # the policy's own ranks, which are on their way, have to hear why
                verdict["error"], self._ends = error, time.monotonic() + HEARD_SECONDS
            if verdict["error"]:
                missing = {number for number in missing if number >= members.world_size}
        if not verdict["error"]:
            # The port is bound here and its descriptor handed on, so that no other program can take it in
            # between.
            with listening_socket(self._ip, 0) as listener:
                verdict["store"] = listener.getsockname()[1]
                self.store = self._store(verdict["store"], listener.detach())
        text = json.dumps(verdict)
        # Who was refused hears the verdict too, and so does not wait for its deadline.
        for line, nonce, challenge in came:
            with contextlib.suppress(OSError):
                line.say({"verdict": text, "proof": proof("verdict", nonce, challenge, text)})
        self._server.close()
        return self._accepted(verdict, members)

    def _accept(self) -> Line | None:
        """Return the next connection; None where the time is over."""
        self._server.settimeout(max(0.01, self._ends - time.monotonic()))
        with contextlib.suppress(TimeoutError):
            return Line(self._server.accept()[0])
        return None

    def _store(self, port: int, listener: int | None = None) -> Any:
        """Return the store whose port ``listener`` is, which closes it; without one that of the policy's
        first rank. A store that opens its port itself listens to everybody who reaches this host."""
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
        """Return numbers of the members that are gone, as far as they have a connection with this one."""
        return sorted(number for number, line in self._lines.items() if line.is_gone())

    def agree(self, refusal: str, seconds: float) -> dict[int, str]:
        """Tell all ranks what each of them refused, by number; nothing of those that did not.

        Args:
            refusal: this rank's; empty for none.
            seconds: longest wait for the others.

        Raises:
            RefitError: a rank is gone, or says nothing; the policy names those that did not.
        """
        ends, absent = time.monotonic() + seconds, f"the policy at {self.address} or another engine"
        try:
            if not self._keeps:
                self._lines[0].say(refusal)
                return {int(number): str(text) for number, text in self._lines[0].hear(seconds)}
            said = {0: refusal}
            # In the order in which they come: by number, one slow rank would hide that another is gone.
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
            # Once more after all have spoken: who agreed and then died would be missing from the version that
            # is served.
            if lost := self.lost():
                absent = self.members.names(lost)
                raise ConnectionError("it went away")
            refusals = {number: text for number, text in said.items() if text}
            for number, line in self._lines.items():
                absent = self.members.names([number])
                line.say(list(refusals.items()))
            return refusals
        except (OSError, ValueError) as error:
            raise RefitError(f"the refit ended without {absent}: {error}") from error

    def close(self) -> None:
        """Let go of the connections and the store; with the first rank's it ends for all."""
        for line in self._lines.values():
            line.close()
        self._lines = {}
        self.store = None
        if self._keeps:
            self._server.close()


def _proven(came: Any, nonce: str) -> tuple[dict[str, Any] | None, str]:
    """Return a hello, None where it is not of this run; and what its verdict has to be proven by."""
    try:
        hello, challenge = str(came["hello"]), str(came["challenge"])
        said: dict[str, Any] = json.loads(hello)
        return (said if proves(came["proof"], "hello", nonce, challenge, hello) else None), challenge
    except (ValueError, KeyError, TypeError):
        return None, ""
