"""A refit of the same bytes in few and in many tensors: handed to an engine on the same device, and sent to
an engine on another device.

The baselines are one flat copy of the bytes to a second process, and one flat broadcast over the same group.
For comparison, each tensor is also transferred by itself: copied into its own shared memory, whose handle
travels by pickle, or broadcast after its name, shape and dtype have travelled by pickle.
"""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.memory import peak_of
from benchmarks.point import Metric, Point
from benchmarks.timing import in_turn
from megarl.distributed.device import DeviceRuntime
from megarl.distributed.virtual_cluster import free_port
from megarl.models.engine.gather_stream import (
    FullTensor,
    GatherStream,
    InFlightBucket,
    UnshardPlan,
    in_buckets,
)
from megarl.weight_sync.broadcast import BUFFERS, WeightBroadcaster, WeightListener
from megarl.weight_sync.manifest import BUCKET_BYTES, LIST_BYTES, Manifest, buffer_bytes
from megarl.weight_sync.plan import Copy
from megarl.weight_sync.session import WeightReceiver, WeightSender
from megarl.weight_sync.transfer_group import TransferGroup

COUNTS = (300, 10_000)
# This is the size of both buffers together.
BUFFER_GIB = 0.125
CALLS = 3
"""Calls per sample. A handover takes only some milliseconds, and a process that wakes up late costs a tenth
of that."""
HOST = "127.0.0.1"
CPU = torch.device("cpu")


def measure_handover(quick: bool) -> Iterator[Point]:
    """Yield one point for each number of tensors, with an engine on the same device."""
    # Thousands of handles would be more files than a process may open.
    torch.multiprocessing.set_sharing_strategy("file_system")
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(
            "gloo", init_method=f"file://{Path(directory) / 'store'}", rank=0, world_size=1
        )
        try:
            yield from _points(_handed_over, quick)
        finally:
            dist.destroy_process_group()


def measure_broadcast(quick: bool) -> Iterator[Point]:
    """Yield one point for each number of tensors, with an engine on another device."""
    return _points(_sent, quick)


def _points(measured: Callable[[int, int, int], dict[str, Metric]], quick: bool) -> Iterator[Point]:
    nbytes, repeats = (16 * 2**20, 2) if quick else (128 * 2**20, 5)
    for count in COUNTS:
        yield Point({"tensors": count, "mebibytes": nbytes >> 20}, measured(nbytes, count, repeats))


