"""Sampling seeds of batches that bring none: drawn anew at each call that is answered, of a policy, of
engines, and of engines that were started again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import RefitError, WorkerError
from megarl.models.generation.engine_group import EngineGroup, EngineWorkers
from megarl.models.generation.sampling import seeds_of_call
from megarl.models.policy.lm_policy import Policy, _sharding
from megarl.models.policy.policy_engines import PolicyEngines
from tests.models import policy_config

SEED = 5
PROMPTS: BatchedDataDict[Any] = BatchedDataDict(
    {"input_ids": torch.ones(6, 3, dtype=torch.int64), "input_lengths": torch.full((6,), 3)}
)


class Played:
    """Workers that answer every prompt with nothing; their seeds are noted. A failing call is noted too."""

    def __init__(self) -> None:
        self.seeds: list[list[int]] = []
        self.failing = False

    def run_all_workers_sharded_data(self, method: str, data: Any, **options: Any) -> list[Any]:
        [deal] = data[0] if isinstance(data[0], list) else data
        return [deal.shard()]

    def get_all_worker_results(self, future: list[Any], **options: Any) -> list[Any]:
        [rows] = future
        self.seeds.append(rows["sampling_seeds"].tolist())
        if self.failing:
            raise WorkerError("no memory")
        ends = rows["input_lengths"]
        answer = {
            "output_ids": rows["input_ids"],
            "generation_lengths": torch.zeros_like(ends),
            "unpadded_sequence_lengths": ends,
            "logprobs": torch.zeros(rows["input_ids"].shape),
        }
        return [BatchedDataDict(answer)]

    def shutdown(self, **options: Any) -> bool:
        return True


def policy_of(workers: Any) -> Policy:
    """A policy on workers that are played, without its constructor, which starts some."""
    policy = object.__new__(Policy)
    policy.cfg = policy_config("none")  # type: ignore[assignment]
    policy.sharding_annotations = _sharding(policy.cfg, 1)
    policy.worker_group = workers
    policy._seed, policy._vocab_size, policy.generate_calls = SEED, 64, 0
    return policy


def engines_of(workers: Any) -> EngineGroup:
    config: Any = {**policy_config("none")["generation"], "colocated": {"enabled": False}}
    made = EngineWorkers(make=lambda: workers, engines=1, ranks=1, nodes=1, init_timeout_s=1.0)
    group = EngineGroup(made, config, vocab_size=64, longest=64, longest_key="longest", seed=SEED)
    group.expected_version, group._versions = 1, [1]
    return group


def test_no_seed_of_a_call_is_drawn_at_another() -> None:
    drawn = np.stack([seeds_of_call(SEED, call, 64).numpy() for call in range(64)])
    assert len(np.unique(drawn)) == drawn.size
    assert torch.equal(seeds_of_call(SEED, 3, 8), seeds_of_call(SEED, 3, 64)[:8])
    assert len(seeds_of_call(SEED, 3, 0)) == 0


@pytest.mark.parametrize("make", [policy_of, engines_of])
def test_a_call_that_is_made_again_draws_the_same_seeds(make: Callable[[Any], Any]) -> None:
    workers = Played()
    generating = make(workers)
    generating.generate(PROMPTS)
    workers.failing = True
    with pytest.raises(WorkerError):
        generating.generate(PROMPTS)
    workers.failing = False
    if isinstance(generating, EngineGroup):
        # the failure made them forget their weights
        generating.loaded([1])
    for _ in range(2):
        generating.generate(PROMPTS)
    first, failed, again, third = workers.seeds
    assert failed == again
    assert len({*first, *again, *third}) == 3 * len(first)


def test_engines_that_start_anew_go_on_with_other_seeds() -> None:
    workers = Played()
    engines = PolicyEngines(lambda: policy_of(workers))
    for _ in range(2):
        with pytest.raises(RefitError, match="no complete weights"):
            engines.generate(PROMPTS)
        with pytest.raises(RefitError, match="no complete weights"):
            engines.score(PROMPTS)
        engines.loaded([1, 1])
        engines.generate(PROMPTS)
        engines.restart()
    first, second = workers.seeds
    assert not {*first} & {*second}
