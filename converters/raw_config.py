"""What is wrong with a config.json before transformers has seen it, which takes more than it can use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from converters.errors import ConversionError

_DTYPES = frozenset({"auto", "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "double", "float", "half"})
_INTERNALS = frozenset({"attribute_map", "sub_configs"})


def check_raw(options: Mapping[str, Any], config_class: type) -> None:
    """Refuse what transformers' config class takes without a look and fails at later: keys in the place of its methods, too.

    Args:
        options: keys and values of the file.
        config_class: that they are for.

    Raises:
        ConversionError: with every key that is no setting, and every value of the wrong kind.
    """
    internal = sorted(str(key) for key in options if key in _INTERNALS or callable(getattr(config_class, str(key), None)))
    problems = [f"{key}: no setting, but a part of transformers' {config_class.__name__}" for key in internal]
    problems += dtype_problems(options)
    quantization = options.get("quantization_config")
    if quantization is not None and not isinstance(quantization, Mapping):
        problems.append(f"quantization_config = {quantization!r}: an object is needed")
    if problems:
        raise ConversionError(f"config.json is not a valid {config_class.__name__}", "correct config.json", problems)


def dtype_problems(config: Mapping[str, Any]) -> list[str]:
    """Problems with the dtype that the weights are said to have; loading a model that says another word fails."""
    said = {key: config.get(key) for key in ("dtype", "torch_dtype")}
    return [
        f"{key} = {value!r}: the name of a dtype is needed, such as bfloat16"
        for key, value in said.items()
        if value is not None and str(value).removeprefix("torch.") not in _DTYPES
    ]
