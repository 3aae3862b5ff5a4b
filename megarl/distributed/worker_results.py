"""Waits for workers: the first failure ends the wait, no wait is endless, and every error names the worker
that
it comes from."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray._private.state import actors
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from megarl.distributed import ray_calls
from megarl.distributed.deadlines import Call
from megarl.distributed.ray_nodes import lost_node_name
from megarl.distributed.shared_memory import note_of_full_memory
from megarl.distributed.worker_group_utils import format_coordinates
from megarl.distributed.worker_shell import WorkerProcess
from megarl.distributed.worker_stacks import STOPPED, ProcessLook
from megarl.distributed.worker_watch import WorkerWatch, looks_at
from megarl.errors import WORKER_TRACE, DeadlineError, MegarlError, StateError, WorkerError, WorkerLostError

logger = logging.getLogger(__name__)

# When one rank fails, its peers fail a moment later with broken connections. Waiting for this time allows the
# cause to be distinguished from these consequences.
_ECHO_WAIT_S = 1.0
# Ray's health check declares a silent node dead after 15 s to 50 s.
_CAUSE_WAIT_S = 60.0
_DEATH_POLL_S = 0.2
_MOST_CALLS = 65_536
_FETCH_S = 10.0
# Remove the colours that Ray adds to the tracebacks of workers, because errors are also written to logs.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONNECTION_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "NCCL communicator was aborted",
)


class Deadline:
    """A time limit in seconds that several waits share; ``None`` is no limit.

    Attributes:
        seconds: the limit.
        key: configuration key of the limit; "" if the caller set it.
        look_s: seconds without any reply after which workers that are stopped or make no progress are given
            up; None never checks.
        wait_for_others: the workers may wait for a process outside of their group, so that a lack of progress
            is no reason to give them up.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        begun: float | None = None,
        key: str = "",
        look_s: float | None = None,
        wait_for_others: bool = False,
    ) -> None:
        """Args: begun: monotonic seconds from which on it counts, where that leaves a moment to fetch what is
        done; None for now.
        """
        self.seconds, self.key, self.look_s, self.wait_for_others = seconds, key, look_s, wait_for_others
        now = time.monotonic()
        since = now if begun is None else begun
        # Leave some time to fetch: results that are ready must be returned even if they are requested long
        # after the call.
        self._end = None if seconds is None else max(since + seconds, now + min(seconds, _FETCH_S))

    def left(self) -> float | None:
        """Return the remaining seconds, never negative."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class WorkerRegistry:
    """Workers of one group by actor (rank, coordinates, process), their calls in progress, and the calls that
    never returned."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._ranks: dict[str, tuple[int, Mapping[str, int] | None]] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._unfinished: list[ray.ObjectRef[Any]] = []

    def add(self, actor: ActorHandle[Any], rank: int, coordinates: Mapping[str, int] | None) -> None:
        """Register a worker, before its first call."""
        self._ranks[actor._actor_id.hex()] = (rank, coordinates)

    def set_process(self, actor: ActorHandle[Any], process: WorkerProcess) -> None:
        """Record the worker's process, as soon as it is known."""
        self._processes[actor._actor_id.hex()] = process

    def label(self, reference: ray.ObjectRef[Any]) -> str:
        """Return the coordinates of the worker that computes ``reference``, for example ``[pp0 dp1 cp0 tp0
        node7]``."""
        actor = _actor_of(reference)
        if actor not in self._ranks:
            return "[unknown worker]"
        rank, coordinates = self._ranks[actor]
        process = self._processes.get(actor)
        return format_coordinates(rank, coordinates, process.host if process else "host not yet known")

    def process(self, reference: ray.ObjectRef[Any]) -> WorkerProcess | None:
        """Return the process of the worker that computes ``reference``; None before it has started."""
        return self._processes.get(_actor_of(reference))

    def begin(self, call: Call, reference: ray.ObjectRef[Any]) -> None:
        """Record the call that a result belongs to. The oldest calls that nobody waits for are forgotten."""
        self._calls[reference.hex()] = call
        if len(self._calls) > _MOST_CALLS:
            # Dictionaries keep their order, so that the first key is the oldest call.
            del self._calls[next(iter(self._calls))]

    def call_of(self, reference: ray.ObjectRef[Any]) -> Call | None:
        """Return the call that ``reference`` is the result of; None if unknown."""
        return self._calls.get(reference.hex())

    def forget(self, references: Sequence[ray.ObjectRef[Any]]) -> None:
        """Forget calls whose results have arrived."""
        for reference in references:
            self._calls.pop(reference.hex(), None)

    def set_unfinished(self, references: Sequence[ray.ObjectRef[Any]]) -> None:
        """Record the calls that were still running when a wait was given up."""
        self._unfinished = list(references)

    def has_unfinished(self) -> bool:
        """Return whether a call that was given up still occupies its worker."""
        if self._unfinished:
            _, self._unfinished = ray_calls.wait(
                self._unfinished, num_returns=len(self._unfinished), timeout=0
            )
        return bool(self._unfinished)

    def check_free(self, what: str) -> None:
        """Require that no worker is busy with a call that was given up: a new call would wait behind it.

        Raises:
            StateError: a worker is.
        """
        if self.has_unfinished():
            stuck = ", ".join(map(self.label, self._unfinished))
            raise StateError(
                f"{what}: an earlier call failed and these workers still hang in it: {stuck}. Fix: shut the "
                "group down and rebuild it"
            )


