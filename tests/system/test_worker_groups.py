"""Worker groups on a real local Ray: calls, failures, deadlines, rendezvous and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
import torch

from megarl.distributed import worker_groups
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.deadlines import PHASES, Call, PhaseDeadlines, at_step
from megarl.distributed.named_sharding import NamedSharding
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import MultiWorkerFuture, RayWorkerBuilder, RayWorkerGroup
from megarl.errors import (
    BatchError,
    ClusterError,
    ConfigError,
    DeadlineError,
    StateError,
    WorkerError,
    WorkerLostError,
)
from tests.tiers import sampled, slow

SAMPLES = "tests.system.sample_workers"
POLICY_AXES = ["pipeline_parallel", "data_parallel", "context_parallel", "tensor_parallel"]
# A bound that no healthy run comes near, so that a hang ends the test.
PATIENCE_S = 120.0
# in which nothing is left of a driver that was killed
PROMISED_S = 30.0
# after which ranks are looked at that do not answer
STILL_S = 3.0


@contextmanager
def group_of(
    bundles: list[int],
    class_name: str = "PlainWorker",
    arguments: tuple[Any, ...] = (),
    keywords: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[RayWorkerGroup]:
    cluster = RayVirtualCluster(bundles, use_gpus=False)
    options = {"name_prefix": "sample", "init_timeout_s": PATIENCE_S, "call_timeout_s": PATIENCE_S, **options}
    group = None
    try:
        group = RayWorkerGroup(
            cluster, RayWorkerBuilder(f"{SAMPLES}.{class_name}", *arguments, **(keywords or {})), **options
        )
        yield group
    finally:
        if group is not None:
            group.shutdown(force=True)
        cluster.shutdown()


def answers(group: RayWorkerGroup, method: str, **arguments: Any) -> list[Any]:
    return group.get_all_worker_results(group.run_all_workers_single_data(method, **arguments))


def wait_until(condition: Callable[[], bool], what: str, longest_s: float = PATIENCE_S) -> None:
    end = time.monotonic() + longest_s
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def all_gone(process_ids: list[int]) -> bool:
    return not any(runs(item) for item in process_ids)


def runs(process_id: int) -> bool:
    try:
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.fixture(scope="module")
def policy_group(local_ray: int) -> Iterator[RayWorkerGroup]:
    """Six workers: pp 1, dp 3, cp 1, tp 2 on nodes of 4 and 2 bundles."""
    sharding = NamedSharding(np.arange(6).reshape(1, 3, 1, 2), POLICY_AXES)
    with group_of(
        [4, 2],
        arguments=(7,),
        keywords={"model": "tiny"},
        sharding_annotations=sharding,
        env_vars={"COLOUR": "caller"},
    ) as group:
        yield group


def test_workers_know_their_place(policy_group: RayWorkerGroup) -> None:
    names = [
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "NODE_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "OMP_NUM_THREADS",
        "COLOUR",
    ]
    seen = answers(policy_group, "environment", names=names)
    assert [item["RANK"] for item in seen] == list("012345")
    assert [item["LOCAL_RANK"] for item in seen] == list("012301")
    assert [item["NODE_RANK"] for item in seen] == list("000011")
    assert [item["LOCAL_WORLD_SIZE"] for item in seen] == list("444422")
    assert {item["WORLD_SIZE"] for item in seen} == {"6"}
    assert {item["MASTER_ADDR"] for item in seen} == {"127.0.0.1"}
    assert {int(item["MASTER_PORT"]) for item in seen} == {policy_group.master_port}
    assert policy_group.master_address == "127.0.0.1"
    assert {item["COLOUR"] for item in seen} == {"caller"}
    assert {item["OMP_NUM_THREADS"] for item in seen} == {os.environ.get("OMP_NUM_THREADS", "1")}
    assert policy_group.worker_metadata[4] == {
        "node_idx": 1,
        "local_rank": 0,
        "global_rank": 4,
        "name": "sample-1-0",
        "bundle_indices": (1, [0]),
        "dp_shard_idx": 4,
    }


def test_constructor_arguments_and_handles(policy_group: RayWorkerGroup) -> None:
    worker = policy_group.workers[3]
    assert ray.get(worker.get_arguments.remote()) == ((7,), {"model": "tiny"})
    assert ray.get(worker.echo.remote(method="a", self_="b")) == (3, {"method": "a", "self_": "b"})
    with pytest.raises(AttributeError, match=r"no method 'trian'; it has: .*echo"):
        _ = worker.trian

    @ray.remote(num_cpus=0)
    def ask(handle: Any) -> int:
        return ray.get(handle.echo.remote())[0]

    assert ray.get(ask.remote(worker)) == 3


def test_batches_arrive_to_the_bit_and_may_be_written_to_both_ways(policy_group: RayWorkerGroup) -> None:
    inside = torch.arange(400)[None] < torch.arange(0, 400, 4)[:, None]
    batch = BatchedDataDict(
        {
            "input_ids": torch.arange(40_000).reshape(100, 400).where(inside, 7),
            "input_lengths": torch.arange(0, 400, 4),
            "token_mask": inside.float(),
            "half": torch.randn(100, 400).bfloat16(),
            "turned": torch.randn(400, 100).t(),
            "flags": torch.arange(100) % 3 == 0,
            "advantages": torch.randn(100, 1).expand(100, 400),
            "none": torch.empty(100, 0),
        }
    )
    stored = ray.put(batch)
    answers = [
        policy_group.run_single_worker_single_data("overwrite", 0, batch=each)
        for each in (stored, stored, batch)
    ]
    [dealt] = batch.deal(1)
    answers.append(policy_group.run_single_worker_single_data("overwrite", 0, batch=dealt))
    for came, warned in policy_group.get_all_worker_results(answers):
        assert warned == []
        assert list(came) == list(batch)
        for name, column in batch.items():
            assert came[name].dtype == column.dtype and torch.equal(came[name], column), name
            came[name].zero_()


def test_what_waits_for_the_next_call_goes_with_it(
    policy_group: RayWorkerGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[str, list[str]]] = []
    start = policy_group._start
    monkeypatch.setattr(
        policy_group,
        "_start",
        lambda method, calls, before: started.append((method, list(before))) or start(method, calls, before),
    )
    begun = policy_group.calls
    for method in ("note_first", "note_second", "note_second", "note_first"):
        policy_group.run_before_next(method)
    assert started == [] and policy_group.calls == begun + 4
    assert answers(policy_group, "notes") == [["first", "second", "first"]] * 6
    assert started == [("notes", ["note_first", "note_second", "note_first"])], "one message to each worker"
    assert answers(policy_group, "notes") == [[]] * 6


def test_what_waits_runs_first_where_the_next_call_cannot_take_it_along(policy_group: RayWorkerGroup) -> None:
    policy_group.run_before_next("note_first")
    assert ray.get(policy_group.run_single_worker_single_data("notes", 4)) == ["first"]
    assert answers(policy_group, "notes") == [["first"]] * 4 + [[], ["first"]]
    policy_group.run_before_next("note_first")
    assert answers(policy_group, "stream_notes") == ["streamed first"] * 6
    policy_group.run_before_next("note_second")
    assert ray.get(policy_group.workers[2].notes.remote()) == ["second"], "a handle goes past the group"
    assert answers(policy_group, "notes") == [["second"]] * 2 + [[]] + [["second"]] * 3


def test_an_error_of_what_went_before_is_its_own_and_the_call_is_not_run(
    policy_group: RayWorkerGroup,
) -> None:
    policy_group.run_before_next("refuse")
    with pytest.raises(StateError, match=r"\[pp0 dp\d cp0 tp\d .*\] refuse: this worker cannot do that"):
        answers(policy_group, "note_first")
    policy_group.run_before_next("refuse")
    with pytest.raises(StateError, match="refuse: this worker cannot do that"):
        policy_group.run_single_worker_single_data("note_first", 0)
    assert answers(policy_group, "notes") == [[]] * 6


def test_dp_leaders(policy_group: RayWorkerGroup) -> None:
    assert policy_group.dp_size == 3
    assert [policy_group.get_dp_leader_worker_idx(index) for index in range(3)] == [0, 2, 4]
    for index in (-1, 3):
        with pytest.raises(IndexError, match=rf"dp_shard_idx = {index} .*\[0, 3\)"):
            policy_group.get_dp_leader_worker_idx(index)


def test_sharded_replicated_and_returned_once(policy_group: RayWorkerGroup) -> None:
    shards = [np.full(index + 1, index) for index in range(3)]
    future = policy_group.run_all_workers_sharded_data(
        "echo",
        data=shards,
        in_sharded_axes=["data_parallel"],
        replicate_on_axes=["context_parallel", "tensor_parallel", "pipeline_parallel"],
        output_is_replicated=["tensor_parallel"],
        common_kwargs={"mbs": 5},
    )
    assert isinstance(future, MultiWorkerFuture)
    assert future.called_workers == [0, 1, 2, 3, 4, 5]
    assert future.return_from_workers == [0, 2, 4]
    results = policy_group.get_all_worker_results(future)
    assert [rank for rank, _ in results] == [0, 2, 4]
    for index, (_, values) in enumerate(results):
        assert values["mbs"] == 5
        np.testing.assert_array_equal(values["data"], shards[index])
    everyone = ray.get(future.futures)
    assert [len(values["data"]) for _, values in everyone] == [1, 1, 2, 2, 3, 3]
    assert future.get_results(policy_group)[1][0] == 2


def test_free_axes_with_and_without_dummy_calls(policy_group: RayWorkerGroup) -> None:
    arguments: dict[str, Any] = {
        "data": ["a", "b", "c"],
        "in_sharded_axes": ["data_parallel"],
        "common_kwargs": {"greedy": True},
    }
    future = policy_group.run_all_workers_sharded_data("echo", **arguments)
    assert future.called_workers == [0, 2, 4]
    assert policy_group.get_all_worker_results(future) == [
        (rank, {"data": text, "greedy": True}) for rank, text in ((0, "a"), (2, "b"), (4, "c"))
    ]
    future = policy_group.run_all_workers_sharded_data(
        "echo", make_dummy_calls_to_free_axes=True, **arguments
    )
    assert future.called_workers == [0, 1, 2, 3, 4, 5]
    assert [values["data"] for _, values in ray.get(future.futures)] == ["a", None, "b", None, "c", None]
    assert [rank for rank, _ in policy_group.get_all_worker_results(future)] == [0, 2, 4]


def test_single_and_multiple_data(policy_group: RayWorkerGroup) -> None:
    assert ray.get(policy_group.run_single_worker_single_data("echo", 5, x=1)) == (5, {"x": 1})
    assert len(ray.get(policy_group.run_all_workers_single_data("echo", x=1))) == 6
    leaders = policy_group.run_all_workers_single_data("echo", run_rank_0_only_axes=["tensor_parallel"], x=1)
    assert [rank for rank, _ in policy_group.get_all_worker_results(leaders)] == [0, 2, 4]
    futures = policy_group.run_all_workers_multiple_data(
        "echo", run_rank_0_only_axes=["tensor_parallel"], common_kwargs={"y": "all"}, x=["p", "q", "r"]
    )
    assert ray.get(futures) == [
        (0, {"x": "p", "y": "all"}),
        (2, {"x": "q", "y": "all"}),
        (4, {"x": "r", "y": "all"}),
    ]


def test_wrong_calls_are_refused_on_the_driver(policy_group: RayWorkerGroup) -> None:
    run = policy_group.run_all_workers_sharded_data
    for refused in (
        lambda: run("echo", [1, 2, 3]),
        lambda: policy_group.run_all_workers_single_data("echo", 1),
        lambda: policy_group.run_all_workers_multiple_data("echo", [1]),
        lambda: policy_group.run_single_worker_single_data("echo", 0, 1),
        lambda: policy_group.run_single_worker_single_data("echo", 6),
        lambda: policy_group.run_all_workers_multiple_data("echo", x=[1, 2]),
        lambda: run("echo", in_sharded_axes=["data_parallel"], x=[1, 2]),
    ):
        with pytest.raises(AssertionError):
            refused()
    with pytest.raises(ValueError, match="expert_parallel"):
        run("echo", in_sharded_axes=["expert_parallel"], x=[1])
    with pytest.raises(ValueError, match="tensor_parallel"):
        run("echo", in_sharded_axes=["tensor_parallel"], replicate_on_axes=["tensor_parallel"], x=[1, 2])


def test_generators_flat_or_as_proxies(policy_group: RayWorkerGroup) -> None:
    futures = policy_group.run_all_workers_single_data(
        "count", run_rank_0_only_axes=["tensor_parallel"], until=2
    )
    assert policy_group.get_all_worker_results(futures) == ["0:0", "0:1", "2:0", "2:1", "4:0", "4:1"]
    futures = policy_group.run_all_workers_single_data(
        "count", run_rank_0_only_axes=["tensor_parallel"], until=3
    )
    proxies = policy_group.get_all_worker_results(futures, return_generators_as_proxies=True)
    assert [[ray.get(item) for item in proxy] for proxy in proxies][1] == ["2:0", "2:1", "2:2"]


def test_a_raised_megarl_error_keeps_its_class_and_gains_coordinates(policy_group: RayWorkerGroup) -> None:
    host = re.escape(os.uname().nodename)
    with pytest.raises(
        BatchError, match=rf"^\[pp0 dp2 cp0 tp1 {host}\] sample_mask must be present"
    ) as caught:
        policy_group.get_all_worker_results(
            [policy_group.run_single_worker_single_data("raise_error", 5, kind="batch")]
        )
    assert "sample_workers.py" in str(caught.value)
    with pytest.raises(ConfigError, match=r"(?s)^\[pp0 dp0 cp0 tp1 .*policy\.lr = -1"):
        policy_group.get_all_worker_results(
            [policy_group.run_single_worker_single_data("raise_error", 1, kind="config")]
        )


def test_other_errors_become_worker_errors_and_the_group_lives_on(policy_group: RayWorkerGroup) -> None:
    with pytest.raises(
        WorkerError, match=r"^\[pp0 dp\d cp0 tp\d .*\] .*ValueError: the inner reason"
    ) as caught:
        answers(policy_group, "raise_error", kind="plain")
    assert isinstance(caught.value.__cause__, ValueError)
    assert "in raise_error" in str(caught.value)
    assert "\x1b" not in str(caught.value)
    with pytest.raises(WorkerError, match="holds a lock"):
        policy_group.get_all_worker_results(
            [policy_group.run_single_worker_single_data("raise_error", 0, kind="unpicklable")]
        )
    assert len(answers(policy_group, "echo")) == 6


@sampled(1)
@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("raise", "RuntimeError: broke on purpose"),
        ("kill", "worker process died"),
        ("exit", "worker process died"),
    ],
)
def test_a_failing_worker_is_seen_while_its_peers_hang(
    local_ray: int, way: str, words: str, tmp_path: Path
) -> None:
    with group_of([3], keywords={"directory": str(tmp_path)}) as group:
        process_ids = ray.get(group.run_all_workers_single_data("process_id"))
        started = time.monotonic()
        with at_step(7), pytest.raises(WorkerError, match=rf"^\[rank1 .*{words}") as caught:
            answers(group, "fail_on", rank=1, way=way)
        assert "fail_on, step 7, of sample" in str(caught.value)
        assert time.monotonic() - started < PATIENCE_S / 2
        with pytest.raises(StateError, match=r"still hang in it: \[rank0 .*\[rank2 .*shut the group down"):
            group.run_all_workers_single_data("echo")
        assert group.shutdown(cleanup_method="leave_mark") is False
        assert group.workers == []
        assert group.shutdown() is True
        wait_until(lambda: all_gone(process_ids), "workers left behind")
    assert not list(tmp_path.iterdir())


def test_a_deadline_names_who_hangs_and_where(local_ray: int) -> None:
    with group_of([2]) as group:
        with pytest.raises(
            DeadlineError, match=r"1 of 2 workers did not answer within 1\.5 s: \[rank1 "
        ) as caught:
            group.get_all_worker_results(
                group.run_all_workers_single_data("hang_on_purpose", rank=1), timeout_s=1.5
            )
        assert "in hang_on_purpose" in str(caught.value)
        assert "--- [rank0" not in str(caught.value)


@slow
def test_a_rank_that_is_stopped_is_found_before_its_deadline(
    local_ray: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the look at the processes, in the first call of new workers, whose bound is far away."""
    deadlines = PhaseDeadlines(dict.fromkeys(PHASES, PATIENCE_S), 1.0, 3.0)
    for seconds in [PATIENCE_S, *[1.0] * 10]:
        deadlines.took(Call.of("sum"), seconds)
    assert deadlines.bound_s(Call.of("sum")) == 3.0
    with group_of([2], "CollectiveWorker", deadlines=deadlines) as group:
        assert deadlines.bound_s(Call.of("sum")) == PATIENCE_S
        process_ids = answers(group, "process_id")
        os.kill(process_ids[1], signal.SIGSTOP)
        begun = time.monotonic()
        silent = r"^sum, step 12, of sample: 2 of 2 .* Silent: the process of \[rank1 .* is stopped"
        with at_step(12), pytest.raises(DeadlineError, match=silent) as caught:
            group.get_all_worker_results(group.run_all_workers_multiple_data("sum", value=[1.0, 2.0]))
        assert time.monotonic() - begun < PATIENCE_S / 2
        assert "in all_reduce" in str(caught.value), "the stack of the rank that lives"
        # Ray does not end it, and nobody has to wait long for that here
        monkeypatch.setattr(worker_groups, "_DEATH_WAIT_S", 1.0)
        group.shutdown()
        wait_until(lambda: all_gone(process_ids), "a stopped worker is left behind")


