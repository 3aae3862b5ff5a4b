"""Colocated refits: policy ranks gather weights and write them to IPC buffers, from which engine ranks read
them.

``WeightSender`` runs on each policy rank; ``WeightReceiver`` runs on each engine rank, checks the data and
tracks which version of the weights is complete. A policy rank passes groups of weights directly to the engine
ranks on its device: per refit the driver makes one call to the policy and one to the engine, and everything
else goes through a mailbox. Alternatively the driver passes on the handle of each group. All policy ranks
iterate over all weights, even if one fails, because gathering them is collective.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megarl.distributed.device import DeviceRuntime, runtime_on
from megarl.errors import RefitError, StateError
from megarl.weight_sync.ipc import SLOTS, BufferHandle, IpcBuffer, host_identity
from megarl.weight_sync.mailbox import (
    CarriedPayload,
    GroupPayload,
    Mailbox,
    MailboxHandle,
    MailboxReader,
    beside,
)
from megarl.weight_sync.manifest import (
    GIB,
    LIST_BYTES,
    Manifest,
    buffer_bytes,
    drain,
    expect_end,
    pack,
    too_large,
)
from megarl.weight_sync.plan import Group, Load, WeightIterator, Weights, checksum
from megarl.weight_sync.slices import Slices

# Seconds that the policy waits for an engine rank to read a group.
POLICY_PATIENCE = 300.0
# Seconds that an engine rank waits for the policy's next group; longer, because meanwhile the policy may be
# waiting for the slowest engine rank.
ENGINE_PATIENCE = 2 * POLICY_PATIENCE
# Session id of refits whose handles go through the driver.
_CARRIED = -2
# Default bytes of a slot. On a GPU with little free memory a slot is smaller.
DEFAULT_SLOT_BYTES = GIB // 2
FREE_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class SlicesHere:
    """The slices that a policy rank sends, if some weights are sent as slices.

    Attributes:
        manifest: manifest for the engine rank that reads from this policy rank.
        engine_rank: index of that rank in its engine.
        publishes: on a CPU, True if this rank fills the buffer for engine ranks of that index on its host; on
            a GPU every rank does.
    """

    manifest: Manifest
    engine_rank: int
    publishes: bool


class WeightSender:
    """Writes the weights of a model to an ``IpcBuffer``, group by group.

    All ranks must make the same calls, because gathering is collective. On a GPU every rank fills an IPC
    buffer for the engine rank on its device; on a CPU the first rank of each host fills one.

    Args:
        stream: returns an iterator over all Hugging Face names and full tensors, in the same order on all
            ranks and in every call.
        runtime: device of this process.
        buffer_gib: GiB that a refit may use for the slots of the IPC buffer, the weights gathered for them,
            and on a CPU lists of the slots' content. None means half a GiB per slot, or more if the largest
            tensor needs it.
        gathered_bytes: bytes that ``stream`` uses.
        with_checksum: send a checksum with every group.
        slices: the slices that ``stream`` yields, and their reader; None for full weights.
    """

    def __init__(
        self,
        stream: Callable[[], WeightIterator],
        runtime: DeviceRuntime,
        *,
        buffer_gib: float | None = None,
        gathered_bytes: int = 0,
        with_checksum: bool = False,
        slices: SlicesHere | None = None,
    ) -> None:
        self._stream = stream
        self._runtime = runtime
        self._buffer_gib = buffer_gib
        self._gathered_bytes = gathered_bytes
        self._with_checksum = with_checksum
        self._manifest: Manifest | None = slices.manifest if slices is not None else None
        self._publishes = slices is not None and (runtime.is_cuda or slices.publishes)
        self._engine_rank = slices.engine_rank if slices is not None else None
        self._ipc_buffer: IpcBuffer | None = None
        self._mailbox: Mailbox | None = None
        self._round = 0
        self._version = 0
        self._open: WeightIterator | None = None
        self._next = 0
        self._groups_sent = 0

    @property
    def knows_manifest(self) -> bool:
        """True if ``manifest`` no longer needs the weights or the other ranks."""
        return self._manifest is not None

    @property
    def manifest(self) -> Manifest:
        """Manifest of every refit. The first access is collective and iterates over all weights.

        Raises:
            RefitError: the ranks have different weights.
        """
        if self._manifest is None:
            manifest = Manifest.of(self._stream())
            everybody: list[tuple[str, str]] = [("", "")] * dist.get_world_size()
            # Gather digests of 64 characters: the lists would take megabytes per rank for a large model.
            dist.all_gather_object(everybody, (manifest.digest, host_identity()))
            digests, hosts = zip(*everybody, strict=True)
            other = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            if other:
                raise RefitError(
                    f"ranks {other} list other weights than rank 0 (names, shapes, dtypes or their order): "
                    "report the model and the layout, this is a fault of the export"
                )
            # Choose the first rank of a host in rank order, which all ranks find without a message.
            self._publishes = self._runtime.is_cuda or hosts.index(host_identity()) == dist.get_rank()
            self._manifest = manifest
        return self._manifest

    def begin(self, version: int) -> int:
        """Begin a refit. An unfinished refit is aborted.

        Args:
            version: version of the current weights.

        Returns:
            The maximum bytes of a group.

        Raises:
            RefitError: a tensor is larger than a slot.
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
        """Return the bytes of a slot of the IPC buffer."""
        if self._ipc_buffer is not None:
            return self._ipc_buffer.slot_bytes
        if self._buffer_gib is not None:
            lists = 0 if self._runtime.is_cuda else LIST_BYTES * len(self.manifest.tensors)
            largest = self.manifest.largest[1]
            return buffer_bytes(
                self._buffer_gib, SLOTS, lists=lists, gathered=self._gathered_bytes, largest=largest
            )
        total, largest = self.manifest.total_bytes, self.manifest.largest[1]
        wanted = DEFAULT_SLOT_BYTES
        if self._runtime.is_cuda:
            wanted = min(wanted, int(FREE_SHARE * self._runtime.free_memory()))
        return max(min(wanted, total), largest)

    def send(self, names: Sequence[str]) -> dict[str, CarriedPayload]:
        """Send the next group, given the names of its tensors; see ``send_part``.

        Raises:
            RefitError: the names are not consecutive in sending order.
        """
        self._require_open()
        group = self.manifest.group_named(names)
        return self.send_part(group.first, group.count)

    def send_part(self, first: int, count: int) -> dict[str, CarriedPayload]:
        """Gather the next group of weights and publish it.

        Args:
            first: index of the group's first tensor in sending order.
            count: number of tensors in the group.

        Returns:
            ``{device: payload}`` of plain types; empty on a rank that publishes nothing.

        Raises:
            StateError: no refit is in progress, or these are not the next weights.
            RefitError: the weights do not match the manifest, memory is insufficient, or readers have not
                acknowledged the previous group in the slot.
        """
        self._require_open()
        total = len(self.manifest.tensors)
        if not (first >= 0 and 1 <= count <= total - first):
            raise StateError(
                f"{count} weights from weight {first} on were requested, but there are {total}; "
                "take the groups of prepare_weights_for_ipc()"
            )
        # Accept groups only in order, each once: a stream cannot go back, and skipped weights would keep
        # their old version.
        if first != self._next:
            raise StateError(
                f"{self.manifest.tensors[first].name} is weight {first} of the sending order, but "
                f"weight {self._next} is next: take the groups of prepare_weights_for_ipc() in "
                "their order, each once"
            )
        try:
            handles = self.mailbox()
            if self._mailbox is not None and not first:
                self._mailbox.open(_CARRIED, self._round)
            payload = self._lay(self._mailbox, self.manifest.group(first, count), 0.0)
        except BaseException:
            self.give_up()
            raise
        return {
            device: {**payload, "round": self._round, "mailbox": handle}
            for device, handle in handles.items()
            if payload is not None
        }

    def _lay(self, box: Mailbox | None, group: Group, patience: float) -> GroupPayload | None:
        """Gather a group into its slot. Return its payload, or None on a rank whose weights nobody reads."""
        assert self._open is not None
        index, buffer, failure = self._groups_sent, None, None
        try:
            if box is not None:
                box.wait_until_read(index + 1 - SLOTS, patience)
                buffer = self._claim(index % SLOTS, group)
        except RefitError as error:
            # Gather the group despite this error, because the other ranks gather it too.
            failure = error
        pack(self._open, self.manifest, group, buffer)
        if failure is not None:
            raise failure
        self._next = group.stop
        self._groups_sent += 1
        if self._next == len(self.manifest.tensors):
            stream, self._open = self._open, None
            expect_end(stream)
        if box is None or buffer is None or self._ipc_buffer is None or box.refit is None:
            return None
        self._runtime.synchronize()
        self._ipc_buffer.marks[index % SLOTS] = torch.tensor([*box.refit, index])
        return {
            "buffer": self._ipc_buffer.handle(),
            "manifest": self.manifest.digest,
            "version": self._version,
            "index": index,
            "first": group.first,
            "count": group.count,
            "checksum": checksum(buffer[: group.nbytes]) if self._with_checksum else None,
        }

    def mailbox(self) -> dict[str, MailboxHandle]:
        """Return ``{device: handle}`` of this rank's mailbox, created on the first call, which is collective.
        Empty on a rank that publishes nothing."""
        _ = self.manifest
        if not self._publishes:
            return {}
        if self._mailbox is None:
            self._mailbox = Mailbox(on_gpu=self._runtime.is_cuda, engine_rank=self._engine_rank)
        return {self._runtime.identity(): self._mailbox.handle()}

    def hand_over(
        self, session: int, ticket: int, *, most: int | None = None, patience: float = POLICY_PATIENCE
    ) -> None:
        """Pass all weights of the current refit to the engine ranks on this rank's device, group by group,
        and wait until they have read them.

        All policy ranks iterate over all weights, even if one fails. An engine rank that reports a failure is
        not waited for.

        Args:
            session, ticket: ids of the set of engines and of the refit.
            most: maximum bytes of a group, equal on all ranks; None for the bytes of a slot.
            patience: seconds to wait for an engine rank to read a group.

        Raises:
            RefitError: the weights do not match the manifest, memory is insufficient, or an engine rank does
                not read.
        """
        self._require_open()
        stream = self._open
        assert stream is not None
        try:
            box = self._opened_mailbox(session, ticket)
            for index, group in enumerate(self.manifest.groups(self.slot_bytes() if most is None else most)):
                payload = self._lay(box, group, patience)
                if box is not None and payload is not None:
                    box.post(index, payload)
            if box is not None:
                box.wait_until_read(self._groups_sent, patience)
        except BaseException as error:
            self.refuse(session, ticket, error)
            self._open = None
            # Not after KeyboardInterrupt and the like, because the process is about to end.
            if isinstance(error, Exception):
                # The other ranks gather the remaining weights too. If draining also fails, the first error is
                # raised.
                with contextlib.suppress(Exception):
                    drain(stream)
            raise

    def _opened_mailbox(self, session: int, ticket: int) -> Mailbox | None:
        """Open the mailbox, through which engine ranks on this device learn where the weights are, and return
        it; None if there is no mailbox or no engine rank reads from it."""
        box = self._mailbox
        if box is None:
            return None
        box.open(session, ticket)
        return box if box.has_readers() else None

    def refuse(self, session: int, ticket: int, error: BaseException) -> None:
        """Tell the engine ranks on this rank's device that a refit is aborted, and why. The refit need not
        have begun."""
        if self._mailbox is not None:
            self._mailbox.give_up(session, ticket, f"{type(error).__name__}: {error}")

    def _require_open(self) -> None:
        if self._open is None:
            raise StateError("no refit is under way: call prepare_weights_for_ipc() first")

    def _claim(self, slot: int, group: Group) -> torch.Tensor:
        if self._ipc_buffer is None or group.nbytes > self._ipc_buffer.slot_bytes:
            # The first buffer has the configured size; a later one is as large as the tensor that did not
            # fit.
            size = max(group.nbytes, self.slot_bytes() if self._ipc_buffer is None else 0)
            self._let_go()
            self._ipc_buffer = IpcBuffer.create(size, self._runtime.device)
        # Clear the mark before writing: a reader with the old handle then sees that the slot no longer
        # contains its group.
        self._ipc_buffer.marks[slot] = -1
        return self._ipc_buffer.slot(slot)

    def give_up(self) -> None:
        """Abort the current refit, if there is one."""
        stream, self._open = self._open, None
        # Close a generator explicitly: its finally block frees gathered buckets.
        close = getattr(stream, "close", None)
        if close is not None:
            close()

    def close(self) -> None:
        """Close the IPC buffer and the mailbox."""
        self.give_up()
        self._let_go()
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def _let_go(self) -> None:
        if self._ipc_buffer is not None:
            self._ipc_buffer.close()
            self._ipc_buffer = None