def await_results(
    references: Sequence[ray.ObjectRef[Any]], registry: WorkerRegistry, what: str, deadline: Deadline
) -> list[Any]:
    """Return the values of ``references``, in order. All of them are watched, so that a failed worker is
    noticed while its peers hang.

    Args:
        references: results of worker calls; one may occur twice.
        registry: names the workers.
        what: the call, for messages.
        deadline: time limit of the wait.

    Raises:
        MegarlError: a worker raised one; the same class again, with the worker's coordinates before its
            message.
        WorkerError: a worker raised another exception (its ``__cause__``).
        WorkerLostError: a worker's process or node is gone.
        DeadlineError: not all replied in time, the process of one is stopped, or none of the silent ones
            makes progress; the message has the stacks of those that still run.
    """
    values: dict[ray.ObjectRef[Any], Any] = {}
    # Remove duplicates, because ray.wait refuses a reference that is given twice.
    pending = list(dict.fromkeys(references))
    watch = WorkerWatch(deadline.look_s, deadline.wait_for_others)
    while pending:
        times = [seconds for seconds in (deadline.left(), watch.until_look()) if seconds is not None]
        # Wait for one result at a time: if it waited for all of them, Ray would not return at the first
        # failure.
        ready, pending = ray_calls.wait(pending, num_returns=1, timeout=min(times, default=None))
        if not ready:
            reason = "" if deadline.left() == 0 else watch.give_up(list(map(registry.process, pending)))
            if deadline.left() != 0 and not reason:
                continue
            registry.set_unfinished(pending)
            raise _deadline_error(pending, len(set(references)), registry, what, deadline, reason)
        watch.answered()
        more, pending = _drain(pending, 0.0)
        failures = _take(ready + more, values)
        if failures:
            more, pending = _drain(pending, _ECHO_WAIT_S)
            failures += _take(more, values)
            pending = _await_cause(failures, pending, values)
            registry.set_unfinished(pending)
            _raise_failure(failures, registry, what)
    return [values[reference] for reference in references]


def _await_cause(
    failures: list[tuple[ray.ObjectRef[Any], RayError]],
    pending: list[ray.ObjectRef[Any]],
    values: dict[ray.ObjectRef[Any], Any],
) -> list[ray.ObjectRef[Any]]:
    """Wait for the cause while all failures look like its consequences: Ray learns of a lost node later than
    the node's peers do."""
    deadline = Deadline(_CAUSE_WAIT_S)
    while pending and deadline.left() and all(_echo_rank(error) == 2 for _, error in failures):
        ready, pending = ray_calls.wait(pending, num_returns=1, timeout=deadline.left())
        failures += _take(ready, values)
    return pending


def _drain(
    pending: list[ray.ObjectRef[Any]], timeout_s: float
) -> tuple[list[ray.ObjectRef[Any]], list[ray.ObjectRef[Any]]]:
    return ray_calls.wait(pending, num_returns=len(pending), timeout=timeout_s) if pending else ([], [])


def _take(
    ready: Sequence[ray.ObjectRef[Any]], values: dict[ray.ObjectRef[Any], Any]
) -> list[tuple[ray.ObjectRef[Any], RayError]]:
    failures: list[tuple[ray.ObjectRef[Any], RayError]] = []
    for reference in ready:
        try:
            values[reference] = ray_calls.get(reference)
        except RayError as error:
            failures.append((reference, error))
    return failures


def _raise_failure(
    failures: Sequence[tuple[ray.ObjectRef[Any], RayError]], registry: WorkerRegistry, what: str
) -> None:
    # The failure that looks least like a broken connection is the cause; among equals it is the first to
    # arrive.
    reference, error = min(failures, key=lambda failure: _echo_rank(failure[1]))
    others = [registry.label(other) for other, _ in failures if other != reference]
    also = f"\nAlso failed: {', '.join(others)}" if others else ""
    if isinstance(error, ActorUnavailableError):
        _await_death(_actor_of(reference))
    label = registry.label(reference) + _lost_node(registry.process(reference))
    raise _translate(label, error, what, also) from getattr(error, "cause", None) or error


