"""Refits of engines apart from the policy: packed groups of weights over a ``TransferGroup``, one on its way while one is packed.

Both sides go through all groups of a refit whatever happens, so that after a refit that was refused the next one finds both where it
expects them. Only a group of ranks of which one is gone is of no more use: it is closed, so that nobody waits in it for the dead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megarl.distributed.device import is_out_of_memory
from megarl.errors import RefitError
from megarl.weight_sync.manifest import Manifest, WeightIterator, drain, expect_end, pack
from megarl.weight_sync.plan import ALIGNMENT, Group, checksum
from megarl.weight_sync.transfer_group import NEW_GROUP, TransferGroup

BUFFERS = 2
# in front of every group: int64 round, version, index of its first weight, checksum, whether there is one
HEADER, WORDS = ALIGNMENT, 5


class Channel:
    """Two transfer buffers for a lifetime, each with a header, and the groups of weights that go through them.

    A sender has the groups of its own stage. An engine has all groups in the one order of sending, whichever stage they come from; each
    stage has up to two of them ready, so that the next one comes at once.

    Args:
        group: the ranks.
        manifest: what is sent.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        self._group = group
        self.manifest = manifest
        self.round = 0
        # zeros, because what is between weights is sent as well, and is not to be what this process had there before
        self._memory = [torch.zeros(HEADER + group.buffer_bytes, dtype=torch.uint8, device=group.device) for _ in range(BUFFERS)]
        self._headers = [buffer[: 8 * WORDS].view(torch.int64) for buffer in self._memory]
        self._bodies = [buffer[HEADER:] for buffer in self._memory]
        self._works: dict[int, list[dist.Work]] = {}
        every = group.stages.parts(manifest, group.buffer_bytes)
        coming = [(stage, part) for stage, part in every if stage == group.stage or not group.sends]
        self.parts: list[Group] = [part for _, part in coming]
        self._stages = [stage for stage, _ in coming]
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}

    def header(self, index: int) -> torch.Tensor:
        """int64 [``WORDS``], in front of group ``index``."""
        return self._headers[index % BUFFERS]

    def content(self, index: int) -> torch.Tensor:
        """uint8, where the weights of group ``index`` are packed, and where they are once they came."""
        return self._bodies[index % BUFFERS][: self.parts[index].nbytes]

    def named_views(self, index: int) -> list[tuple[str, torch.Tensor]]:
        """Receiver: names and weights of group ``index``, the same tensors at every refit."""
        if index not in self._views:
            self._views[index] = self.parts[index].views(self.content(index))
        return self._views[index]

    def start(self, index: int) -> None:
        """Begin to send or receive group ``index``.

        Raises:
            RefitError: the group of ranks is broken.
        """
        buffer = self._memory[index % BUFFERS][: HEADER + self.parts[index].nbytes]
        with _getting_through():
            self._works.setdefault(index % BUFFERS, []).append(self._group.broadcast(buffer, self._stages[index]))

    def wait(self, index: int) -> None:
        """Until what the buffer of group ``index`` holds has gone out or come in.

        Raises:
            RefitError: it has not.
        """
        with _getting_through():
            self._group.wait(self._works.get(index % BUFFERS, []))

    def close(self) -> None:
        """Leave the group of ranks, so that nobody waits in it for this one."""
        for works in self._works.values():
            works.clear()
        self._group.close()


@contextlib.contextmanager
def _getting_through() -> Iterator[None]:
    """Turn torch's errors of a broken group into errors of megarl."""
    try:
        yield
    except RefitError:
        raise
    except RuntimeError as error:
        raise RefitError(f"weights did not get through: {error}; {NEW_GROUP}") from error


CONFIRM_SECONDS = 120.0
# the round of groups that hold nothing, because the policy failed before
_GIVEN_UP = -1

Load = Callable[[list[tuple[str, torch.Tensor]]], None]


def _channel_of(group: TransferGroup, manifest: Manifest) -> Channel:
    """The buffers of one side; who cannot have them leaves the group, so that nobody waits for it there.

    Raises:
        RefitError: there is no memory for them, or a weight is larger than one.
    """
    try:
        return Channel(group, manifest)
    except Exception as error:
        group.close()
        if not is_out_of_memory(error):
            raise
        raise RefitError(
            f"no memory for {BUFFERS} buffers of {HEADER + group.buffer_bytes} bytes: {error}; leave it more, or set a smaller "
            "policy.refit_buffer_size_gb"
        ) from error


