"""Choice of a node for each part of a virtual cluster, and slots of a local Ray. Pure: no Ray here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from megarl.errors import ClusterError

# CPUs only count slots for Ray here: a laptop must be able to hold more ranks than it has cores.
_LEAST_LOCAL_SLOTS = 64


def local_slots() -> int:
    """Return the number of workers that a local Ray accepts, one slot each."""
    return max(_LEAST_LOCAL_SLOTS, os.cpu_count() or 1)


class ResourceInsufficientError(ClusterError):
    """The Ray cluster has fewer CPUs or GPUs than the bundles need, or not on enough nodes."""


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node.

    Attributes:
        name: the name given to ``ray start --node-name``, or else its address.
        node_id: Ray's own id for it.
        total: amount of each resource, for example ``{"CPU": 64, "GPU": 8}``.
        free: the part of it that is not reserved.
    """

    name: str
    node_id: str
    total: Mapping[str, float] = field(default_factory=dict)
    free: Mapping[str, float] = field(default_factory=dict)

    def without(self, bundle: Mapping[str, float], count: int) -> RayNode:
        """Return the node with some bundles reserved by others."""
        total, free = dict(self.total), dict(self.free)
        for amounts in (total, free):
            for kind in amounts:
                amounts[kind] -= count * bundle.get(kind, 0.0)
        return replace(self, total=total, free=free)


def choose_nodes(
    counts: Sequence[int], bundle: Mapping[str, float], nodes: Sequence[RayNode]
) -> list[RayNode]:
    """Choose a distinct node for each entry of ``counts``, in the order of ``nodes`` as far as their sizes
    allow.

    Neighbours in ``nodes`` thus become neighbours in rank. Nodes with too little for an entry are left to
    smaller entries. Free nodes come before partly reserved ones; if all are reserved, the result is that of
    an idle cluster, and the caller waits.

    Args:
        counts: bundles of each part, all above 0.
        bundle: resources of a bundle, for example ``{"CPU": 1, "GPU": 1}``.
        nodes: living nodes.

    Raises:
        ResourceInsufficientError: there are too few nodes of that size; the message lists what each has.
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
    """Let the largest entry choose first: no smaller one could make better use of its node."""
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