@sampled(1)
@pytest.mark.parametrize(
    ("method", "arguments", "words"),
    [
        ("sum_or_loop", {"looping_rank": 1}, r" In no collective, while 1 others wait in one: \[rank1 "),
        ("mismatched", {}, r"\. Fix: "),
    ],
)
def test_ranks_that_stand_still_are_found_before_their_deadline(
    local_ray: int, method: str, arguments: dict[str, Any], words: str
) -> None:
    """In a phase of which nothing is measured yet, whose limit is far away: a loop that waits, and messages
    that nobody sends."""
    deadlines = PhaseDeadlines(dict.fromkeys(PHASES, PATIENCE_S), STILL_S, 3.0)
    with group_of([2], "CollectiveWorker", deadlines=deadlines) as group:
        begun = time.monotonic()
        expected = (
            rf"^{method}, step 1, of sample: 2 of 2 workers do not answer and make no progress for at "
            rf"least 2.25 s: .*{words}"
        )
        with at_step(1), pytest.raises(DeadlineError, match=expected) as caught:
            answers(group, method, **arguments)
        assert time.monotonic() - begun < PATIENCE_S / 2
        assert f"in {method}" in str(caught.value)


@slow
@pytest.mark.parametrize(
    ("method", "arguments", "key"),
    [
        ("compute_for_ever", {"rank": 1, "way": "itself"}, "step_s"),
        ("compute_for_ever", {"rank": 1, "way": "child"}, "step_s"),
        ("broadcast_weights_for_collective", {}, "refit_s"),
    ],
    ids=["computes", "a child computes", "waits for engines"],
)
def test_a_rank_that_may_come_to_an_end_has_its_deadline(
    local_ray: int, method: str, arguments: dict[str, Any], key: str
) -> None:
    """However long it is in the same place, and however still the others are."""
    deadlines = PhaseDeadlines(dict.fromkeys(PHASES, 4 * STILL_S), STILL_S, 3.0)
    with (
        group_of([2], deadlines=deadlines) as group,
        pytest.raises(DeadlineError, match=rf"within 12 s: .* or raise deadlines\.{key}"),
    ):
        answers(group, method, **arguments)


