"""Reward functions: the built-in ones by name, and user-defined ones by import path.

``env.reward: path/to/file.py:reward`` (or ``package.module:reward``) names a user-defined function. Its
parameter names determine which arguments it gets (``megarl.config.reward_arguments``): the response, the
reference answer, the prompt, the record. It returns a number, or a dictionary with the number as ``score``
and optionally the response's accuracy (0 to 1) as ``acc``, which validation reports::

    def reward(response: str, answer: str) -> float:
        return float(answer in response)

    def polite(prompt: str, response: str, record: dict) -> dict:
        correct = record["answer"] in response
        return {"score": correct - 0.1 * ("sorry" in response), "acc": correct}

Functions written for verl (``compute_score(data_source, solution_str, ground_truth, extra_info)``), TRL
(``completions, **columns``, called with lists of length 1) and verifiers (``completion, answer, state``) work
unchanged.

``record`` holds ``answer``, ``index`` and the fields of the data record that the data set keeps. A function
may have two optional attributes. ``fault_of_reference(answer)`` is called with each reference answer while
the data are read, and returns why it cannot be used, or None. ``final_answer(response)`` returns the final
answer in a response as text, or None; validation needs it to compute the majority answer.
"""

from __future__ import annotations

import asyncio
import http.client
import inspect
import json
import re
import reprlib
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from megarl.config.environments import OPTIONS, REWARD, RewardConfig, check_reward
from megarl.config.nested import at
from megarl.config.reward_arguments import arguments_of, values_for
from megarl.errors import ConfigError, RewardError, RewardOutageError, Violation
from megarl.import_path import is_import_path, load_object
from megarl.rollout import answers, mathematics, programs

if TYPE_CHECKING:
    from megarl.data.records import Doubt

# Maximum number of bytes read from a scorer's reply.
_LARGEST_REPLY = 1 << 20

# Maximum pause before the second request, in seconds; later pauses double.
_LONGEST_PAUSE = 0.5

# HTTP statuses that a single request can cause, for example a response on which the scorer crashes. All
# others point to the scorer or the network.
_OF_THE_QUESTION = frozenset({400, 413, 422, 500})

# Share of the reward's time limit that the tests may use when scores are partial; the rest is for the work
# around them.
_SHARE_OF_TESTS = 0.9


class Task(NamedTuple):
    """One response to be scored by a reward function.

    Attributes:
        response: response text without special tokens.
        answer: the reference answer.
        length: number of tokens in the response.
        prompt: prompt text; empty if the reward does not read it.
        record: fields of the data record, plus ``answer`` and ``index``; empty if the reward does not read
            them.
        is_chat: true if the data store the prompt as messages rather than as one text.
    """

    response: str
    answer: str
    length: int = 0
    prompt: str = ""
    record: Mapping[str, Any] = {}
    is_chat: bool = False


