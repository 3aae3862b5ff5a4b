"""Implementation of ``megarl doctor --nodes``: check that the nodes of a Ray cluster have the resources for a
run, have the same software, and can compute together.

Ranks are placed, started and connected as in a run, so a failure here would also stop the run.
"""

from __future__ import annotations

import datetime
import platform
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypedDict

import psutil

from megarl import __version__, env
from megarl.config.sections import RunConfig
from megarl.doctor.check import Check, Room, Verdict
from megarl.errors import MegarlError

if TYPE_CHECKING:
    from megarl.distributed.node_choice import RayNode

ROOM = Room("cluster")
START_S = 300.0
"""Seconds until all processes must have imported torch, possibly from a shared file system."""
ADDING_S = 120.0
"""Timeout in seconds of the rendezvous and of each collective."""
MIB = 2**20
NUMBERS = {"gloo": 1 << 20, "nccl": 1 << 26}
"""Float32 numbers per all-reduce: 4 MiB for gloo, and 256 MiB for NCCL to saturate the links between
nodes."""
REPEATS = 5
PACKAGES = ("torch", "megatron-core", "transformers", "ray", "vllm", "transformer-engine")


@dataclass(frozen=True, slots=True)
class Shape:
    """The ranks of a check.

    Attributes:
        nodes: number of nodes.
        ranks: number of ranks on each node.
        gpus: each rank has a GPU.
    """

    nodes: int
    ranks: int
    gpus: bool

    def __str__(self) -> str:
        plural = "s" if self.nodes > 1 else ""
        return f"{self.nodes * self.ranks} ranks on {self.nodes} node{plural}"


class Facts(TypedDict):
    """The host name of a rank, its interface towards rank 0, and package -> version (``absent`` if not
    installed)."""

    host: str
    interface: str
    versions: dict[str, str]


def check_nodes(config: RunConfig | None = None) -> Iterator[Check]:
    """Check the Ray cluster at ``RAY_ADDRESS``, or a local one.

    Args:
        config: checked configuration whose nodes and GPUs are required; None uses the whole cluster.
    """
    from megarl.distributed.ray_nodes import alive_nodes
    from megarl.distributed.ray_runtime import init_ray

    try:
        init_ray(log_to_driver=False)
        nodes = alive_nodes()
    except MegarlError as error:
        yield ROOM.failed("nodes", str(error), "see the message")
        return
    checks = [judge_nodes(nodes, config), judge_gpus(nodes, config)]
    yield from checks
    if all(check.verdict is not Verdict.FAILED for check in checks):
        yield from check_ranks(shape_of(nodes, config))


def judge_nodes(nodes: Sequence[RayNode], config: RunConfig | None) -> Check:
    """Check that the cluster has as many nodes as the run needs."""
    found = f"{len(nodes)} in Ray: {', '.join(node.name for node in nodes)}"
    wanted = int(config["cluster"]["num_nodes"]) if config is not None else 1
    if len(nodes) >= wanted:
        return ROOM.ok("nodes", found)
    fix = f"sbatch --nodes={wanted}, or cluster.num_nodes={len(nodes)}"
    if env.text("RAY_ADDRESS") is None:
        fix = f"set RAY_ADDRESS to the cluster's: without it this is a Ray of this machine alone; or {fix}"
    return ROOM.failed("nodes", f"{found}; cluster.num_nodes = {wanted}", fix)


