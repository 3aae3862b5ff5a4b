"""Episodes: conversations of a policy with an environment, many at once, until all have ended.

A turn is a request to the engines, the completion, and the environment's result for it. The next prompt is
the tokens so far, followed by the tokens of the observation: sampled tokens are never decoded and encoded
again. If engines answer request by request and the environment may be called from several threads, no episode
waits for another one. If a batch is completed or scored together, all its episodes wait for it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import torch

from megarl.algorithms.advantages import PART
from megarl.distributed.token_rows import TokenRows
from megarl.errors import BatchError, MegarlError, RewardError
from megarl.models.generation.stream import Completion, Request, RequestStream
from megarl.observe.timing import GENERATION
from megarl.rollout.environment import Environment, EnvironmentReturn, StopReason, Turn, number_of
from megarl.rollout.environments import environment_of
from megarl.rollout.samples import seed_of_turn
from megarl.rollout.texts import decode_rows, decode_with_special_tokens, response_texts
from megarl.rollout.trajectory import Segment
from megarl.rollout.turn_threads import Call, Ended, TurnThreads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Example
    from megarl.data.observations import History, ObservationEncoder
    from megarl.observe.timing import PhaseTimer

logger = logging.getLogger(__name__)

# Interval at which engines are polled while the environment is working.
_POLL_SECONDS = 0.005

# Maximum time for an environment to end one conversation.
_END_SECONDS = 10.0

_CHARACTERS_A_TOKEN, _FREE_CHARACTERS = 32, 4096
"""Bounds on an observation's characters: per token that is left, and in addition. A longer observation cannot
fit, and is not tokenized."""

# Ends of conversations that are not passed to the environment's judge: either nobody can judge them, or they
# score 0.
_NOT_JUDGED = frozenset({StopReason.LOST, StopReason.LATE, StopReason.ERROR})

_NEEDED = ("rewards", "terminated", "masked")
# Columns that an environment returns for each conversation. Those that are not in _NEEDED may be missing as a
# whole.
_COLUMNS = (*_NEEDED, "observations", "metadata", "reasons", "stop_strings")

_columns_of = operator.attrgetter(*_COLUMNS)

_REASONS = (None, *StopReason)

_LARGEST = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        turns: maximum number of responses of the policy.
        tokens: maximum number of tokens after the prompt, including observed ones; None for no such limit.
        length: maximum number of tokens of the prompt and all that follows, a limit of the model; only read
            if there is more than one turn.
    """

    turns: int = 1
    tokens: int | None = None
    length: int | None = None

    def left(self, episode: Episode) -> int | None:
        """Return the number of tokens that may still follow; None for no limit."""
        of_conversation = None if self.tokens is None else self.tokens - episode.length
        if self.length is None:
            return of_conversation
        of_model = self.length - len(episode.segment)
        return of_model if of_conversation is None else min(of_model, of_conversation)


@dataclass(slots=True)
class Episode:
    """One conversation.

    Attributes:
        record: data record that it began with.
        segments: its tokens; one segment, and another one each time that the model is shown tokens which
            differ from the previous ones.
        seed: seed of its first response, from which those of later responses are derived; None if engines
            choose their own.
        turns: number of responses so far.
        metadata: the environment's own data, passed from turn to turn.
        masked: the episode is left out of training.
        truncated: its last response reached a length limit.
        reason: reason of its end; None while it continues.
        last: the environment's result for its last turn, and its row in that result.
        parts: parts of the rewards by name, each summed over turns as the rewards are; None if unknown.
        response: text of the last response.
        history: the conversation as the chat template renders it, if that may differ from the tokens so far;
            set from the first observation on.
        stop_strings: additional texts that end its next response.
        version: training steps of the oldest weights that sampled any part of it; None if engines do not
            report it.
    """

    record: Example
    segments: list[Segment]
    seed: int | None = None
    turns: int = 0
    metadata: Any = None
    masked: bool = False
    truncated: bool = False
    reason: StopReason | None = None
    last: tuple[EnvironmentReturn, int] | None = None
    parts: dict[str, float | None] = field(default_factory=dict)
    response: str = ""
    history: History | None = None
    stop_strings: Sequence[str] | None = None
    version: int | None = None

    @property
    def rewards(self) -> list[float]:
        """Rewards of all turns."""
        rewards: list[float] = []
        for segment in self.segments:
            rewards += segment.rewards
        return rewards

    @property
    def segment(self) -> Segment:
        """The current segment, which is the last one."""
        return self.segments[-1]

    @property
    def length(self) -> int:
        """Number of tokens after the conversation's prompt, including observations; each token counts
        once."""
        return sum(segment.opening + segment.length for segment in self.segments)


