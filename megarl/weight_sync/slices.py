"""Slices: the part of each weight tensor that an engine rank reads, found by observation, and a tensor that
stands in for the full weight when only that part was sent.

An engine's weight loaders expect full tensors, and each rank keeps its own part; which part is not declared
anywhere. So the loaders are called once with tensors without values, and the regions that they copy are
recorded (``Reads``). From then on a rank can be sent that part alone: the loader gets a ``PartialWeight``
with the full shape. Its views work like those of any tensor. Values come from the part, and reading others is
an error, never a wrong number. Thus nothing depends on how a loader selects its part.
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
    """A range of indices in one dimension of a weight tensor, and all indices in the others.

    Attributes:
        dim: the dimension.
        start, length: first index, and number of indices.
    """

    dim: int
    start: int
    length: int

    @classmethod
    def all_of(cls, whole: Sequence[int]) -> Slice:
        """Return the slice that covers a whole tensor of shape ``whole``."""
        return cls(0, 0, whole[0])

    @property
    def stop(self) -> int:
        """Index after the last index."""
        return self.start + self.length

    def shape_of(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the slice of a tensor of shape ``whole``.

        Raises:
            RefitError: the tensor does not have these indices.
        """
        if not (
            0 <= self.dim < len(whole)
            and self.start >= 0
            and self.length >= 0
            and self.stop <= whole[self.dim]
        ):
            raise RefitError(
                f"a slice from {self.start} to {self.stop} of dimension {self.dim} is outside a "
                f"weight of shape {list(whole)}: give policy and engine one model"
            )
        return (*whole[: self.dim], self.length, *whole[self.dim + 1 :])

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the slice of a full tensor, as a view."""
        return whole.narrow(self.dim, self.start, self.length)

    def plain(self) -> list[int]:
        """Return ``[dim, start, length]``; ``Slice(*plain)`` is the inverse."""
        return [self.dim, self.start, self.length]


Slices = Mapping[str, Slice]
"""Slices that an engine rank reads, by tensor name. Tensors that are not listed are read in full."""


@dataclass(frozen=True, slots=True)
class WantedSlices:
    """The slices of the policy's weights that the ranks of colocated engines read.

    Attributes:
        ranks: slices of each engine rank; every engine has the same ones.
        devices: engine rank on each device, by device identity; empty on a CPU, where every process of the
            host can read every policy rank's buffer.
    """

    ranks: tuple[Slices, ...]
    devices: Mapping[str, int]


def names_digest(names: Sequence[str]) -> str:
    """Return the SHA-256 hex digest of an ordered list of names."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()


def slices_digest(slices: Slices) -> str:
    """Return the SHA-256 hex digest of a rank's slices, independent of their order."""
    return names_digest([f"{name} {slices[name].plain()}" for name in sorted(slices)])


class Reads:
    """Record of the elements of a weight tensor that a loader reads."""

    def __init__(self) -> None:
        self._boxes: list[tuple[range, ...]] = []

    def add(self, box: tuple[range, ...]) -> None:
        """Record a read of a box, given as one index range per dimension."""
        # A box with an empty range reads nothing, and must not widen the span of the reads.
        if all(box):
            self._boxes.append(box)

    def slice_of(self, whole: Sequence[int]) -> Slice | None:
        """Return the smallest slice that contains all reads, of length 0 if there were none; None if the
        weight must be sent in full."""
        if not self._boxes:
            return Slice(0, 0, 0) if whole else None
        # Take one span over all reads: a slice is sent as one range of indices, even if there are gaps
        # between reads.
        narrower = {}
        for dim, (reads, size) in enumerate(zip(zip(*self._boxes, strict=True), whole, strict=True)):
            span = range(min(read.start for read in reads), max(read.stop for read in reads))
            if len(span) < size:
                narrower[dim] = span
        # Send the weight in full unless exactly one dimension is narrower: a range of one dimension could not
        # describe other cases.
        if len(narrower) != 1:
            return None
        [(dim, span)] = narrower.items()
        return Slice(dim, span.start, len(span))


# Properties that describe where the values are; the meta tensor that represents the weight would give wrong
# answers.
_OF_VALUES = ("device", "is_cpu", "is_cuda", "is_meta")
_WRITES = ("copy_", "__setitem__")


