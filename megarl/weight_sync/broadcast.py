"""Refits of engines apart from the policy: packed groups of weights over a ``TransferGroup``, one on its way while one is packed.

Both sides go through all groups of a refit whatever happens, so that after a refit that was refused the next one finds both where it
expects them. Only a group of ranks of which one is gone is of no more use: it is closed, so that nobody waits in it for the dead.

A ``DeltaChannel`` sends what changed since the last refit, bit by bit: positions and values of the words that differ. Words are compared as
integers, so that a NaN keeps its payload and -0.0 is another number than 0.0; what lies between the weights is zero on both sides. Both
sides keep the bytes of the last refit, as much memory again as the weights take. A delta is bound to the version it starts from: an engine
that has another one refuses it, and after a refit that failed on any rank the next one comes whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megarl.distributed.device import is_out_of_memory
from megarl.errors import RefitError
from megarl.weight_sync.layout import ALIGNMENT, Group, TensorInfo, checksum, padded_bytes
from megarl.weight_sync.manifest import Manifest, WeightIterator, drain, expect_end, pack
from megarl.weight_sync.transfer_group import NEW_GROUP, TransferGroup

BUFFERS = 2
# in front of every group: int64 round, version, index of its first weight, checksum, whether there is one, version that a delta is
# against, changed words of the delta (-1 where the group comes whole)
HEADER, WORDS = ALIGNMENT, 7
WHOLE = -1, -1
# of a group that nobody will look at
NO_BODY = -1, 0


class Channel:
    """Two transfer buffers for a lifetime, each with a header, and the groups of weights that go through them, whole.

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
        self._memory = [torch.empty(HEADER + group.buffer_bytes, dtype=torch.uint8, device=group.device) for _ in range(BUFFERS)]
        self._headers = [buffer[: 8 * WORDS].view(torch.int64) for buffer in self._memory]
        self._bodies = [buffer[HEADER:] for buffer in self._memory]
        self._works: dict[int, list[dist.Work]] = {}
        every = group.stages.parts(manifest, group.buffer_bytes)
        coming = [(stage, part) for stage, part in every if stage == group.stage or not group.sends]
        self.parts: list[Group] = [part for _, part in coming]
        self._stages = [stage for stage, _ in coming]
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._contents = [self._bodies[index % BUFFERS][: part.nbytes] for index, part in enumerate(self.parts)]

    def infos(self, index: int) -> tuple[TensorInfo, ...]:
        """The weights of group ``index``."""
        return self.manifest.tensors[self.parts[index].first : self.parts[index].stop]

    def header(self, index: int) -> torch.Tensor:
        """int64 [``WORDS``], in front of group ``index``."""
        return self._headers[index % BUFFERS]

    def content(self, index: int) -> torch.Tensor:
        """uint8, where the weights of group ``index`` are packed, and where they are once they came."""
        return self._contents[index]

    def named_views(self, index: int) -> list[tuple[str, torch.Tensor]]:
        """Receiver: names and weights of group ``index``, the same tensors at every refit."""
        if index not in self._views:
            self._views[index] = self.manifest.named_views(self.parts[index], self.content(index))
        return self._views[index]

    # a refit

    def begin(self) -> None:
        """A refit begins."""
        self.round += 1

    def succeeded(self, version: int) -> None:
        """All ranks have all weights of ``version``."""

    def seal(self, index: int) -> tuple[int, int]:
        """Sender: group ``index`` is packed. The last two words of its header."""
        return WHOLE

    def unseal(self, index: int) -> None:
        """Receiver: group ``index`` is the right one, and its weights are wanted."""

    def start(self, index: int) -> None:
        """Begin to send or receive group ``index``.

        Raises:
            RefitError: the group of ranks is broken.
        """
        self._broadcast(index, self._memory[index % BUFFERS][: HEADER + self.parts[index].nbytes])

    def _broadcast(self, index: int, buffer: torch.Tensor) -> None:
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


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POSITION = torch.int32


def changed(base: torch.Tensor, new: torch.Tensor, word: int, most: int) -> torch.Tensor | None:
    """Positions of the words that differ, int32, ascending; None where their delta would take more than ``most`` bytes.

    Args:
        base, new: uint8, as long as one another, a multiple of ``word``.
        word: bytes of a word: 1, 2, 4 or 8.
        most: bytes.
    """
    kind = _INTEGERS[word]
    differ = base.view(kind) != new.view(kind)
    if delta_bytes(int(differ.sum()), word) > most or differ.numel() > torch.iinfo(_POSITION).max:
        return None
    return torch.nonzero(differ).flatten().to(_POSITION)


