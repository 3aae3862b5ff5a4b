"""The model families that can be converted, by the ``model_type`` of their Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from converters.errors import ConversionError
from converters.families import llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe
from converters.families.base import Family

_FAMILIES = (llama.FAMILY, mistral.FAMILY, mixtral.FAMILY, qwen2.FAMILY, qwen2_moe.FAMILY, qwen3.FAMILY, qwen3_moe.FAMILY)
FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _FAMILIES})


def family_of(model_type: object) -> Family:
    """The family of a config.

    Raises:
        ConversionError: there is none of that name.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ConversionError(
            f"model_type = {model_type!r} has no mapping rules; known families are {', '.join(sorted(FAMILIES))}",
            "use a model of a known family, or a backend that runs the transformers model itself",
        )
    return family
