"""Takes weights from a stream into a buffer, in batches of copies, so that many small ones cost little each."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from itertools import islice

import torch

from megarl.errors import RefitError
from megarl.weight_sync.layout import Group
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.parcels import Laying, ParcelStream

Stream = Iterator[tuple[str, torch.Tensor]]


def pack(stream: Stream, manifest: Manifest, group: Group, buffer: torch.Tensor | None) -> None:
    """Take the weights of a group from a stream into ``buffer``, uint8; without any the stream goes on all the same.

    Raises:
        RefitError: other weights come than were announced.
    """
    if isinstance(stream, ParcelStream):
        _lay(stream, manifest, group, buffer)
        return
    first = group.first
    for batch in group.batches:
        names, weights = _taken(stream, batch.count)
        manifest.expect(first, first + batch.count, names, weights)
        if buffer is not None:
            batch.fill(buffer, weights)
        first += batch.count


def _taken(stream: Stream, count: int) -> tuple[list[str], list[torch.Tensor]]:
    """Names and weights; the pairs are not kept, tens of thousands of which would set off the garbage collector."""
    names, weights = [], []
    for name, weight in islice(stream, count):
        names.append(name)
        weights.append(weight)
    return names, weights


def _lay(stream: ParcelStream, manifest: Manifest, group: Group, buffer: torch.Tensor | None) -> None:
    """The same with nothing done for a weight, but for the first time that it comes."""
    if buffer is not None:
        buffer = buffer[: group.nbytes]
        group.clear_gaps(buffer)
    first = group.first
    while first < group.stop:
        parcel = stream.take(group.stop - first)
        if parcel is None:
            manifest.expect_infos(first, group.stop, ())
            raise AssertionError("a group that is not full lacks something")
        if not 0 < parcel.count <= group.stop - first:
            raise AssertionError(f"{type(stream).__name__} gave {parcel.count} weights where 1 to {group.stop - first} were asked for")
        laying = group.layings.get(first)
        if laying is None or not laying.serves(parcel):
            stop = first + parcel.count
            manifest.expect_infos(first, stop, parcel.infos())
            laying = group.layings[first] = Laying(parcel, group.begins()[first - group.first : stop - group.first])
        if buffer is not None:
            laying.run(parcel, buffer)
        first += parcel.count
        # not kept while what comes next is made
        del parcel


def failing(error: Exception) -> Stream:
    """The stream of a model that has none to give, because of ``error``."""
    raise error
    yield


def drain(stream: Stream) -> None:
    """Go through what is left of a stream: gathering it is collective, so that every rank has to, whatever became of its own part."""
    if isinstance(stream, ParcelStream):
        while stream.take(sys.maxsize) is not None:
            pass
    else:
        for _ in stream:
            pass


def expect_end(stream: Stream) -> None:
    """Let the stream come to its end: what stands after its last weight runs too.

    Raises:
        RefitError: there are weights left.
    """
    for name, _ in stream:
        raise RefitError(f"the policy gives {name} after the last weight that was announced: make a new policy and engine")