@slow
def test_a_constructor_that_fails_leaves_nothing(local_ray: int, tmp_path: Path) -> None:
    sharding = NamedSharding(np.arange(3), ["tensor_parallel"])
    with (
        pytest.raises(WorkerError, match=r"^\[tp1 .*ValueError: no memory for the optimizer"),
        group_of([3], "TornWorker", (str(tmp_path),), sharding_annotations=sharding),
    ):
        pytest.fail("the group was made")
    process_ids = [int(path.name) for path in tmp_path.iterdir()]
    assert process_ids
    wait_until(lambda: all_gone(process_ids), "workers left behind")


@sampled(1)
@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Absent", ConfigError, r"has no class 'Absent'"),
        ("missing_module.Worker", ClusterError, r"cannot be imported on"),
    ],
)
def test_a_class_that_cannot_be_found(
    local_ray: int, name: str, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^\[rank0 .*{message}"), group_of([1], name):
        pytest.fail("the group was made")


@slow
def test_configure_worker_and_tied_groups(local_ray: int) -> None:
    tied = [(0, [0, 2]), (0, [1])]
    with group_of([3], "ConfiguredWorker", bundle_indices_list=tied, env_vars={"COLOUR": "caller"}) as group:
        arguments = ray.get([worker.get_arguments.remote() for worker in group.workers])
        assert [keywords["seen"] for _, keywords in arguments] == [(0, (0, [0, 2])), (0, None), (0, (0, [1]))]
        colours = ray.get(group.run_all_workers_single_data("environment", names=["COLOUR"]))
        assert colours == [{"COLOUR": "configured"}] * 3
        assert [item["name"] for item in group.worker_metadata] == [
            "sample-grp0-0",
            "sample-grp0-1",
            "sample-0-1",
        ]
        assert [item["dp_shard_idx"] for item in group.worker_metadata] == [0, 0, 1]
        assert (group.dp_size, group.get_dp_leader_worker_idx(1)) == (2, 2)


@slow
def test_options_of_a_decorated_class_come_first(local_ray: int) -> None:
    with group_of([1], "DecoratedWorker", env_vars={"COLOUR": "caller"}) as group:
        [seen] = ray.get(
            group.run_all_workers_single_data("environment", names=["COLOUR", "SHAPE", "OMP_NUM_THREADS"])
        )
    assert seen == {
        "COLOUR": "caller",
        "SHAPE": "decorator",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }


@slow
def test_builder_alone_makes_one_worker(local_ray: int) -> None:
    cluster = RayVirtualCluster([1], use_gpus=False)
    builder = RayWorkerBuilder(f"{SAMPLES}.PlainWorker", 3, name="x")
    worker = builder(
        cluster.get_placement_groups()[0], 0, num_gpus=0, runtime_env={"env_vars": {"COLOUR": "extra"}}
    )
    assert ray.get(worker.get_arguments.remote()) == ((3,), {"name": "x"})
    assert ray.get(worker.environment.remote(["COLOUR", "WORLD_SIZE"])) == {
        "COLOUR": "extra",
        "WORLD_SIZE": "1",
    }
    ray.kill(worker.actor)
    cluster.shutdown()


@slow
def test_clean_up_runs_on_every_worker(local_ray: int, tmp_path: Path) -> None:
    with group_of([3], keywords={"directory": str(tmp_path)}) as group:
        assert group.shutdown(cleanup_method="leave_mark") is True
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1", "2"]


@slow
def test_a_clean_up_that_does_not_exist_is_reported(local_ray: int) -> None:
    with group_of([1]) as group:
        assert group.shutdown(cleanup_method="absent") is False


def test_workers_meet_over_gloo_on_loopback_and_meet_again(local_ray: int) -> None:
    with group_of([2], "CollectiveWorker") as group:
        sums = group.run_all_workers_multiple_data("sum", value=[1.25, 2.5])
        assert group.get_all_worker_results(sums) == [3.75, 3.75]
        assert answers(group, "meet_again") == [2, 2]
        assert group.get_all_worker_results(group.run_all_workers_multiple_data("sum", value=[1.0, 2.0])) == [
            3.0,
            3.0,
        ]
        heard = answers(group, "listening_addresses")
        assert all(len(addresses) > 1 for addresses in heard), heard
        assert {address.removeprefix("::ffff:") for addresses in heard for address in addresses} == {
            "127.0.0.1"
        }
        # The host's own name may stand for another interface than the loopback one.
        chosen = answers(group, "environment", names=["GLOO_SOCKET_IFNAME"])
        assert all(item["GLOO_SOCKET_IFNAME"] for item in chosen)


@sampled(1)
@pytest.mark.parametrize(
    ("way", "error", "words"),
    [("raise", BatchError, "refused on rank 1"), ("kill", WorkerLostError, "worker process died")],
)
def test_the_cause_is_told_from_the_broken_connection_of_its_peers(
    local_ray: int, way: str, error: type[Exception], words: str
) -> None:
    with group_of([2], "CollectiveWorker") as group, pytest.raises(error, match=rf"^\[rank1 .*{words}"):
        answers(group, "sum_or_fail", failing_rank=1, way=way)


@slow
def test_groups_side_by_side_have_their_own_ports(local_ray: int) -> None:
    with group_of([2]) as one, group_of([1]) as two, group_of([1]) as three:
        ports = {
            ray.get(group.workers[0].environment.remote(["MASTER_PORT"]))["MASTER_PORT"]
            for group in (one, two, three)
        }
    assert len(ports) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers_per_node": [1]}, "2 entries"),
        ({"workers_per_node": 3}, "node 1 has 2 bundles"),
        ({"workers_per_node": [0, 0]}, "at least one worker"),
        ({"workers_per_node": 1, "bundle_indices_list": [(0, [0])]}, "only one may be given"),
        ({"bundle_indices_list": [(0, [3])]}, r"bundle 3 on node 0 must lie in \[0, 3\)"),
        ({"bundle_indices_list": [(2, [0])]}, "node 2 does not exist"),
        ({"bundle_indices_list": [(0, [1, 1])]}, "given twice"),
        ({"bundle_indices_list": []}, "at least one worker"),
        ({"sharding_annotations": NamedSharding(np.arange(4), ["data_parallel"])}, "ranks 0 to 4"),
    ],
)
def test_places_that_do_not_fit(local_ray: int, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), group_of([3, 2], **options):
        pytest.fail("the group was made")


