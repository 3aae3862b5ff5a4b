"""The manifest of a refit: names, shapes and dtypes of the policy's weight tensors in sending order, and
their positions in a buffer.

Both sides know the manifest before the first transfer, so transfers contain no names or shapes. The module
also defines what is fixed for all refits: how memory beyond the model is divided (two transfer buffers,
gathered weights, and lists); which pipeline stage sends which weights (as runs of consecutive tensors; an
interleaved pipeline gives a stage several runs); and how tensors are copied from a stream to a buffer in
batches.
"""

from __future__ import annotations

import hashlib
import json
import sys
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import ROUND_UP, Decimal
from functools import cached_property
from itertools import groupby, islice, starmap, zip_longest
from operator import attrgetter, eq

import torch

from megarl.errors import RefitError
from megarl.weight_sync.plan import (
    CopyPlan,
    FlatBucketIterator,
    Group,
    NamedTensor,
    TensorInfo,
    WeightIterator,
    begins_in_buffer,
    padded_bytes,
)
from megarl.weight_sync.slices import Slice, Slices

GIB = 2**30
# Maximum bytes of weights gathered together; used as is if no memory limit is configured.
BUCKET_BYTES = 64 * 2**20
# The configured memory is divided by this number to get the size of a bucket.
BUCKET_SHARE = 16
# Number of buckets in memory at once: one in transfer, of which gloo has two copies, one that has arrived,
# and the tensors built from it.
BUCKETS = 5
# Bytes of host memory per tensor for bookkeeping: its name in a group, its location in a buffer, and its copy
# plan while groups are first laid out.
LIST_BYTES = 256
# One part in this number of the configured memory is reserved for connections and allocator overhead.
REST_SHARE = 64
Description = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype of each weight by name, in sending order: the refit info of NeMo-RL's policy API."""


