"""Slices: which part of each weight a rank of an engine reads, found out by looking on, and what stands for a
whole weight of which it has no more than that part.

An engine's loaders are handed whole weights, and each rank keeps its own part of them; which one is nowhere
written down. Here the loaders are handed weights without values once, and what they copy of each is noted
(``Reads``). From then on a rank can be sent that part alone: in the place of the weight the loader gets a
``PartialWeight``, which has the shape of the whole. Views of it are made as of any tensor; values come from
the part, and whoever wants others gets an error, never other numbers. So nothing depends on how a loader
finds its part.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

from megarl.errors import RefitError


@dataclass(frozen=True, slots=True)
class Slice:
    """A run of indices of one dimension of a weight, with all indices of the others.

    Attributes:
        dim: the dimension.
        start, length: the first index, and how many.
    """

    dim: int
    start: int
    length: int

    @classmethod
    def all_of(cls, whole: Sequence[int]) -> Slice:
        """Return all of a weight of shape ``whole``."""
        return cls(0, 0, whole[0])

    @property
    def stop(self) -> int:
        """Index after the last one."""
        return self.start + self.length

    def shape_of(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice of a weight of shape ``whole``.

        Raises:
            RefitError: the weight does not have these indices.
        """
        if not (
            0 <= self.dim < len(whole)
            and self.start >= 0
            and self.length >= 0
            and self.stop <= whole[self.dim]
        ):
            raise RefitError(
                f"a slice from {self.start} to {self.stop} of dimension {self.dim} does not lie in a weight "
                f"of shape {list(whole)}: "
                "give policy and engine one model"
            )
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice of a weight, a view."""
        return whole.narrow(self.dim, self.start, self.length)

    def plain(self) -> list[int]:
        """Return it as three numbers; ``Slice(*plain)`` is the reverse."""
        return [self.dim, self.start, self.length]


Slices = Mapping[str, Slice]
"""What a rank of an engine reads, by the name of the weight; of a weight that is not there it reads all."""


@dataclass(frozen=True, slots=True)
class WantedSlices:
    """The slices of the policy's weights that ranks of colocated engines read.

    Attributes:
        ranks: for each rank of an engine, all engines alike.
        devices: the rank of its engine that is on a device, by the device's identity; empty on a CPU, where
            any process of the host can read any policy rank's buffer.
    """

    ranks: tuple[Slices, ...]
    devices: Mapping[str, int]


def names_digest(names: Sequence[str]) -> str:
    """Return the SHA-256 over names and their order, in hexadecimal."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def slices_digest(slices: Slices) -> str:
    """Return the SHA-256 over the slices of a rank, in any order, in hexadecimal."""
    return names_digest([f"{name} {slices[name].plain()}" for name in sorted(slices)])


class Reads:
    """Which elements of a weight are read, as a loader is seen to read them."""

    def __init__(self) -> None:
        self._boxes: list[tuple[range, ...]] = []

    def add(self, box: tuple[range, ...]) -> None:
        """Note a read of some indices of each dimension."""
        # An empty range in one dimension is a read of nothing; it must not widen the span of what was read.
        if all(box):
            self._boxes.append(box)

    def slice_of(self, whole: Sequence[int]) -> Slice | None:
        """Return the least slice that has all that was read, of length 0 where nothing was; None where that
        is the whole weight."""
        if not self._boxes:
            return Slice(0, 0, 0) if whole else None
        # One span over all reads: a slice is sent as a single run of indices, also where there are holes
        # between reads.
        spans = [
            range(min(span.start for span in along), max(span.stop for span in along))
            for along in zip(*self._boxes, strict=True)
        ]
        narrower = [
            dim for dim, (span, size) in enumerate(zip(spans, whole, strict=True)) if len(span) < size
        ]
        # Narrower in two dimensions, or in none: a run of one dimension would not say it, and the weight is
        # sent whole.
        if len(narrower) != 1:
            return None
        [dim] = narrower
        return Slice(dim, spans[dim].start, len(spans[dim]))


