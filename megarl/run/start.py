"""Start the parts of a run on Ray: placement groups, models, and rollout engines."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import itertools
import math
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from converters.python_file import modules_from_files
from megarl import env
from megarl.algorithms.algorithm import ACTOR, Role
from megarl.checkpoint.background import CheckpointMemory
from megarl.checkpoint.node_memory import OwnMemory
from megarl.config.adapters import share_a_base
from megarl.config.algorithms import algorithm_class, generates
from megarl.config.engines import kind_of
from megarl.config.models import model_roles
from megarl.config.nested import at
from megarl.config.plan import has_reference_policy, size_text
from megarl.config.rules.parallel import generation_shape, training_shape
from megarl.config.rules.run import POLICY_WORKERS
from megarl.config.rules.view import View
from megarl.config.sections import DeadlinesConfig, RunConfig
from megarl.distributed import nvml
from megarl.errors import ConfigError, Violation
from megarl.models.generation.engines import EngineKind, started_on_empty_devices
from megarl.observe.progress import phase
from megarl.run.resume import ResumePoint

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.algorithms.refit import Refit
    from megarl.distributed.shared_memory import SharedMemoryWatch
    from megarl.distributed.virtual_cluster import RayVirtualCluster
    from megarl.models.generation.interfaces import RolloutEngine
    from megarl.models.policy.lm_policy import Policy

_DRIVER_IMPORTS = ("transformers.models.auto.tokenization_auto", "megarl.models.policy.lm_policy")


def engine_of(config: RunConfig) -> EngineKind | None:
    """Return the rollout engine of a run; None if the policy generates itself or the algorithm does not
    generate.

    Raises:
        ConfigError: the configured engine does not exist.
    """
    generation = config["policy"]["generation"]
    return kind_of(generation) if generates(config) else None


# Seconds that the start of Ray took of ``deadlines.init_s``; the next build of workers gets the rest.
_ray_start = {"seconds": 0.0}


def start_ray(stack: ExitStack, timeout_s: float = math.inf, least_s: float = math.inf) -> None:
    """Start Ray unless it is running, and import the driver's modules meanwhile.

    Ray's start waits for processes while importing computes, so together they take only as long as the longer
    one. Afterwards a watchdog ends this process with exit code 4, and records the reason, if Ray's control
    process or this node's raylet dies or hangs, or if a Ray call does not return.

    Args:
        stack: shuts Ray down when it is closed.
        timeout_s: ``deadlines.init_s``; what Ray does not use is left for the workers.
        least_s: ``deadlines.least_s``, the time within which the watchdog detects a lost Ray.

    Raises:
        ClusterError: Ray does not start.
        DeadlineError: its start hangs.
    """
    # OpenMP reads its environment variable only when it is loaded, so load it before torch does.
    _load_openmp()
    import ray

    from megarl.distributed.ray_runtime import init_ray, shutdown_ray
    from megarl.distributed.ray_watch import silent_seconds, watch_ray

    # A Ray that the caller has started is neither watched nor shut down here.
    if ray.is_initialized():
        _import_for_driver()
        return
    begun = time.monotonic()
    with phase("Ray started" if env.text("RAY_ADDRESS") is None else "Ray joined"):
        # Start the thread only after Ray is imported. Two importing threads would alternate and delay the
        # start of Ray's processes.
        importing = threading.Thread(target=_import_for_driver, name="imports of the driver", daemon=True)
        importing.start()
        try:
            # Register the shutdown first, because a failed start may leave some of Ray's processes running.
            stack.callback(shutdown_ray)
            init_ray(timeout_s=timeout_s, silent_s=silent_seconds(least_s))
            _ray_start["seconds"] = time.monotonic() - begun
            if ray.is_initialized():
                stack.enter_context(watch_ray(least_s))
        finally:
            importing.join()


def _load_openmp() -> None:
    """Load torch's OpenMP library with ``OMP_WAIT_POLICY=PASSIVE``, so that idle threads sleep.

    By default each thread spins for milliseconds after every large torch operation. That took most of the
    driver's CPU time, on cores that ranks of the same node need. The variable is set only during loading, so
    Ray's processes do not inherit it.
    """
    torch = importlib.util.find_spec("torch")
    name = "OMP_WAIT_POLICY"
    with env.variables({name: env.text(name) or "PASSIVE"}), contextlib.suppress(OSError):
        # torch ships its own libgomp; some builds have a hash in its name.
        for library in Path(str(torch and torch.origin)).parent.glob("lib/libgomp*"):
            ctypes.CDLL(str(library))


def _import_for_driver() -> None:
    for module in _DRIVER_IMPORTS:
        # Whoever uses the module gets the error again and reports it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)


def uses_gpus(device: str, gpus: float) -> bool:
    """Return whether the workers use GPUs. With ``auto``, the environment variable ``MEGARL_DEVICE`` decides,
    and otherwise GPUs are used if Ray has any.

    Args:
        device: ``cluster.device``.
        gpus: number of GPUs of the Ray cluster.

    Raises:
        ConfigError: ``auto`` would use the CPU although a GPU is expected (in a Slurm job, or on a machine
            with GPUs), or ``MEGARL_DEVICE`` contradicts the configuration.
    """
    from megarl.distributed.device import wanted_device

    setting = wanted_device()
    wanted = {device, setting} - {"auto"}
    if len(wanted) > 1:
        fix = f"unset MEGARL_DEVICE, or write cluster.device={setting}"
        raise ConfigError(
            [Violation("cluster.device", device, f"the environment has MEGARL_DEVICE = {setting}", fix)]
        )
    if wanted:
        return wanted == {"cuda"}
    if not gpus:
        _refuse_the_cpu_where_gpus_are_expected()
    return gpus > 0


def _refuse_the_cpu_where_gpus_are_expected() -> None:
    job, present = env.text("SLURM_JOB_ID"), nvml.count_devices()
    if job is None and not present:
        return
    where = (
        f"the NVIDIA driver has {present} GPUs on this machine" if present else f"this is job {job} of Slurm"
    )
    fix = (
        "write cluster.device=cpu to train on the CPU anyway; else give the job GPUs (sbatch "
        "--gpus-per-node=8), unset CUDA_VISIBLE_DEVICES, and see what megarl doctor reports about "
        "them"
    )
    raise ConfigError(
        [
            Violation(
                "cluster.device",
                "auto",
                f"Ray has no GPU, although {where}: it would silently train on the CPU",
                fix,
            )
        ]
    )


def start_policy(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    start: ResumePoint,
    stack: ExitStack,
    role: Role = ACTOR,
    beside: Policy | None = None,
    *,
    trains: bool = True,
) -> Policy:
    """Build a role's model on Ray workers, after starting Ray if necessary.

    Args:
        config: configuration of the run.
        tokenizer: the policy's tokenizer.
        start: checkpoint to load, if any.
        stack: shuts down what is started here.
        role: selects the model's section.
        beside: an earlier model whose placement group this one shares; None creates a placement group with
            room for all models of the run.
        trains: False builds the model without optimizer and reference policy.
    """
    start_ray(stack, config["deadlines"]["init_s"], config["deadlines"]["least_s"])
    import ray

    from megarl.distributed.deadlines import PhaseDeadlines
    from megarl.models.policy.lm_policy import Policy

    # Modules that the configuration names by file cannot be imported by workers, so pickle them by value.
    for module in modules_from_files():
        ray.cloudpickle.register_pickle_by_value(module)
    if beside is None:
        cluster = _training_cluster(config, len(model_roles(config)) if trains else 1)
        stack.callback(cluster.shutdown)
    else:
        cluster = beside.worker_group.cluster
    trains = trains and role.is_trained
    name = POLICY_WORKERS if role == ACTOR else role.name
    ranks, what = cluster.world_size(), "policy" if role == ACTOR else role.name
    with phase(f"{what} built on {ranks} rank{'s' * (ranks > 1)}") as shown:
        shown.detail = _weights_in_words(config, start, role)
        policy = Policy(
            cluster,
            at(config, role.section),
            tokenizer,
            name_prefix=name,
            weights_path=_text(start.weights_path(role)),
            init_optimizer=trains,
            optimizer_path=_text(start.optimizer_path(role)) if trains else None,
            init_reference_model=trains and role == ACTOR and has_reference_policy(config),
            seed=config["seed"],
            init_timeout_s=_init_seconds(config["deadlines"], start),
            deadlines=PhaseDeadlines.of(config["deadlines"], name),
            check_collectives=config["debug"]["collectives"],
        )
    # Registered after the cluster, so called before its shutdown removes the placement group.
    stack.callback(policy.shutdown)
    return policy


def _weights_in_words(config: RunConfig, start: ResumePoint, role: Role) -> str:
    """Return a text that names the weights a model starts with, and their size if known."""
    path = start.weights_path(role)
    files = (
        Path(at(config, role.section)["model_name"]).expanduser().glob("*.safetensors")
        if path is None
        else path.rglob("*")
    )
    size = sum(file.stat().st_size for file in files if file.is_file())
    of = "weights" if start.checkpoint is None else f"weights of {start.checkpoint.name}"
    return f"{size_text(size)} of {of}" if size else of


def _init_seconds(deadlines: DeadlinesConfig, start: ResumePoint) -> float:
    """Return the timeout in seconds for building the workers. It includes loading a checkpoint. The time that
    Ray took to start is subtracted once, not again for a second model or rebuilt workers."""
    reading = 0.0 if start.checkpoint is None else deadlines["load_s"]
    starting, _ray_start["seconds"] = _ray_start["seconds"], 0.0
    return max(deadlines["init_s"] - starting, 1.0) + reading


def start_models(
    config: RunConfig,
    tokenizer: PreTrainedTokenizerBase,
    start: ResumePoint,
    stack: ExitStack,
    make_policy: Callable[..., Policy],
) -> dict[Role, Policy]:
    """Build the models of all roles that have workers, on the actor's placement group.

    With several models, each is offloaded after it is built, because the next one loads its weights on the
    same devices; ``Turns`` loads them back.

    Args:
        config, tokenizer, start, stack: as in ``start_policy``.
        make_policy: ``start_policy``, or a function with the same signature. If models share base weights,
            the policies it returns need ``share_base`` and ``take_base``.

    Returns:
        Role -> model, the actor first.
    """
    actor, *others = model_roles(config)
    built = make_policy(config, tokenizer, start, stack, actor)
    models = {actor: built}
    sharing = {role for role in others if share_a_base(config["policy"], at(config, role.section))}
    shared = built.share_base() if sharing else []
    for role in others:
        # The next model loads its weights on the same devices.
        built.offload_after_refit()
        built = models[role] = make_policy(config, tokenizer, start, stack, role, models[actor])
        if role in sharing:
            with phase(f"{role.name} reads the weights under its adapter from the policy's workers") as shown:
                taken = built.take_base(shared)
                shown.detail = size_text(taken) if taken else "none, it has its own"
    if others:
        built.offload_after_refit()
    return models


def checkpoint_memory(
    checkpoint_dir: Path, models: Mapping[Role, Policy], stack: ExitStack
) -> CheckpointMemory:
    """Return the memory for asynchronous saves: of this node if all ranks are on it, else of all nodes with
    ranks.

    Args:
        checkpoint_dir: directory of the checkpoints.
        models: the run's models, built by ``start_policy``.
        stack: shuts down what is started here.
    """
    import ray

    nodes = {
        role.name: model.worker_group.nodes for role, model in models.items() if role.directory is not None
    }
    # If all ranks are on the driver's node, no actor is needed to hold their memory.
    if {ray.get_runtime_context().get_node_id()}.issuperset(itertools.chain.from_iterable(nodes.values())):
        return OwnMemory(checkpoint_dir)
    from megarl.run.memory_of_nodes import MemoryOfNodes

    memory = MemoryOfNodes(checkpoint_dir, nodes)
    stack.callback(memory.close)
    return memory


def _training_cluster(config: RunConfig, models: int) -> RayVirtualCluster:
    """Return the virtual cluster of the training ranks; its placement group is not created yet.

    Args:
        config: configuration of the run.
        models: number of models that share each GPU.
    """
    from megarl.distributed import ray_calls
    from megarl.distributed.virtual_cluster import RayVirtualCluster

    section = config["cluster"]
    nodes, ranks = training_shape(View(config))
    shares_devices = engine_of(config) is not None and generation_shape(View(config)) is None
    return RayVirtualCluster(
        [ranks] * nodes,
        use_gpus=uses_gpus(section["device"], ray_calls.cluster_resources().get("GPU", 0)),
        # Each GPU is divided into one share for every model, and one for engines on the same devices.
        max_colocated_worker_groups=models + shares_devices,
        num_gpus_per_node=section["gpus_per_node"],
        name=algorithm_class(config["algorithm"]).section(),
    )


def _engine_cluster(config: RunConfig, use_gpus: bool) -> RayVirtualCluster | None:
    """Return the virtual cluster of engines with their own devices; None if engines are colocated or
    absent."""
    from megarl.distributed.virtual_cluster import RayVirtualCluster

    own = generation_shape(View(config)) if engine_of(config) is not None else None
    if own is None:
        return None
    return RayVirtualCluster(
        [own[1]] * own[0],
        use_gpus=use_gpus,
        num_gpus_per_node=config["cluster"]["gpus_per_node"],
        name=f"{algorithm_class(config['algorithm']).section()}-generation",
    )


def watched_memory() -> SharedMemoryWatch:
    """Return a watch on the shared memory that the running Ray's object store uses."""
    import ray

    from megarl.distributed import ray_calls
    from megarl.distributed.shared_memory import SharedMemoryWatch, free_bytes

    if not ray.is_initialized():
        return SharedMemoryWatch(0)
    nodes = max(sum(node["Alive"] for node in ray_calls.nodes()), 1)
    store = int(ray_calls.cluster_resources().get("object_store_memory", 0)) // nodes
    # If the store is larger than the free shared memory, Ray has put it into files elsewhere.
    return SharedMemoryWatch(store if store <= (free_bytes() or 0) else 0)


