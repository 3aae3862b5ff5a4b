"""Restarts within a launch: after workers were lost, all of them are rebuilt, and continue from the newest
complete
checkpoint.

The other workers cannot replace the state of a lost one: their collectives are broken, and their step is half
done. So all of them end, their resources are free again, and the run does in its process what its next launch
would do.
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
from megarl.observe.launches import ENGINES, WORKERS

if TYPE_CHECKING:
    from megarl.observe.launches import LaunchOutcome
    from megarl.run.stopping import StopRequest

logger = logging.getLogger(__name__)

SLURM_RESTARTS = 3
"""Default of ``cluster.max_restarts`` in a Slurm job, which nobody watches."""

_LOOK_S = 5.0
# In a Slurm job, bundles of a lost node are waited for only this long: they do not come back there, while a
# requeued job gets other nodes.
_IN_A_JOB_S = 60.0


def most_restarts(cluster: ClusterConfig) -> int:
    """Return ``cluster.max_restarts``, or its default here."""
    configured = cluster["max_restarts"]
    return int(configured) if configured is not None else SLURM_RESTARTS if env.text("SLURM_JOB_ID") else 0


def patience_for_places(init_s: float) -> float:
    """Return the seconds to wait for bundles, out of those that building all workers may take."""
    return min(init_s, _IN_A_JOB_S) if env.text("SLURM_JOB_ID") else init_s


@dataclass
class Restarts:
    """Restarts of one launch: whether another one is allowed, and their number so far.

    Attributes:
        most: maximum restarts of all workers.
        stop: whether a stop of the run is requested, for which no new workers are needed.
        outcome: keeps a record of the restarts.
        workers: restarts of all workers so far.
        engines: restarts of only the engines so far.
        built: the current workers were built, so that one that does not reply in time hangs, and is not
            absent.
    """

    most: int
    stop: StopRequest
    outcome: LaunchOutcome
    workers: int = field(default=0, init=False)
    engines: int = field(default=0, init=False)
    built: bool = field(default=False, init=False)

    def require(self, error: MegarlError) -> None:
        """Count a restart of all workers.

        Args:
            error: the error that ended the current workers, which are gone.

        Raises:
            MegarlError: ``error`` itself, if no worker was lost or hangs, a stop of the run is requested, or
                there were ``most`` restarts.
        """
        # The run had these bundles, and they existed before it was rebuilt: the loss of a node has removed
        # them.
        lost_places = isinstance(error, ResourceInsufficientError) and self.workers > 0
        lost = (
            isinstance(error, WorkerLostError)
            or (isinstance(error, DeadlineError) and self.built)
            or lost_places
        )
        if not lost or self.stop.reason is not None or self.workers >= self.most:
            raise error
        # Reset ``built``: a deadline that passes from now on may mean that bundles are missing.
        self.workers, self.built = self.workers + 1, False
        logger.warning("workers were lost, restart %d of at most %d: %s", self.workers, self.most, error)

    def engines_lost(self, error: MegarlError) -> None:
        """Count a restart of only the engines."""
        self.engines += 1
        self.outcome.restarted(ENGINES, error)

    def workers_lost(self, error: MegarlError, step: int) -> None:
        """Record a restart of all workers that continues after ``step``."""
        self.outcome.restarted(WORKERS, error, step)

    def figures(self) -> dict[str, float]:
        """Return the counts for the log, without those that are 0."""
        counts = {"worker_restarts": self.workers, "engine_restarts": self.engines}
        return {name: float(count) for name, count in counts.items() if count}


def await_places(
    check: Callable[[], None], seconds: float, error: MegarlError, wait: Callable[[float], None] = time.sleep
) -> None:
    """Wait until the cluster has bundles for all workers again.

    Args:
        check: raises ``ResourceInsufficientError`` if it has not.
        seconds: maximum wait.
        error: the reason for rebuilding the workers.
        wait: waits for some seconds.

    Raises:
        MegarlError: ``error``, if the bundles did not become available.
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
