"""Assignment of bundles to the workers of a group, with rank, name and environment variables. Without Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megarl.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """The bundle and the rank of one worker.

    Attributes:
        rank: rank in the group.
        world_size: number of workers in the group.
        node: index of the node in the list of placement groups.
        group, bundle: index of the placement group, and of the bundle in it.
        local_world_size: number of the group's workers with the same ``node``.
        tied_group: index of the worker's group of tied workers, whose bundles were given together; otherwise
            each worker is a group of its own.
        is_leader: the worker is the first of its tied group.
        bundle_indices: (node, bundles) of the tied group; None unless the worker is its leader.
        name: name for logs.
    """

    rank: int
    world_size: int
    node: int
    group: int
    bundle: int
    local_world_size: int
    tied_group: int
    is_leader: bool
    bundle_indices: tuple[int, list[int]] | None
    name: str

    def environment(self) -> dict[str, str]:
        """Return the environment variables that a distributed launcher sets, except the rendezvous address,
        which is known only after rank 0 has bound it."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.bundle),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "NODE_RANK": str(self.node),
        }

    def metadata(self) -> dict[str, Any]:
        """Return the worker's entry of ``RayWorkerGroup.worker_metadata``."""
        return {
            "node_idx": self.node,
            "local_rank": self.bundle,
            "global_rank": self.rank,
            "name": self.name,
            "bundle_indices": self.bundle_indices,
            "dp_shard_idx": self.tied_group,
        }


def place_workers(
    bundle_counts: Sequence[int],
    workers_per_node: int | Sequence[int] | None,
    bundle_indices_list: Sequence[tuple[int, Sequence[int]]] | None,
    name_prefix: str,
) -> list[WorkerPlace]:
    """Assign bundles to all workers, and return the assignments by rank.

    Args:
        bundle_counts: number of bundles of each placement group.
        workers_per_node, bundle_indices_list, name_prefix: as in ``RayWorkerGroup``.

    Raises:
        ConfigError: (a ValueError) both ``workers_per_node`` and ``bundle_indices_list`` are given, or one
            does not match the placement groups.
    """
    if bundle_indices_list is None:
        counts = _worker_counts(bundle_counts, workers_per_node)
        tied_groups = [(node, [bundle]) for node, count in enumerate(counts) for bundle in range(count)]
    else:
        if workers_per_node is not None:
            raise ConfigError(
                f"workers_per_node = {workers_per_node} with bundle_indices_list: only one may be given. "
                "Fix: drop one"
            )
        tied_groups = [(node, list(bundles)) for node, bundles in bundle_indices_list]
    _check_bundles(bundle_counts, tied_groups)
    local_sizes: Counter[int] = Counter()
    for node, bundles in tied_groups:
        local_sizes[node] += len(bundles)
    # Number the ranks in the order of the list, whatever the nodes are: callers arrange their axes over this
    # order.
    places: list[WorkerPlace] = []
    for index, (node, bundles) in enumerate(tied_groups):
        for local, bundle in enumerate(bundles):
            name = (
                f"{name_prefix}-grp{index}-{local}" if len(bundles) > 1 else f"{name_prefix}-{node}-{bundle}"
            )
            leader = local == 0
            places.append(
                WorkerPlace(
                    rank=len(places),
                    world_size=local_sizes.total(),
                    node=node,
                    group=_placement_group(bundle_counts, node),
                    bundle=bundle,
                    local_world_size=local_sizes[node],
                    tied_group=index,
                    is_leader=leader,
                    bundle_indices=(node, bundles) if leader else None,
                    name=name,
                )
            )
    return places


def _worker_counts(bundle_counts: Sequence[int], workers_per_node: int | Sequence[int] | None) -> list[int]:
    if workers_per_node is None:
        return list(bundle_counts)
    counts = (
        [workers_per_node] * len(bundle_counts)
        if isinstance(workers_per_node, int)
        else list(workers_per_node)
    )
    if len(counts) != len(bundle_counts):
        raise ConfigError(
            f"workers_per_node = {workers_per_node}: must have {len(bundle_counts)} entries, one a node. "
            "Fix: one number a node"
        )
    for node, (count, limit) in enumerate(zip(counts, bundle_counts, strict=True)):
        if not 0 <= count <= limit:
            raise ConfigError(
                f"workers_per_node = {workers_per_node}: node {node} has {limit} bundles, so 0 to {limit} "
                f"workers fit. Fix: {limit}"
            )
    if sum(counts) == 0:
        raise ConfigError(f"workers_per_node = {workers_per_node}: there must be at least one worker. Fix: 1")
    return counts


def _placement_group(bundle_counts: Sequence[int], node: int) -> int:
    """Return the index of a node's placement group. A unified group contains the bundles of all nodes."""
    return 0 if len(bundle_counts) == 1 else node


def _check_bundles(bundle_counts: Sequence[int], tied_groups: Sequence[tuple[int, Sequence[int]]]) -> None:
    if not tied_groups:
        raise ConfigError(
            "bundle_indices_list = []: there must be at least one worker. Fix: for example [(0, [0])]"
        )
    taken: set[tuple[int, int]] = set()
    for node, bundles in tied_groups:
        # In a unified group the node is only a label, so any number from 0 up is valid.
        if node < 0 or (len(bundle_counts) > 1 and node >= len(bundle_counts)):
            raise ConfigError(
                f"bundle_indices_list: node {node} does not exist, there are {len(bundle_counts)}. Fix: "
                "correct it"
            )
        group = _placement_group(bundle_counts, node)
        if not bundles:
            raise ConfigError(f"bundle_indices_list: the group on node {node} has no bundles. Fix: drop it")
        for bundle in bundles:
            if not 0 <= bundle < bundle_counts[group]:
                raise ConfigError(
                    f"bundle_indices_list: bundle {bundle} on node {node} must lie in [0, "
                    f"{bundle_counts[group]}). Fix: correct it"
                )
            # Compare groups rather than nodes, because in a unified group different nodes share the bundles.
            if (group, bundle) in taken:
                raise ConfigError(
                    f"bundle_indices_list: bundle {bundle} on node {node} is given twice; it holds one "
                    "worker. Fix: drop one"
                )
            taken.add((group, bundle))
