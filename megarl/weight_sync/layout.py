"""Layout of flat buckets: where the weights of a group lie in a transfer buffer, and the few copies that fill and empty it.

A refit on a CPU has no time for a call a weight when there are tens of thousands. Weights of one dtype whose shapes differ in their first
size alone lie one after another, as the rows of one tensor. ``torch.cat`` fills it with those that come one by one, on a GPU with a kernel
for a hundred of them. Where an iterator says in which flat tensors weights lie (``FlatBucket``), strided copies are worked out once: copies
of one form at equal distances (the groups of query heads, the ranks, the experts of a layer) become a single one with one more dimension,
so that there are few however many tensors there are. ``split`` makes all views of a bucket.
"""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, chain
from operator import itemgetter
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class BufferRegion:
    """Region of a buffer in which a weight lies, contiguous.

    Attributes:
        name, shape: of the weight.
        flat: which of the flat tensors.
        begin: its first element there.
        strides: of the weight, elements.
    """

    name: str
    shape: tuple[int, ...]
    flat: int
    begin: int
    strides: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "strides", strides_of(self.shape))

    def of(self, flats: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight, in the memory of the flat tensors."""
        flat = flats[self.flat]
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.begin)


@dataclass(frozen=True, slots=True)
class FlatBucket:
    """Neighbouring weights of a stream.

    Attributes:
        places: of these weights and others; the same object at every refit.
        first, count: which of the places.
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
        """Infos that would announce the weights."""
        return [TensorInfo(place.name, place.shape, self.dtype) for place in self.chosen()]

    def chosen(self) -> Sequence[BufferRegion]:
        """The places of these weights."""
        return self.places[self.first : self.first + self.count]


class FlatBucketIterator(Iterator[tuple[str, torch.Tensor]]):
    """Names and weights, one by one or many at once."""

    @abstractmethod
    def take(self, most: int) -> FlatBucket | None:
        """Weights that come next, from one up to ``most``; None after the last one. The flat tensors are for use until the next call."""


class CopyPlan:
    """The copies that lay the weights of a flat bucket into a transfer buffer; few where their sizes are few, which may come in any order.

    Args:
        flat_bucket: of these weights; another one like it will do.
        begins: of each weight in the buffer, in bytes, multiples of what a dtype wants.
    """

    def __init__(self, flat_bucket: FlatBucket, begins: Sequence[int]) -> None:
        self._alike = flat_bucket.places, flat_bucket.first, flat_bucket.count, flat_bucket.dtype
        by_flat: dict[int, list[Copy]] = {}
        for place, info, begin in zip(flat_bucket.chosen(), flat_bucket.infos(), begins, strict=True):
            if info.nbytes:
                copy = Copy.run_of(info.nbytes // info.dtype.itemsize, place.begin, begin // info.dtype.itemsize)
                by_flat.setdefault(place.flat, []).append(copy)
        # what lies together in the buffer has one form, and is found there in its order
        self._copies = {flat: merged(sorted(copies, key=lambda copy: copy.target)) for flat, copies in by_flat.items()}

    def serves(self, flat_bucket: FlatBucket) -> bool:
        """Whether a flat bucket's weights lie as those did that this was made for."""
        places, first, count, dtype = self._alike
        return flat_bucket.places is places and (flat_bucket.first, flat_bucket.count, flat_bucket.dtype) == (first, count, dtype)

    @property
    def count(self) -> int:
        """Copies."""
        return sum(len(copies) for copies in self._copies.values())

    @torch.no_grad()
    def run(self, flat_bucket: FlatBucket, buffer: torch.Tensor) -> None:
        """Copy the weights into ``buffer``, uint8."""
        target = buffer.view(flat_bucket.dtype)
        for flat, copies in self._copies.items():
            for copy in copies:
                copy.run(flat_bucket.flats[flat], target)


@dataclass(frozen=True, slots=True)
class Copy:
    """Elements of one flat tensor that go into another one.

    Attributes:
        source, target: the first element's place there and here.
        sizes: of the dimensions along which they lie.
        source_strides, target_strides: elements from one index to the next, a dimension each.
    """

    source: int
    target: int
    sizes: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @classmethod
    def run_of(cls, count: int, source: int, target: int) -> Copy:
        """``count`` elements that lie one after another, there and here."""
        return cls(source, target, (count,), (1,), (1,))

    @property
    def form(self) -> tuple[tuple[int, ...], ...]:
        """All but the places."""
        return self.sizes, self.source_strides, self.target_strides

    def run(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy; both tensors without gaps, of any shape."""
        there = source.as_strided(self.sizes, self.source_strides, source.storage_offset() + self.source)
        target.as_strided(self.sizes, self.target_strides, target.storage_offset() + self.target).copy_(there)


def merged(copies: Sequence[Copy]) -> list[Copy]:
    """Fewer copies of the same elements to the same places, in any order."""
    while True:
        forms: dict[tuple[tuple[int, ...], ...], list[Copy]] = {}
        for copy in copies:
            forms.setdefault(copy.form, []).append(copy)
        fewer = [copy for alike in forms.values() for copy in _at_equal_distances(alike)]
        if len(fewer) == len(copies):
            return fewer
        copies = fewer


def _at_equal_distances(copies: Sequence[Copy]) -> Iterator[Copy]:
    """Copies of one form: runs of them whose places rise evenly as one."""
    first = 0
    while first < len(copies):
        begin, last = copies[first], first
        step = _distance(begin, copies[first + 1]) if first + 1 < len(copies) else (0, 0)
        while min(step) > 0 and last + 1 < len(copies) and _distance(copies[last], copies[last + 1]) == step:
            last += 1
        sizes = (last - first + 1, *begin.sizes)
        several = Copy(begin.source, begin.target, sizes, (step[0], *begin.source_strides), (step[1], *begin.target_strides))
        yield several if last > first else begin
        first = last + 1


def _distance(one: Copy, other: Copy) -> tuple[int, int]:
    return other.source - one.source, other.target - one.target


# what the kernels of CUDA want of a tensor's beginning, and more than any dtype wants
ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One weight: its Hugging Face name, its full shape and the dtype it is sent in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return math.prod(self.shape) * self.dtype.itemsize

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> TensorInfo:
        """Return the info that announces this weight."""
        return cls(name, tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor: elements from one index to the next, a dimension each."""
    return torch.empty(tuple(shape), device="meta").stride()


def padded_bytes(nbytes: int) -> int:
    """Bytes that a weight takes in a buffer."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


# weights are taken in batches of this many bytes, so that gathered ones are not kept for long; they lie together in the buffer
STAGED_BYTES = 32 * 2**20

# what torch.cat takes
Tensors = list[torch.Tensor] | tuple[torch.Tensor, ...]
Pick = Callable[[Sequence[Any]], Any]


class CopyRun:
    """Weights of a batch that lie one after another.

    Args:
        places: of the weights, in their batch.
        infos: the weights.
        begin: where they begin in the group's buffer, in bytes, a multiple of ``ALIGNMENT``.
    """

    def __init__(self, places: Sequence[int], infos: Sequence[TensorInfo], begin: int) -> None:
        self._pick = _pick(places)
        self._dtype = infos[0].dtype
        self._begin = begin
        self.end = begin + sum(padded_bytes(info.nbytes) for info in infos)

    def _place(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self._begin : self.end].view(self._dtype)

    def fill(self, buffer: torch.Tensor, weights: Tensors) -> None:
        """Copy the weights of this run out of those of the batch, and zeros between them."""
        raise NotImplementedError

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zeros between the weights, and nothing else."""

    def views(self, buffer: torch.Tensor) -> Tensors:
        """The weights where they lie."""
        raise NotImplementedError

    def begins(self) -> list[int]:
        """Return where each weight begins in the group's buffer, in bytes."""
        *begins, _ = accumulate(self._lengths(), initial=0)
        return [self._begin + begin * self._dtype.itemsize for begin in begins]

    def _lengths(self) -> Iterable[int]:
        """Elements from the beginning of a weight to that of the next one."""
        raise NotImplementedError


class Rows(CopyRun):
    """Weights that need no padding, with the same sizes but for the first: rows of one tensor."""

    def __init__(self, places: Sequence[int], infos: Sequence[TensorInfo], begin: int) -> None:
        super().__init__(places, infos, begin)
        self._row = infos[0].shape[1:]
        self._counts = [info.shape[0] for info in infos]

    def fill(self, buffer: torch.Tensor, weights: Tensors) -> None:
        torch.cat(self._pick(weights), out=self._rows(buffer))

    def views(self, buffer: torch.Tensor) -> Tensors:
        return self._rows(buffer).split(self._counts)

    def _lengths(self) -> Iterable[int]:
        return (count * math.prod(self._row) for count in self._counts)

    def _rows(self, buffer: torch.Tensor) -> torch.Tensor:
        return self._place(buffer).view(-1, *self._row)


@dataclass(frozen=True, slots=True)
class _Form:
    """Form: what weights of one shape and dtype have in common: strides without gaps, elements with padding, and how many of these are
    zeros."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    length: int
    zeros: int


@functools.cache
def _form(shape: tuple[int, ...], dtype: torch.dtype) -> _Form:
    count = math.prod(shape)
    length = padded_bytes(count * dtype.itemsize) // dtype.itemsize
    return _Form(shape, strides_of(shape), length, length - count)


class Padded(CopyRun):
    """Weights of any shapes, each with zeros behind it up to where the next one may begin."""

    def __init__(self, places: Sequence[int], infos: Sequence[TensorInfo], begin: int) -> None:
        super().__init__(places, infos, begin)
        self._to_flatten = [index for index, info in enumerate(infos) if len(info.shape) != 1]
        self._forms = [_form(info.shape, info.dtype) for info in infos]
        self._zeros = sorted({form.zeros for form in self._forms})

    def fill(self, buffer: torch.Tensor, weights: Tensors) -> None:
        flat = list(self._pick(weights))
        for index in self._to_flatten:
            flat[index] = flat[index].flatten()
        most = torch.zeros(self._zeros[-1], dtype=self._dtype, device=buffer.device)
        zeros = {count: most[:count] for count in self._zeros}
        parts = flat * 2
        parts[::2], parts[1::2] = flat, [zeros[form.zeros] for form in self._forms]
        torch.cat(parts, out=self._place(buffer))

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        place = self._place(buffer)
        for gap in self._gaps:
            place.as_strided(gap.sizes, gap.target_strides, place.storage_offset() + gap.target).zero_()

    def _lengths(self) -> Iterable[int]:
        return (form.length for form in self._forms)

    @cached_property
    def _gaps(self) -> list[Copy]:
        """Return the copies of zeros between the weights, in few pieces; their targets alone count."""
        ends = zip(self._forms, accumulate(self._lengths()), strict=True)
        return merged([Copy.run_of(form.zeros, end - form.zeros, end - form.zeros) for form, end in ends if form.zeros])

    def views(self, buffer: torch.Tensor) -> Tensors:
        place = self._place(buffer)
        begin, views = place.storage_offset(), []
        for form in self._forms:
            views.append(place.as_strided(form.shape, form.strides, begin))
            begin += form.length
        return views


class CopyBatch:
    """Neighbouring weights that are taken from a stream at once.

    Args:
        infos: the weights.
        begin: where they begin in the group's buffer, in bytes, a multiple of ``ALIGNMENT``.
    """

    def __init__(self, infos: Sequence[TensorInfo], begin: int) -> None:
        self.count = len(infos)
        alike: dict[tuple[torch.dtype, tuple[int, ...] | None], list[int]] = {}
        for place, info in enumerate(infos):
            alike.setdefault((info.dtype, _row(info)), []).append(place)
        self._runs: list[CopyRun] = []
        for (_, row), places in alike.items():
            run = (Padded if row is None else Rows)(places, [infos[place] for place in places], begin)
            self._runs.append(run)
            begin = run.end
        there = list(chain.from_iterable(alike.values()))
        self._in_order = _pick(sorted(range(len(there)), key=there.__getitem__))

    @torch.no_grad()
    def fill(self, buffer: torch.Tensor, weights: Tensors) -> None:
        """Copy all weights into a buffer.

        Args:
            buffer: uint8, at least as long as the group.
            weights: with the announced shapes and dtypes, in the order of sending. That has to be known before: of other shapes
                ``torch.cat`` would lay down as many bytes as there are, past the end, with no more than a warning.
        """
        if buffer.is_cuda:
            # a backend that offloads may have them in host memory, which torch.cat does not read
            weights = [weight.to(buffer.device, non_blocking=True) for weight in weights]
        for run in self._runs:
            run.fill(buffer, weights)

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zeros between the weights, and nothing else."""
        for run in self._runs:
            run.clear_gaps(buffer)

    def begins(self) -> Sequence[int]:
        """Return where each weight begins in the group's buffer, in bytes, in the order of sending."""
        begins: Sequence[int] = self._in_order([*chain.from_iterable(run.begins() for run in self._runs)])
        return begins

    def views(self, buffer: torch.Tensor) -> Tensors:
        """The weights where they lie in a buffer, in the order of sending."""
        return self._in_order([*chain.from_iterable(run.views(buffer) for run in self._runs)])


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring weights that are sent together.

    Attributes:
        first: index of the first one in the manifest.
        count: of the weights.
        nbytes: of the buffer, padding included.
        batches: in which they come.
        layings: how flat buckets of them are laid into a buffer, by the manifest's index of the first weight; worked out when they come.
    """

    first: int
    count: int
    nbytes: int
    batches: tuple[CopyBatch, ...]
    layings: dict[int, CopyPlan] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of(cls, first: int, infos: Sequence[TensorInfo]) -> Group:
        """Lay out the weights ``infos``, of which ``first`` is the first one's index."""
        ends = list(accumulate(padded_bytes(info.nbytes) for info in infos))
        return cls(first, len(infos), ends[-1] if ends else 0, tuple(_batches(infos, ends)))

    @property
    def stop(self) -> int:
        """Index after the last weight."""
        return self.first + self.count

    def begins(self) -> list[int]:
        """Return where each weight begins in a buffer, in bytes, in the order of sending."""
        return [*chain.from_iterable(batch.begins() for batch in self.batches)]

    def clear_gaps(self, buffer: torch.Tensor) -> None:
        """Zeros between the weights, and nothing else."""
        for batch in self.batches:
            batch.clear_gaps(buffer)

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """The weights where they lie in a buffer, in the order of sending; the buffer is uint8, at least as long as the group."""
        return [*chain.from_iterable(batch.views(buffer) for batch in self.batches)]


def _batches(infos: Sequence[TensorInfo], ends: Sequence[int]) -> Iterator[CopyBatch]:
    begins = [0, *ends]
    first = 0
    for index in range(1, len(infos) + 1):
        if index == len(infos) or begins[index] - begins[first] >= STAGED_BYTES:
            yield CopyBatch(infos[first:index], begins[first])
            first = index


def _row(info: TensorInfo) -> tuple[int, ...] | None:
    """The shape of a weight's rows, if it can lie as rows among others; None where it needs padding, or has none."""
    return info.shape[1:] if info.shape and info.nbytes and info.nbytes % ALIGNMENT == 0 else None


def _pick(places: Sequence[int]) -> Pick:
    """Return what gives the elements at ``places``, with as little Python for each as can be."""
    if list(places) == list(range(places[0], places[-1] + 1)):
        return itemgetter(slice(places[0], places[-1] + 1))
    return itemgetter(*places)


_CHUNK = 1 << 22
# odd, so that multiplying by it loses nothing modulo 2^64 (Knuth's multiplicative hashing, the 64-bit constant of the golden ratio)
_FACTOR = -7046029254386353131


def checksum(data: torch.Tensor) -> int:
    """Sum over int32 words of (word times an odd number that depends on its place), modulo 2^64, as a signed number.

    Args:
        data: uint8, a multiple of 4 long, on any device.
    """
    words = data.view(torch.int32)
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    places = torch.arange(min(_CHUNK, max(words.numel(), 1)), dtype=torch.int64, device=data.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        weights = (places[: part.numel()] + start).mul_(2).add_(1).mul_(_FACTOR)
        total += (part * (weights ^ (weights >> 29) | 1)).sum()
    return int(total)
