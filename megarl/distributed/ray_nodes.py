"""The nodes of a Ray cluster: their resources, and whether all have joined.

Run as a program, it waits for nodes (used by launch/ray_node.sh): ``python -m megarl.distributed.ray_nodes
--expect n1,n2 --timeout 600``.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import re
import sys
import time
from collections.abc import Callable, Sequence

from ray._private.state import available_resources_per_node
from ray.exceptions import RayError

from megarl.distributed import ray_calls
from megarl.distributed.node_choice import RayNode
from megarl.distributed.ray_runtime import init_ray
from megarl.errors import MegarlError, MissingNodesError

logger = logging.getLogger(__name__)

_POLL_S = 1.0


def alive_nodes() -> list[RayNode]:
    """Return the nodes that are alive, sorted by name with numbers in numerical order. Slurm names adjacent
    nodes in this way."""
    with ray_calls.calling("ray.available_resources_per_node"):
        # Ray's public function sums over the cluster, but a placement group must fit on one node.
        free = available_resources_per_node()
    nodes = []
    for node in ray_calls.nodes():
        if node["Alive"]:
            # A node that joined between the two calls is missing in the first result, and counts as reserved
            # for now.
            resources = free.get(node["NodeID"], {})
            nodes.append(RayNode(node["NodeName"], node["NodeID"], node["Resources"], resources))
    return sorted(nodes, key=lambda node: _natural(node.name))


def lost_node_name(node_id: str) -> str | None:
    """Return the name of a node that has left the cluster; None if it is alive, or if Ray does not reply."""
    with contextlib.suppress(RayError, RuntimeError, OSError):
        for node in ray_calls.nodes():
            if node["NodeID"] == node_id and not node["Alive"]:
                return node["NodeName"]
    return None


def wait_for_nodes(
    expected: Sequence[str],
    timeout_s: float,
    alive: Callable[[], Sequence[RayNode]] = alive_nodes,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until nodes with all expected names are alive.

    Args:
        expected: names of the nodes.
        timeout_s: maximum seconds to wait.
        alive: returns the nodes that are alive.
        wait: sleeps for some seconds.

    Raises:
        MissingNodesError: some nodes have not joined in time. The message names them.
    """
    start = time.monotonic()
    seen = -1
    while True:
        names = {node.name for node in alive()}
        missing = [name for name in expected if name not in names]
        if not missing:
            return
        if time.monotonic() - start >= timeout_s:
            raise MissingNodesError(
                f"{len(missing)} of {len(expected)} nodes did not join Ray within {timeout_s:g} s: "
                f"{', '.join(missing)}. Fix: see their node-N.log next to the token, and check "
                "whether they reach the first node; then leave them out (sbatch --exclude)"
            )
        if len(expected) - len(missing) != seen:
            seen = len(expected) - len(missing)
            logger.info("%d of %d nodes have joined Ray", seen, len(expected))
        wait(min(_POLL_S, timeout_s))


def _natural(name: str) -> list[tuple[int, str]]:
    """Return a sort key by which n2 precedes n10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name) if part]


def main(argv: Sequence[str] | None = None) -> int:
    """Wait for the nodes named on the command line. Return 0 when all have joined, 3 if some are missing, 1
    without a Ray cluster."""
    parser = argparse.ArgumentParser(
        description="Wait until all nodes have joined the Ray cluster at RAY_ADDRESS."
    )
    parser.add_argument("--expect", required=True, type=lambda text: text.split(","), metavar="NAME,NAME,...")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS")
    arguments = parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        init_ray(log_to_driver=False)
        wait_for_nodes(arguments.expect, arguments.timeout)
    except MegarlError as error:
        sys.stderr.write(f"megarl: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