def delta_bytes(count: int, word: int) -> int:
    """Bytes that ``count`` changed words take on their way: their positions, and from the next place that suits every type their values."""
    return padded_bytes(count * _POSITION.itemsize) + count * word


def write_delta(positions: torch.Tensor, new: torch.Tensor, word: int, into: torch.Tensor) -> None:
    """Lay what changed into a buffer.

    Args:
        positions: from ``changed``.
        new: uint8, the present bytes.
        word: bytes of a word.
        into: uint8, at least ``delta_bytes`` long.
    """
    where, values = _parts(into, positions.numel(), word)
    where.copy_(positions)
    values.copy_(new.view(_INTEGERS[word]).index_select(0, positions))


def apply_delta(base: torch.Tensor, delta: torch.Tensor, count: int, word: int) -> None:
    """Bring ``base`` to where the sender's bytes are.

    Args:
        base: uint8, what was sent last; changed in place.
        delta: from ``write_delta``.
        count: of the changed words.
        word: bytes of a word.
    """
    where, values = _parts(delta, count, word)
    base.view(_INTEGERS[word]).index_copy_(0, where.to(torch.int64), values)


def _parts(buffer: torch.Tensor, count: int, word: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and values of ``count`` words in a buffer."""
    start = padded_bytes(count * _POSITION.itemsize)
    return buffer[: count * _POSITION.itemsize].view(_POSITION), buffer[start : start + count * word].view(_INTEGERS[word])


class DeltaChannel(Channel):
    """Channel of deltas. A group of weights comes whole when its delta would take more than ``group.delta_share`` of its bytes.

    Args:
        group: the ranks.
        manifest: what is sent.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        super().__init__(group, manifest)
        self._sends = group.sends
        self._base = [torch.zeros(part.nbytes, dtype=torch.uint8, device=group.device) for part in self.parts]
        self._words = [min(info.dtype.itemsize for info in self.infos(index)) for index in range(len(self.parts))]
        self._most = [int(group.delta_share * part.nbytes) for part in self.parts]
        # the bytes of the last refit are of this version; None when they are of none
        self._base_version: int | None = None
        self._against: int | None = None
        if self._sends:
            self._deltas = [torch.empty(max(self._most, default=0), dtype=torch.uint8, device=group.device) for _ in range(BUFFERS)]
        else:
            self._deltas = self._bodies
            self._contents = self._base

    def begin(self) -> None:
        super().begin()
        self._against, self._base_version = self._base_version, None

    def succeeded(self, version: int) -> None:
        self._base_version = version

    def seal(self, index: int) -> tuple[int, int]:
        """Close the group's message with what changed.

        Raises:
            RefitError: there is no memory to find it.
        """
        new, base, word = self.content(index), self._base[index], self._words[index]
        with _enough_memory(base):
            positions = None if self._against is None else changed(base, new, word, self._most[index])
            if positions is not None:
                write_delta(positions, new, word, self._deltas[index % BUFFERS])
        base.copy_(new)
        return WHOLE if positions is None or self._against is None else (self._against, positions.numel())

    def unseal(self, index: int) -> None:
        """Bring the kept bytes up to date.

        Raises:
            RefitError: the delta is against another version than that of the kept bytes, or there is no memory to take it.
        """
        against, count = self.header(index)[-2:].tolist()
        if count < 0:
            return
        if against != self._against:
            has = "none" if self._against is None else f"version {self._against}"
            raise RefitError(f"changes against version {against} of the weights came to an engine that has {has}: refit anew, whole")
        with _enough_memory(self._base[index]):
            apply_delta(self._base[index], self._deltas[index % BUFFERS], count, self._words[index])

    def start(self, index: int) -> None:
        """Sender: a header and a body. A receiver learns from the header how long the body is, so that it begins in ``wait``."""
        if self._sends:
            self._broadcast(index, self._memory[index % BUFFERS][:HEADER])
            self._start_body(index)

    def wait(self, index: int) -> None:
        if not self._sends:
            # one after the other: the order of broadcasts has to be the sender's
            self._broadcast(index, self._memory[index % BUFFERS][:HEADER])
            super().wait(index)
            self._start_body(index)
        super().wait(index)

    def _start_body(self, index: int) -> None:
        count = int(self.header(index)[-1])
        delta = self._deltas[index % BUFFERS]
        body = self.content(index) if count < 0 else delta[: delta_bytes(count, self._words[index])]
        if body.numel():
            self._broadcast(index, body)


@contextlib.contextmanager
def _enough_memory(weights: torch.Tensor) -> Iterator[None]:
    """Turn a lack of memory for a delta of ``weights`` into an error that says so."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RefitError(
            f"no memory for what changed in {weights.numel()} bytes of weights: {error}; Fix: set a smaller policy.refit_buffer_size_gb, "
            "or set refit_delta_share: 0 in the engine's section"
        ) from error


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
        return DeltaChannel(group, manifest) if group.delta_share else Channel(group, manifest)
    except Exception as error:
        group.close()
        if not is_out_of_memory(error):
            raise
        kept, fix = "", "leave it more, or set a smaller policy.refit_buffer_size_gb"
        if group.delta_share:
            kept = f", and {manifest.total_bytes} bytes to keep what was sent last"
            fix += ", or set refit_delta_share: 0 in the engine's section"
        raise RefitError(f"no memory for {BUFFERS} buffers of {HEADER + group.buffer_bytes} bytes{kept}: {error}; {fix}") from error


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
        channel.begin()
        packing: Exception | None = None
        sending: Exception | None = None
        with _leaving_on_error(channel):
            for index in range(len(channel.parts)):
                sending = sending or _failure_of(channel.wait, index)
                packing = packing or _failure_of(self._fill, index, stream, version)
                if packing is not None:
                    self._head(index, [_GIVEN_UP, version, channel.parts[index].first, 0, 0, *NO_BODY])
                sending = sending or _failure_of(channel.start, index)
            for slot in range(BUFFERS):
                sending = sending or _failure_of(channel.wait, slot)
            if packing is not None:
                # whatever else fails there, the engines hear of the first failure
                _failure_of(drain, stream)
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
            raise RefitError(f"the engines do not have the weights: {'; '.join(refusals)}")
        channel.succeeded(version)

    def close(self) -> None:
        """Leave the group of ranks."""
        self._channel.close()

    def _fill(self, index: int, stream: WeightIterator, version: int) -> None:
        channel = self._channel
        pack(stream, channel.manifest, channel.parts[index], channel.content(index))
        if index + 1 == len(channel.parts):
            expect_end(stream)
        number = checksum(channel.content(index)) if self._with_checksum else 0
        self._head(index, [channel.round, version, channel.parts[index].first, number, int(self._with_checksum), *channel.seal(index)])

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
        channel.begin()
        failure: Exception | None = None
        with _leaving_on_error(channel):
            for index in range(min(BUFFERS, len(channel.parts))):
                channel.start(index)
            for index in range(len(channel.parts)):
                channel.wait(index)
                failure = failure or _failure_of(self._take, index, load)
                if index + BUFFERS < len(channel.parts):
                    channel.start(index + BUFFERS)
            refusals = self._group.agree(channel.round, f"{type(failure).__name__}: {failure}" if failure else "", CONFIRM_SECONDS)
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(f"others could not load the weights, so that this engine does not serve them either: {'; '.join(refusals)}")
        channel.succeeded(self._coming)
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
        channel, first_here = self._channel, self._channel.parts[index].first
        round_, version, first, number, checked = channel.header(index)[:5].tolist()
        if round_ == _GIVEN_UP:
            raise RefitError("the policy gave the refit up: look at its own error, and refit anew")
        if (round_, first) != (channel.round, first_here):
            raise RefitError(
                f"weight {first} of refit {round_} came where weight {first_here} of refit {channel.round} was next: {NEW_GROUP}"
            )
        if index and version != self._coming:
            name = channel.infos(index)[0].name
            raise RefitError(f"version {version} of {name} came after version {self._coming} of other weights: refit all stages together")
        channel.unseal(index)
        if checked and checksum(channel.content(index)) != number:
            name = channel.infos(index)[0].name
            raise RefitError(f"the weights from {name} on have another checksum than the policy's: refit anew")
        self._coming = int(version)


def _failure_of(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """Return the error that ``action`` raises, or None."""
    try:
        action(*arguments)
    except Exception as failure:
        return failure
    return None
