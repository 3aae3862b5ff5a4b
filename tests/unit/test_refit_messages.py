"""What the driver says at a refit, counted over groups of workers that are played: as much at any number of ranks and weights."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.cases import messages
from benchmarks.cases.messages import CALLS, LIFE, VERSION, Workers, counted, driver_of
from megarl.algorithms.refit import refit_policy_generation
from megarl.errors import RefitError
from megarl.models.generation.vllm.generation import VllmGeneration
from megarl.models.policy.lm_policy import Policy
from megarl.weight_sync.manifest import Manifest

WEIGHTS = Manifest.from_description({f"layer.{number}": ((64, 64), torch.bfloat16) for number in range(40)})
OF_WEIGHTS = 64 * 64 * 2


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty groups."""
    monkeypatch.setattr(messages, "DEFAULT_SLOT_BYTES", 2 * OF_WEIGHTS)


def workers_of(policy: Policy, generation: VllmGeneration) -> tuple[Workers, Workers]:
    groups: Any = policy.worker_group, generation.worker_group
    return groups


@pytest.mark.parametrize("ranks", [8, 1024])
def test_a_refit_is_one_call_of_either_side_at_any_number_of_ranks(ranks: int) -> None:
    policy, generation = driver_of(WEIGHTS, ranks, ranks // 4, 4)
    counted(policy, generation, "hand over")
    found = counted(policy, generation, "hand over")
    assert (found.calls, found.others, found.messages) == (CALLS, 4, ranks + ranks // 4)
    ours, theirs = ({name: count for name, count in group.calls.items() if name not in LIFE} for group in workers_of(policy, generation))
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
    """The policy leaves its devices, engines start and sleep, its parameters return; engines apart start beside it."""
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
    order = ["policy: offload_after_refit", "start", "engines: connect", "engines: finish_generation", "policy: prepare_for_lp_inference"]
    assert said == order
    with pytest.raises(RefitError, match="no whole weights"):
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
    with pytest.raises(RefitError, match=r"said by a worker|not all engines have the same whole weights"):
        refit_policy_generation(policy, generation, colocated_inference=True)
    assert generation.version is None
    with pytest.raises(RefitError, match=r"no whole weights|said by a worker|has the weights of version 4 where version 3 was sent last"):
        generation._require_weights()
    group.answers = {**group.answers, method: lambda worker, **options: VERSION}
    refit_policy_generation(policy, generation, colocated_inference=True)
    assert generation.version == VERSION


def test_a_group_smaller_than_a_weight_is_refused_before_anything_is_said() -> None:
    policy, generation = driver_of(WEIGHTS, 8, 2, 4)
    with pytest.raises(RefitError, match=rf"_refit_buffer_size_gb = 1e-06: layer\.0 alone takes {OF_WEIGHTS} bytes"):
        policy.hand_over_weights(1, 2, 1e-6)
    policy.hand_over_weights(1, 2, 1.0)
    assert workers_of(policy, generation)[0].calls["hand_over_weights"] == 1
