"""The policy's side of a colocated refit: one rank's part in gathering the weights and laying them where the engine finds them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.distributed.device import DeviceRuntime
from megarl.errors import RefitError, StateError
from megarl.weight_sync.arena import SLOTS, Arena
from megarl.weight_sync.checksum import checksum
from megarl.weight_sync.layout import Group
from megarl.weight_sync.manifest import Manifest, too_large
from megarl.weight_sync.memory import GIB, LIST_BYTES, buffer_bytes
from megarl.weight_sync.packing import Stream, expect_end, pack
from megarl.weight_sync.shared_memory import host_identity

# of a slot, where the configuration names no size; on a GPU less when less is free
DEFAULT_SLOT_BYTES = GIB // 2
FREE_SHARE = 0.1


class WeightSender:
    """Lays the weights of a model into an ``Arena``, group after group.

    All ranks call all methods alike, because gathering is collective. On a GPU every rank fills an arena of its own, for the engine's rank
    on the same device; on a CPU the first rank of each host does.

    Args:
        stream: gives all Hugging Face names and full tensors, in one order on all ranks and every time.
        runtime: device of this process.
        buffer_gib: GiB that a refit may take: the arena's two slots, what is gathered for them, and on a CPU lists of what lies in them.
            None takes half a GiB a slot, and as much more as the largest weight needs.
        gathered_bytes: that ``stream`` takes.
        with_checksum: send a checksum with every group.
    """

    def __init__(
        self,
        stream: Callable[[], Stream],
        runtime: DeviceRuntime,
        *,
        buffer_gib: float | None = None,
        gathered_bytes: int = 0,
        with_checksum: bool = False,
    ) -> None:
        self._stream = stream
        self._runtime = runtime
        self._buffer_gib = buffer_gib
        self._gathered_bytes = gathered_bytes
        self._with_checksum = with_checksum
        self._manifest: Manifest | None = None
        self._publishes = False
        self._arena: Arena | None = None
        self._round = 0
        self._version = 0
        self._open: Stream | None = None
        self._next = 0
        self._groups_sent = 0

    @property
    def knows_manifest(self) -> bool:
        """Whether the weights were gone through already, so that ``manifest`` needs neither them nor the other ranks."""
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        """What is sent at every refit. The first call is a collective: it goes through all weights once.

        Raises:
            RefitError: the ranks do not see the same weights.
        """
        if self._manifest is None:
            manifest = Manifest.of(self._stream())
            everybody: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, (manifest.digest, host_identity()))
            other = [rank for rank, (digest, _) in enumerate(everybody) if digest != everybody[0][0]]
            if other:
                raise RefitError(
                    f"ranks {other} list other weights than rank 0 (names, shapes, dtypes or their order): "
                    "report the model and the layout, this is a fault of the export"
                )
            hosts = [host for _, host in everybody]
            self._publishes = self._runtime.is_cuda or hosts.index(host_identity()) == dist.get_rank()
            self._manifest = manifest
        return self._manifest

    def begin(self, version: int) -> int:
        """Begin a refit; an unfinished one is given up.

        Args:
            version: of the present weights.

        Returns:
            The bytes that a group may have.
        """
        budget = self.slot_bytes()
        if self._buffer_gib is not None and self.manifest.largest[1] > budget:
            raise too_large(*self.manifest.largest, budget, len(self.manifest.tensors))
        self.give_up()
        self._round += 1
        self._version = version
        self._open, self._next, self._groups_sent = self._stream(), 0, 0
        return budget

    def slot_bytes(self) -> int:
        """Bytes that a transfer buffer holds."""
        if self._arena is not None:
            return self._arena.slot_bytes
        if self._buffer_gib is not None:
            lists = 0 if self._runtime.is_cuda else LIST_BYTES * len(self.manifest.tensors)
            largest = self.manifest.largest[1]
            return buffer_bytes(self._buffer_gib, SLOTS, lists=lists, gathered=self._gathered_bytes, largest=largest)
        total, largest = self.manifest.total_bytes, self.manifest.largest[1]
        wanted = DEFAULT_SLOT_BYTES
        if self._runtime.is_cuda:
            wanted = min(wanted, int(FREE_SHARE * self._runtime.free_memory()))
        return max(min(wanted, total), largest)

    def send(self, names: Sequence[str]) -> dict[str, Any]:
        """The next group by its names; see ``send_part``.

        Raises:
            RefitError: they are not neighbours in the order of sending.
        """
        self._require_open()
        group = self.manifest.group_named(names)
        return self.send_part(group.first, group.count)

    def send_part(self, first: int, count: int) -> dict[str, Any]:
        """Gather the next group of weights and publish it.

        Args:
            first: index of its first weight in the order of sending.
            count: of its weights.

        Returns:
            ``{device: payload}`` of plain types; empty on a rank that publishes nothing.

        Raises:
            StateError: no refit was begun, or these weights are not the next ones.
            RefitError: the weights are not what the manifest says, there is no memory, or what was in the buffer was not acknowledged.
        """
        self._require_open()
        total = len(self.manifest.tensors)
        if not (first >= 0 and 1 <= count <= total - first):
            raise StateError(f"{count} weights from weight {first} on: there are {total}; take the groups of prepare_weights_for_ipc()")
        group = self.manifest.group(first, count)
        if first != self._next:
            raise StateError(
                f"{self.manifest.tensors[first].name} is weight {first} of the order of sending, but weight {self._next} is next: "
                "take the groups of prepare_weights_for_ipc() in their order, each once"
            )
        slot = self._groups_sent % SLOTS
        try:
            buffer = self._claim(slot, group) if self._publishes else None
        except RefitError:
            # the other ranks gather this group all the same
            self._copy(group, None)
            self.give_up()
            raise
        try:
            self._copy(group, buffer)
        except BaseException:
            self.give_up()
            raise
        self._next = group.stop
        self._groups_sent += 1
        if self._next == len(self.manifest.tensors):
            self._end()
        if buffer is None or self._arena is None:
            return {}
        self._runtime.synchronize()
        number = checksum(buffer[: group.nbytes]) if self._with_checksum else None
        self._arena.publish(slot, self._round, group.first)
        payload = {
            "arena": self._arena.handle(),
            "manifest": self.manifest.digest,
            "version": self._version,
            "round": self._round,
            "slot": slot,
            "first": group.first,
            "count": count,
            "checksum": number,
        }
        return {self._runtime.identity(): payload}

    def _require_open(self) -> None:
        if self._open is None:
            raise StateError("no refit is under way: call prepare_weights_for_ipc() first")

    def _claim(self, slot: int, group: Group) -> torch.Tensor:
        if self._arena is None or group.nbytes > self._arena.slot_bytes:
            size = max(group.nbytes, self.slot_bytes() if self._arena is None else 0)
            self._let_go()
            self._arena = Arena(size, self._runtime.device)
        return self._arena.claim(slot, self._round)

    def _copy(self, group: Group, buffer: torch.Tensor | None) -> None:
        assert self._open is not None
        pack(self._open, self.manifest, group, buffer)

    def give_up(self) -> None:
        """End a refit that is under way, if there is one."""
        stream, self._open = self._open, None
        close = getattr(stream, "close", None)
        if close is not None:
            close()

    def _end(self) -> None:
        stream, self._open = self._open, None
        if stream is not None:
            expect_end(stream)

    def close(self) -> None:
        """Let go of the arena."""
        self.give_up()
        self._let_go()

    def _let_go(self) -> None:
        if self._arena is not None:
            self._arena.close()
            self._arena = None
