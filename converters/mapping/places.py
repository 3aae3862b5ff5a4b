"""Find a tensor in a checkpoint, and read it from its location."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from converters.checkpoint.source import HuggingFaceSource
from converters.errors import ConversionError
from converters.mapping.rule import HuggingFaceTensor, TensorLocation


def locate(tensor: HuggingFaceTensor, source: HuggingFaceSource) -> TensorLocation:
    """Return the location of a tensor in a checkpoint.

    Raises:
        ConversionError: the tensor is missing, stored at several locations, or has another shape than the
            architecture requires.
    """
    places = tensor.places
    # Without alternatives no search is needed; ``shape`` raises if the tensor is missing.
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
    """Read a tensor, or only the bytes of a slice of it.

    Args:
        tensor: tensor to read.
        place: result of ``locate``.
        source: the checkpoint.
        slices: a slice inside the tensor for each leading dimension; further dimensions are read in full.

    Returns:
        A new contiguous tensor.
    """
    if place.index is None and place.shape == tensor.shape:
        return source.read(place.name, tuple(slices) or None)
    wanted = [*slices, *(slice(0, size) for size in tensor.shape[len(slices) :])]
    rows = wanted[0]
    # Rows with a step, as in GPT-OSS, are not one range of bytes.
    if not place.is_consecutive:
        return _read_apart(place, source, wanted)
    stored = [slice(place.start + rows.start, place.start + rows.stop), *wanted[1:]]
    if place.index is None:
        return source.read(place.name, tuple(stored))
    return source.read(place.name, (slice(place.index, place.index + 1), *stored)).squeeze(0)


def _read_apart(place: TensorLocation, source: HuggingFaceSource, wanted: Sequence[slice]) -> Tensor:
    """Read rows that are not consecutive. The rows between them are read too, and dropped."""
    rows, others = wanted[0], wanted[1:]
    first = place.start + rows.start * place.step
    # The stored tensor may end right after the last row, so do not add a full step.
    span = slice(first, max(first, first + (rows.stop - rows.start - 1) * place.step + 1))
    stored = [*others, span] if place.transposed else [span, *others]
    leading = () if place.index is None else (slice(place.index, place.index + 1),)
    found = source.read(place.name, (*leading, *stored))
    return _rows_of(
        found if place.index is None else found.squeeze(0), place.transposed, 0, place.step
    ).contiguous()


def rows_in(block: Tensor, place: TensorLocation) -> Tensor:
    """Return the view of a stored tensor that begins with the rows of one of its tensors. It extends to the
    end of the block, and may include rows of other tensors.

    Args:
        block: the stored tensor, without the dimension of ``place.index``.
        place: location of the tensor.
    """
    return _rows_of(block, place.transposed, place.start, place.step)


def _rows_of(block: Tensor, transposed: bool, start: int, step: int) -> Tensor:
    return (block.T if transposed else block)[start::step]
