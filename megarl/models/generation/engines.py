"""Rollout engines: their kind, and how they start on the devices of a policy.

An engine consists of a ``RolloutEngine`` (``megarl.models.generation.interfaces``) and an ``EngineKind`` that
starts it. The kind of a user-defined engine is given by import path, ``policy.generation.backend:
path/to/file.py:KIND``. This module imports neither torch nor Ray.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from megarl.config.plugins import EngineKind
from megarl.models.generation.interfaces import SharesDevices

if TYPE_CHECKING:
    from megarl.models.generation.interfaces import RolloutEngine

__all__ = ["EngineKind", "SharesDevices", "started_on_empty_devices"]

Engines = TypeVar("Engines", bound="RolloutEngine")


def started_on_empty_devices(policy: SharesDevices | None, start: Callable[[], Engines]) -> Engines:
    """Offload the policy, start the engines on its devices, put them to sleep, and load the policy's
    parameters again.

    vLLM starts only if its whole share of a device is free. A policy in training leaves less, especially a
    resumed one with its moments. Gradients and optimizer state stay in host memory until the next training
    step.

    Args:
        policy: the policy on the same devices; None if the engines have devices of their own.
        start: starts the engines.
    """
    if policy is None:
        return start()
    policy.offload_after_refit()
    engines = start()
    # Let the engines sleep before the parameters return, because both do not fit into memory together.
    engines.finish_generation()
    policy.prepare_for_lp_inference()
    return engines
