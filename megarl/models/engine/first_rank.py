"""What rank 0 alone does while the other ranks wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist

from megarl.distributed.device import runtime
from megarl.errors import CheckpointError, MegarlError


@contextlib.contextmanager
def on_first_rank(kind: type[MegarlError] = CheckpointError) -> Iterator[bool]:
    """True on rank 0, which works while the others wait; what fails there fails on all ranks (as ``kind``), so that none waits for ever."""
    failure: Exception | None = None
    try:
        yield dist.get_rank() == 0
    except Exception as error:
        failure = error
    # a number first, so that the usual way, on which nothing fails, takes no collective of objects
    device = runtime().device
    failed = torch.tensor([int(failure is not None)], device=device)
    dist.broadcast(failed, src=0)
    if not int(failed):
        if failure is not None:
            raise failure
        return
    message = [None if failure is None else f"{type(failure).__name__}: {failure}"]
    dist.broadcast_object_list(message, src=0)
    if failure is not None:
        raise failure
    raise kind(f"rank 0 failed: {message[0]}")
