"""A ``Channel`` that sends what changed since the last refit, for links on which bytes are dear.

Both sides keep the bytes of the last refit, as much memory again as the weights take. A delta is bound to the version it is against: who
has another one refuses it, and after a refit that failed on any rank the next one comes whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from megarl.distributed.device import is_out_of_memory
from megarl.errors import RefitError
from megarl.weight_sync.channel import BUFFERS, HEADER, WHOLE, Channel
from megarl.weight_sync.delta import apply_delta, changed, delta_bytes, write_delta
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.transfer_group import TransferGroup


class DeltaChannel(Channel):
    """See the module. A group of weights comes whole when its delta would take more than ``group.delta_share`` of its bytes.

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
        """The same, with what changed.

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
    """For what a delta of ``weights`` takes beside them."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise RefitError(
            f"no memory for what changed in {weights.numel()} bytes of weights: {error}; Fix: set a smaller policy.refit_buffer_size_gb, "
            "or write policy.generation.vllm_cfg.refit_delta_share: 0"
        ) from error