class PartialWeight(torch.Tensor):
    """A weight tensor of which only one slice exists, or no values at all but a record of its reads.

    It is a meta tensor, whose views identify their elements by storage offset and strides.
    """

    _root: _Root

    @staticmethod
    def of(part: torch.Tensor, whole: Sequence[int], where: Slice) -> PartialWeight:
        """Return the weight of shape ``whole`` whose slice ``where`` is ``part``.

        Raises:
            RefitError: ``part`` does not have the slice's shape.
        """
        expected = where.shape_of(whole)
        if tuple(part.shape) != expected:
            raise RefitError(
                f"a slice of shape {list(part.shape)} came where {list(expected)} was announced: refit again"
            )
        return _begun(part.dtype, _Root(tuple(whole), part.device, part=part, where=where))

    @staticmethod
    def noting(whole: Sequence[int], dtype: torch.dtype, device: torch.device, reads: Reads) -> PartialWeight:
        """Return a weight without values that records its reads in ``reads``. Copies from it to other tensors
        are skipped."""
        return _begun(dtype, _Root(tuple(whole), device, reads=reads))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> Any:
        options, name = dict(kwargs or {}), getattr(func, "__name__", "")
        # Disable this method for the calls below, which would otherwise recurse.
        with torch._C.DisableTorchFunctionSubclass():
            # Return the real device: loaders use it to decide where to copy, and "meta" would mislead them.
            if name == "__get__" and _property_of(func) in _OF_VALUES:
                return getattr(torch.empty(0, device=args[0]._root.device), _property_of(func))
            # Only the first argument is written to; being the source of copy_ is this class's purpose.
            if isinstance(args[0] if args else None, PartialWeight) and _changes_in_place(name):
                raise RefitError(
                    f"{name} would write into a weight of which only a slice came: report the "
                    "model, and use full weights"
                )
            given = [one for one in tree_flatten((args, options))[0] if isinstance(one, PartialWeight)]
            # Try the call on meta first: a view needs no values, and torch's own rules decide what is a view.
            if len(given) == 1 and name not in _WRITES:
                # The meta tensor may raise for a call that needs values.
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
    """State that all views of one weight share.

    Attributes:
        whole: full shape of the weight.
        device: device of its values.
        part, where: the existing values, and their slice.
        reads: record of the reads, in place of values.
    """

    whole: tuple[int, ...]
    device: torch.device
    part: torch.Tensor | None = None
    where: Slice | None = None
    reads: Reads | None = None

    def _block(self, view: torch.Tensor) -> tuple[range, ...] | None:
        """Return the index range of each dimension that a view covers if it is a block of the weight, else
        None."""
        strides = _strides(self.whole)
        # The stride of a dimension of size 1 is meaningless, and torch sets it arbitrarily.
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
        """Return the box of full rows that contains all elements of a view."""
        first = view.storage_offset()
        last = first + sum(
            (size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)
        )
        row = math.prod(self.whole[1:])
        return (range(first // row, last // row + 1), *map(range, self.whole[1:]))

    def note(self, view: torch.Tensor) -> None:
        """Record that a view is read."""
        assert self.reads is not None
        if view.numel():
            self.reads.add(self._block(view) or self._rows(view))

    def values(self, view: torch.Tensor) -> torch.Tensor:
        """Return the values of a view, as a view of the part.

        Raises:
            RefitError: the part does not contain all of them.
        """
        part, where = self.part, self.where
        assert part is not None and where is not None
        if not view.numel():
            return part.new_empty(view.shape)
        block = self._block(view)
        needed = (block or self._rows(view))[where.dim]
        # A view that is not a block can only be compared with a slice of rows; a slice of another dimension
        # is scattered over the rows.
        if (block is None and where.dim) or needed.start < where.start or needed.stop > where.stop:
            raise RefitError(
                f"the engine reads {needed.start} to {needed.stop} of dimension {where.dim} of a "
                f"weight of shape {list(self.whole)}, but received only {where.start} to "
                f"{where.stop}, as it had read before: start new engines, and report the model"
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
    """Return the strides of a contiguous tensor; at least 1 each, even for an empty tensor."""
    strides = [1]
    for size in reversed(shape[1:]):
        # At least 1, as in torch, so that nothing below divides by 0.
        strides.append(strides[-1] * max(size, 1))
    return strides[::-1][: len(shape)]


def _property_of(func: Callable[..., Any]) -> str:
    """Return the name of the property that a getter belongs to."""
    return getattr(getattr(func, "__self__", None), "__name__", "")


def _changes_in_place(name: str) -> bool:
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def _as_meta(value: Any) -> Any:
    """Return ``value`` with partial weights as plain meta tensors and devices as the meta device, so that
    moving a weight does not count as a read."""

    def on_meta(one: Any) -> Any:
        if isinstance(one, torch.device):
            return torch.device("meta")
        return one.as_subclass(torch.Tensor) if isinstance(one, PartialWeight) else one

    return tree_map(on_meta, value)


def _as_values(value: Any) -> Any:
    """Return ``value`` with partial weights replaced by their values."""
    return tree_map(
        lambda one: (
            one._root.values(one.as_subclass(torch.Tensor)) if isinstance(one, PartialWeight) else one
        ),
        value,
    )


def _lies_in(weight: PartialWeight, found: Any) -> bool:
    """Return whether all tensors in a call's result are views of a weight. True also for a result without
    tensors, such as a shape."""
    # Compare storage objects, because the data pointer of all meta storages is 0.
    memory = weight.untyped_storage()._cdata
    return all(
        one.untyped_storage()._cdata == memory
        for one in tree_flatten(found)[0]
        if isinstance(one, torch.Tensor)
    )


def _read(
    func: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any], given: Sequence[PartialWeight]
) -> Any:
    """Run a call on the values of partial weights and return its result.

    For weights without values, record the read and skip writes. The resulting tensors record no further
    reads, because everything that they depend on is already recorded.
    """
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
