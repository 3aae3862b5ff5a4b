"""Process groups of the policy and all ranks of engines on other devices, created by a handshake that either
all ranks pass or none.

Every pipeline stage of the policy has one sending rank, and a group of that rank and all engine ranks.

On a GPU the host waits for an operation by polling it. torch's own wait only orders streams, and an operation
whose peer died would block the stream until the watchdog of torch's NCCL groups ends the whole process. These
groups have no watchdog: a lost rank is detected by its connection (``rendezvous``), as on a CPU, and an
operation that takes too long by a timeout. This code has not been run on a GPU yet. It does not cover a rank
that dies while NCCL sets up its first connections, within the first broadcast.
"""

from __future__ import annotations

import contextlib
import datetime
import threading
import time
from typing import Any

import torch
import torch.distributed as dist

from megarl import env
from megarl.errors import RefitError
from megarl.weight_sync.manifest import ONE_STAGE, Stages
from megarl.weight_sync.rendezvous import HANDSHAKE_SECONDS, Members, Rendezvous

COLLECTIVE_SECONDS = 600.0
# Time between two checks for lost ranks while an operation lasts.
_LOOK = datetime.timedelta(seconds=1)
# The first and the longest pause, in seconds, between two checks whether a GPU's operation is done; a group
# of weights takes milliseconds.
_PAUSES = 0.0001, 0.002
NEW_GROUP = "make a new group with init_collective() and refit again"


