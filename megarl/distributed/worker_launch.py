"""Start of the workers of a group. Each phase runs on all ranks at the same time:

1. An empty shell starts in every bundle, with the environment that its process needs from the start.
2. Each shell imports the worker class and calls ``configure_worker``. If the result requires other Ray
   options, the shell is replaced.
3. Rank 0 binds the rendezvous port and keeps it. The driver gets address and port.
4. All constructors run concurrently, so that they can connect in ``rendezvous.init_process_group``.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from megarl.distributed import ray_calls
from megarl.distributed.rendezvous import Endpoint
from megarl.distributed.worker_group_utils import RayOptions, recursive_merge_options
from megarl.distributed.worker_results import Deadline, WorkerRegistry, await_results
from megarl.distributed.worker_shell import ClassRequirements, WorkerHandle, WorkerProcess, WorkerShell

DEFAULT_INIT_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Description of a worker to start.

    Attributes:
        rank: rank in the group.
        name: name for logs.
        placement_group, bundle_index: the worker's bundle.
        num_gpus: fraction of the bundle's GPU; 0 on a CPU.
        bundle_indices: (placement group index, bundles) of a group of tied workers; only for its leader.
        environment: environment variables of this rank (``RANK`` and similar), set before the worker class is
            imported.
        options: Ray options, for example ``runtime_env`` with the variables of all ranks.
        coordinates: index on each axis by name, for messages.
    """

    rank: int
    name: str
    placement_group: PlacementGroup
    bundle_index: int
    num_gpus: float
    bundle_indices: tuple[int, list[int]] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    options: RayOptions = field(default_factory=dict)
    coordinates: dict[str, int] | None = None


