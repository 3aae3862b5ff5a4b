"""The sending half of a refit: a worker sends its current weights to engines on the same devices or on
others. See ``megarl.models.engine.receiving`` for the other half."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import (
    RefitError,
    StateError,
)
from megarl.models.engine.groups import on_first_rank
from megarl.models.engine.worker_state import WorkerState
from megarl.weight_sync.broadcast import WeightBroadcaster
from megarl.weight_sync.ipc import host_identity
from megarl.weight_sync.mailbox import CarriedPayload, MailboxHandle
from megarl.weight_sync.manifest import ONE_STAGE, Description, Stages, drain, failing
from megarl.weight_sync.plan import WeightIterator
from megarl.weight_sync.rendezvous import Rendezvous
from megarl.weight_sync.session import SlicesHere, WeightSender
from megarl.weight_sync.slices import WantedSlices, names_digest
from megarl.weight_sync.transfer_group import TransferGroup


class SendingWorker(WorkerState):
    """Worker methods that send weights to engines; see ``megarl.weight_sync``."""

    _with_checksum: bool
    _new_sender: Callable[..., WeightSender]
    _sender: WeightSender
    # Sends weights through mailboxes. It is ``_sender``, unless the engines take slices.
    _handing: WeightSender
    # True if the engines serve LoRA: they load the base weights themselves and receive only adapters.
    _sends_adapter: bool
    _broadcaster: WeightBroadcaster | None
    _broadcasts: bool
    _stages: Stages | None

    # The following methods send weights to engines on the same devices.

    def _factors(self) -> WeightIterator:
        """Yield the factors of all adapters under PEFT's names, for engines that serve LoRA themselves.
        Collective."""
        found = self.backend.export_adapters()
        assert found is not None, "policy.peft is enabled"
        return found[1]

    def prepare_refit_info(self, first_rank_only: bool = False) -> Description:
        """Return ``{name: (shape, dtype)}`` of the weights that a refit sends, in sending order. It is equal
        on all ranks; with ``first_rank_only``, other ranks return an empty dictionary."""
        # Check only the first time. Names and shapes, and so the manifest, never change afterwards.
        if not self._sender.knows_manifest:
            self._refuse_reference("prepare_refit_info")
            self._require("prepare_refit_info")
        manifest = self._sender.manifest
        return {} if first_rank_only and dist.get_rank() else manifest.description()

    def prepare_info_for_collective(self) -> Description:
        """Call ``prepare_refit_info``, for callers that use this older name."""
        return self.prepare_refit_info()

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Begin a refit. Return (name, bytes in the transfer buffer) of each weight in sending order, and the
        maximum bytes of a group."""
        budget = self.begin_refit()
        return self._sender.manifest.padded_sizes, float(budget)

    def begin_refit(self) -> int:
        """Begin a refit for a caller that already knows the weights' names. Return the maximum bytes of a
        group."""
        return self._begin_with(self._sender)

    def _begin_with(self, sender: WeightSender) -> int:
        self._refuse_reference("prepare_weights_for_ipc")
        self._require("prepare_weights_for_ipc")
        return sender.begin(self._weights_version)

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, CarriedPayload]:
        """Copy the next group of weights into the transfer buffer. Collective. Ranks with a buffer return
        ``{device: payload}``."""
        self._refuse_reference("get_weights_ipc_handles")
        self._require("get_weights_ipc_handles")
        return self._sender.send(list(keys))

    def get_part_ipc_handles(self, first: int, count: int) -> dict[str, CarriedPayload]:
        """Return the IPC handles of a group, given the index of its first weight in sending order and its
        number of weights. Collective, like ``get_weights_ipc_handles``."""
        self._refuse_reference("get_weights_ipc_handles")
        self._require("get_weights_ipc_handles")
        return self._sender.send_part(first, count)

    def mailbox(self) -> dict[str, MailboxHandle]:
        """Return ``{device: handle}`` of the mailbox from which an engine rank on this device reads weights;
        empty on a rank without a mailbox."""
        self.prepare_refit_info()
        return self._handing.mailbox()

    def send_slices(self, wanted: WantedSlices | None, first_rank_only: bool = False) -> list[str] | str:
        """Let later refits send each engine rank only the slices that it reads. Collective.

        Args:
            wanted: the slices that the engine ranks read; None if they need full weights.
            first_rank_only: other ranks return a digest instead of the names.

        Returns:
            The names of the weights that are sent as slices, equal on all ranks, or their ``names_digest``.
            If there are any, new mailboxes replace the previous ones.
        """
        names = self._sent_as_slices(wanted)
        return names_digest(names) if first_rank_only and dist.get_rank() else names

    def _sent_as_slices(self, wanted: WantedSlices | None) -> list[str]:
        self.prepare_refit_info()
        if self._handing is not self._sender:
            # Close the sender of the previous slices, which frees its buffers. Engines may want other slices
            # after a restart.
            self._handing.close()
            self._handing = self._sender
        # Factors of adapters are small, so every engine rank receives them in full.
        if wanted is None or self._sends_adapter:
            return []
        beside = self._engine_rank_beside(wanted)
        slices = self.backend.agree_on_slices(wanted.ranks, beside)
        if not slices:
            return []
        manifest = self._sender.manifest.sliced(slices)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (host_identity(), beside))
        # Only one rank per host and engine rank publishes a mailbox: the first of those that serve this
        # engine rank.
        here = SlicesHere(manifest, beside, everybody.index((host_identity(), beside)) == dist.get_rank())
        self._sender.close()
        self._handing = self._new_sender(self.backend.export_slices, slices=here)
        return list(manifest.slices)

    def _engine_rank_beside(self, wanted: WantedSlices) -> int:
        """Return the engine rank that reads this rank's weights; -1 for none.

        On a GPU it is the engine rank on the same device. On a CPU, where every engine rank of the host could
        read them, it is chosen as if each rank had a GPU: consecutive policy ranks serve consecutive engine
        ranks.
        """
        if self.runtime.is_cuda:
            return wanted.devices.get(self.runtime.identity(), -1)
        return dist.get_rank() % len(wanted.ranks) if dist.get_world_size() % len(wanted.ranks) == 0 else -1

    def hand_over_weights(self, session: int, ticket: int, most: int | None = None) -> None:
        """Send the current weights to the engine ranks on this device, group by group. With two buffers, a
        group is copied once the group two before it has been read.

        Args:
            session: id of the connection to the engines, from ``RolloutEngine.meet``.
            ticket: id of this refit, equal for policy and engines and different for every refit.
            most: maximum bytes of a group, if less than the size of the transfer buffers.

        Raises:
            StateError: the reference policy's weights are swapped in, or the weights are in host memory.
            RefitError: a rank of the policy could not begin, a weight is larger than a group, or an engine
                rank does not read.
        """
        try:
            room = self._begin_together()
        except BaseException as error:
            # Report the error through the mailbox before raising it: engine ranks wait there, and would
            # otherwise wait until a timeout.
            self._handing.refuse(session, ticket, error)
            self._handing.give_up()
            raise
        if self._handing is not self._sender:
            # Slices may differ by one index between ranks, and so may the size of the largest slice. So a
            # rank may need a larger group than the agreed size, which full weights never do.
            room = max(room, self._handing.manifest.largest[1])
        self._handing.hand_over(session, ticket, most=room if most is None else min(room, most))

    def _begin_together(self) -> int:
        """Begin a refit on all ranks, or on none if any rank fails. Return the maximum bytes of a group,
        equal on all ranks. Collective."""
        failure: Exception | None = None
        room = -1
        try:
            room = self._begin_with(self._handing)
        except Exception as error:
            failure = error
        # A group must fit into the smallest buffer, because all ranks pack it in the same way. The minimum is
        # also negative if any rank failed.
        least = torch.tensor([room], device=self.runtime.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if int(least) < 0:
            raise failure or RefitError(
                "another rank of the policy could not begin the refit: see its own error, and refit again"
            )
        return int(least)

    # The following methods send weights to engines on other devices.

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Create the process groups over which weights are broadcast, one per pipeline stage. A group
        consists of the first rank of its stage and all engine ranks.

        Args:
            ip, port: the rendezvous address, where rank 0 listens. A host name must resolve to the same host
                on all nodes; on Debian, a host's own name resolves to 127.0.1.1 on that host.
            world_size: number of engine ranks, plus one.

        Raises:
            RefitError: an engine rank is missing, or expects other weights or another group.
        """
        self._refuse_reference("init_collective")
        self._require("init_collective")
        manifest, stages, groups = self._sender.manifest, self._who_sends(), self.backend.groups
        self._leave_collective()
        # Bind the port before anything else. If another run listened there, the ranks would join its
        # rendezvous.
        with on_first_rank(RefitError) as first:
            rendezvous = Rendezvous(ip, port, keeps=True) if first else None
        with on_first_rank(RefitError):
            # Adapters are exported to all stages, and the first stage sends them.
            if groups.is_first_in_stage and (groups.is_first_stage or not self._sends_adapter):
                group = TransferGroup(
                    ip,
                    port,
                    world_size,
                    0,
                    digest=manifest.digest,
                    device=self.runtime.device,
                    buffer_bytes=self._sender.slot_bytes(),
                    stage=groups.pipeline_rank,
                    stages=stages,
                    rendezvous=rendezvous,
                )
                self._broadcaster = WeightBroadcaster(group, manifest, with_checksum=self._with_checksum)
        self._broadcasts = True

    def _who_sends(self) -> Stages:
        """Return which pipeline stage sends which weights, computed once from the names that each stage
        exports. Local."""
        if self._stages is None:
            manifest, names = (
                self._sender.manifest,
                () if self._sends_adapter else self.backend.names_by_stage(),
            )
            self._stages = Stages.of(manifest, names) if names else ONE_STAGE
        return self._stages

    def _leave_collective(self) -> None:
        broadcaster, self._broadcaster, self._broadcasts = self._broadcaster, None, False
        if broadcaster is not None:
            broadcaster.close()

    def broadcast_weights_for_collective(self) -> None:
        """Broadcast the current weights over the groups of ``init_collective``, each stage its own weights.
        Returns when every engine rank has all weights.

        Raises:
            StateError: there is no group, the reference policy's weights are swapped in, or the weights are
                in host memory. Except in the first case, the engines receive this error too.
            RefitError: an engine or a stage is gone. The groups can no longer be used.
        """
        if not self._broadcasts:
            raise StateError(
                "broadcast_weights_for_collective(): no engine is connected; call init_collective() first"
            )
        with on_first_rank(RefitError):
            stream = self._weights_of_stage()
            if self._broadcaster is not None:
                self._broadcaster.send(stream, self._weights_version)
            # Ranks that send nothing must still run the gathers. A sender that failed finishes its gathers
            # here.
            drain(stream)

    def _weights_of_stage(self) -> WeightIterator:
        """Return a stream of this stage's weights. If there is an error, return a stream that raises it,
        because only an error in the stream reaches the waiting engines."""
        try:
            self._refuse_reference("broadcast_weights_for_collective")
            self._require("broadcast_weights_for_collective")
            return self._factors() if self._sends_adapter else self.backend.export_stage()
        except Exception as error:
            return failing(error)