@dataclass(frozen=True, slots=True)
class RewardSpec:
    """Name and options of a reward, as plain values that can be sent to a worker process as JSON.

    Attributes:
        name: name of a built-in reward, or an import path.
        options: options of a built-in reward, see ``RewardOptions``.
        timeout_s: time limit for scoring one response, in seconds.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    timeout_s: float = 5.0

    @classmethod
    def of_section(cls, section: RewardConfig) -> RewardSpec:
        """Build the specification from a reward's configuration section (see ``rewards_of``)."""
        name = section["reward"]
        return cls(
            name,
            {key: at(section, key) for key in OPTIONS.get(name, ()) if key in section},
            section["timeout_s"],
        )

    @property
    def blames_answer(self) -> bool:
        """True if a failure to score a response is blamed on that response. False for an external scorer,
        because a missing reply points to the scorer or the network."""
        return self.name != "http"


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward function, with the properties that the process pool and the environment need.

    Attributes:
        judge: returns the score of a task: a number, or a mapping with ``score`` and ``acc``.
        fault_of_reference: returns why a reference answer cannot be used, a ``Doubt`` about a usable one, or
            None. The attribute is None if every reference is usable.
        is_immediate: the function is fast and can neither fail nor hang, so the driver process computes it.
        wants_record: the function reads the prompt and the record of a task.
        tells_right_from_wrong: the score is also the accuracy of the response. False for rewards that only
            shape the total.
        notice: warning to log before the reward is used; empty for none.
        final_answer: returns the final answer in a response for majority votes (equal answers give equal
            texts), or None if the response has none. The attribute is None if the reward cannot extract
            answers.
        settled: options that the driver has resolved at start-up in addition to the configured ones. Worker
            processes receive them, because each would otherwise resolve them itself, perhaps differently.
        may_abstain: a return value of None means that the response belongs to another reward's task, as in
            TRL.
    """

    judge: Callable[[Task], Any]
    fault_of_reference: Callable[[str], str | Doubt | None] | None = None
    is_immediate: bool = False
    wants_record: bool = False
    tells_right_from_wrong: bool = True
    notice: str = ""
    final_answer: Callable[[str], str | None] | None = None
    settled: Mapping[str, Any] = field(default_factory=dict)
    may_abstain: bool = False


def _exact_match(strip: bool = True) -> Reward:
    if strip:
        return Reward(
            lambda task: float(task.response.strip() == task.answer.strip()),
            lambda answer: _fault_of_no_text(answer.strip()),
            is_immediate=True,
            final_answer=str.strip,
        )
    return Reward(
        lambda task: float(task.response == task.answer),
        _fault_of_no_text,
        is_immediate=True,
        final_answer=str,
    )


def _fault_of_no_text(answer: str) -> str | None:
    return None if answer else "it is empty"


def _math(math_verify_impl: str = "hf_math_verify") -> Reward:
    if math_verify_impl == "dapo_math_verify":
        return Reward(
            lambda task: answers.dapo_match(task.response, task.answer),
            lambda answer: answers.fault_of_text(answer) or mathematics.doubt_of_reference(answer),
            final_answer=answers.dapo_answer,
        )
    return Reward(
        lambda task: mathematics.math_verify(task.response, task.answer),
        mathematics.fault_of_reference,
        final_answer=mathematics.math_answer,
    )


def _gsm8k(gsm8k_method: str = "strict") -> Reward:
    return Reward(
        lambda task: answers.gsm8k(task.response, task.answer, gsm8k_method),
        answers.fault_of_gsm8k,
        final_answer=lambda response: answers.gsm8k_answer(response, gsm8k_method),
    )


def _multichoice() -> Reward:
    return Reward(
        lambda task: answers.multichoice(task.response, task.answer),
        answers.fault_of_choice,
        final_answer=answers.chosen_letter,
    )


def _format(pattern: str | None = None) -> Reward:
    if pattern is None:
        # Read the prompt too: chat templates of reasoning models end the prompt with <think>.
        return Reward(
            lambda task: answers.thinks_first(task.response, task.prompt),
            wants_record=True,
            tells_right_from_wrong=False,
        )
    wanted = re.compile(pattern, re.DOTALL)
    return Reward(
        lambda task: float(wanted.fullmatch(task.response) is not None), tells_right_from_wrong=False
    )


def _length(max_response_length: int) -> Reward:
    """Build the reward that is minus the response's share of the maximum length, from 0 to -1."""
    return _shaping(lambda task: overlong_penalty(task.length, max_response_length, max_response_length))


def _overlong(max_response_length: int, overlong_buffer_length: int) -> Reward:
    return _shaping(lambda task: overlong_penalty(task.length, max_response_length, overlong_buffer_length))


def _shaping(judge: Callable[[Task], float]) -> Reward:
    return Reward(judge, is_immediate=True, tells_right_from_wrong=False)


def overlong_penalty(length: int, longest: int, buffer: int) -> float:
    """Return the soft overlong penalty of DAPO (arXiv 2503.14476, eq. 13). It is 0 up to ``longest - buffer``
    tokens and then falls linearly to -1 at ``longest``.

    Args:
        length: number of tokens in the response.
        longest: maximum response length (L_max), at least ``buffer``.
        buffer: length of the interval in which the penalty falls (L_cache), at least 1.
    """
    return max(min(longest - buffer - length, 0) / buffer, -1.0)


def _http(url: str, timeout_s: float, attempts: int = 3) -> Reward:
    return Reward(lambda task: ask_scorer(url, attempts, timeout_s, task), wants_record=True)


