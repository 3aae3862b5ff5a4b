"""The policy itself, copies of it on ranks of their own, and engines that somebody else has written."""

from __future__ import annotations

import pytest

from tests.engines.served import policy_apart, policy_itself, toy, toy_in_an_actor
from tests.engines.suite import Suite, served
from tests.tiers import slow

__all__ = ["served"]
KINDS = [
    policy_itself,
    toy,
    pytest.param(policy_apart, marks=slow),
    pytest.param(toy_in_an_actor, marks=slow),
]


@pytest.mark.parametrize("served", KINDS, indirect=True)
class TestPoliciesAndToys(Suite):
    pass
