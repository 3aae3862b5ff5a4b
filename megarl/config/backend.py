"""The backend that a policy runs on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

BackendName: TypeAlias = Literal["megatron", "dtensor", "fsdp1"]


def enabled_backend(policy: Mapping[str, Any]) -> BackendName:
    """``megatron``, ``dtensor`` or, with neither enabled, ``fsdp1``."""
    if (policy.get("megatron_cfg") or {}).get("enabled"):
        return "megatron"
    return "dtensor" if (policy.get("dtensor_cfg") or {}).get("enabled") else "fsdp1"