def _echo_rank(error: RayError) -> int:
    """Return 0 for a dead process, 1 for an exception, 2 for an exception that looks like the consequence of
    another rank's end."""
    if isinstance(error, RayActorError):
        return 0
    return 2 if any(word in str(error) for word in _CONNECTION_WORDS) else 1


def _await_death(actor: str) -> None:
    """Wait until Ray knows whether a process or its node has ended; at first it reports only a lost
    connection."""
    deadline = Deadline(_CAUSE_WAIT_S)
    with contextlib.suppress(RayError, RuntimeError, OSError):
        while deadline.left():
            with ray_calls.calling("the state of an actor"):
                state = actors(actor).get("State")
            if state == "DEAD":
                return
            time.sleep(_DEATH_POLL_S)


def _lost_node(process: WorkerProcess | None) -> str:
    """Return a note if a worker's whole node is gone, else ""."""
    name = None if process is None else lost_node_name(process.node_id)
    return "" if name is None else f" node {name} is lost:"


def _translate(label: str, error: RayError, what: str, also: str) -> MegarlError:
    if isinstance(error, RayActorError):
        return WorkerLostError(
            f"{label} worker process died during {what}: {error}. Fix: look for its last output above, and "
            "for the kernel killing it "
            f"when memory ran out; then shut the group down and rebuild it.{note_of_full_memory()}{also}"
        )
    if not isinstance(error, RayTaskError):
        return WorkerError(f"{label} {what}: Ray lost the result: {error}{also}")
    cause = error.cause
    trace = f"{WORKER_TRACE}\n{_COLOURS.sub('', str(error))}"
    if isinstance(cause, MegarlError):
        try:
            # Keep the class, so that its exit code is preserved and callers that catch it still do.
            translated = type(cause)(f"{label} {cause}{also}{trace}")
            # Copy attributes that the worker attached to the error, such as skipped batches.
            vars(translated).update(vars(cause))
            return translated
        except TypeError:
            # The class has a different constructor: use WorkerError, whose message gives the class's name.
            pass
    return WorkerError(f"{label} {what}: {type(cause).__name__}: {cause}{also}{trace}")


def _deadline_error(
    pending: Sequence[ray.ObjectRef[Any]],
    total: int,
    registry: WorkerRegistry,
    what: str,
    deadline: Deadline,
    reason: str,
) -> DeadlineError:
    """Return the error for workers that were late or, with a reason, given up earlier."""
    labels = list(map(registry.label, pending))
    processes = list(map(registry.process, pending))
    looks = looks_at(processes)
    details = "".join(_described(label, look) for label, look in zip(labels, looks, strict=True))
    if not reason:
        bound = (
            f"did not answer within {deadline.seconds:g} s"
            if deadline.seconds is not None
            else "do not answer"
        )
        advice = f"see below where they hang, or raise {deadline.key or 'the timeout'}"
    elif reason == STOPPED:
        bound, advice = (
            "do not answer",
            "find out who stopped it; a new start continues from the last checkpoint",
        )
    else:
        bound, advice = (
            f"do not answer and {reason}",
            "see below where they wait; a new start continues from the last checkpoint",
        )
    # A worker without a process never got a bundle.
    if None in processes:
        advice = "check that the cluster has free resources for all workers"
    return DeadlineError(
        f"{what}: {len(pending)} of {total} workers {bound}: {', '.join(labels)}.{blame(labels, looks)} "
        f"Fix: {advice}{details}"
    )


def blame(labels: Sequence[str], looks: Sequence[ProcessLook | None]) -> str:
    """Return a sentence on which of the silent workers keeps the others waiting; "" if none stands out.

    A worker whose process does not run stands out, and so does one that is not in a collective while others
    are.
    """
    still, apart, waiting = [], [], 0
    for label, look in zip(labels, looks, strict=True):
        if look is None:
            continue
        if look.state:
            still.append(f"the process of {label} {look.state}")
        if look.waits_for_others:
            waiting += 1
        elif look.waits_for_others is False:
            apart.append(label)
    if still:
        return f" Silent: {'; '.join(still)}."
    return (
        f" In no collective, while {waiting} others wait in one: {', '.join(apart)}."
        if apart and waiting
        else ""
    )


def _described(label: str, look: ProcessLook | None) -> str:
    if look is None or not (look.state or look.stack):
        return ""
    state = f"its process {look.state}\n" if look.state else ""
    return f"\n--- {label} ---\n{state}{look.stack}"


def _actor_of(reference: ray.ObjectRef[Any]) -> str:
    return reference.task_id().actor_id().hex()
