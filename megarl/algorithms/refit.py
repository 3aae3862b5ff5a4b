"""Refit: send the trained weights to the rollout engines if theirs are older."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from megarl.errors import MegarlError, RefitError, WorkerLostError

if TYPE_CHECKING:
    from megarl.models.generation.interfaces import RolloutEngine
    from megarl.models.policy.lm_policy import Policy

logger = logging.getLogger(__name__)

# A port that was free when it was chosen may be taken a moment later.
CONNECTION_ATTEMPTS = 3


def refit_policy_generation(
    policy: Policy,
    policy_generation: RolloutEngine,
    colocated_inference: bool,
    _refit_buffer_size_gb: int | None = None,
) -> None:
    """Send the policy's current weights to the engines.

    If colocated, the policy is offloaded afterwards, and the engines may generate. Call the policy's
    ``prepare_for_lp_inference`` or ``prepare_for_training`` before it computes again. On separate devices,
    ``connect`` must have been called before, and the policy stays loaded.

    Args:
        policy: the policy; its weights must be on its devices.
        policy_generation: the engines, which know the weights from ``prepare_refit_info``.
        colocated_inference: the engines are on the policy's devices.
        _refit_buffer_size_gb: size in GiB of a group of weights in transfer, see
            ``Policy.prepare_weights_for_ipc``.

    Raises:
        RefitError, WorkerError: the engines did not get all weights. They do not generate until a refit
        succeeds.
    """
    if colocated_inference:
        policy.offload_before_refit()
        # In two parts: the KV cache takes the memory that the policy's weights occupy until they are sent.
        policy_generation.prepare_for_generation(tags=["weights"])
        _hand_over(policy, policy_generation, _refit_buffer_size_gb)
        policy.offload_after_refit()
        policy_generation.prepare_for_generation(tags=["kv_cache"])
    else:
        sending, receiving = (
            policy.broadcast_weights_for_collective(),
            policy_generation.update_weights_from_collective(),
        )
        try:
            policy.worker_group.get_all_worker_results(sending)
            policy_generation.loaded(policy_generation.results(receiving))
        except MegarlError:
            # The group may be broken after this error. Dropping a healthy one costs little, since the next
            # refit creates it again.
            policy_generation.disconnect()
            raise
    # The version is set only if all engines hold the same complete weights.
    if policy_generation.version is None:
        raise RefitError(
            "a refit ended without an error, but not all engines have the same complete weights; "
            "this is a bug in megarl"
        )


def _hand_over(policy: Policy, generation: RolloutEngine, buffer_gib: float | None) -> None:
    """Have the policy's ranks send all weights to the engine ranks on the same devices. After a call that
    exchanges sizes, this takes one call on each side, regardless of the number of weight groups."""
    generation.take_slices(policy.send_slices(generation.slices_wanted()))
    # With this id both sides tell this refit from an aborted one.
    session, ticket = generation.meet(policy.mailboxes), secrets.randbits(62)
    sending = policy.hand_over_weights(session, ticket, buffer_gib)
    receiving = generation.update_weights_from_policy(ticket)
    try:
        policy.worker_group.get_all_worker_results(sending)
    except MegarlError:
        # The engines detect the failure and stop receiving. Their weights do not count, even if all arrived.
        generation.loaded([])
        raise
    generation.loaded(generation.results(receiving))


def connect(policy: Policy, generation: RolloutEngine) -> None:
    """Create the process group for weight transfers to engines on separate devices. Retry on another port if
    the chosen one is taken.

    Raises:
        RefitError: engines and policy could not connect.
    """
    # The group has all engine ranks and a single rank for the policy, which the pipeline stages use one after
    # another, whatever their number.
    size = generation.ranks + 1
    for attempt in range(1, CONNECTION_ATTEMPTS + 1):
        address, port = policy.worker_group.cluster.get_master_address_and_port()
        sending = policy.init_collective(address, port, size)
        receiving = generation.init_collective(address, port, size)
        # Wait for all: an engine that still tries the old port would be too late at the next one.
        outcomes = [_failure_of(policy.worker_group.get_all_worker_results, future) for future in sending]
        outcomes += [_failure_of(generation.results, future) for future in receiving]
        failures = list(filter(None, outcomes))
        if not failures:
            return
        generation.disconnect()
        # Peers of a lost worker report broken connections, possibly first. The loss is the cause, and decides
        # whether the run can restart from a checkpoint.
        error = next((failure for failure in failures if isinstance(failure, WorkerLostError)), failures[0])
        # A lost worker would not connect on the next port either.
        if attempt == CONNECTION_ATTEMPTS or not isinstance(error, RefitError):
            raise error
        logger.warning(
            "attempt %d of %d to connect the engines failed: %s", attempt, CONNECTION_ATTEMPTS, error
        )


def _failure_of(wait: Callable[[list[Any]], object], future: Any) -> MegarlError | None:
    """Wait for a worker's call. Return its error, or None if it succeeds."""
    try:
        wait([future])
    except MegarlError as error:
        return error
    return None


@dataclass
class Refit:
    """Keeps the engines' weights in sync with the policy's.

    Attributes:
        policy: the policy.
        generation: the engines.
        colocated: the engines are on the policy's devices.
        stale: the policy was trained since the last refit, or there was no refit yet.
        max_restarts: maximum number of restarts of lost engines.
        restarts: number of restarts so far.
        on_restart: called with the causing error before each restart.
        lost_nodes: returns the names of lost nodes on which engines had bundles.
        check: called after each refit.
    """

    policy: Policy
    generation: RolloutEngine
    colocated: bool
    stale: bool = True
    max_restarts: int = 0
    restarts: int = 0
    on_restart: Callable[[MegarlError], None] = lambda error: None
    lost_nodes: Callable[[], Sequence[str]] = tuple
    check: Callable[[], None] = lambda: None
    _informed: bool = field(default=False, init=False)

    def bring_up_to_date(self) -> None:
        """Refit if the engines have other weights than the policy, or have released theirs."""
        if not self._informed:
            self.generation.prepare_refit_info(self.policy.prepare_refit_info() or {})
            self._informed = True
        if not self.colocated and not self.generation.connected:
            connect(self.policy, self.generation)
        if self.stale or self.generation.version is None:
            refit_policy_generation(self.policy, self.generation, self.colocated)
            self.stale = False
            self.check()

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines in place of killed or hanging ones. The policy keeps its weights, and the next
        refit sends them.

        Args:
            error: error of the call that failed.

        Raises:
            MegarlError: ``error`` if all engines are alive or ``max_restarts`` is reached; else the error of
                the last start.
            WorkerLostError: a node with bundles of the engines is lost. New engines would wait for these
                bundles, so the run has to look for other nodes.
        """
        # All engines are alive, so the error has another cause, which a restart would not cure.
        if self.generation.is_alive():
            raise error
        while True:
            lost = self.lost_nodes()
            if lost:
                raise WorkerLostError(
                    f"node {', '.join(lost)} is lost, with devices of the engines: {error}"
                ) from error
            if self.restarts >= self.max_restarts:
                raise error
            self.restarts += 1
            logger.warning(
                "engines were lost, restart %d of at most %d: %s",
                self.restarts,
                self.max_restarts,
                error,
            )
            self.on_restart(error)
            try:
                self.generation.restart(self.policy)
            except MegarlError as failure:
                error = failure
                continue
            # New engines lack the policy's weights, whatever the old ones had.
            self.stale = True
            return
