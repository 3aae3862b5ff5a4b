"""Process groups of the policy and all engine ranks on other devices. A handshake ensures that either all
ranks join or none.

Each pipeline stage of the policy has one sending rank, and one group with that rank and all engine ranks.

On a GPU the host polls for the end of an operation. torch's own wait only orders streams, so an operation
whose peer died would block the stream until the watchdog of torch's NCCL groups aborts the process. These
groups have no watchdog: as on a CPU, the connections of ``rendezvous`` detect a lost rank, and a timeout
limits each operation. Untested on GPUs. A rank that dies while NCCL sets up its first connections, within the
first broadcast, is not covered.
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
from megarl.weight_sync.rendezvous import HANDSHAKE_SECONDS, PROTOCOL, Members, Rendezvous, Terms

COLLECTIVE_SECONDS = 600.0
# Interval between checks for lost ranks during an operation.
_LOOK = datetime.timedelta(seconds=1)
# First and longest pause, in seconds, when polling a GPU operation; a group of tensors takes milliseconds.
_PAUSES = 0.0001, 0.002
NEW_GROUP = "make a new group with init_collective() and refit again"


class TransferGroup:
    """An engine rank, or the sender of a pipeline stage, in the process groups that transfer weights.

    Args:
        ip, port: address at which the policy's rank 0 (sender of stage 0) listens.
        world_size: number of engine ranks, plus one.
        rank: 0 for a sender, else the engine rank counted from 1.
        digest: digest of the manifest that this side has.
        device: device of the weights on this side; GPUs use NCCL, CPUs gloo.
        buffer_bytes: bytes of a transfer buffer; all ranks use the minimum over the senders.
        stage: pipeline stage of a sender.
        stages: which stage sends which weights; all ranks use the value of stage 0.
        handshake_s: timeout in seconds until all ranks have joined.
        collective_s: timeout in seconds of one broadcast. The timeouts of all stages' broadcasts start
            together.
        rendezvous: an already open rendezvous of stage 0; its deadline then applies.

    Attributes:
        buffer_bytes, stages: agreed values, equal on all ranks.

    Raises:
        RefitError: a rank is missing, joined twice, or has other parameters.
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
        # The digest also covers dtypes and order, so one comparison detects that policy and engine have
        # different models.
        own: Terms = {
            "protocol": PROTOCOL,
            "world_size": world_size,
            "manifest": digest,
            "device": device.type,
        }
        if keeps:
            members = Members(world_size, stages.count)
            verdict = self._rendezvous.judge(own, members, buffer_bytes, stages.runs)
        else:
            verdict = self._rendezvous.introduce(own, rank, stage, buffer_bytes)
        self.buffer_bytes = verdict["buffer_bytes"]
        # JSON has lists for tuples.
        self.stages = Stages(verdict["stages"], tuple((owner, count) for owner, count in verdict["runs"]))
        self._groups: dict[int, Any] = {}
        self._started: list[dist.Work] = []
        try:
            for number in range(self.stages.count):
                if number == stage or not self.sends:
                    self._groups[number] = self._process_group(f"weights/{number}")
        except BaseException:
            # Leave, so that the others do not wait for this rank.
            self.close()
            raise

    @property
    def sends(self) -> bool:
        """True if this rank is a sender."""
        return self.rank == 0

    def _process_group(self, name: str) -> Any:
        """Create a process group that is independent of torch's default group, because policy and engine each
        have their own."""
        # The groups of all stages use the same keys in one store, so each needs a prefix.
        store = dist.PrefixStore(name, self._rendezvous.store)
        try:
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._collective
                # Set this during creation, so that the group gets no watchdog. After an error the watchdog
                # would abort the process through the default group's monitor, even if that ignores errors.
                with env.variables({"TORCH_NCCL_BLOCKING_WAIT": "1"}):
                    return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            # Not dist.new_group, which requires a default group that contains all these ranks; policy and
            # engine have separate ones.
            return dist.ProcessGroupGloo(
                store, self.rank, self.world_size, datetime.timedelta(seconds=self._rendezvous.left())
            )
        except (dist.DistError, RuntimeError) as error:
            raise RefitError(
                f"no group for weights at {self._rendezvous.address}: a rank left while it was made "
                f"({error}); {NEW_GROUP}"
            ) from error

    def broadcast(self, buffer: torch.Tensor, stage: int = 0) -> dist.Work:
        """Start the broadcast of a buffer from pipeline stage ``stage``: its policy rank sends, engines
        receive.

        Raises:
            RefitError: the group is broken or closed.
        """
        self._require_open()
        options = dist.BroadcastOptions()
        # Engine ranks count from 1 in every stage's group, so the sender is always rank 0.
        options.rootRank = 0
        options.timeout = self._collective
        try:
            work: dist.Work = self._groups[stage].broadcast([buffer], options)
        except RuntimeError as error:
            raise _not_through(error) from error
        # Drop completed operations, because they keep their buffers alive.
        self._started = [*(started for started in self._started if not started.is_completed()), work]
        return work

    def wait(self, works: list[dist.Work]) -> None:
        """Wait until all ``works`` are done. Completed ones are removed from the list; after a failure all
        are removed.

        Args:
            works: operations that this rank started; on a GPU they share one timeout.

        Raises:
            RefitError: an operation failed or timed out, or a rank that may take part in it is gone.
        """
        seconds = self._collective.total_seconds()
        ends = time.monotonic() + seconds
        # Do not bind an operation to a name: an error's traceback would keep it alive, and with it the
        # connections.
        try:
            while works:
                if self._is_over(works):
                    # This raises if the operation failed. On a GPU it also makes the current stream wait for
                    # the operation's stream.
                    works[0].wait()
                    works.pop(0)
                    continue
                # Check every time: neither gloo nor NCCL reports a peer that died without closing its
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
        """Wait up to ``_LOOK`` for the first operation and return whether it has completed or failed."""
        if not self._asks:
            # An error is either the timeout of this wait or a failure of the operation, which is then over.
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
        """Exchange, at the end of a refit, which ranks could not load the weights. Return their messages,
        equal on all ranks; empty if all succeeded.

        Args:
            refusal: why this rank could not load the weights; empty if it could.
            seconds: timeout for the other ranks. A sender with several stages waits for the broadcast timeout
                instead, because later stages may still be sending.

        Raises:
            RefitError: a rank is gone or does not respond; on the policy the message names it.
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
        """Leave the groups. Ranks that wait for this one get an error at once instead of at their timeout."""
        groups = list(self._groups.values())
        for index in range(len(groups)):
            # Iterate by index: a loop variable would keep the last group, and its connections, alive beyond
            # clear() below.
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
    """Keep references to aborted groups until their operations end. Operations with a rank that died end only
    at their timeout.

    Destroying such a group earlier would block until then. This function runs in a daemon thread, whose
    objects are never destroyed, so that the process can exit earlier. The thread must not be inside torch at
    exit, because torch's C++ code would then crash.
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
