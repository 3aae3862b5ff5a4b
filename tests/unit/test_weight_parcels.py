"""Many weights laid into a transfer buffer at once: the same bytes as one by one, with as few copies for many
as for few."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.errors import RefitError
from megarl.models.engine.gather_stream import FullTensor, GatherStream, InFlightBucket, UnshardPlan
from megarl.weight_sync import plan
from megarl.weight_sync.manifest import Manifest, drain, expect_end, pack
from megarl.weight_sync.plan import BufferRegion, Copy, CopyPlan, FlatBucket, FlatBucketIterator

SHAPES = [(), (0,), (3, 0), (1,), (33,), (5, 7), (2, 3, 5), (256,), (512,), (1, 256), (3, 256), (3, 4, 64)]
DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float64, torch.bool]


class Shelf:
    """Weights of one dtype in two flat tensors, in any order and with gaps.

    Args:
        names, shapes: of the weights.
        dtype: of all.
        seed: of their order and bytes.
    """

    def __init__(
        self, names: Sequence[str], shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, seed: int
    ) -> None:
        draw = random.Random(seed)
        ends = [draw.randint(0, 3), draw.randint(0, 3)]
        places: dict[int, BufferRegion] = {}
        for index in draw.sample(range(len(names)), len(names)):
            flat = draw.randint(0, 1)
            places[index] = BufferRegion(names[index], shapes[index], flat, ends[flat])
            ends[flat] += torch.Size(shapes[index]).numel() + draw.choice([0, 0, 1, 5])
        self.places = [places[index] for index in range(len(names))]
        self.flats = tuple(_filled(end, dtype, seed + number) for number, end in enumerate(ends))


def _filled(count: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Random bytes, not at the beginning of their storage."""
    high = 2 if dtype == torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    data = torch.randint(0, high, ((count + 2) * dtype.itemsize,), dtype=torch.uint8, generator=generator)
    return data.view(dtype)[2:]


class Shelves(FlatBucketIterator):
    """Takes weights from shelves, at most ``at_once``."""

    def __init__(self, shelves: Sequence[Shelf], at_once: int = 1000) -> None:
        self._shelves, self._at_once = list(shelves), at_once
        self._next = 0

    def take(self, most: int) -> FlatBucket | None:
        while self._shelves and self._next == len(self._shelves[0].places):
            self._shelves.pop(0)
            self._next = 0
        if not self._shelves:
            return None
        places, flats = self._shelves[0].places, self._shelves[0].flats
        flat_bucket = FlatBucket(
            places, self._next, min(most, self._at_once, len(places) - self._next), flats
        )
        self._next += flat_bucket.count
        return flat_bucket

    def __next__(self) -> tuple[str, Tensor]:
        flat_bucket = self.take(1)
        if flat_bucket is None:
            raise StopIteration
        place = flat_bucket.places[flat_bucket.first]
        return place.name, place.of(flat_bucket.flats)


@st.composite
def shelves(draw: st.DrawFn) -> list[Shelf]:
    found = []
    for number in range(draw(st.integers(1, 3))):
        shapes = draw(st.lists(st.sampled_from(SHAPES), min_size=1, max_size=12))
        names = [f"{number}.{index}" for index in range(len(shapes))]
        found.append(Shelf(names, shapes, draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99))))
    return found


@given(shelves(), st.sampled_from([1 << 25, 3000, 1]), st.sampled_from([1, 2, 1000]), st.data())
def test_laid_at_once_they_are_the_weights_of_one_by_one(
    found: list[Shelf], staged: int, at_once: int, data: st.DataObject
) -> None:
    manifest = Manifest.of(Shelves(found))
    total = len(manifest.tensors)
    middle = data.draw(st.integers(0, total))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "STAGED_BYTES", staged)
        groups = [
            manifest.group(first, stop - first)
            for first, stop in ((0, middle), (middle, total))
            if stop > first
        ]
    for _ in range(2):  # a second time with what was worked out
        by_parcel, singly = Shelves(found, at_once), iter(list(Shelves(found)))
        for group in groups:
            buffers = [
                torch.full((group.nbytes + 512,), fill, dtype=torch.uint8)[256:] for fill in (255, 254)
            ]
            pack(by_parcel, manifest, group, buffers[0])
            pack(singly, manifest, group, buffers[1])
            for (name, one), (_, other) in zip(*map(group.views, buffers), strict=True):
                assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)), (
                    name
                )
            assert buffers[0][group.nbytes :].eq(255).all()
        expect_end(by_parcel)


