"""The backend that a policy runs on, and the kind of its model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

BackendName: TypeAlias = Literal["megatron", "dtensor", "fsdp1"]


def enabled_backend(policy: Mapping[str, Any]) -> BackendName:
    """``megatron``, ``dtensor`` or, with neither enabled, ``fsdp1``."""
    if (policy.get("megatron_cfg") or {}).get("enabled"):
        return "megatron"
    return "dtensor" if (policy.get("dtensor_cfg") or {}).get("enabled") else "fsdp1"


def scores(policy: Mapping[str, Any]) -> bool:
    """Whether a policy section asks for a model that scores, with one output in the place of a language model's output layer."""
    return bool((policy.get("reward_model_cfg") or {}).get("enabled"))