class Engines(Protocol):
    """Interface of the rollout engines, or of a policy that generates responses itself."""

    def ready(self) -> RequestStream:
        """Prepare the engines, with the newest weights, and return a stream to them."""
        ...

    def replace_lost(self, error: MegarlError) -> None:
        """Start new engines in place of lost ones; raise if none is lost. The caller then calls ``ready``."""
        ...

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Release the engines' devices, once sampling is over."""
        ...


class EpisodeRunner:
    """Runner of the episodes of one batch.

    Args:
        engines: engines that generate.
        environment: environment of the episodes.
        tokenizer: decodes responses.
        timer: timer of the phases ``generation``, which lasts while a request is pending, and ``reward``.
        limits: limits of each episode.
        encoder: encoder of observations; None if there is one turn.
        judging: context that is entered for each call of an environment that cannot be called from several
            threads. None if there is one thread: the environment may then begin to score while responses are
            still sampled.
        on_sampled: called with the numbers of the episodes that have got another response.
    """

    def __init__(
        self,
        engines: Engines,
        environment: Environment,
        tokenizer: PreTrainedTokenizerBase,
        timer: PhaseTimer,
        limits: EpisodeLimits,
        encoder: ObservationEncoder | None = None,
        judging: AbstractContextManager[Any] | None = None,
        on_sampled: Callable[[Iterable[int]], None] | None = None,
    ) -> None:
        self._on_sampled = on_sampled
        self._judging: AbstractContextManager[Any] = contextlib.nullcontext() if judging is None else judging
        # Scores that begin ahead are taken by the environment's next call. Where groups have their own
        # threads, that call could belong to another group.
        self._scores_ahead = judging is None and getattr(environment, "scores_ahead", False)
        self._begun: set[int] = set()
        self._decode = functools.partial(decode_rows, tokenizer)
        self._decode_fully = functools.partial(decode_with_special_tokens, tokenizer)
        self._engines, self._environment, self._tokenizer = engines, environment, tokenizer
        self._timer, self._limits, self._encoder = timer, limits, encoder
        # For a single turn the engines already know the maximum length of the model, and passing it would
        # cost them one more column.
        self._asked = limits if limits.turns > 1 else EpisodeLimits(tokens=limits.tokens)
        self._episodes: Sequence[Episode] = ()
        # The environment of each episode, and the distinct environments among them.
        self._owners: Sequence[Any] = ()
        self._kinds: Sequence[Any] = ()
        self._requests: dict[int, Request] = {}
        self._unanswered: list[int] = []
        self._open: RequestStream | None = None
        self._threads = TurnThreads()
        self._metrics: list[Mapping[str, float]] = []

    def run(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Run all episodes to their ends, and return the environment's metrics, summed.

        Raises:
            BatchError: a result of the engines or of the environment is invalid.
            RewardError: the environment cannot continue.
        """
        self._episodes = episodes
        self._owners = [environment_of(self._environment, episode.record) for episode in episodes]
        self._kinds = list({id(owner): owner for owner in self._owners}.values())
        try:
            with self._timer.phase("reward"):
                self._begin()
            for number, episode in enumerate(episodes):
                if episode.reason is None:
                    self._requests[number] = self._request(episode)
            metrics = self._lead()
        except BaseException:
            self._threads.forget()
            # Abort the requests, because engines that still work on them would refuse the next weights.
            with contextlib.suppress(MegarlError):
                if self._open is not None:
                    self._open.abort(self._requests)
            raise
        finally:
            self._end()
        # Else nobody would know what a run is missing, and why. An environment without this time limit calls
        # conversations late by a rule of its own.
        late: list[tuple[float, int]] = []
        for episode, owner in zip(episodes, self._owners, strict=True):
            if episode.reason is StopReason.LATE and hasattr(owner, "step_timeout_s"):
                late.append((owner.step_timeout_s, episode.record.index))
        if late:
            logger.warning(
                "%d of %d conversations are left out of training, since a step did not return within "
                "env.step_timeout_s = %g s (the first is of record %s). Fix: raise it, or make steps faster",
                *(len(late), len(episodes), *late[0]),
            )
        return metrics

    def _lead(self) -> dict[str, float]:
        episodes, finished = self._episodes, False
        stream = self._stream(self._requests)
        while self._requests or self._unanswered or self._threads.busy:
            if self._requests and not (stream.in_waves and self._threads.busy):
                try:
                    with self._timer.phase(GENERATION):
                        self._complete(stream)
                        if (
                            not self._requests
                            and not self._threads.busy
                            and not (self._limits.turns > 1 and any(map(self._may_go_on, episodes)))
                        ):
                            self._engines.finish(episodes)
                            finished = True
                except MegarlError as error:
                    # Responses depend only on weights, prompts and seeds, so that new engines can be asked
                    # again for the missing ones.
                    self._engines.replace_lost(error)
                    stream = self._stream(self._requests)
            with self._timer.phase("reward"):
                new = self._answered(stream.in_waves)
            self._requests |= new
            if new:
                stream.submit(new)
        if not finished:
            with self._timer.phase(GENERATION):
                self._engines.finish(episodes)
        with self._timer.phase("reward"):
            self._judge()
        return _summed(self._metrics)

    def _stream(self, requests: Mapping[int, Request]) -> RequestStream:
        """Return a stream to ready engines that has got these requests; engines that are lost meanwhile are
        replaced."""
        while True:
            try:
                self._open = stream = self._engines.ready()
                stream.submit(requests)
                return stream
            except MegarlError as error:
                self._engines.replace_lost(error)

    def _complete(self, stream: RequestStream) -> None:
        """Store the responses that have been sampled."""
        found = stream.poll(_POLL_SECONDS if self._threads.busy else None)
        for number in found:
            # Remove only the requests that have completed: if an engine is lost, the others are sent again
            # with the same seeds.
            del self._requests[number]
        texts = response_texts(
            self._tokenizer, TokenRows.of_arrays([completion.tokens for completion in found.values()])
        )
        for (number, completion), text in zip(found.items(), texts, strict=True):
            self._write(self._episodes[number], completion, text)
        if self._on_sampled is not None:
            self._on_sampled(found)
        self._unanswered += found

    def _write(self, episode: Episode, completion: Completion, text: str) -> None:
        tokens, logprobs, truncated, versions = completion
        episode.segments[-1].sampled(tokens, logprobs, versions)
        episode.response, episode.truncated = text, truncated
        episode.turns += 1
        if versions is not None and len(versions):
            # Keep the oldest weight version of any turn, because bounds on age and corrections have to hold
            # for all tokens of the conversation.
            oldest = int(versions.min())
            episode.version = oldest if episode.version is None else min(episode.version, oldest)

    def _have(self, name: str) -> bool:
        """Return whether an environment of these episodes has an attribute of that name with a true value."""
        return any(getattr(owner, name, None) for owner in self._kinds)

    def _may_go_on(self, episode: Episode) -> bool:
        return episode.reason is None and not episode.truncated and episode.turns < self._limits.turns

    def _answered(self, in_waves: bool) -> dict[int, Request]:
        """Have the environment process all responses that it can process now, and return the next
        requests."""
        # Sort the numbers: completions arrive in any order, but the environment has to be called in the same
        # order in every run.
        together: list[int] = []
        for number in sorted(self._unanswered):
            owner = self._owners[number]
            if getattr(owner, "threads", 0):
                self._start(number, owner)
            else:
                together.append(number)
        self._unanswered = together
        answers: dict[int, tuple[EnvironmentReturn, int]] = {}
        if self._threads.busy:
            for ended in self._threads.take(wait=in_waves or not self._requests, all_of_them=in_waves):
                answers[ended.number] = self._result_of(ended), 0
        # Pass all conversations at once: an environment without threads judges a batch, and its metrics
        # describe that batch.
        if together and not self._requests and not self._threads.busy:
            said = self._step(together)
            for row, number in enumerate(together):
                answers[number] = said, row
            self._unanswered = []
            self._begun.clear()
        elif self._scores_ahead and (fresh := sorted({*together} - self._begun)):
            self._begun.update(fresh)
            cast("Any", self._environment).score_ahead(self._turn(fresh))
        requests: dict[int, Request] = {}
        for number, (said, row) in answers.items():
            if self._goes_on(self._episodes[number], said, row):
                requests[number] = self._request(self._episodes[number])
        return requests

    def _judge(self) -> None:
        """Have the environments that score whole conversations do so, all conversations together."""
        if not self._have("judge"):
            return
        environment: Any = self._environment
        numbers: list[int] = []
        for number, (episode, owner) in enumerate(zip(self._episodes, self._owners, strict=True)):
            if episode.reason not in _NOT_JUDGED and hasattr(owner, "judge"):
                numbers.append(number)
        if numbers:
            with self._judging:
                answer = environment.judge(self._turn(numbers))
            said = self._checked(answer, len(numbers))
            for row, number in enumerate(numbers):
                self._reward(self._episodes[number], said, row)

    def _begin(self) -> None:
        """Begin the conversations of environments that keep state for each conversation."""
        if not self._have("begin"):
            return
        for number, (episode, owner) in enumerate(zip(self._episodes, self._owners, strict=True)):
            if getattr(owner, "begins_at_once", False):
                episode.metadata, _ = owner.begin(episode.record)
            elif hasattr(owner, "begin"):
                call = functools.partial(owner.begin, episode.record)
                self._threads.start(Call(number, call, owner, owner.threads, owner.step_timeout_s))
        for ended in self._threads.take(wait=True, all_of_them=True):
            if ended.error is not None:
                raise ended.error
            episode = self._episodes[ended.number]
            episode.metadata, prompt = ended.result or (None, None)
            if episode.metadata is None:
                episode.reason, episode.masked = StopReason.LOST, True
            elif prompt is not None:
                self._replace_prompt(episode, prompt)

    def _replace_prompt(self, episode: Episode, messages: Sequence[Mapping[str, Any]]) -> None:
        """Replace the record's prompt of an episode by other messages."""
        assert self._encoder is not None
        tokens = self._encoder.encode_prompt(
            messages_of(messages), episode.metadata.tools, f"the prompt of record {episode.record.index}"
        )
        episode.segment.prompt = np.asarray(tokens, np.int64)
        length = self._limits.length
        if length is not None and len(tokens) >= length:
            raise BatchError(
                f"record {episode.record.index}: the prompt of its environment has {len(tokens)} "
                f"tokens, but policy.max_total_sequence_length is {length}. Fix: raise it, or "
                "shorten the prompt"
            )

    def _end(self) -> None:
        """End all conversations in threads, because any of them may hang or fail."""
        for number, (episode, owner) in enumerate(zip(self._episodes, self._owners, strict=True)):
            # Skip conversations that never began: their environment holds nothing for them.
            if (
                episode.metadata is not None
                and hasattr(owner, "end")
                and not getattr(owner, "ends_at_once", False)
            ):
                call = functools.partial(owner.end, episode.metadata)
                self._threads.start(
                    Call(number, call, owner, owner.threads, min(owner.step_timeout_s, _END_SECONDS))
                )
        try:
            for ended in self._threads.take(wait=True, all_of_them=True):
                if ended.error is not None:
                    index = self._episodes[ended.number].record.index
                    logger.warning("the environment of record %s failed at its end: %s", index, ended.error)
        except RewardError as error:
            logger.warning("%s", error)
        self._threads.close()

    def _start(self, number: int, owner: Any) -> None:
        call = functools.partial(self._environment.step, self._turn([number]))
        self._threads.start(Call(number, call, owner, owner.threads, owner.step_timeout_s))

    def _result_of(self, ended: Ended) -> EnvironmentReturn:
        if ended.error is not None:
            raise ended.error
        if ended.result is None:
            return EnvironmentReturn([None], [True], [True], reasons=[StopReason.LATE])
        return self._checked(ended.result, 1)

    def _step(self, numbers: Sequence[int]) -> EnvironmentReturn:
        with self._judging:
            answer = self._environment.step(self._turn(numbers))
        return self._checked(answer, len(numbers))

    def _checked(self, said: EnvironmentReturn, rows: int) -> EnvironmentReturn:
        check_answer(said, rows)
        self._metrics.append(said.metrics)
        return said

    def _turn(self, numbers: Sequence[int]) -> Turn:
        episodes = [self._episodes[number] for number in numbers]
        ids = TokenRows.of_arrays([episode.segments[-1].pieces[-1][0] for episode in episodes])

        def asked() -> TokenRows:
            return TokenRows.of_arrays([episode.segments[0].prompt for episode in episodes])

        return Turn(
            [episode.record for episode in episodes],
            [episode.response for episode in episodes],
            ids,
            [episode.metadata for episode in episodes],
            LateTexts(len(episodes), lambda: self._decode(asked())),
            LateTexts(len(episodes), lambda: self._decode_fully(ids)),
            LateTexts(len(episodes), lambda: self._decode_fully(asked())),
            turns=[episode.turns for episode in episodes],
            truncated=[episode.truncated for episode in episodes],
        )

    def _goes_on(self, episode: Episode, said: EnvironmentReturn, row: int) -> bool:
        """Apply the environment's result to an episode. Return whether the episode continues, with the
        observation appended."""
        self._reward(episode, said, row)
        episode.metadata = said.metadata[row] if len(said.metadata) else episode.metadata
        episode.stop_strings = said.stop_strings[row] if len(said.stop_strings) else None
        reason = said.reasons[row] if len(said.reasons) else None
        if said.terminated[row]:
            episode.reason = StopReason(reason) if reason else StopReason.DONE
        elif self._limits.turns == 1:
            raise BatchError(
                "the environment continues after a response, but a conversation has only one "
                "turn. Fix: write grpo.max_rollout_turns (of the run's algorithm), or end it: a MessageEnv "
                "returns Step(done=True), other environments terminated = True"
            )
        elif episode.truncated:
            left = self._limits.left(episode)
            episode.reason = StopReason.TOKENS if left is not None and left <= 0 else StopReason.LENGTH
        elif episode.turns >= self._limits.turns:
            episode.reason = StopReason.TURNS
        else:
            self._observe(episode, messages_of(said.observations[row] if len(said.observations) else None))
        return episode.reason is None

    def _reward(self, episode: Episode, said: EnvironmentReturn, row: int) -> None:
        masked = bool(said.masked[row])
        episode.masked |= masked
        # Add to the last reward instead of replacing it, because a judge of whole conversations runs after
        # the turns have their rewards.
        episode.segments[-1].rewards[-1] += _reward(said.rewards[row], masked)
        # Sum the parts over turns, as rewards are summed: metrics, logged samples and gdpo's advantages read
        # the sums.
        for name, values in said.parts.items():
            value = None if values[row] is None else number_of(values[row])
            if value is not None:
                value += episode.parts.get(name) or 0.0
            elif not masked:
                value = episode.parts.get(name)
            episode.parts[name] = value
        episode.last = said, row

    def _observe(self, episode: Episode, messages: Sequence[Mapping[str, Any]]) -> None:
        """Append an observation to an episode, or end the episode if no response would fit after the
        observation."""
        assert self._encoder is not None
        left = self._limits.left(episode)
        if left is not None and _FREE_CHARACTERS + _CHARACTERS_A_TOKEN * left < sum(
            [len(str(message.get("content") or "")) for message in messages]
        ):
            episode.reason = StopReason.TOKENS
            return
        # Encode from the last token on, because a template closes a turn differently if the stop token was
        # not sampled.
        tokens = self._encoder.encode(messages, episode.segment.last_token)
        following = self._other_segment(episode, messages, len(tokens))
        if following is not None:
            episode.segments.append(following)
            left = self._limits.left(episode)
            if left is not None and left <= 0:
                episode.segments.pop()
                episode.reason = StopReason.TOKENS
        elif left is not None and len(tokens) >= left:
            episode.reason = StopReason.TOKENS
        else:
            episode.segment.observed(np.asarray(tokens, np.int64))

    def _other_segment(
        self, episode: Episode, messages: Sequence[Mapping[str, Any]], observed: int
    ) -> Segment | None:
        """Return the segment that an observation begins, if the chat template rewrites earlier responses at
        that point, else None."""
        assert self._encoder is not None
        if self._encoder.rewritten is None:
            return None
        episode.history = episode.history or self._encoder.history(episode.segment.prompt.tolist())
        assert episode.history is not None
        prompt = episode.history.follow(episode.segment.pieces[-1][0].tolist(), messages)
        return None if prompt is None else Segment(np.asarray(prompt, np.int64), opening=observed)

    def _request(self, episode: Episode) -> Request:
        left = self._asked.left(episode)
        most = None if left is None else max(left, 0)
        # Use the record's own seed for the first turn, so that conversations of one turn are the same as in a
        # run without turns.
        seed = (
            episode.seed
            if episode.seed is None or not episode.turns
            else seed_of_turn(episode.seed, episode.turns)
        )
        return Request(episode.segment.tokens, seed, most, episode.stop_strings)


def messages_of(observation: Any) -> Sequence[Mapping[str, Any]]:
    """Convert an observation to messages; a text becomes a user message.

    Lone surrogates, which JSON of a tool or a call may contain and no tokenizer accepts, become U+FFFD.

    Raises:
        BatchError: the observation is neither a text nor a message or messages.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": _whole_characters(observation)}]
    found = [observation] if isinstance(observation, Mapping) else observation
    are_messages = isinstance(found, Sequence) and not isinstance(found, bytes) and len(found) > 0
    if not are_messages or not all(map(_is_message, found)):
        raise BatchError(
            f"the environment continues, but returned the observation {repr(observation)[:80]}. "
            "Fix: return a text, a message with role and content, or a list of messages; or "
            "terminated = True"
        )
    return cast("Sequence[Mapping[str, Any]]", _whole_characters(found))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        # Join the two surrogates of a pair, because together they are one character.
        return (
            value
            if _is_encodable(value)
            else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    if isinstance(value, Mapping):
        return {_whole_characters(key): _whole_characters(inner) for key, inner in value.items()}
    return list(map(_whole_characters, value)) if isinstance(value, list | tuple) else value


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_answer(said: EnvironmentReturn, rows: int) -> None:
    """Check that an environment's result fits the responses.

    Raises:
        BatchError: the result does not fit.
    """
    if not isinstance(said, EnvironmentReturn):
        raise BatchError(
            f"the environment returned a {type(said).__name__}. Fix: return an EnvironmentReturn "
            "(megarl.rollout.environment)"
        )
    wrong: dict[str, int] = {}
    for name, column in zip(_COLUMNS, _columns_of(said), strict=True):
        if len(column) != rows and (len(column) or name in _NEEDED):
            wrong[name] = len(column)
    if wrong:
        raise BatchError(
            f"the environment returned {wrong} for {rows} responses. Fix: return one of each a response, in "
            "their order"
        )
    for value in said.masked:
        if value is not False and not isinstance(value, bool | np.bool_):
            raise BatchError(f"the environment returned masked = {value!r}. Fix: return True or False")
    for reason in said.reasons:
        if reason not in _REASONS:
            raise BatchError(
                f"the environment returned the reason {reason!r}. Fix: return None, or one of "
                f"{', '.join(StopReason)}"
            )
    _check_figures(said)


def _check_figures(said: EnvironmentReturn) -> None:
    """Refuse metrics and accuracies that are not numbers."""
    if not isinstance(said.metrics, Mapping):
        raise BatchError(
            f"the environment returned the metrics {repr(said.metrics)[:80]}. Fix: return names and numbers"
        )
    for name, value in said.metrics.items():
        if not isinstance(name, str) or number_of(value) is None:
            raise BatchError(
                f"the environment returned the metric {name!r} = {repr(value)[:80]}. Fix: return a number "
                "under a text"
            )
    named = {f"{PART}{name}": values for name, values in said.parts.items()}
    if len(said.accuracies):
        named["accuracy"] = said.accuracies
    for name, values in named.items():
        if len(values) != len(said.rewards):
            raise BatchError(
                f"the environment returned {len(values)} numbers of {name} for {len(said.rewards)} "
                "responses. Fix: return one a response"
            )
    for accuracy in said.accuracies:
        if accuracy is not None and number_of(accuracy) is None:
            raise BatchError(
                f"the environment returned the accuracy {repr(accuracy)[:80]}. Fix: return a number from 0 "
                "to 1, or None where it is not known"
            )


def _reward(value: Any, masked: bool) -> float:
    if value is None and masked:
        return 0.0
    number = number_of(value)
    if number is not None and abs(number) <= _LARGEST:
        return number
    raise BatchError(
        f"the environment returned the reward {repr(value)[:80]}. Fix: return a finite number, or None and "
        "masked = True where there is no reward"
    )


def _summed(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return sums of the metrics that do not depend on the order in which the environment was called."""
    if len(metrics) == 1:
        return dict(metrics[0])
    values = defaultdict[str, list[float]](list)
    for each in metrics:
        for name, value in each.items():
            values[name].append(value)
    # fsum is exact, so that the sum does not depend on the order in which environments returned.
    return {name: math.fsum(values[name]) for name in sorted(values)}


class LateTexts(Sequence[str]):
    """A sequence of texts that are all decoded when the first of them is accessed.

    Args:
        count: number of texts.
        decode: decodes all of them.
    """

    def __init__(self, count: int, decode: Callable[[], list[str]]) -> None:
        self._count, self._decode = count, decode
        self._texts: list[str] | None = None

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: Any) -> Any:
        if self._texts is None:
            self._texts = self._decode()
        return self._texts[row]