def bucket_bytes(buffer_gib: float | None) -> int:
    """Return the maximum bytes of weights gathered together, unless a single tensor is larger.

    Args:
        buffer_gib: GiB that a refit may use, ``policy.refit_buffer_size_gb``; None if not configured.
    """
    return BUCKET_BYTES if buffer_gib is None else min(BUCKET_BYTES, int(buffer_gib * GIB) // BUCKET_SHARE)


def buffer_bytes(buffer_gib: float, buffers: int, *, lists: int, gathered: int, largest: int) -> int:
    """Return the bytes of each transfer buffer.

    Args:
        buffer_gib: GiB that a refit may use.
        buffers: number of transfer buffers.
        lists: bytes of the lists of the buffers' content.
        gathered: bytes of the weights being gathered for the buffers.
        largest: bytes of the largest tensor. Buffers get at least this size if all of them and the lists fit
            into ``buffer_gib``, although gathering this tensor may then exceed the limit.
    """
    configured = int(buffer_gib * GIB)
    room = max(configured - lists, 0)
    return max((room - gathered - configured // REST_SHARE) // buffers, min(largest, room // buffers))


_SHAPE, _DTYPE = attrgetter("shape"), attrgetter("dtype")


@dataclass(frozen=True)
class Manifest:
    """All weight tensors of a refit, in sending order.

    Attributes:
        tensors: the tensors; for one that is sent as a slice, the shape is that of the slice.
        slices: slice and full shape of each tensor that is sent as a slice, by name, in sending order.
    """

    tensors: tuple[TensorInfo, ...]
    slices: Mapping[str, tuple[Slice, tuple[int, ...]]] = field(default_factory=dict)

    @classmethod
    def of(cls, stream: Iterable[NamedTensor]) -> Manifest:
        """Build the manifest of the names and tensors in an iterable."""
        return cls._checked(starmap(TensorInfo.of, stream))

    @classmethod
    def from_description(cls, description: Description) -> Manifest:
        """Build a manifest from its ``description``.

        Raises:
            RefitError: it is not a description of a manifest.
        """
        try:
            infos = [
                TensorInfo(str(name), tuple(map(int, shape)), dtype)
                for name, (shape, dtype) in description.items()
            ]
            return cls._checked(infos)
        except (AttributeError, TypeError, ValueError) as error:
            raise RefitError(
                f"the refit info is not {{name: (shape, dtype)}}: {error}; pass on what "
                "prepare_refit_info() returned"
            ) from error

    @classmethod
    def _checked(cls, tensors: Iterable[TensorInfo]) -> Manifest:
        manifest = cls(tuple(tensors))
        if len(manifest._index) < len(manifest.tensors):
            twice = next(name for name in manifest._names if manifest._names.count(name) > 1)
            raise RefitError(
                f"{twice} is sent twice: every weight has to have one name; report the model, this is a "
                "fault of its rules"
            )
        for tensor in manifest.tensors:
            if not isinstance(tensor.dtype, torch.dtype):
                raise TypeError(f"{tensor.name} has dtype {tensor.dtype!r}, which is no torch.dtype")
        return manifest

    def sliced(self, slices: Slices) -> Manifest:
        """Return the manifest for one engine rank, in which the tensors in ``slices`` are sent as slices.

        Raises:
            RefitError: a name is not in this manifest, or the tensor does not have these indices.
        """
        unknown = slices.keys() - self._index.keys()
        if unknown or self.slices:
            raise RefitError(
                f"a slice of {min(unknown) if unknown else 'slices'} was requested, but the policy "
                "does not send its full weight"
            )
        tensors = {tensor.name: tensor for tensor in self.tensors}
        chosen = {}
        for name, tensor in tensors.items():
            if name in slices:
                chosen[name] = slices[name], tensor.shape
                tensors[name] = replace(tensor, shape=slices[name].shape_of(tensor.shape))
        return Manifest(tuple(tensors.values()), chosen)

    def description(self) -> Description:
        """Return ``{name: (shape, dtype)}`` in sending order, the result of ``prepare_refit_info`` in
        NeMo-RL's policy API."""
        return {tensor.name: (tensor.shape, tensor.dtype) for tensor in self.tensors}

    @cached_property
    def digest(self) -> str:
        """SHA-256 hex digest of names, shapes, dtypes, order and slices."""
        listing = json.dumps([[tensor.name, tensor.shape, str(tensor.dtype)] for tensor in self.tensors])
        if self.slices:
            # Include the slices, because slices of two ranks may have the same shapes.
            listing += json.dumps(
                [[name, where.plain(), whole] for name, (where, whole) in self.slices.items()]
            )
        return hashlib.sha256(listing.encode()).hexdigest()

    @cached_property
    def _names(self) -> list[str]:
        return [tensor.name for tensor in self.tensors]

    @cached_property
    def _index(self) -> dict[str, int]:
        return {name: index for index, name in enumerate(self._names)}

    @cached_property
    def _kinds(self) -> tuple[list[tuple[int, ...]], list[torch.dtype]]:
        return list(map(_SHAPE, self.tensors)), list(map(_DTYPE, self.tensors))

    def expect(self, first: int, stop: int, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Check that arriving tensors are the announced ones from index ``first`` up to ``stop``, without a
        Python loop over tensors.

        Raises:
            RefitError: they differ from the announced ones.
        """
        shapes, dtypes = self._kinds
        if (
            names != self._names[first:stop]
            or not all(map(eq, map(_SHAPE, tensors), shapes[first:stop]))
            or list(map(_DTYPE, tensors)) != dtypes[first:stop]
        ):
            # This slow check, with an object per weight, runs only after a mismatch, to find the weight.
            self.expect_infos(first, stop, map(TensorInfo.of, names, tensors))

    def expect_infos(self, first: int, stop: int, coming: Iterable[TensorInfo]) -> None:
        """Check that descriptions of arriving tensors are the announced ones from index ``first`` up to
        ``stop``.

        Raises:
            RefitError: they differ from the announced ones.
        """
        for announced, found in zip_longest(self.tensors[first:stop], coming):
            if found != announced:
                raise RefitError(
                    f"the policy gives {found or 'nothing'} where {announced} was announced: make a new "
                    "policy and engine after changing a "
                    "model"
                )

    @property
    def padded_sizes(self) -> list[tuple[str, int]]:
        """Name and padded bytes of each tensor, in sending order."""
        return [(tensor.name, padded_bytes(tensor.nbytes)) for tensor in self.tensors]

    @cached_property
    def _begins(self) -> array[int]:
        """First byte of each tensor if all were in one buffer, followed by the total; an array, because
        Python ints would take four times the memory."""
        return begins_in_buffer(self.tensors)

    @property
    def total_bytes(self) -> int:
        """Padded bytes of all tensors."""
        return self._begins[-1]

    @cached_property
    def largest(self) -> tuple[str, int]:
        """Name and padded bytes of the largest tensor."""
        return max(self.padded_sizes, key=lambda one: one[1], default=("no weight", 0))

    def groups(self, budget: int, first: int = 0, stop: int | None = None) -> Iterator[Group]:
        """Yield the tensors from index ``first`` up to ``stop`` in order, in as few groups of at most
        ``budget`` bytes as possible.

        Raises:
            RefitError: a single tensor is larger than ``budget``.
        """
        stop = len(self.tensors) if stop is None else stop
        while first < stop:
            # Binary search instead of summing: groups of tens of thousands of tensors are formed again for
            # each buffer size.
            end = min(bisect_right(self._begins, self._begins[first] + budget) - 1, stop)
            if end <= first:
                raise too_large(
                    self._names[first], self._begins[first + 1] - self._begins[first], budget, stop
                )
            yield self.group(first, end - first)
            first = end

    def group(self, first: int, count: int) -> Group:
        """Return the group of ``count`` tensors from index ``first`` on. Its layout is cached for later
        refits."""
        if (first, count) not in self._groups:
            self._groups[first, count] = Group.of(first, self.tensors[first : first + count])
        return self._groups[first, count]

    @cached_property
    def _groups(self) -> dict[tuple[int, int], Group]:
        return {}

    def group_named(self, names: Sequence[str]) -> Group:
        """Return the group of the tensors ``names``.

        Raises:
            RefitError: the names are not consecutive in sending order.
        """
        first = self._index.get(names[0], len(self.tensors)) if names else len(self.tensors)
        expected = self._names[first : first + len(names)]
        if not names or list(names) != expected:
            wrong = next((name for name, right in zip_longest(names, expected) if name != right), "no name")
            raise RefitError(
                f"{wrong} is not at that position of the sending order: ask for complete groups of "
                "prepare_weights_for_ipc(), in their order"
            )
        return self.group(first, len(names))


def too_large(name: str, nbytes: int, budget: int, weights: int) -> RefitError:
    """Return the error for a tensor that is larger than a buffer.

    Args:
        name, nbytes: name of the tensor, and its padded bytes.
        budget: bytes of a buffer.
        weights: number of all tensors.
    """
    # Round up, so that the recommended value is sufficient.
    needed = Decimal(2 * nbytes + LIST_BYTES * weights) / 2**30
    least = needed.quantize(Decimal(1).scaleb(needed.adjusted() - 2), rounding=ROUND_UP)
    return RefitError(
        f"{name} takes {nbytes} bytes, more than the {budget} bytes of a transfer buffer: set "
        "policy.refit_buffer_size_gb to at least "
        f"{least:g}, enough for two buffers and the lists of their weights, or to null"
    )


def pack(stream: WeightIterator, manifest: Manifest, group: Group, buffer: torch.Tensor | None) -> None:
    """Copy the tensors of a group from a stream to ``buffer`` (uint8); without a buffer, only advance the
    stream.

    Raises:
        RefitError: the tensors differ from the announced ones.
    """
    first = group.first
    if isinstance(stream, FlatBucketIterator):
        while first < group.stop:
            first = _lay(stream, manifest, group, first, buffer)
        return
    for begin, end in group.batches:
        # Do not keep (name, tensor) pairs: tens of thousands of tuples would trigger the garbage collector.
        names, weights = [], []
        for name, weight in islice(stream, end - begin):
            names.append(name)
            weights.append(weight)
        manifest.expect(first + begin, first + end, names, weights)
        if buffer is not None:
            group.fill(buffer, begin, end, weights)


def _lay(
    stream: FlatBucketIterator, manifest: Manifest, group: Group, first: int, buffer: torch.Tensor | None
) -> int:
    """Copy the stream's next flat bucket to the buffer and return the index after its last tensor. There is
    Python work per tensor only when the bucket first arrives."""
    bucket = stream.take(group.stop - first)
    if bucket is None:
        manifest.expect_infos(first, group.stop, ())
        # expect_infos always raises here; this line tells type checkers so.
        raise AssertionError("a group that is not full lacks something")
    stop = first + bucket.count
    if not first < stop <= group.stop:
        raise AssertionError(
            f"{type(stream).__name__} gave {bucket.count} weights, but 1 to {group.stop - first} "
            "were requested"
        )
    # The group is cached in the manifest, so the second refit finds all plans.
    plan = group.plans.get(first)
    if plan is None or not plan.serves(bucket):
        manifest.expect_infos(first, stop, bucket.infos())
        plan = group.plans[first] = CopyPlan(bucket, group.begins[first - group.first : stop - group.first])
    if buffer is not None:
        plan.run(bucket, buffer)
    return stop


def failing(error: Exception) -> WeightIterator:
    """Return a stream that raises ``error`` at its first item."""
    # Raise at the first next(), not at creation: all ranks have begun the refit by then.
    raise error
    yield


def drain(stream: WeightIterator) -> None:
    """Consume the rest of a stream. Every rank must do so even after an error of its own, because gathering
    is collective."""
    if isinstance(stream, FlatBucketIterator):
        while stream.take(sys.maxsize) is not None:
            pass
    else:
        for _ in stream:
            pass


def expect_end(stream: WeightIterator) -> None:
    """Run the stream to its end, including its code after the last tensor.

    Raises:
        RefitError: tensors are left.
    """
    for name, _ in stream:
        raise RefitError(
            f"the policy gives {name} after the last weight that was announced: make a new policy and engine"
        )


@dataclass(frozen=True, slots=True)
class Stages:
    """The pipeline stages that send weights.

    Attributes:
        count: number of stages.
        runs: ``(stage, number of tensors)`` of every run of consecutive tensors that one stage sends, in
            sending order; empty if stage 0 sends all.
    """

    count: int = 1
    runs: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, manifest: Manifest, names: Sequence[Sequence[str]]) -> Stages:
        """Build the runs from the names that each stage sends.

        Args:
            manifest: manifest of all weights.
            names: a list of names per stage, each in sending order.

        Raises:
            RefitError: a tensor is sent by no stage or by two, is not in the manifest, or is out of order.
        """
        owners: dict[str, int] = {}
        for stage, own in enumerate(names):
            owners.update(dict.fromkeys(own, stage))
        order = list(manifest.description())
        missing = [name for name in order if name not in owners]
        if missing:
            raise RefitError(
                f"no pipeline stage sends {missing[0]} and {len(missing) - 1} more weights: {_DEFECT}"
            )
        for stage, own in enumerate(names):
            # A stage must send in the manifest's order, in which the other side forms the groups.
            wanted = [name for name in order if owners[name] == stage]
            if wanted != list(own):
                raise RefitError(
                    f"pipeline stage {stage} sends {len(own)} weights, of which {len(wanted)} are its own "
                    f"in order: {_DEFECT}"
                )
        # Store runs instead of one range per stage: with an interleaved pipeline a stage has several, and
        # engines take all in one order.
        runs = groupby(order, owners.__getitem__)
        return cls(len(names), tuple((stage, len(list(run))) for stage, run in runs))

    def parts(self, manifest: Manifest, budget: int) -> Iterator[tuple[int, Group]]:
        """Yield (stage, group) for groups of at most ``budget`` bytes, in sending order.

        Raises:
            RefitError: a single tensor is larger than ``budget``, or the runs are of another model.
        """
        runs = self.runs or ((0, len(manifest.tensors)),)
        total = sum(count for _, count in runs)
        if total != len(manifest.tensors):
            raise RefitError(
                f"the policy's stages send {total} weights of {len(manifest.tensors)}: {_DEFECT}"
            )
        first = 0
        for stage, count in runs:
            for group in manifest.groups(budget, first, first + count):
                yield stage, group
            first += count


_DEFECT = "report the model and the layout, this is a fault of the export"
ONE_STAGE = Stages()