def _experts(count: int) -> Shelf:
    shapes = [(6, 64), (6, 64), (64, 6)] * count
    shelf = Shelf([str(index) for index in range(len(shapes))], shapes, torch.bfloat16, 0)
    for index, shape in enumerate(shapes):
        shelf.places[index] = BufferRegion(str(index), shape, 0, 384 * index)
    shelf.flats = (_filled(384 * len(shapes), torch.bfloat16, 1), _filled(0, torch.bfloat16, 1))
    return shelf


def test_many_experts_are_laid_with_as_few_copies_as_few() -> None:
    counts = []
    for experts in (3, 300):
        shelf = _experts(experts)
        group = Manifest.of(Shelves([shelf])).group(0, 3 * experts)
        flat_bucket = Shelves([shelf]).take(3 * experts)
        assert flat_bucket is not None
        counts.append(len(CopyPlan(flat_bucket, group.begins[:-1]).copies))
    # they follow one another on both sides
    assert counts == [1, 1]


def test_copies_are_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = _experts(5)
    manifest = Manifest.of(Shelves([shelf]))
    group = manifest.group(0, 15)
    buffer = torch.empty(group.nbytes, dtype=torch.uint8)
    pack(Shelves([shelf]), manifest, group, buffer)
    first = buffer.clone()

    def again(*_: object) -> None:
        raise AssertionError("worked out once more")

    monkeypatch.setattr(CopyPlan, "__init__", again)
    monkeypatch.setattr(Manifest, "expect_infos", again)
    shelf.flats[0].view(torch.uint8).bitwise_not_()
    pack(Shelves([shelf]), manifest, group, buffer)
    assert torch.equal(buffer, first.bitwise_not())
    pack(Shelves([shelf]), manifest, group, None)


def test_other_weights_are_refused_also_after_the_announced_ones_were_laid() -> None:
    shelf, longer = _experts(2), _experts(3)
    manifest = Manifest.of(Shelves([shelf]))
    group = manifest.group(0, 6)
    buffer = torch.zeros(group.nbytes, dtype=torch.uint8)
    with pytest.raises(RefitError, match=r"gives nothing where 3 \[6, 64\] bfloat16 was announced"):
        pack(
            Shelves([Shelf(["0", "1", "2"], [(6, 64), (6, 64), (64, 6)], torch.bfloat16, 0)]),
            manifest,
            group,
            buffer,
        )
    with pytest.raises(
        RefitError, match=r"gives 1 \[5, 64\] bfloat16 where 1 \[6, 64\] bfloat16 was announced"
    ):
        pack(Shelves([Shelf(["0", "1"], [(6, 64), (5, 64)], torch.bfloat16, 0)]), manifest, group, buffer)
    with pytest.raises(RefitError, match="gives 6 after the last weight"):
        stream = Shelves([longer])
        pack(stream, manifest, group, buffer)
        expect_end(stream)
    pack(Shelves([shelf]), manifest, group, buffer)
    shelf.flats = tuple(flat.float() for flat in shelf.flats)
    before = buffer.clone()
    with pytest.raises(
        RefitError, match=r"gives 0 \[6, 64\] float32 where 0 \[6, 64\] bfloat16 was announced"
    ):
        pack(Shelves([shelf]), manifest, group, buffer)
    assert torch.equal(buffer, before)


