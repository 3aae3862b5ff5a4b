"""A group of workers on a virtual cluster: start them, call them by axis, collect their results, end them.

``group.workers[i]`` is a handle whose methods are called like those of a Ray actor:
``group.workers[i].method.remote(key=value)``. The futures of such calls, and of every ``run_*`` method, can
be given to ``ray.get``. ``get_all_worker_results`` is better: it raises the first failure even if other
workers hang, names the worker that failed, and has a deadline.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray import ObjectRefGenerator

from megarl.distributed import ray_calls, run_secret
from megarl.distributed.deadlines import REFIT, Call, PhaseDeadlines
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.ray_runtime import forwarded_environment
from megarl.distributed.rendezvous import Endpoint
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_dispatch import (
    WorkerCall,
    plan_multiple_data,
    plan_sharded_data,
    refuse_positional,
    workers_on_first_of,
)
from megarl.distributed.worker_group_utils import (
    get_nsight_config_if_pattern_matches,
    recursive_merge_options,
    threads_of_rank,
    usable_cores,
)
from megarl.distributed.worker_launch import (
    DEFAULT_INIT_TIMEOUT_S,
    RayWorkerBuilder,
    WorkerSpec,
    kill_actor,
    start_workers,
)
from megarl.distributed.worker_places import WorkerPlace, place_workers
from megarl.distributed.worker_results import Deadline, WorkerRegistry, await_results
from megarl.distributed.worker_shell import WorkerHandle
from megarl.distributed.worker_watch import kill_processes
from megarl.errors import BatchError, ConfigError, MegarlError, StateError

__all__ = ["MultiWorkerFuture", "RayWorkerBuilder", "RayWorkerGroup", "WorkerHandle"]

logger = logging.getLogger(__name__)

DEFAULT_CALL_TIMEOUT_S = 1800.0
# Seconds to wait until killed actors have ended.
_DEATH_WAIT_S = 10.0


@dataclass
class MultiWorkerFuture:
    """The futures of one call of several workers.

    Attributes:
        futures: one for each called worker.
        return_from_workers: indices of the workers whose return values form the result; None for all called
            workers.
        called_workers: the worker's index of each future; None for workers 0, 1, 2, ...
    """

    futures: list[Any]
    return_from_workers: list[int] | None = None
    called_workers: list[int] | None = None

    def get_results(
        self,
        worker_group: RayWorkerGroup,
        return_generators_as_proxies: bool = False,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Call ``worker_group.get_all_worker_results`` with this object."""
        return worker_group.get_all_worker_results(self, return_generators_as_proxies, timeout_s=timeout_s)

    def selected(self, values: Sequence[Any]) -> list[Any]:
        """Select the values that form the result, in the order of ``return_from_workers``. ``values`` has one
        value per future."""
        if self.return_from_workers is None:
            return list(values)
        called = self.called_workers or range(len(values))
        by_worker = dict(zip(called, values, strict=True))
        return [by_worker[worker] for worker in self.return_from_workers if worker in by_worker]


