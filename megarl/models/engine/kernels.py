"""Choice of the engine's Triton kernels for a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from megarl import env


@functools.cache
def kernels(module: str, variable: str, device: str) -> ModuleType | None:
    """Return a module of this package with Triton kernels, or None if the device is to compute without them.
    The environment variable decides; if it is unset, CUDA devices with Triton use the kernels.

    Args:
        module: name of the module, which imports Triton.
        variable: name of the environment variable, 0 or 1.
        device: type of the device.
    """
    # Look for Triton with find_spec instead of importing it: it is loaded only where it computes.
    if not env.flag(variable, device == "cuda" and importlib.util.find_spec("triton") is not None):
        return None
    return importlib.import_module(f"{__package__}.{module}")