def _code(
    code_timeout_s: float = 4.0,
    memory_mb: int = 512,
    max_processes: int = 16,
    max_file_mb: int = 16,
    partial: bool = False,
    isolation: str = "required",
    timeout_s: float = 5.0,
    isolated: bool | None = None,
    bubblewrap: str = "",
) -> Reward:
    """Build the reward ``code``, which runs the response's program against tests.

    ``isolated`` and ``bubblewrap`` are the sandbox settings that the driver has detected; if ``isolated`` is
    None, this process detects both. If sandboxing was detected but later fails, the program is not run and
    its sample gets a ``RewardError``.

    Raises:
        ConfigError: ``isolation`` is ``required``, and this machine cannot sandbox programs.
    """
    fault = None
    if isolated is None:
        fault, bubblewrap = programs.isolation()
    if fault is not None and isolation == "required":
        fix = (
            "allow user namespaces on the driver's machine, or install bubblewrap there, or write "
            "preferred, which lets programs reach the network, write files and end other processes"
        )
        raise ConfigError(
            [
                Violation(
                    "env.isolation", isolation, f"programs of a model cannot be isolated here: {fault}", fix
                )
            ]
        )
    if isolated is None:
        isolated = fault is None
    limits = programs.Limits(code_timeout_s, memory_mb, max_processes, max_file_mb, isolated, bubblewrap)
    notice = (
        f"programs of the model are not isolated ({fault}): they could read the expected outputs, reach the "
        "network, write files and end "
        "other processes"
        if fault
        else programs.notice_of_user()
    )
    seconds = _SHARE_OF_TESTS * timeout_s
    return Reward(
        lambda task: programs.judge(task.response, task.answer, limits, partial, seconds),
        programs.fault_of_tests,
        notice=notice,
        settled={"isolated": isolated, "bubblewrap": bubblewrap},
    )


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
        "http": _http,
        "code": _code,
    }
)
"""Maps each built-in value of ``env.reward`` to a function that builds the reward from its options
(``RewardOptions``)."""


def get_reward(spec: RewardSpec) -> Reward:
    """Build the reward that a specification names.

    Raises:
        ConfigError: no built-in reward has this name, or the import path does not lead to a callable.
    """
    check_reward(spec.name)
    if is_import_path(spec.name):
        return _of_function(load_object(spec.name, REWARD))
    return REWARDS[spec.name](**spec.options)


def _of_function(function: Callable[..., Any]) -> Reward:
    """Wrap a user-defined function as a reward. Its parameter names determine the arguments that it gets."""
    arguments = arguments_of(function)

    def judge(task: Task) -> Any:
        # Functions written for verifiers and TRL expect messages if the prompt is a chat, and a text
        # otherwise.
        said: Any = (
            [{"role": "assistant", "content": task.response}]
            if task.is_chat and arguments.takes_messages
            else task.response
        )
        # Pass a copy, because the function may modify its arguments.
        record = dict(task.record)
        values = {
            "prompt": task.prompt,
            "response": said,
            "answer": task.answer,
            "record": record,
            "data_source": record.get("data_source", ""),
            "state": {"prompt": task.prompt, "completion": said, "answer": task.answer, "info": record},
        }
        positional, named = values_for(arguments, values, record)
        found = awaited(function(*positional, **named))
        return _only(found) if arguments.is_of_several else found

    return Reward(
        judge,
        getattr(function, "fault_of_reference", None),
        wants_record=arguments.wants_record,
        final_answer=getattr(function, "final_answer", None),
        may_abstain=arguments.is_of_several,
    )


def awaited(found: Any) -> Any:
    """Await the result of an ``async`` user function. Return any other value unchanged."""

    async def result() -> Any:
        return await found

    # Use a fresh event loop for each call, so that no task of an earlier response is still in it.
    return asyncio.run(result()) if inspect.isawaitable(found) else found


def _only(found: Any) -> Any:
    """Return the only element of the list that a TRL-style function returned for a batch of one response.

    Raises:
        VerdictError: the list does not have exactly one element.
    """
    values = list(found) if isinstance(found, Iterable) and not isinstance(found, str | Mapping) else [found]
    if len(values) != 1:
        raise VerdictError(f"it returned {len(values)} values for 1 response, and a list of 1 is wanted")
    return values[0]