class RayWorkerBuilder:
    """The full name of a worker class, and the arguments of its constructor.

    Args:
        ray_actor_class_fqn: ``package.module.Class``. It may be a plain class, or one decorated with
            ``ray.remote``, whose options then are defaults. If the class has ``configure_worker(num_gpus,
            bundle_indices) -> (resources, env_vars, init_kwargs)``, its result overrides Ray options,
            environment and constructor arguments.
        args, kwargs: arguments of the constructor.
    """

    def __init__(self, ray_actor_class_fqn: str, *args: Any, **kwargs: Any) -> None:
        self.ray_actor_class_fqn = ray_actor_class_fqn
        self.args = args
        self.kwargs = kwargs

    def create_worker_async(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> PendingWorkers:
        """Start a single worker without a group. ``.wait()`` of the result returns a list with its handle."""
        spec = WorkerSpec(
            rank=0,
            name=self.ray_actor_class_fqn.rpartition(".")[2],
            placement_group=placement_group,
            bundle_index=placement_group_bundle_index,
            num_gpus=num_gpus,
            bundle_indices=bundle_indices,
            environment={"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"},
            options=extra_options,
        )
        return start_workers(self, [spec], WorkerRegistry())

    def __call__(
        self,
        placement_group: PlacementGroup,
        placement_group_bundle_index: int,
        num_gpus: float,
        bundle_indices: tuple[int, list[int]] | None = None,
        **extra_options: Any,
    ) -> WorkerHandle:
        """Start a single worker without a group, and wait until it is constructed."""
        return self.create_worker_async(
            placement_group, placement_group_bundle_index, num_gpus, bundle_indices, **extra_options
        ).wait()[0]


class PendingWorkers:
    """Workers whose processes are starting. ``wait`` runs the remaining phases. If anything fails, no process
    is left running.

    Attributes:
        endpoint: rendezvous address of the workers; None until ``wait`` has returned.
    """

    def __init__(
        self,
        builder: RayWorkerBuilder,
        specs: Sequence[WorkerSpec],
        registry: WorkerRegistry,
        shells: list[ActorHandle[Any]],
    ) -> None:
        self._builder = builder
        self._specs = specs
        self._registry = registry
        self._shells = shells
        self.endpoint: Endpoint | None = None
        self._options = [_ray_options(spec, ClassRequirements()) for spec in specs]

    def wait(
        self, timeout_s: float = DEFAULT_INIT_TIMEOUT_S, look_s: float | None = None
    ) -> list[WorkerHandle]:
        """Wait until all workers are constructed, and return their handles by rank.

        Args:
            timeout_s: time limit in seconds for all phases together.
            look_s: see ``Deadline``.

        Raises:
            MegarlError, WorkerError: a worker could not be created; see ``await_results``.
            DeadlineError: the workers were not ready after ``timeout_s`` seconds.
        """
        deadline = Deadline(timeout_s, key="" if look_s is None else "deadlines.init_s", look_s=look_s)
        try:
            processes, requirements = self._inspect(deadline)
            self.endpoint = endpoint = self._meet(deadline)
            name = self._builder.ray_actor_class_fqn
            with ray_calls.calling(f"constructor of {name}", deadline.left()):
                # Store the arguments once for all workers. Otherwise configuration and tokenizer would be
                # pickled for each worker.
                arguments = ray_calls.put((self._builder.args, self._builder.kwargs))
                references = [
                    ray_calls.submit(shell.construct, name, endpoint, arguments, requirement.init_kwargs)
                    for shell, requirement in zip(self._shells, requirements, strict=True)
                ]
            methods = await_results(references, self._registry, f"constructor of {name}", deadline)
        # Also after an interrupt, because remaining processes would occupy the devices.
        except BaseException:
            self.kill()
            raise
        return [
            WorkerHandle(*parts)
            for parts in zip(self._shells, [name] * len(methods), methods, processes, strict=True)
        ]

    def kill(self) -> None:
        """Kill all processes of the group."""
        for shell in self._shells:
            kill_actor(shell)

    def _inspect(self, deadline: Deadline) -> tuple[list[WorkerProcess], list[ClassRequirements]]:
        everyone = list(range(len(self._specs)))
        answers = self._ask(everyone, deadline)
        unfit: list[int] = []
        for index in everyone:
            # If the worker class requires other Ray options, start another actor: Ray fixes the options at
            # the start, before the class is imported.
            options = _ray_options(self._specs[index], answers[index][1])
            if options != self._options[index]:
                unfit.append(index)
                kill_actor(self._shells[index])
                self._options[index] = options
                self._shells[index] = _start_shell(self._specs[index], options, self._registry)
        for index, answer in zip(unfit, self._ask(unfit, deadline), strict=True):
            answers[index] = answer
        return [process for process, _ in answers], [requirement for _, requirement in answers]

    def _ask(
        self, indices: Sequence[int], deadline: Deadline
    ) -> list[tuple[WorkerProcess, ClassRequirements]]:
        name = self._builder.ray_actor_class_fqn
        references = [
            ray_calls.submit(
                self._shells[index].inspect_class,
                name,
                self._specs[index].num_gpus,
                self._specs[index].bundle_indices,
            )
            for index in indices
        ]
        answers = await_results(references, self._registry, f"start of {name}", deadline)
        for index, (process, _) in zip(indices, answers, strict=True):
            # From here on, errors can name the worker's host.
            self._registry.set_process(self._shells[index], process)
        return answers

    def _meet(self, deadline: Deadline) -> Endpoint:
        reference = ray_calls.submit(self._shells[0].open_rendezvous)
        [(address, port)] = await_results([reference], self._registry, "rendezvous of rank 0", deadline)
        return Endpoint(address, port, uuid.uuid4().hex)


def start_workers(
    builder: RayWorkerBuilder, specs: Sequence[WorkerSpec], registry: WorkerRegistry
) -> PendingWorkers:
    """Start phase 1 for all workers of a group."""
    shells = [_start_shell(spec, _ray_options(spec, ClassRequirements()), registry) for spec in specs]
    return PendingWorkers(builder, specs, registry, shells)


def kill_actor(actor: ActorHandle[Any]) -> None:
    """Kill an actor's process at once. No-op if the actor, or Ray, is gone."""
    # Ray raises any of these if an actor is gone, depending on the state of the actor and of the cluster.
    with contextlib.suppress(ray.exceptions.RayError, ValueError, RuntimeError):
        ray_calls.kill(actor)


def _ray_options(spec: WorkerSpec, requirement: ClassRequirements) -> RayOptions:
    """Return the Ray options of one worker. Those of the decorator are overridden by the caller's, and these
    by ``configure_worker``'s. The decorator cannot set the fraction of the GPU."""
    options = recursive_merge_options({"num_cpus": 1}, requirement.decorator_options)
    options = recursive_merge_options(options, {**spec.options, "num_gpus": spec.num_gpus})
    asked = {**requirement.resources, "runtime_env": {"env_vars": requirement.env_vars}}
    return recursive_merge_options(options, asked)


def _start_shell(spec: WorkerSpec, options: RayOptions, registry: WorkerRegistry) -> ActorHandle[Any]:
    place = PlacementGroupSchedulingStrategy(
        placement_group=spec.placement_group,
        placement_group_bundle_index=spec.bundle_index,
        # What a worker itself starts through Ray, as vLLM may do, must run on the worker's own bundle.
        placement_group_capture_child_tasks=True,
    )
    remote = ray.remote(WorkerShell).options(**options, scheduling_strategy=place)
    shell: ActorHandle[Any] | Any = ray_calls.submit(remote, spec.name, spec.environment)
    registry.add(shell, spec.rank, spec.coordinates)
    return shell
