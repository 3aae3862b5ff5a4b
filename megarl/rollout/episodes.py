"""Episodes: conversations between the policy and an environment, run concurrently until all have ended.

A turn is a request to the engines, its completion, and the environment's result. The next prompt is the
tokens so far plus the tokens of the observation; sampled tokens are never decoded and encoded again, because
this could change them. If the engines complete requests one by one and the environment is thread-safe, no
episode waits for another. If the engines or the environment work on whole batches, all episodes wait for each
other.
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
from megarl.observe.timing import GENERATION, PhaseTimer
from megarl.rollout.environment import Environment, EnvironmentReturn, StopReason, Turn, number_of
from megarl.rollout.environments import environment_of
from megarl.rollout.samples import seed_of_turn
from megarl.rollout.texts import decode_rows, decode_with_special_tokens, response_texts
from megarl.rollout.trajectory import Segment
from megarl.rollout.turn_threads import Call, Ended, TurnThreads

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Example
    from megarl.data.messages import ChatMessage
    from megarl.data.observations import History, ObservationEncoder

logger = logging.getLogger(__name__)

# Poll interval of the engines in seconds, while environment threads are running.
_POLL_SECONDS = 0.005

# Time limit for closing one conversation, in seconds.
_END_SECONDS = 10.0

_CHARACTERS_A_TOKEN, _FREE_CHARACTERS = 32, 4096
"""Bounds on an observation's characters: per token that is left, and in addition. A longer observation cannot
fit, and is not tokenized."""

# Stop reasons of conversations that ``judge`` does not get: the environment has lost them, or they score 0.
_NOT_JUDGED = frozenset({StopReason.LOST, StopReason.LATE, StopReason.ERROR})

_NEEDED = ("rewards", "terminated", "masked")
# Per-conversation columns of a result. Those not in _NEEDED may be empty.
_COLUMNS = (*_NEEDED, "observations", "metadata", "reasons", "stop_strings")

_columns_of = operator.attrgetter(*_COLUMNS)

_REASONS = (None, *StopReason)

_LARGEST = float(torch.finfo(torch.float32).max)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """Limits of an episode.

    Attributes:
        turns: maximum number of responses.
        tokens: maximum number of tokens after the prompt, including observations; None for no limit.
        length: maximum number of tokens of the whole conversation, a limit of the model; ignored if ``turns``
            is 1.
    """

    turns: int = 1
    tokens: int | None = None
    length: int | None = None

    def left(self, episode: Episode) -> int | None:
        """Return how many tokens may still be added to an episode; None for no limit."""
        of_conversation = None if self.tokens is None else self.tokens - episode.length
        if self.length is None:
            return of_conversation
        of_model = self.length - len(episode.segment)
        return of_model if of_conversation is None else min(of_model, of_conversation)


@dataclass(slots=True)
class Episode:
    """One conversation and its state.

    Attributes:
        record: data record from which the conversation starts.
        segments: token segments. A new one starts each time that the chat template rewrites tokens which the
            policy has already seen; otherwise there is only one.
        seed: seed of the first response, from which the seeds of later ones are derived; None lets engines
            choose.
        turns: number of responses so far.
        metadata: the environment's own data, passed from turn to turn.
        masked: the episode is left out of training.
        truncated: the last response reached a length limit.
        reason: why the episode ended; None while it continues.
        last: the environment's result for the latest turn, and the episode's row in it.
        parts: maps reward parts to their sums over turns; None if unknown.
        response: text of the last response.
        history: the conversation as the chat template renders it, which may differ from the tokens so far;
            set at the first observation if the template rewrites earlier responses.
        stop_strings: additional stop strings for the next response.
        version: training steps of the oldest weights that sampled any token of the episode; None if the
            engines do not report versions.
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
        """Rewards of all turns, in order."""
        rewards: list[float] = []
        for segment in self.segments:
            rewards += segment.rewards
        return rewards

    @property
    def segment(self) -> Segment:
        """The current (last) segment."""
        return self.segments[-1]

    @property
    def length(self) -> int:
        """Number of tokens after the initial prompt, including observations. Tokens that a later segment
        repeats count once."""
        return sum(segment.opening + segment.length for segment in self.segments)


