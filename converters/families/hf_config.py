"""Load the transformers config of a model, also for built-in families that transformers knows by another
name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from converters.families import FAMILIES, is_built_in
from converters.families.base import Family


def config_class_name(family: Family) -> str | None:
    """Return the ``model_type`` of transformers' config class for a family, or None if there is none."""
    from transformers import CONFIG_MAPPING

    return family.model_type if family.model_type in CONFIG_MAPPING else family.config_like


def renamed_class(model_type: object) -> str | None:
    """Return transformers' ``model_type`` for a built-in family that it knows by another name, else None.

    User-defined families give None: their model differs from the class that completes their config.
    """
    family = FAMILIES.get(model_type) if isinstance(model_type, str) else None
    name = None if family is None or not is_built_in(family) else config_class_name(family)
    return name if name != model_type else None


def make_hf_config(content: Mapping[str, Any]) -> Any:
    """Build the transformers config for the contents of a ``config.json``."""
    from transformers import AutoConfig

    # Config classes of transformers keep and modify their arguments, so copy.
    options = copy.deepcopy({key: value for key, value in content.items() if key != "model_type"})
    renamed = renamed_class(content.get("model_type"))
    if renamed is not None:
        # Use transformers' class instead of the code that the file refers to.
        options.pop("auto_map", None)
    return AutoConfig.for_model(renamed or content["model_type"], **options)


def read_hf_config(place: str | Path, *, trust_remote_code: bool = False, **options: Any) -> Any:
    """Load the ``config.json`` of a model.

    For an unknown ``model_type`` transformers raises, or runs code from the model's directory. A built-in
    family that renames a known one (Kimi-K2 is DeepSeek-V3) avoids both.

    Args:
        place: directory or hub id of the model.
        trust_remote_code: run the model's own code if transformers does not know it.
        **options: options of ``from_pretrained``.
    """
    from transformers import AutoConfig, PreTrainedConfig

    # Read the plain content first: AutoConfig knows a renamed family only by transformers' name.
    content, _ = PreTrainedConfig.get_config_dict(place, **options)
    if renamed_class(content.get("model_type")) is not None:
        return make_hf_config(content)
    return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
