"""Which of the engine's Triton kernels compute on a device."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from megarl import env


@functools.cache
def kernels(module: str, variable: str, device: str) -> ModuleType | None:
    """The kernels of a module of this package, where they are to compute: where the environment variable
    asks for them; where it is unset, on CUDA devices with Triton.

    Args:
        module: name of the module, which imports Triton.
        variable: of the environment, 0 or 1.
        device: type of the device.
    """
    # find_spec and no import: Triton is loaded only where it computes.
    if not env.flag(variable, device == "cuda" and importlib.util.find_spec("triton") is not None):
        return None
    return importlib.import_module(f"{__package__}.{module}")
