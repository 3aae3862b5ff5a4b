"""Decide about config keys that no family handles.

A conversion preserves what transformers computes, so a key that transformers does not read is ignored. A key
that transformers reads, or that makes another engine compute something else, is rejected.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CARRIERS: Mapping[str, str] = MappingProxyType(
    {
        "auto_map": (
            "names Python code in its directory, which is not run here and may compute something "
            "else than transformers"
        ),
        "bias": "vLLM reads it as attention_bias, transformers does not",
        "dual_chunk_attention_config": "vLLM attends in chunks where it is set, transformers does not",
        "logit_scale": "vLLM multiplies the logits by it, transformers does not",
        "original_max_position_embeddings": (
            "vLLM puts it into the rotary scaling, transformers reads that of rope_scaling"
        ),
        "per_layer_config": "layers of their own sizes are not supported",
        "sparse_attention_config": "attention that leaves tokens out is not supported",
    }
)
"""Keys that are rejected even if transformers' class does not read them -> reason."""

# Files that all models share. Here a word counts as a key only if it is read from a config.
_SHARED = (
    "cache_utils.py",
    "configuration_utils.py",
    "masking_utils.py",
    "modeling_layers.py",
    "modeling_rope_utils.py",
    "modeling_utils.py",
)
_READ_OF_CONFIG = re.compile(r'config\.(\w+)|attr\((?:\w+\.)*\w*config, "(\w+)"')
_READ_OF_SELF = re.compile(r'self\.(\w+)|attr\(self, "(\w+)"|kwargs\.(?:pop|get)\("(\w+)"')
_LONGEST_VALUE = 80


def refusal_of_key(key: str, config_class: type | None) -> str | None:
    """Return the reason to reject a config key that the family does not handle; None if the key has no
    effect.

    Args:
        key: key of ``config.json``.
        config_class: transformers class that reads the file; None if unknown.
    """
    if key in CARRIERS:
        return CARRIERS[key]
    words = None if config_class is None else words_of(config_class)
    if words is None:
        return "unknown key, which may change the forward pass"
    if key in words:
        return (
            f"transformers reads it for {config_class.__name__ if config_class else ''}, and this "
            "family's rules do not"
        )
    return None


def shown(value: object) -> str:
    """Format a value for a message; a long one is truncated."""
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


@functools.cache
def words_of(config_class: type) -> frozenset[str] | None:
    """Return all words in the source code of a config class and its models, and the keys that every model
    reads.

    The words are a superset of the keys: an additional word only rejects a key, but a missing one would
    ignore it.

    Args:
        config_class: a class of transformers.

    Returns:
        The words; None for a class that is not in transformers.
    """
    name = config_class.__module__
    if not name.startswith("transformers.models."):
        return None
    file = Path(str(sys.modules[name].__file__))
    words: set[str] = set()
    # A config class may serve several models, so search its whole directory.
    for path in file.parent.glob("*.py"):
        words |= set(re.findall(r"\w+", path.read_text(encoding="utf-8")))
    return frozenset(words) | _shared_keys()


@functools.cache
def _shared_keys() -> frozenset[str]:
    found = importlib.util.find_spec("transformers")
    assert found is not None and found.origin is not None
    root = Path(found.origin).parent
    keys: set[str] = set()
    for name in _SHARED:
        text = (root / name).read_text(encoding="utf-8")
        # ``self`` is a config in these two files, and another object in the others.
        patterns = [_READ_OF_CONFIG]
        if name in ("configuration_utils.py", "modeling_rope_utils.py"):
            patterns.append(_READ_OF_SELF)
        for pattern in patterns:
            for match in pattern.findall(text):
                keys.update(filter(None, match))
    return frozenset(keys)