def decided_device(config: RunConfig) -> str:
    """Return ``cluster.device`` with ``auto`` resolved to ``cuda`` or ``cpu``. Nodes that are lost later
    cannot change the result. Without a running Ray, ``auto`` is returned unchanged.

    Raises:
        ConfigError: as in ``uses_gpus``.
    """
    import ray

    from megarl.distributed import ray_calls

    device = str(config["cluster"]["device"])
    if not ray.is_initialized():
        return device
    return "cuda" if uses_gpus(device, ray_calls.cluster_resources().get("GPU", 0)) else "cpu"


def check_places(config: RunConfig) -> None:
    """Check, after nodes were lost, that the remaining nodes have bundles for all models and engines. No-op
    if Ray is not running.

    Raises:
        ResourceInsufficientError: bundles are missing.
    """
    import ray

    from megarl.distributed.virtual_cluster import check_places_together

    if ray.is_initialized():
        training = _training_cluster(config, len(model_roles(config)))
        apart = _engine_cluster(config, training.use_gpus)
        check_places_together([training] if apart is None else [training, apart])


def start_engines(config: RunConfig, policy: Policy, stack: ExitStack) -> Refit | None:
    """Start the rollout engines, colocated with the policy or on their own devices. Return None if the policy
    generates itself.

    Colocated engines start while the policy is offloaded (``started_on_empty_devices``). The stack shuts the
    engines down.

    Raises:
        ConfigError: the engine cannot run the model on these devices.
    """
    kind = engine_of(config)
    if kind is None:
        return None
    from megarl.algorithms.refit import Refit

    cluster = policy.worker_group.cluster
    own = _engine_cluster(config, cluster.use_gpus)
    if own is not None:
        cluster = own
        stack.callback(cluster.shutdown)
    colocated = own is None

    def start() -> RolloutEngine:
        with phase(f"{kind.title} started"):
            generation = kind.start(cluster, config)
        stack.callback(generation.shutdown)
        return generation

    engines = started_on_empty_devices(policy if colocated else None, start)
    return Refit(
        policy,
        engines,
        colocated,
        max_restarts=config["cluster"]["max_engine_restarts"],
        lost_nodes=cluster.lost_nodes,
    )


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)
