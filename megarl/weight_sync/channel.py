"""The buffers that a refit over a ``TransferGroup`` goes through, the same on all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarl.errors import RefitError
from megarl.weight_sync.layout import Group
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.tensor_info import ALIGNMENT, TensorInfo
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
    """What torch says of a broken group, as an error of megarl's."""
    try:
        yield
    except RefitError:
        raise
    except RuntimeError as error:
        raise RefitError(f"weights did not get through: {error}; {NEW_GROUP}") from error