class _RandomWeights:
    """Random bfloat16 weights of equal size.

    Args:
        nbytes: bytes of all weights, plus the remainder of the division.
        count: number of weights.

    Attributes:
        flat: all bytes, uint8.
        named: views of that memory as weights, by name.
    """

    def __init__(self, nbytes: int, count: int) -> None:
        self.flat = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
        elements = nbytes // 2 // count
        memory = self.flat.view(torch.bfloat16)[: elements * count]
        names = [f"model.layers.{index}.weight" for index in range(count)]
        self.named = dict(zip(names, memory.split(elements), strict=True))
        buckets = list(in_buckets(names, lambda name: self.named[name].nbytes, BUCKET_BYTES))
        shards = memory.split([elements * len(bucket) for bucket in buckets])
        self._buckets = [
            (_lying_together(bucket, elements), part.view(1, -1))
            for bucket, part in zip(buckets, shards, strict=True)
        ]

    def delivery(self) -> GatherStream:
        """Return all weights as Megatron and DTensor deliver them: in buckets with a known position of each
        weight. No weight is assembled from shards here; ``refit.export`` measures that."""
        return GatherStream(InFlightBucket(assembly, shards, None) for assembly, shards in self._buckets)

    def singly(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all weights one by one, as FSDP1 delivers them."""
        return iter(self.named.items())


def _lying_together(names: Sequence[str], elements: int) -> UnshardPlan:
    return UnshardPlan(
        FullTensor(name, (elements,), (Copy.run_of(elements, index * elements, 0),))
        for index, name in enumerate(names)
    )


def _metrics_of(nbytes: int, seconds: Mapping[str, Sequence[float]], memory: float) -> dict[str, Metric]:
    """Return the metrics of one number of tensors.

    Args:
        nbytes: bytes of all weights.
        seconds: one number per repeat of ``flat``, all bytes as one piece; of ``refit``; of ``singly``, a
            refit that gets its weights one by one; and of ``each``, every tensor transferred by itself.
        memory: memory that the refit took above the model, in MiB.
    """
    return {
        "speed": Metric.of("GB/s", [nbytes / 1e9 / one for one in seconds["refit"]]),
        "against_flat": Metric.ratio(
            "the speed of all bytes as one piece", seconds["flat"], seconds["refit"]
        ),
        "singly_against_flat": Metric.ratio(
            "the speed of all bytes as one piece", seconds["flat"], seconds["singly"]
        ),
        "against_each": Metric.ratio(
            "the speed of every tensor for itself", seconds["each"], seconds["refit"]
        ),
        "beyond_flat": Metric.of(
            "ms", [1e3 * (one - flat) for one, flat in zip(seconds["refit"], seconds["flat"], strict=True)]
        ),
        "memory": Metric.of("MiB above the model", [memory]),
        "buffer": Metric.of("MiB configured", [BUFFER_GIB * 1024]),
    }


def _handed_over(nbytes: int, count: int, repeats: int) -> dict[str, Metric]:
    weights = _RandomWeights(nbytes, count)
    target = torch.empty_like(weights.flat)
    streams = {"refit": weights.delivery, "singly": weights.singly}
    senders = {
        way: WeightSender(stream, DeviceRuntime(CPU, "gloo"), buffer_gib=BUFFER_GIB)
        for way, stream in streams.items()
    }
    context = multiprocessing.get_context("spawn")
    connection, there = context.Pipe()
    engine = context.Process(
        target=_handover_engine, args=(there, senders["refit"].manifest.description()), daemon=True
    )
    engine.start()
    # Wait for the engine, so that its start is not measured.
    connection.recv()
    actions = {
        "flat": lambda: target.copy_(weights.flat),
        "refit": lambda: _refit("refit", senders, connection),
        "singly": lambda: _refit("singly", senders, connection),
    }
    try:
        # Only the first refit allocates memory.
        memory = peak_of(actions["refit"])
        seconds = in_turn(actions, repeats=repeats, calls=CALLS, collect=True)
        # Measure this separately, because PyTorch's manager still removes its files while the next action
        # runs.
        seconds |= in_turn(
            {"each": lambda: _one_handle_each(weights.named, connection)}, repeats=repeats, collect=True
        )
    finally:
        connection.send(None)
        engine.join()
        for sender in senders.values():
            sender.close()
    return _metrics_of(nbytes, seconds, memory)


def _refit(way: str, senders: dict[str, WeightSender], connection: Connection) -> None:
    """Send all groups as the driver does: each group is acknowledged before the group after the next is
    written."""
    sender = senders[way]
    # Take the sender's manifest: the driver has one too, so that names do not leave it.
    manifest, room = sender.manifest, sender.begin(1)
    waiting = 0
    for group in manifest.groups(room):
        [payload] = sender.send_part(group.first, group.count).values()
        if waiting:
            _expect(connection, "read")
        connection.send((way, payload))
        waiting = 1
    _expect(connection, "read")


def _one_handle_each(weights: dict[str, Tensor], connection: Connection) -> None:
    # Clone the tensors: share_memory_ works in place, and a weight that is already shared would cost nothing
    # the next time.
    copies = {name: tensor.clone().share_memory_() for name, tensor in weights.items()}
    connection.send(("handles", bytes(ForkingPickler.dumps(copies))))
    _expect(connection, "read")


def _expect(connection: Connection, answer: str) -> None:
    found = connection.recv()
    if found != answer:
        raise RuntimeError(f"the engine says {found!r} where {answer!r} was expected")


def _handover_engine(connection: Connection, description: dict[str, Any]) -> None:
    """Receive every weight as a tensor that an engine could load. Loading it is not measured, so no weight is
    copied."""
    torch.multiprocessing.set_sharing_strategy("file_system")
    receivers = {
        way: WeightReceiver(Manifest.from_description(description), CPU) for way in ("refit", "singly")
    }
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


def _sent(nbytes: int, count: int, repeats: int) -> dict[str, Metric]:
    weights = _RandomWeights(nbytes, count)
    manifest = Manifest.of(weights.singly())
    # The weights are full tensors already, so no memory is needed to gather them.
    room = buffer_bytes(
        BUFFER_GIB, BUFFERS, lists=LIST_BYTES * count, gathered=0, largest=manifest.largest[1]
    )
    port = free_port(HOST)
    context = multiprocessing.get_context("spawn")
    orders, there = context.Pipe()
    engine = context.Process(
        target=_broadcast_engine, args=(there, manifest.description(), port, nbytes), daemon=True
    )
    engine.start()
    group = TransferGroup(
        HOST, port, 2, 0, digest=manifest.digest, device=CPU, buffer_bytes=room, handshake_s=120.0
    )
    made: list[WeightBroadcaster] = []

    def first() -> None:
        # Create the broadcaster while memory is measured, because it allocates the buffers.
        made.append(WeightBroadcaster(group, manifest))
        _ordered(orders, "refit", lambda: made[0].send(weights.delivery(), 0))

    # Only the first refit allocates memory.
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
    return _metrics_of(nbytes, seconds, memory)


def _ordered(orders: Connection, what: str, action: Any) -> None:
    """Run the sender's side of an action while the engine runs the other side, and return when both
    are done."""
    orders.send(what)
    action()
    found = orders.recv()
    if found != what:
        raise RuntimeError(f"the engine says {found!r} where {what!r} was expected")


def _one_broadcast_each(group: TransferGroup, weights: dict[str, Tensor], orders: Connection) -> None:
    for name, tensor in weights.items():
        orders.send(pickle.dumps((name, tuple(tensor.shape), tensor.dtype)))
        group.broadcast(tensor).wait()


def _broadcast_engine(orders: Connection, description: dict[str, Any], port: int, nbytes: int) -> None:
    """Receive every weight as a tensor that an engine could load. Loading it is not measured, so no weight is
    copied."""
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
