"""The sending half of a refit, which gives the present weights to engines on the same devices or elsewhere;
see ``megarl.models.engine.receiving`` for the other half."""

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
from megarl.weight_sync.manifest import ONE_STAGE, Stages, WeightIterator, drain, failing
from megarl.weight_sync.rendezvous import Rendezvous
from megarl.weight_sync.session import SlicesHere, WeightSender
from megarl.weight_sync.slices import WantedSlices, names_digest
from megarl.weight_sync.transfer_group import TransferGroup


class SendingWorker(WorkerState):
    """Methods by which a worker sends its weights to engines; see ``megarl.weight_sync``."""

    _with_checksum: bool
    _new_sender: Callable[..., WeightSender]
    _sender: WeightSender
    # Sends the weights that engines read on their own; differs from `_sender` if the engines take slices.
    _handing: WeightSender
    # True if engines have the base, and receive only the factors of adapters.
    _sends_adapter: bool
    _broadcaster: WeightBroadcaster | None
    _broadcasts: bool
    _stages: Stages | None

    # The following methods serve an engine that generates on the same devices.

    def _factors(self) -> WeightIterator:
        """Yield the factors of all adapters under PEFT's names, for engines that compute with adapters. A
        collective."""
        found = self.backend.export_adapters()
        assert found is not None, "policy.peft is enabled"
        return found[1]

    def prepare_refit_info(self, first_rank_only: bool = False) -> dict[str, Any]:
        """Return ``{name: (shape, dtype)}`` of the weights that a refit sends, in sending order. The result
        is equal on all ranks; with ``first_rank_only`` it is empty on all ranks but the first."""
        # Check only the first time: the manifest follows from names and shapes, which never change
        # afterwards.
        if not self._sender.knows_manifest:
            self._refuse_reference("prepare_refit_info")
            self._require("prepare_refit_info")
        manifest = self._sender.manifest
        return {} if first_rank_only and dist.get_rank() else manifest.description()

    def prepare_info_for_collective(self) -> dict[str, Any]:
        """Call ``prepare_refit_info``, of which this is the older name."""
        return self.prepare_refit_info()

    def prepare_weights_for_ipc(self) -> tuple[list[tuple[str, int]], float]:
        """Begin a refit. Return the weights' names with their bytes in the transfer buffer, in sending order,
        and the maximum bytes of a group."""
        budget = self.begin_refit()
        return self._sender.manifest.padded_sizes, float(budget)

    def begin_refit(self) -> int:
        """Begin a refit for a caller that already knows the weights' names, which are not sent again. Return
        the maximum bytes of a group."""
        return self._begin_with(self._sender)

    def _begin_with(self, sender: WeightSender) -> int:
        self._refuse_reference("prepare_weights_for_ipc")
        self._require("prepare_weights_for_ipc")
        return sender.begin(self._weights_version)

    def get_weights_ipc_handles(self, keys: Iterable[str]) -> dict[str, Any]:
        """Copy the next group of weights into the transfer buffer. All ranks gather; ranks that have a buffer
        return ``{device: payload}``."""
        self._refuse_reference("get_weights_ipc_handles")
        self._require("get_weights_ipc_handles")
        return self._sender.send(list(keys))

    def get_part_ipc_handles(self, first: int, count: int) -> dict[str, Any]:
        """Return the handles of a group, given the index of its first weight in sending order and its number
        of weights."""
        self._refuse_reference("get_weights_ipc_handles")
        self._require("get_weights_ipc_handles")
        return self._sender.send_part(first, count)

    def mailbox(self) -> dict[str, Any]:
        """Return ``{device: handle}`` of the mailbox in which an engine rank on this device finds the
        weights; empty on a rank that publishes no mailbox."""
        self.prepare_refit_info()
        return self._handing.mailbox()

    def send_slices(self, wanted: WantedSlices | None, first_rank_only: bool = False) -> list[str] | str:
        """Send each engine rank only the slices of the weights that it reads, from now on. Collective.

        Args:
            wanted: the slices that the engines' ranks read; None if they take full weights.
            first_rank_only: the other ranks return a digest.

        Returns:
            The names of the weights that are sent as slices, equal on all ranks, or ``names_digest`` of the
            names; if there are any, the mailboxes are new ones.
        """
        names = self._sent_as_slices(wanted)
        return names_digest(names) if first_rank_only and dist.get_rank() else names

    def _sent_as_slices(self, wanted: WantedSlices | None) -> list[str]:
        self.prepare_refit_info()
        if self._handing is not self._sender:
            # Close the sender of an earlier choice of slices, which a new engine may not share; its buffers
            # are freed with it.
            self._handing.close()
            self._handing = self._sender
        # Send the factors of adapters to every rank of an engine in full, because they are small.
        if wanted is None or self._sends_adapter:
            return []
        beside = self._engine_rank_beside(wanted)
        slices = self.backend.agree_on_slices(wanted.ranks, beside)
        if not slices:
            return []
        manifest = self._sender.manifest.sliced(slices)
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, (host_identity(), beside))
        # Let one rank of a host publish for each engine rank: the first of those that serve it.
        here = SlicesHere(manifest, beside, everybody.index((host_identity(), beside)) == dist.get_rank())
        self._sender.close()
        self._handing = self._new_sender(self.backend.export_slices, slices=here)
        return list(manifest.slices)

    def _engine_rank_beside(self, wanted: WantedSlices) -> int:
        """Return the engine rank that reads this rank's weights; -1 for none. On a CPU, where every engine
        rank of the host could read them, the engine rank that would be on the same GPU is returned: engines
        follow one another over the policy's ranks."""
        if self.runtime.is_cuda:
            return wanted.devices.get(self.runtime.identity(), -1)
        return dist.get_rank() % len(wanted.ranks) if dist.get_world_size() % len(wanted.ranks) == 0 else -1

    def hand_over_weights(self, session: int, ticket: int, most: int | None = None) -> None:
        """Give the present weights to the engine ranks on this device. Each group is copied once the group
        two before it has been read.

        Args:
            session: number of the engines, from ``RolloutEngine.meet``.
            ticket: number of this refit, equal for policy and engines and different from every other refit's.
            most: maximum bytes of a group, if less than the transfer buffers hold.

        Raises:
            StateError: the weights are not those of the policy, or are in host memory.
            RefitError: a rank of the policy could not begin; a weight is larger than a group; an engine rank
                does not read.
        """
        try:
            room = self._begin_together()
        except BaseException as error:
            # Refuse before raising: engine ranks wait in the mailbox and would learn of the error in no other
            # way.
            self._handing.refuse(session, ticket, error)
            self._handing.give_up()
            raise
        if self._handing is not self._sender:
            # Slices differ by an index between ranks, and so does the room for the largest one. Only full
            # weights are laid out alike on all ranks.
            room = max(room, self._handing.manifest.largest[1])
        self._handing.hand_over(session, ticket, most=room if most is None else min(room, most))

    def _begin_together(self) -> int:
        """Begin a refit on all ranks, or on none. A collective; return the number of bytes that a group may
        have on every rank."""
        failure: Exception | None = None
        room = -1
        try:
            room = self._begin_with(self._handing)
        except Exception as error:
            failure = error
        # Take the smallest room, because all ranks lay out a group alike. If one rank cannot begin, none
        # does.
        least = torch.tensor([room], device=self.runtime.device)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        if int(least) < 0:
            raise failure or RefitError(
                "another rank of the policy could not begin the refit: see its own error, and refit again"
            )
        return int(least)

    # The following methods serve an engine elsewhere.

    def init_collective(self, ip: str, port: int, world_size: int) -> None:
        """Create the groups that weights are sent over, one per pipeline stage. Of the policy, only the first
        rank of a stage joins the stage's group.

        Args:
            ip, port: address where rank 0 listens, and the only one. A name must resolve to the same host
                everywhere; on Debian a host's own name resolves to 127.0.1.1 on that host.
            world_size: number of the engines' ranks, plus one.

        Raises:
            RefitError: an engine rank is missing or expects something else.
        """
        self._refuse_reference("init_collective")
        self._require("init_collective")
        manifest, stages, groups = self._sender.manifest, self._who_sends(), self.backend.groups
        self._leave_collective()
        # Bind the port first: if it belonged to another run, ranks looking for rank 0 could join that run's
        # rendezvous.
        with on_first_rank(RefitError) as first:
            rendezvous = Rendezvous(ip, port, keeps=True) if first else None
        with on_first_rank(RefitError):
            # The factors of all stages are sent by the first stage.
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
        """Return which pipeline stage sends which weights, computed once from the names that the stages
        export. Local."""
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
        """Send the present weights over the groups of ``init_collective``, each stage its own, until every
        engine rank has all weights.

        Raises:
            StateError: there is no group, or the weights are not those of the policy or are in host memory;
                the engines receive this error too.
            RefitError: an engine or a stage is gone; the groups can no longer be used.
        """
        if not self._broadcasts:
            raise StateError(
                "broadcast_weights_for_collective(): no engine is connected; call init_collective() first"
            )
        with on_first_rank(RefitError):
            stream = self._weights_of_stage()
            if self._broadcaster is not None:
                self._broadcaster.send(stream, self._weights_version)
            # Ranks that send nothing take part in the gathers, and also finish those of a sender that stopped
            # early.
            drain(stream)

    def _weights_of_stage(self) -> WeightIterator:
        """Return a stream of this stage's weights. An error that prevents it is raised by the stream, so that
        waiting engines receive the error too."""
        try:
            self._refuse_reference("broadcast_weights_for_collective")
            self._require("broadcast_weights_for_collective")
            return self._factors() if self._sends_adapter else self.backend.export_stage()
        except Exception as error:
            return failing(error)
