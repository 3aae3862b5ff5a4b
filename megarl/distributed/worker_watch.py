"""Observation of silent workers, on their own nodes, to detect that one is stopped or that none makes
progress."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megarl.distributed import ray_calls
from megarl.distributed.worker_shell import WorkerProcess
from megarl.distributed.worker_stacks import RUNS, STOPPED, ProcessLook, kill_worker, look_at

logger = logging.getLogger(__name__)

LOOKS = 4
"""Number of samples in the time after which a call may be aborted. Progress is measured between the first and
the last one."""
# Maximum seconds to wait for the samples of all nodes.
_WAIT_S = 20.0
# Seconds before a stopped process is checked again, because a debugger or a shell may stop it for a moment.
_SURE_AFTER_S = 1.0


class WorkerWatch:
    """Watches workers that have not replied, and reports when to abort their call before its deadline: when
    one of them is stopped, or when none makes progress.

    An endless computation looks like a long one, so only the deadline ends it. But a worker that
    waits in a mismatched collective, for a lock or in a polling loop uses no resources. If no process it
    could be waiting for uses any either, it will wait indefinitely.

    Args:
        look_s: seconds without a reply after which the call may be aborted; None does not check.
        wait_for_others: the workers may wait for a process that is not watched, so a lack of progress is no
            reason to abort.
        look: function that samples the processes; see ``looks_at``.
    """

    def __init__(
        self,
        look_s: float | None,
        wait_for_others: bool = False,
        look: Callable[[Sequence[WorkerProcess | None]], list[ProcessLook | None]] | None = None,
    ) -> None:
        self._look_s, self._wait_for_others, self._look = look_s, wait_for_others, look or looks_at
        self._begun = time.monotonic()
        self._looks: list[list[ProcessLook | None]] = []

    def until_look(self) -> float | None:
        """Return the seconds until the next sample is due; None for never."""
        if self._look_s is None:
            return None
        return max(self._begun + (len(self._looks) + 1) * self._look_s / LOOKS - time.monotonic(), 0.0)

    def answered(self) -> None:
        """Restart the time after a worker has replied."""
        self._begun, self._looks = time.monotonic(), []

    def give_up(self, processes: Sequence[WorkerProcess | None]) -> str:
        """Sample the workers. Return the reason why they will never reply; "" if they may. ``processes`` must
        be the same at every sample."""
        self._looks.append(self._look(processes))
        # Progress shows only as a difference between samples.
        if len(self._looks) < LOOKS:
            return ""
        if any_is_stopped(self._looks[-1]):
            time.sleep(_SURE_AFTER_S)
            return STOPPED if any_is_stopped(self._look(processes)) else ""
        if not self._wait_for_others and stand_still(self._looks[-LOOKS:]):
            return f"make no progress for at least {(LOOKS - 1) * (self._look_s or 0) / LOOKS:g} s"
        return ""


def any_is_stopped(looks: Sequence[ProcessLook | None]) -> bool:
    """Return whether a signal has stopped any of the processes."""
    return any(look is not None and look.state == STOPPED for look in looks)


def stand_still(looks: Sequence[Sequence[ProcessLook | None]]) -> bool:
    """Return whether no worker makes progress over several samples, neither in its position in the code nor
    in its use of resources."""
    return all(map(_stands_still, zip(*looks, strict=True)))


def _stands_still(looks: Sequence[ProcessLook | None]) -> bool:
    return all(
        before is not None
        and now is not None
        and before.state == now.state == RUNS
        and before.place == now.place != ""
        and before.activity is not None
        and now.activity is not None
        and now.activity.rested_since(before.activity)
        for before, now in itertools.pairwise(looks)
    )


def looks_at(processes: Sequence[WorkerProcess | None], with_stack: bool = True) -> list[ProcessLook | None]:
    """Sample workers, each on its own node. Returns None for a worker whose node does not reply in time.
    Never raises."""
    return _beside(processes, look_at, with_stack)


def kill_processes(processes: Sequence[WorkerProcess]) -> None:
    """Kill workers that Ray cannot reach, each on its own node. Never raises."""
    _beside(processes, kill_worker)


def _beside(
    processes: Sequence[WorkerProcess | None], function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Call a function with each process's id, on that process's node. Returns None where there is no reply in
    time."""
    task = ray.remote(function)
    references = {}
    for index, process in enumerate(processes):
        if process is not None:
            # Run on this node or not at all: on another node, the process id belongs to another process.
            where = NodeAffinitySchedulingStrategy(node_id=process.node_id, soft=False)
            # Request no CPU, because the workers may occupy all of them. Do not retry, because only a sample
            # from now is useful.
            options = {"num_cpus": 0, "max_retries": 0, "scheduling_strategy": where}
            references[ray_calls.submit(task.options(**options), process.process_id, *arguments)] = index
    found: list[Any] = [None] * len(processes)
    if not references:
        return found
    done, _ = ray_calls.wait(list(references), num_returns=len(references), timeout=_WAIT_S)
    for reference in done:
        try:
            found[references[reference]] = ray_calls.get(reference)
        except RayError as error:
            logger.warning("nothing is known of worker %d: %s", references[reference], error)
    return found
