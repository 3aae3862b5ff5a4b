"""Workers of the policy's own backend that only generate, on real Ray: refitted from other layouts, checked
for the weights they serve."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.algorithms.refit import Refit
from megarl.algorithms.served import ServedCheck
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.virtual_cluster import RayVirtualCluster
from megarl.errors import MismatchError, RefitError
from megarl.models.policy.lm_policy import Policy
from megarl.models.policy.policy_engines import PolicyEngines, engine_policy
from tests.dist.batches import make_batch
from tests.models import make_tiny, policy_config
from tests.tiers import slow

pytestmark = slow


class Pair:
    """A policy that trains and engines apart, and what a run has between them."""

    def __init__(self, directory: Path, family: str, tensor: int, **layout: Any) -> None:
        model = make_tiny(directory / family, family, tied=False, layers=4)
        apart = {"colocated": {"enabled": False}, "engine_cfg": {"tensor_parallel_size": tensor}}
        config = policy_config(model, generation=apart, **layout)
        self.clusters = [
            RayVirtualCluster([2], use_gpus=False, name=name) for name in ("trains", "generates")
        ]
        self.policy = Policy(self.clusters[0], config, None, seed=3)
        section = engine_policy(self.policy.cfg, 2)
        self.engines = PolicyEngines(
            lambda: Policy(self.clusters[1], section, None, "generation", init_optimizer=False)
        )
        self.refit = Refit(self.policy, self.engines, colocated=False)
        precision = config["precision"]
        self.check = ServedCheck(
            {"sequences": 3, "on_difference": "stop"}, self.policy, self.engines, precision, seed=5
        )
        self.check.remember(BatchedDataDict(make_batch(7, 11, seed=2)), 1)

    def change_the_policy(self) -> None:
        self.policy._call_all("_add_noise_to_weights")
        self.refit.stale = True

    def change_the_engines(self) -> None:
        self.engines._policy._call_all("_add_noise_to_weights")

    def close(self) -> None:
        assert self.engines.shutdown() and self.policy.shutdown()
        for cluster in self.clusters:
            cluster.shutdown()


@pytest.fixture(
    scope="module",
    params=[("qwen2", 2, {"tp": 1, "pp": 2}), ("qwen3_moe", 1, {"tp": 1, "ep": 2})],
    ids=["stages to tensor parallel", "divided experts to copies"],
)
def pair(
    request: pytest.FixtureRequest, local_ray: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    family, tensor, layout = request.param
    made = Pair(tmp_path_factory.mktemp("engines"), family, tensor, **layout)
    yield made
    made.close()


def test_engines_answer_with_the_weights_of_the_refit(pair: Pair) -> None:
    batch = BatchedDataDict(make_batch(5, 9, seed=4))
    with pytest.raises(RefitError, match="no whole weights"):
        pair.engines.generate(batch)
    for _ in range(2):
        pair.change_the_policy()
        pair.refit.bring_up_to_date()
        pair.check.check()
        pair.policy.prepare_for_lp_inference()
        ours, theirs = pair.policy.get_logprobs(batch)["logprobs"], pair.engines.score(batch)
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    answered = pair.engines.generate(batch, greedy=True)
    assert bool((answered["generation_lengths"] > 0).all())


def test_other_weights_are_named(pair: Pair) -> None:
    pair.refit.stale = True
    pair.refit.bring_up_to_date()
    pair.check.check()
    pair.change_the_engines()
    with pytest.raises(MismatchError, match="weights are not the policy's in the engines: "):
        pair.check.check()
    # as of engines that keep weights in forms of their own
    pair.engines.weight_digests = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(MismatchError, match=r"log-probabilities of .* apart"):
        pair.check.check()
    del pair.engines.weight_digests
    pair.refit.stale = True
    pair.refit.bring_up_to_date()
    pair.check.check()


def test_old_weights_are_named(pair: Pair) -> None:
    """A refit that did not happen: verl's adapters never came for two months."""
    pair.change_the_policy()
    with pytest.raises(MismatchError, match="weights are not the policy's"):
        pair.check.check()
    pair.refit.bring_up_to_date()
    pair.check.check()