# where the values are; the meta tensor that stands for them would say that it has none
_OF_VALUES = ("device", "is_cpu", "is_cuda", "is_meta")
_WRITES = ("copy_", "__setitem__")


class PartialWeight(torch.Tensor):
    """A weight of which one slice is there, or nothing but the note of what is read of it.

    It is a tensor of torch's meta device, whose views say by offset and strides which elements they are.
    """

    _root: _Root

    @staticmethod
    def of(part: torch.Tensor, whole: Sequence[int], where: Slice) -> PartialWeight:
        """Return the weight of shape ``whole`` whose slice ``where`` is ``part``.

        Raises:
            RefitError: the part has another shape.
        """
        expected = where.shape_of(whole)
        if tuple(part.shape) != expected:
            raise RefitError(
                f"a slice of shape {list(part.shape)} came where {list(expected)} was announced: refit anew"
            )
        return _begun(part.dtype, _Root(tuple(whole), part.device, part=part, where=where))

    @staticmethod
    def noting(whole: Sequence[int], dtype: torch.dtype, device: torch.device, reads: Reads) -> PartialWeight:
        """Return a weight without values, which notes in ``reads`` what is read of it; what would be written
        with it is not."""
        return _begun(dtype, _Root(tuple(whole), device, reads=reads))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        # Without it every call below would come back to this method.
        with torch._C.DisableTorchFunctionSubclass():
            # Loaders ask for the device to decide where they copy to: "meta" would send them another way.
            if name == "__get__" and _property_of(func) in _OF_VALUES:
                return getattr(torch.empty(0, device=args[0]._root.device), _property_of(func))
            # Only the first argument is written to; a partial weight as the source of copy_ is what this
            # class is for.
            if isinstance(args[0] if args else None, PartialWeight) and _changes_in_place(name):
                raise RefitError(
                    f"{name} would write into a weight of which a slice came: report the model, and take "
                    "whole weights"
                )
            given = [one for one in tree_flatten((args, options))[0] if isinstance(one, PartialWeight)]
            # Tried on meta first: a view needs no values, and torch's own rules say what it is, whichever way
            # a loader slices.
            if len(given) == 1 and name not in _WRITES:
                # of a call that wants values, the meta tensor may have none to give
                with contextlib.suppress(NotImplementedError, RuntimeError):
                    seen = func(*_as_meta(args), **_as_meta(options))
                    if _lies_in(given[0], seen):
                        return tree_map(
                            lambda one: (
                                _continued(one, given[0]._root) if isinstance(one, torch.Tensor) else one
                            ),
                            seen,
                        )
            return _read(func, args, options, given)


