"""Refits of engines apart from the policy: packed groups of weights over a :class:`TransferGroup`, one on its way while one is packed.

Both sides go through all groups of a refit whatever happens, so that after a refit that was refused the next one finds both where it
expects them. Only a group of ranks of which one is gone is of no more use: it is closed, so that nobody waits in it for the dead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from megarl.errors import RefitError
from megarl.weight_sync.checksum import checksum
from megarl.weight_sync.manifest import ALIGNMENT, Group, Manifest, TensorInfo, groups_within
from megarl.weight_sync.packing import Stream, expect_end, pack
from megarl.weight_sync.transfer_group import NEW_GROUP, TransferGroup

BUFFERS = 2
CONFIRM_SECONDS = 120.0
# in front of every group: int64 round, version, index of its first weight, checksum, whether there is one
_HEADER, _WORDS = ALIGNMENT, 5
# the round of groups that hold nothing, because the policy failed before
_GIVEN_UP = -1

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
        self._works: dict[int, dist.Work] = {}
        self.parts: list[Group] = []
        for names in groups_within(manifest.padded_sizes, group.buffer_bytes):
            self.parts.append(manifest.group(self.parts[-1].stop if self.parts else 0, len(names)))
        self.views = [manifest.views(part, self.bodies[index % BUFFERS]) for index, part in enumerate(self.parts)]

    def start(self, index: int) -> None:
        """Begin to send or receive group ``index``.

        Raises:
            RefitError: the group of ranks is broken.
        """
        self._works[index % BUFFERS] = self._group.broadcast(self._memory[index % BUFFERS][: _HEADER + self.parts[index].nbytes])

    def wait(self, slot: int) -> None:
        """Until what ``slot`` holds has gone out or come in.

        Raises:
            RefitError: it has not.
        """
        if slot not in self._works:
            return
        try:
            # no name for it: the error that it may raise would keep it, and it the connections
            self._works.pop(slot).wait()
        except RuntimeError as error:
            raise RefitError(f"weights did not get through: {error}; {NEW_GROUP}") from error

    def close(self) -> None:
        """Leave the group of ranks, so that nobody waits in it for this one."""
        self._works.clear()
        self._group.close()

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
            RefitError: an engine is gone or could not load the weights, or they are not what the manifest says.
        """
        channel = self._channel
        channel.round += 1
        packing: Exception | None = None
        sending: Exception | None = None
        for index in range(len(channel.parts)):
            sending = sending or _failure_of(channel.wait, index % BUFFERS)
            packing = packing or _failure_of(self._pack, index, stream)
            self._announce(index, version, given_up=packing is not None)
            sending = sending or _failure_of(channel.start, index)
        for slot in range(BUFFERS):
            sending = sending or _failure_of(channel.wait, slot)
        if packing is not None:
            _take_the_rest(stream)
        refusals: list[str] = []
        if sending is None:
            try:
                refusals = self._group.agree(channel.round, str(packing or ""), CONFIRM_SECONDS)
            except RefitError as error:
                sending = error
        if sending is not None:
            channel.close()
        failure = packing or sending
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(f"engines could not load the weights: {'; '.join(refusals)}")

    def close(self) -> None:
        """Leave the group of ranks."""
        self._channel.close()

    def _pack(self, index: int, stream: Stream) -> None:
        pack(stream, self._channel.infos(index), self._channel.views[index])
        if index + 1 == len(self._channel.parts):
            expect_end(stream)

    def _announce(self, index: int, version: int, *, given_up: bool) -> None:
        channel, part, slot = self._channel, self._channel.parts[index], index % BUFFERS
        number = checksum(channel.bodies[slot][: part.nbytes]) if self._with_checksum and not given_up else 0
        round_ = _GIVEN_UP if given_up else channel.round
        channel.headers[slot].copy_(torch.tensor([round_, version, part.first, number, int(self._with_checksum)]))


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
        self._coming = 0
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
        failure: Exception | None = None
        try:
            for index in range(min(BUFFERS, len(channel.parts))):
                channel.start(index)
            for index in range(len(channel.parts)):
                channel.wait(index % BUFFERS)
                failure = failure or _failure_of(self._take, index, load)
                if index + BUFFERS < len(channel.parts):
                    channel.start(index + BUFFERS)
            refusals = self._group.agree(channel.round, f"{type(failure).__name__}: {failure}" if failure else "", CONFIRM_SECONDS)
        except RefitError:
            channel.close()
            raise
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(f"others could not load the weights, so that this engine does not serve them either: {'; '.join(refusals)}")
        self.version = self._coming
        return self._coming

    def close(self) -> None:
        """Leave the group of ranks; what was received counts no more."""
        self.version = None
        self._channel.close()

    def _take(self, index: int, load: Load) -> None:
        channel = self._channel
        self._check(index)
        load([(info.name, view) for info, view in zip(channel.infos(index), channel.views[index], strict=True)])

    def _check(self, index: int) -> None:
        """That group ``index`` is that group of this refit, and that nothing happened to it."""
        channel, part, slot = self._channel, self._channel.parts[index], index % BUFFERS
        round_, version, first, number, checked = channel.headers[slot].tolist()
        if round_ == _GIVEN_UP:
            raise RefitError("the policy gave the refit up: look at its own error, and refit anew")
        if (round_, first) != (channel.round, part.first):
            raise RefitError(
                f"weight {first} of refit {round_} came where weight {part.first} of refit {channel.round} was next: {NEW_GROUP}"
            )
        if checked and checksum(channel.bodies[slot][: part.nbytes]) != number:
            name = channel.infos(index)[0].name
            raise RefitError(f"the weights from {name} on have another checksum than the policy's: refit anew")
        self._coming = int(version)


def _failure_of(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """What ``action`` raises, if it does."""
    try:
        action(*arguments)
    except Exception as failure:
        return failure
    return None


def _take_the_rest(stream: Stream) -> None:
    """The weights that are left; they are gathered by all ranks of the policy, so that every rank has to go through them."""
    for _ in stream:
        pass
