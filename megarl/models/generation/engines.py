"""Rollout engines: their kind, and how they start on the devices of a policy.

An engine is a ``RolloutEngine`` (``megarl.models.generation.interfaces``) and an ``EngineKind`` that says how
to start it. The kind of a user's own engine is named by import path, ``policy.generation.backend:
path/to/file.py:KIND``. This module loads neither torch nor Ray.
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
    """Engines that start when the policy has left their devices, and sleep before its parameters return.

    vLLM starts only where its whole share of a device is free, and a policy in training leaves less, above
    all a resumed one with its moments. Gradients and optimizer state stay in host memory until the next step
    trains.

    Args:
        policy: on the same devices; None where they have devices of their own.
        start: starts the engines.
    """
    if policy is None:
        return start()
    policy.offload_after_refit()
    engines = start()
    # Asleep before the parameters return: both together have no room.
    engines.finish_generation()
    policy.prepare_for_lp_inference()
    return engines