@dataclass(frozen=True, slots=True)
class _Root:
    """State that all views of a weight share.

    Attributes:
        whole: shape of the weight.
        device: of its values.
        part, where: the values that are there.
        reads: where reads are noted, in the place of values.
    """

    whole: tuple[int, ...]
    device: torch.device
    part: torch.Tensor | None = None
    where: Slice | None = None
    reads: Reads | None = None

    def _block(self, view: torch.Tensor) -> tuple[range, ...] | None:
        """Return the indices of each dimension that a view has, where it is a block of the weight; None where
        it is another view."""
        strides = _strides(self.whole)
        # The stride of a dimension of size 1 means nothing, and torch sets it at will.
        lies_as_whole = all(
            size < 2 or stride == own
            for size, stride, own in zip(view.shape, view.stride(), strides, strict=False)
        )
        if view.dim() != len(self.whole) or not lies_as_whole:
            return None
        left, block = view.storage_offset(), []
        for size, stride in zip(view.shape, strides, strict=True):
            block.append(range(left // stride, left // stride + size))
            left %= stride
        return (
            tuple(block)
            if all(span.stop <= size for span, size in zip(block, self.whole, strict=True))
            else None
        )

    def _rows(self, view: torch.Tensor) -> tuple[range, ...]:
        """Return the rows in which all elements of a view lie, with all that is in them."""
        first = view.storage_offset()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
        )
        row = math.prod(self.whole[1:])
        return (range(first // row, last // row + 1), *(range(size) for size in self.whole[1:]))

    def note(self, view: torch.Tensor) -> None:
        """Note that a view is read."""
        assert self.reads is not None
        if view.numel():
            self.reads.add(self._block(view) or self._rows(view))

    def values(self, view: torch.Tensor) -> torch.Tensor:
        """Return the values of a view, a view of the part.

        Raises:
            RefitError: not all of them are there.
        """
        part, where = self.part, self.where
        assert part is not None and where is not None
        if not view.numel():
            return part.new_empty(view.shape)
        block = self._block(view)
        needed = (block or self._rows(view))[where.dim]
        # Rows alone can be compared with a view of any form; a slice of another dimension is scattered over
        # them.
        if (block is None and where.dim) or needed.start < where.start or needed.stop > where.stop:
            raise RefitError(
                f"the engine reads {needed.start} to {needed.stop} of dimension {where.dim} of a weight of "
                f"shape {list(self.whole)}, of "
                f"which it had read {where.start} to {where.stop}, and got no more: start new engines, and "
                "report the model"
            )
        if block is None:
            offset = view.storage_offset() - where.start * math.prod(self.whole[1:])
            flat = part.contiguous().view(-1)
            return flat.as_strided(view.shape, view.stride(), flat.storage_offset() + offset)
        for dim, span in enumerate(block):
            part = part.narrow(dim, span.start - (where.start if dim == where.dim else 0), len(span))
        return part


def _begun(dtype: torch.dtype, root: _Root) -> PartialWeight:
    return _continued(torch.empty(root.whole, dtype=dtype, device="meta"), root)


def _continued(view: torch.Tensor, root: _Root) -> PartialWeight:
    weight = view.as_subclass(PartialWeight)
    weight._root = root
    return weight


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of a contiguous tensor; at least 1, also of one without elements."""
    strides = [1]
    for size in reversed(shape[1:]):
        # As torch does it, and so that nothing below is divided by 0.
        strides.append(strides[-1] * max(size, 1))
    return strides[::-1][: len(shape)]


def _property_of(func: Callable[..., Any]) -> str:
    """Return the name of the property that a getter is of."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _changes_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _as_meta(value: Any) -> Any:
    """``value`` with the meta tensors that its partial weights are, on their device: who moves a weight reads
    it when it is there."""

    def on_meta(one: Any) -> Any:
        if isinstance(one, torch.device):
            return torch.device("meta")
        return one.as_subclass(torch.Tensor) if isinstance(one, PartialWeight) else one

    return tree_map(on_meta, value)


def _as_values(value: Any) -> Any:
    """``value`` with the values of its partial weights."""
    return tree_map(
        lambda one: (
            one._root.values(one.as_subclass(torch.Tensor)) if isinstance(one, PartialWeight) else one
        ),
        value,
    )


def _lies_in(weight: PartialWeight, found: Any) -> bool:
    """Return whether all tensors that a call gave are views of a weight; also if it gave none, but numbers
    about it."""
    # The address of the storage object: meta storages have no data pointer, it is 0 for all.
    memory = weight.untyped_storage()._cdata
    return all(
        one.untyped_storage()._cdata == memory
        for one in tree_flatten(found)[0]
        if isinstance(one, torch.Tensor)
    )


def _read(
    func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], given: Sequence[PartialWeight]
) -> Any:
    """Return what a call makes of values, or where it writes them. Where there are none, note that they are
    read: nothing is written, and the result is tensors whose reads nobody notes, because all that they are
    made of was read."""
    if all(one._root.reads is None for one in given):
        return func(*_as_values(args), **_as_values(options))
    for one in given:
        one._root.note(one.as_subclass(torch.Tensor))
    if getattr(func, "__name__", "") in _WRITES:
        return args[0]

    def unnoted(one: Any) -> Any:
        return (
            _begun(one.dtype, _Root(tuple(one.shape), given[0]._root.device, reads=Reads()))
            if isinstance(one, torch.Tensor)
            else one
        )

    return tree_map(unnoted, func(*_as_meta(args), **_as_meta(options)))
