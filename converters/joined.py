"""Puts tensors that a family stores inside larger ones into these, from a stream of tensors each by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from converters.architecture import Architecture
from converters.places import rows_in
from converters.rules import hf_tensors


def join(stream: Iterable[tuple[str, Tensor]], architecture: Architecture) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors as a checkpoint has them.

    Args:
        stream: every tensor of the model once, by the names of the rules; those that are stored together all of one dtype, on one device.
        architecture: the model.

    Yields:
        What may be stored by itself as it comes, and a stored tensor once the last tensor in it has come. What has come of stored tensors
        that are not complete is held.
    """
    parts = {part.name: part for part in hf_tensors(architecture) if not part.alone}
    missing = Counter(part.places[0].name for part in parts.values())
    begun: dict[str, Tensor] = {}
    for name, tensor in stream:
        part = parts.get(name)
        if part is None:
            yield name, tensor
            continue
        place = part.places[0]
        if place.name not in begun:
            begun[place.name] = torch.zeros(place.shape, dtype=tensor.dtype, device=tensor.device)
        whole = begun[place.name]
        rows_in(whole if place.index is None else whole[place.index], place).copy_(tensor)
        missing[place.name] -= 1
        if not missing[place.name]:
            yield place.name, begun.pop(place.name)
