"""Refits of engines apart from the policy: packed groups of weights over a ``TransferGroup``, one on its way
while one is packed.

Both sides go through all groups of a refit whatever happens, so that after a refit that was refused the next
one finds both where it expects them. Only a group of ranks of which one is gone is of no more use: it is
closed, so that nobody waits in it for the dead.
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

# Two: one is on its way while the other is packed or loaded. A third would take its memory from the groups,
# which are then smaller and more.
BUFFERS = 2
# in front of every group: int64 round, version, index of its first weight, checksum, whether there is one
HEADER, WORDS = ALIGNMENT, 5
CONFIRM_SECONDS = 120.0
# the round of groups that hold nothing, because the policy failed before
_GIVEN_UP = -1

Load = Callable[[list[tuple[str, torch.Tensor]]], None]


class _Channel:
    """One side of a group of ranks: two transfer buffers for a lifetime, each with a header, and the groups
    that go through them.

    A sender has the groups of its own stage. An engine has all groups in the one order of sending, whichever
    stage they come from; each stage has up to two of them ready, so that the next one comes at once. Who
    cannot have the buffers leaves the group of ranks, so that nobody waits for it there.

    Args:
        group: the ranks.
        manifest: what is sent.

    Raises:
        RefitError: there is no memory for the buffers, or a weight is larger than one.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        self._group, self._manifest, self._round = group, manifest, 0
        self._works: dict[int, list[dist.Work]] = {}
        try:
            size = HEADER + group.buffer_bytes
            # zeros, because what is between weights is sent as well, and is not to be what this process had
            # there before
            self._memory = [torch.zeros(size, dtype=torch.uint8, device=group.device) for _ in range(BUFFERS)]
            # Worked out on each side alone, from the same manifest and the same buffer size: no message has
            # to say what comes in which group.
            every = group.stages.parts(manifest, group.buffer_bytes)
            # with the stages that send them
            self.parts: list[tuple[int, Group]] = [
                part for part in every if part[0] == group.stage or not group.sends
            ]
        except Exception as error:
            group.close()
            if not is_out_of_memory(error):
                raise
            raise RefitError(
                f"no memory for {BUFFERS} buffers of {size} bytes: {error}; leave it more, or set a smaller "
                "policy.refit_buffer_size_gb"
            ) from error

    def _header(self, index: int) -> torch.Tensor:
        """int64 [``WORDS``], in front of group ``index``."""
        # A view of the buffer, so that header and weights travel as one broadcast; a second one would double
        # the latency of small groups.
        return self._memory[index % BUFFERS][: 8 * WORDS].view(torch.int64)

    def _content(self, index: int) -> torch.Tensor:
        """uint8, where the weights of group ``index`` are packed, and where they are once they came."""
        return self._memory[index % BUFFERS][HEADER : HEADER + self.parts[index][1].nbytes]

    def _start(self, index: int) -> None:
        """Begin to send or receive group ``index``."""
        stage, part = self.parts[index]
        buffer = self._memory[index % BUFFERS][: HEADER + part.nbytes]
        # By buffer and not by group: what has to be over before group n starts is the operation of group n -
        # BUFFERS.
        self._works.setdefault(index % BUFFERS, []).append(self._group.broadcast(buffer, stage))

    def _wait(self, index: int) -> None:
        """Until what the buffer of group ``index`` holds has gone out or come in."""
        self._group.wait(self._works.get(index % BUFFERS, []))

    @contextlib.contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Nobody is to wait for one that does not go through all groups, as after an interruption."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the group of ranks, so that nobody waits in it for this one."""
        for works in self._works.values():
            works.clear()
        self._group.close()


