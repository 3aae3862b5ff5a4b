"""Layout of weight tensors in a transfer buffer, and the strided copies that fill it.

The tensors of a group are stored in sending order, each at a multiple of ``ALIGNMENT`` bytes; gaps between
them are undefined. On a CPU one call per tensor takes too long for a refit. If an iterator provides flat
tensors that contain the weights (``FlatBucket``), strided copies are planned once: tensors that are adjacent
on both sides are copied together, and copies of one form at equal distances (groups of query heads, ranks,
experts of a layer) become one copy with one more dimension. There are then few copies for any number of
tensors.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, repeat

import torch

# CUDA kernels require this alignment; no dtype needs more.
ALIGNMENT = 256
# Batch size for tensors taken from a stream, so that gathered ones are not kept for long.
STAGED_BYTES = 32 * 2**20
NamedTensor = tuple[str, torch.Tensor]
WeightIterator = Iterator[NamedTensor]
Weights = list[NamedTensor]
# A function that loads weights, which are valid until it returns.
Load = Callable[[Weights], None]


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Hugging Face name, shape, and dtype of a weight tensor as it is sent."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Return the description of a tensor."""
        return cls(name, tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@functools.cache
def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor in elements."""
    # Ask torch, because as_strided compares with its convention for sizes 0 and 1.
    return torch.empty(shape, device="meta").stride()


def padded_bytes(nbytes: int) -> int:
    """Return the bytes that a tensor of ``nbytes`` takes in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def begins_in_buffer(tensors: Iterable[TensorInfo]) -> array[int]:
    """Return the first byte of each weight in a buffer, followed by the bytes of all."""
    return array("q", accumulate((padded_bytes(info.nbytes) for info in tensors), initial=0))


@dataclass(frozen=True, slots=True)
class BufferRegion:
    """The region of a flat tensor that contains a weight tensor.

    Attributes:
        name, shape: name and shape of the weight tensor.
        flat: index of the flat tensor.
        begin: index of the weight's first element in the flat tensor.
    """

    name: str
    shape: tuple[int, ...]
    flat: int
    begin: int

    def of(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the weight tensor as a view of its flat tensor."""
        flat = flats[self.flat]
        # as_strided is one call instead of two (narrow, view), and handles flat tensors with a storage
        # offset.
        return flat.as_strided(self.shape, strides_of(self.shape), flat.storage_offset() + self.begin)


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Consecutive weight tensors of a stream, stored in flat tensors.

    Attributes:
        places: regions of these and other weight tensors; the same object at every refit.
        first, count: index in ``places`` of the first of these weights, and their number.
        flats: contiguous flat tensors of one dtype.
    """

    places: Sequence[BufferRegion]
    first: int
    count: int
    flats: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of all the weight tensors."""
        return self.flats[0].dtype

    def infos(self) -> list[TensorInfo]:
        """Return descriptions of the weight tensors."""
        return [TensorInfo(place.name, place.shape, self.dtype) for place in self.chosen()]

    def chosen(self) -> Sequence[BufferRegion]:
        """Return the regions of these weight tensors."""
        return self.places[self.first : self.first + self.count]


class FlatBucketIterator(WeightIterator):
    """Iterator over names and weight tensors, which can also return many at once (``take``)."""

    @abstractmethod
    def take(self, most: int) -> FlatBucket | None:
        """Return the next weight tensors, at least one and at most ``most``; None at the end. The flat
        tensors are valid until the next call."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A strided copy of elements from one flat tensor to another.

    Attributes:
        source, target: index of the first element in the source and in the target.
        sizes: sizes of the copied dimensions.
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
        """Execute the copy between two contiguous tensors of any shape."""
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
    """Merge runs of copies at evenly increasing positions; all given copies have one form."""
    first = 0
    while first < len(copies):
        begin, last = copies[first], first
        step = _distance(begin, copies[first + 1]) if first + 1 < len(copies) else (0, 0)
        # Both distances must be positive: as_strided accepts no negative strides, and 0 would write elements
        # twice.
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
        bucket: contains the weights; the plan can be used for other buckets with the same layout.
        begins: first byte of each weight tensor in the buffer, increasing.
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
            # An empty tensor has a region, but nothing to copy.
            elif count:
                copies.append(Copy.run_of(count, source, target))
        self.copies: list[tuple[int, Copy]] = []
        for flat, copies in by_flat.items():
            self.copies += zip(repeat(flat), merged(copies))

    def serves(self, bucket: FlatBucket) -> bool:
        """Return whether a flat bucket has the layout that this plan was built for."""
        places, *others = self._alike
        # Compare by identity: the iterator returns the same object at every refit, and comparing thousands of
        # regions would take longer than copying.
        return bucket.places is places and [bucket.first, bucket.count, bucket.dtype] == others

    @torch.no_grad()
    def run(self, bucket: FlatBucket, buffer: torch.Tensor) -> None:
        """Copy the weights into ``buffer`` (uint8)."""
        target = buffer.view(bucket.dtype)
        for flat, copy in self.copies:
            copy.run(bucket.flats[flat], target)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """Consecutive weight tensors that are sent together.

    Attributes:
        first: index of the first tensor in the manifest.
        tensors: the weight tensors.
        begins: first byte of each tensor in a buffer, followed by the total bytes.
        gaps: bytes of padding after each tensor.
        batches: (start, end) of each batch in which tensors that arrive one by one are copied, as indices
            within the group; each batch has one dtype.
        plans: copy plans of flat buckets, by the manifest index of the bucket's first tensor; built when a
            bucket arrives.
    """

    first: int
    tensors: Sequence[TensorInfo]
    begins: array[int]
    gaps: bytes
    batches: list[tuple[int, int]]
    plans: dict[int, CopyPlan] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of weight tensors."""
        return len(self.tensors)

    @property
    def names(self) -> list[str]:
        """Names of the weight tensors."""
        return [info.name for info in self.tensors]

    @property
    def stop(self) -> int:
        """Manifest index after the last tensor."""
        return self.first + len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes in a buffer, padding included."""
        return self.begins[-1]

    @classmethod
    def of(cls, first: int, tensors: Sequence[TensorInfo]) -> Group:
        """Lay out consecutive weight tensors; ``first`` is the manifest index of the first one."""
        begins = begins_in_buffer(tensors)
        gaps = bytes(-info.nbytes % ALIGNMENT for info in tensors)
        batches, begin = [], 0
        for end in range(1, len(tensors) + 1):
            full = end == len(tensors) or begins[end] - begins[begin] >= STAGED_BYTES
            if full or tensors[end].dtype != tensors[begin].dtype:
                batches.append((begin, end))
                begin = end
        return cls(first, tensors, begins, gaps, batches)

    def views(self, buffer: torch.Tensor) -> Weights:
        """Return names and tensors in sending order, as views of a buffer (uint8, at least as long as the
        group)."""
        dtypes = {info.dtype for info in self.tensors}
        flats = dict(zip(dtypes, map(buffer.view, dtypes), strict=True))
        views = []
        for info, begin in zip(self.tensors, self.begins, strict=False):
            # The division is exact: ALIGNMENT is a multiple of every item size.
            offset = (buffer.storage_offset() + begin) // info.dtype.itemsize
            views.append(
                (info.name, flats[info.dtype].as_strided(info.shape, strides_of(info.shape), offset))
            )
        return views

    @torch.no_grad()
    def fill(self, buffer: torch.Tensor, begin: int, end: int, weights: Sequence[torch.Tensor]) -> None:
        """Copy a batch of tensors that arrived one by one into a buffer.

        On a CPU ``torch.cat`` copies thousands of small tensors twice as fast as ``torch._foreach_copy_``.

        Args:
            buffer: uint8, at least as long as the group.
            begin, end: one of ``batches``.
            weights: tensors with the announced shapes and dtypes. The caller must check these: with other
                shapes ``torch.cat`` would write past the end, with no more than a warning.
        """
        if buffer.is_cuda:
            # An offloading backend may yield tensors in host memory, which torch.cat cannot mix with device
            # memory.
            weights = [weight.to(buffer.device, non_blocking=True) for weight in weights]
        # Keep the Python work per tensor minimal: there may be tens of thousands.
        flat = [weight if weight.dim() == 1 else weight.flatten() for weight in weights]
        dtype, gaps = weights[0].dtype, self.gaps[begin:end]
        # One tensor of zeros per gap size suffices, because torch.cat accepts a tensor repeatedly.
        zeros = {
            gap: torch.zeros(gap // dtype.itemsize, dtype=dtype, device=buffer.device) for gap in set(gaps)
        }
        parts = chain.from_iterable(zip(flat, map(zeros.__getitem__, gaps), strict=True))
        torch.cat([*parts], out=buffer[self.begins[begin] : self.begins[end]].view(dtype))


# Chunk size that limits the int64 copies of int32 words to 32 MiB at a time, instead of twice the buffer.
_CHUNK = 1 << 22
# An odd factor, so that multiplication modulo 2^64 is invertible (Knuth's multiplicative hashing, the 64-bit
# constant of the golden ratio).
_FACTOR = -7046029254386353131


def checksum(data: torch.Tensor) -> int:
    """Return the sum over int32 words of word times an odd, position-dependent factor, modulo 2^64, as a
    signed number.

    Args:
        data: uint8, length a multiple of 4, on any device.
    """
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    places = torch.arange(min(_CHUNK, max(words.numel(), 1)), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        weights = (places[: part.numel()] + start).mul_(2).add_(1).mul_(_FACTOR)
        # Without the shift the factors would increase evenly, and changes that balance along the buffer (+1,
        # -2, +1) would be missed.
        total += (part * (weights ^ (weights >> 29) | 1)).sum()
    return int(total)