class Noted(InFlightBucket):
    """Two tensors, one of them copied and one left in its shard; writes down what becomes of it."""

    def __init__(self, number: int, notes: list[str]) -> None:
        shards = torch.arange(6.0) + 10 * number
        copied = FullTensor(f"{number}a", (3,), (Copy(0, 1, (2,), (1,), (1,)), Copy.run_of(1, 5, 0)))
        super().__init__(
            UnshardPlan([copied, FullTensor(f"{number}b", (2, 1), (Copy.run_of(2, 3, 0),))]), shards, None
        )
        self._number, self._notes = number, notes
        notes.append(f"out {number}")

    def wait(self) -> None:
        self._notes.append(f"wait {self._number}")


def _numbers(number: int) -> dict[str, list[float]]:
    return {
        f"{number}a": [10 * number + 5, 10 * number, 10 * number + 1],
        f"{number}b": [10 * number + 3, 10 * number + 4],
    }


def test_the_next_arrival_sets_out_before_the_present_one_is_taken() -> None:
    notes: list[str] = []
    for name, tensor in GatherStream(Noted(number, notes) for number in range(3)):
        notes.append(name)
        assert tensor.is_contiguous() and tensor.flatten().tolist() == _numbers(int(name[0]))[name]
    assert notes == [
        "out 0",
        "out 1",
        "wait 0",
        "0a",
        "0b",
        "out 2",
        "wait 1",
        "1a",
        "1b",
        "wait 2",
        "2a",
        "2b",
    ]
    assert list(GatherStream([])) == [] and GatherStream([]).take(3) is None


@pytest.mark.parametrize("takes", [(1, 1, 1, 1, 1, 1), (9, 9, 9), (1, 9, 9, 1, 1), (2, 1, 9, 9)])
@pytest.mark.parametrize("singly", [(), (1,), (0, 2), (3,)])
def test_one_by_one_and_at_once_take_turns(takes: Sequence[int], singly: Sequence[int]) -> None:
    gather_stream = GatherStream(Noted(number, []) for number in range(3))
    found: list[tuple[str, list[float]]] = []

    def note(name: str, tensor: Tensor) -> None:
        found.append((name, tensor.flatten().tolist()))

    for turn, most in enumerate(takes):
        pair = next(gather_stream, None) if turn in singly else None
        if pair is not None:
            note(*pair)
        flat_bucket = gather_stream.take(most)
        if flat_bucket is not None:
            assert 1 <= flat_bucket.count <= most
            for place in flat_bucket.chosen():
                note(place.name, place.of(flat_bucket.flats))
    for pair in gather_stream:
        note(*pair)
    assert found == [pair for number in range(3) for pair in _numbers(number).items()]
    assert gather_stream.take(1) is None


def test_they_take_turns_within_one_arrival_too() -> None:
    wholes = [FullTensor(str(index), (1,), (Copy.run_of(1, index, 0),)) for index in range(6)]
    gather_stream = GatherStream([InFlightBucket(UnshardPlan(wholes), torch.arange(6.0), None)])
    found = [next(gather_stream)[1].item()]
    for _ in range(2):
        flat_bucket = gather_stream.take(1)
        assert flat_bucket is not None
        found += [flat_bucket.chosen()[0].of(flat_bucket.flats).item(), next(gather_stream)[1].item()]
    assert [*found, *(tensor.item() for _, tensor in gather_stream)] == [0, 1, 2, 3, 4, 5]


def test_an_arrival_without_tensors_is_passed_over() -> None:
    def arrivals() -> Iterator[InFlightBucket]:
        for tensors in ((), (FullTensor("w", (1,), (Copy.run_of(1, 1, 0),)),), ()):
            yield InFlightBucket(UnshardPlan(tensors), torch.arange(2.0), None)

    assert [(name, tensor.tolist()) for name, tensor in GatherStream(arrivals())] == [("w", [1.0])]
    gather_stream = GatherStream(arrivals())
    assert [
        flat_bucket and flat_bucket.count for flat_bucket in (gather_stream.take(5), gather_stream.take(5))
    ] == [1, None]


