"""What the pool's processes run to see who writes a checkpoint, and how the tests read what each has
written."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from converters.checkpoint.boxes import bytes_of, whole
from converters.torch_dist.reader import TorchDistCheckpoint
from megarl.algorithms.loss_functions import NLLLoss
from megarl.checkpoint.background import free_memory, memory_of, move_files, take_memory
from megarl.checkpoint.restricted import METADATA_FILE, read_plain_index
from megarl.checkpoint.staged_file import open_staged
from megarl.errors import MegarlError
from megarl.models.megatron import sharded_save, state_stream
from megarl.models.megatron.parallel import holders
from megarl.patched import patched
from tests.dist import jobs

PARTS = ("weights", "optimizer")


def whole_state(stream: Any, optimizer: Any) -> dict[Any, Any]:
    """Stands for ``StateStream.outlines``: every state of every buffer in full on every rank, by another
    way."""
    state: dict[Any, Any] = {"buckets_coalesced": True}
    for index, ranges in enumerate(optimizer.gbuf_ranges):
        ((dtype, buckets),) = ranges.items()
        gathered = {
            name: torch.zeros(optimizer.buffers[index].grad_data.numel()) for name in state_stream.STATES
        }
        for bucket in buckets:
            for parameter, found in bucket["param_map"].items():
                kept = optimizer._get_main_param_and_optimizer_states(parameter)
                for name, values in gathered.items():
                    values[found["gbuf_world"].start : found["gbuf_world"].end] = kept[name]
        for values in gathered.values():
            # a sum of bits, because 0 and -0 added are 0
            dist.all_reduce(values.view(torch.int32), group=optimizer.data_parallel_group)
        state[index] = {dtype: gathered}
    return state


def main_replicas_write(state: dict[str, Any], stream: Any) -> dict[str, Any]:
    """Stands for ``shared_out``: Megatron-Core's own way."""
    return state


OLD_WAY: list[tuple[Any, str, Any]] = [
    (sharded_save, "shared_out", main_replicas_write),
    (state_stream.StateStream, "outlines", whole_state),
]
"""For ``patched``: the main replicas write everything, of the distributed optimizer's state what was gathered
in full."""


def trained(config: Mapping[str, Any], batch: Mapping[str, Any]) -> Any:
    """A worker after one step."""
    worker = jobs.build(config, init_reference_model=False)
    worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
    return worker


def save(worker: Any, directory: Path) -> None:
    worker.save_checkpoint(*(str(directory / part) for part in PARTS))


def save_both_ways(config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path) -> tuple[int, ...]:
    """Save a worker of Megatron as ``new``, and in the old way as ``old``; the ranks that share out a save
    with this one."""
    worker = trained(config, batch)
    save(worker, directory / "new")
    with patched(*OLD_WAY):
        save(worker, directory / "old")
    groups = [
        tuple(dist.get_process_group_ranks(holders(of_experts=of_experts))) for of_experts in (False, True)
    ]
    worker.backend.close()
    return max(groups, key=len)


def load_and_save(config: Mapping[str, Any], source: Path, target: Path) -> None:
    """Load a checkpoint into a new worker, and save that."""
    worker = jobs.build(config, init_reference_model=False)
    worker.load_checkpoint(*(str(source / part) for part in PARTS))
    save(worker, target)
    worker.backend.close()


def save_once(config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path) -> None:
    worker = trained(config, batch)
    save(worker, directory)
    worker.backend.close()


def save_apart(config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path, places: str) -> None:
    """Save a worker as ``whole``, and once more, every rank to the memory of its place, from where the first
    rank of each brings it to ``both``. That is done twice, with a step between the two; the second time
    counts."""
    worker = trained(config, batch)
    place, rank = places[dist.get_rank()], dist.get_rank()
    for turn in ("first", "second"):
        memory = (
            take_memory(directory / turn, 1, place)
            if rank == places.index(place)
            else memory_of(directory / turn, place)
        )
        assert memory is not None
        dist.barrier()
        save(worker, directory / turn / "whole")
        save(worker, memory)
        dist.barrier()
        if rank == places.index(place):
            (directory / turn / "both").mkdir(exist_ok=True)
            move_files(memory, directory / turn / "both", open_staged(memory))
            free_memory(directory / turn, place)
        dist.barrier()
        if turn == "first":
            worker.train(data=jobs.my_share(worker, batch), loss_fn=NLLLoss())
    worker.backend.close()