@slow
def test_workers_per_node_takes_the_first_bundles(local_ray: int) -> None:
    with group_of([3, 2], workers_per_node=[2, 1]) as group:
        assert [item["name"] for item in group.worker_metadata] == ["sample-0-0", "sample-0-1", "sample-1-0"]


DRIVER = """
import sys
from megarl.distributed.ray_runtime import init_ray
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.distributed.worker_groups import RayWorkerBuilder, RayWorkerGroup
assert "torch" not in sys.modules
init_ray(num_cpus=2, log_to_driver=False)
cluster = RayVirtualCluster([2], use_gpus=False)
group = RayWorkerGroup(cluster, RayWorkerBuilder("tests.system.sample_workers.PlainWorker"))
print(*group.get_all_worker_results(group.run_all_workers_single_data("process_id")), flush=True)
group.get_all_worker_results(group.run_all_workers_single_data("hang_on_purpose", rank=0))
"""


@slow
def test_a_killed_driver_leaves_no_worker(tmp_path: Path) -> None:
    checkout = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": checkout}
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert driver.stdout is not None
        line = driver.stdout.readline()
        workers = [int(word) for word in line.split()]
        assert len(workers) == 2, driver.stderr.read() if driver.stderr and not line else line
        family = [process.pid for process in psutil.Process(driver.pid).children(recursive=True)]
        assert set(workers) < set(family)
        driver.send_signal(signal.SIGKILL)
        # by themselves Ray's two agents would try for a minute to tell a dead head of their end
        wait_until(lambda: all_gone(family), "processes outlived their driver", PROMISED_S)
    finally:
        driver.kill()
        driver.communicate()
