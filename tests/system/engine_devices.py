"""A program: which GPUs engines of two ranks get, on a local Ray that was told of GPUs.

Ray only counts them and says which are whose, so that it can be seen on a machine without one.
"""

from __future__ import annotations

import json
from typing import Any

import ray

from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from megarl.errors import MegarlError
from megarl.models.generation.engine_group import engine_places
from megarl.models.generation.vllm.worker import VllmGenerationWorker, devices_of_places

RANKS = 2
POLICY, ENGINES = "tests.system.engine_devices.PolicyRank", "tests.system.engine_devices.EngineActor"


class PolicyRank:
    """Has the GPU of its place, or a share of it."""

    def devices(self) -> list[str]:
        return [str(device) for device in ray.get_runtime_context().get_accelerator_ids()["GPU"]]


class EngineActor:
    """Is placed as an engine is."""

    configure_worker = staticmethod(VllmGenerationWorker.configure_worker)

    def __init__(self, place: tuple[int, float], patience_s: float = 300.0) -> None:
        self._place, self._patience = place, patience_s

    def devices(self) -> list[str]:
        first, share = self._place
        return devices_of_places(first, RANKS, share, self._patience)


class Devices:
    """Those of all workers that were started here; the workers stay."""

    def __init__(self) -> None:
        self._kept: list[RayWorkerGroup] = []

    def of(
        self, kind: str, cluster: RayVirtualCluster, places: list[tuple[int, list[int]]], **options: Any
    ) -> list[list[str]]:
        group = RayWorkerGroup(cluster, RayWorkerBuilder(kind, **options), bundle_indices_list=places)
        self._kept.append(group)
        found: list[list[str]] = group.get_all_worker_results(group.run_all_workers_single_data("devices"))
        return found


def first_places(cluster: RayVirtualCluster) -> list[tuple[int, list[int]]]:
    """The first place of each engine, all on one node."""
    return [place for [place] in engine_places(cluster, RANKS, "policy.generation.vllm_cfg")]


def main() -> None:
    ray.init(address="local", num_cpus=16, num_gpus=8, include_dashboard=False, log_to_driver=False)
    devices, found = Devices(), {}
    together = RayVirtualCluster([4], use_gpus=True, max_colocated_worker_groups=2, name="together")
    found["policy"] = devices.of(POLICY, together, [(0, [place]) for place in range(4)])
    found["colocated"] = devices.of(ENGINES, together, first_places(together))
    apart = RayVirtualCluster([2], use_gpus=True, max_colocated_worker_groups=1, name="apart")
    found["apart"] = devices.of(ENGINES, apart, first_places(apart))
    taken = RayVirtualCluster([2], use_gpus=True, max_colocated_worker_groups=1, name="taken")
    devices.of(POLICY, taken, [(0, [1])])
    try:
        devices.of(ENGINES, taken, [(0, [0])], patience_s=1.0)
    except MegarlError as error:
        found["taken"] = [[str(error)]]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
