"""What the driver says at a refit, counted over groups of workers that are played: as much at any number of
ranks and weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.cases import messages
from benchmarks.cases.messages import (
    CALLS,
    LAYOUTS,
    LIFE,
    VERSION,
    Workers,
    counted,
    device,
    driver_of,
    experts_kept,
    manifest_of,
    moved,
    wanted_of,
    weights_loaded,
)
from megarl.algorithms.refit import refit_policy_generation
from megarl.errors import RefitError
from megarl.models.engine.worker import EngineWorker
from megarl.models.generation.engine_group import EngineGroup
from megarl.models.policy.lm_policy import Policy
from megarl.patched import patched
from megarl.weight_sync.manifest import Manifest
from megarl.weight_sync.slices import Slice, WantedSlices, names_digest

WEIGHTS = Manifest.from_description({f"layer.{number}": ((64, 64), torch.bfloat16) for number in range(40)})
OF_WEIGHTS = 64 * 64 * 2


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty groups."""
    monkeypatch.setattr(messages, "DEFAULT_SLOT_BYTES", 2 * OF_WEIGHTS)


def workers_of(policy: Policy, generation: EngineGroup) -> tuple[Workers, Workers]:
    groups: Any = policy.worker_group, generation.worker_group
    return groups


@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_refit_is_one_call_of_either_side_at_any_number_of_ranks(ranks: int) -> None:
    policy, generation = driver_of(WEIGHTS, ranks, ranks // 4, 4)
    counted(policy, generation, "hand over")
    found = counted(policy, generation, "hand over")
    assert (found.calls, found.others, found.messages) == (CALLS, 4, ranks + ranks // 4)
    ours, theirs = (
        {name: count for name, count in group.calls.items() if name not in LIFE}
        for group in workers_of(policy, generation)
    )
    assert (ours, theirs) == ({"hand_over_weights": 1}, {"update_from_policy": 1})
    apart = counted(policy, generation, "broadcast")
    assert (apart.calls, apart.others) == (CALLS, 0)
    # what the count would be if the driver carried handles
    carried = counted(policy, generation, "handles")
    assert carried.calls == 1 + 2 * 20 and carried.nbytes > 20 * found.nbytes


def test_policy_and_engines_meet_once_and_anew_after_a_start_of_engines() -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4)
    ours, theirs = workers_of(policy, generation)
    for _ in range(3):
        refit_policy_generation(policy, generation, colocated_inference=True)
    assert (ours.calls["mailbox"], theirs.calls["meet"]) == (1, 1)
    session = generation.meet(policy.mailboxes)
    generation._start = lambda: theirs  # type: ignore[assignment,return-value]
    generation.restart()
    assert generation.version is None
    assert generation.meet(policy.mailboxes) != session
    assert (ours.calls["mailbox"], theirs.calls["meet"]) == (1, 2)
    refit_policy_generation(policy, generation, colocated_inference=True)
    assert generation.version == VERSION
    other, _ = driver_of(Manifest(WEIGHTS.tensors[:3]), 4, 1, 4)
    generation.meet(other.mailboxes)
    assert theirs.calls["meet"] == 3


def test_engines_start_anew_in_the_order_of_the_first_start() -> None:
    """The policy leaves its devices, engines start and sleep, its parameters return; engines apart start
    beside it."""
    policy, generation = driver_of(WEIGHTS, 8, 2, 4)
    refit_policy_generation(policy, generation, colocated_inference=True)
    said: list[str] = []
    for workers, who in zip(workers_of(policy, generation), ("policy", "engines"), strict=True):
        call = workers.run_all_workers_single_data

        def noting(method: str, who: str = who, call: Any = call, **options: Any) -> list[Any]:
            said.append(f"{who}: {method}")
            return list(call(method, **options))

        workers.run_all_workers_single_data = noting  # type: ignore[method-assign]
        workers.cluster = SimpleNamespace(max_colocated_worker_groups=2)  # type: ignore[attr-defined]
    theirs = workers_of(policy, generation)[1]
    theirs.answers = {**theirs.answers, "finish_generation": lambda worker: False}
    generation._start = lambda: said.append("start") or theirs  # type: ignore[assignment,return-value,func-returns-value]
    generation.restart(policy)
    order = [
        "policy: offload_after_refit",
        "start",
        "engines: connect",
        "engines: finish_generation",
        "policy: prepare_for_lp_inference",
    ]
    assert said == order
    with pytest.raises(RefitError, match="no complete weights"):
        generation._require_weights()
    said.clear()
    generation._colocated = False
    generation.restart(policy)
    assert said == ["start"]


@pytest.mark.parametrize("failing", ["policy", "engines", "another version"])
def test_after_a_refit_that_failed_no_engine_has_a_version(failing: str) -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4)
    refit_policy_generation(policy, generation, colocated_inference=True)
    assert generation.version == VERSION

    def fail(worker: int, **options: Any) -> int:
        if failing == "another version":
            return VERSION + worker
        raise RefitError("said by a worker")

    ours, theirs = workers_of(policy, generation)
    group, method = (ours, "hand_over_weights") if failing == "policy" else (theirs, "update_from_policy")
    group.answers = {**group.answers, method: fail}
    with pytest.raises(RefitError, match=r"said by a worker|not all engines have the same complete weights"):
        refit_policy_generation(policy, generation, colocated_inference=True)
    assert generation.version is None
    with pytest.raises(
        RefitError,
        match=r"no complete weights|said by a worker|has the weights of version 4, but version 3 was sent "
        r"last",
    ):
        generation._require_weights()
    group.answers = {**group.answers, method: lambda worker, **options: VERSION}
    refit_policy_generation(policy, generation, colocated_inference=True)
    assert generation.version == VERSION


