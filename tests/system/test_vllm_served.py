"""vLLM's engines under the check of the served policy: faults planted in running ones are named at their
refits."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest

from megarl.errors import RefitError
from tests.faults.served import VLLM, Pair, give_up_unfinished, leave_unfinished
from tests.tiers import slow

pytestmark = [
    slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]


@pytest.fixture(scope="module")
def pair(local_ray: int, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    made = Pair(tmp_path_factory.mktemp("engines"), VLLM)
    yield made
    made.close()


def test_planted_faults_are_named_at_their_refits(pair: Pair) -> None:
    missed = {}
    for name in pair.faults():
        named, said = pair.is_named(name)
        if not named:
            missed[name] = said
        assert pair.said_at_refit() == "", f"a whole refit behind {name}"
    assert not missed


def test_an_old_cache_is_named_at_its_refit(pair: Pair) -> None:
    pair.in_engines(leave_unfinished)
    with pytest.raises(RefitError, match="keeps keys and values of the older weights"):
        pair.said_at_refit()
    pair.in_engines(give_up_unfinished)
    assert pair.said_at_refit() == ""
