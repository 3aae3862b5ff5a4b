"""A program that starts Ray with two nodes on this host and runs the benchmark of a recipe on both: ``RECIPE
DIRECTORY``."""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

from benchmarks.__main__ import main
from megarl import env


def run(recipe: str, out: str) -> int:
    """Exit code of the benchmarks, which find Ray as they do in a job of Slurm's."""
    cluster = Cluster()
    for name in ("n1", "n2"):
        cluster.add_node(num_cpus=2, node_name=name, include_dashboard=False, object_store_memory=80_000_000)
    env.set_variables({"RAY_ADDRESS": cluster.address})
    try:
        return main(["run", "recipe.step", "--model", recipe, "--quick", "--out", out])
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(run(*sys.argv[1:]))
