"""The transformers config of a model, including built-in families that transformers knows only by another
name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.families import FAMILIES, is_built_in
from converters.families.base import Family


def config_class_name(family: Family) -> str | None:
    """Return the ``model_type`` of transformers' config class for a family, or None if there is no such
    class."""
    from transformers import CONFIG_MAPPING

    return family.model_type if family.model_type in CONFIG_MAPPING else family.config_like


def renamed_class(model_type: object) -> str | None:
    """Return transformers' name for a built-in family that it knows only by another name, or None.

    A user-defined family gives None, because it computes something else than the class that completes its
    config.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    name = None if family is None or not is_built_in(family) else config_class_name(family)
    return name if name != model_type else None


def make_hf_config(content: Mapping[str, Any]) -> Any:
    """Return the transformers config of a parsed ``config.json``, which is not modified."""
    from transformers import AutoConfig

    # Copy the content, because config classes of transformers keep and change what they are given.
    options = copy.deepcopy({key: value for key, value in content.items() if key != "model_type"})
    renamed = renamed_class(content.get("model_type"))
    if renamed is not None:
        # Use transformers' own class, and do not run the code that the file names.
        options.pop("auto_map", None)
    return AutoConfig.for_model(renamed or content["model_type"], **options)


def read_hf_config(place: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Read the ``config.json`` of a model.

    transformers refuses a ``model_type`` that it does not know, or runs the code in the model's directory.
    Neither happens for a built-in family that renames a known one (Kimi-K2 is DeepSeek-V3).

    Args:
        place: directory or hub id of the model.
        trust_remote_code: whether to run code that comes with the model, if transformers does not know it.
        **options: options of ``from_pretrained``.
    """
    from transformers import AutoConfig, PreTrainedConfig

    content, _ = PreTrainedConfig.get_config_dict(place, **options)
    if renamed_class(content.get("model_type")) is not None:
        return make_hf_config(content)
    return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
