"""A program that starts Ray with two nodes on this host and runs ``megarl doctor --nodes`` on them, with its
own arguments."""

from __future__ import annotations

import sys

import ray
from ray.cluster_utils import Cluster

from megarl import env
from megarl.cli import main


def run(arguments: list[str]) -> int:
    """Exit code of the doctor, which finds Ray as it does in a job of Slurm's."""
    cluster = Cluster()
    for name in ("n1", "n2"):
        cluster.add_node(num_cpus=4, node_name=name, include_dashboard=False, object_store_memory=80_000_000)
    env.set_variables({"RAY_ADDRESS": cluster.address})
    try:
        return main(["doctor", "--nodes", "--json", *arguments])
    finally:
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
