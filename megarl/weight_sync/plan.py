"""Strided plans: the layout of weights in a transfer buffer, and the few copies that fill it.

The weights of a group are stored in sending order, each at a multiple of ``ALIGNMENT`` bytes; the gaps
between them are undefined. If an iterator provides flat tensors that contain the weights (``FlatBucket``), a
refit on a CPU has no time for one call per weight: strided copies are planned once. Weights that are adjacent
on both sides become one copy, and copies of one form at equal distances (the groups of query heads, the
ranks, the experts of a layer) become a single copy with one more dimension, so that there are few copies
however many tensors there are.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat

import torch

# This is the alignment that CUDA kernels require, which is more than any dtype requires.
ALIGNMENT = 256
# Take weights from a stream in batches of this many bytes, so that gathered ones are not kept for long.
STAGED_BYTES = 32 * 2**20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One weight: its Hugging Face name, its full shape and the dtype in which it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Return the info that describes this weight."""
        return cls(name, tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@functools.cache
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor, in elements, one per dimension."""
    # Ask torch for the strides, because as_strided compares with its convention for sizes 0 and 1.
    return torch.empty(shape, device="meta").stride()


def padded_bytes(nbytes: int) -> int:
    """Return the bytes that a weight of ``nbytes`` takes in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def begins_in_buffer(tensors: Iterable[TensorInfo]) -> array[int]:
    """Return the first byte of each weight in a buffer, followed by the bytes of all."""
    return array("q", accumulate((padded_bytes(info.nbytes) for info in tensors), initial=0))


@dataclass(frozen=True, slots=True)
class BufferRegion:
    """Contiguous region of a flat tensor in which a weight is stored.

    Attributes:
        name, shape: of the weight.
        flat: index of the flat tensor.
        begin: the weight's first element in the flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    flat: int
    begin: int

    def of(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight as a view of the flat tensors."""
        flat = flats[self.flat]
        # Use as_strided instead of narrow and view: it takes one call per weight, and handles flats that are
        # views with a storage offset.
        return flat.as_strided(self.shape, strides_of(self.shape), flat.storage_offset() + self.begin)


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Consecutive weights of a stream, stored in flat tensors.

    Attributes:
        places: regions of these weights and others; the same object at every refit.
        first, count: index of the first region of these weights, and their number.
        flats: tensors of one dtype without gaps.
    """

    places: Sequence[BufferRegion]
    first: int
    count: int
    flats: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all the weights."""
        return self.flats[0].dtype

    def infos(self) -> list[TensorInfo]:
        """Return the infos that describe the weights."""
        return [TensorInfo(place.name, place.shape, self.dtype) for place in self.chosen()]

    def chosen(self) -> Sequence[BufferRegion]:
        """Return the regions of these weights."""
        return self.places[self.first : self.first + self.count]


class FlatBucketIterator(Iterator[tuple[str, torch.Tensor]]):
    """Iterator over names and weights, one by one or many at once."""

    @abstractmethod
    def take(self, most: int) -> FlatBucket | None:
        """Return the next weights, at least one and at most ``most``; None after the last one. The flat
        tensors are valid until the next call."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of elements from one flat tensor to another.

    Attributes:
        source, target: position of the first element in the source and in the target.
        sizes: sizes of the dimensions that are copied.
        source_strides, target_strides: strides in elements, one per dimension.
    """

    source: int
    target: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @classmethod
    def run_of(cls, count: int, source: int, target: int) -> Copy:
        """Return the copy of ``count`` elements that are contiguous in source and target."""
        return cls(source, target, (count,), (1,), (1,))

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """Sizes and strides of the copy, without its positions."""
        return self.sizes, self.source_strides, self.target_strides

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Run the copy between two tensors without gaps, of any shape."""
        there = source.as_strided(self.sizes, self.source_strides, source.storage_offset() + self.source)
        target.as_strided(self.sizes, self.target_strides, target.storage_offset() + self.target).copy_(there)


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """Return fewer copies that copy the same elements to the same positions, in any order."""
    while True:
        forms: dict[tuple[tuple[int, ...], ...], list[Copy]] = {}
        for copy in copies:
            forms.setdefault(copy.form, []).append(copy)
        # Repeat until nothing changes, because each pass may add a dimension to copies, whose form then
        # matches others.
        fewer = list(chain.from_iterable(map(_at_equal_distances, forms.values())))
        if len(fewer) == len(copies):
            return fewer
        copies = fewer


def _at_equal_distances(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Yield copies of one form, in which runs of copies at evenly rising positions are merged into one."""
    first = 0
    while first < len(copies):
        begin, last = copies[first], first
        step = _distance(begin, copies[first + 1]) if first + 1 < len(copies) else (0, 0)
        # Both distances must be positive: as_strided accepts no negative strides, and 0 would write one
        # element twice.
        while min(step) > 0 and last + 1 < len(copies) and _distance(copies[last], copies[last + 1]) == step:
            last += 1
        sizes = (last - first + 1, *begin.sizes)
        several = Copy(
            begin.source,
            begin.target,
            sizes,
            (step[0], *begin.source_strides),
            (step[1], *begin.target_strides),
        )
        yield several if last > first else begin
        first = last + 1


def _distance(one: Copy, other: Copy) -> tuple[int, int]:
    return other.source - one.source, other.target - one.target


class CopyPlan:
    """The copies that write the weights of a flat bucket into a transfer buffer.

    Args:
        bucket: contains the weights; the plan also fits other buckets with the same layout.
        begins: first byte of each weight in the buffer, rising.
    """

    def __init__(self, bucket: FlatBucket, begins: Sequence[int]) -> None:
        self._alike = bucket.places, bucket.first, bucket.count, bucket.dtype
        by_flat: dict[int, list[Copy]] = {}
        for place, begin in zip(bucket.chosen(), begins, strict=True):
            count, source, target = math.prod(place.shape), place.begin, begin // bucket.dtype.itemsize
            copies = by_flat.setdefault(place.flat, [])
            last = copies[-1] if copies else None
            if last is not None and (last.source + last.sizes[0], last.target + last.sizes[0]) == (
                source,
                target,
            ):
                copies[-1] = Copy.run_of(last.sizes[0] + count, last.source, last.target)
            # A weight without elements has a region, but nothing to copy.
            elif count:
                copies.append(Copy.run_of(count, source, target))
        self.copies: list[tuple[int, Copy]] = []
        for flat, copies in by_flat.items():
            self.copies += zip(repeat(flat), merged(copies))

    def serves(self, bucket: FlatBucket) -> bool:
        """Return whether a flat bucket has the layout for which this plan was built."""
        places, *others = self._alike
        # Compare by identity: the iterator returns the same object at every refit, and comparing thousands of
        # regions would take longer than copying them.
        return bucket.places is places and [bucket.first, bucket.count, bucket.dtype] == others

    @torch.no_grad()
    def run(self, bucket: FlatBucket, buffer: torch.Tensor) -> None:
        """Copy the weights into ``buffer``, uint8."""
        target = buffer.view(bucket.dtype)
        for flat, copy in self.copies:
            copy.run(bucket.flats[flat], target)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Consecutive weights that are sent together.

    Attributes:
        first: index of the first weight in the manifest.
        tensors: the weights.
        begins: first byte of each weight in a buffer, followed by the bytes of all.
        gaps: bytes of padding after each weight.
        batches: first weight and end of each batch in which weights that arrive one by one are copied, as
            indices within the group; each batch has one dtype.
        plans: copy plans of flat buckets, by the manifest's index of the first weight; built when the buckets
            arrive.
    """

    first: int
    tensors: Sequence[TensorInfo]
    begins: array[int]
    gaps: bytes
    batches: list[tuple[int, int]]
    plans: dict[int, CopyPlan] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of weights."""
        return len(self.tensors)

    @property
    def names(self) -> list[str]:
        """Names of the weights."""
        return [info.name for info in self.tensors]

    @property
    def stop(self) -> int:
        """Index after the last weight."""
        return self.first + len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, padding included."""
        return self.begins[-1]

    @classmethod
    def of(cls, first: int, tensors: Sequence[TensorInfo]) -> Group:
        """Lay out consecutive weights; ``first`` is the index of the first one."""
        begins = begins_in_buffer(tensors)
        gaps = bytes(-info.nbytes % ALIGNMENT for info in tensors)
        batches, begin = [], 0
        for end in range(1, len(tensors) + 1):
            full = end == len(tensors) or begins[end] - begins[begin] >= STAGED_BYTES
            if full or tensors[end].dtype != tensors[begin].dtype:
                batches.append((begin, end))
                begin = end
        return cls(first, tensors, begins, gaps, batches)

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        """Return names and weights in sending order, as views of a buffer, uint8 and at least as long as the
        group."""
        dtypes = {info.dtype for info in self.tensors}
        flats = dict(zip(dtypes, map(buffer.view, dtypes), strict=True))
        views = []
        for info, begin in zip(self.tensors, self.begins, strict=False):
            # The division is exact, because ALIGNMENT is a multiple of every item size.
            offset = (buffer.storage_offset() + begin) // info.dtype.itemsize
            views.append(
                (info.name, flats[info.dtype].as_strided(info.shape, strides_of(info.shape), offset))
            )
        return views

    @torch.no_grad()
    def fill(self, buffer: torch.Tensor, begin: int, end: int, weights: Sequence[torch.Tensor]) -> None:
        """Copy a batch of weights that arrived one by one into a buffer.

        ``torch.cat`` copies thousands of small weights twice as fast as ``torch._foreach_copy_`` on a CPU.

        Args:
            buffer: uint8, at least as long as the group.
            begin, end: one of ``batches``.
            weights: weights with the announced shapes and dtypes, which must be checked before: with other
                shapes ``torch.cat`` would write past the end, with no more than a warning.
        """
        if buffer.is_cuda:
            # A backend that offloads may have the weights in host memory, which torch.cat cannot read.
            weights = [weight.to(buffer.device, non_blocking=True) for weight in weights]
        # Avoid Python code per weight, of which there may be tens of thousands.
        flat = [weight if weight.dim() == 1 else weight.flatten() for weight in weights]
        dtype, gaps = weights[0].dtype, self.gaps[begin:end]
        # Make one tensor for all gaps of a size, because torch.cat accepts the same tensor repeatedly.
        zeros = {
            gap: torch.zeros(gap // dtype.itemsize, dtype=dtype, device=buffer.device) for gap in set(gaps)
        }
        parts = chain.from_iterable(zip(flat, map(zeros.__getitem__, gaps), strict=True))
        torch.cat([*parts], out=buffer[self.begins[begin] : self.begins[end]].view(dtype))


# Limit the chunk, so that int64 copies of int32 words take 32 MiB at a time, and not twice the buffer.
_CHUNK = 1 << 22
# The factor is odd, so that multiplication by it loses nothing modulo 2^64 (Knuth's multiplicative hashing,
# the 64-bit constant of the golden ratio).
_FACTOR = -7046029254386353131


def checksum(data: torch.Tensor) -> int:
    """Return the sum over int32 words of (word times an odd number that depends on its position), modulo
    2^64, as a signed number.

    Args:
        data: uint8, a multiple of 4 long, on any device.
    """
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    places = torch.arange(min(_CHUNK, max(words.numel(), 1)), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        weights = (places[: part.numel()] + start).mul_(2).add_(1).mul_(_FACTOR)
        # Shift, because otherwise the factors would rise evenly from word to word, and changes that balance
        # along the buffer (+1, -2, +1) would be missed.
        total += (part * (weights ^ (weights >> 29) | 1)).sum()
    return int(total)
