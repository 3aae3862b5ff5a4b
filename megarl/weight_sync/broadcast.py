"""Refits of engines apart from the policy: packed groups of weights over a :class:`TransferGroup`, one on its way while one is packed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from megarl.errors import RefitError
from megarl.weight_sync.checksum import checksum
from megarl.weight_sync.manifest import ALIGNMENT, Group, Manifest, TensorInfo, groups_within
from megarl.weight_sync.sender import Stream
from megarl.weight_sync.transfer_group import TransferGroup

BUFFERS = 2
CONFIRM_SECONDS = 120.0
# in front of every group: int64 round, version, index of its first weight, checksum, whether there is one
_HEADER, _WORDS = ALIGNMENT, 5

Load = Callable[[list[tuple[str, torch.Tensor]]], None]


class _Channel:
    """Two transfer buffers for a lifetime, each with a header, and the groups of weights that go through them.

    Args:
        group: the ranks.
        manifest: what is sent.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        self._group = group
        self.manifest = manifest
        self.round = 0
        self._memory = [torch.empty(_HEADER + group.buffer_bytes, dtype=torch.uint8, device=group.device) for _ in range(BUFFERS)]
        self.headers = [buffer[: 8 * _WORDS].view(torch.int64) for buffer in self._memory]
        self.bodies = [buffer[_HEADER:] for buffer in self._memory]
        self._works: list[dist.Work | None] = [None] * BUFFERS
        self.parts: list[Group] = []
        for names in groups_within(manifest.padded_sizes, group.buffer_bytes):
            self.parts.append(manifest.group(self.parts[-1].stop if self.parts else 0, len(names)))
        self.views = [manifest.views(part, self.bodies[index % BUFFERS]) for index, part in enumerate(self.parts)]

    def start(self, index: int) -> None:
        """Begin to send or receive group ``index``."""
        self._works[index % BUFFERS] = self._group.broadcast(self._memory[index % BUFFERS][: _HEADER + self.parts[index].nbytes])

    def wait(self, slot: int) -> None:
        """Until what ``slot`` holds has gone out or come in.

        Raises:
            RefitError: it has not.
        """
        work, self._works[slot] = self._works[slot], None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise RefitError(f"weights did not get through: {error}; make a new group and refit anew") from error

    def infos(self, index: int) -> tuple[TensorInfo, ...]:
        """The weights of group ``index``."""
        return self.manifest.tensors[self.parts[index].first : self.parts[index].stop]


class WeightBroadcaster:
    """The policy's sending rank.

    Args:
        group: the ranks.
        manifest: what is sent.
        with_checksum: send a checksum with every group.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest, *, with_checksum: bool = False) -> None:
        self._group = group
        self._channel = _Channel(group, manifest)
        self._with_checksum = with_checksum

    def send(self, stream: Stream, version: int) -> None:
        """Send all weights and wait until every engine rank has confirmed them.

        The stream is taken to its end whatever happens, because gathering it is collective among the ranks of the policy.

        Raises:
            RefitError: an engine is gone, or the weights are not what the manifest says.
        """
        channel = self._channel
        channel.round += 1
        failure: RefitError | None = None
        for index in range(len(channel.parts)):
            try:
                if failure is None:
                    channel.wait(index % BUFFERS)
                self._fill(index, stream)
                if failure is None:
                    self._announce(index, version)
                    channel.start(index)
            except RefitError as error:
                failure = failure or error
        for _ in stream:
            failure = failure or RefitError("the policy gives more weights than were announced: make a new policy and engine")
        if failure is not None:
            raise failure
        for slot in range(BUFFERS):
            channel.wait(slot)
        self._group.wait_until_confirmed(channel.round, CONFIRM_SECONDS)

    def _announce(self, index: int, version: int) -> None:
        channel, part, slot = self._channel, self._channel.parts[index], index % BUFFERS
        number = checksum(channel.bodies[slot][: part.nbytes]) if self._with_checksum else 0
        channel.headers[slot].copy_(torch.tensor([channel.round, version, part.first, number, int(self._with_checksum)]))

    def _fill(self, index: int, stream: Stream) -> None:
        for info, view in zip(self._channel.infos(index), self._channel.views[index], strict=True):
            name, tensor = next(stream, ("nothing", torch.empty(0)))
            if not info.fits(name, tensor):
                raise RefitError(f"the policy gives {name} where {info} was announced: make a new policy and engine after changing a model")
            view.copy_(tensor)


class WeightListener:
    """A rank of an engine.

    Args:
        group: the ranks.
        manifest: from the policy's refit info.

    Attributes:
        version: of the weights that are whole; None before the first refit and within one.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        self._group = group
        self._channel = _Channel(group, manifest)
        self.version: int | None = None

    def receive(self, load: Load) -> int:
        """Take all weights, ``load`` each group while the next one arrives, confirm, and return their version.

        Args:
            load: gets names and tensors that stand until it returns.

        Raises:
            RefitError: the policy is gone or in another refit, or the bytes are not those that were sent.
        """
        channel = self._channel
        self.version = None
        channel.round += 1
        version = 0
        for index in range(min(BUFFERS, len(channel.parts))):
            channel.start(index)
        for index in range(len(channel.parts)):
            channel.wait(index % BUFFERS)
            version = self._checked(index)
            load([(info.name, view) for info, view in zip(channel.infos(index), channel.views[index], strict=True)])
            if index + BUFFERS < len(channel.parts):
                channel.start(index + BUFFERS)
        self._group.confirm(channel.round)
        self.version = version
        return version

    def _checked(self, index: int) -> int:
        """The version that group ``index`` is of, if it is that group of this refit and nothing happened to it."""
        channel, part, slot = self._channel, self._channel.parts[index], index % BUFFERS
        round_, version, first, number, checked = channel.headers[slot].tolist()
        if (round_, first) != (channel.round, part.first):
            raise RefitError(
                f"weight {first} of refit {round_} came where weight {part.first} of refit {channel.round} was next: make a new group"
            )
        if checked and checksum(channel.bodies[slot][: part.nbytes]) != number:
            name = channel.infos(index)[0].name
            raise RefitError(f"the weights from {name} on have another checksum than the policy's: refit anew")
        return int(version)
