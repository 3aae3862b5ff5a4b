"""Reservation of bundles in a Ray cluster, one per worker rank, with or without a GPU; and free TCP ports for
rendezvous."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from typing_extensions import TypedDict

from megarl.distributed import ray_calls
from megarl.distributed.node_choice import RayNode, ResourceInsufficientError, choose_nodes
from megarl.distributed.ray_nodes import alive_nodes, lost_node_name
from megarl.distributed.ray_runtime import init_ray, is_single_host
from megarl.errors import ConfigError, DeadlineError, MegarlError, StateError, WorkerLostError

# Ports that are rarely in use: Ray's processes use lower ones, and the kernel's ephemeral range is above by
# default.
_QUIET = range(20_000, 32_768)
# Number of ports to try before the kernel is left to choose one.
_ATTEMPTS = 100
# Seconds between two checks for lost nodes while Ray reserves bundles.
_LOOK_S = 5.0
_KERNELS_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def free_port(address: str, ports: Sequence[int] = _QUIET) -> int:
    """Return a port of ``address`` that is not in use, and preferably one that the kernel never assigns by
    itself.

    Until a server binds the port, other connections and binds to port 0 on this host get ports of the
    kernel's ephemeral range. A port outside that range stays free unless a process asks for its number. If
    all of ``ports`` are in the ephemeral range, so is the result.

    Raises:
        OSError: the address does not belong to this host, or has no free port.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    candidates = _quiet_ports(ports)
    # Use the operating system's entropy: processes that have seeded ``random`` equally must not all try the
    # same port.
    random.SystemRandom().shuffle(candidates)
    for port in candidates[:_ATTEMPTS]:
        with contextlib.suppress(OSError):
            return _bound(family, address, port)
    return _bound(family, address, 0)


def _bound(family: int, address: str, port: int) -> int:
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, port))
        return int(probe.getsockname()[1])


def _quiet_ports(ports: Sequence[int]) -> list[int]:
    try:
        first, last = map(int, _KERNELS_RANGE.read_text().split())
    except (OSError, ValueError):
        return []
    return [port for port in ports if not first <= port <= last]


__all__ = [
    "PY_EXECUTABLES",
    "ClusterConfig",
    "RayVirtualCluster",
    "ResourceInsufficientError",
    "_get_node_ip_and_free_port",
    "init_ray",
]

logger = logging.getLogger(__name__)

_NODE_ID_LABEL = "ray.io/node-id"
_STRATEGIES = ("PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD")


class ClusterConfig(TypedDict):
    """Size of the cluster that a run requests."""

    gpus_per_node: int
    num_nodes: int


class PY_EXECUTABLES:
    """Python interpreters of the workers, by NeMo-RL's names. In megarl, all workers use the same
    environment."""

    SYSTEM = sys.executable
    BASE = sys.executable
    VLLM = sys.executable
    MCORE = sys.executable


def _get_node_ip_and_free_port() -> tuple[str, int]:
    """Return this node's address and a port that is free now, but may be taken by another process later.
    Worker groups do not use it."""
    address = ray.util.get_node_ip_address()
    return address, free_port(address)


