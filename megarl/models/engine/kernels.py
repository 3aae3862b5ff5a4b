"""Choice between the training engine's Triton kernels and PyTorch code."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from types import ModuleType

from megarl import env


@functools.cache
def kernels(module: str, variable: str, device: str) -> ModuleType | None:
    """Return a module of this package with Triton kernels, or None to compute without them. The environment
    variable decides; if it is unset, the kernels are used on CUDA devices with Triton.

    Args:
        module: name of the module, which imports Triton.
        variable: name of the environment variable, whose value is 0 or 1.
        device: device type, such as ``cuda``.
    """
    # find_spec does not import Triton, which would slow down processes that never use it.
    if not env.flag(variable, device == "cuda" and importlib.util.find_spec("triton") is not None):
        return None
    return importlib.import_module(f"{__package__}.{module}")
