"""Processes for the tests of refits: a policy and engines, each doing what it is told through a pipe, so that
it can be killed anywhere."""

from __future__ import annotations

import contextlib
import hashlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.distributed.device import DeviceRuntime
from megarl.errors import MegarlError
from megarl.weight_sync.broadcast import WeightBroadcaster, WeightListener
from megarl.weight_sync.mailbox import MailboxReader, mailbox_for
from megarl.weight_sync.manifest import ONE_STAGE, Manifest, Stages
from megarl.weight_sync.session import WeightReceiver, WeightSender, payload_for
from megarl.weight_sync.transfer_group import TransferGroup

CPU = torch.device("cpu")
HOST = "127.0.0.1"
# so that there are several groups of weights
BUDGET = 30_000
SESSION = 7
# a wait that ends with the test, and not with an error, where something hangs
LONG = 300.0

_FORKSERVER = multiprocessing.get_context("forkserver")
_FORKSERVER.set_forkserver_preload(["tests.unit.weight_processes"])


def weights(step: int) -> dict[str, Tensor]:
    """Five groups of ``BUDGET`` bytes."""
    generator = torch.Generator().manual_seed(step)
    return {f"layer.{index}.weight": torch.randn(96, 75, generator=generator) for index in range(5)}


MANIFEST = Manifest.of(iter(weights(0).items()))
# of a policy with two pipeline stages, interleaved
OWN = [["layer.0.weight", "layer.1.weight", "layer.4.weight"], ["layer.2.weight", "layer.3.weight"]]
STAGES = Stages.of(MANIFEST, OWN)


def fingerprint(state: Iterator[tuple[str, Tensor]]) -> str:
    """Of names and bytes, in their order."""
    digest = hashlib.sha256()
    for name, tensor in state:
        digest.update(name.encode() + bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()))
    return digest.hexdigest()


def expected(step: int) -> str:
    """Fingerprint of ``weights``."""
    return fingerprint(iter(weights(step).items()))


def shared_files(processes: list[int]) -> list[str]:
    """Files of shared memory that carry the number of one of the processes in their name, as torch's do.
    Other runs share the directory, with names of random digits too."""
    numbers = set(map(str, processes))
    return [path.name for path in Path("/dev/shm").iterdir() if numbers & set(path.name.split("_"))]


