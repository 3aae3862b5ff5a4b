"""How the memory is divided that a refit may take above the model: two transfer buffers, what is gathered for them, and lists."""

from __future__ import annotations

GIB = 2**30
# of weights that are gathered together where no memory is configured, and at most
BUCKET_BYTES = 64 * 2**20
# a bucket is this part of the configured memory
BUCKET_SHARE = 16
# that are there at once: one on its way, one that has come, and what was put together out of it; of the first gloo has two copies
BUCKETS = 5
# what a weight takes of host memory besides its bytes: its name in a group, its place in a buffer, and while groups are laid out for the
# first time the copy that lays it there
LIST_BYTES = 256
# this part of the configured memory is for connections and what allocators keep
REST_SHARE = 64


def bucket_bytes(buffer_gib: float | None) -> int:
    """Bytes of weights that are gathered together, unless one alone takes more.

    Args:
        buffer_gib: GiB that a refit may take, ``policy.refit_buffer_size_gb``; None where it is not configured.
    """
    return BUCKET_BYTES if buffer_gib is None else min(BUCKET_BYTES, int(buffer_gib * GIB) // BUCKET_SHARE)


def buffer_bytes(buffer_gib: float, buffers: int, *, lists: int, gathered: int, largest: int) -> int:
    """Bytes of each transfer buffer.

    Args:
        buffer_gib: GiB that a refit may take.
        buffers: how many.
        lists: bytes of the lists of what lies in them.
        gathered: bytes that the weights take on their way into them.
        largest: bytes of the largest weight, for which there is room as long as buffers of its size and the lists fit alone: what is
            gathered of it, a bucket of its own, may then take more than is configured.
    """
    configured = int(buffer_gib * GIB)
    room = max(configured - lists, 0)
    return max((room - gathered - configured // REST_SHARE) // buffers, min(largest, room // buffers))
