"""Memory that one bucket after another uses: never while somebody may still look at it, and no more of it
than is used at once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.models.engine.gather_stream import (
    FullTensor,
    GatherStream,
    InFlightBucket,
    SpareMemory,
    UnshardPlan,
)
from megarl.weight_sync.manifest import BUCKET_BYTES, BUCKETS, LIST_BYTES, bucket_bytes, buffer_bytes
from megarl.weight_sync.plan import Copy

CPU = torch.device("cpu")


def test_a_piece_is_used_again_if_it_is_large_enough_and_replaced_if_not() -> None:
    spare = SpareMemory()
    first = spare.empty(10, torch.float32, CPU)
    place = first.data_ptr()
    spare.give(first[3:5])
    again = spare.empty(5, torch.float64, CPU)
    assert (again.data_ptr(), again.shape, again.dtype) == (place, (5,), torch.float64)
    assert spare.empty(1, torch.uint8, CPU).data_ptr() != place
    spare.give(again)
    larger = spare.empty(11, torch.float32, CPU)
    assert larger.shape == (11,) and not spare._pieces
    spare.give(torch.empty(0))
    spare.give(torch.empty(3, device="meta"))
    assert not spare._pieces and spare.empty(0, torch.float32, CPU).shape == (0,)
    # nothing takes no piece, which would not come back
    spare.give(larger)
    spare.give(spare.empty(0, torch.float32, CPU))
    assert spare.empty(11, torch.float32, CPU).data_ptr() == larger.data_ptr()


def arrivals(
    lengths: list[int], spare: SpareMemory, copied: list[bool], pieces: set[int]
) -> Iterator[InFlightBucket]:
    """Of one tensor an element; each lies among the shards, or has to be copied out of them."""
    for number, length in enumerate(lengths):
        shards = spare.empty(2 * length, torch.float32, CPU)
        pieces.add(shards.untyped_storage().data_ptr())
        shards.copy_(torch.arange(2.0 * length) + 1000 * number)
        wholes = []
        for index in range(length):
            one = Copy(index, 0, (1, 1), (1, 1), (1, 1)) if copied[number] else Copy.run_of(1, index, 0)
            wholes.append(FullTensor(f"{number}.{index}", (1,), (one,)))
        yield InFlightBucket(UnshardPlan(wholes), shards.view(2, length), None, spare)


@given(
    st.lists(st.integers(1, 5), max_size=12), st.integers(0, 2**32), st.sampled_from(["take", "next", "both"])
)
def test_what_is_handed_out_stays_as_it_is_whatever_comes_later(
    lengths: list[int], seed: int, way: str
) -> None:
    draw = random.Random(seed)
    copied = [draw.random() < 0.5 for _ in lengths]
    gather_stream = GatherStream(arrivals(lengths, SpareMemory(), copied, set()))
    expected = [1000 * number + index for number, length in enumerate(lengths) for index in range(length)]
    kept: list[torch.Tensor] = []
    found: list[float] = []
    while len(found) < len(expected):
        if way == "take" or (way == "both" and draw.random() < 0.5):
            flat_bucket = gather_stream.take(draw.randint(1, 4))
            assert flat_bucket is not None
            found += [place.of(flat_bucket.flats).item() for place in flat_bucket.chosen()]
        else:
            kept.append(next(gather_stream)[1])
            found.append(kept[-1].item())
    assert found == expected and gather_stream.take(1) is None
    values = {tensor.item() for tensor in kept}
    assert values <= set(expected) and len(values) == len(kept)
    assert way == "take" or way == "both" or values == set(expected)


def test_many_buckets_of_parcels_take_the_memory_of_three() -> None:
    """Also where tensors are copied out of the shards, which then are free at once."""
    pieces: set[int] = set()
    gather_stream = GatherStream(
        arrivals([4] * 20, SpareMemory(), [number % 3 == 0 for number in range(20)], pieces)
    )
    while gather_stream.take(3) is not None:
        pass
    assert len(pieces) <= 3


def test_the_configured_memory_is_divided_and_never_exceeded() -> None:
    gib = 0.125
    bucket = bucket_bytes(gib)
    assert bucket == 8 * 2**20 and bucket_bytes(None) == BUCKET_BYTES == bucket_bytes(1.0) == bucket_bytes(
        100.0
    )
    lists = LIST_BYTES * 30_000
    slot = buffer_bytes(gib, 2, lists=lists, gathered=BUCKETS * bucket, largest=2**20)
    taken = BUCKETS * bucket + lists + 2 * 2**20
    assert 2 * slot + taken <= gib * 2**30 < 2 * (slot + 1) + taken


@pytest.mark.parametrize(
    ("largest", "expected"), [(100, 192), (300, 300), (450, 450), (451, 450), (10**6, 450)]
)
def test_a_large_weight_gets_the_room_of_what_is_gathered(largest: int, expected: int) -> None:
    assert buffer_bytes(1000 / 2**30, 2, lists=100, gathered=500, largest=largest) == expected
    assert buffer_bytes(50 / 2**30, 2, lists=100, gathered=500, largest=largest) == 0