def test_a_group_smaller_than_a_weight_is_refused_before_anything_is_said() -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4)
    with pytest.raises(
        RefitError, match=rf"_refit_buffer_size_gb = 1e-06: layer\.0 alone takes {OF_WEIGHTS} bytes"
    ):
        policy.hand_over_weights(1, 2, 1e-6)
    policy.hand_over_weights(1, 2, 1.0)
    assert workers_of(policy, generation)[0].calls["hand_over_weights"] == 1


SLICES = tuple({f"layer.{number}": Slice(0, 16 * rank, 16) for number in (3, 8)} for rank in range(4))


def test_slices_are_agreed_on_once_and_anew_with_other_engines() -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4, SLICES)
    ours, theirs = workers_of(policy, generation)
    for _ in range(3):
        refit_policy_generation(policy, generation, colocated_inference=True)

    def asked() -> tuple[int, ...]:
        return (
            ours.calls["send_slices"],
            ours.calls["mailbox"],
            *(theirs.calls[name] for name in ("slices_read", "take_slices", "meet")),
        )

    # of all engines a digest, and of one what it stands for
    assert asked() == (1, 1, 2, 1, 1)
    assert generation.slices_wanted() == WantedSlices(SLICES, {device(rank): rank % 4 for rank in range(8)})
    generation._start = lambda: theirs  # type: ignore[assignment,return-value]
    generation.restart()
    refit_policy_generation(policy, generation, colocated_inference=True)
    # the policy knows what they read, and has the same mailboxes
    assert asked() == (1, 1, 4, 2, 2)
    with patched((generation, "slices_wanted", lambda: None)):
        refit_policy_generation(policy, generation, colocated_inference=True)
    assert asked() == (2, 2, 4, 3, 3)
    refit_policy_generation(policy, generation, colocated_inference=True)
    assert asked() == (3, 3, 4, 4, 4)


def test_engines_that_read_different_slices_and_those_of_one_rank_get_whole_weights() -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4, SLICES)
    theirs = workers_of(policy, generation)[1]
    read = theirs.answers["slices_read"]

    def other(engine: int, **options: Any) -> Any:
        return read(engine, **options)[:: -1 if engine else 1]

    theirs.answers = {**theirs.answers, "slices_read": other}
    assert generation.slices_wanted() is None
    policy, generation = driver_of(WEIGHTS, 8, 8, 1)
    assert generation.slices_wanted() is None and workers_of(policy, generation)[1].calls["slices_read"] == 0


def test_ranks_that_chose_different_slices_are_a_defect() -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4, SLICES)
    ours = workers_of(policy, generation)[0]
    ours.answers = {
        **ours.answers,
        "send_slices": lambda rank, **options: names_digest(["layer.3"]) if rank else [],
    }
    with pytest.raises(RefitError, match="ranks of the policy chose different weights to send as slices"):
        policy.send_slices(generation.slices_wanted())


@pytest.mark.parametrize(("cuda", "ranks", "expected"), [(True, 8, 3), (False, 8, 1), (False, 6, -1)])
def test_the_engine_s_rank_beside_is_that_of_the_device_or_of_the_place(
    monkeypatch: pytest.MonkeyPatch, cuda: bool, ranks: int, expected: int
) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 5)
    monkeypatch.setattr(dist, "get_world_size", lambda: ranks)
    worker: Any = SimpleNamespace(runtime=SimpleNamespace(is_cuda=cuda, identity=lambda: device(7)))
    assert EngineWorker._engine_rank_beside(worker, WantedSlices(SLICES, {device(7): 3})) == expected
    if cuda:
        assert EngineWorker._engine_rank_beside(worker, WantedSlices(SLICES, {device(6): 3})) == -1


@pytest.mark.parametrize(("name", "expected"), [("7B", 0), ("70B", 723 - 161)])
def test_nothing_comes_from_neighbours_where_both_sides_are_cut_alike(name: str, expected: int) -> None:
    """Of the 70B model, all weights but the norms of 80 layers and the last one."""
    layout = LAYOUTS[name]
    manifest = manifest_of(layout)
    found = moved(manifest, layout, wanted_of(layout, manifest))
    assert len(found.handed.slices) == expected
    whole = sum(tensor.nbytes for tensor in manifest.tensors)
    assert found.gathered_whole == pytest.approx(whole * (layout.tensor - 1) / layout.tensor, rel=1e-4)
    if expected:
        norms = sum(tensor.nbytes for tensor in manifest.tensors if "norm" in tensor.name)
        handed = norms + (manifest.total_bytes - norms) // layout.engine
        assert found.gathered == 0 and sum(tensor.nbytes for tensor in found.handed.tensors) == handed
    else:
        assert found.gathered == found.gathered_whole


@pytest.mark.parametrize("name", ["30B-A3B, divided alike", "30B-A3B, engine cut", "671B, divided alike"])
def test_a_rank_gets_its_experts_and_those_from_nowhere_where_both_sides_divide_them_alike(name: str) -> None:
    layout = LAYOUTS[name]
    manifest = manifest_of(layout)
    found = moved(manifest, layout, wanted_of(layout, manifest))
    assert experts_kept(found.handed) * layout.engine == experts_kept(manifest) > 10**9
    assert (
        found.gathered == (0 if layout.divided else found.gathered_whole)
        and found.gathered_whole > 40 * 10**9
    )
    layers = layout.sizes["num_hidden_layers"] - layout.sizes.get("first_k_dense_replace", 0)
    experts = sum(".experts." in tensor.name for tensor in manifest.tensors)
    assert weights_loaded(manifest) == len(manifest.tensors) - experts + 3 * layers
