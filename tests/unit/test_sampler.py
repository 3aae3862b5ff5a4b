"""The order of records, and resuming it at every place."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.sampler import MixtureSampler, ResumableSampler, epoch_order
from megarl.errors import CheckpointError, DataError


@given(size=st.integers(1, 41), seed=st.integers(0, 2**40), epoch=st.integers(0, 5))
@settings(max_examples=100)
def test_an_epoch_is_a_permutation_that_depends_on_its_arguments_only(
    size: int, seed: int, epoch: int
) -> None:
    order = epoch_order(size, seed, epoch)
    assert sorted(order) == list(range(size))
    assert order == epoch_order(size, seed, epoch)


def test_the_order_is_pinned() -> None:
    # A change of this order would make every earlier checkpoint resume with other data.
    assert list(epoch_order(9, 42, 0)) == [2, 7, 8, 1, 6, 4, 5, 3, 0]
    assert list(epoch_order(4, 42, 3, shuffle=False)) == [0, 1, 2, 3]


def test_epochs_and_seeds_differ() -> None:
    orders = {tuple(epoch_order(20, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_first_places_are_uniform() -> None:
    counts = [0] * 5
    for seed in range(2000):
        counts[epoch_order(5, seed, 0)[0]] += 1
    # Binomial(2000, 1/5): 400, standard deviation 18.
    assert all(310 < count < 490 for count in counts)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("size", "count"), [(7, 3), (5, 5), (3, 8), (1, 2)])
def test_resume_at_every_step_goes_on_exactly(size: int, count: int, shuffle: bool) -> None:
    whole = ResumableSampler(size, 5, shuffle)
    batches = [whole.take(count) for _ in range(10)]
    for split in range(11):
        before = ResumableSampler(size, 5, shuffle)
        for _ in range(split):
            before.take(count)
        after = ResumableSampler(size, 5, shuffle)
        after.load_state(json.loads(json.dumps(before.state())))
        assert [after.take(count) for _ in range(10 - split)] == batches[split:]
        assert after.state() == whole.state()


@given(size=st.integers(1, 13), counts=st.lists(st.integers(0, 9), max_size=12))
@settings(max_examples=100)
def test_every_record_once_an_epoch(size: int, counts: list[int]) -> None:
    sampler = ResumableSampler(size, 3)
    taken = [index for count in counts for index in sampler.take(count)]
    assert len(taken) == sum(counts)
    assert sampler.epoch == len(taken) // size
    for epoch in range(sampler.epoch):
        assert taken[epoch * size : (epoch + 1) * size] == list(epoch_order(size, 3, epoch))


@pytest.mark.parametrize(
    "change",
    [
        {"size": 8},
        {"seed": 6},
        {"shuffle": False},
        {"data_fingerprint": "b"},
        {"position": 7},
        {"position": -1},
        {"epoch": None},
    ],
)
def test_a_state_of_something_else_is_refused(change: dict[str, object]) -> None:
    sampler = ResumableSampler(7, 5, True, "a")
    with pytest.raises(CheckpointError, match=next(iter(change))):
        sampler.load_state(sampler.state() | change)


def test_no_records() -> None:
    with pytest.raises(DataError, match="0 records"):
        ResumableSampler(0, 1)


MIXTURES = [
    ([5, 3], [0.7, 0.3]),
    ([4, 4, 9], [1, 1, 2]),
    ([1, 30], [0.1, 0.9]),
    ([7], [3.0]),
    ([3, 3, 3, 3], [0.4, 0.3, 0.2, 0.1]),
]


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("sizes", "weights"), MIXTURES)
def test_a_mixture_resumes_at_every_step(sizes: list[int], weights: list[float], shuffle: bool) -> None:
    whole = MixtureSampler(sizes, weights, 5, shuffle, "f")
    batches = [whole.take(4) for _ in range(10)]
    for split in range(11):
        before, after = (
            MixtureSampler(sizes, weights, 5, shuffle, "f"),
            MixtureSampler(sizes, weights, 5, shuffle, "f"),
        )
        before.take(4 * split)
        after.load_state(json.loads(json.dumps(before.state())))
        assert [after.take(4) for _ in range(10 - split)] == batches[split:]
        assert after.state() == whole.state() and after.epoch == 40 // sum(sizes)


@given(
    parts=st.lists(st.integers(1, 50), min_size=2, max_size=7),
    count=st.integers(1, 400),
    size=st.integers(1, 9),
    seed=st.integers(0, 9),
)
@settings(max_examples=60)
def test_shares_are_exact_after_every_prompt(parts: list[int], count: int, size: int, seed: int) -> None:
    sampler = MixtureSampler([size] * len(parts), parts, seed)
    taken = sampler.take(count)
    sources = [index // size for index in taken]
    for number in range(1, count + 1):
        for source, part in enumerate(parts):
            # in whole numbers: |given - share * number| <= 1 - 1 / (2k - 2), times the sum of the weights and
            # 2k - 2
            spread = 2 * len(parts) - 2
            assert spread * abs(sources[:number].count(source) * sum(parts) - part * number) <= (
                spread - 1
            ) * sum(parts)
    for source in range(len(parts)):
        own = [index % size for index in taken if index // size == source]
        whole = [own[start : start + size] for start in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in whole)


def test_a_tenth_is_a_tenth() -> None:
    sampler = MixtureSampler([3, 3], [0.1, 0.9], 0)
    assert [sum(index < 3 for index in sampler.take(10)) for _ in range(1000)] == [1] * 1000
    assert sampler.state()["weights"] == ["1/10", "9/10"]


def test_sources_of_one_size_have_orders_of_their_own() -> None:
    taken = MixtureSampler([50, 50], [1, 1], 3).take(100)
    assert [index for index in taken if index < 50] != [index - 50 for index in taken if index >= 50]
    assert [index for index in taken if index < 50] == list(epoch_order(50, 3, 0))


@pytest.mark.parametrize(
    "change",
    [
        {"sizes": [5, 4]},
        {"weights": ["1/2", "1/2"]},
        {"seed": 6},
        {"data_fingerprint": "b"},
        {"taken": [1]},
        {"taken": [-1, 2]},
    ],
)
def test_a_state_of_another_mixture_is_refused(change: dict[str, object]) -> None:
    sampler = MixtureSampler([5, 3], [0.7, 0.3], 5, True, "a")
    with pytest.raises(CheckpointError, match=next(iter(change))):
        sampler.load_state(sampler.state() | change)
    with pytest.raises(CheckpointError, match="sizes"):
        sampler.load_state(ResumableSampler(8, 5, True, "a").state())


@pytest.mark.parametrize(
    ("sizes", "weights"), [([3, 0], [1, 1]), ([3, 3], [1, 0]), ([3, 3], [1, -1]), ([3, 3], [1])]
)
def test_mixtures_of_nothing(sizes: list[int], weights: list[float]) -> None:
    with pytest.raises(DataError):
        MixtureSampler(sizes, weights, 1)
