"""The manifest of a refit: names, shapes and dtypes of the policy's weights in one order, and where they lie in a buffer.

Both sides know the manifest from before the first transfer, so that a transfer itself carries no name and no shape. With it goes what is
decided once for all refits: how the memory above the model is divided (two transfer buffers, what is gathered for them, and lists), which
pipeline stage sends which weights (runs of neighbours in the order of sending that one stage holds; an interleaved pipeline gives a stage
several runs), and how weights are taken from a stream into a buffer in batches of copies.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_UP, Decimal
from functools import cached_property
from itertools import accumulate, groupby, islice, zip_longest
from operator import attrgetter, eq, itemgetter
from typing import Any

import torch

from megarl.errors import RefitError
from megarl.weight_sync.layout import CopyPlan, FlatBucketIterator, Group, TensorInfo, padded_bytes
from megarl.weight_sync.slices import Slice, Slices

GIB = 2**30
# of weights that are gathered together where no memory is configured, and at most
BUCKET_BYTES = 64 * 2**20
# a bucket is this part of the configured memory
BUCKET_SHARE = 16
# that are there at once: one on its way, one that has come, and what was put together out of it; of the first gloo has two copies
BUCKETS = 5
# what a weight takes of host memory besides its bytes: its name in a group, its place in a buffer, and while groups are laid out for the
# first time the copy that lays it there
LIST_BYTES = 256
# this part of the configured memory is for connections and what allocators keep
REST_SHARE = 64


def bucket_bytes(buffer_gib: float | None) -> int:
    """Bytes of weights that are gathered together, unless one alone takes more.

    Args:
        buffer_gib: GiB that a refit may take, ``policy.refit_buffer_size_gb``; None where it is not configured.
    """
    return BUCKET_BYTES if buffer_gib is None else min(BUCKET_BYTES, int(buffer_gib * GIB) // BUCKET_SHARE)


def buffer_bytes(buffer_gib: float, buffers: int, *, lists: int, gathered: int, largest: int) -> int:
    """Bytes of each transfer buffer.

    Args:
        buffer_gib: GiB that a refit may take.
        buffers: how many.
        lists: bytes of the lists of what lies in them.
        gathered: bytes that the weights take on their way into them.
        largest: bytes of the largest weight, for which there is room as long as buffers of its size and the lists fit alone: what is
            gathered of it, a bucket of its own, may then take more than is configured.
    """
    configured = int(buffer_gib * GIB)
    room = max(configured - lists, 0)
    return max((room - gathered - configured // REST_SHARE) // buffers, min(largest, room // buffers))


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True)
class Manifest:
    """All weights, in the order in which they are sent.

    Attributes:
        tensors: the weights; of one that travels as a slice, the shape of the slice.
        slices: names that travel as slices, each with its slice and the shape of the whole weight, in the order of sending.
    """

    tensors: tuple[TensorInfo, ...]
    slices: tuple[tuple[str, Slice, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, stream: Iterable[tuple[str, torch.Tensor]]) -> Manifest:
        """Return the manifest of the names and tensors that an iterator gives."""
        return cls._checked(TensorInfo.of(name, tensor) for name, tensor in stream)

    @classmethod
    def from_description(cls, description: Mapping[str, Any]) -> Manifest:
        """The reverse of ``description``.

        Raises:
            RefitError: it is none.
        """
        try:
            infos = [TensorInfo(str(name), tuple(int(size) for size in shape), dtype) for name, (shape, dtype) in description.items()]
            return cls._checked(infos)
        except (AttributeError, TypeError, ValueError) as error:
            message = f"the refit info is not {{name: (shape, dtype)}}: {error}; pass on what prepare_refit_info() returned"
            raise RefitError(message) from error

    @classmethod
    def _checked(cls, tensors: Iterable[TensorInfo]) -> Manifest:
        manifest = cls(tuple(tensors))
        if len(manifest._index) < len(manifest.tensors):
            twice = next(name for name in manifest._names if manifest._names.count(name) > 1)
            raise RefitError(f"{twice} is sent twice: every weight has to have one name; report the model, this is a fault of its rules")
        for tensor in manifest.tensors:
            if not isinstance(tensor.dtype, torch.dtype):
                raise TypeError(f"{tensor.name} has dtype {tensor.dtype!r}, which is no torch.dtype")
        return manifest

    def sliced(self, slices: Slices) -> Manifest:
        """The manifest of the same weights where those of ``slices`` travel as slices; for one rank of an engine.

        Raises:
            RefitError: one of them is no weight of this manifest, or does not have these indices.
        """
        unknown = slices.keys() - self._index.keys()
        if unknown or self.slices:
            raise RefitError(f"a slice of {min(unknown) if unknown else 'slices'} was asked for, which the policy does not send whole")
        tensors = [
            replace(tensor, shape=slices[tensor.name].shape_of(tensor.shape)) if tensor.name in slices else tensor
            for tensor in self.tensors
        ]
        chosen = [(tensor.name, slices[tensor.name], tensor.shape) for tensor in self.tensors if tensor.name in slices]
        return Manifest(tuple(tensors), tuple(chosen))

    def description(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """``{name: (shape, dtype)}`` in the order of sending, as the NeMo-RL policy API's ``prepare_refit_info`` gives it."""
        return {tensor.name: (tensor.shape, tensor.dtype) for tensor in self.tensors}

    @cached_property
    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, their order and what travels as slices, in hexadecimal."""
        listing = json.dumps([[tensor.name, tensor.shape, str(tensor.dtype)] for tensor in self.tensors])
        if self.slices:
            # the slices of two ranks may have the same shapes
            listing += json.dumps([[name, where.plain(), whole] for name, where, whole in self.slices])
        return hashlib.sha256(listing.encode()).hexdigest()

    @cached_property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    @cached_property
    def _shapes(self) -> list[tuple[int, ...]]:
        return [tensor.shape for tensor in self.tensors]

    @cached_property
    def _dtypes(self) -> list[torch.dtype]:
        return [tensor.dtype for tensor in self.tensors]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._names)}

    def expect(self, first: int, stop: int, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Let pass the weights from index ``first`` up to ``stop``.

        Compared without a line of Python for each, which for tens of thousands of weights is what a refit on a CPU has time for; and
        one shape after another, because a list of so many shapes would set off the garbage collector.

        Raises:
            RefitError: they are others.
        """
        same = (
            names == self._names[first:stop]
            and all(map(eq, map(_SHAPE, tensors), self._shapes[first:stop]))
            and list(map(_DTYPE, tensors)) == self._dtypes[first:stop]
        )
        if not same:
            self.expect_infos(first, stop, [TensorInfo.of(*weight) for weight in zip(names, tensors, strict=True)])
            raise AssertionError("what differs as lists differs somewhere")

    def expect_infos(self, first: int, stop: int, coming: Sequence[TensorInfo]) -> None:
        """Check, by what announces the weights that come, that they are the expected ones.

        Raises:
            RefitError: they are others than those that were announced.
        """
        for announced, found in zip_longest(self.tensors[first:stop], coming):
            if found != announced:
                raise RefitError(
                    f"the policy gives {found or 'nothing'} where {announced} was announced: make a new policy and engine after changing a "
                    "model"
                )

    @property
    def padded_sizes(self) -> list[tuple[str, int]]:
        """Names with the bytes that they take in a buffer, in the order of sending."""
        return list(zip(self._names, self._padded, strict=True))

    @cached_property
    def _padded(self) -> array[int]:
        """The bytes alone: eight each, where a number of Python's takes four times that."""
        return array("q", (padded_bytes(tensor.nbytes) for tensor in self.tensors))

    @cached_property
    def total_bytes(self) -> int:
        """Bytes that all weights take in a buffer."""
        return sum(self._padded)

    @cached_property
    def largest(self) -> tuple[str, int]:
        """Name of the weight that takes most bytes in a buffer, and how many."""
        most = max(self._padded, default=0)
        return (self._names[self._padded.index(most)] if most else "no weight"), most

    def names_within(self, budget: int) -> list[list[str]]:
        """All names in groups of at most ``budget`` bytes each; see ``groups_within``.

        Asked for at every refit, they are worked out once for a budget, and their lists are the same ones each time, not to be changed: to
        go through tens of thousands of names, which lie anywhere in memory, takes as long as to copy the weights.
        """
        if sum(map(len, self._named_groups.get(budget, ()))) != len(self._names):
            self._named_groups.clear()
            self._named_groups[budget] = list(_grouped(self._names, self._padded, budget))
        return list(self._named_groups[budget])

    @cached_property
    def _named_groups(self) -> dict[int, list[list[str]]]:
        return {}

    def group(self, first: int, count: int) -> Group:
        """The group of ``count`` weights from index ``first`` on; asked for at every refit, it is worked out once."""
        if (first, count) not in self._groups:
            self._groups[first, count] = Group.of(first, self.tensors[first : first + count])
        return self._groups[first, count]

    def named_views(self, group: Group, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Names and weights of a group where they lie in a buffer."""
        return list(zip(self._names[group.first : group.stop], group.views(buffer), strict=True))

    @cached_property
    def _groups(self) -> dict[tuple[int, int], Group]:
        return {}

    def group_named(self, names: Sequence[str]) -> Group:
        """The group of the weights ``names``.

        Raises:
            RefitError: they are not neighbours in the order of sending.
        """
        first = self._index.get(names[0], -1) if names else -1
        stop = first + len(names)
        if first >= 0 and self._is_given(names) and self._names[stop - 1 : stop] == names[-1:]:
            return self.group(first, len(names))
        expected = self._names[first:stop] if first >= 0 else []
        if not names or list(names) != expected:
            wrong = next((name for name, right in zip(names, [*expected, *[None] * len(names)], strict=False) if name != right), "no name")
            raise RefitError(
                f"{wrong} does not stand there in the order of sending: ask for whole groups of prepare_weights_for_ipc(), in their order"
            )
        return self.group(first, len(names))

    def _is_given(self, names: Sequence[str]) -> bool:
        """Whether it is a list of ``names_within``, by which nobody has to look at each name."""
        return any(names is own for groups in self._named_groups.values() for own in groups)


def groups_within(sizes: Sequence[tuple[str, int]], budget: int) -> list[list[str]]:
    """Names in groups of at most ``budget`` bytes each, in order, as few as that allows.

    Args:
        sizes: names with their bytes in a buffer, in the order of sending.
        budget: bytes a buffer holds.

    Raises:
        RefitError: a weight alone is larger.
    """
    return list(_grouped(list(map(itemgetter(0), sizes)), array("q", map(itemgetter(1), sizes)), budget))


def _grouped(names: list[str], nbytes: Sequence[int], budget: int) -> Iterator[list[str]]:
    """Group names without a line of Python for each, of which there may be tens of thousands."""
    ends = array("q", accumulate(nbytes, initial=0))
    first = 0
    while first < len(names):
        stop = bisect_right(ends, ends[first] + budget) - 1
        if stop <= first:
            raise too_large(names[first], nbytes[first], budget, len(names))
        yield names[first:stop]
        first = stop


def too_large(name: str, nbytes: int, budget: int, weights: int) -> RefitError:
    """Return the error for a weight that takes more bytes than a buffer has.

    Args:
        name, nbytes: of the weight, padding included.
        budget: bytes of a buffer.
        weights: number of all weights.
    """
    # rounded up: what is said has to do
    needed = Decimal(2 * nbytes + LIST_BYTES * weights) / 2**30
    least = needed.quantize(Decimal(1).scaleb(needed.adjusted() - 2), rounding=ROUND_UP)
    return RefitError(
        f"{name} takes {nbytes} bytes, more than the {budget} bytes of a transfer buffer: set policy.refit_buffer_size_gb to at least "
        f"{least:g}, which is for two buffers and the lists of what lies in them, or to null"
    )


WeightIterator = Iterator[tuple[str, torch.Tensor]]


def pack(stream: WeightIterator, manifest: Manifest, group: Group, buffer: torch.Tensor | None) -> None:
    """Take the weights of a group from a stream into ``buffer``, uint8; without any the stream goes on all the same.

    Raises:
        RefitError: other weights come than were announced.
    """
    if isinstance(stream, FlatBucketIterator):
        _lay(stream, manifest, group, buffer)
        return
    first = group.first
    for batch in group.batches:
        names, weights = _taken(stream, batch.count)
        manifest.expect(first, first + batch.count, names, weights)
        if buffer is not None:
            batch.fill(buffer, weights)
        first += batch.count


def _taken(stream: WeightIterator, count: int) -> tuple[list[str], list[torch.Tensor]]:
    """Names and weights; the pairs are not kept, tens of thousands of which would set off the garbage collector."""
    names, weights = [], []
    for name, weight in islice(stream, count):
        names.append(name)
        weights.append(weight)
    return names, weights


def _lay(stream: FlatBucketIterator, manifest: Manifest, group: Group, buffer: torch.Tensor | None) -> None:
    """Lay flat buckets into the buffer; nothing is done for a weight but for the first time that it comes."""
    if buffer is not None:
        buffer = buffer[: group.nbytes]
        group.clear_gaps(buffer)
    first = group.first
    while first < group.stop:
        flat_bucket = stream.take(group.stop - first)
        if flat_bucket is None:
            manifest.expect_infos(first, group.stop, ())
            raise AssertionError("a group that is not full lacks something")
        if not 0 < flat_bucket.count <= group.stop - first:
            raise AssertionError(f"{type(stream).__name__} gave {flat_bucket.count} weights where 1 to {group.stop - first} were asked for")
        copy_plan = group.layings.get(first)
        if copy_plan is None or not copy_plan.serves(flat_bucket):
            stop = first + flat_bucket.count
            manifest.expect_infos(first, stop, flat_bucket.infos())
            copy_plan = group.layings[first] = CopyPlan(flat_bucket, group.begins()[first - group.first : stop - group.first])
        if buffer is not None:
            copy_plan.run(flat_bucket, buffer)
        first += flat_bucket.count
        # not kept while what comes next is made
        del flat_bucket


def failing(error: Exception) -> WeightIterator:
    """The stream of a model that has none to give, because of ``error``."""
    raise error
    yield


def drain(stream: WeightIterator) -> None:
    """Go through what is left of a stream: gathering it is collective, so that every rank has to, whatever became of its own part."""
    if isinstance(stream, FlatBucketIterator):
        while stream.take(sys.maxsize) is not None:
            pass
    else:
        for _ in stream:
            pass


def expect_end(stream: WeightIterator) -> None:
    """Let the stream come to its end: what stands after its last weight runs too.

    Raises:
        RefitError: there are weights left.
    """
    for name, _ in stream:
        raise RefitError(f"the policy gives {name} after the last weight that was announced: make a new policy and engine")


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages that send.

    Attributes:
        count: of the stages.
        runs: ``(stage, number of weights)`` of every run, in the order of sending; empty where stage 0 sends all.
    """

    count: int = 1
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[Sequence[str]]) -> Stages:
        """From the names that each stage sends.

        Args:
            manifest: of all weights.
            names: a list a stage, each in its order of sending.

        Raises:
            RefitError: a weight is sent by no stage or by two, is not in the manifest, or comes in another order.
        """
        owners = {name: stage for stage, own in enumerate(names) for name in own}
        missing = [tensor.name for tensor in manifest.tensors if tensor.name not in owners]
        if missing:
            raise RefitError(f"no pipeline stage sends {missing[0]} and {len(missing) - 1} more weights: {_DEFECT}")
        for stage, own in enumerate(names):
            wanted = [tensor.name for tensor in manifest.tensors if owners[tensor.name] == stage]
            if wanted != list(own):
                raise RefitError(f"pipeline stage {stage} sends {len(own)} weights, of which {len(wanted)} are its own in order: {_DEFECT}")
        in_order = groupby(owners[tensor.name] for tensor in manifest.tensors)
        return cls(len(names), tuple((stage, sum(1 for _ in run)) for stage, run in in_order))

    def parts(self, manifest: Manifest, budget: int) -> Iterator[tuple[int, Group]]:
        """Stages with the groups of weights that they send, at most ``budget`` bytes each, in the order of sending.

        Raises:
            RefitError: a weight alone is larger, or the runs are those of another model.
        """
        runs = self.runs or ((0, len(manifest.tensors)),)
        if sum(count for _, count in runs) != len(manifest.tensors):
            raise RefitError(f"the policy's stages send {sum(count for _, count in runs)} weights of {len(manifest.tensors)}: {_DEFECT}")
        first = 0
        for stage, count in runs:
            for names in groups_within(manifest.padded_sizes[first : first + count], budget):
                yield stage, manifest.group(first, len(names))
                first += len(names)


_DEFECT = "report the model and the layout, this is a fault of the export"
ONE_STAGE = Stages()
