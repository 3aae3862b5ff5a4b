"""Mailbox: what a rank of the policy and the engine's ranks that read its weights tell each other within a
refit.

A publishing rank of the policy keeps it for its lifetime, one a GPU, on a CPU one a host: a socket without a
name in any file system, to which readers connect. The policy tells them where each group of a refit is, which
it knows by its ticket, or why it has given the refit up; they tell it what they have read. It writes a slot
again when all living readers have read what was in it.

Both sides go on whatever happens to the other. A reader that failed, or whose process ended, is waited for no
longer; one that only stands still, until the patience of the policy ends. A policy that failed says why; one
whose process ended is missed by its connection. So after a refit that failed the next one finds no one
waiting.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megarl.errors import RefitError
from megarl.weight_sync.ipc import host_identity
from megarl.weight_sync.line import Line, can_be_read

# Less than any count of groups, so that one comparison tells who is waited for.
_REFUSED = -1
# All engine ranks of a host may connect at once; the kernel cuts it to net.core.somaxconn.
_BACKLOG = 4096


@dataclass(slots=True)
class _Reader:
    """A rank of an engine that has connected.

    Attributes:
        line: to it.
        process: number of its process.
        session: of the engines that it belongs to; None until it has said so.
        ticket, read: the refit that it is in, and how many groups of it it has read; ``_REFUSED`` where it
            reads no more.
        before: the refit that it was in when the present one began.
    """

    line: Line
    process: int = 0
    session: int | None = None
    ticket: int | None = None
    read: int = 0
    before: int | None = None


class Mailbox:
    """The policy's side: one publishing rank.

    Args:
        on_gpu: the weights are in memory of this process's GPU; else any process of the host can read them.
        engine_rank: number, in its engine, of the ranks that the weights are for; None where they are for
            all.
    """

    def __init__(self, *, on_gpu: bool, engine_rank: int | None = None) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        # the kernel chooses a name, which any user of the host sees; the token nobody does
        self._server.bind("")
        self._name, self._token = self._server.getsockname()[1:].decode(), secrets.token_hex(16)
        self._server.listen(_BACKLOG)
        # The policy must never stand still because an engine does.
        self._server.setblocking(False)
        self._on_gpu, self._engine_rank = on_gpu, engine_rank
        self._everybody: list[_Reader] = []
        self.refit: tuple[int, int] | None = None

    def handle(self) -> dict[str, Any]:
        """Handle, of plain types, by which another process finds it."""
        here = {
            "host": host_identity(),
            "process": os.getpid(),
            "on_gpu": self._on_gpu,
            "engine_rank": self._engine_rank,
        }
        return {**here, "name": self._name, "token": self._token}

    def open(self, session: int, ticket: int) -> None:
        """Begin a refit."""
        self._look(0.0)
        self.refit = session, ticket
        # To tell a reader that has not come to this refit yet from one that is through with it.
        for reader in self._everybody:
            reader.before = reader.ticket

    def post(self, index: int, payload: Mapping[str, Any]) -> None:
        """Tell where group ``index`` of the refit is."""
        self._tell({"index": index, "payload": without_bytes(payload)})

    def give_up(self, session: int, ticket: int, reason: str) -> None:
        """Tell the readers of a refit that no more of it comes, and why."""
        if self.refit != (session, ticket):
            self.open(session, ticket)
        self._tell({"given_up": reason})

    def _tell(self, message: Mapping[str, Any]) -> None:
        assert self.refit is not None
        for reader in self._readers():
            if (reader.ticket, reader.read) == (self.refit[1], _REFUSED):
                # it listens again at the next refit
                continue
            try:
                # Every message names its refit: a reader that was interrupted finds those of an earlier one
                # still in its connection.
                reader.line.say({"ticket": self.refit[1], **message})
            except OSError:
                self._drop(reader)

    def has_readers(self) -> bool:
        """Return whether any living rank of the engines of the refit reads here."""
        self._look(0.0)
        return bool(self._readers())

    def wait_until_read(self, count: int, patience: float) -> None:
        """Until every living reader has read ``count`` groups of the refit, refused it, or is in a later one.

        Raises:
            RefitError: one of them has not after ``patience`` seconds.
        """
        ends = time.monotonic() + patience
        self._look(0.0)
        while late := [reader.process for reader in self._readers() if self._is_late(reader, count)]:
            if time.monotonic() >= ends:
                raise RefitError(
                    f"group {count - 1} of the weights was not read by process {', '.join(map(str, late))} "
                    "of an engine within "
                    f"{patience:g} s, so that its buffer cannot be used again: see what keeps the engine, "
                    "and refit anew"
                )
            self._look(ends - time.monotonic())

    def _is_late(self, reader: _Reader, count: int) -> bool:
        assert self.refit is not None
        if reader.ticket == self.refit[1]:
            return _REFUSED < reader.read < count
        # it has not come yet only where it is as it was: else it may have ended this refit and entered the
        # next one
        return count > 0 and reader.ticket == reader.before

    def _readers(self) -> list[_Reader]:
        """Return the living readers of the refit."""
        return [
            reader for reader in self._everybody if self.refit is not None and reader.session == self.refit[0]
        ]

    def _look(self, seconds: float) -> None:
        """Take in readers that come, and what they say, after a wait of ``seconds`` at most."""
        # One wait for all connections and the server: a wait for each in turn would miss who ends meanwhile.
        if not can_be_read(
            (self._server.fileno(), *(reader.line.descriptor for reader in self._everybody)), seconds
        ):
            return
        with contextlib.suppress(BlockingIOError):
            while True:
                self._everybody.append(_Reader(Line(self._server.accept()[0])))
        for reader in list(self._everybody):
            try:
                for message in reader.line.pending():
                    self._hear(reader, message)
            except (OSError, ValueError, TypeError):
                self._drop(reader)

    def _hear(self, reader: _Reader, message: Any) -> None:
        if reader.session is not None:
            reader.ticket, reader.read = message
            return
        token, reader.process, reader.session = message
        # Any user of the host may connect to a name without a file; only the engines were given the token.
        if not secrets.compare_digest(str(token), self._token):
            raise ValueError("another program")

    def _drop(self, reader: _Reader) -> None:
        reader.line.close()
        self._everybody.remove(reader)

    def close(self) -> None:
        """Let go of it."""
        self._server.close()
        for reader in list(self._everybody):
            self._drop(reader)


class MailboxReader:
    """The side of an engine's rank.

    Args:
        handle: of the policy's mailbox.
        session: number of the engines that take part in a refit together.

    Raises:
        RefitError: the mailbox is on another host, or gone.
    """

    def __init__(self, handle: Mapping[str, Any], session: int) -> None:
        if handle["host"] != host_identity():
            raise RefitError(
                "the weights are in the memory of another host or container: to be colocated, engine and "
                "policy need the same"
            )
        self.session, self._policy = session, handle["process"]
        connection = socket.socket(socket.AF_UNIX)
        try:
            # A leading zero byte is Linux's abstract namespace: no file that a crash would leave.
            connection.connect(f"\0{handle['name']}")
            self._line = Line(connection)
            self._line.say([handle["token"], os.getpid(), session])
        except OSError as error:
            connection.close()
            raise RefitError(
                f"the policy's process {self._policy} and its memory are gone ({error}): start a new refit"
            ) from error

    def enter(self, ticket: int) -> None:
        """Take part in a refit from its first group on."""
        self.has_read(ticket, 0)

    def payload(self, ticket: int, index: int, patience: float) -> dict[str, Any]:
        """Return where group ``index`` of a refit is, once the policy has posted it; messages of other refits
        are passed over.

        Raises:
            RefitError: the policy has given the refit up, has ended, or posts nothing for ``patience``
                seconds.
        """
        ends = time.monotonic() + patience
        try:
            while True:
                message = self._line.hear(ends - time.monotonic())
                if message["ticket"] == ticket and "given_up" in message:
                    raise RefitError(f"the policy gave the refit up: {message['given_up']}; refit anew")
                if message["ticket"] == ticket and message["index"] == index:
                    return dict(_with_bytes(message["payload"]))
        except TimeoutError as error:
            raise RefitError(
                f"the policy's process {self._policy} has not posted group {index} of its weights in "
                f"{patience:g} s: refit anew"
            ) from error
        except OSError as error:
            raise RefitError(
                f"the policy's process {self._policy} ended within a refit: start a new policy, and refit "
                "anew"
            ) from error

    def has_read(self, ticket: int, count: int) -> None:
        """This rank needs the first ``count`` groups of a refit no longer."""
        # a policy that is gone is missed where its next group is waited for
        with contextlib.suppress(OSError):
            self._line.say([ticket, count])

    def refuse(self, ticket: int) -> None:
        """This rank reads no more of a refit; the policy does not wait for it."""
        self.has_read(ticket, _REFUSED)

    def close(self) -> None:
        """Let go of it; the policy waits for this reader no longer."""
        self._line.close()


def beside(mailboxes: Mapping[str, Mapping[str, Any]], device: str, engine_rank: int = 0) -> str:
    """Return the device of the policy's rank from which a rank of an engine takes its weights: its own, or on
    a CPU one of its host that is for it.

    Args:
        mailboxes: handles by the identity of the policy rank's device.
        device: identity of the engine rank's device.
        engine_rank: its number in its engine.

    Raises:
        RefitError: there is none.
    """
    for_it = {
        name: handle for name, handle in mailboxes.items() if handle["engine_rank"] in (None, engine_rank)
    }
    # On a GPU memory is handed over within one device; on a CPU every rank of the host can read it.
    if device in for_it:
        return device
    here = (
        name for name, handle in for_it.items() if not handle["on_gpu"] and handle["host"] == host_identity()
    )
    found = next(here, None)
    if found is None:
        devices = ", ".join(sorted(for_it)) or "none"
        raise RefitError(
            f"no rank of the policy shares {device} (they are on {devices}): place both on the same devices"
        )
    return found


def mailbox_for(
    mailboxes: Mapping[str, Mapping[str, Any]], device: str, engine_rank: int = 0
) -> Mapping[str, Any]:
    """Return the mailbox that a rank of an engine reads; see ``beside``."""
    return mailboxes[beside(mailboxes, device, engine_rank)]


def without_bytes(value: Any) -> Any:
    """Plain values with bytes in hexadecimal, as JSON takes them."""
    if isinstance(value, bytes):
        return {"hex": value.hex()}
    return {key: without_bytes(one) for key, one in value.items()} if isinstance(value, Mapping) else value


def _with_bytes(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return (
        bytes.fromhex(value["hex"])
        if value.keys() == {"hex"}
        else {key: _with_bytes(one) for key, one in value.items()}
    )
