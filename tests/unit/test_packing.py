"""The packers: every sequence once, never over capacity, wanted bin counts, and quality against the lower
bound."""

from __future__ import annotations

import itertools
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from typing import get_args, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.data.packing import (
    DEFAULT_PACKING_ALGORITHM,
    BestFitDecreasingPacker,
    ConcatenativePacker,
    FirstFitDecreasingPacker,
    FirstFitPacker,
    FirstFitShufflePacker,
    ModifiedFirstFitDecreasingPacker,
    PackingAlgorithm,
    deal_bins,
    get_packer,
    martello_toth_lower_bound,
    sequence_cost,
)
from megarl.data.packing.fitting import spread
from megarl.errors import PackingError
from megarl.models.policy import SequencePackingConfig

ALGORITHMS = list(PackingAlgorithm)
# Mean, capacity and log-normal spread of typical rollouts. Much narrower spreads leave gaps that no
# decreasing-fit algorithm fills.
PROFILES = {
    "short": (1060, 4096, 0.7),
    "tight": (3200, 4096, 0.35),
    "medium": (5700, 8192, 0.35),
    "agentic": (31000, 131072, 0.7),
}


def profile_lengths(profile: str, count: int, seed: int) -> list[int]:
    """Log-normal lengths rounded up to 64."""
    mean, capacity, spread = PROFILES[profile]
    generator = random.Random(seed)
    draw = (int(generator.lognormvariate(math.log(mean) - spread**2 / 2, spread)) for _ in range(count))
    return [min(capacity, max(64, -(-length // 64) * 64)) for length in draw]


def reference_fit(lengths: Sequence[int], order: Sequence[int], capacity: int, best: bool) -> list[list[int]]:
    """First or best fit by scanning every bin."""
    bins: list[list[int]] = []
    for index in order:
        room = [capacity - sum(lengths[member] for member in members) for members in bins]
        fitting = [number for number in range(len(bins)) if room[number] >= lengths[index]]
        if not fitting:
            bins.append([index])
        else:
            bins[min(fitting, key=lambda number: (room[number], number)) if best else fitting[0]].append(
                index
            )
    return bins


def least_bins(lengths: Sequence[int], capacity: int) -> int:
    """The optimum, by trying every assignment."""
    for count in range(len(lengths) + 1):
        for assignment in itertools.product(range(count), repeat=len(lengths)):
            loads = [0] * count
            for length, number in zip(lengths, assignment, strict=True):
                loads[number] += length
            if all(load <= capacity for load in loads):
                return count
    raise AssertionError


def check_solution(bins: Sequence[Sequence[int]], lengths: Sequence[int], capacity: int) -> None:
    assert sorted(index for members in bins for index in members) == list(range(len(lengths)))
    assert all(members for members in bins)
    assert max((sum(lengths[index] for index in members) for members in bins), default=0) <= capacity


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(max_examples=60)
@given(data=st.data())
def test_every_sequence_once_within_capacity_with_the_wanted_number_of_bins(
    algorithm: PackingAlgorithm, data: st.DataObject
) -> None:
    capacity = data.draw(st.integers(1, 40))
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=30))
    minimum, multiple = data.draw(st.integers(0, 5)), data.draw(st.integers(1, 4))
    packer = get_packer(algorithm, capacity, min_bin_count=minimum, bin_count_multiple=multiple, seed=3)
    natural = len(get_packer(algorithm, capacity, seed=3).pack(lengths))
    wanted = -(-max(natural, minimum) // multiple) * multiple
    if wanted > len(lengths):
        with pytest.raises(
            ValueError, match=f"Cannot create {wanted} bins with only {len(lengths)} sequences"
        ):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    check_solution(bins, lengths, capacity)
    assert len(bins) == wanted
    assert packer.pack(lengths) == bins


@settings(max_examples=150)
@given(lengths=st.lists(st.integers(0, 17), max_size=25))
def test_fits_equal_a_scan_over_all_bins(lengths: list[int]) -> None:
    capacity, given_order = 17, list(range(len(lengths)))
    falling = sorted(given_order, key=lambda index: -lengths[index])
    assert FirstFitPacker(capacity).pack(lengths) == reference_fit(lengths, given_order, capacity, best=False)
    assert FirstFitDecreasingPacker(capacity).pack(lengths) == reference_fit(
        lengths, falling, capacity, best=False
    )
    assert BestFitDecreasingPacker(capacity).pack(lengths) == reference_fit(
        lengths, falling, capacity, best=True
    )


@settings(max_examples=80)
@given(capacity=st.integers(1, 14), data=st.data())
def test_lower_bound_never_exceeds_the_optimum_nor_falls_below_the_plain_sum(
    capacity: int, data: st.DataObject
) -> None:
    lengths = data.draw(st.lists(st.integers(0, capacity), max_size=6))
    bound = martello_toth_lower_bound(lengths, capacity)
    assert -(-sum(lengths) // capacity) <= bound <= least_bins(lengths, capacity)


def reference_lower_bound(lengths: Sequence[int], capacity: int) -> int:
    """The definition of L2, trying every threshold and scanning every length."""
    best = 0
    for threshold in range(capacity // 2 + 1):
        alone = [length for length in lengths if length > capacity - threshold]
        above_half = [
            length for length in lengths if capacity - threshold >= length and 2 * length > capacity
        ]
        small = [length for length in lengths if 2 * length <= capacity and length >= threshold]
        missing = sum(small) - (len(above_half) * capacity - sum(above_half))
        best = max(best, len(alone) + len(above_half) + max(0, -(-missing // capacity)))
    return best


@settings(max_examples=200)
@given(capacity=st.integers(1, 30), data=st.data())
def test_lower_bound_equals_its_definition(capacity: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(0, capacity), max_size=20))
    assert martello_toth_lower_bound(lengths, capacity) == reference_lower_bound(lengths, capacity)


def test_lower_bound_sees_what_the_sum_does_not() -> None:
    assert martello_toth_lower_bound([6, 6, 6], 10) == 3
    assert martello_toth_lower_bound([7, 7, 4, 4], 10) == 3
    assert martello_toth_lower_bound([], 10) == 0
    with pytest.raises(PackingError, match="outside"):
        martello_toth_lower_bound([11], 10)
    with pytest.raises(PackingError, match="must be positive"):
        martello_toth_lower_bound([1], 0)


@pytest.mark.parametrize("profile", PROFILES)
@pytest.mark.parametrize("count", [511, 2048])
def test_best_fit_decreasing_is_within_one_bin_of_the_bound(profile: str, count: int) -> None:
    capacity = PROFILES[profile][1]
    for seed in (1, 2, 3):
        lengths = profile_lengths(profile, count, seed)
        bins = get_packer(DEFAULT_PACKING_ALGORITHM, capacity).pack(lengths)
        assert len(bins) - martello_toth_lower_bound(lengths, capacity) <= 1, (profile, seed)


@pytest.mark.parametrize(
    "algorithm", [PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING, PackingAlgorithm.BEST_FIT_DECREASING]
)
@pytest.mark.parametrize(
    "multiple, least, most", [(1, 0.955, 1.0), (32, 0.91, 0.97), (64, 0.85, 0.92), (256, 0.60, 0.80)]
)
def test_efficiency_with_alignment(
    algorithm: PackingAlgorithm, multiple: int, least: float, most: float
) -> None:
    generator = random.Random(42)
    lengths = [generator.randint(50, 800) for _ in range(1024)]
    padded = [-(-length // multiple) * multiple for length in lengths]
    bins = get_packer(algorithm, 1200, min_bin_count=4, bin_count_multiple=4).pack(padded)
    assert least <= sum(lengths) / (1200 * len(bins)) <= most


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_raised_bin_count_leaves_no_bin_nearly_empty(algorithm: PackingAlgorithm) -> None:
    lengths = [100] * 48
    bins = get_packer(algorithm, 1600, bin_count_multiple=4).pack(lengths)
    loads = [sum(lengths[index] for index in members) for members in bins]
    assert len(loads) == 4
    assert min(loads) >= 800, loads


def test_a_raised_bin_count_splits_when_spreading_would_overflow() -> None:
    lengths = [18, 17, 17, 13, 13, 12, 11, 11, 10, 10, 9, 9, 8, 8, 7, 7, 6, 6, 5, 5, 4, 4, 2, 2]
    assert len(BestFitDecreasingPacker(20).pack(lengths)) == 11
    assert spread(lengths, 12, 20) is None
    bins = BestFitDecreasingPacker(20, bin_count_multiple=3).pack(lengths)
    check_solution(bins, lengths, 20)
    assert len(bins) == 12
    assert min(sum(lengths[index] for index in members) for members in bins) >= 8


def test_concatenative_keeps_input_order_also_when_bins_are_added() -> None:
    lengths = [3, 9, 1, 1, 5, 2, 2, 2, 8]
    assert ConcatenativePacker(10).pack(lengths) == [[0], [1, 2], [3, 4, 5, 6], [7, 8]]
    bins = ConcatenativePacker(10, bin_count_multiple=3).pack(lengths)
    assert [index for members in bins for index in members] == list(range(9))
    assert len(bins) == 6


def test_modified_first_fit_decreasing_follows_its_five_phases() -> None:
    # Capacity 60: large above 30, medium above 20, small above 10, tiny the rest. Beside 58 and 36 no medium
    # fits, so 36 takes the pair of small ones; 33 takes the largest medium that fits, 27, and leaves 28 to
    # 32.
    lengths = [58, 32, 33, 36, 27, 28, 11, 12, 5, 3, 2]
    bins = ModifiedFirstFitDecreasingPacker(60).pack(lengths)
    as_lengths = [[lengths[index] for index in members] for members in bins]
    assert as_lengths == [[58, 2], [36, 11, 12], [33, 27], [32, 28], [5, 3]]
    # Pairs of small ones go to the bins with the most room first.
    lengths = [36, 32, 12, 11, 5, 3]
    assert ModifiedFirstFitDecreasingPacker(60).pack(lengths) == [[0, 4, 5], [1, 3, 2]]


def test_shuffle_is_a_function_of_its_seed() -> None:
    lengths = [generator_length % 29 + 1 for generator_length in range(0, 700, 7)]
    packed = {seed: FirstFitShufflePacker(50, seed=seed).pack(lengths) for seed in (0, 1)}
    assert packed[0] == FirstFitShufflePacker(50, seed=0).pack(lengths)
    assert packed[0] != packed[1]
    random.seed(5)
    unseeded = FirstFitShufflePacker(50).pack(lengths)
    assert FirstFitShufflePacker(50).pack(lengths) != unseeded
    random.seed(5)
    assert FirstFitShufflePacker(50).pack(lengths) == unseeded


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_edges_and_bad_input(algorithm: PackingAlgorithm) -> None:
    packer = get_packer(algorithm, 10)
    assert packer.pack([]) == []
    assert packer.pack([10]) == [[0]]
    assert len(packer.pack([10, 10, 10])) == 3
    with pytest.raises(
        ValueError, match=r"sequence 1 has length 11, which exceeds bin_capacity = 10.*at least 12"
    ):
        packer.pack([1, 11, 12])
    with pytest.raises(ValueError, match="negative"):
        packer.pack([1, -1])
    with pytest.raises(ValueError, match="bin_capacity = 0 must be positive"):
        get_packer(algorithm, 0).pack([1])
    with pytest.raises(ValueError, match="min_bin_count must be nonnegative"):
        get_packer(algorithm, 10, min_bin_count=-1)
    with pytest.raises(ValueError, match="bin_count_multiple must be positive"):
        get_packer(algorithm, 10, bin_count_multiple=0)
    with pytest.raises(ValueError, match="Cannot create 5 bins with only 2 sequences"):
        get_packer(algorithm, 10, min_bin_count=5).pack([1, 2])


def test_modified_first_fit_decreasing_refuses_empty_sequences() -> None:
    with pytest.raises(ValueError, match="sequence 1 has length 0"):
        ModifiedFirstFitDecreasingPacker(10).pack([1, 0])


def test_get_packer_by_name() -> None:
    expected = {
        "CONCATENATIVE": ConcatenativePacker,
        "first_fit_decreasing": FirstFitDecreasingPacker,
        "First_Fit_Shuffle": FirstFitShufflePacker,
        "modified_first_fit_decreasing": ModifiedFirstFitDecreasingPacker,
        "best_fit_decreasing": BestFitDecreasingPacker,
    }
    for name, kind in expected.items():
        assert type(get_packer(name, 7)) is kind
        assert type(get_packer(PackingAlgorithm(name.lower()), 7)) is kind
    with pytest.raises(ValueError, match=r"Unknown packing algorithm 'tetris'.*best_fit_decreasing"):
        get_packer("tetris", 7)
    for kind in (3, None, FirstFitPacker):
        with pytest.raises(PackingError, match="Unknown packing algorithm"):
            get_packer(kind, 7)  # type: ignore[arg-type]


def test_a_configuration_may_name_each_of_them_and_no_other() -> None:
    names = get_type_hints(SequencePackingConfig)["algorithm"]
    assert list(get_args(names)) == [algorithm.value for algorithm in PackingAlgorithm]


@settings(max_examples=60)
@given(shards=st.integers(1, 5), rounds=st.integers(0, 6), data=st.data())
def test_dealing_is_a_permutation_with_no_shard_more_than_one_bin_ahead(
    shards: int, rounds: int, data: st.DataObject
) -> None:
    costs = data.draw(st.lists(st.integers(0, 1000), min_size=shards * rounds, max_size=shards * rounds))
    dealt = deal_bins(costs, shards)
    assert sorted(dealt) == list(range(len(costs)))
    work = [sum(costs[number] for number in dealt[shard::shards]) for shard in range(shards)]
    assert max(work) - min(work) <= max(costs, default=0)


def test_dealing_balances_long_contexts_better_than_packing_order() -> None:
    capacity, shards = PROFILES["agentic"][1], 8
    lengths = profile_lengths("agentic", 512, seed=7)
    bins = BestFitDecreasingPacker(capacity, bin_count_multiple=shards).pack(lengths)
    costs = [sum(sequence_cost(lengths[index]) for index in members) for members in bins]

    def imbalance(order: Sequence[int]) -> float:
        work = [sum(costs[number] for number in order[shard::shards]) for shard in range(shards)]
        return max(work) * shards / sum(work)

    assert imbalance(deal_bins(costs, shards)) < 1.02 < imbalance(range(len(bins)))


def test_dealing_needs_whole_rounds() -> None:
    with pytest.raises(PackingError, match=r"5 bins cannot be dealt evenly to shards = 2"):
        deal_bins([1] * 5, 2)


def test_packing_loads_neither_torch_nor_ray() -> None:
    code = "import sys, megarl.data.packing; print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