class WeightBroadcaster(_Channel):
    """The sending rank of a pipeline stage of the policy.

    Args:
        group: the ranks.
        manifest: what is sent.
        with_checksum: send a checksum with every group.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest, *, with_checksum: bool = False) -> None:
        super().__init__(group, manifest)
        self._with_checksum = with_checksum

    def send(self, stream: WeightIterator, version: int) -> None:
        """Send all weights of this stage and wait until every engine rank has confirmed those of all stages.

        Args:
            stream: the stage's weights, taken to its end whatever happens, because gathering it is collective
                among the ranks of the stage.
            version: of the weights, the same on all stages.

        Raises:
            RefitError: an engine or another stage is gone, an engine could not load the weights, or they are
                not what the manifest says.
        """
        self._round += 1
        packing: Exception | None = None
        sending: Exception | None = None
        with self._leaving_on_error():
            for index in range(len(self.parts)):
                # The buffer is written again only when its last operation is over. After a first failure
                # nothing more is sent, but packing goes on, which is collective.
                sending = sending or _failure_of(self._wait, index)
                # A failure is kept and not raised: the other ranks of this stage gather the same weights, and
                # would wait for this one.
                packing = packing or _failure_of(self._fill, index, stream, version)
                if packing is not None:
                    # The engines wait for every group that was announced, so that a failure here has to
                    # travel too.
                    self._head(index, [_GIVEN_UP, version, self.parts[index][1].first, 0, 0])
                sending = sending or _failure_of(self._start, index)
            # The last two groups may still be on their way.
            for slot in range(BUFFERS):
                sending = sending or _failure_of(self._wait, slot)
            if packing is not None:
                # whatever else fails there, the engines hear of the first failure
                _failure_of(drain, stream)
            refusals: list[str] = []
            if sending is None:
                try:
                    # Nobody serves a version that one of them lacks: all confirm before any is told to go on.
                    refusals = self._group.agree(str(packing or ""), CONFIRM_SECONDS)
                except RefitError as error:
                    sending = error
        # After an operation that was aborted the group's ranks are out of step for good.
        if sending is not None:
            self.close()
        # Of two failures packing came first: that the engines left is often its consequence.
        failure = packing or sending
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(f"the engines do not have the weights: {'; '.join(refusals)}")

    def _fill(self, index: int, stream: WeightIterator, version: int) -> None:
        part, content = self.parts[index][1], self._content(index)
        pack(stream, self._manifest, part, content)
        if index + 1 == len(self.parts):
            # What stands behind the last weight of a generator runs here (buckets are given back), and a
            # model that gives more weights than it announced is refused.
            expect_end(stream)
        number = checksum(content) if self._with_checksum else 0
        self._head(index, [self._round, version, part.first, number, int(self._with_checksum)])

    def _head(self, index: int, words: list[int]) -> None:
        # One copy from host memory: the words of a CUDA buffer set one by one would be five launches.
        self._header(index).copy_(torch.tensor(words))


class WeightListener(_Channel):
    """A rank of an engine.

    Args:
        group: the ranks.
        manifest: from the policy's refit info.

    Attributes:
        version: of the weights that are whole; None before the first refit and within one.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        super().__init__(group, manifest)
        self._views: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._coming = 0
        self.version: int | None = None

    def receive(self, load: Load) -> int:
        """Take all weights, ``load`` each group while the next one arrives, confirm, and return their
        version.

        Args:
            load: gets names and tensors that stand until it returns.

        Raises:
            RefitError: the policy is gone or in another refit, or the bytes are not those that were sent.
        """
        # From here until the end the engine has parts of two versions, and must not generate.
        self.version = None
        self._round += 1
        failure: Exception | None = None
        with self._leaving_on_error():
            # Both receives are posted at once, so that the sender never waits for this rank to ask.
            for index in range(min(BUFFERS, len(self.parts))):
                self._start(index)
            for index in range(len(self.parts)):
                self._wait(index)
                # After a failure the rest is received and thrown away: the sender and the other engines go
                # through all groups.
                failure = failure or _failure_of(self._take, index, load)
                if index + BUFFERS < len(self.parts):
                    self._start(index + BUFFERS)
            refusals = self._group.agree(
                f"{type(failure).__name__}: {failure}" if failure else "", CONFIRM_SECONDS
            )
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(
                "others could not load the weights, so that this engine does not serve them either: "
                f"{'; '.join(refusals)}"
            )
        # Only after all have agreed: an engine that loaded everything must not serve a version that another
        # one lacks.
        self.version = self._coming
        return self._coming

    def close(self) -> None:
        """Leave the group of ranks; what was received counts no more."""
        self.version = None
        super().close()

    def _take(self, index: int, load: Load) -> None:
        self._check(index)
        if index not in self._views:
            # the same tensors at every refit
            self._views[index] = self.parts[index][1].views(self._content(index))
        load(self._views[index])

    def _check(self, index: int) -> None:
        """That group ``index`` is that group of this refit, and that nothing happened to it."""
        part = self.parts[index][1]
        name = part.tensors[0].name
        round_, version, first, number, checked = self._header(index).tolist()
        if round_ == _GIVEN_UP:
            raise RefitError("the policy gave the refit up: look at its own error, and refit anew")
        # Groups come in one order on all ranks; another one is of a refit that this rank did not hear the end
        # of.
        if (round_, first) != (self._round, part.first):
            raise RefitError(
                f"weight {first} of refit {round_} came where weight {part.first} of refit {self._round} "
                f"was next: {NEW_GROUP}"
            )
        if index and version != self._coming:
            raise RefitError(
                f"version {version} of {name} came after version {self._coming} of other weights: refit all "
                "stages together"
            )
        if checked and checksum(self._content(index)) != number:
            raise RefitError(
                f"the weights from {name} on have another checksum than the policy's: refit anew"
            )
        self._coming = int(version)


def _failure_of(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """Return the error that ``action`` raises, or None."""
    try:
        action(*arguments)
    except Exception as failure:
        return failure
    return None
