"""Locating a tensor in a checkpoint, and reading it from there."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.rule import HuggingFaceTensor, TensorLocation


def locate(tensor: HuggingFaceTensor, source: HuggingFaceSource) -> TensorLocation:
    """Return the location of a tensor in ``source``.

    Raises:
        ConversionError: the tensor is missing, stored at several locations, or the stored shape is not the
            architecture's.
    """
    places = tensor.places
    # Without alternatives no search is needed, and ``shape`` refuses a missing tensor.
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
    """Read a tensor or a part of it, without reading other bytes than needed.

    Args:
        tensor: the tensor to read.
        place: location of the tensor, from ``locate``.
        source: the checkpoint.
        slices: one slice for each leading dimension of the tensor, with start and stop inside it; omitted
            dimensions are read completely.

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
    """Read rows of a tensor that are not consecutive, together with what is stored between them."""
    rows, others = wanted[0], wanted[1:]
    first = place.start + rows.start * place.step
    # End after the last row rather than a full step later, because the tensor may end there.
    span = slice(first, max(first, first + (rows.stop - rows.start - 1) * place.step + 1))
    stored = [*others, span] if place.transposed else [span, *others]
    leading = () if place.index is None else (slice(place.index, place.index + 1),)
    found = source.read(place.name, (*leading, *stored))
    return _rows_of(
        found if place.index is None else found.squeeze(0), place.transposed, 0, place.step
    ).contiguous()


def rows_in(block: Tensor, place: TensorLocation) -> Tensor:
    """Return the view of ``block`` that begins with the tensor at the location ``place``. ``block`` is the
    stored tensor without the dimension of ``place.index``. The view reaches to the end of ``block``, and so
    may include rows of other tensors."""
    return _rows_of(block, place.transposed, place.start, place.step)


def _rows_of(block: Tensor, transposed: bool, start: int, step: int) -> Tensor:
    return (block.T if transposed else block)[start::step]
