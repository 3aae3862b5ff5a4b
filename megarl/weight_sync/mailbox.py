"""Messages during a colocated refit between a policy rank and the engine ranks that read its weights.

A publishing policy rank keeps one mailbox for its lifetime: each rank on GPUs, one rank per host on a CPU.
The mailbox is a Unix socket without a file, to which readers connect. For each group of tensors in a refit
the policy sends the location of its data, or the reason why it aborted the refit; readers report how many
groups they have read. Every message carries the id of its refit (``ticket``). The policy overwrites a buffer
slot once all living readers have read it.

A failure on one side does not block the other. The policy stops waiting for a reader that failed or whose
process ended, and waits for a hanging reader until a timeout. A failed policy sends the reason; if its
process ended, the connection shows it. So after a failed refit nobody is still waiting when the next one
begins.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypedDict

from megarl.errors import RefitError
from megarl.weight_sync.ipc import BufferHandle, host_identity
from megarl.weight_sync.line import Line, can_be_read

# Smaller than any number of groups, so that one comparison finds the readers to wait for.
_REFUSED = -1
# All engine ranks of a host may connect at once; the kernel caps this at net.core.somaxconn.
_BACKLOG = 4096


@dataclass(slots=True)
class _Reader:
    """An engine rank that has connected.

    Attributes:
        line: connection to the rank.
        process: its process id.
        session: id of the set of engines that it belongs to; None until received.
        ticket, read: its current refit id, and the number of that refit's groups that it has read;
            ``_REFUSED`` if it stopped reading.
        before: its refit id when the mailbox's current refit began.
    """

    line: Line
    process: int = 0
    session: int | None = None
    ticket: int | None = None
    read: int = 0
    before: int | None = None


class MailboxHandle(TypedDict):
    """A policy rank's mailbox, as plain types."""

    host: str
    process: int
    on_gpu: bool
    engine_rank: int | None
    name: str
    token: str


class GroupPayload(TypedDict):
    """A group of tensors that a refit sends: where they are in memory, their names and shapes (``manifest``),
    and their checksum, if there is one."""

    buffer: BufferHandle
    manifest: str
    version: int
    index: int
    first: int
    count: int
    checksum: int | None


class CarriedPayload(GroupPayload):
    """A group that a caller passes on, with its mailbox and the refit's id."""

    round: int
    mailbox: MailboxHandle


class _Message(TypedDict, total=False):
    """A message of a refit to its readers: a group, or the reason why it is aborted."""

    ticket: int
    index: int
    payload: GroupPayload
    given_up: str


class Mailbox:
    """The policy's side of a mailbox.

    Args:
        on_gpu: the weights are in this process's GPU memory; otherwise every process of the host can read
            them.
        engine_rank: index within an engine of the ranks that may read these weights; None for all ranks.
    """

    def __init__(self, *, on_gpu: bool, engine_rank: int | None = None) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        # The kernel chooses a name, which every user of the host can see; the token is secret.
        self._server.bind("")
        self._name, self._token = self._server.getsockname()[1:].decode(), secrets.token_hex(16)
        self._server.listen(_BACKLOG)
        # Non-blocking, because the policy must never wait for a hanging engine.
        self._server.setblocking(False)
        self._on_gpu, self._engine_rank = on_gpu, engine_rank
        self._everybody: list[_Reader] = []
        self.refit: tuple[int, int] | None = None

    def handle(self) -> MailboxHandle:
        """Return a handle of plain types with which another process can connect."""
        return {
            "host": host_identity(),
            "process": os.getpid(),
            "on_gpu": self._on_gpu,
            "engine_rank": self._engine_rank,
            "name": self._name,
            "token": self._token,
        }

    def open(self, session: int, ticket: int) -> None:
        """Begin refit ``ticket`` of session ``session``."""
        self._look(0.0)
        self.refit = session, ticket
        # Remember each reader's refit id, to distinguish a reader that has not started this refit from one
        # that has already finished it.
        for reader in self._everybody:
            reader.before = reader.ticket

    def post(self, index: int, payload: GroupPayload) -> None:
        """Send the readers the location of group ``index`` of the refit."""
        self._tell({"index": index, "payload": without_bytes(payload)})

    def give_up(self, session: int, ticket: int, reason: str) -> None:
        """Tell the readers of a refit that it is aborted, and why."""
        if self.refit != (session, ticket):
            self.open(session, ticket)
        self._tell({"given_up": reason})

    def _tell(self, message: _Message) -> None:
        assert self.refit is not None
        for reader in self._readers():
            if (reader.ticket, reader.read) == (self.refit[1], _REFUSED):
                # This reader ignores messages until the next refit.
                continue
            try:
                # Put the refit id into every message, because an interrupted reader still finds earlier
                # messages in its connection.
                reader.line.say({"ticket": self.refit[1], **message})
            except OSError:
                self._drop(reader)

    def has_readers(self) -> bool:
        """Return whether a living engine rank of the refit's session is connected."""
        self._look(0.0)
        return bool(self._readers())

    def wait_until_read(self, count: int, patience: float) -> None:
        """Wait until every living reader has read ``count`` groups of the refit, has stopped reading, or is
        in a later refit.

        Raises:
            RefitError: a reader has not done so after ``patience`` seconds.
        """
        ends = time.monotonic() + patience
        self._look(0.0)
        while late := [reader.process for reader in self._readers() if self._is_late(reader, count)]:
            if time.monotonic() >= ends:
                raise RefitError(
                    f"group {count - 1} of the weights was not read by process "
                    f"{', '.join(map(str, late))} of an engine within {patience:g} s, so its "
                    "buffer cannot be reused: find out what blocks the engine, and refit again"
                )
            self._look(ends - time.monotonic())

    def _is_late(self, reader: _Reader, count: int) -> bool:
        assert self.refit is not None
        if reader.ticket == self.refit[1]:
            return _REFUSED < reader.read < count
        # With an unchanged refit id the reader has not started. Otherwise it may have finished this refit and
        # started the next.
        return count > 0 and reader.ticket == reader.before

    def _readers(self) -> list[_Reader]:
        """Return the living readers of the refit's session."""
        return [
            reader for reader in self._everybody if self.refit is not None and reader.session == self.refit[0]
        ]

    def _look(self, seconds: float) -> None:
        """Wait up to ``seconds`` for activity, then accept new readers and process the messages of all
        readers."""
        # Poll all connections and the server together: waiting for each in turn would miss a reader that ends
        # in the meantime.
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
        # Any user of the host may connect to a name without a file; only the engines know the token.
        if not secrets.compare_digest(str(token), self._token):
            raise ValueError("another program")

    def _drop(self, reader: _Reader) -> None:
        reader.line.close()
        self._everybody.remove(reader)

    def close(self) -> None:
        """Close the mailbox and its connections."""
        self._server.close()
        for reader in list(self._everybody):
            self._drop(reader)


