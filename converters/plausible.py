"""Is a config about as large as the checkpoint beside it: asked before anything is worked out layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

from converters.architecture import Architecture
from converters.errors import ConversionError


def check_plausible(architecture: Architecture, shapes: Mapping[str, tuple[int, ...]], what: str, *, stacked: bool) -> None:
    """Refuse a config of more layers or experts than the stored tensors can hold.

    A layer is a tensor of its own, or a place along the first axis of one where layers may be stacked; an expert is a tensor of its own, or
    a place along an axis of a tensor of layers.

    Args:
        architecture: from the config.
        shapes: of all stored tensors, by name.
        what: to call the checkpoint by.
        stacked: layers may be stacked.

    Raises:
        ConversionError: there are too few tensors.
    """
    inside = [shape for name, shape in shapes.items() if ".layers." in name and not name.startswith("optimizer.") and shape]
    count = len(shapes)
    layers = architecture.num_layers + architecture.prediction_layers
    experts = architecture.mixture.num_experts if architecture.mixture is not None else 1
    most_layers = max([count, *(shape[0] for shape in inside)]) if stacked else count
    most_experts = max([count, *(size for shape in inside for size in shape)])
    # what layers and experts take up together, even where an expert is nothing but a row
    places = count + sum(math.prod(shape[:2]) for shape in inside)
    if layers > most_layers or experts > most_experts or layers * experts > places:
        counted = f"{layers} layers" + (f" of {experts} experts" if architecture.mixture is not None else "")
        raise ConversionError(
            f"config.json asks for {counted}, which the {count} tensors of {what} cannot hold",
            "use the config.json that belongs to these weights, and complete weights",
        )
