"""Finds where a checkpoint keeps a tensor, and reads it from there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.rule import HuggingFaceTensor, TensorLocation


def locate(tensor: HuggingFaceTensor, source: HuggingFaceSource) -> TensorLocation:
    """The place where ``source`` keeps a tensor; its own name if it is nowhere.

    Raises:
        ConversionError: it is in several places, or the stored tensor has another shape than the architecture
            says.
    """
    places = tensor.places
    # Without alternatives there is nothing to look for, and ``shape`` refuses what is missing.
    found = [place for place in places if place.name in source] if tensor.alternatives else []
    if len(found) > 1:
        raise ConversionError(
            f"{tensor.name} is stored more than once: {', '.join(place.name for place in found)}",
            "keep one of them in the checkpoint",
        )
    place = found[0] if found else places[0]
    shape = source.shape(place.name)
    if shape != place.shape:
        raise ConversionError(
            f"{place.name} has shape {list(shape)}, but config.json asks for {list(place.shape)}",
            "use the config.json that belongs to these weights",
        )
    return place


def read_part(
    tensor: HuggingFaceTensor, place: TensorLocation, source: HuggingFaceSource, slices: Sequence[slice] = ()
) -> Tensor:
    """A tensor or a part of it, touching only the bytes of that part.

    Args:
        tensor: what to read.
        place: where it is, from ``locate``.
        source: the checkpoint.
        slices: one a leading dimension of the tensor, each with start and stop inside it; missing ones mean
            everything.

    Returns:
        A fresh contiguous tensor.
    """
    if place.index is None and place.shape == tensor.shape:
        return source.read(place.name, tuple(slices) or None)
    wanted = [*slices, *(slice(0, size) for size in tensor.shape[len(slices) :])]
    rows = wanted[0]
    if not place.is_consecutive:
        return _read_apart(place, source, wanted)
    stored = [slice(place.start + rows.start, place.start + rows.stop), *wanted[1:]]
    if place.index is None:
        return source.read(place.name, tuple(stored))
    return source.read(place.name, (slice(place.index, place.index + 1), *stored)).squeeze(0)


def _read_apart(place: TensorLocation, source: HuggingFaceSource, wanted: Sequence[slice]) -> Tensor:
    """Read rows of a tensor that do not lie one behind the other; what lies between them is read along."""
    rows, others = wanted[0], wanted[1:]
    first = place.start + rows.start * place.step
    # Ends with the last row and not a step behind it, where the tensor may end.
    span = slice(first, max(first, first + (rows.stop - rows.start - 1) * place.step + 1))
    stored = [*others, span] if place.transposed else [span, *others]
    leading = () if place.index is None else (slice(place.index, place.index + 1),)
    found = source.read(place.name, (*leading, *stored))
    return _rows_of(
        found if place.index is None else found.squeeze(0), place.transposed, 0, place.step
    ).contiguous()


def rows_in(block: Tensor, place: TensorLocation) -> Tensor:
    """The view of a stored tensor, without the dimension that ``place.index`` counts along, that is the
    tensor of a place; the tensors that lie between its rows are taken to end with it."""
    return _rows_of(block, place.transposed, place.start, place.step)


def _rows_of(block: Tensor, transposed: bool, start: int, step: int) -> Tensor:
    return (block.T if transposed else block)[start::step]
