"""Reward functions: the built-in ones by name, and a user's own by import path.

A reward function takes a response and the reference answer, both texts, and returns a number::

    def reward(response: str, answer: str) -> float:
        return float(answer in response)

``env.reward: path/to/file.py:reward`` (or ``package.module:reward``) names it. An attribute ``fault_of_reference`` of the function, where
it has one, is called with every reference answer when the data are read, and says why an answer is of no use, or returns None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from megarl.config.environments import REWARD, check_reward
from megarl.import_path import is_import_path, load_object
from megarl.rollout import mathematics

RewardFunction = Callable[[str, str], float]
"""(response, reference answer) -> reward."""


def exact_match(response: str, answer: str) -> float:
    """1.0 when the texts are equal but for white space at both ends."""
    return float(response.strip() == answer.strip())


def literal_match(response: str, answer: str) -> float:
    """1.0 when the texts are equal to the last blank."""
    return float(response == answer)


REWARDS: Mapping[str, RewardFunction] = MappingProxyType({"exact_match": exact_match, "math_verify": mathematics.math_verify})
"""Built-in rewards by the name that ``env.reward`` takes."""

_IMMEDIATE = (exact_match, literal_match)
"""Rewards that neither fail nor hang: they need no process of their own."""


def get_reward(name: str, strip: bool = True) -> RewardFunction:
    """The reward function of that name or import path.

    Args:
        name: ``exact_match``, ``math_verify``, or an import path.
        strip: for ``exact_match``: ignore white space at both ends.

    Raises:
        ConfigError: there is no such reward, or nothing at the import path that can be called.
    """
    check_reward(name)
    if is_import_path(name):
        function: RewardFunction = load_object(name, REWARD)
        return function
    return literal_match if name == "exact_match" and not strip else REWARDS[name]


def is_immediate(function: RewardFunction) -> bool:
    """Whether a reward is computed at once and cannot fail, so that the driver may compute it."""
    # by identity: an object of a user's own need not be hashable
    return any(function is each for each in _IMMEDIATE)


def fault_of_reference(function: Any) -> Callable[[str], str | None] | None:
    """Return what says why a reference answer is of no use to a reward function; None where every answer is."""
    if function is mathematics.math_verify:
        return mathematics.fault_of_reference
    return getattr(function, "fault_of_reference", None)
