"""A refit of an engine apart, as many bytes in few and in many tensors, against one flat broadcast of the bytes over the same group.

Beside it the way that broadcasts every tensor for itself, after its name, shape and dtype have travelled by pickle.
"""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.memory import peak_of
from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from benchmarks.transfer import BUFFER_GIB, BYTES, COUNTS, QUICK_BYTES, QUICK_REPEATS, REPEATS, RandomWeights, metrics_of
from megarl.distributed.virtual_cluster import free_port
from megarl.weight_sync.broadcast import BUFFERS, WeightBroadcaster, WeightListener
from megarl.weight_sync.manifest import LIST_BYTES, Manifest, buffer_bytes
from megarl.weight_sync.transfer_group import TransferGroup

HOST = "127.0.0.1"
CPU = torch.device("cpu")


def measure(quick: bool) -> Iterator[Point]:
    """One point for each number of tensors."""
    nbytes, repeats = (QUICK_BYTES, QUICK_REPEATS) if quick else (BYTES, REPEATS)
    for count in COUNTS:
        yield Point({"tensors": count, "mebibytes": nbytes >> 20}, _measured(nbytes, count, repeats))


def _measured(nbytes: int, count: int, repeats: int) -> dict[str, Metric]:
    weights = RandomWeights(nbytes, count)
    manifest = Manifest.of(weights.singly())
    # the weights need not be gathered here
    room = buffer_bytes(BUFFER_GIB, BUFFERS, lists=LIST_BYTES * count, gathered=0, largest=manifest.largest[1])
    port = free_port(HOST)
    context = multiprocessing.get_context("spawn")
    orders, there = context.Pipe()
    engine = context.Process(target=_engine, args=(there, manifest.description(), port, nbytes), daemon=True)
    engine.start()
    group = TransferGroup(HOST, port, 2, 0, digest=manifest.digest, device=CPU, buffer_bytes=room, handshake_s=120.0)
    made: list[WeightBroadcaster] = []

    def first() -> None:
        made.append(WeightBroadcaster(group, manifest))
        _ordered(orders, "refit", lambda: made[0].send(weights.delivery(), 0))

    # the first one alone takes memory
    memory = peak_of(first)
    actions = {
        "flat": lambda: _ordered(orders, "flat", lambda: group.broadcast(weights.flat).wait()),
        "refit": lambda: _ordered(orders, "refit", lambda: made[0].send(weights.delivery(), 0)),
        "singly": lambda: _ordered(orders, "refit", lambda: made[0].send(weights.singly(), 0)),
        "each": lambda: _ordered(orders, "each", lambda: _one_broadcast_each(group, weights.named, orders)),
    }
    try:
        seconds = in_turn(actions, repeats=repeats)
    finally:
        orders.send(None)
        engine.join()
        made[0].close()
    return metrics_of(nbytes, seconds, memory)


def _ordered(orders: Connection, what: str, action: Any) -> None:
    """Do one side of it, the engine the other; over when both are."""
    orders.send(what)
    action()
    found = orders.recv()
    if found != what:
        raise RuntimeError(f"the engine says {found!r} where {what!r} was expected")


def _one_broadcast_each(group: TransferGroup, weights: dict[str, torch.Tensor], orders: Connection) -> None:
    for name, tensor in weights.items():
        orders.send(pickle.dumps((name, tuple(tensor.shape), tensor.dtype)))
        group.broadcast(tensor).wait()


def _engine(orders: Connection, description: dict[str, Any], port: int, nbytes: int) -> None:
    """Takes every weight as a tensor that it could load; it copies none, which is the engine's own business."""
    manifest = Manifest.from_description(description)
    group = TransferGroup(HOST, port, 2, 1, digest=manifest.digest, device=CPU, handshake_s=120.0)
    listener = WeightListener(group, manifest)
    target = torch.empty(nbytes, dtype=torch.uint8)
    while (what := orders.recv()) is not None:
        if what == "flat":
            group.broadcast(target).wait()
        elif what == "refit":
            listener.receive(lambda _: None)
        else:
            for _ in manifest.tensors:
                _, shape, dtype = pickle.loads(orders.recv())
                group.broadcast(torch.empty(shape, dtype=dtype)).wait()
        orders.send(what)
    listener.close()
