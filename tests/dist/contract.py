"""Parameters as the contract has them, and what of ours comes on top: keywords that may be left out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

OURS = {"sampling", "skip_masked"}


def parameters_of(method: Callable[..., Any]) -> list[str]:
    """Names of the contract's parameters, without ``self``; those of ours have to be keywords with a
    default."""
    parameters = inspect.signature(method).parameters.values()
    assert all(
        item.kind is item.KEYWORD_ONLY and item.default is not item.empty
        for item in parameters
        if item.name in OURS
    )
    return [item.name for item in parameters if item.name not in {"self", *OURS}]
