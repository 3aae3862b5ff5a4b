"""GPUs of several places. Ray shows an actor that of its own alone; an engine of several ranks has the places beside it too."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.errors import ClusterError


def devices_of_places(first: int, count: int, share: float, timeout_s: float = 300.0) -> list[str]:
    """What ``CUDA_VISIBLE_DEVICES`` calls the GPUs of neighbouring places, in their order. For an actor on the first of them.

    Args:
        first: bundle that the actor is on, of its placement group.
        count: of the places.
        share: of its GPU that the actor has, and that nobody else takes of the other places' GPUs.
        timeout_s: longest wait for the other places.

    Raises:
        ClusterError: one of the other places is taken, or Ray starts no process there.
    """
    group = ray.util.get_current_placement_group()
    places = range(first + 1, first + count)
    strategies = [PlacementGroupSchedulingStrategy(group, place) for place in places]
    task: Any = ray.remote(_devices)
    asked = [task.options(num_cpus=0, num_gpus=share, scheduling_strategy=strategy).remote() for strategy in strategies]
    try:
        return [device for devices in (_devices(), *ray.get(asked, timeout=timeout_s)) for device in devices]
    except ray.exceptions.GetTimeoutError as error:
        raise ClusterError(
            f"an engine of {count} ranks from place {first} on: Ray did not give it the GPUs of places {list(places)} in {timeout_s:g} s. "
            "Fix: see by `ray status` whether Ray starts processes there; give the engines places of their own, or let the cluster have "
            "more worker groups a place"
        ) from error


def _devices() -> list[str]:
    return [str(device) for device in ray.get_runtime_context().get_accelerator_ids()["GPU"]]