def save_where_a_disk_fails(
    config: Mapping[str, Any], batch: Mapping[str, Any], directory: Path, failing: int, part: str
) -> list[str]:
    """The storage of a rank fails when it syncs its file of a part; what this rank hears. Then a save that
    works."""
    worker = trained(config, batch)
    fsync = os.fsync
    failed: list[str] = []

    def failing_fsync(descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.endswith(f"__{failing}_0.distcp") and f".{part}.partial" in path:
            failed.append(path)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(descriptor)

    said = ""
    try:
        with mock.patch.object(os, "fsync", failing_fsync):
            save(worker, directory / "failed")
    except MegarlError as error:
        said = f"{type(error).__name__}: {error}"
    dist.barrier()
    left = sorted(path.name for path in (directory / "failed").iterdir())
    save(worker, directory / "again")
    worker.backend.close()
    return [said, *left] if len(failed) == (dist.get_rank() == failing) else ["the disk did not fail"]


def written(directory: Path) -> Counter[int]:
    """Bytes of tensors that each rank wrote, by rank. There is nothing in its file that the index does not
    know."""
    index = read_plain_index(directory)
    found: Counter[int] = Counter()
    lengths: Counter[str] = Counter()
    for place, where in index.storage_data.items():
        lengths[where.relative_path] += where.length
        entry = index.state_dict_metadata[place.fqn]
        if hasattr(entry, "chunks"):
            (sizes,) = (chunk.sizes for chunk in entry.chunks if chunk.offsets == place.offset)
            found[int(where.relative_path.split("_")[2])] += sizes.numel() * entry.properties.dtype.itemsize
    assert lengths == {path.name: path.stat().st_size for path in directory.glob("*.distcp")}, (
        "something was written twice"
    )
    return found


def largest_piece(directory: Path) -> int:
    """Bytes of the largest piece that one rank wrote."""
    tensors = [
        entry
        for entry in read_plain_index(directory).state_dict_metadata.values()
        if hasattr(entry, "chunks")
    ]
    return max(
        chunk.sizes.numel() * entry.properties.dtype.itemsize for entry in tensors for chunk in entry.chunks
    )


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two parts of checkpoints: names, shapes, dtypes, bits; objects, and the other
    files, beside them."""
    ours, theirs = TorchDistCheckpoint(one), TorchDistCheckpoint(other)
    found = sorted(set(ours) ^ set(theirs)) + sorted(set(ours.objects) ^ set(theirs.objects))
    for key in sorted(set(ours) & set(theirs)):
        if (ours.shape(key), ours.dtype(key)) != (theirs.shape(key), theirs.dtype(key)):
            found.append(f"{key}: shape or dtype")
        elif bytes_of(ours.read(key, whole(ours.shape(key)))) != bytes_of(
            theirs.read(key, whole(theirs.shape(key)))
        ):
            found.append(f"{key}: values")
    found += [
        key
        for key in sorted(set(ours.objects) & set(theirs.objects))
        if ours.read_object(key) != theirs.read_object(key)
    ]
    beside, others = _files_beside(one), _files_beside(other)
    return found + [
        name for name in sorted(set(beside) | set(others)) if beside.get(name) != others.get(name)
    ]


def _files_beside(directory: Path) -> dict[str, bytes]:
    """Files that hold neither tensors nor where they lie."""
    there = [
        path
        for path in directory.iterdir()
        if path.is_file() and path.suffix != ".distcp" and path.name != METADATA_FILE
    ]
    return {path.name: path.read_bytes() for path in there}


def files_of(directory: Path) -> dict[str, bytes]:
    """The files of tensors below a directory."""
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in sorted(directory.rglob("*.distcp"))
    }
