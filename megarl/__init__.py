"""megarl: reinforcement learning of language models on Megatron-Core, at any scale, provable on a CPU.

The library is ``megarl.train``, ``megarl.eval``, ``megarl.convert`` and ``megarl.Run``. Importing this
package imports neither torch nor Ray; each subpackage imports what it needs.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.2.0"

_LIBRARY = {
    "train": ("megarl.library.calls", "train"),
    "eval": ("megarl.library.calls", "evaluate"),
    "convert": ("megarl.library.calls", "convert"),
    "Run": ("megarl.library.run", "Run"),
}


def __getattr__(name: str) -> Any:
    """Import a library function on first access, so that the command line starts without importing the
    library."""
    if name not in _LIBRARY:
        raise AttributeError(f"module 'megarl' has no attribute {name!r}")
    module, attribute = _LIBRARY[name]
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return [*globals(), *_LIBRARY]
