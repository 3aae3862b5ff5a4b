"""Workers of the policy's own backend that only generate, on real Ray: refitted from other layouts, checked
for the weights they serve."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MismatchError, RefitError
from tests.dist.batches import make_batch
from tests.faults.served import DENSE, FAULTS, SPARSE, TIED, Pair
from tests.tiers import slow

pytestmark = slow


@pytest.fixture(scope="module")
def pair(
    request: pytest.FixtureRequest, local_ray: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("engines"), request.param)
    yield made
    made.close()


of_both = pytest.mark.parametrize("pair", [DENSE, SPARSE], indirect=True, scope="module")


@of_both
def test_engines_answer_with_the_weights_of_the_refit(pair: Pair) -> None:
    batch = BatchedDataDict(make_batch(5, 9, seed=4))
    with pytest.raises(RefitError, match="no complete weights"):
        pair.engines.generate(batch)
    for _ in range(2):
        pair.change_the_policy()
        pair.refit.bring_up_to_date()
        pair.check.check()
        pair.policy.prepare_for_lp_inference()
        ours, [theirs] = pair.policy.get_logprobs(batch)["logprobs"], pair.engines.score(batch)
        torch.testing.assert_close(theirs, ours, atol=1e-5, rtol=0)
    answered = pair.engines.generate(batch, greedy=True)
    assert bool((answered["generation_lengths"] > 0).all())


@of_both
def test_other_weights_are_named(pair: Pair) -> None:
    pair.refit.stale = True
    pair.refit.bring_up_to_date()
    pair.check.check()
    pair.change_the_engines()
    with pytest.raises(MismatchError, match="weights in the engines differ from the policy's: "):
        pair.check.check()
    # as of engines that keep weights in forms of their own
    pair.engines.weight_digests = lambda: None  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(MismatchError, match=r"log-probabilities of .* differ from the policy"):
        pair.check.check()
    del pair.engines.weight_digests
    pair.refit.stale = True
    pair.refit.bring_up_to_date()
    pair.check.check()


@of_both
def test_old_weights_are_named(pair: Pair) -> None:
    """A refit that did not happen: verl's adapters never came for two months."""
    pair.change_the_policy()
    with pytest.raises(MismatchError, match="weights in the engines differ from the policy's"):
        pair.check.check()
    pair.refit.bring_up_to_date()
    pair.check.check()


@pytest.mark.parametrize("pair", [DENSE, SPARSE, TIED], indirect=True, scope="module")
def test_planted_faults_are_named_at_their_refits(pair: Pair) -> None:
    missed = {}
    for name in pair.faults():
        named, said = pair.is_named(name)
        # as of engines that keep weights in forms of their own
        by_scores = pair.said_of(name, by_weights=False)
        if not named or not (by_scores or not FAULTS[name].shows):
            missed[name] = said, by_scores
        assert pair.said_at_refit() == "", f"a whole refit behind {name}"
    assert not missed
