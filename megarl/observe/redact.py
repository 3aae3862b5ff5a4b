"""Removes secrets from a configuration before it is written or sent anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

HIDDEN = "***"

# Whole last words only: prompt_key, answer_key and max_tokens are not secrets.
_SECRET_NAME = re.compile(
    r"(?:^|[_.-])(?:api_?key|access_?key|private_?key|secret_?key|secret|token|password|passwd|credentials?)$", re.IGNORECASE
)


def redacted(value: Any) -> Any:
    """A deep copy of a plain configuration where every text under a secret-looking key (``*_TOKEN``, ``*api_key``, ...) is hidden."""
    if isinstance(value, Mapping):
        return {key: HIDDEN if _is_secret(str(key), entry) else redacted(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(entry) for entry in value]
    return value


def _is_secret(key: str, value: Any) -> bool:
    return isinstance(value, str) and bool(value) and _SECRET_NAME.search(key) is not None