class Engines(Protocol):
    """Interface of whatever generates the responses: rollout engines, or the policy itself."""

    def ready(self) -> RequestStream:
        """Prepare the engines with the newest weights, and return a request stream to them."""
        ...

    def replace_lost(self, error: MegarlError) -> None:
        """Start new engines in place of lost ones, after which the caller calls ``ready`` again. Re-raise
        ``error`` if none is lost."""
        ...

    def finish(self, episodes: Sequence[Episode]) -> None:
        """Release the engines' devices after sampling."""
        ...


class EpisodeRunner:
    """Runs the episodes of one batch.

    Args:
        engines: generate the responses.
        environment: steps the episodes.
        tokenizer: decodes responses.
        timer: times the phases ``generation`` (while any request is pending) and ``reward``.
        limits: limits of each episode.
        encoder: encodes observations; None if there is one turn.
        judging: context manager that is entered for each call to an environment that is not thread-safe, for
            runners in several threads. None if there is only one thread; the environment may then start
            scoring while other responses are still being sampled.
        on_sampled: called with the indices of episodes that have just received a response.
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
        # The environment's next call takes the scores that were started early. With several runner threads,
        # that could be a call of another thread's group.
        self._scores_ahead = judging is None and getattr(environment, "scores_ahead", False)
        self._begun: set[int] = set()
        self._decode = functools.partial(decode_rows, tokenizer)
        self._decode_fully = functools.partial(decode_with_special_tokens, tokenizer)
        self._engines, self._environment, self._tokenizer = engines, environment, tokenizer
        self._timer, self._limits, self._encoder = timer, limits, encoder
        # Engines enforce the model's maximum length themselves; for a single turn, do not send a limit per
        # request.
        self._asked = limits if limits.turns > 1 else EpisodeLimits(tokens=limits.tokens)
        self._episodes: Sequence[Episode] = ()
        # The environment of each episode, and the distinct ones among these.
        self._owners: Sequence[Any] = ()
        self._kinds: Sequence[Any] = ()
        self._requests: dict[int, Request] = {}
        self._unanswered: list[int] = []
        self._open: RequestStream | None = None
        self._threads = TurnThreads()
        self._metrics: list[Mapping[str, float]] = []

    def run(self, episodes: Sequence[Episode]) -> dict[str, float]:
        """Run all episodes until they end, and return the environment's metrics, summed over its calls.

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
            # Abort pending requests, because busy engines would refuse the next refit.
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
                    # Responses depend only on weights, prompts and seeds, so new engines can repeat the
                    # missing requests.
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
        """Return a stream to ready engines to which the given requests have been submitted. Replace engines
        that are lost in the process, and retry."""
        while True:
            try:
                self._open = stream = self._engines.ready()
                stream.submit(requests)
                return stream
            except MegarlError as error:
                self._engines.replace_lost(error)

    def _complete(self, stream: RequestStream) -> None:
        """Poll the stream, and store the responses that are complete."""
        found = stream.poll(_POLL_SECONDS if self._threads.busy else None)
        for number in found:
            # Remove completed requests only: if an engine is lost, the others are sent again with the same
            # seeds.
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
            # Keep the oldest version: limits on staleness and off-policy corrections must hold for every
            # token.
            oldest = int(versions.min())
            episode.version = oldest if episode.version is None else min(episode.version, oldest)

    def _have(self, name: str) -> bool:
        """Return whether any environment of these episodes has a truthy attribute of this name."""
        return any(getattr(owner, name, None) for owner in self._kinds)

    def _may_go_on(self, episode: Episode) -> bool:
        return episode.reason is None and not episode.truncated and episode.turns < self._limits.turns

    def _answered(self, in_waves: bool) -> dict[int, Request]:
        """Pass responses to the environment as far as it can process them now. Return the next requests of
        the episodes that continue."""
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
        # Pass all conversations at once: without threads an environment scores a batch, and its metrics
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
        """Pass all complete conversations at once to the environments that have ``judge``, and add these
        rewards."""
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
        """Start the conversations of environments that keep state per conversation."""
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

    def _replace_prompt(self, episode: Episode, messages: Sequence[ChatMessage]) -> None:
        """Replace an episode's prompt by messages of its environment.

        Raises:
            BatchError: the new prompt leaves no room for a response within the model's maximum length.
        """
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
        """Close all conversations in threads, because a user's ``close`` may hang or fail. Failures are
        logged."""
        for number, (episode, owner) in enumerate(zip(self._episodes, self._owners, strict=True)):
            # Conversations that never started have nothing to release.
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
        """Apply the environment's result to an episode. If the episode continues, append the observation and
        return True."""
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
        # Add to the reward rather than replace it: ``judge`` runs after the last turn already has one.
        episode.segments[-1].rewards[-1] += _reward(said.rewards[row], masked)
        # Sum parts over turns like rewards: metrics, logged samples and GDPO's advantages read the sums.
        for name, values in said.parts.items():
            value = None if values[row] is None else number_of(values[row])
            if value is not None:
                value += episode.parts.get(name) or 0.0
            elif not masked:
                value = episode.parts.get(name)
            episode.parts[name] = value
        episode.last = said, row

    def _observe(self, episode: Episode, messages: Sequence[ChatMessage]) -> None:
        """Append an observation to an episode, or end the episode if no token would be left for a
        response."""
        assert self._encoder is not None
        left = self._limits.left(episode)
        if left is not None and _FREE_CHARACTERS + _CHARACTERS_A_TOKEN * left < sum(
            [len(str(message.get("content") or "")) for message in messages]
        ):
            episode.reason = StopReason.TOKENS
            return
        # Pass the last token: if the response was truncated, the template's closing tokens must be added.
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
        self, episode: Episode, messages: Sequence[ChatMessage], observed: int
    ) -> Segment | None:
        """Return the new segment that starts with an observation if the chat template rewrites earlier
        responses there, else None."""
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
        # The first turn uses the record's seed unchanged, so that one-turn conversations give the same
        # samples as in a run without turns.
        seed = (
            episode.seed
            if episode.seed is None or not episode.turns
            else seed_of_turn(episode.seed, episode.turns)
        )
        return Request(episode.segment.tokens, seed, most, episode.stop_strings)