@contextlib.contextmanager
def _leaving_on_error(channel: Channel) -> Iterator[None]:
    """Nobody is to wait for one that does not go through all groups, as after an interruption."""
    try:
        yield
    except BaseException:
        channel.close()
        raise


class WeightBroadcaster:
    """The sending rank of a pipeline stage of the policy.

    Args:
        group: the ranks.
        manifest: what is sent.
        with_checksum: send a checksum with every group.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest, *, with_checksum: bool = False) -> None:
        self._group = group
        self._channel = _channel_of(group, manifest)
        self._with_checksum = with_checksum

    def send(self, stream: WeightIterator, version: int) -> None:
        """Send all weights of this stage and wait until every engine rank has confirmed those of all stages.

        Args:
            stream: the stage's weights, taken to its end whatever happens, because gathering it is collective among the ranks of the stage.
            version: of the weights, the same on all stages.

        Raises:
            RefitError: an engine or another stage is gone, an engine could not load the weights, or they are not what the manifest says.
        """
        channel = self._channel
        channel.round += 1
        packing: Exception | None = None
        sending: Exception | None = None
        with _leaving_on_error(channel):
            for index in range(len(channel.parts)):
                sending = sending or _failure_of(channel.wait, index)
                packing = packing or _failure_of(self._fill, index, stream, version)
                if packing is not None:
                    self._head(index, [_GIVEN_UP, version, channel.parts[index].first, 0, 0])
                sending = sending or _failure_of(channel.start, index)
            for slot in range(BUFFERS):
                sending = sending or _failure_of(channel.wait, slot)
            if packing is not None:
                # whatever else fails there, the engines hear of the first failure
                _failure_of(drain, stream)
            refusals: list[str] = []
            if sending is None:
                try:
                    refusals = self._group.agree(str(packing or ""), CONFIRM_SECONDS)
                except RefitError as error:
                    sending = error
        if sending is not None:
            channel.close()
        failure = packing or sending
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(f"the engines do not have the weights: {'; '.join(refusals)}")

    def close(self) -> None:
        """Leave the group of ranks."""
        self._channel.close()

    def _fill(self, index: int, stream: WeightIterator, version: int) -> None:
        channel = self._channel
        pack(stream, channel.manifest, channel.parts[index], channel.content(index))
        if index + 1 == len(channel.parts):
            expect_end(stream)
        number = checksum(channel.content(index)) if self._with_checksum else 0
        self._head(index, [channel.round, version, channel.parts[index].first, number, int(self._with_checksum)])

    def _head(self, index: int, words: list[int]) -> None:
        self._channel.header(index).copy_(torch.tensor(words))


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
        self._channel = _channel_of(group, manifest)
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
        with _leaving_on_error(channel):
            for index in range(min(BUFFERS, len(channel.parts))):
                channel.start(index)
            for index in range(len(channel.parts)):
                channel.wait(index)
                failure = failure or _failure_of(self._take, index, load)
                if index + BUFFERS < len(channel.parts):
                    channel.start(index + BUFFERS)
            refusals = self._group.agree(f"{type(failure).__name__}: {failure}" if failure else "", CONFIRM_SECONDS)
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
        load(channel.named_views(index))

    def _check(self, index: int) -> None:
        """That group ``index`` is that group of this refit, and that nothing happened to it."""
        channel = self._channel
        first_here, name = channel.parts[index].first, channel.parts[index].tensors[0].name
        round_, version, first, number, checked = channel.header(index).tolist()
        if round_ == _GIVEN_UP:
            raise RefitError("the policy gave the refit up: look at its own error, and refit anew")
        if (round_, first) != (channel.round, first_here):
            raise RefitError(
                f"weight {first} of refit {round_} came where weight {first_here} of refit {channel.round} was next: {NEW_GROUP}"
            )
        if index and version != self._coming:
            raise RefitError(f"version {version} of {name} came after version {self._coming} of other weights: refit all stages together")
        if checked and checksum(channel.content(index)) != number:
            raise RefitError(f"the weights from {name} on have another checksum than the policy's: refit anew")
        self._coming = int(version)


def _failure_of(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """Return the error that ``action`` raises, or None."""
    try:
        action(*arguments)
    except Exception as failure:
        return failure
    return None
