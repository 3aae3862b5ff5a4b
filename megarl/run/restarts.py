"""Restart all workers within a launch after some were lost, from the newest complete checkpoint.

A single lost worker cannot be replaced: the collectives of the others are broken, and their step is
incomplete. So all workers end, and the launch rebuilds them in the same process.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megarl import env
from megarl.config.sections import ClusterConfig
from megarl.distributed.node_choice import ResourceInsufficientError
from megarl.errors import DeadlineError, MegarlError, WorkerLostError
from megarl.observe.launches import ENGINES, WORKERS, LaunchOutcome

if TYPE_CHECKING:
    from megarl.run.stopping import StopRequest

logger = logging.getLogger(__name__)

SLURM_RESTARTS = 3
"""Default of ``cluster.max_restarts`` in a Slurm job, where no user is present to restart the run."""

_LOOK_S = 5.0
# In a Slurm job, wait for lost bundles only this long. A lost node does not return to the job, but a requeued
# job gets another node.
_IN_A_JOB_S = 60.0


def most_restarts(cluster: ClusterConfig) -> int:
    """Return ``cluster.max_restarts``; null means 3 in a Slurm job and 0 elsewhere."""
    configured = cluster["max_restarts"]
    return int(configured) if configured is not None else SLURM_RESTARTS if env.text("SLURM_JOB_ID") else 0


def patience_for_places(init_s: float) -> float:
    """Return how many seconds to wait until the cluster has bundles for all workers again.

    Args:
        init_s: seconds that building all workers may take; an upper bound.
    """
    return min(init_s, _IN_A_JOB_S) if env.text("SLURM_JOB_ID") else init_s


@dataclass
class Restarts:
    """Counts the restarts of one launch, and decides whether another one is allowed.

    Attributes:
        most: maximum number of restarts of all workers.
        stop: request to stop the run; while it is set, workers are not restarted.
        outcome: record of the launch, to which restarts are added.
        workers: number of restarts of all workers so far.
        engines: number of restarts of only the engines so far.
        built: whether the current workers were built. A deadline that passes afterwards means that a worker
            hangs; before, bundles may be missing.
    """

    most: int
    stop: StopRequest
    outcome: LaunchOutcome
    workers: int = field(default=0, init=False)
    engines: int = field(default=0, init=False)
    built: bool = field(default=False, init=False)

    def require(self, error: MegarlError) -> None:
        """Count a restart of all workers, or re-raise the error if they must not be restarted.

        Args:
            error: the error that ended the current workers.

        Raises:
            MegarlError: ``error`` itself, if it is not the loss or hang of a worker, a stop is requested, or
                ``most`` restarts have been made.
        """
        # Bundles that existed before a restart and are missing now were lost with a node.
        lost_places = isinstance(error, ResourceInsufficientError) and self.workers > 0
        lost = (
            isinstance(error, WorkerLostError)
            or (isinstance(error, DeadlineError) and self.built)
            or lost_places
        )
        if not lost or self.stop.reason is not None or self.workers >= self.most:
            raise error
        # Until the new workers are built, a missed deadline may mean that bundles are missing.
        self.workers, self.built = self.workers + 1, False
        logger.warning("workers were lost, restart %d of at most %d: %s", self.workers, self.most, error)

    def engines_lost(self, error: MegarlError) -> None:
        """Count and record a restart of only the engines."""
        self.engines += 1
        self.outcome.restarted(ENGINES, error)

    def workers_lost(self, error: MegarlError, step: int) -> None:
        """Record a restart of all workers that continues after ``step``."""
        self.outcome.restarted(WORKERS, error, step)

    def figures(self) -> dict[str, float]:
        """Return the restart counts as metrics; counts of 0 are omitted."""
        counts = {"worker_restarts": self.workers, "engine_restarts": self.engines}
        return {name: float(count) for name, count in counts.items() if count}


def await_places(
    check: Callable[[], None], seconds: float, error: MegarlError, wait: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the cluster has bundles for all workers again.

    Args:
        check: raises ``ResourceInsufficientError`` while bundles are missing.
        seconds: maximum wait.
        error: the error for which the workers are rebuilt.
        wait: sleeps for the given seconds.

    Raises:
        MegarlError: ``error``, if bundles are still missing after ``seconds``.
    """
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            return check()
        except ResourceInsufficientError as missing:
            if time.monotonic() >= end:
                raise error from missing
            if not told:
                logger.warning("waiting at most %g s for devices: %s", seconds, missing)
                told = True
        wait(min(_LOOK_S, max(end - time.monotonic(), 0.0)))