class MailboxReader:
    """An engine rank's side of a mailbox.

    Args:
        handle: handle of the policy's mailbox.
        session: id of the set of engines that take part in refits together.

    Raises:
        RefitError: the mailbox is on another host, or gone.
    """

    def __init__(self, handle: MailboxHandle, session: int) -> None:
        if handle["host"] != host_identity():
            raise RefitError(
                "the weights are in the memory of another host or container: colocated engine and "
                "policy must share one"
            )
        self.session, self._policy = session, handle["process"]
        connection = socket.socket(socket.AF_UNIX)
        try:
            # A leading zero byte selects Linux's abstract namespace: a crash leaves no file.
            connection.connect(f"\0{handle['name']}")
            self._line = Line(connection)
            self._line.say([handle["token"], os.getpid(), session])
        except OSError as error:
            connection.close()
            raise RefitError(
                f"the policy's process {self._policy} and its memory are gone ({error}): start a new refit"
            ) from error

    def enter(self, ticket: int) -> None:
        """Take part in refit ``ticket`` from its first group on."""
        self.has_read(ticket, 0)

    def payload(self, ticket: int, index: int, patience: float) -> GroupPayload:
        """Wait until the policy has posted group ``index`` of the refit, and return its location. Messages of
        other refits are skipped.

        Raises:
            RefitError: the policy aborted the refit, ended, or posted nothing for ``patience`` seconds.
        """
        ends = time.monotonic() + patience
        try:
            while True:
                message: _Message = self._line.hear(ends - time.monotonic())
                if message["ticket"] == ticket and "given_up" in message:
                    raise RefitError(f"the policy aborted the refit: {message['given_up']}; refit again")
                if message["ticket"] == ticket and message["index"] == index:
                    return _with_bytes(message["payload"])
        except TimeoutError as error:
            raise RefitError(
                f"the policy's process {self._policy} has not posted group {index} of its weights in "
                f"{patience:g} s: refit again"
            ) from error
        except OSError as error:
            raise RefitError(
                f"the policy's process {self._policy} ended within a refit: start a new policy, "
                "and refit again"
            ) from error

    def has_read(self, ticket: int, count: int) -> None:
        """Report that this rank no longer needs the first ``count`` groups of the refit."""
        # Ignore a lost connection: waiting for the next group detects it.
        with contextlib.suppress(OSError):
            self._line.say([ticket, count])

    def refuse(self, ticket: int) -> None:
        """Report that this rank stops reading the refit, so that the policy does not wait for it."""
        self.has_read(ticket, _REFUSED)

    def close(self) -> None:
        """Close the connection, so that the policy no longer waits for this reader."""
        self._line.close()


def beside(mailboxes: Mapping[str, MailboxHandle], device: str, engine_rank: int = 0) -> str:
    """Return the device of the policy rank from which an engine rank reads its weights.

    On a GPU this is the engine rank's own device; on a CPU, the device of any policy rank on the same host
    that publishes for this engine rank.

    Args:
        mailboxes: mailbox handles by identity of the policy rank's device.
        device: identity of the engine rank's device.
        engine_rank: index of the rank in its engine.

    Raises:
        RefitError: there is no such policy rank.
    """
    for_it = {
        name: handle for name, handle in mailboxes.items() if handle["engine_rank"] in (None, engine_rank)
    }
    # GPU memory is shared within one device; on a CPU every rank of the host can read it.
    if device in for_it:
        return device
    for name, handle in for_it.items():
        if not handle["on_gpu"] and handle["host"] == host_identity():
            return name
    devices = ", ".join(sorted(for_it)) or "none"
    raise RefitError(
        f"no rank of the policy shares {device} (they are on {devices}): place both on the same devices"
    )


def mailbox_for(mailboxes: Mapping[str, MailboxHandle], device: str, engine_rank: int = 0) -> MailboxHandle:
    """Return the mailbox handle that an engine rank reads; see ``beside``."""
    return mailboxes[beside(mailboxes, device, engine_rank)]


def without_bytes(value: Any) -> Any:
    """Return ``value`` with all bytes replaced by ``{"hex": ...}``, as JSON requires."""
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
