"""The transformers config of a model, also of a built-in family that transformers knows by another name alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig

from converters.families import FAMILIES, is_built_in


def read_hf_config(place: str | Path, *, trust_remote_code: bool, **options: Any) -> Any:
    """Read the ``config.json`` of a model.

    transformers refuses a ``model_type`` that it does not know, or runs the code beside the model; of a built-in family that is
    another one by a name of its own (Kimi-K2 is DeepSeek-V3) neither is needed.

    Args:
        place: directory or hub id of the model.
        trust_remote_code: run code that comes with the model, where transformers does not know it.
        **options: of ``from_pretrained``.
    """
    content, _ = PreTrainedConfig.get_config_dict(place, **options)
    family = FAMILIES.get(content.get("model_type", ""))
    if family is None or family.config_like is None or not is_built_in(family) or family.model_type in CONFIG_MAPPING:
        return AutoConfig.from_pretrained(place, trust_remote_code=trust_remote_code, **options)
    return AutoConfig.for_model(family.config_like, **{key: content[key] for key in content if key not in ("model_type", "auto_map")})