def judge_gpus(nodes: Sequence[RayNode], config: RunConfig | None) -> Check:
    """Check that enough nodes have the GPUs that the run needs. Ray sees only the GPUs that Slurm has given
    to the job."""
    have = {node.name: int(node.total.get("GPU", 0)) for node in nodes}
    described = ", ".join(f"{name}: {count}" for name, count in have.items())
    if config is None:
        return ROOM.ok("GPUs", described if any(have.values()) else "none; ranks use CPUs over gloo")
    section = config["cluster"]
    wanted, device = int(section["gpus_per_node"]), section["device"]
    if device == "cpu":
        return ROOM.ok("GPUs", "cluster.device = cpu: the run uses none")
    if device == "auto" and not any(have.values()):
        fix = f"sbatch --gpus-per-node={wanted}; or write cluster.device=cpu, if that is intended"
        return ROOM.warning("GPUs", "Ray has none on any node, and cluster.device = auto", fix)
    if sum(count >= wanted for count in have.values()) >= int(section["num_nodes"]):
        return ROOM.ok("GPUs", f"{described}; the run uses {wanted} per node")
    fix = (
        f"sbatch --gpus-per-node={wanted} (some sites: --gres=gpu:{wanted}); srun nvidia-smi -L shows "
        "what a job gets"
    )
    return ROOM.failed("GPUs", f"Ray has {described}; cluster.gpus_per_node = {wanted}", fix)


def shape_of(nodes: Sequence[RayNode], config: RunConfig | None) -> Shape:
    """Return the ranks to test: those of the run, or one per GPU. Without GPUs use one rank per node, and at
    least two ranks."""
    # Every node gets the same number of ranks, so the node with the fewest GPUs decides.
    gpus = min(int(node.total.get("GPU", 0)) for node in nodes)
    if config is not None:
        section = config["cluster"]
        uses_gpus = section["device"] == "cuda" or (section["device"] == "auto" and gpus > 0)
        return Shape(int(section["num_nodes"]), int(section["gpus_per_node"]), uses_gpus)
    return Shape(len(nodes), gpus or (1 if len(nodes) > 1 else 2), gpus > 0)


def check_ranks(shape: Shape) -> Iterator[Check]:
    """Start the ranks, compare their software versions, and measure an all-reduce."""
    from megarl.distributed.virtual_cluster import RayVirtualCluster
    from megarl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup

    cluster = RayVirtualCluster(
        [shape.ranks] * shape.nodes, use_gpus=shape.gpus, num_gpus_per_node=shape.ranks, name="doctor"
    )
    group = None
    try:
        builder = RayWorkerBuilder(f"{__name__}.Adder")
        device = {"MEGARL_DEVICE": "cuda" if shape.gpus else "cpu"}
        # The ranks' own timeouts give better error messages, so let them expire first.
        group = RayWorkerGroup(
            cluster,
            builder,
            name_prefix="doctor",
            env_vars=device,
            init_timeout_s=START_S,
            call_timeout_s=2 * ADDING_S,
        )
        facts = group.get_all_worker_results(group.run_all_workers_single_data("facts"))
        yield from compare(facts)
        yield judge_sums(group, shape, facts)
    except MegarlError as error:
        yield ROOM.failed(
            "ranks",
            f"{shape}: {_first_line(error)}",
            "ray status; check what the message names, and node-N.log of a job",
        )
    finally:
        if group is not None:
            group.shutdown()
        cluster.shutdown()


def judge_sums(group: Any, shape: Shape, facts: Sequence[Facts]) -> Check:
    """Check the result of an all-reduce over the ranks, and report its bandwidth.

    Args:
        group: worker group of ``Adder``.
        shape: its ranks.
        facts: result of ``Adder.facts`` for each rank.
    """
    backend, world = ("nccl" if shape.gpus else "gloo"), len(facts)
    name, numbers = f"{backend} all-reduce", NUMBERS[backend]
    interfaces = sorted({fact["interface"] for fact in facts})
    try:
        answers = group.get_all_worker_results(group.run_all_workers_single_data("add", numbers=numbers))
    except MegarlError as error:
        return ROOM.failed(name, f"{shape}: {_first_line(error)}", interface_hint(backend, facts))
    wrong = [str(rank) for rank, (_, right) in enumerate(answers) if not right]
    if wrong:
        return ROOM.failed(
            name, f"wrong sums on ranks {', '.join(wrong)} of {world}", interface_hint(backend, facts)
        )
    # An all-reduce takes as long as its slowest rank.
    seconds = max(seconds for seconds, _ in answers)
    # A ring all-reduce sends each byte 2 (n - 1) / n times.
    rate = 4 * numbers * 2 * (world - 1) / world / seconds / 1e9
    found = f"{shape} added {4 * numbers / MIB:.0f} MiB in {seconds * 1e3:.1f} ms, {rate:.2f} GB/s a rank"
    return ROOM.ok(name, f"{found}; addresses on {', '.join(interfaces)}")


