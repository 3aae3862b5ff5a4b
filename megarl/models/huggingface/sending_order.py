"""The order in which a transformers model's weights are sent: that of the mapping rules, as in Megatron's
exports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from converters.errors import ConversionError
from converters.families.read import read_architecture
from converters.mapping.rules import hf_names


def in_sending_order(names: Iterable[str], hf_config: Any) -> list[str]:
    """Sort parameter names into the export order of all backends. Without mapping rules for the model, the
    given order is kept.

    Args:
        names: the model's parameter names.
        hf_config: its transformers config.
    """
    try:
        places = {name: place for place, name in enumerate(hf_names(read_architecture(hf_config)))}
    except ConversionError:
        return list(names)
    return sorted(names, key=lambda name: places.get(name, len(places)))
