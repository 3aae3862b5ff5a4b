"""Reward functions: the built-in ones by name, and a user's own by import path.

A user's function takes a response and the reference answer, both texts, or the prompt, the response and the record. It returns a number,
or a dictionary with the number under ``score`` and, under ``acc``, whether the response is right (0 to 1), which validation reports::

    def reward(response: str, answer: str) -> float:
        return float(answer in response)

    def judged(prompt: str, response: str, record: dict) -> dict:
        right = record["answer"] in response
        return {"score": right - 0.1 * ("sorry" in response), "acc": right}

``env.reward: path/to/file.py:reward`` (or ``package.module:reward``) names it. ``record`` has ``answer``, ``index`` and the fields of the
data record, as far as the data set keeps them. An attribute ``fault_of_reference`` of the function, where it has one, is called with every
reference answer when the data are read, and says why an answer is of no use, or returns None.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from megarl.config.environments import OPTIONS, REWARD, check_reward
from megarl.errors import ConfigError, Violation
from megarl.import_path import is_import_path, load_object
from megarl.rollout import answers, mathematics


@dataclass(frozen=True, slots=True)
class Task:
    """Task: one response to be judged.

    Attributes:
        response: text of the policy, without special tokens.
        answer: the reference answer.
        length: tokens of the response.
        prompt: its text; empty where the reward does not ask for it.
        record: fields of the data record, with ``answer`` and ``index``; empty likewise.
    """

    response: str
    answer: str
    length: int = 0
    prompt: str = ""
    record: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Reward spec: which reward it is. Plain values, so that a process of the pool can be told.

    Attributes:
        name: of a built-in reward, or an import path.
        options: of a built-in reward, see ``RewardOptions``.
        timeout_s: seconds that it may take for one response.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 5.0

    @classmethod
    def of_section(cls, section: Mapping[str, Any]) -> RewardSpec:
        """The reward that a section of a configuration names (``rewards_of``)."""
        name = section["reward"]
        return cls(name, {key: section[key] for key in OPTIONS.get(name, ()) if key in section}, section["timeout_s"])


@dataclass(frozen=True, slots=True)
class Reward:
    """Reward: what the pool and the environment know of a reward.

    Attributes:
        judge: the number, or a mapping with ``score`` and ``acc``, of a task.
        fault_of_reference: why a reference answer is of no use, or None; itself None where every answer is of use.
        is_immediate: it neither fails nor hangs nor takes long, so that the driver may compute it.
        wants_record: it reads the prompt and the record of a task.
        tells_right_from_wrong: its number is also the accuracy of the response. False for what shapes a reward.
    """

    judge: Callable[[Task], Any]
    fault_of_reference: Callable[[str], str | None] | None = None
    is_immediate: bool = False
    wants_record: bool = False
    tells_right_from_wrong: bool = True


def _exact_match(strip: bool = True) -> Reward:
    if strip:
        return Reward(lambda task: float(task.response.strip() == task.answer.strip()), is_immediate=True)
    return Reward(lambda task: float(task.response == task.answer), is_immediate=True)


def _math(math_verify_impl: str = "hf_math_verify") -> Reward:
    if math_verify_impl == "dapo_math_verify":
        return Reward(lambda task: answers.dapo_match(task.response, task.answer), answers.fault_of_text)
    return Reward(lambda task: mathematics.math_verify(task.response, task.answer), mathematics.fault_of_reference)


def _gsm8k(gsm8k_method: str = "strict") -> Reward:
    return Reward(lambda task: answers.gsm8k(task.response, task.answer, gsm8k_method), answers.fault_of_gsm8k)


def _multichoice() -> Reward:
    return Reward(lambda task: answers.multichoice(task.response, task.answer), answers.fault_of_choice)


def _format(pattern: str | None = None) -> Reward:
    if pattern is None:
        return Reward(lambda task: answers.thinks_first(task.response), tells_right_from_wrong=False)
    wanted = re.compile(pattern, re.DOTALL)
    return Reward(lambda task: float(wanted.fullmatch(task.response) is not None), tells_right_from_wrong=False)


def _length(max_response_length: int) -> Reward:
    """Minus the share of the longest response that this one takes."""
    return _shaping(lambda task: overlong_penalty(task.length, max_response_length, max_response_length))


def _overlong(max_response_length: int, overlong_buffer_length: int) -> Reward:
    return _shaping(lambda task: overlong_penalty(task.length, max_response_length, overlong_buffer_length))


def _shaping(judge: Callable[[Task], float]) -> Reward:
    return Reward(judge, is_immediate=True, tells_right_from_wrong=False)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Soft penalty for long responses: 0 up to longest - buffer tokens, falling to -1 at the longest (DAPO, arXiv 2503.14476, eq. 13).

    Args:
        length: tokens of the response.
        longest: L_max, at least ``buffer``.
        buffer: L_cache, at least 1.
    """
    return max(min(longest - buffer - length, 0) / buffer, -1.0)


REWARDS: Mapping[str, Callable[..., Reward]] = MappingProxyType(
    {
        "exact_match": _exact_match,
        "math": _math,
        "math_verify": _math,
        "gsm8k": _gsm8k,
        "multichoice": _multichoice,
        "format": _format,
        "length": _length,
        "overlong": _overlong,
    }
)
"""Built-in rewards by the name that ``env.reward`` takes; each is made with its options (``RewardOptions``)."""


def get_reward(spec: RewardSpec) -> Reward:
    """The reward that a specification names.

    Raises:
        ConfigError: there is no such reward, or at the import path nothing that can be called with two or three arguments.
    """
    check_reward(spec.name)
    if is_import_path(spec.name):
        return _of_function(spec.name, load_object(spec.name, REWARD))
    return REWARDS[spec.name](**spec.options)


def _of_function(name: str, function: Callable[..., Any]) -> Reward:
    """A user's function, which says by its parameters what it takes."""
    fault = getattr(function, "fault_of_reference", None)
    if _takes(function, 2):
        return Reward(lambda task: function(task.response, task.answer), fault)
    if _takes(function, 3):
        return Reward(lambda task: function(task.prompt, task.response, dict(task.record)), fault, wants_record=True)
    bound = f"it takes {inspect.signature(function)}, and (response, answer) or (prompt, response, record) is wanted"
    raise ConfigError([Violation(REWARD, name, bound, "give it one of these two lists of parameters")])


def _takes(function: Callable[..., Any], arguments: int) -> bool:
    """Whether it can be called with so many arguments; one that does not say takes two."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return arguments == 2
    try:
        signature.bind(*[None] * arguments)
    except TypeError:
        return False
    return True


def verdict(value: Any) -> tuple[float, float | None]:
    """Score and accuracy of what a reward returned; no accuracy where it does not tell one.

    Raises:
        TypeError, ValueError: it is no number, nor a mapping with one under ``score``.
    """
    if not isinstance(value, Mapping):
        return float(value), None
    if "score" not in value:
        raise ValueError(f"it returned the keys {', '.join(map(str, value))}, and score is wanted")
    accuracy = value.get("acc")
    return float(value["score"]), None if accuracy is None else float(accuracy)
