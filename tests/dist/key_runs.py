"""Runs real workers of changed configurations on the pool, each configuration once and several in one job."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megarl.config import check, complete_policy, read_model_facts, validate_policy_config
from megarl.config.schema import check_policy
from megarl.errors import ConfigError, Violation
from megarl.parity.pool import WorkerPool
from tests.dist import key_observations
from tests.unit.config_samples import changed

ADAMW = {"name": "torch.optim.AdamW", "kwargs": {"lr": 1e-2}}
# FSDP1 wraps nothing on one rank
RANKS = {"megatron": 1, "dtensor": 1, "fsdp1": 2}
OWN: dict[str, dict[str, Any]] = {
    "megatron": {"megatron_cfg": {"enabled": True, "optimizer": {"lr": 1e-2}}},
    "dtensor": {"dtensor_cfg": {"enabled": True}, "optimizer": ADAMW},
    "fsdp1": {"optimizer": ADAMW},
}
TOGETHER = 6


@dataclass(frozen=True, slots=True)
class Run:
    """One worker's life on each of some ranks.

    Attributes:
        observation: a function of ``tests.dist.key_observations``.
        policy: as a user writes it.
        world: ranks.
    """

    observation: str
    policy: Mapping[str, Any]
    world: int


@dataclass(frozen=True, slots=True)
class _Job:
    """A run with its checked and completed configuration."""

    observation: str
    config: Mapping[str, Any]
    world: int

    @classmethod
    def of(cls, run: Run) -> _Job:
        return cls(run.observation, validate_policy_config(run.policy, run.world), run.world)

    @property
    def name(self) -> str:
        """The same for equal runs."""
        return json.dumps([self.observation, self.world, self.config], sort_keys=True)


class Keys:
    """Configurations of the tiny models, and what is seen of workers built from them."""

    def __init__(self, pool: WorkerPool, models: dict[str, Path]) -> None:
        self.pool = pool
        self.models = models
        self._waiting: dict[str, _Job] = {}
        self._seen: dict[str, list[Any]] = {}

    def policy(self, backend: str, model: str, *changes: Mapping[str, Any]) -> dict[str, Any]:
        """A ``policy`` as a user writes it, with changes at dotted paths."""
        base = {
            "model_name": str(self.models[model]),
            "tokenizer": {"name": str(self.models["tokenizer"])},
            "train_global_batch_size": 8,
            "train_micro_batch_size": 4,
            "logprob_batch_size": 3,
            "precision": "float32",
            "max_total_sequence_length": 64,
            "generation": {"max_new_tokens": 4},
        }
        policy = copy.deepcopy({**base, **OWN[backend]})
        for change in changes:
            changed(
                policy, {path: self._with_model(value) for path, value in copy.deepcopy(dict(change)).items()}
            )
        return policy

    def _with_model(self, value: Any) -> Any:
        if isinstance(value, str) and value.startswith("model:"):
            return str(self.models[value.removeprefix("model:")])
        return value

    def will_want(self, run: Run) -> None:
        """Let ``run`` go along in a job with others; one that is refused waits for its own turn to say so."""
        try:
            job = _Job.of(run)
        except ConfigError:
            return
        self._waiting.setdefault(job.name, job)

    def seen(self, run: Run, *, again: bool = False) -> list[dict[str, Any]]:
        """What every rank sees; ``again`` does not take it from an earlier run."""
        job = _Job.of(run)
        if again or job.name not in self._seen:
            self._observe(job)
        failed = [rank for rank in self._seen[job.name] if isinstance(rank, str)]
        assert not failed, failed[0]
        return self._seen[job.name]

    def _observe(self, job: _Job) -> None:
        """Run ``job`` and, with it, some that wait for as many ranks."""
        self._waiting.pop(job.name, None)
        others = [other for other in self._waiting.values() if other.world == job.world][: TOGETHER - 1]
        jobs = [job, *others]
        ranks = self.pool.run(
            job.world, key_observations.observe, [(one.observation, one.config) for one in jobs]
        )
        for place, one in enumerate(jobs):
            self._waiting.pop(one.name, None)
            self._seen[one.name] = [seen[place] for seen in ranks]

    def violations(self, policy: dict[str, Any]) -> dict[str, Violation]:
        """What is wrong with a policy on one CPU, by key."""
        config = {
            "policy": complete_policy(policy),
            "cluster": {"gpus_per_node": 1, "num_nodes": 1, "device": "cpu"},
        }
        found = [*check_policy(policy), *check(config, read_model_facts(policy["model_name"]))]
        return {violation.key: violation for violation in found}
