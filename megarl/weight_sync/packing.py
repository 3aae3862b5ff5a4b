"""Takes weights from a stream into a buffer, in batches of copies, so that many small ones cost little each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import islice

import torch

from megarl.errors import RefitError
from megarl.weight_sync.manifest import Group, Manifest

Stream = Iterator[tuple[str, torch.Tensor]]
# weights are taken in batches of this many bytes, so that gathered ones are not kept for long
STAGED_BYTES = 32 * 2**20


def pack(stream: Stream, manifest: Manifest, group: Group, targets: list[torch.Tensor] | None) -> None:
    """Take the weights of a group from a stream into ``targets``, one place each; without any the stream goes on all the same.

    Raises:
        RefitError: other weights come than were announced.
    """
    taken = 0
    while taken < len(group.offsets):
        stop = bisect_left(group.offsets, group.offsets[taken] + STAGED_BYTES)
        weights = manifest.expect(group.first + taken, group.first + stop, list(islice(stream, stop - taken)))
        if targets is not None:
            torch._foreach_copy_(targets[taken:stop], weights)
        taken = stop


def expect_end(stream: Stream) -> None:
    """Let the stream come to its end: what stands after its last weight runs too.

    Raises:
        RefitError: there are weights left.
    """
    for name, _ in stream:
        raise RefitError(f"the policy gives {name} after the last weight that was announced: make a new policy and engine")