class Actor:
    """A process that obeys.

    Args:
        kind: a class of this module; its public methods are the orders.
    """

    def __init__(self, kind: type[Any], *arguments: Any) -> None:
        self._here, there = _FORKSERVER.Pipe()
        self._process = _FORKSERVER.Process(target=_obey, args=(kind, there, arguments), daemon=True)
        self._process.start()
        there.close()
        self.number = self._process.pid

    def order(self, method: str, *arguments: Any) -> None:
        """Begin; ``answer`` gives the result."""
        self._here.send((method, arguments))

    def answer(self) -> Any:
        """The next result, error or message."""
        assert self._here.poll(60), "the process hangs"
        return self._here.recv()

    def do(self, method: str, *arguments: Any) -> Any:
        self.order(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        """At once, wherever it is; again, nothing."""
        if self._here.closed:
            return
        self._process.kill()
        self._process.join()
        self._process.close()
        self._here.close()


def _obey(kind: type[Any], connection: Connection, arguments: tuple[Any, ...]) -> None:
    subject = kind(connection, *arguments)
    with contextlib.suppress(EOFError):
        while True:
            method, given = connection.recv()
            try:
                connection.send(getattr(subject, method)(*given))
            except MegarlError as error:
                connection.send(error)


def _paused(
    connection: Connection, state: Iterator[tuple[str, Tensor]], after: int | None
) -> Iterator[tuple[str, Tensor]]:
    for index, pair in enumerate(state):
        if index == after:
            connection.send("paused")
            connection.recv()
        yield pair


class Policy:
    """One rank, with shared memory and with a broadcast."""

    def __init__(self, connection: Connection, directory: str) -> None:
        self._connection = connection
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo", init_method=f"file://{directory}/{os.getpid()}", rank=0, world_size=1
            )
        self._step = 0
        self._pause: int | None = None
        self._sender = WeightSender(self._stream, DeviceRuntime(CPU, "gloo"), with_checksum=True)

    def _stream(self) -> Iterator[tuple[str, Tensor]]:
        return _paused(self._connection, iter(weights(self._step).items()), self._pause)

    def mailboxes(self) -> Any:
        return self._sender.mailbox()

    def hand_over(self, step: int, pause: int | None = None) -> str:
        """Refit through the mailbox; pause before tensor ``pause``."""
        self._step, self._pause = step, pause
        self._sender.begin(step)
        self._sender.hand_over(SESSION, step, most=BUDGET)
        self._pause = None
        return "handed over"

    def groups(self, step: int) -> list[list[str]]:
        """Begin a refit through shared memory."""
        self._step = step
        self._sender.begin(step)
        return [group.names for group in self._sender.manifest.groups(BUDGET)]

    def group(self, names: list[str]) -> Any:
        return payload_for(self._sender.send(names), "engine")

    def join(self, port: int, world_size: int, stage: int | None = None) -> str:
        """As the only stage, or as one of those of ``STAGES``."""
        self._own = list(weights(0)) if stage is None else OWN[stage]
        group = TransferGroup(
            HOST,
            port,
            world_size,
            0,
            digest=MANIFEST.digest,
            device=CPU,
            buffer_bytes=BUDGET,
            stage=stage or 0,
            stages=ONE_STAGE if stage is None else STAGES,
            collective_s=LONG,
        )
        self._broadcaster = WeightBroadcaster(group, MANIFEST, with_checksum=True)
        return "joined"

    def send(self, step: int, pause: int | None = None) -> str:
        """Refit over the group; pause before tensor ``pause`` of this stage."""
        state = weights(step)
        self._broadcaster.send(
            _paused(self._connection, iter([(name, state[name]) for name in self._own]), pause), step
        )
        return "sent"


class Engine:
    """One rank that reads shared memory or listens, and answers with the version and the fingerprint of what
    it has."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._receiver = WeightReceiver(MANIFEST, CPU)
        self._listener: WeightListener | None = None
        self._mailbox: MailboxReader | None = None
        self._state: dict[str, Tensor] = {}

    def read(self, payload: Any) -> Any:
        with self._receiver.group(payload) as tensors:
            self._state.update({name: tensor.clone() for name, tensor in tensors})
        return self.served()

    def meet(self, mailboxes: Any) -> str:
        self._mailbox = MailboxReader(mailbox_for(mailboxes, "engine"), SESSION)
        return "met"

    def take(self, ticket: int, pause: str | None = None) -> Any:
        """Take a refit through the mailbox; pause where weight ``pause`` is loaded."""
        assert self._mailbox is not None
        self._receiver.receive(self._mailbox, ticket, self._loading(pause))
        return self.served()

    def served(self) -> Any:
        """Version and fingerprint of what may be served; None where nothing may."""
        side = self._listener or self._receiver
        return None if side.version is None else (side.version, fingerprint(iter(self._state.items())))

    def join(self, port: int, world_size: int, rank: int) -> str:
        group = TransferGroup(
            HOST, port, world_size, rank, digest=MANIFEST.digest, device=CPU, collective_s=LONG
        )
        self._listener = WeightListener(group, MANIFEST)
        return "joined"

    def receive(self, pause: str | None = None) -> Any:
        """Take a refit of the group; pause where weight ``pause`` is loaded."""
        assert self._listener is not None
        self._listener.receive(self._loading(pause))
        return self.served()

    def _loading(self, pause: str | None) -> Callable[[list[tuple[str, Tensor]]], None]:
        def load(tensors: list[tuple[str, Tensor]]) -> None:
            if pause in dict(tensors):
                self._connection.send("paused")
                self._connection.recv()
            self._state.update({name: tensor.clone() for name, tensor in tensors})

        return load
