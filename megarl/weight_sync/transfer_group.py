"""A process group of one rank of the policy and all ranks of the engines apart from it, made by a handshake that either all pass or none.

The rank of the policy is rank 0 and keeps the store; everybody else waits for its verdict, so that a wrong world size, a rank taken twice
or another model is an error on every side within the deadline, and not a collective that waits for ever.
"""

from __future__ import annotations

import datetime
import json
import time
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import RefitError

HANDSHAKE_SECONDS = 60.0
COLLECTIVE_SECONDS = 600.0
_PROTOCOL = 1


class TransferGroup:
    """Rank ``rank`` of the group.

    Args:
        ip, port: where rank 0 listens.
        world_size: ranks of the engines, and the policy's one.
        rank: 0 for the policy.
        digest: of the manifest that this side knows.
        device: where the weights are on this side; the backend is NCCL on a GPU and gloo on a CPU.
        buffer_bytes: of a transfer buffer; rank 0 says it, the others learn it.
        handshake_s: longest time until all are there, in seconds.
        collective_s: longest time of one broadcast, in seconds.

    Attributes:
        buffer_bytes: as rank 0 has it.

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
        handshake_s: float = HANDSHAKE_SECONDS,
        collective_s: float = COLLECTIVE_SECONDS,
    ) -> None:
        self.rank, self.world_size, self.device = rank, world_size, device
        self._address = f"{ip}:{port}"
        self._ends = time.monotonic() + handshake_s
        self._seconds = handshake_s
        self._collective = datetime.timedelta(seconds=collective_s)
        self._store = self._open(ip, port)
        hello = {"protocol": _PROTOCOL, "world_size": world_size, "manifest": digest, "device": device.type}
        came_before = self._store.add(f"came/{rank}", 1) > 1
        if not came_before:
            self._store.set(f"hello/{rank}", json.dumps(hello))
        verdict = self._judge(hello, buffer_bytes) if rank == 0 else self._verdict()
        if came_before:
            verdict = {**verdict, "error": f"rank {rank} was there already: give every rank of every engine its own number"}
        elif not verdict["error"] and rank >= verdict["world_size"]:
            verdict = {**verdict, "error": f"rank {rank} is outside the {verdict['world_size']} ranks that the policy expects"}
        if verdict["error"]:
            raise RefitError(f"no group for weights at {self._address}: {verdict['error']}")
        self.buffer_bytes = int(verdict["buffer_bytes"])
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

    def _judge(self, own: dict[str, Any], buffer_bytes: int) -> dict[str, Any]:
        """Rank 0: hear everybody and tell them."""
        error = ""
        try:
            self._store.wait([f"hello/{rank}" for rank in range(self.world_size)], self._left())
        except (dist.DistError, RuntimeError):
            missing = [rank for rank in range(self.world_size) if not self._store.check([f"hello/{rank}"])]
            error = f"ranks {missing} of {self.world_size} did not come within {self._seconds:g} s; start world_size - 1 engine ranks"
        for rank in range(1, 0 if error else self.world_size):
            said = json.loads(self._store.get(f"hello/{rank}"))
            wrong = [f"{key} {said.get(key)!r} for {value!r}" for key, value in own.items() if said.get(key) != value]
            if wrong:
                error = f"rank {rank} expects {', '.join(wrong)}: give both sides the same"
                break
        verdict = {"error": error, "world_size": self.world_size, "buffer_bytes": buffer_bytes}
        self._store.set("verdict", json.dumps(verdict))
        return verdict

    def _verdict(self) -> dict[str, Any]:
        try:
            self._store.wait(["verdict"], self._left())
            verdict: dict[str, Any] = json.loads(self._store.get("verdict"))
        except (dist.DistError, RuntimeError) as error:
            raise RefitError(f"no group for weights at {self._address}: the policy gave no verdict within {self._seconds:g} s") from error
        return verdict

    def _make(self) -> Any:
        """A group beside the default one, which engine and policy each have for themselves."""
        store = dist.PrefixStore("weights", self._store)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._collective
            return dist.ProcessGroupNCCL(store, self.rank, self.world_size, options)
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, self._collective)

    def broadcast(self, buffer: torch.Tensor) -> dist.Work:
        """Begin to send (rank 0) or receive a buffer."""
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work: dist.Work = self._group.broadcast([buffer], options)
        return work

    def confirm(self, round_: int) -> None:
        """Engine: all weights of a round are loaded."""
        self._store.set(f"loaded/{round_}/{self.rank}", b"1")

    def wait_until_confirmed(self, round_: int, seconds: float) -> None:
        """Policy: until every rank of every engine has confirmed.

        Raises:
            RefitError: naming the ranks that have not.
        """
        keys = [f"loaded/{round_}/{rank}" for rank in range(1, self.world_size)]
        try:
            self._store.wait(keys, datetime.timedelta(seconds=seconds))
        except (dist.DistError, RuntimeError) as error:
            missing = [rank for rank in range(1, self.world_size) if not self._store.check([f"loaded/{round_}/{rank}"])]
            message = f"ranks {missing} of the engines did not confirm their weights within {seconds:g} s: make a new group"
            raise RefitError(message) from error
        for key in keys:
            self._store.delete_key(key)

    def close(self) -> None:
        """Leave."""
        self._group = None
        self._store = None