def verdict(value: Any) -> tuple[float, float | None]:
    """Parse a reward function's return value into a score and an accuracy. The accuracy is None if the value
    has none.

    Raises:
        VerdictError: the value is neither a number nor a mapping with a number as ``score``, or ``acc`` is
            not a number.
    """
    # Test for float first, because this runs for every response and the test for Mapping is slower.
    if type(value) is float:
        return value, None
    if not isinstance(value, Mapping):
        return _number(value, "a number"), None
    if "score" not in value:
        raise VerdictError(f"it returned the keys {', '.join(map(str, value))}, and score is wanted")
    accuracy = value.get("acc")
    return _number(value["score"], "a number as score"), None if accuracy is None else _number(
        accuracy, "a number as acc"
    )


class VerdictError(ValueError):
    """A reward function returned a value that is not a valid score."""


def _number(value: Any, wanted: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise VerdictError(f"it returned {reprlib.repr(value)}, and {wanted} is wanted") from None


class _NoRedirection(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        """Return None, which makes urllib treat the redirection as an error."""


@lru_cache(maxsize=1)
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_NoRedirection)


def ask_scorer(url: str, attempts: int, timeout_s: float, task: Task) -> Any:
    """Send a task to an HTTP scorer and return its reply.

    The task is sent as JSON by POST: ``{"prompt", "response", "answer", "record"}``. Failed connections,
    missing replies and the statuses 408, 429 and 5xx are retried with exponential back-off. Redirections are
    treated as errors, because urllib would follow them with a GET that lacks the task. The timeout here
    applies to each read, so a scorer that sends single bytes slowly is only stopped by the pool's own time
    limit.

    Args:
        url: URL of the scorer.
        attempts: maximum number of requests.
        timeout_s: time limit in seconds for all attempts together.
        task: the task to score.

    Returns:
        A number, or a mapping with ``score``.

    Raises:
        RewardOutageError: the scorer is unreachable, overloaded or silent, or rejects requests for a reason
            that no response can cause.
        RewardError: the scorer rejects this task (400, 413, 422) or fails on it (500), its replies are
            incomplete, or they are not JSON.
    """
    question = {
        "prompt": task.prompt,
        "response": task.response,
        "answer": task.answer,
        "record": dict(task.record),
    }
    # A response may contain lone surrogates. json.dumps escapes them, so encoding to ASCII cannot fail.
    body = json.dumps(question).encode("ascii")
    # The pauses take less than half of `timeout_s` in total.
    pause = min(_LONGEST_PAUSE, timeout_s / 2.0**attempts)
    each_s = (0.95 * timeout_s - pause * (2.0 ** (attempts - 1) - 1)) / attempts
    fault, kind = "", RewardError
    for attempt in range(attempts):
        if attempt:
            time.sleep(pause * 2.0 ** (attempt - 1))
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
        try:
            with _opener().open(request, timeout=each_s) as reply:
                said = reply.read(_LARGEST_REPLY)
                # http.client raises no error if a sized read ends before Content-Length, so check the
                # remaining length.
                if reply.length and len(said) < _LARGEST_REPLY:
                    raise http.client.IncompleteRead(said, reply.length)
                return json.loads(said)
        except urllib.error.HTTPError as error:
            fault, kind = (
                f"status {error.code}",
                RewardError if error.code in _OF_THE_QUESTION else RewardOutageError,
            )
            # Retry 408 (Request Timeout) and 429 (Too Many Requests); repeating the request does not change
            # other 4xx statuses.
            if error.code not in (408, 429) and error.code < 500:
                break
        except (urllib.error.URLError, TimeoutError) as error:
            fault, kind = f"{type(error).__name__}: {error}", RewardOutageError
        except (OSError, http.client.HTTPException) as error:
            # The scorer was reached. If it closes the connection each time, this response may be the cause.
            fault, kind = f"{type(error).__name__}: {error}", RewardError
        except (ValueError, RecursionError) as error:
            raise RewardError(
                f"the scorer at {url} did not reply with JSON: {error}. Fix: have it return a number or an "
                "object"
            ) from error
    raise kind(
        f"the scorer at {url} gave no score in {attempt + 1} attempts ({fault}). Fix: see whether it is up "
        "and takes the request"
    )
