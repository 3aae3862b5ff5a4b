"""Choice of a node for each placement group of a virtual cluster, and the number of slots of a local Ray.
Does not import Ray."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megarl.errors import ClusterError

# Minimum number of CPUs that a local Ray is started with. Ray only counts them as slots for workers, and a
# laptop must be able to run more ranks than it has cores.
_LEAST_LOCAL_SLOTS = 64


def local_slots() -> int:
    """Return the number of CPU slots of a local Ray, which is the number of workers it accepts."""
    return max(_LEAST_LOCAL_SLOTS, os.cpu_count() or 1)


class ResourceInsufficientError(ClusterError):
    """The Ray cluster has too few CPUs, GPUs or nodes for the bundles."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A node of the Ray cluster that is alive.

    Attributes:
        name: the name from ``ray start --node-name``, else the node's address.
        node_id: Ray's own id of the node.
        total: amount of each resource, for example ``{"CPU": 64, "GPU": 8}``.
        free: amount of each resource that is not reserved.
    """

    name: str
    node_id: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)

    def without(self, bundle: Mapping[str, float], count: int) -> RayNode:
        """Return the node with the resources of ``count`` bundles subtracted."""
        total, free = dict(self.total), dict(self.free)
        for amounts in (total, free):
            for kind in amounts:
                amounts[kind] -= count * bundle.get(kind, 0.0)
        return replace(self, total=total, free=free)


def choose_nodes(
    counts: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[RayNode]
) -> list[RayNode]:
    """Choose a different node for each entry of ``counts``, in the order of ``nodes`` as far as their sizes
    allow, so that adjacent nodes get adjacent ranks.

    A node that is too small for an entry is used for a smaller one. Nodes with enough free resources are
    preferred. If there are too few of them, nodes are chosen by their total resources, and the caller has to
    wait.

    Args:
        counts: number of bundles on each node, all above 0.
        bundle: resources of a bundle, for example ``{"CPU": 1, "GPU": 1}``.
        nodes: nodes that are alive.

    Raises:
        ResourceInsufficientError: too few nodes are large enough. The message lists the capacity of each.
    """
    chosen = _match(counts, bundle, nodes, free=True) or _match(counts, bundle, nodes, free=False)
    if chosen is None:
        have = ", ".join(f"{node.name}: {_capacity(bundle, node.total)}" for node in nodes)
        raise ResourceInsufficientError(
            f"bundles of each node = {list(counts)}, each bundle {dict(bundle)}: every entry needs "
            f"a node of its own. The {len(nodes)} nodes can hold these numbers of bundles: {have}. "
            "Fix: start more or equal nodes (sbatch --nodes), or lower cluster.num_nodes or "
            "cluster.gpus_per_node"
        )
    return chosen


def _match(
    counts: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[RayNode], free: bool
) -> list[RayNode] | None:
    """Assign nodes to entries, the largest entry first: a smaller entry never makes better use of a node."""
    left = list(nodes)
    chosen: dict[int, RayNode] = {}
    for index in sorted(range(len(counts)), key=lambda index: -counts[index]):
        for node in left:
            if _capacity(bundle, node.free if free else node.total) >= counts[index]:
                left.remove(node)
                chosen[index] = node
                break
        else:
            return None
    return [chosen[index] for index in range(len(counts))]


def _capacity(bundle: Mapping[str, float], resources: Mapping[str, float]) -> int:
    return int(min(resources.get(kind, 0.0) // amount for kind, amount in bundle.items()))
