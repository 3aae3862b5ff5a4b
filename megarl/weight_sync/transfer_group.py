"""A process group of one rank of the policy and all ranks of the engines apart from it, made by a handshake that either all pass or none.

The rank of the policy is rank 0 and keeps the store; everybody else waits for its verdict, so that a wrong world size, a rank taken twice
or another model is an error on every side within the deadline, and not a collective that waits for ever.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import RefitError

HANDSHAKE_SECONDS = 60.0
COLLECTIVE_SECONDS = 600.0
HEARD_SECONDS = 5.0
NEW_GROUP = "make a new group with init_collective() and refit anew"
_PROTOCOL = 2


class TransferGroup:
    """Rank ``rank`` of the group.

    Args:
        ip, port: where rank 0 listens.
        world_size: ranks of the engines, and the policy's one.
        rank: 0 for the policy.
        digest: of the manifest that this side knows.
        device: where the weights are on this side; the backend is NCCL on a GPU and gloo on a CPU.
        buffer_bytes: of a transfer buffer; rank 0 says it, the others learn it.
        delta_share: send what changed alone, where that takes at most this share of the bytes; 0 sends everything. Rank 0 says it, too.
        handshake_s: longest time until all are there, in seconds.
        collective_s: longest time of one broadcast, in seconds.

    Attributes:
        buffer_bytes, delta_share: as rank 0 has them.

    Raises:
        RefitError: somebody is missing, came twice, or expects something else.
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
        delta_share: float = 0.0,
        handshake_s: float = HANDSHAKE_SECONDS,
        collective_s: float = COLLECTIVE_SECONDS,
    ) -> None:
        if not 0.0 <= delta_share <= 1.0:
            raise RefitError(f"delta_share = {delta_share}: must lie in [0, 1]; write 0 to send all weights at every refit")
        self.rank, self.world_size, self.device = rank, world_size, device
        self._address = f"{ip}:{port}"
        self._ends = time.monotonic() + handshake_s
        self._seconds = handshake_s
        self._collective = datetime.timedelta(seconds=collective_s)
        self._store = self._open(ip, port)
        own = {"protocol": _PROTOCOL, "world_size": world_size, "manifest": digest, "device": device.type}
        try:
            verdict = (
                self._judge(own, {"buffer_bytes": buffer_bytes, "delta_share": delta_share})
                if rank == 0
                else self._introduce({**own, "rank": rank})
            )
        except (dist.DistError, RuntimeError) as error:
            raise RefitError(f"no group for weights at {self._address}: the policy gave no verdict within {self._seconds:g} s") from error
        if verdict["error"]:
            raise RefitError(f"no group for weights at {self._address}: {verdict['error']}")
        self.buffer_bytes, self.delta_share = int(verdict["buffer_bytes"]), float(verdict["delta_share"])
        self._group = self._make()

    def _open(self, ip: str, port: int) -> Any:
        try:
            return dist.TCPStore(
                ip, port, is_master=self.rank == 0, wait_for_workers=False, timeout=datetime.timedelta(seconds=self._seconds)
            )
        except (dist.DistError, RuntimeError) as error:
            what = "the port cannot be taken" if self.rank == 0 else "the policy does not answer"
            message = f"no group for weights at {self._address}: {what} ({error}); choose another port, or look at the policy"
            raise RefitError(message) from error

    def _left(self) -> datetime.timedelta:
        return datetime.timedelta(seconds=max(0.1, self._ends - time.monotonic()))

    def _introduce(self, hello: dict[str, Any]) -> dict[str, Any]:
        """Engine: say who this is, and hear the verdict."""
        number = self._store.add("came", 1)
        self._store.set(f"hello/{number}", json.dumps(hello))
        self._store.wait(["verdict"], self._left())
        verdict: dict[str, Any] = json.loads(self._store.get("verdict"))
        self._store.set(f"heard/{number}", "")
        if not verdict["error"] and number >= verdict["world_size"]:
            verdict["error"] = (
                f"rank {self.rank} came when all {verdict['world_size']} ranks of the policy's group were there: make a new one"
            )
        return verdict

    def _judge(self, own: dict[str, Any], terms: dict[str, Any]) -> dict[str, Any]:
        """Rank 0: hear everybody in the order of coming, so that who does not belong here is refused at once, and tell them."""
        here: set[int] = set()
        error = ""
        while not error and len(here) < self.world_size - 1:
            key = f"hello/{len(here) + 1}"
            try:
                self._store.wait([key], self._left())
            except (dist.DistError, RuntimeError):
                missing = sorted(set(range(1, self.world_size)) - here)
                error = f"ranks {missing} of {self.world_size} did not come within {self._seconds:g} s; start world_size - 1 engine ranks"
            else:
                said = json.loads(self._store.get(key))
                error = self._objection(said, own, here)
                here.add(said["rank"])
        verdict = {"error": error, "world_size": self.world_size, **terms}
        self._store.set("verdict", json.dumps(verdict))
        if error:
            # the store ends with this rank: who came has to hear why
            with contextlib.suppress(dist.DistError, RuntimeError):
                heard = [f"heard/{number}" for number in range(1, self._store.add("came", 0) + 1)]
                self._store.wait(heard, datetime.timedelta(seconds=HEARD_SECONDS))
        return verdict

    def _objection(self, said: dict[str, Any], own: dict[str, Any], here: set[int]) -> str:
        """Why a rank cannot be taken in; empty where it can."""
        rank = said["rank"]
        wrong = [f"{key} {said.get(key)!r} for {value!r}" for key, value in own.items() if said.get(key) != value]
        if wrong:
            return f"rank {rank} expects {', '.join(wrong)}: give both sides the same"
        if not 0 < rank < self.world_size:
            return f"rank {rank} is outside the {self.world_size} ranks that the policy expects: number the engines' ranks from 1"
        if rank in here:
            return f"rank {rank} came twice: give every rank of every engine its own number"
        return ""

    def _make(self) -> Any:
        """A group beside the default one, which engine and policy each have for themselves."""
        store = dist.PrefixStore("weights", self._store)
        try:
            if self.device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = self._collective
                return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, self._left())
        except (dist.DistError, RuntimeError) as error:
            raise RefitError(f"no group for weights at {self._address}: a rank left while it was made ({error}); {NEW_GROUP}") from error

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Begin to send (rank 0) or receive a buffer.

        Raises:
            RefitError: the group is broken or closed.
        """
        if self._group is None:
            raise RefitError(f"the group for weights at {self._address} is closed: {NEW_GROUP}")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._collective
        work: dist.Work = self._group.broadcast([buffer], options)
        return work

    def agree(self, round_: int, refusal: str, seconds: float) -> list[str]:
        """At the end of a round: what the ranks say that could not load its weights, the same on all ranks.

        Args:
            round_: of the weights.
            refusal: why this rank could not; empty where it could.
            seconds: longest wait for the others.

        Raises:
            RefitError: a rank is gone, or does not answer; the policy names those that did not.
        """
        mine = f"loaded/{round_}/{self.rank}"
        refused = torch.zeros(self.world_size, dtype=torch.int64, device=self.device)
        refused[self.rank] = bool(refusal)
        options = dist.AllreduceOptions()
        options.timeout = datetime.timedelta(seconds=seconds)
        try:
            self._store.set(mine, refusal)
            self._group.allreduce([refused], options).wait()
            ranks = refused.nonzero().flatten().tolist()
            if not refusal:
                self._store.delete_key(mine)
            return [f"rank {rank}: {self._store.get(f'loaded/{round_}/{rank}').decode()}" for rank in ranks]
        except (dist.DistError, RuntimeError) as error:
            raise RefitError(f"{self._missing(round_)} at the end of the refit: {error}; {NEW_GROUP}") from error

    def _missing(self, round_: int) -> str:
        """Who did not come to the end of a round, as far as that can be known."""
        if self.rank != 0:
            return f"the policy at {self._address} or another engine was not there"
        missing = [rank for rank in range(1, self.world_size) if not self._store.check([f"loaded/{round_}/{rank}"])]
        return f"ranks {missing} of the engines did not confirm their weights" if missing else "an engine left after loading its weights"

    def close(self) -> None:
        """Leave. Ranks that wait for this one get an error at once, and not when their time is over."""
        if self._group is not None:
            self._group.abort()
        # gloo closes its connections with its last reference; to abort does not
        self._group = self._store = None
