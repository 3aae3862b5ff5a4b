"""Refits of engines on other devices than the policy: groups of weights are packed and broadcast over a
``TransferGroup``, one in transfer while the next is packed.

Both sides process all groups of a refit, even after an error, so that the next refit finds both in step. Only
a lost rank makes its process group unusable; the group is then closed, so that nobody waits for that rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from megarl.distributed.device import is_out_of_memory
from megarl.errors import RefitError
from megarl.weight_sync.manifest import Manifest, drain, expect_end, pack
from megarl.weight_sync.plan import ALIGNMENT, Group, Load, WeightIterator, Weights, checksum
from megarl.weight_sync.transfer_group import NEW_GROUP, TransferGroup

# With two buffers, one is in transfer while the other is packed or loaded. A third would make each smaller
# and the groups more numerous.
BUFFERS = 2
# Each group starts with a header of int64 words: round, version, index of its first tensor, checksum, and
# whether there is a checksum.
HEADER, WORDS = ALIGNMENT, 5
CONFIRM_SECONDS = 120.0
# Round that marks groups without content, after the policy failed.
_GIVEN_UP = -1


class _Channel:
    """One side of a process group: two transfer buffers, each with a header, and the groups of weights that
    go through them.

    A sender has the groups of its own stage. An engine has the groups of all stages in sending order, and
    posts the receives of two groups in advance. A rank that cannot allocate the buffers leaves the process
    group, so that nobody waits for it.

    Args:
        group: the process group.
        manifest: the weights to transfer.

    Raises:
        RefitError: there is too little memory for the buffers, or a tensor is larger than a buffer.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        self._group, self._manifest, self._round = group, manifest, 0
        self._works: dict[int, list[dist.Work]] = {}
        try:
            size = HEADER + group.buffer_bytes
            # Zeros: the gaps between tensors are sent too and must not contain other data of this process.
            self._memory = [torch.zeros(size, dtype=torch.uint8, device=group.device) for _ in range(BUFFERS)]
            # Each side derives the groups from the same manifest and buffer size, so no message needs to
            # describe them.
            every = group.stages.parts(manifest, group.buffer_bytes)
            # Pairs of sending stage and group.
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
        """Return the header of group ``index``, int64 [``WORDS``]."""
        # A view of the buffer: one broadcast sends header and weights, and a second one would double the
        # latency of small groups.
        return self._memory[index % BUFFERS][: 8 * WORDS].view(torch.int64)

    def _content(self, index: int) -> torch.Tensor:
        """Return the part of the buffer (uint8) that contains the weights of group ``index``."""
        return self._memory[index % BUFFERS][HEADER : HEADER + self.parts[index][1].nbytes]

    def _start(self, index: int) -> None:
        """Start sending or receiving group ``index``."""
        stage, part = self.parts[index]
        buffer = self._memory[index % BUFFERS][: HEADER + part.nbytes]
        # Store operations by buffer: group n must wait for the operation of group n - BUFFERS.
        self._works.setdefault(index % BUFFERS, []).append(self._group.broadcast(buffer, stage))

    def _wait(self, index: int) -> None:
        """Wait until all operations on the buffer of group ``index`` are done."""
        self._group.wait(self._works.get(index % BUFFERS, []))

    @contextlib.contextmanager
    def _leaving_on_error(self) -> Iterator[None]:
        """Leave the process group after any error within the context, KeyboardInterrupt included, so that
        nobody waits for this rank."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leave the process group, so that nobody in it waits for this rank."""
        for works in self._works.values():
            works.clear()
        self._group.close()