class RayVirtualCluster:
    """A set of bundles, one per worker rank, in placement groups that are created at first use.

    Args:
        bundle_ct_per_node_list: number of worker ranks on each node, for example ``[8, 8]``.
        use_gpus: every bundle has one GPU; False for CPU-only ranks.
        max_colocated_worker_groups: number of worker groups that share the bundles. Each worker gets one CPU
            and this fraction of the GPU: 1 divided by the number.
        num_gpus_per_node: number of GPUs of a node; the maximum of ``bundle_ct_per_node_list`` with
            ``use_gpus``.
        name: prefix of the placement groups' names.
        placement_group_strategy: Ray's strategy for a unified placement group (``PACK``, ``SPREAD``,
            ``STRICT_PACK``, ``STRICT_SPREAD``).
        max_retries: how often the cluster's resources are checked, with waits of 1, 2, 4, ... s in between,
            because nodes may still be joining.
        ready_timeout_s: maximum seconds until Ray has reserved all bundles.

    Raises:
        ConfigError: an argument is out of range.
    """

    def __init__(
        self,
        bundle_ct_per_node_list: list[int],
        use_gpus: bool = True,
        max_colocated_worker_groups: int = 1,
        num_gpus_per_node: int = 8,
        name: str = "",
        placement_group_strategy: str = "SPREAD",
        *,
        max_retries: int = 6,
        ready_timeout_s: float = 180.0,
    ) -> None:
        # Set this attribute first, because __del__ reads it even if a check below raises.
        self._placement_groups: list[PlacementGroup] | None = None
        _check_arguments(
            bundle_ct_per_node_list, use_gpus, max_colocated_worker_groups, num_gpus_per_node, max_retries
        )
        if placement_group_strategy not in _STRATEGIES:
            raise ConfigError(
                f"placement_group_strategy = {placement_group_strategy!r}: must be one of "
                f"{', '.join(_STRATEGIES)}. Fix: SPREAD"
            )
        self._bundle_ct_per_node_list = list(bundle_ct_per_node_list)
        self.use_gpus = use_gpus
        self.max_colocated_worker_groups = max_colocated_worker_groups
        self.num_gpus_per_node = num_gpus_per_node
        self.name = name
        self.placement_group_strategy = placement_group_strategy
        self._max_retries = max_retries
        self._ready_timeout_s = ready_timeout_s
        self._is_shut_down = False
        self._nodes: set[str] = set()

    def world_size(self) -> int:
        """Return the number of bundles, which is the number of worker ranks of a group."""
        return sum(self._bundle_ct_per_node_list)

    def node_count(self) -> int:
        """Return the number of nodes with at least one bundle."""
        return sum(1 for count in self._bundle_ct_per_node_list if count > 0)

    def get_placement_groups(self) -> list[PlacementGroup]:
        """Return the placement groups, one per node with bundles. They are reserved at the first call.

        In a cluster of several nodes, each group is on a different node, in the order of the nodes' names; in
        a cluster of one node, all groups are there. Ranks are numbered through the groups, so that adjacent
        ranks, which are tensor-parallel, are on the same node.

        Raises:
            ResourceInsufficientError: the cluster is too small.
            DeadlineError: the resources exist but are in use.
            WorkerLostError: a node was lost meanwhile.
            StateError: ``shutdown`` was called before.
        """
        return self._init_placement_groups()

    def _init_placement_groups(
        self, strategy: str | None = None, use_unified_pg: bool = False
    ) -> list[PlacementGroup]:
        """Create the placement groups. ``use_unified_pg`` creates one group with all bundles, for workers
        that span nodes."""
        if self._placement_groups is None:
            if self._is_shut_down:
                raise StateError(
                    f"virtual cluster {self.name!r} was shut down. Fix: make a new RayVirtualCluster"
                )
            if not ray.is_initialized():
                init_ray()
            # Retry, because the nodes of a job join one after another. A single host has all its resources
            # from the start.
            attempts = 1 if is_single_host() else self._max_retries
            _retry(lambda: self._check_resources(ray_calls.cluster_resources()), attempts, time.sleep)
            self._placement_groups = self._reserve(strategy or self.placement_group_strategy, use_unified_pg)
        return self._placement_groups

    def check_places(self, nodes: Sequence[RayNode]) -> list[RayNode]:
        """Check that the nodes have enough resources for the bundles. Return the nodes with their remaining
        resources.

        Raises:
            ResourceInsufficientError: they do not.
        """
        total: defaultdict[str, float] = defaultdict(float)
        for node in nodes:
            for kind, amount in node.total.items():
                total[kind] += amount
        self._check_resources(total)
        bundles: Counter[str] = Counter()
        for count, node_id in self._places(nodes):
            bundles[node_id or nodes[0].node_id] += count
        return [node.without(self._bundle, bundles[node.node_id]) for node in nodes]

    def lost_nodes(self) -> list[str]:
        """Return the names of lost nodes on which bundles were reserved; always empty in a cluster of one
        node."""
        return list(filter(None, map(lost_node_name, sorted(self._nodes))))

    def _check_resources(self, total: Mapping[str, float]) -> None:
        # One CPU for each worker of each group that may share a bundle, as in ``_bundle``.
        needed = {"CPU": self.world_size() * self.max_colocated_worker_groups}
        if self.use_gpus:
            needed["GPU"] = self.world_size()
        for kind, amount in needed.items():
            if total.get(kind, 0.0) < amount:
                raise ResourceInsufficientError(
                    f"virtual cluster {self.name!r} needs {amount} {kind}s for {self.world_size()} bundles "
                    f"(max_colocated_worker_groups = {self.max_colocated_worker_groups}); the Ray cluster "
                    f"has {total.get(kind, 0.0):g}. "
                    f"Fix: {self._advice(kind, amount)}"
                )

    def _advice(self, kind: str, amount: int) -> str:
        if not is_single_host():
            return "start more Ray nodes, or ask for fewer bundles"
        return (
            f"call init_ray(num_cpus={amount})"
            if kind == "CPU"
            else "pass use_gpus=False (cluster.device=cpu), or ask for fewer"
        )

    def _reserve(self, strategy: str, unified: bool) -> list[PlacementGroup]:
        bundle, counts = self._bundle, self._bundle_ct_per_node_list
        # Ray requires distinct names, but two clusters may have the same name.
        name = f"{self.name or 'cluster'}-{uuid.uuid4().hex[:8]}"
        if unified:
            with ray_calls.calling("placement_group"):
                groups = [
                    placement_group(
                        [dict(bundle) for _ in range(sum(counts))], strategy=strategy, name=f"{name}-unified"
                    )
                ]
        else:
            places, groups = self._places(alive_nodes()), []
            self._nodes = {node_id for _, node_id in places if node_id}
            with ray_calls.calling("placement_group"):
                # Pin each group to its node by a label. Otherwise Ray would choose the node, and the order of
                # the ranks would not follow the order of the nodes.
                for index, (count, node_id) in enumerate(places):
                    selector = [{_NODE_ID_LABEL: node_id}] * count if node_id else None
                    bundles = [dict(bundle) for _ in range(count)]
                    # STRICT_PACK keeps tensor-parallel ranks on one node. Otherwise their all-reduces would
                    # use the network.
                    of_node = f"{name}-node{index}"
                    groups.append(
                        placement_group(
                            bundles, strategy="STRICT_PACK", name=of_node, bundle_label_selector=selector
                        )
                    )
        # After a failure remove the groups, because Ray may still reserve some of them, which would occupy
        # their bundles until Ray ends.
        try:
            self._await_reserved(groups)
        except MegarlError:
            _remove(groups)
            raise
        return groups

    def _await_reserved(self, groups: Sequence[PlacementGroup]) -> None:
        """Wait until Ray has reserved all placement groups.

        Raises:
            WorkerLostError: a chosen node is gone, so waiting is useless.
            DeadlineError: it takes too long.
        """
        deadline = time.monotonic() + self._ready_timeout_s
        for group in groups:
            while not _is_reserved(group, max(min(deadline - time.monotonic(), _LOOK_S), 0.0)):
                lost = self.lost_nodes()
                if lost:
                    raise WorkerLostError(
                        f"virtual cluster {self.name!r}: node {', '.join(lost)} is lost, before Ray had "
                        "reserved the bundles on it. "
                        "Fix: see why it ended, and start the run again"
                    )
                if time.monotonic() >= deadline:
                    available = {
                        kind: f"{ray_calls.available_resources().get(kind, 0.0):g}" for kind in self._bundle
                    }
                    raise DeadlineError(
                        f"virtual cluster {self.name!r}: Ray did not reserve {self.world_size()} bundles of "
                        f"{self._bundle} within "
                        f"{self._ready_timeout_s:g} s; free now: {available}. "
                        "Fix: shut down other users of this Ray cluster, or wait longer"
                    )

    @property
    def _bundle(self) -> dict[str, int]:
        """Ray resources of one bundle."""
        return {"CPU": self.max_colocated_worker_groups, **({"GPU": 1} if self.use_gpus else {})}

    def _places(self, nodes: Sequence[RayNode]) -> list[tuple[int, str | None]]:
        """Return, for each node, the number of bundles and Ray's id of the node. The id is None if there is
        only one node, as on a laptop."""
        counts = [count for count in self._bundle_ct_per_node_list if count > 0]
        if len(nodes) == 1:
            return [(count, None) for count in counts]
        return [
            (count, node.node_id)
            for count, node in zip(counts, choose_nodes(counts, self._bundle, nodes), strict=True)
        ]

    def get_master_address_and_port(self) -> tuple[str, int]:
        """Return the address of bundle 0's node and a port that is free there now. Worker groups do not use
        it; they keep a bound port."""
        first = self.get_placement_groups()[0]
        task = ray.remote(_get_node_ip_and_free_port).options(
            # Request no CPU, because workers may occupy all CPUs of the bundle.
            num_cpus=0,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=first, placement_group_bundle_index=0
            ),
        )
        try:
            return ray_calls.get(ray_calls.submit(task), timeout=self._ready_timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise DeadlineError(
                f"virtual cluster {self.name!r}: bundle 0 did not answer within {self._ready_timeout_s:g} "
                "s. Fix: check its node"
            ) from error

    def shutdown(self) -> bool:
        """Release the bundles, and return True. Further calls are allowed."""
        groups, self._placement_groups = self._placement_groups, None
        self._is_shut_down = True
        # If Ray has been shut down, the bundles are released already.
        if ray.is_initialized():
            _remove(groups or ())
        return True

    def __del__(self) -> None:
        # During interpreter shutdown, modules may already be gone. Ray then releases the bundles itself.
        if sys is not None and not sys.is_finalizing():
            self.shutdown()


def _is_reserved(group: PlacementGroup, timeout_s: float) -> bool:
    with ray_calls.calling("PlacementGroup.wait", timeout_s):
        return group.wait(timeout_seconds=timeout_s)


def _remove(groups: Sequence[PlacementGroup]) -> None:
    with ray_calls.calling("remove_placement_group"):
        for group in groups:
            remove_placement_group(group)


def check_places_together(clusters: Sequence[RayVirtualCluster]) -> None:
    """Check that the nodes that are alive have enough resources for the bundles of all these clusters
    together, whether free or reserved.

    Raises:
        ResourceInsufficientError: they do not.
    """
    nodes = [replace(node, free=node.total) for node in alive_nodes()]
    for cluster in clusters:
        nodes = cluster.check_places(nodes)


def _check_arguments(
    bundle_counts: list[int], use_gpus: bool, max_colocated: int, gpus_per_node: int, max_retries: int
) -> None:
    if not bundle_counts or min(bundle_counts) < 0 or sum(bundle_counts) == 0:
        raise ConfigError(
            f"bundle_ct_per_node_list = {bundle_counts}: counts must be >= 0 with at least one bundle. Fix: "
            "for example [2]"
        )
    if use_gpus and max(bundle_counts) > gpus_per_node:
        raise ConfigError(
            f"bundle_ct_per_node_list = {bundle_counts}: no node may have more than num_gpus_per_node = "
            f"{gpus_per_node}. "
            "Fix: spread the bundles over more nodes, or raise num_gpus_per_node"
        )
    if max_colocated < 1:
        raise ConfigError(f"max_colocated_worker_groups = {max_colocated}: must be >= 1. Fix: 1")
    if max_retries < 1:
        raise ConfigError(f"max_retries = {max_retries}: must be >= 1. Fix: 6")


def _retry(check: Callable[[], None], attempts: int, wait: Callable[[float], None]) -> None:
    """Call ``check`` until it does not raise, at most ``attempts`` times, waiting 1, 2, 4, ... s in between.
    The last error is raised."""
    for attempt in range(attempts):
        try:
            return check()
        except ResourceInsufficientError as error:
            if attempt == attempts - 1:
                raise
            logger.warning("attempt %d of %d, next in %d s: %s", attempt + 1, attempts, 2**attempt, error)
            wait(float(2**attempt))
