"""Rollout engines: their kinds, and their start on the devices of a policy.

An engine implementation consists of a ``RolloutEngine`` (``megarl.models.generation.interfaces``) and an
``EngineKind`` that starts it. A user-defined kind is given by import path: ``policy.generation.backend:
path/to/file.py:KIND``. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from megarl.config.plugins import EngineKind
from megarl.models.generation.interfaces import RolloutEngine, SharesDevices

__all__ = ["EngineKind", "SharesDevices", "started_on_empty_devices"]

Engines = TypeVar("Engines", bound="RolloutEngine")


def started_on_empty_devices(policy: SharesDevices | None, start: Callable[[], Engines]) -> Engines:
    """Start engines on the devices of a policy, which is offloaded meanwhile. Afterwards the engines sleep,
    and the policy's parameters are back on the devices.

    vLLM starts only if its full share of GPU memory is free. A policy uses some of it, especially after a
    resume, when it already has optimizer state. Gradients and optimizer state stay in host memory until the
    next training step.

    Args:
        policy: the policy on the same devices; None if the engines have their own devices.
        start: starts the engines.
    """
    if policy is None:
        return start()
    policy.offload_after_refit()
    engines = start()
    # The engines must sleep before the parameters return, because device memory is too small for both.
    engines.finish_generation()
    policy.prepare_for_lp_inference()
    return engines