def messages_of(observation: Any) -> Sequence[ChatMessage]:
    """Convert an observation to a list of messages. A text becomes a user message.

    Lone surrogates, which may come from a tool's JSON and which no tokenizer accepts, become U+FFFD.

    Raises:
        BatchError: the observation is neither a text, a message nor a list of messages.
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
    return cast("Sequence[ChatMessage]", _whole_characters(found))


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("role"), str)


def _whole_characters(value: Any) -> Any:
    if isinstance(value, str):
        # Two surrogates that form a pair are one character, which this round trip restores.
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
    """Check that an environment's result has the right types and one entry for each of the ``rows``
    responses.

    Raises:
        BatchError: the result is malformed.
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
    """Check the metrics, accuracies and reward parts of a result.

    Raises:
        BatchError: one of them is not a number, or has not one value per response.
    """
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
    """Sum metrics by name."""
    if len(metrics) == 1:
        return dict(metrics[0])
    values = defaultdict[str, list[float]](list)
    for each in metrics:
        for name, value in each.items():
            values[name].append(value)
    # fsum is exact, so that the sum does not depend on the order in which environments returned.
    return {name: math.fsum(values[name]) for name in sorted(values)}


class LateTexts(Sequence[str]):
    """Lazy sequence of texts: the first access decodes all of them.

    Args:
        count: number of texts.
        decode: decodes all texts.
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
