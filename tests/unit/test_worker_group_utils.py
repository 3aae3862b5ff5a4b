"""Pure parts of the worker groups: options, names, routing and places, each against a plain statement of the
rule."""

from __future__ import annotations

import copy
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.worker_dispatch import plan_multiple_data, plan_sharded_data, workers_on_first_of
from megarl.distributed.worker_group_utils import (
    format_coordinates,
    get_nsight_config_if_pattern_matches,
    recursive_merge_options,
    threads_of_rank,
)
from megarl.distributed.worker_places import place_workers
from megarl.errors import BatchError, ConfigError

LEAVES = st.one_of(st.integers(), st.text(max_size=3), st.none(), st.lists(st.integers(), max_size=2))
OPTIONS = st.recursive(
    st.dictionaries(st.sampled_from("abcd"), LEAVES, max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abcd"), st.one_of(LEAVES, inner), max_size=3),
    max_leaves=8,
)


def leaves(options: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], Any]:
    """All paths to what is not a filled mapping."""
    result: dict[tuple[str, ...], Any] = {}
    for key, value in options.items():
        result.update(
            leaves(value, (*path, key)) if isinstance(value, dict) and value else {(*path, key): value}
        )
    return result


@given(OPTIONS, OPTIONS)
def test_merge_keeps_every_extra_leaf_and_every_default_leaf_that_nothing_replaces(
    default: dict, extra: dict
) -> None:
    before = copy.deepcopy((default, extra))
    merged = recursive_merge_options(default, extra)
    found, extra_leaves = leaves(merged), leaves(extra)
    for path, value in extra_leaves.items():
        if value != {}:
            assert found[path] == value
    for path, value in leaves(default).items():
        replaced = any(path[: len(other)] == other and extra_leaves[other] != {} for other in extra_leaves)
        shadowed = any(other[: len(path)] == path for other in extra_leaves)
        if not replaced and not shadowed and value != {}:
            assert found[path] == value
    assert (default, extra) == before


def test_merge_shares_nothing_with_its_inputs() -> None:
    default, extra = {"a": {"x": [1]}, "b": [2]}, {"a": {"y": [3]}}
    merged = recursive_merge_options(default, extra)
    merged["a"]["x"].append(9)
    merged["a"]["y"].append(9)
    merged["b"].append(9)
    assert (default, extra) == ({"a": {"x": [1]}, "b": [2]}, {"a": {"y": [3]}})


def test_merge_renames_the_private_nsight_key_first() -> None:
    default = {"runtime_env": {"_nsight": {"t": "cuda", "o": "x"}, "env_vars": {"A": "1"}}}
    extra = {"runtime_env": {"nsight": {"o": "y"}}}
    assert recursive_merge_options(default, extra) == {
        "runtime_env": {"nsight": {"t": "cuda", "o": "y"}, "env_vars": {"A": "1"}}
    }


def test_an_explicit_nsight_wins_over_the_private_one() -> None:
    options = {"runtime_env": {"_nsight": {"t": "cuda"}, "nsight": {"t": "nvtx"}}}
    assert recursive_merge_options(options, {})["runtime_env"] == {"nsight": {"t": "nvtx"}}
    assert recursive_merge_options({}, options)["runtime_env"] == {"nsight": {"t": "nvtx"}}


def test_nsight_patterns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEGARL_NSYS_WORKER_PATTERNS", "MEGARL_NSYS_PROFILE_STEP_RANGE"):
        monkeypatch.delenv(name, raising=False)
    assert get_nsight_config_if_pattern_matches("lm_policy") == {}
    assert get_nsight_config_if_pattern_matches("lm_policy", patterns="vllm*, generation") == {}
    found = get_nsight_config_if_pattern_matches("lm_policy", patterns="vllm*, *policy*", step_range="3:5")[
        "nsight"
    ]
    assert found == {
        "t": "cuda,cudnn,cublas,nvtx",
        "o": "'lm_policy_3:5_%p'",
        "stop-on-exit": "true",
        "capture-range": "cudaProfilerApi",
        "capture-range-end": "stop",
    }
    monkeypatch.setenv("MEGARL_NSYS_WORKER_PATTERNS", "lm_*")
    monkeypatch.setenv("MEGARL_NSYS_PROFILE_STEP_RANGE", "7:8")
    assert get_nsight_config_if_pattern_matches("lm_policy")["nsight"]["o"] == "'lm_policy_7:8_%p'"
    assert get_nsight_config_if_pattern_matches("reward") == {}


def test_coordinates_in_words() -> None:
    coordinates = {
        "pipeline_parallel": 1,
        "data_parallel": 0,
        "context_parallel": 0,
        "tensor_parallel": 2,
        "replica": 3,
    }
    assert format_coordinates(9, coordinates, "node7") == "[pp1 dp0 cp0 tp2 replica3 node7]"
    assert format_coordinates(9, None, "node7") == "[rank9 node7]"
    assert format_coordinates(9, {}, "node7") == "[rank9 node7]"


AXES = ["pp", "dp", "tp"]


@given(
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
    roles=st.tuples(*[st.sampled_from(["sharded", "replicated", "free"])] * 3),
    answers=st.sets(st.sampled_from(AXES)),
    dummy=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=150)
