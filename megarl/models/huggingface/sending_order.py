"""The order in which weights leave a transformers model: that of the mapping rules, which Megatron exports in
too."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rules import hf_names


def in_sending_order(names: Iterable[str], hf_config: Any) -> list[str]:
    """Parameter names, sorted as all backends export them; names of a model without mapping rules stay in
    their own order.

    Args:
        names: of the model's parameters.
        hf_config: its transformers config.
    """
    try:
        places = {name: place for place, name in enumerate(hf_names(read_architecture(hf_config)))}
    except ConversionError:
        return list(names)
    return sorted(names, key=lambda name: places.get(name, len(places)))
