"""Rendezvous of the ranks that weights are sent between: a store that the policy's first rank keeps, and a handshake over it.

Everybody else says who it is and waits for the first rank's verdict, so that a wrong world size, a rank taken twice or another model is an
error on every side within the deadline, and not a collective that waits for ever.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import secrets
import socket
import threading
import time
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megarl.distributed.run_secret import proof, proves
from megarl.errors import RefitError

HANDSHAKE_SECONDS = 60.0
HEARD_SECONDS = 5.0
_OTHER_RUN = "start both sides from one driver, which gives them its secret (MEGARL_RUN_SECRET)"
_PROTOCOL = 5
# ranks that come at once wait there
_BACKLOG = 4096


@dataclass(frozen=True, slots=True)
class Members:
    """Numbers for all that take part: the policy's first rank, the ranks of the engines, and behind them the senders of later stages.

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
        return f"rank {number}" if number < self.world_size else f"pipeline stage {number - self.world_size + 1}"

    def objection(self, said: dict[str, Any], own: dict[str, Any], here: Container[int]) -> str:
        """Why one that came cannot be taken in; empty where it can.

        Args:
            said: its hello.
            own: what both sides have to have alike.
            here: numbers of those that came before.
        """
        rank, stage = said["rank"], said.get("stage", 0)
        name = f"pipeline stage {stage}" if stage else f"rank {rank}"
        wrong = [f"{key} {said.get(key)!r} for {value!r}" for key, value in own.items() if said.get(key) != value]
        if wrong:
            return f"{name} expects {', '.join(wrong)}: give both sides the same"
        if not 0 <= stage < self.stages:
            return f"{name} is outside the {self.stages} stages that the policy's first rank has: give all its ranks one layout"
        if not stage and not 0 < rank < self.world_size:
            return f"{name} is outside the {self.world_size} ranks that the policy expects: number the engines' ranks from 1"
        if self.number(rank, stage) in here:
            return f"{name} came twice: give every rank of every engine its own number"
        return ""

    def absent(self, here: Container[int]) -> str:
        """Return the members that did not come."""
        missing = [number for number in range(1, self.count) if number not in here]
        ranks = [number for number in missing if number < self.world_size]
        said = [f"ranks {ranks} of {self.world_size}"] if ranks else []
        return " and ".join([*said, *(f"the sender of {self.name(number)}" for number in missing if number >= self.world_size)])