class WeightBroadcaster(_Channel):
    """The sending rank of one pipeline stage of the policy.

    Args:
        group: the process group.
        manifest: the weights to transfer.
        with_checksum: send a checksum with every group.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest, *, with_checksum: bool = False) -> None:
        super().__init__(group, manifest)
        self._with_checksum = with_checksum

    def send(self, stream: WeightIterator, version: int) -> None:
        """Send all weights of this stage, and wait until every engine rank has confirmed the weights of all
        stages.

        Args:
            stream: the stage's weights. It is consumed to the end even after an error, because gathering is
                collective over the ranks of the stage.
            version: version of the weights, equal on all stages.

        Raises:
            RefitError: an engine or another stage is gone, an engine could not load the weights, or the
                weights do not match the manifest.
        """
        self._round += 1
        packing: Exception | None = None
        sending: Exception | None = None
        with self._leaving_on_error():
            for index in range(len(self.parts)):
                # Reuse a buffer only after its last operation. After a failed transfer nothing more is sent,
                # but packing continues, because it is collective.
                sending = sending or _failure_of(self._wait, index)
                # Store a failure instead of raising it: the other ranks of this stage gather the same weights
                # and would wait for this rank.
                packing = packing or _failure_of(self._fill, index, stream, version)
                if packing is not None:
                    # Send a header after a failure too, because the engines wait for every announced group.
                    self._head(index, [_GIVEN_UP, version, self.parts[index][1].first, 0, 0])
                sending = sending or _failure_of(self._start, index)
            # The last two groups may still be in transfer.
            for slot in range(BUFFERS):
                sending = sending or _failure_of(self._wait, slot)
            if packing is not None:
                # Ignore further errors: the first failure is what the engines must receive.
                _failure_of(drain, stream)
            refusals: list[str] = []
            if sending is None:
                try:
                    # All must confirm before any rank continues, because nobody may serve a version that
                    # another rank lacks.
                    refusals = self._group.agree(str(packing or ""), CONFIRM_SECONDS)
                except RefitError as error:
                    sending = error
        # After an aborted operation the group's ranks stay out of step.
        if sending is not None:
            self.close()
        # Prefer the packing failure: it came first, and engines often leave because of it.
        failure = packing or sending
        if failure is not None:
            raise failure
        if refusals:
            raise RefitError(f"the engines do not have the weights: {'; '.join(refusals)}")

    def _fill(self, index: int, stream: WeightIterator, version: int) -> None:
        part, content = self.parts[index][1], self._content(index)
        pack(stream, self._manifest, part, content)
        if index + 1 == len(self.parts):
            # Runs the code after a generator's last yield, which frees buckets, and rejects a model that
            # yields more weights than it announced.
            expect_end(stream)
        number = checksum(content) if self._with_checksum else 0
        self._head(index, [self._round, version, part.first, number, int(self._with_checksum)])

    def _head(self, index: int, words: list[int]) -> None:
        # Copy all words at once: setting them one by one in a CUDA buffer would take five kernel launches.
        self._header(index).copy_(torch.tensor(words))


class WeightListener(_Channel):
    """The receiving side: an engine rank.

    Args:
        group: the process group.
        manifest: manifest from the policy's refit info.

    Attributes:
        version: version of the weights if they are complete; None before the first refit and during each
            refit.
    """

    def __init__(self, group: TransferGroup, manifest: Manifest) -> None:
        super().__init__(group, manifest)
        self._views: dict[int, Weights] = {}
        self._coming = 0
        self.version: int | None = None

    def receive(self, load: Load) -> int:
        """Receive all weights, loading each group while the next one arrives; confirm and return the
        version.

        Args:
            load: called with names and tensors, which are valid until it returns.

        Raises:
            RefitError: the policy is gone or in another refit, the data differs from what was sent, or
                another engine could not load the weights.
        """
        # Until the end the engine has weights of two versions and must not generate.
        self.version = None
        self._round += 1
        failure: Exception | None = None
        with self._leaving_on_error():
            # Post both receives now, so that the sender never waits for this rank.
            for index in range(min(BUFFERS, len(self.parts))):
                self._start(index)
            for index in range(len(self.parts)):
                self._wait(index)
                # After a failure, receive and discard the rest, because the sender and the other engines
                # process all groups.
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
                "other engines could not load the weights, so this engine does not serve them "
                f"either: {'; '.join(refusals)}"
            )
        # Only after all have agreed: even an engine that loaded everything must not serve a version that
        # another one lacks.
        self.version = self._coming
        return self._coming

    def close(self) -> None:
        """Leave the process group; weights received so far no longer count as complete."""
        self.version = None
        super().close()

    def _take(self, index: int, load: Load) -> None:
        self._check(index)
        if index not in self._views:
            # Every refit uses the same tensors.
            self._views[index] = self.parts[index][1].views(self._content(index))
        load(self._views[index])

    def _check(self, index: int) -> None:
        """Check that group ``index`` of this refit has arrived, undamaged.

        Raises:
            RefitError: it has not; also if the policy aborted the refit.
        """
        part = self.parts[index][1]
        name = part.tensors[0].name
        round_, version, first, number, checked = self._header(index).tolist()
        if round_ == _GIVEN_UP:
            raise RefitError("the policy aborted the refit: look at its own error, and refit again")
        # Groups arrive in the same order on all ranks, so another group belongs to a refit whose end this
        # rank missed.
        if (round_, first) != (self._round, part.first):
            raise RefitError(
                f"weight {first} of refit {round_} came where weight {part.first} of refit "
                f"{self._round} was expected: {NEW_GROUP}"
            )
        if index and version != self._coming:
            raise RefitError(
                f"version {version} of {name} came after version {self._coming} of other weights: refit all "
                "stages together"
            )
        if checked and checksum(self._content(index)) != number:
            raise RefitError(
                f"the weights from {name} on have another checksum than the policy's: refit again"
            )
        self._coming = int(version)


def _failure_of(action: Callable[..., object], *arguments: Any) -> Exception | None:
    """Return the exception that ``action`` raises, or None."""
    try:
        action(*arguments)
    except Exception as failure:
        return failure
    return None
