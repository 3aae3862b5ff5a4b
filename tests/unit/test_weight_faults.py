"""Policies and engines killed within a refit, in real processes: no part is served, nobody waits for the
dead, the next refit works."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megarl.distributed.virtual_cluster import free_port
from megarl.errors import RefitError
from tests.open_files import open_files
from tests.tiers import sampled, slow
from tests.unit.weight_processes import HOST, Actor, Engine, Policy, expected, shared_files

Start = Callable[..., Actor]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts processes; none of them and no shared memory of theirs is left."""
    # the server of the processes has its own pipe here, from the first process on
    Actor(Engine).kill()
    descriptors = open_files()
    actors: list[Actor] = []

    def begin(kind: type[Any]) -> Actor:
        actors.append(Actor(kind, *([str(tmp_path)] if kind is Policy else [])))
        return actors[-1]

    yield begin
    for actor in actors:
        actor.kill()
    assert not shared_files([actor.number for actor in actors])
    actors.clear()
    assert not open_files() - descriptors


def refit(policy: Actor, engines: list[Actor], step: int) -> list[Any]:
    """Through shared memory; what the engines serve in the end."""
    for names in policy.do("groups", step):
        handle = policy.do("group", names)
        served = [engine.do("read", handle) for engine in engines]
    return served


def connect(policy: Actor, *engines: Actor) -> None:
    port, world = free_port(HOST), 1 + len(engines)
    policy.order("join", port, world)
    for rank, engine in enumerate(engines, 1):
        engine.order("join", port, world, rank)
    assert [actor.answer() for actor in (policy, *engines)] == ["joined"] * world


def broadcast(policy: Actor | list[Actor], engines: list[Actor], step: int) -> list[Any]:
    """From a policy, or from all stages of one."""
    stages = policy if isinstance(policy, list) else [policy]
    for stage in stages:
        stage.order("send", step)
    for engine in engines:
        engine.order("receive")
    return [actor.answer() for actor in (*stages, *engines)]


# shared memory


def test_a_policy_killed_within_a_refit_leaves_nothing_served_and_a_new_one_takes_over(start: Start) -> None:
    policy, engine, late = start(Policy), start(Engine), start(Engine)
    assert refit(policy, [engine], 1) == [(1, expected(1))]
    first, second, *_ = policy.do("groups", 2)
    handle = policy.do("group", first)
    assert engine.do("read", handle) is None
    next_handle = policy.do("group", second)
    policy.kill()
    # what was published is whole, and stays with who has the memory open; who has not finds it gone
    assert engine.do("read", next_handle) is None
    error = late.do("read", handle)
    assert isinstance(error, RefitError) and "and its memory are gone" in str(error)
    assert engine.do("served") is late.do("served") is None
    new = start(Policy)
    assert refit(new, [engine, late], 3) == [(3, expected(3))] * 2
    error = engine.do("read", handle)
    assert isinstance(error, RefitError) and engine.do("served") is None
    assert refit(new, [engine, late], 4) == [(4, expected(4))] * 2


@slow
def test_two_runs_on_one_machine_do_not_see_each_other(start: Start) -> None:
    policies, engines = [start(Policy), start(Policy)], [start(Engine), start(Engine)]
    for step in (1, 2):
        plans = [policy.do("groups", step + 10 * run) for run, policy in enumerate(policies)]
        for groups in zip(*plans, strict=True):
            handles = [policy.do("group", names) for policy, names in zip(policies, groups, strict=True)]
            served = [engine.do("read", handle) for engine, handle in zip(engines, handles, strict=True)]
        assert served == [(step, expected(step)), (step + 10, expected(step + 10))]
    for run, (policy, engine) in enumerate(zip(policies, engines, strict=True)):
        connect(policy, engine)
        assert broadcast(policy, [engine], 3 + run) == ["sent", (3 + run, expected(3 + run))]


# a broadcast


@sampled(1)
@pytest.mark.parametrize(
    "where", ["layer.0.weight", "layer.4.weight"], ids=["in-the-first-group", "when-all-has-come"]
)
def test_an_engine_killed_within_a_broadcast_ends_it_for_all(start: Start, where: str) -> None:
    policy, engine, other = start(Policy), start(Engine), start(Engine)
    connect(policy, engine, other)
    assert broadcast(policy, [engine, other], 1) == ["sent", (1, expected(1)), (1, expected(1))]
    policy.order("send", 2)
    engine.order("receive", where)
    other.order("receive")
    assert engine.answer() == "paused"
    engine.kill()
    assert isinstance(policy.answer(), RefitError) and isinstance(other.answer(), RefitError)
    assert other.do("served") is None
    error, again = policy.do("send", 3), other.do("receive")
    assert all(isinstance(one, RefitError) and "init_collective()" in str(one) for one in (error, again))
    new = start(Engine)
    connect(policy, new, other)
    assert broadcast(policy, [new, other], 4) == ["sent", (4, expected(4)), (4, expected(4))]


@slow
def test_a_policy_killed_within_a_broadcast_leaves_nothing_served(start: Start) -> None:
    policy, engine = start(Policy), start(Engine)
    connect(policy, engine)
    assert broadcast(policy, [engine], 1) == ["sent", (1, expected(1))]
    policy.order("send", 2, 3)
    engine.order("receive")
    assert policy.answer() == "paused"
    policy.kill()
    assert isinstance(engine.answer(), RefitError) and engine.do("served") is None
    new = start(Policy)
    connect(new, engine)
    assert broadcast(new, [engine], 3) == ["sent", (3, expected(3))]


def connect_stages(stages: list[Actor], engines: list[Actor]) -> None:
    port, world = free_port(HOST), 1 + len(engines)
    for stage, one in enumerate(stages):
        one.order("join", port, world, stage)
    for rank, engine in enumerate(engines, 1):
        engine.order("join", port, world, rank)
    assert [actor.answer() for actor in (*stages, *engines)] == ["joined"] * (len(stages) + len(engines))


@slow
@pytest.mark.parametrize(
    ("killed", "before"), [(0, 2), (1, 1), (1, None)], ids=["first-stage", "later-stage", "when-all-has-come"]
)
def test_a_stage_killed_within_a_broadcast_ends_it_for_all(
    start: Start, killed: int, before: int | None
) -> None:
    stages, engines = [start(Policy), start(Policy)], [start(Engine), start(Engine)]
    connect_stages(stages, engines)
    assert broadcast(stages, engines, 1) == ["sent"] * 2 + [(1, expected(1))] * 2
    for stage, one in enumerate(stages):
        one.order("send", 2, before if stage == killed else None)
    engines[0].order("receive", "layer.4.weight" if before is None else None)
    engines[1].order("receive")
    assert (engines[0] if before is None else stages[killed]).answer() == "paused"
    stages[killed].kill()
    if before is None:
        engines[0].order("go on")
    left = stages[1 - killed]
    assert all(isinstance(one.answer(), RefitError) for one in (left, *engines))
    assert [engine.do("served") for engine in engines] == [None, None]
    assert isinstance(left.do("send", 3), RefitError)
    stages[killed] = start(Policy)
    connect_stages(stages, engines)
    assert broadcast(stages, engines, 4) == ["sent"] * 2 + [(4, expected(4))] * 2
