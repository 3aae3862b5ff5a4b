"""Takes weights from a stream into a buffer, in batches of copies, so that many small ones cost little each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megarl.errors import RefitError
from megarl.weight_sync.manifest import TensorInfo

Stream = Iterator[tuple[str, torch.Tensor]]
# weights are copied in batches of this many bytes, so that gathered ones are not kept for long
STAGED_BYTES = 32 * 2**20


def pack(stream: Stream, infos: Sequence[TensorInfo], targets: list[torch.Tensor] | None) -> None:
    """Take the weights ``infos`` from a stream into ``targets``, one place each; without any the stream goes on all the same.

    Raises:
        RefitError: other weights come than were announced.
    """
    weights: list[torch.Tensor] = []
    copied = staged = 0
    for info in infos:
        name, tensor = next(stream, ("nothing", torch.empty(0)))
        if not info.fits(name, tensor):
            found = f"{name} {list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
            raise RefitError(f"the policy gives {found} where {info} was announced: make a new policy and engine after changing a model")
        if targets is None:
            continue
        weights.append(tensor)
        staged += tensor.nbytes
        if staged >= STAGED_BYTES:
            torch._foreach_copy_(targets[copied : copied + len(weights)], weights)
            copied, weights, staged = copied + len(weights), [], 0
    if targets is not None and weights:
        torch._foreach_copy_(targets[copied:], weights)


def expect_end(stream: Stream) -> None:
    """Let the stream come to its end: what stands after its last weight runs too.

    Raises:
        RefitError: there are weights left.
    """
    for name, _ in stream:
        raise RefitError(f"the policy gives {name} after the last weight that was announced: make a new policy and engine")
