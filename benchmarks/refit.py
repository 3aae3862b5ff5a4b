"""A colocated refit of as many bytes in few and in many tensors, between two processes, against one flat copy of the bytes.

Beside it the way that has a handle for every tensor: each is copied into shared memory of its own, and its handle travels by pickle.
"""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import peak_of
from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from benchmarks.transfer import BUFFER_GIB, BYTES, COUNTS, QUICK_BYTES, QUICK_REPEATS, REPEATS, RandomWeights, metrics_of
from megarl.distributed.device import DeviceRuntime
from megarl.weight_sync.colocated import WeightReceiver, WeightSender
from megarl.weight_sync.manifest import Manifest

CPU = torch.device("cpu")
CALLS = 3
"""That make one number: a handover takes some milliseconds, of which a process that wakes up late is a tenth."""


def measure(quick: bool) -> Iterator[Point]:
    """One point for each number of tensors."""
    nbytes, repeats = (QUICK_BYTES, QUICK_REPEATS) if quick else (BYTES, REPEATS)
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", init_method=f"file://{Path(directory) / 'store'}", rank=0, world_size=1)
        try:
            for count in COUNTS:
                yield Point({"tensors": count, "mebibytes": nbytes >> 20}, _measured(nbytes, count, repeats))
        finally:
            dist.destroy_process_group()


def _measured(nbytes: int, count: int, repeats: int) -> dict[str, Metric]:
    weights = RandomWeights(nbytes, count)
    target = torch.empty_like(weights.flat)
    streams = {"refit": weights.delivery, "singly": weights.singly}
    senders = {way: WeightSender(stream, DeviceRuntime(CPU, "gloo"), buffer_gib=BUFFER_GIB) for way, stream in streams.items()}
    context = multiprocessing.get_context("spawn")
    connection, there = context.Pipe()
    engine = context.Process(target=_engine, args=(there, senders["refit"].manifest.description()), daemon=True)
    engine.start()
    connection.recv()
    actions = {
        "flat": lambda: target.copy_(weights.flat),
        "refit": lambda: _refit("refit", senders, connection),
        "singly": lambda: _refit("singly", senders, connection),
    }
    try:
        # the first one alone takes memory
        memory = peak_of(actions["refit"])
        seconds = in_turn(actions, repeats=repeats, calls=CALLS, collect=True)
        # in turns of its own: PyTorch's manager clears its files away while what comes next runs already
        seconds |= in_turn({"each": lambda: _one_handle_each(weights.named, connection)}, repeats=repeats, collect=True)
    finally:
        connection.send(None)
        engine.join()
        for sender in senders.values():
            sender.close()
    return metrics_of(nbytes, seconds, memory)


def _refit(way: str, senders: dict[str, WeightSender], connection: Connection) -> None:
    """All groups, each acknowledged before the one after the next is written, as the driver does it."""
    sender = senders[way]
    # names do not leave the driver, which has a manifest too
    manifest, room = sender.manifest, sender.begin(1)
    waiting = 0
    for keys in manifest.names_within(room):
        group = manifest.group_named(keys)
        [payload] = sender.send_part(group.first, group.count).values()
        if waiting:
            _expect(connection, "read")
        connection.send((way, payload))
        waiting = 1
    _expect(connection, "read")


def _one_handle_each(weights: dict[str, torch.Tensor], connection: Connection) -> None:
    copies = {name: tensor.clone().share_memory_() for name, tensor in weights.items()}
    connection.send(("handles", bytes(ForkingPickler.dumps(copies))))
    _expect(connection, "read")


def _expect(connection: Connection, answer: str) -> None:
    found = connection.recv()
    if found != answer:
        raise RuntimeError(f"the engine says {found!r} where {answer!r} was expected")


def _engine(connection: Connection, description: dict[str, Any]) -> None:
    """Takes every weight as a tensor that it could load; it copies none, which is the engine's own business."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    receivers = {way: WeightReceiver(Manifest.from_description(description), CPU) for way in ("refit", "singly")}
    connection.send("ready")
    while (message := connection.recv()) is not None:
        way, content = message
        if way in receivers:
            with receivers[way].group(content) as tensors:
                found = len(tensors)
        else:
            found = len(ForkingPickler.loads(content))
        connection.send("read" if found else "nothing")
    for receiver in receivers.values():
        receiver.close()