class RayWorkerGroup:
    """Workers of one class, one per bundle, with optional named axes.

    Args:
        cluster: provides the bundles.
        remote_worker_builder: the worker class and its arguments.
        workers_per_node: None for one worker in every bundle, a number for all nodes, or a list with one
            number per node.
        name_prefix: prefix of the workers' names, which is also matched with the profiler's patterns.
        bundle_indices_list: (placement group, bundles) of each group of tied workers; cannot be combined with
            ``workers_per_node``.
        sharding_annotations: axes of the workers' ranks; needed for sharded calls, and for coordinates in
            error messages.
        env_vars: environment variables of the workers. They override those forwarded from the driver, and
            ``configure_worker`` overrides them.
        init_timeout_s: maximum seconds until all constructors have returned.
        call_timeout_s: default time limit of ``get_all_worker_results`` in seconds.
        deadlines: time limits by phase, used instead of ``call_timeout_s``.

    Raises:
        ConfigError: (a ValueError) the bundles do not match the cluster or the axes.
        MegarlError, WorkerError, DeadlineError: a worker could not be created; no worker is left running.
    """

    def __init__(
        self,
        cluster: RayVirtualCluster,
        remote_worker_builder: RayWorkerBuilder,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[tuple[int, list[int]]] | None = None,
        sharding_annotations: NamedSharding | None = None,
        env_vars: Mapping[str, str] | None = None,
        *,
        init_timeout_s: float = DEFAULT_INIT_TIMEOUT_S,
        call_timeout_s: float | None = DEFAULT_CALL_TIMEOUT_S,
        deadlines: PhaseDeadlines | None = None,
    ) -> None:
        # Set this attribute first, because __del__ reads it even if something below raises.
        self._workers: list[WorkerHandle] = []
        self._endpoint: Endpoint | None = None
        self.cluster = cluster
        self.name_prefix = name_prefix
        self.sharding_annotations = sharding_annotations
        self._call_timeout_s, self._deadlines = call_timeout_s, deadlines
        self._before: list[str] = []
        self._calls = 0
        self._registry = WorkerRegistry()
        bundle_counts = [group.bundle_count for group in cluster.get_placement_groups()]
        places = place_workers(bundle_counts, workers_per_node, bundle_indices_list, name_prefix)
        _check_axes_fit(sharding_annotations, len(places))
        self._metadata = [place.metadata() for place in places]
        self._dp_leaders = _dp_leaders(places, sharding_annotations)
        specs = self._specs(places, dict(env_vars or {}))
        pending = start_workers(remote_worker_builder, specs, self._registry)
        if deadlines is not None:
            deadlines.new_workers()
        self._workers = pending.wait(init_timeout_s, None if deadlines is None else deadlines.look_s)
        self._endpoint = pending.endpoint

    def _specs(self, places: Sequence[WorkerPlace], env_vars: dict[str, str]) -> list[WorkerSpec]:
        groups = self.cluster.get_placement_groups()
        ranks = max(group.bundle_count for group in groups)
        # Ray would set OMP_NUM_THREADS to the CPUs of a worker, which is 1. torch reads the variable only
        # when it is imported.
        threads = threads_of_rank(usable_cores(), ranks) if self.cluster.use_gpus else 1
        # Later entries override earlier ones: a thread count that the user sets in the driver's environment
        # has precedence over the computed one.
        shared_env = {"OMP_NUM_THREADS": str(threads), **forwarded_environment(), **env_vars}
        profiler = get_nsight_config_if_pattern_matches(self.name_prefix)
        options = recursive_merge_options(
            {"runtime_env": {"env_vars": shared_env}}, {"runtime_env": profiler}
        )
        sharding = self.sharding_annotations
        return [
            WorkerSpec(
                rank=place.rank,
                name=place.name,
                placement_group=groups[place.group],
                bundle_index=place.bundle,
                # Request a fraction of the GPU: worker groups use a shared device in turn, but for Ray all of
                # them occupy it at the same time.
                num_gpus=1 / self.cluster.max_colocated_worker_groups if self.cluster.use_gpus else 0,
                bundle_indices=place.bundle_indices,
                # Pass the secret to each worker as an argument, not in runtime_env, which everyone with
                # access to the cluster can read.
                environment={**place.environment(), run_secret.VARIABLE: run_secret.drawn_secret()},
                options=options,
                coordinates=sharding.get_worker_coords(place.rank) if sharding is not None else None,
            )
            for place in places
        ]

    @property
    def master_address(self) -> str:
        """Rendezvous address of the workers, on the node of rank 0."""
        assert self._endpoint is not None, "the constructor has waited for them"
        return self._endpoint.address

    @property
    def master_port(self) -> int:
        """Rendezvous port of the workers."""
        assert self._endpoint is not None, "the constructor has waited for them"
        return self._endpoint.port

    @property
    def workers(self) -> list[WorkerHandle]:
        """Handles of the workers by rank; empty after ``shutdown``. Reading this first runs the methods that
        ``run_before_next`` has deferred, because calls through a handle bypass the group."""
        self._run_before()
        return self._workers

    @property
    def nodes(self) -> list[str]:
        """Ray's id of each worker's node, by rank; empty after ``shutdown``."""
        return [worker.process.node_id for worker in self._workers]

    @property
    def calls(self) -> int:
        """Number of calls of this group so far. If it has not changed, no worker has been called."""
        return self._calls

    def run_before_next(self, method_name: str) -> None:
        """Defer a method without arguments: all workers run it before their next call, in the same message if
        that call goes to all of them. If the method raises, awaiting that call's results raises its error,
        and the call itself is not run.

        Raises:
            StateError: the workers were shut down, or one still hangs in an earlier call that failed.
        """
        self._require_workers(method_name)
        self._registry.check_free(method_name)
        self._calls += 1
        if self._before[-1:] != [method_name]:
            self._before.append(method_name)

    def _run_before(self) -> None:
        """Run the deferred methods now."""
        before, self._before = self._before, []
        for method in before:
            self.get_all_worker_results(
                self._start(method, [WorkerCall(worker, {}) for worker in range(len(self._workers))], ())
            )

    @property
    def worker_metadata(self) -> list[dict[str, Any]]:
        """For each worker: node_idx, local_rank, global_rank, name, bundle_indices, dp_shard_idx."""
        return self._metadata

    @property
    def dp_size(self) -> int:
        """Number of data-parallel shards: the size of the axis ``data_parallel``, or without axes the number
        of groups of tied workers."""
        return len(self._dp_leaders)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Return the index of the first worker of a data-parallel shard.

        Raises:
            IndexError: ``dp_shard_idx`` is not in [0, dp_size).
        """
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(
                f"dp_shard_idx = {dp_shard_idx} is out of range: must lie in [0, {self.dp_size})"
            )
        return self._dp_leaders[dp_shard_idx]

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Call one worker, and return the future.

        Raises:
            BatchError: (also an AssertionError) there are positional arguments, or no worker with this index.
            StateError: the workers were shut down, or one still hangs in an earlier call that failed.
        """
        refuse_positional(method_name, args)
        self._require_workers(method_name)
        if not 0 <= worker_idx < len(self._workers):
            raise BatchError(
                f"{method_name}: worker_idx = {worker_idx}: must lie in [0, {len(self._workers)}). Fix: "
                "correct the index"
            )
        return self._submit(method_name, [WorkerCall(worker_idx, kwargs)])[0]

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> list[Any]:
        """Call all workers with the same arguments, and return a list of futures. With
        ``run_rank_0_only_axes``, call only workers at coordinate 0 on these axes."""
        refuse_positional(method_name, args)
        workers = workers_on_first_of(self.sharding_annotations, len(self._workers), run_rank_0_only_axes)
        return self._submit(method_name, [WorkerCall(worker, kwargs) for worker in workers])

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Sequence[Any],
    ) -> list[Any]:
        """Call each worker with one item of every list in ``kwargs``, and with all of ``common_kwargs``.
        Return a list of futures.

        Raises:
            BatchError: (also an AssertionError) the length of a list is not the number of called workers.
        """
        refuse_positional(method_name, args)
        workers = workers_on_first_of(self.sharding_annotations, len(self._workers), run_rank_0_only_axes)
        return self._submit(method_name, plan_multiple_data(workers, common_kwargs or {}, kwargs))

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """Call each worker with the shard for its coordinates; see ``plan_sharded_data`` for the rules.

        A shard that goes to several workers is stored only once.

        Raises:
            ConfigError: (a ValueError) an axis is unknown, or both sharded and replicated.
            BatchError: (also an AssertionError) there are positional arguments, or the length of a list is
                not the size of its axis.
        """
        refuse_positional(method_name, args)
        calls = plan_sharded_data(
            self.sharding_annotations,
            in_sharded_axes=in_sharded_axes or (),
            replicate_on_axes=replicate_on_axes or (),
            output_is_replicated=output_is_replicated or (),
            dummy_calls_on_free_axes=make_dummy_calls_to_free_axes,
            common_kwargs=common_kwargs or {},
            nested=kwargs,
        )
        return MultiWorkerFuture(
            futures=self._submit(method_name, calls),
            return_from_workers=[call.worker for call in calls if call.returns],
            called_workers=[call.worker for call in calls],
        )

    def get_all_worker_results(
        self,
        future_bundle: MultiWorkerFuture | Sequence[Any],
        return_generators_as_proxies: bool = False,
        *,
        timeout_s: float | None = None,
    ) -> list[Any]:
        """Wait for the results of a call, and return those that form its result. Plain lists of futures are
        accepted too.

        The items of generators are concatenated, worker by worker. With ``return_generators_as_proxies``, the
        Ray generators themselves are returned at once.

        Args:
            timeout_s: time limit in seconds. None uses the group's: the limit of the phase, counted from the
                start of the call, or ``call_timeout_s``.

        Raises:
            MegarlError, WorkerError, DeadlineError: see ``await_results``.
        """
        bundle = (
            future_bundle
            if isinstance(future_bundle, MultiWorkerFuture)
            else MultiWorkerFuture(list(future_bundle))
        )
        has_generator = any(isinstance(future, ObjectRefGenerator) for future in bundle.futures)
        call = next(filter(None, map(self._registry.call_of, [] if has_generator else bundle.futures)), None)
        name = self.name_prefix or "workers"
        what, deadline = (
            f"call of {name}" if call is None else f"{call}, of {name}",
            self._deadline(call, timeout_s),
        )
        if not has_generator:
            values = await_results(bundle.futures, self._registry, what, deadline)
            self._registry.forget(bundle.futures)
            if call is not None and self._deadlines is not None:
                self._deadlines.took(call, time.monotonic() - call.begun)
            return bundle.selected(values)
        if return_generators_as_proxies:
            return bundle.selected(bundle.futures)
        # The end of a generator is a separate future, which can be awaited, and fails, like any other.
        ends = [
            future.completed() if isinstance(future, ObjectRefGenerator) else future
            for future in bundle.futures
        ]
        await_results(ends, self._registry, what, deadline)
        # All items exist by now.
        items: list[Any] = []
        for future in bundle.selected(bundle.futures):
            items += future if isinstance(future, ObjectRefGenerator) else [future]
        return await_results(items, self._registry, what, deadline)

    def _deadline(self, call: Call | None, timeout_s: float | None) -> Deadline:
        if timeout_s is None and self._deadlines is not None:
            call = call or Call("", "")
            seconds, key = self._deadlines.bound_s(call), self._deadlines.key(call)
            # In a refit, ranks wait for engines, which are not watched here. So a lack of progress is normal.
            return Deadline(
                seconds,
                begun=call.begun,
                key=key,
                look_s=self._deadlines.look_s,
                wait_for_others=call.phase == REFIT,
            )
        return Deadline(self._call_timeout_s if timeout_s is None else timeout_s)

    def shutdown(self, cleanup_method: str | None = None, timeout: float = 30.0, force: bool = False) -> bool:
        """End all workers. Further calls are allowed.

        Args:
            cleanup_method: method that every worker runs first; skipped with ``force``, or if a worker hangs
                in a failed call.
            timeout: maximum seconds for the cleanup method.
            force: kill the workers at once.

        Returns:
            True if the cleanup succeeded. The workers are ended in any case.
        """
        # Clear the attributes first, so that a second call, or __del__ during this one, does nothing.
        workers, self._workers = self._workers, []
        self._before = []
        if not workers or not ray.is_initialized():
            return True
        clean = True
        if cleanup_method is not None and not force:
            # Do not call a worker that hangs in another call, because the cleanup would have to wait for that
            # call.
            clean = not self._registry.has_unfinished() and self._clean_up(workers, cleanup_method, timeout)
        for worker in workers:
            kill_actor(worker.actor)
        # A call of a dead actor returns an error, which shows that the actor has ended.
        obituaries: list[Any] = [ray_calls.submit(worker.actor.__ray_ready__) for worker in workers]
        _, alive = ray_calls.wait(obituaries, num_returns=len(obituaries), timeout=_DEATH_WAIT_S)
        if alive:
            logger.warning(
                "%d of %d workers of %r have not ended after %g s",
                len(alive),
                len(workers),
                self.name_prefix,
                _DEATH_WAIT_S,
            )
            # Kill these processes directly, because a stopped process does not handle Ray's message.
            kill_processes(
                [
                    worker.process
                    for worker, obituary in zip(workers, obituaries, strict=True)
                    if obituary in alive
                ]
            )
        return clean

    def _clean_up(self, workers: Sequence[WorkerHandle], method: str, timeout: float) -> bool:
        try:
            await_results(
                [getattr(worker, method).remote() for worker in workers],
                self._registry,
                method,
                Deadline(timeout),
            )
        except (MegarlError, AttributeError) as error:
            logger.warning("clean-up of %r failed, its workers are killed: %s", self.name_prefix, error)
            return False
        return True

    def __del__(self) -> None:
        # During interpreter shutdown, modules may already be gone. Ray then ends the workers with their
        # driver.
        if sys is not None and not sys.is_finalizing() and ray.is_initialized():
            for worker in self._workers:
                kill_actor(worker.actor)

    def _require_workers(self, method: str) -> None:
        if not self._workers:
            raise StateError(f"{method}(): the workers of this group were shut down. Fix: make a new policy")

    def _submit(self, method: str, calls: Sequence[WorkerCall]) -> list[Any]:
        self._require_workers(method)
        self._registry.check_free(method)
        self._calls += 1
        if not self._before:
            return self._start(method, calls, ())
        # The deferred methods can be part of the same message only if every worker is called once. A
        # generator would run them when its first item is requested, which may never happen.
        if [call.worker for call in calls] != list(range(len(self._workers))) or getattr(
            self._workers[0], method
        ).is_generator:
            self._run_before()
            return self._start(method, calls, ())
        before, self._before = self._before, []
        return self._start(method, calls, before)

    def _start(self, method: str, calls: Sequence[WorkerCall], before: Sequence[str]) -> list[Any]:
        under_way, started = Call.of(method), list[Any]()
        with ray_calls.calling(
            f"{under_way}, of {self.name_prefix or 'workers'}", self._deadline(under_way, None).left()
        ):
            shared = _share(calls)
            for call in calls:
                kwargs = {key: shared.get(id(value), value) for key, value in call.kwargs.items()}
                remote = getattr(self._workers[call.worker], method)
                started.append(remote.remote_after(before, **kwargs) if before else remote.remote(**kwargs))
                # Register only calls with a single future. A generator has none by which its call could be
                # looked up.
                if isinstance(started[-1], ray.ObjectRef):
                    self._registry.begin(under_way, started[-1])
        return started


