"""A program that starts Ray with three unequal nodes on this host, lays virtual clusters over them, and
prints where they came to lie."""

from __future__ import annotations

import json
import os
import sys
import threading

import ray
from ray.cluster_utils import Cluster

from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
from megarl.errors import MegarlError


def nodes_of(cluster: RayVirtualCluster) -> list[list[str]]:
    """Names of the nodes of the bundles of each placement group."""
    by_id = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    tables = [ray.util.placement_group_table(group) for group in cluster.get_placement_groups()]
    return [[by_id[node] for _, node in sorted(table["bundles_to_node_id"].items())] for table in tables]


class Witness:
    """A worker that says on which node it is."""

    def where(self) -> tuple[str, str, str]:
        """Node id, node rank and local rank."""
        return ray.get_runtime_context().get_node_id(), os.environ["NODE_RANK"], os.environ["LOCAL_RANK"]

    def hang(self) -> None:
        """Never return."""
        threading.Event().wait()


def main() -> None:
    cluster = Cluster()
    processes = {
        name: cluster.add_node(
            num_cpus=cpus, node_name=name, include_dashboard=False, object_store_memory=80_000_000
        )
        for name, cpus in (("n1", 2), ("n2", 4), ("n10", 4))
    }
    ray.init(address=cluster.address, log_to_driver=False)
    seen: dict[str, object] = {}

    pair = RayVirtualCluster([2, 2], use_gpus=False)
    seen["pair"] = nodes_of(pair)
    beside = RayVirtualCluster([4], use_gpus=False)
    seen["beside"] = nodes_of(beside)
    beside.shutdown()
    pair.shutdown()

    unequal = RayVirtualCluster([3, 2, 4], use_gpus=False)
    seen["unequal"] = nodes_of(unequal)
    unequal.shutdown()
    for counts in ([3, 3, 3], [2, 2, 2, 2]):
        try:
            nodes_of(RayVirtualCluster(counts, use_gpus=False, max_retries=1))
        except MegarlError as error:
            seen[f"refused {counts}"] = f"{type(error).__name__}: {error}"

    quads = RayVirtualCluster([4, 4], use_gpus=False)
    axes = NamedSharding(names=["data_parallel", "tensor_parallel"], layout=[[0, 1], [2, 3], [4, 5], [6, 7]])
    group = RayWorkerGroup(quads, RayWorkerBuilder(f"{__name__}.Witness"), sharding_annotations=axes)
    by_id = {node["NodeID"]: node["NodeName"] for node in ray.nodes()}
    places = ray.get([worker.where.remote() for worker in group.workers])
    seen["ranks"] = [[by_id[node], node_rank, local_rank] for node, node_rank, local_rank in places]

    hanging = [worker.hang.remote() for worker in group.workers]
    cluster.remove_node(processes["n10"], allow_graceful=False)
    try:
        group.get_all_worker_results(hanging, timeout_s=120)
    except MegarlError as error:
        seen["lost"] = [error.exit_code, str(error)]
    sys.stdout.write(f"\n{json.dumps(seen)}\n")
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    from tests.system import several_nodes

    several_nodes.main()
