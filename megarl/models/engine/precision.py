"""Torch dtypes by the names that configurations use."""

from __future__ import annotations

import torch

from megarl.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(name: str, key: str) -> torch.dtype:
    """Return the torch dtype for a dtype name from a configuration. ``key`` is the configuration key, for the
    message.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in DTYPES:
        raise ConfigError(f"{key} = {name!r}: expected one of {', '.join(DTYPES)}")
    return DTYPES[name]