def _share(calls: Sequence[WorkerCall]) -> dict[int, ray.ObjectRef[Any]]:
    """Store each object that goes to several workers once, instead of pickling it for each of them. Return
    references by the object's id."""
    seen: dict[int, Any] = {}
    shared: dict[int, ray.ObjectRef[Any]] = {}
    for call in calls:
        for value in call.kwargs.values():
            # Small values stay in the message, because storing them would take longer.
            if (
                value is None
                or isinstance(value, (bool, int, float, str, ray.ObjectRef))
                or id(value) in shared
            ):
                continue
            if id(value) in seen:
                shared[id(value)] = ray_calls.put(value)
            # Keep a reference, so that the id is not reused for another object during this loop.
            seen[id(value)] = value
    return shared


def _check_axes_fit(sharding: NamedSharding | None, world_size: int) -> None:
    if sharding is not None and sorted(sharding.layout.ravel().tolist()) != list(range(world_size)):
        raise ConfigError(
            f"sharding_annotations {sharding.shape} hold {sharding.size} ranks: must be exactly the ranks 0 "
            f"to {world_size - 1} of the "
            f"{world_size} workers. Fix: make the product of the axes the number of workers"
        )


def _dp_leaders(places: Sequence[WorkerPlace], sharding: NamedSharding | None) -> list[int]:
    if sharding is not None and "data_parallel" in sharding.names:
        coordinates = dict.fromkeys(sharding.names, 0)
        return [
            sharding.get_ranks_by_coord(**coordinates | {"data_parallel": index})[0]
            for index in range(sharding.get_axis_size("data_parallel"))
        ]
    return [place.rank for place in places if place.is_leader]
