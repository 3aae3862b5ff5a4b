"""Waiting for results of workers. The first failure ends the wait, every wait has an end, and errors name the
worker they come from."""

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

# When one rank fails, its peers fail a moment later with broken connections. After a failure, wait this many
# seconds for others, to tell the cause from its consequences.
_ECHO_WAIT_S = 1.0
# Maximum seconds to wait for the cause. Ray's health check declares a silent node dead after 15 to 50 s.
_CAUSE_WAIT_S = 60.0
_DEATH_POLL_S = 0.2
# Maximum number of stored calls; results that nobody awaits would otherwise accumulate.
_MOST_CALLS = 65_536
# Minimum seconds of a wait, for fetching results that may already exist.
_FETCH_S = 10.0
# Color codes that Ray adds to workers' tracebacks. They are removed, because errors are also written to
# logs.
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CONNECTION_WORDS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
    "NCCL communicator was aborted",
)


class Deadline:
    """A time limit that several waits share.

    Attributes:
        seconds: the limit in seconds; None for no limit.
        key: configuration key of the limit, for messages; "" if the caller set it.
        look_s: seconds without any reply after which a call is aborted if a worker is stopped or none makes
            progress; None does not check this.
        wait_for_others: the workers may wait for a process outside their group, so a lack of progress is no
            reason to abort.
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
        """Start the time limit at ``begun``, in monotonic seconds; None for now. It ends at least 10 seconds
        from now, or ``seconds`` if that is less, so that results that already exist can be fetched."""
        self.seconds, self.key, self.look_s, self.wait_for_others = seconds, key, look_s, wait_for_others
        now = time.monotonic()
        since = now if begun is None else begun
        # Results that are ready must be returned even if they are requested long after the call's limit.
        self._end = None if seconds is None else max(since + seconds, now + min(seconds, _FETCH_S))

    def left(self) -> float | None:
        """Return the remaining seconds, at least 0; None without a limit."""
        return None if self._end is None else max(self._end - time.monotonic(), 0.0)


class WorkerRegistry:
    """The workers of a group, by actor (rank, coordinates, process), with their calls in progress and calls
    that were aborted."""

    def __init__(self) -> None:
        self._calls: dict[str, Call] = {}
        self._ranks: dict[str, tuple[int, Mapping[str, int] | None]] = {}
        self._processes: dict[str, WorkerProcess] = {}
        self._unfinished: list[ray.ObjectRef[Any]] = []

    def add(self, actor: ActorHandle[Any], rank: int, coordinates: Mapping[str, int] | None) -> None:
        """Register a worker. Must precede its first call."""
        self._ranks[actor._actor_id.hex()] = (rank, coordinates)

    def set_process(self, actor: ActorHandle[Any], process: WorkerProcess) -> None:
        """Store the process of a worker once it is known."""
        self._processes[actor._actor_id.hex()] = process

    def label(self, reference: ray.ObjectRef[Any]) -> str:
        """Return the name of the worker that computes ``reference``, for example ``[pp0 dp1 cp0 tp0
        node7]``."""
        actor = _actor_of(reference)
        if actor not in self._ranks:
            return "[unknown worker]"
        rank, coordinates = self._ranks[actor]
        process = self._processes.get(actor)
        return format_coordinates(rank, coordinates, process.host if process else "host not yet known")

    def process(self, reference: ray.ObjectRef[Any]) -> WorkerProcess | None:
        """Return the process of the worker that computes ``reference``; None before the process has
        started."""
        return self._processes.get(_actor_of(reference))

    def begin(self, call: Call, reference: ray.ObjectRef[Any]) -> None:
        """Store the call to which a result belongs. If there are too many, the oldest call is dropped."""
        self._calls[reference.hex()] = call
        if len(self._calls) > _MOST_CALLS:
            # Dictionaries keep insertion order, so the first key is the oldest call.
            del self._calls[next(iter(self._calls))]

    def call_of(self, reference: ray.ObjectRef[Any]) -> Call | None:
        """Return the call that computes ``reference``; None if unknown."""
        return self._calls.get(reference.hex())

    def forget(self, references: Sequence[ray.ObjectRef[Any]]) -> None:
        """Remove calls whose results have arrived."""
        for reference in references:
            self._calls.pop(reference.hex(), None)

    def set_unfinished(self, references: Sequence[ray.ObjectRef[Any]]) -> None:
        """Store the calls that were still running when a wait was aborted."""
        self._unfinished = list(references)

    def has_unfinished(self) -> bool:
        """Return whether a call whose wait was aborted still runs."""
        if self._unfinished:
            _, self._unfinished = ray_calls.wait(
                self._unfinished, num_returns=len(self._unfinished), timeout=0
            )
        return bool(self._unfinished)

    def check_free(self, what: str) -> None:
        """Check that no worker is busy with a call whose wait was aborted, because a new call would have to
        wait for it.

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
    """Wait for worker calls, and return their results in order. All calls are watched, so that a failed
    worker is detected while its peers hang.

    Args:
        references: futures of worker calls; may contain duplicates.
        registry: registry of the workers.
        what: description of the call, for messages.
        deadline: time limit of the wait.

    Raises:
        MegarlError: a worker raised one. It is raised with the same class, and the worker's name before its
            message.
        WorkerError: a worker raised another exception, which is the ``__cause__``.
        WorkerLostError: a worker's process or node is gone.
        DeadlineError: some workers did not reply in time, the process of one is stopped, or no silent worker
            makes progress. The message contains the stacks of those that still run.
    """
    values: dict[ray.ObjectRef[Any], Any] = {}
    # ray.wait rejects duplicates.
    pending = list(dict.fromkeys(references))
    watch = WorkerWatch(deadline.look_s, deadline.wait_for_others)
    while pending:
        times = [seconds for seconds in (deadline.left(), watch.until_look()) if seconds is not None]
        # Wait for one result at a time, because a wait for all of them would not return at the first failure.
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
    """Wait for the cause while all failures so far look like consequences: a lost node's peers fail before
    Ray reports the loss."""
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
    # The cause is the failure that looks least like a broken connection; of several, the first to arrive.
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
    """Wait until Ray knows that an actor is dead. At first it only reports a lost connection."""
    deadline = Deadline(_CAUSE_WAIT_S)
    with contextlib.suppress(RayError, RuntimeError, OSError):
        while deadline.left():
            with ray_calls.calling("the state of an actor"):
                state = actors(actor).get("State")
            if state == "DEAD":
                return
            time.sleep(_DEATH_POLL_S)


def _lost_node(process: WorkerProcess | None) -> str:
    """Return a note if the worker's node is lost; otherwise ""."""
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
            # Keep the class, which determines the exit code and which callers may catch.
            translated = type(cause)(f"{label} {cause}{also}{trace}")
            # Copy attributes that the worker has set on the error, such as the skipped batches.
            vars(translated).update(vars(cause))
            return translated
        except TypeError:
            # The class has another constructor. Fall back to WorkerError, whose message names the class.
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
    """Return the error for workers that are late or, with a ``reason``, whose call was aborted earlier."""
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
    """Return a sentence that names the silent workers on which the others wait; "" if none stands out.

    Workers whose process does not run stand out. So do workers that are not in a collective while others are.
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
