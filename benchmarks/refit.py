"""A colocated refit of as many bytes in few and in many tensors, between two processes, against one flat copy of the bytes.

Beside it the way that has a handle for every tensor: each is copied into shared memory of its own, and its handle travels by pickle.
"""

from __future__ import annotations

import gc
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
from benchmarks.timing import collector_off, seconds_of
from megarl.distributed.device import DeviceRuntime
from megarl.weight_sync.manifest import Manifest, groups_within
from megarl.weight_sync.receiver import WeightReceiver
from megarl.weight_sync.sender import WeightSender

COUNTS = (300, 3_000, 30_000)
BYTES, QUICK_BYTES = 256 * 2**20, 16 * 2**20
REPEATS, QUICK_REPEATS = 7, 2
BUFFER_GIB = 0.125
CPU = torch.device("cpu")


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
    flat, weights = random_weights(nbytes, count)
    target = torch.empty_like(flat)
    sender = WeightSender(lambda: iter(weights.items()), DeviceRuntime(CPU, "gloo"), buffer_gib=BUFFER_GIB)
    context = multiprocessing.get_context("spawn")
    connection, there = context.Pipe()
    engine = context.Process(target=_engine, args=(there, sender.manifest.description()), daemon=True)
    engine.start()
    connection.recv()
    seconds: dict[str, list[float]] = {"copy": [], "refit": [], "handles": []}
    try:
        # the first one alone takes memory
        memory = peak_of(lambda: _refit(sender, connection))
        with collector_off():
            for turn in range(1 + repeats):
                took = {
                    "copy": seconds_of(lambda: target.copy_(flat)),
                    "refit": seconds_of(lambda: _refit(sender, connection)),
                    "handles": seconds_of(lambda: _one_handle_each(weights, connection)),
                }
                gc.collect()
                for name, one in took.items():
                    seconds[name] += [one] if turn else []
    finally:
        connection.send(None)
        engine.join()
        sender.close()
    return {
        "speed": Metric.of("GB/s", [nbytes / 1e9 / one for one in seconds["refit"]]),
        "against_copy": Metric.ratio("the speed of one flat copy", seconds["copy"], seconds["refit"]),
        "against_handles": Metric.ratio("the speed of one handle a tensor", seconds["handles"], seconds["refit"]),
        "beyond_copy": Metric.of("ms", [1e3 * (one - copy) for one, copy in zip(seconds["refit"], seconds["copy"], strict=True)]),
        "memory": Metric.of("MiB above the model", [memory]),
        "buffer": Metric.of("MiB configured", [BUFFER_GIB * 1024]),
    }


def random_weights(nbytes: int, count: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Bytes, and the same memory as ``count`` bfloat16 weights of one size."""
    flat = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    elements = nbytes // 2 // count
    parts = flat.view(torch.bfloat16)[: elements * count].split(elements)
    return flat, {f"model.layers.{index}.weight": part for index, part in enumerate(parts)}


def _refit(sender: WeightSender, connection: Connection) -> None:
    """All groups, each acknowledged before the one after the next is written, as the driver does it."""
    sizes, room = sender.prepare(1)
    waiting = 0
    for keys in groups_within(sizes, int(room)):
        [payload] = sender.send(keys).values()
        if waiting:
            _expect(connection, "read")
        connection.send(("group", payload))
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
    receiver = WeightReceiver(Manifest.from_description(description), CPU)
    connection.send("ready")
    while (message := connection.recv()) is not None:
        kind, content = message
        if kind == "group":
            with receiver.group(content) as tensors:
                found = len(tensors)
        else:
            found = len(ForkingPickler.loads(content))
        connection.send("read" if found else "nothing")
    receiver.close()