class TransferGroup:
    """A rank of an engine, or the sender of a pipeline stage, in the groups that transfer weights.

    Args:
        ip, port: address where the sender of stage 0, the policy's first rank, listens.
        world_size: number of the engines' ranks, plus one.
        rank: 0 for a sender.
        digest: digest of the manifest that this side knows.
        device: device of the weights on this side; the backend is NCCL on a GPU and gloo on a CPU.
        buffer_bytes: bytes of a transfer buffer; all ranks use the minimum over the senders.
        stage: pipeline stage of a sender.
        stages: which stage sends which weights; stage 0 decides it for all ranks.
        handshake_s: timeout until all ranks have joined, in seconds.
        collective_s: timeout of one broadcast, in seconds; that of a later stage starts together with those
            of the earlier stages.
        rendezvous: stage 0's rendezvous, if it is already open; its deadline then applies.

    Attributes:
        buffer_bytes, stages: equal on all sides.

    Raises:
        RefitError: a rank is missing, joined twice, or expects something else.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        world_size: int,
        rank: int,
        *,
        digest: str,
        device: torch.device,
        buffer_bytes: int = 0,
        stage: int = 0,
        stages: Stages = ONE_STAGE,
        handshake_s: float = HANDSHAKE_SECONDS,
        collective_s: float = COLLECTIVE_SECONDS,
        rendezvous: Rendezvous | None = None,
    ) -> None:
        self.rank, self.world_size, self.stage, self.device = rank, world_size, stage, device
        self._asks = device.type == "cuda"
        self._collective = datetime.timedelta(seconds=collective_s)
        keeps = rank == 0 and stage == 0
        self._rendezvous = rendezvous or Rendezvous(ip, port, keeps=keeps, seconds=handshake_s)
        # The digest also covers dtypes and order, so that one comparison detects a policy and an engine of
        # different models.
        own = {"world_size": world_size, "manifest": digest, "device": device.type}
        if keeps:
            terms = {"buffer_bytes": buffer_bytes, "runs": stages.runs}
            verdict = self._rendezvous.judge(own, Members(world_size, stages.count), terms)
        else:
            verdict = self._rendezvous.introduce(own, rank, stage, buffer_bytes)
        self.buffer_bytes = int(verdict["buffer_bytes"])
        self.stages = Stages(verdict["stages"], tuple(map(tuple, verdict["runs"])))
        self._groups: dict[int, Any] = {}
        self._started: list[dist.Work] = []
        try:
            for number in range(self.stages.count):
                if number == stage or not self.sends:
                    self._groups[number] = self._process_group(f"weights/{number}")
        except BaseException:
            # Leave, so that the others do not wait for a rank that has given up.
            self.close()
            raise

    @property
    def sends(self) -> bool:
        """True if this rank is a sender."""
        return self.rank == 0

    def _process_group(self, name: str) -> Any:
        """Create a process group that is independent of the default group, of which engine and policy each
        have their own."""
        # Use a prefix for each group: the groups of several stages rendezvous in one store under the same
        # keys.
        store = dist.PrefixStore(name, self._rendezvous.store)
        try:
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._collective
                # Set this when the group is created, so that it gets no watchdog. After an error the watchdog
                # would end the whole process through the default group's monitor, even if that ignores
                # errors.
                with env.variables({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
                    return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            # Use the class instead of dist.new_group, which requires a default group that contains all these
            # ranks: engine and policy have one each.
            return dist.ProcessGroupGloo(
                store, self.rank, self.world_size, datetime.timedelta(seconds=self._rendezvous.left())
            )
        except (dist.DistError, RuntimeError) as error:
            raise RefitError(
                f"no group for weights at {self._rendezvous.address}: a rank left while it was made "
                f"({error}); {NEW_GROUP}"
            ) from error

    def broadcast(self, buffer: torch.Tensor, stage: int = 0) -> dist.Work:
        """Begin to send or receive a buffer of ``stage``.

        Raises:
            RefitError: the group is broken or closed.
        """
        self._require_open()
        options = dist.BroadcastOptions()
        # Engine ranks count from 1 in every stage's group, so that its sender is always 0.
        options.rootRank = 0
        options.timeout = self._collective
        try:
            work: dist.Work = self._groups[stage].broadcast([buffer], options)
        except RuntimeError as error:
            raise _not_through(error) from error
        # Drop completed operations, whose buffers would otherwise stay alive as long as the group.
        self._started = [*(started for started in self._started if not started.is_completed()), work]
        return work

    def wait(self, works: list[dist.Work]) -> None:
        """Wait until all of ``works`` are done. Each is removed from the list when it is done, and all are
        removed when one fails.

        Args:
            works: operations begun by this rank; on a GPU the timeout of one operation applies to all of them
                together.

        Raises:
            RefitError: an operation failed or takes too long, or a rank is gone that may take part in it.
        """
        seconds = self._collective.total_seconds()
        ends = time.monotonic() + seconds
        # Assign no name to an operation: an error's frames would keep it, and with it the connections.
        try:
            while works:
                if self._is_over(works):
                    # This raises if the operation failed. On a GPU it also makes the present stream wait for
                    # the operation's stream.
                    works[0].wait()
                    works.pop(0)
                    continue
                # Check each time, because neither gloo nor NCCL reports a peer that died without closing its
                # connection.
                lost = self._rendezvous.lost()
                if lost:
                    raise RuntimeError(f"{', '.join(map(self._rendezvous.members.name, lost))} disconnected")
                if self._asks and time.monotonic() > ends:
                    raise RuntimeError(f"an operation did not finish within {seconds:g} s")
        except RuntimeError as error:
            raise _not_through(error) from error
        finally:
            works.clear()

    def _is_over(self, works: list[dist.Work]) -> bool:
        """Wait at most ``_LOOK`` for the first of ``works``, and return whether it has completed or
        failed."""
        if not self._asks:
            # The error is either this wait's timeout or that of the operation, which is then over.
            with contextlib.suppress(RuntimeError):
                return works[0].wait(_LOOK)
            return works[0].is_completed()
        ends, pause = time.monotonic() + _LOOK.total_seconds(), _PAUSES[0]
        while not works[0].is_completed():
            if time.monotonic() > ends:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _PAUSES[1])
        return True

    def _require_open(self) -> None:
        if not self._groups:
            raise RefitError(f"the group for weights at {self._rendezvous.address} is closed: {NEW_GROUP}")

    def agree(self, refusal: str, seconds: float) -> list[str]:
        """Exchange, at the end of a refit, the faults of the ranks that could not load its weights; the
        result is equal on all ranks.

        Args:
            refusal: why this rank could not load the weights; empty if it could.
            seconds: timeout for the other ranks; a sender that has finished also waits for the stages after
                it.

        Raises:
            RefitError: a rank is gone, or does not respond; the policy names these ranks.
        """
        self._require_open()
        longest = self._collective.total_seconds() if self.sends and self.stages.count > 1 else seconds
        try:
            refusals = self._rendezvous.agree(refusal, longest)
        except RefitError as error:
            raise RefitError(f"{error}; {NEW_GROUP}") from error
        return [
            f"{self._rendezvous.members.name(number)}: {text}" for number, text in sorted(refusals.items())
        ]

    def close(self) -> None:
        """Leave the groups. Ranks that wait for this one get an error at once, and not only at their
        timeout."""
        groups = list(self._groups.values())
        for index in range(len(groups)):
            # Iterate by index: a loop variable would hold the last group, and its connections, beyond clear()
            # below.
            groups[index].abort()
        self._rendezvous.close()
        if not all(map(_ends, self._started)):
            threading.Thread(
                target=_outlast, args=(self._started, list(groups)), name="weights-in-flight", daemon=True
            ).start()
        # gloo closes its connections with the last reference to a group, and not when it is aborted.
        groups.clear()
        self._groups.clear()
        self._started = []


def _not_through(error: Exception) -> RefitError:
    return RefitError(f"the weight transfer failed: {error}; {NEW_GROUP}")


def _outlast(works: list[dist.Work], groups: list[Any]) -> None:
    """Keep groups that were left during a transfer to or from a rank that died, because such operations only
    end at their timeout.

    Releasing such a group earlier would wait for these operations. A daemon thread's objects are never
    destroyed, so that the process can end earlier. But the thread must not be inside torch at that moment,
    because torch's C++ code would then terminate abnormally.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(_LOOK.total_seconds())
    works.clear()
    groups.clear()


def _ends(work: dist.Work) -> bool:
    """Return whether an operation of an aborted group ends within ``_LOOK``."""
    if not work.is_completed():
        with contextlib.suppress(RuntimeError):
            work.wait(_LOOK)
    return bool(work.is_completed())
