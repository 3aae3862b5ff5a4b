"""Verifiable rewards: 1 for a right answer, 0 for a wrong one, by comparing texts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from megarl.errors import ConfigError, Violation

logger = logging.getLogger(__name__)

RewardFunction = Callable[[str, str], float]
"""(response, reference answer) -> reward."""

_CHECK_SECONDS = 5


def exact_match(response: str, answer: str, strip: bool = True) -> float:
    """1.0 when the texts are equal; with ``strip``, white space at both ends does not count."""
    return float(response.strip() == answer.strip()) if strip else float(response == answer)


def math_verify(response: str, answer: str) -> float:
    """1.0 when the response's last mathematical expression equals the answer's (library `math_verify`): 1/2 equals 0.5.

    A response that cannot be parsed or compared gets 0.0. In the main thread a check takes at most a few seconds; the library's time limits
    work by signals, so in any other thread there is none.
    """
    from math_verify import parse, verify

    # Without a time limit the library warns at every call.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    seconds = _CHECK_SECONDS if threading.current_thread() is threading.main_thread() else None
    try:
        gold = parse(answer, parsing_timeout=seconds)
        return float(verify(gold, parse(response, parsing_timeout=seconds), timeout_seconds=seconds))
    except Exception as error:
        # Sympy raises errors of any class on text that only looks like mathematics; one odd answer must not end a run.
        logger.warning("math_verify could not compare %r with %r: %s", response[-80:], answer[-80:], error)
        return 0.0


REWARDS: Mapping[str, RewardFunction] = MappingProxyType({"exact_match": exact_match, "math_verify": math_verify})
"""All rewards by the name that ``env.reward`` takes."""


def get_reward(name: str, strip: bool = True) -> RewardFunction:
    """The reward of that name.

    Args:
        name: ``exact_match`` or ``math_verify``.
        strip: for ``exact_match``: ignore white space at both ends.

    Raises:
        ConfigError: there is no such reward.
    """
    if name not in REWARDS:
        raise ConfigError([Violation("env.reward", name, f"must be one of {', '.join(sorted(REWARDS))}", "write one of those names")])
    return partial(exact_match, strip=strip) if name == "exact_match" else REWARDS[name]


def compute_rewards(reward: RewardFunction, responses: Sequence[str], answers: Sequence[str]) -> Tensor:
    """The reward of each response, [B] float32."""
    pairs = zip(responses, answers, strict=True)
    return torch.tensor([reward(response, answer) for response, answer in pairs], dtype=torch.float32)