def test_sharded_calls_follow_the_rule_worker_by_worker(
    sizes: tuple[int, ...], roles: tuple[str, ...], answers: set[str], dummy: bool, seed: int
) -> None:
    ranks = np.random.default_rng(seed).permutation(int(np.prod(sizes))).reshape(sizes)
    sharded = [axis for axis, role in zip(AXES, roles, strict=True) if role == "sharded"]

    def nest(axes: list[str], path: tuple[int, ...] = ()) -> Any:
        return (
            [nest(axes[1:], (*path, index)) for index in range(sizes[AXES.index(axes[0])])] if axes else path
        )

    calls = plan_sharded_data(
        NamedSharding(ranks, AXES),
        in_sharded_axes=sharded,
        replicate_on_axes=[axis for axis, role in zip(AXES, roles, strict=True) if role == "replicated"],
        output_is_replicated=sorted(answers),
        dummy_calls_on_free_axes=dummy,
        common_kwargs={"common": 5},
        nested={"data": nest(sharded)},
    )
    expected: dict[int, tuple[Any, bool]] = {}
    for place in product(*map(range, sizes)):
        at = dict(zip(AXES, place, strict=True))
        gets_data = all(role != "free" or at[axis] == 0 for axis, role in zip(AXES, roles, strict=True))
        if gets_data:
            expected[int(ranks[place])] = (
                tuple(at[axis] for axis in sharded),
                all(at[axis] == 0 for axis in answers),
            )
        elif dummy:
            expected[int(ranks[place])] = (None, False)
    assert [call.worker for call in calls] == sorted(expected)
    for call in calls:
        assert call.kwargs == {"data": expected[call.worker][0], "common": 5}
        assert call.returns is expected[call.worker][1]


def sharded_call(**changes: Any) -> None:
    arguments: dict[str, Any] = {
        "sharding": NamedSharding(np.arange(6).reshape(2, 3), ["dp", "tp"]),
        "in_sharded_axes": ["dp", "tp"],
        "replicate_on_axes": [],
        "output_is_replicated": [],
        "dummy_calls_on_free_axes": False,
        "common_kwargs": {},
        "nested": {"x": [[1, 2, 3], [4, 5, 6]]},
    }
    arguments.update(changes)
    plan_sharded_data(arguments.pop("sharding"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"sharding": None}, ConfigError, "sharding_annotations"),
        ({"in_sharded_axes": ["xp"]}, ConfigError, r"\['xp'\] not found"),
        ({"output_is_replicated": ["yp"]}, ConfigError, r"\['yp'\] not found"),
        (
            {"replicate_on_axes": ["tp"]},
            ConfigError,
            r"\['tp'\] are in in_sharded_axes and in replicate_on_axes",
        ),
        ({"nested": {"x": [[1, 2, 3]]}}, BatchError, "'x' has length 1: 2"),
        ({"nested": {"x": [[1, 2, 3], [4, 5]]}}, BatchError, "'x' has length 2: 3"),
        ({"nested": {"x": 7}}, BatchError, "'x' is a int"),
        ({"common_kwargs": {"x": 1}}, BatchError, r"\['x'\] are given in common_kwargs"),
    ],
)
def test_sharded_call_refusals(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    sharded_call()
    with pytest.raises(error, match=message):
        sharded_call(**changes)


def test_contract_error_families() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(BatchError, AssertionError)


def test_multiple_data_and_first_of_axes() -> None:
    sharding = NamedSharding(np.arange(6).reshape(2, 3), ["dp", "tp"])
    assert workers_on_first_of(sharding, 6, ["tp"]) == [0, 3]
    assert workers_on_first_of(sharding, 6, ["tp", "dp"]) == [0]
    assert workers_on_first_of(sharding, 6, None) == [0, 1, 2, 3, 4, 5]
    assert workers_on_first_of(None, 2, None) == [0, 1]
    with pytest.raises(ConfigError, match="sharding_annotations = None"):
        workers_on_first_of(None, 2, ["tp"])
    calls = plan_multiple_data([0, 3], {"c": 1}, {"x": ["a", "b"]})
    assert [(call.worker, call.kwargs) for call in calls] == [
        (0, {"x": "a", "c": 1}),
        (3, {"x": "b", "c": 1}),
    ]
    with pytest.raises(BatchError, match="'x' has length 3: 2"):
        plan_multiple_data([0, 3], {}, {"x": [1, 2, 3]})


def test_places_count_ranks_through_nodes() -> None:
    places = place_workers([3, 1], None, None, "w")
    assert [
        (place.rank, place.node, place.group, place.bundle, place.local_world_size) for place in places
    ] == [
        (0, 0, 0, 0, 3),
        (1, 0, 0, 1, 3),
        (2, 0, 0, 2, 3),
        (3, 1, 1, 0, 1),
    ]
    assert [place.name for place in places] == ["w-0-0", "w-0-1", "w-0-2", "w-1-0"]
    assert places[3].environment() == {
        "RANK": "3",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "1",
        "NODE_RANK": "1",
    }


def test_a_unified_placement_group_holds_the_bundles_of_all_nodes() -> None:
    places = place_workers([4], None, [(0, [0, 1]), (1, [2, 3])], "w")
    assert [
        (place.group, place.node, place.bundle, place.tied_group, place.is_leader) for place in places
    ] == [
        (0, 0, 0, 0, True),
        (0, 0, 1, 0, False),
        (0, 1, 2, 1, True),
        (0, 1, 3, 1, False),
    ]
    assert [place.bundle_indices for place in places] == [(0, [0, 1]), None, (1, [2, 3]), None]


@pytest.mark.parametrize(
    ("cores", "ranks", "threads"), [(96, 8, 12), (224, 8, 16), (16, 1, 16), (7, 2, 3), (2, 8, 1)]
)
def test_a_rank_beside_a_gpu_has_its_share_of_the_cores(cores: int, ranks: int, threads: int) -> None:
    assert threads_of_rank(cores, ranks) == threads