class Rendezvous:
    """The store at an address, opened by the policy's first rank and entered by all others.

    Args:
        ip, port: where the policy's first rank listens.
        keeps: this is that rank.
        seconds: longest time until all are there.

    Attributes:
        address: ``ip:port``, for messages.
        store: for what those who met have to tell each other later.

    Raises:
        RefitError: the port cannot be taken, or nobody listens there.
    """

    def __init__(self, ip: str, port: int, *, keeps: bool, seconds: float = HANDSHAKE_SECONDS) -> None:
        self.address = f"{ip}:{port}"
        self._seconds = seconds
        # a word of this meeting alone: what was proven at another one is of no use here
        self._nonce = secrets.token_hex(16)
        self._ends = time.monotonic() + seconds
        try:
            self.store: Any = _store(ip, port, seconds, _listener(ip, port)) if keeps else _answering_store(ip, port, seconds)
            if keeps:
                self.store.set("nonce", self._nonce)
        except (dist.DistError, RuntimeError, OSError) as error:
            what = "the port cannot be taken" if keeps else "the policy does not answer"
            message = f"no group for weights at {self.address}: {what} ({error}); choose another port, or look at the policy"
            raise RefitError(message) from error

    def _said(self, key: str) -> str:
        """What somebody has written, which is waited for."""
        self.store.wait([key], self.left())
        return str(self.store.get(key).decode(errors="replace"))

    def _proven(self, key: str) -> tuple[dict[str, Any] | None, str]:
        """A hello, None where it is not of this run; and what its verdict has to be proven by."""
        try:
            came = json.loads(self._said(key))
            hello, challenge = str(came["hello"]), str(came["challenge"])
            if not proves(came["proof"], "hello", self._nonce, challenge, hello):
                return None, ""
            said: dict[str, Any] = json.loads(hello)
        except (ValueError, KeyError, TypeError):
            return None, ""
        return said, challenge

    def leave(self) -> None:
        """Let go of the store; with the first rank's it ends for all."""
        self.store = None

    def left(self) -> datetime.timedelta:
        """Time until the deadline."""
        return datetime.timedelta(seconds=max(0.1, self._ends - time.monotonic()))

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
        challenge = secrets.token_hex(16)
        hello = json.dumps({"protocol": _PROTOCOL, **own, "rank": rank, "stage": stage, "buffer_bytes": buffer_bytes})
        try:
            nonce = self._said("nonce")
            number = self.store.add("came", 1)
            proven = proof("hello", nonce, challenge, hello)
            self.store.set(f"hello/{number}", json.dumps({"hello": hello, "challenge": challenge, "proof": proven}))
            self.store.wait(["verdict"], self.left())
            text = self.store.get("verdict").decode()
            verdict: dict[str, Any] = json.loads(text)
            for key in [f"heard/{number}", *([f"heard/stage/{stage}"] if stage else [])]:
                self.store.set(key, "")
            members = Members(verdict["world_size"], verdict.get("stages", 1))
            # a refusal is believed without a proof: who can write it can keep this rank out anyway
            if not verdict["error"] and number >= members.count:
                what = f"all {members.world_size} ranks of the policy's group were there"
                verdict["error"] = f"rank {rank} came when {what}: make a new one"
            if not verdict["error"] and not proves(self._said(f"proof/{number}"), "verdict", nonce, challenge, text):
                verdict["error"] = f"the policy does not prove that it belongs to this run; {_OTHER_RUN}"
        except (dist.DistError, RuntimeError, ValueError, KeyError, TypeError) as error:
            raise RefitError(f"no group for weights at {self.address}: the policy gave no verdict within {self._seconds:g} s") from error
        return self._accepted(verdict)

    def judge(self, own: dict[str, Any], members: Members, terms: dict[str, Any]) -> dict[str, Any]:
        """The policy's first rank: hear everybody as they come, so that who does not belong here is refused at once, and tell them.

        Args:
            own: what both sides have to have alike.
            members: who has to come.
            terms: what is to be told; of ``buffer_bytes`` the least that a sender has.

        Raises:
            RefitError: somebody is missing, came twice, or expects something else.
        """
        here: set[int] = set()
        challenges: list[str] = []
        on_their_way = range(1, members.stages)
        error = ""
        terms = dict(terms)
        while not error and len(here) < members.count - 1:
            key = f"hello/{len(here) + 1}"
            try:
                self.store.wait([key], self.left())
            except (dist.DistError, RuntimeError):
                error = f"{members.absent(here)} did not come within {self._seconds:g} s; start world_size - 1 engine ranks"
                on_their_way = range(0)
            else:
                said, challenge = self._proven(key)
                if said is None:
                    error = f"somebody came who does not prove to belong to this run; {_OTHER_RUN}"
                    break
                challenges.append(challenge)
                error = members.objection(said, {"protocol": _PROTOCOL, **own}, here)
                here.add(members.number(said["rank"], said.get("stage", 0)))
                if said.get("stage"):
                    terms["buffer_bytes"] = min(terms["buffer_bytes"], said["buffer_bytes"])
        verdict = {"error": error, "world_size": members.world_size, "stages": members.stages, **terms}
        text = json.dumps(verdict)
        for number, challenge in enumerate(challenges, 1):
            self.store.set(f"proof/{number}", proof("verdict", self._nonce, challenge, text))
        self.store.set("verdict", text)
        if error:
            # the store ends with this rank: who came has to hear why, and so have the policy's own ranks, which are on their way
            with contextlib.suppress(dist.DistError, RuntimeError):
                heard = [f"heard/{number}" for number in range(1, self.store.add("came", 0) + 1)]
                heard += [f"heard/stage/{stage}" for stage in on_their_way]
                self.store.wait(heard, datetime.timedelta(seconds=HEARD_SECONDS))
        return self._accepted(verdict)

    def _accepted(self, verdict: dict[str, Any]) -> dict[str, Any]:
        if verdict["error"]:
            raise RefitError(f"no group for weights at {self.address}: {verdict['error']}")
        return verdict


def _listener(ip: str, port: int) -> int:
    """A descriptor on this address alone; a store that opens its port itself listens to everybody who reaches this host.

    Raises:
        OSError: the port is taken, or this host has no such address.
    """
    family, _, _, _, address = socket.getaddrinfo(ip, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server(address, family=family, backlog=_BACKLOG).detach()


def _store(ip: str, port: int, seconds: float, listener: int | None = None) -> Any:
    """The store whose port ``listener`` is, which closes it; without one that of somebody else."""
    timeout = datetime.timedelta(seconds=seconds)
    return dist.TCPStore(ip, port, is_master=listener is not None, wait_for_workers=False, timeout=timeout, master_listen_fd=listener)


def _answering_store(ip: str, port: int, seconds: float) -> Any:
    """The store that somebody else keeps.

    Another program that has the port and says nothing would be waited for without an end: the store's own timeout counts until it is
    connected. So a thread enters it, which is left to such a program.

    Raises:
        RuntimeError: nobody answers in time, or it is no store.
    """
    found: list[Any] = []

    def enter() -> None:
        try:
            found.append(_store(ip, port, seconds))
        except (dist.DistError, RuntimeError) as error:
            found.append(error)

    thread = threading.Thread(target=enter, name=f"store-of-{ip}:{port}", daemon=True)
    thread.start()
    thread.join(seconds)
    if not found:
        raise RuntimeError(f"no store has answered within {seconds:g} s")
    if isinstance(found[0], Exception):
        raise found[0]
    return found[0]