class WeightReceiver:
    """Reads the weights that a ``WeightSender`` publishes.

    Args:
        manifest: manifest from the policy's refit info.
        device: device of this engine rank; ``torch.device("cuda")`` means the current one.

    Attributes:
        manifest: manifest of the current refit.
        version: version of the weights if they are complete; None before the first refit and during each
            refit.
    """

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        self.manifest = self._whole = manifest
        self._manifests = {manifest.digest: manifest}
        self.version: int | None = None
        self._runtime = runtime_on(device)
        self._ipc_buffer: IpcBuffer | None = None
        self._handle: BufferHandle | None = None
        self._mailbox: MailboxReader | None = None
        self._mailbox_handle: MailboxHandle | None = None
        self._refit: tuple[MailboxReader, int, str] | None = None
        self._next = 0
        self._views: dict[tuple[str, int, int, int], Weights] = {}

    def take_slices(self, slices: Slices) -> None:
        """Accept refits that send the weights in ``slices`` as these slices. Refits of full weights are
        always accepted."""
        self.version, self.manifest = None, self._whole.sliced(slices) if slices else self._whole
        # Accept both: the policy sends full weights until it has received the slices.
        self._manifests = {one.digest: one for one in (self._whole, self.manifest)}
        self._views.clear()

    @contextlib.contextmanager
    def group(self, payload: CarriedPayload) -> Iterator[Weights]:
        """Yield the weights of one group, to be loaded within the context. They are views of the policy's
        buffer and must be neither kept nor written.

        On a normal exit the copies queued on the device are awaited and the group is acknowledged. An error
        aborts the refit: the version stays None.

        Raises:
            RefitError: the handle is stale, from another model or out of order, or the data differs from what
                was sent.
        """
        self.version = None
        if self._mailbox is None or self._mailbox_handle != payload["mailbox"]:
            self._leave()
            self._mailbox, self._mailbox_handle = (
                MailboxReader(payload["mailbox"], _CARRIED),
                payload["mailbox"],
            )
        if payload["first"] == 0:
            self._mailbox.enter(payload["round"])
        with self._read(self._mailbox, payload["round"], payload) as weights:
            yield weights

    def receive(
        self,
        mailbox: MailboxReader,
        ticket: int,
        load: Load,
        patience: float = ENGINE_PATIENCE,
    ) -> None:
        """Receive all weights of a refit from the policy rank on this device.

        Args:
            mailbox: mailbox of that policy rank.
            ticket: id of the refit.
            load: called with names and tensors, which are valid until it returns.
            patience: timeout for a group, in seconds.

        Raises:
            RefitError: the policy aborted the refit, ended, or sent wrong data; the policy then does not wait
                for this rank.
        """
        self.version = None
        mailbox.enter(ticket)
        try:
            index = 0
            while self.version is None:
                with self._read(mailbox, ticket, mailbox.payload(ticket, index, patience)) as weights:
                    load(weights)
                index += 1
        except BaseException:
            self.version = None
            mailbox.refuse(ticket)
            raise

    @contextlib.contextmanager
    def _read(self, mailbox: MailboxReader, ticket: int, payload: GroupPayload) -> Iterator[Weights]:
        """Yield the weights of one group, which must be the next one."""
        self.version = None
        index, first = payload["index"], payload["first"]
        try:
            if payload["manifest"] not in self._manifests:
                raise RefitError(
                    "the policy's weights have other names, shapes or dtypes than its refit info: call "
                    "prepare_refit_info() again"
                )
            here = mailbox, ticket, payload["manifest"]
            if first == 0:
                self.manifest, self._refit, self._next = self._manifests[payload["manifest"]], here, 0
            if self._refit != here or first != self._next:
                expected = (
                    "the first group of a refit"
                    if self._refit is None
                    else f"weight {self._next} of refit {self._refit[1]}"
                )
                raise RefitError(
                    f"weight {first} of refit {ticket} came where {expected} was expected: start a new refit"
                )
            group = self.manifest.group(first, payload["count"])
            ipc_buffer, mark = self._buffer(payload["buffer"]), [mailbox.session, ticket, index]
            _require(ipc_buffer, mark)
            buffer = ipc_buffer.slot(index % SLOTS)
            if payload["checksum"] is not None and checksum(buffer[: group.nbytes]) != payload["checksum"]:
                raise RefitError(
                    f"the weights from {group.names[0]} on have another checksum than the policy's: start a "
                    "new refit"
                )
            # Create the views once: tens of thousands of new tensors per refit would cost more in the garbage
            # collector than in torch.
            key = (payload["manifest"], index % SLOTS, group.first, group.stop)
            if key not in self._views:
                self._views[key] = group.views(buffer)
            yield self._views[key]
            # Synchronise before acknowledging: afterwards the policy overwrites the slot, which a queued copy
            # would still read.
            self._runtime.synchronize()
            _require(ipc_buffer, mark)
        except BaseException:
            self._refit = None
            raise
        mailbox.has_read(ticket, index + 1)
        self._next = group.stop
        if self._next == len(self.manifest.tensors):
            self._refit = None
            self.version = int(payload["version"])

    def _buffer(self, handle: BufferHandle) -> IpcBuffer:
        """Return the policy's buffer. A policy that needs a larger buffer continues in a new one."""
        if self._ipc_buffer is None or self._handle != handle:
            self._let_go()
            self._ipc_buffer, self._handle = IpcBuffer.attach(handle, self._runtime.device), handle
        return self._ipc_buffer

    def _let_go(self) -> None:
        self._views.clear()
        if self._ipc_buffer is not None:
            self._ipc_buffer.close()
            self._ipc_buffer = None

    def _leave(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
            self._mailbox = None

    def close(self) -> None:
        """Release the policy's memory and leave its mailbox."""
        self.version = self._refit = None
        self._let_go()
        self._leave()


def _require(ipc_buffer: IpcBuffer, mark: list[int]) -> None:
    """Check that a slot still contains the group of a mark.

    Raises:
        RefitError: it does not.
    """
    if ipc_buffer.marks[mark[-1] % SLOTS].tolist() != mark:
        raise RefitError(
            "the buffer no longer holds the group of the handle: an old handle was used again, or "
            "the refit was aborted; start a new refit"
        )


def payload_for(handles: Mapping[str, CarriedPayload], device: str) -> CarriedPayload:
    """Return the payload that an engine rank reads: that of its device, or on a CPU that of its host.

    Args:
        handles: result of the policy's ``get_weights_ipc_handles``.
        device: identity of the engine rank's device.

    Raises:
        RefitError: there is no such payload.
    """
    return handles[beside({name: payload["mailbox"] for name, payload in handles.items()}, device)]