def interface_hint(backend: str, facts: Sequence[Facts]) -> str:
    """Return the network settings to try if ranks cannot connect. A host with several networks may choose an
    interface that the other hosts cannot reach."""
    by_name: dict[str, list[str]] = {}
    for fact in facts:
        by_name.setdefault(fact["interface"], []).append(fact["host"])
    listed = ",".join(sorted(by_name))
    setting = (
        f"export NCCL_SOCKET_IFNAME={listed} GLOO_SOCKET_IFNAME={listed}   (the interfaces by which "
        "the nodes reach the first rank)"
    )
    if len(by_name) > 1:
        setting += (
            "; hosts differ: "
            f"{'; '.join(f'{name} on {sorted(set(hosts))[0]}' for name, hosts in sorted(by_name.items()))}"
        )
    return f"{setting}; NCCL_DEBUG=INFO shows what NCCL tries" if backend == "nccl" else setting


def compare(facts: Sequence[Facts]) -> Iterator[Check]:
    """Check that all ranks have the same software versions. Environments on local disks may differ."""
    alike = True
    for name in facts[0]["versions"]:
        hosts: dict[str, list[str]] = {}
        for fact in facts:
            hosts.setdefault(fact["versions"][name], []).append(fact["host"])
        if len(hosts) > 1:
            alike = False
            found = "; ".join(
                f"{version} on {', '.join(sorted(set(where)))}" for version, where in sorted(hosts.items())
            )
            fix = "use one environment on all nodes: MEGARL_VENV on a shared disk, or one image"
            yield ROOM.failed(name, f"nodes differ: {found}", fix)
    first = facts[0]["versions"]
    if alike:
        yield ROOM.ok(
            "versions", f"python {first['python']}, torch {first['torch']} on all {len(facts)} ranks"
        )


def interface_towards(address: str) -> str:
    """Return the network interface through which this host reaches an address, such as ``eth0``; the host's
    own address if no interface is found."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))  # Connecting a datagram socket sends nothing; it only selects the route.
        own = probe.getsockname()[0]
    for name, addresses in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == own for one in addresses):
            return name
    return str(own)


class Adder:
    """Worker that reports its environment and takes part in an all-reduce."""

    def facts(self) -> Facts:
        """Return the facts of this process."""
        versions = {name: env.installed_version(name) or "absent" for name in PACKAGES}
        return {
            "host": env.text("SLURMD_NODENAME") or socket.gethostname(),
            "interface": interface_towards(env.text("MASTER_ADDR") or "127.0.0.1"),
            "versions": {"megarl": __version__, "python": platform.python_version(), **versions},
        }

    def add(self, numbers: int) -> tuple[float, bool]:
        """Join the process group and all-reduce a float32 tensor of shape [numbers]. Return the median
        seconds, and whether the result is correct."""
        import torch
        import torch.distributed as dist

        from megarl.distributed import rendezvous
        from megarl.distributed.device import runtime

        here = runtime()
        here.activate()
        rendezvous.init_process_group(here.backend, datetime.timedelta(seconds=ADDING_S), here.device)
        world = dist.get_world_size()
        summed = torch.full((numbers,), float(dist.get_rank() + 1), device=here.device)
        dist.all_reduce(summed)
        # Later all-reduces add up sums, so check only the first.
        right = bool((summed == world * (world + 1) / 2).all())
        seconds = []
        for _ in range(REPEATS):
            # Without the barrier, the time would include waiting for the slowest rank.
            dist.barrier()
            here.synchronize()
            start = time.perf_counter()
            dist.all_reduce(summed)
            # NCCL is asynchronous, so wait for the device before stopping the clock.
            here.synchronize()
            seconds.append(time.perf_counter() - start)
        dist.destroy_process_group()
        # The median ignores a single slow all-reduce.
        return sorted(seconds)[REPEATS // 2], right


def _first_line(error: MegarlError) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
