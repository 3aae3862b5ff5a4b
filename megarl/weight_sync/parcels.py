"""Many weights that lie in a few flat tensors, and how they are laid into a transfer buffer with a few copies.

A stream may give its weights one by one, each as a tensor. One that has put them together itself can say instead where they lie; then
nothing is done for a weight at a refit, because the copies are worked out once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from megarl.weight_sync.copies import Copy, merged
from megarl.weight_sync.tensor_info import TensorInfo, strides_of


@dataclass(frozen=True, slots=True)
class Place:
    """Where a weight lies, contiguous.

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
class Parcel:
    """Neighbouring weights of a stream.

    Attributes:
        places: of these weights and others; the same object at every refit.
        first, count: which of the places.
        flats: tensors of one dtype without gaps.
    """

    places: Sequence[Place]
    first: int
    count: int
    flats: tuple[torch.Tensor, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of all the weights."""
        return self.flats[0].dtype

    def infos(self) -> list[TensorInfo]:
        """What would announce the weights."""
        return [TensorInfo(place.name, place.shape, self.dtype) for place in self.chosen()]

    def chosen(self) -> Sequence[Place]:
        """The places of these weights."""
        return self.places[self.first : self.first + self.count]


class ParcelStream(Iterator[tuple[str, torch.Tensor]]):
    """Names and weights, one by one or many at once."""

    @abstractmethod
    def take(self, most: int) -> Parcel | None:
        """Weights that come next, from one up to ``most``; None after the last one. The flat tensors are for use until the next call."""


class Laying:
    """The copies that lay the weights of a parcel into a transfer buffer; few where their sizes are few, which may come in any order.

    Args:
        parcel: of these weights; another one like it will do.
        begins: of each weight in the buffer, in bytes, multiples of what a dtype wants.
    """

    def __init__(self, parcel: Parcel, begins: Sequence[int]) -> None:
        self._alike = parcel.places, parcel.first, parcel.count, parcel.dtype
        by_flat: dict[int, list[Copy]] = {}
        for place, info, begin in zip(parcel.chosen(), parcel.infos(), begins, strict=True):
            if info.nbytes:
                copy = Copy.run_of(info.nbytes // info.dtype.itemsize, place.begin, begin // info.dtype.itemsize)
                by_flat.setdefault(place.flat, []).append(copy)
        # what lies together in the buffer has one form, and is found there in its order
        self._copies = {flat: merged(sorted(copies, key=lambda copy: copy.target)) for flat, copies in by_flat.items()}

    def serves(self, parcel: Parcel) -> bool:
        """Whether a parcel's weights lie as those did that this was made for."""
        places, first, count, dtype = self._alike
        return parcel.places is places and (parcel.first, parcel.count, parcel.dtype) == (first, count, dtype)

    @property
    def count(self) -> int:
        """Copies."""
        return sum(len(copies) for copies in self._copies.values())

    @torch.no_grad()
    def run(self, parcel: Parcel, buffer: torch.Tensor) -> None:
        """Copy the weights into ``buffer``, uint8."""
        target = buffer.view(parcel.dtype)
        for flat, copies in self._copies.items():
            for copy in copies:
                copy.run(parcel.flats[flat], target)
