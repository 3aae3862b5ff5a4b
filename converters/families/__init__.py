"""The supported model families, by the ``model_type`` of their Hugging Face config."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from converters.errors import ConversionError
from converters.families import (
    deepseek_v2,
    deepseek_v3,
    dots1,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    kimi_k2,
    llama,
    ministral,
    mistral,
    mixtral,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
)
from converters.families.base import Family
from converters.families.unknown import UNKNOWN

_FAMILIES = (
    deepseek_v2.FAMILY,
    deepseek_v3.FAMILY,
    dots1.FAMILY,
    glm4_moe.FAMILY,
    glm4_moe_lite.FAMILY,
    gpt_oss.FAMILY,
    kimi_k2.FAMILY,
    llama.FAMILY,
    ministral.FAMILY,
    mistral.FAMILY,
    mixtral.FAMILY,
    qwen2.FAMILY,
    qwen2_moe.FAMILY,
    qwen3.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.SEEING_DENSE,
    qwen3_5.SEEING_SPARSE,
    qwen3_5.SPARSE,
    qwen3_moe.FAMILY,
    qwen3_next.FAMILY,
    seed_oss.FAMILY,
)
_known = {family.model_type: family for family in _FAMILIES}
_BUILT_IN = frozenset(_known)
FAMILIES: Mapping[str, Family] = MappingProxyType(_known)
"""``model_type`` -> family, including registered user-defined families."""


def register_family(family: Family) -> None:
    """Register a user-defined family (``converters.family_file``). Replaces an earlier one of the same name.

    Raises:
        ConversionError: a built-in family has this name.
    """
    if family.model_type in _BUILT_IN:
        raise ConversionError(
            f"model_type = {family.model_type!r} is a family that is built in",
            "give the family a model_type of its own",
        )
    _known[family.model_type] = family


def is_built_in(family: Family) -> bool:
    """Return whether a family is built in."""
    return family.model_type in _BUILT_IN


def family_of(model_type: object, architectures: object = None) -> Family:
    """Return the family of a config.

    Args:
        model_type: ``model_type`` of the config.
        architectures: ``architectures`` of the config; used to suggest a similar family in the error.

    Raises:
        ConversionError: the family is not supported.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is not None:
        return family
    classes = architectures if isinstance(architectures, list) else []
    alike = next((each for each in FAMILIES.values() if each.architecture_class in classes), None)
    if alike is not None:
        raise ConversionError(
            f"model_type = {model_type!r} has no mapping rules, but architectures names "
            f"{alike.architecture_class}, which is the class of "
            f"{alike.model_type}",
            f"where it computes what {alike.architecture_class} of transformers computes, write model_type "
            f"= {alike.model_type!r} into "
            "config.json; else describe it (megarl convert --family-file)",
        )
    described = UNKNOWN.get(model_type) if isinstance(model_type, str) else None
    if any(str(each).endswith("ForConditionalGeneration") for each in classes):
        also = "" if described is None else f", and {described}"
        seeing = " or ".join(sorted(each.model_type for each in FAMILIES.values() if each.sees))
        raise ConversionError(
            f"model_type = {model_type!r} has no mapping rules: it also reads pictures, sound or the text "
            f"of an encoder{also}",
            (
                f"use a text model, or a {seeing} model: these vision-language models are "
                "converted completely, and their text part is trained"
            ),
        )
    if described is not None:
        raise ConversionError(
            f"model_type = {model_type!r} has no mapping rules: it is {described}",
            "describe it (megarl convert --family-file, policy.megatron_cfg.family_file) where "
            "Megatron-Core computes that, or use a "
            "backend that runs the transformers model itself",
        )
    raise ConversionError(
        f"model_type = {model_type!r} has no mapping rules; known families are {', '.join(sorted(FAMILIES))}",
        "use a model of a known family, describe this one (megarl convert --family-file, "
        "policy.megatron_cfg.family_file), or use a "
        "backend that runs the transformers model itself",
    )