@pytest.mark.parametrize("take", ["next", "take"])
def test_what_is_under_way_is_waited_for_when_nobody_takes_it(take: str) -> None:
    for end in ("close", "drop"):
        notes: list[str] = []
        gather_stream = GatherStream(Noted(number, notes) for number in range(3))
        assert next(gather_stream)[0] == "0a" if take == "next" else gather_stream.take(1)
        if end == "close":
            gather_stream.close()
            assert list(gather_stream) == []
        del gather_stream
        assert notes == ["out 0", "out 1", "wait 0", "wait 1"]


def test_what_is_under_way_is_waited_for_when_the_next_cannot_set_out() -> None:
    notes: list[str] = []

    def arrivals() -> Iterator[Noted]:
        yield Noted(0, notes)
        yield Noted(1, notes)
        raise OSError("out of sockets")

    with pytest.raises(OSError, match="out of sockets"):
        list(GatherStream(arrivals()))
    assert notes == ["out 0", "out 1", "wait 0", "wait 1"]


@pytest.mark.parametrize("way", ["one by one", "laid", "passed over", "drained"])
def test_present_tensors_are_not_kept_while_others_set_out(way: str) -> None:
    """Of five buckets the shards, which hold the tensors too."""
    kept: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def arrivals() -> Iterator[InFlightBucket]:
        for number in range(5):
            alive.append(sum(reference() is not None for reference in kept))
            shards = torch.arange(2.0)
            kept.append(weakref.ref(shards))
            yield InFlightBucket(
                UnshardPlan([FullTensor(str(number), (1,), (Copy.run_of(1, 1, 0),))]), shards, None
            )
            del shards

    gather_stream = GatherStream(arrivals())
    if way == "one by one":
        for _, tensor in gather_stream:
            del tensor
    elif way == "drained":
        drain(gather_stream)
    else:
        manifest = Manifest.of((str(number), torch.zeros(1)) for number in range(5))
        group = manifest.group(0, 5)
        pack(
            gather_stream,
            manifest,
            group,
            torch.zeros(group.nbytes, dtype=torch.uint8) if way == "laid" else None,
        )
    # the one that comes next, once the first has been taken
    assert alive == [0, 1, 1, 1, 1]


def test_a_refit_begun_anew_and_the_parts_of_other_stages_are_laid_where_they_belong() -> None:
    """One manifest of three shelves, of which a stream has the first and the last, in groups that do not end
    where a shelf does."""
    shelves = [
        Shelf([f"{number}.{index}" for index in range(4)], [(3, 256), (5, 7)] * 2, torch.bfloat16, number)
        for number in range(3)
    ]
    manifest = Manifest.of(Shelves(shelves))
    singly = dict(Shelves(shelves))
    groups = [manifest.group(0, 3), manifest.group(3, 1), manifest.group(8, 2), manifest.group(10, 2)]
    for taken in (1, 3, 4, 4):  # twice given up on the way
        stream = Shelves([shelves[0], shelves[2]])
        for group in groups[:taken]:
            buffer = torch.full((group.nbytes,), 255, dtype=torch.uint8)
            pack(stream, manifest, group, buffer)
            for name, view in group.views(buffer):
                assert torch.equal(view.view(torch.int16), singly[name].view(torch.int16)), name


@pytest.mark.parametrize("count", [0, 7])
def test_a_stream_that_gives_other_than_it_was_asked_for_is_stopped(count: int) -> None:
    class Wrong(Shelves):
        def take(self, most: int) -> FlatBucket | None:
            flat_bucket = super().take(most)
            return flat_bucket and replace(flat_bucket, count=count)

    manifest = Manifest.of(Shelves([_experts(4)]))
    with pytest.raises(AssertionError, match=f"Wrong gave {count} weights, but 1 to 6 were requested"):
        pack(Wrong([_experts(4)]), manifest, manifest.group(0, 6), None)
