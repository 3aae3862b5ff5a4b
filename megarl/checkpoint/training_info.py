"""The small JSON file of a checkpoint that says where training stood: step, sampler state, metrics."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megarl.errors import CheckpointError

logger = logging.getLogger(__name__)

INFO_NAME = "training_info.json"


def plain_json(value: Any, where: str = "training_info") -> Any:
    """A copy of ``value`` that JSON can hold unchanged; scalars of numpy and torch become plain numbers.

    NaN and infinities become null with a warning: a metric that went wrong must not cost the checkpoint.

    Raises:
        CheckpointError: something has no JSON form, or a key is not a text; names its place.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        logger.warning("%s = %s is not finite and is saved as null", where, value)
        return None
    if isinstance(value, Mapping):
        _refuse_other_keys(value, where)
        return {key: plain_json(entry, f"{where}.{key}") for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [plain_json(entry, f"{where}[{index}]") for index, entry in enumerate(value)]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        return plain_json(value.item(), where)
    raise CheckpointError(f"{where} is a {type(value).__name__}; only numbers, texts, lists and mappings are saved. Fix: convert it first")


def read_info(checkpoint: Path) -> dict[str, Any]:
    """The training info of a checkpoint.

    Raises:
        CheckpointError: the file is missing or is not a JSON object.
    """
    path = checkpoint / INFO_NAME
    try:
        info = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}. Fix: resume from another checkpoint") from error
    if not isinstance(info, dict):
        raise CheckpointError(f"{path} holds a {type(info).__name__}, not an object. Fix: resume from another checkpoint")
    return info


def metric_of(info: Mapping[str, Any], metric_name: str) -> float | None:
    """The metric that ranks a checkpoint, from the info itself or from its ``metrics``; None when there is no finite number."""
    nested = info.get("metrics")
    value = info.get(metric_name, nested.get(metric_name) if isinstance(nested, Mapping) else None)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _refuse_other_keys(value: Mapping[Any, Any], where: str) -> None:
    for key in value:
        if not isinstance(key, str):
            raise CheckpointError(f"{where} has the key {key!r}; JSON keys are texts. Fix: write {str(key)!r}")
