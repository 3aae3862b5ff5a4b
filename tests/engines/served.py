"""Engines of every kind beside a policy whose weights they serve."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from transformers import AutoTokenizer

from megarl.algorithms.refit import Refit
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.models.policy.lm_policy import Policy
from megarl.models.policy.policy_engines import PolicyEngines, engine_policy
from tests.models import policy_config
from tests.system.vllm_engines import NEW, SAMPLING, engines
from tests.toys import engine_actor, transformers_engine

LONGEST = 64
"""Tokens of prompt and completion together, in every kind."""


@dataclass
class Served:
    """A policy and what generates with its weights.

    Attributes:
        policy: it trains.
        engine: a ``RolloutEngine``, or the policy itself.
        refit: None where the policy generates itself.
        restarts: new engines can be started in place of the present ones.
    """

    policy: Policy
    engine: Any
    refit: Refit | None
    restarts: bool = False

    def change_weights(self) -> None:
        """Change all weights of the policy, as a training step does."""
        self.policy.prepare_for_lp_inference()
        self.policy._call_all("_add_noise_to_weights")
        if self.refit is not None:
            self.refit.stale = True

    def prepare(self) -> None:
        """Bring the newest weights to the engine, which may then generate; the policy may compute
        log-probabilities."""
        if self.refit is not None:
            self.refit.bring_up_to_date()
        self.policy.prepare_for_lp_inference()

    def close(self) -> None:
        assert self.policy.shutdown() and (self.engine is self.policy or self.engine.shutdown())


def _settings(model: Path, **generation: Any) -> dict[str, Any]:
    """Two data-parallel ranks of Megatron, whose weights go in several groups."""
    config = policy_config(model, gbs=8, mbs=2) | {
        "max_total_sequence_length": LONGEST,
        "refit_buffer_size_gb": 0.0005,
    }
    own = {"max_new_tokens": NEW, "stop_token_ids": [], "stop_strings": None, "pad_token_id": 0}
    config["generation"] = {**config["generation"], **own, **SAMPLING, **generation}
    return config


def _policy(model: Path, config: Mapping[str, Any]) -> Policy:
    cluster = RayVirtualCluster([2], use_gpus=False, name="trains")
    return Policy(cluster, config, AutoTokenizer.from_pretrained(model), init_reference_model=False)


def policy_itself(model: Path) -> Served:
    policy = _policy(model, _settings(model))
    return Served(policy, policy, None)


def _apart(model: Path, start: Callable[[Policy], Any], *, restarts: bool, **generation: Any) -> Served:
    policy = _policy(model, _settings(model, colocated={"enabled": False}, **generation))
    engine = start(policy)
    return Served(policy, engine, Refit(policy, engine, colocated=False), restarts)


def policy_apart(model: Path) -> Served:
    """Two copies of the policy's own backend."""

    def start(policy: Policy) -> PolicyEngines:
        cluster, section = (
            RayVirtualCluster([2], use_gpus=False, name="generates"),
            engine_policy(policy.cfg, 2),
        )
        return PolicyEngines(
            lambda: Policy(cluster, section, policy.tokenizer, "generation", init_optimizer=False)
        )

    return _apart(model, start, restarts=True, engine_cfg={"tensor_parallel_size": 1})


def _toy(model: Path, module: ModuleType, *, restarts: bool) -> Served:
    # started by what is imported: workers of Ray could not import a module by its path
    return _apart(
        model,
        lambda policy: module.KIND.start(None, {"policy": policy.cfg}),
        restarts=restarts,
        backend=f"{module.__file__}:KIND",
    )


def toy(model: Path) -> Served:
    return _toy(model, transformers_engine, restarts=False)


def toy_in_an_actor(model: Path) -> Served:
    return _toy(model, engine_actor, restarts=True)


def vllm_apart(model: Path) -> Served:
    """Two engines."""
    return _apart(
        model, lambda policy: engines(model, "vllm-apart", colocated=False, places=2), restarts=True
    )


def vllm_colocated(model: Path) -> Served:
    policy, engine = _policy(model, _settings(model)), engines(model, "vllm-colocated", colocated=True)
    return Served(policy, engine, Refit(policy, engine, colocated=True), restarts=True)
