"""The collector: samples responses to prompts with an engine and has an environment score them. It is
synchronous: all prompts of a call are sampled together, with the newest weights."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from megarl.algorithms.advantages import PART
from megarl.config.backend import generation_of
from megarl.config.nested import at
from megarl.config.policy import PolicyConfig
from megarl.config.sections import AlgorithmConfig, RunConfig
from megarl.data.chat_template import ChatTemplate
from megarl.data.observations import ObservationEncoder
from megarl.errors import BatchError, MegarlError
from megarl.models.generation.shared_stream import SharedStream
from megarl.models.generation.stream import RequestStream, Waves
from megarl.observe.step_line import EPISODES
from megarl.observe.timing import GENERATION, PhaseTimer, Sequences
from megarl.rollout.environment import CUT, Environment, StopReason
from megarl.rollout.episodes import Episode, EpisodeLimits, EpisodeRunner
from megarl.rollout.trajectory import Segment, batch_of, token_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Example
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.interfaces import GenerationInterface, Sampling

logger = logging.getLogger(__name__)

PREV_LOGPROBS = "prev_logprobs"
"""Batch column of the token log-probabilities under the policy before the update."""


class RefittedEngine(Protocol):
    """Rollout engines that are separate from the policy and receive its weights by refits."""

    @property
    def generation(self) -> GenerationInterface:
        """Interface through which the engines generate."""
        ...

    def bring_up_to_date(self) -> None:
        """Sync the policy's weights to the engines, unless the engines already have them."""
        ...

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines in place of lost ones. Re-raise ``error`` if no engine is lost, or if the maximum
        number of restarts is reached."""
        ...


class Scorer(Protocol):
    """Computes the policy's own log-probabilities of responses while other responses are still being sampled;
    see ``megarl.algorithms.scored_ahead``."""

    def begin(self, segments: Sequence[Segment], generations: int) -> None:
        """Start a batch. Its segments are still empty, and fill up as responses are sampled."""
        ...

    def sampled(self, numbers: Iterable[int]) -> None:
        """Mark these responses as complete, so that they can be scored."""
        ...

    def wait(self) -> None:
        """Block until the policy workers have no pending scoring call."""
        ...

    def take(self, width: int) -> Tensor:
        """Return the log-probabilities of the batch, padded to [B, width]."""
        ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Sampled and scored responses to a batch of prompts.

    Attributes:
        samples: B rows; responses to the same prompt are adjacent. Columns:

            * those of ``batch_of``;
            * ``truncated`` [B] bool: a length limit ended the conversation;
            * ``response_text``: B texts, the last response as rewards read it;
            * ``reward`` [B] float32;
            * ``masked`` [B] bool: masked by the environment; ``sample_mask`` is then 0 too;
            * ``weight_version`` [B] int64: training steps done by the weights that sampled the row;
            * ``accuracy`` and ``reward/NAME`` for each reward part, [B] float32, NaN if missing: only if the
              environment provides them;
            * ``turns`` [B] int64, ``ended`` (B values of ``StopReason``), ``turn_rewards`` (B lists of one
              reward per turn) and ``token_rewards`` [B, S] float32 (the same rewards at the last token of
              each response): only with several turns;
            * ``segments`` [B] int64, the number of segments: only if the chat template rewrites earlier
              responses. A row then holds the tokens of its last segment, but ``generation_lengths`` counts
              all segments;
            * ``prev_logprobs`` [B, S] float32: only with a ``Scorer``.
        records: B records, one per row.
        metrics: metrics of the environment.
        earlier: all segments except the last of each response, with the columns of ``batch_of`` and
            ``token_rewards``; None if each response is one segment. ``response`` [E] int64, ascending, is the
            row of ``samples`` that a segment belongs to. ``opening`` [E] int64 (then also in ``samples``) is
            the length of the observation at the end of a segment's prompt.
    """

    samples: BatchedDataDict[Any]
    records: Sequence[Example]
    metrics: Mapping[str, float]
    earlier: BatchedDataDict[Any] | None = None


@dataclass(frozen=True, slots=True)
class Collector:
    """Synchronous collector of samples.

    Attributes:
        policy: generates the responses if there are no engines.
        tokenizer: decodes responses.
        environment: computes rewards.
        timer: times the phases ``refit``, ``generation``, ``reward`` and, after a loss of engines,
            ``engine_restart``.
        stop_token_ids: tokens that end a response; None for the tokenizer's EOS token.
        engine: engines separate from the policy; None if the policy itself generates.
        limits: limits of each conversation.
        encoder: encodes observations as tokens; None if conversations have one turn.
        shared: engines that several collectors use concurrently and whose owner syncs their weights. None if
            this collector uses ``policy`` or ``engine`` and syncs the weights itself.
        judging: see ``EpisodeRunner``.
        scorer: computes log-probabilities of one-turn responses while others are being sampled; None if a
            later phase computes them.
    """

    policy: GenerationInterface
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    timer: PhaseTimer
    stop_token_ids: Sequence[int] | None = None
    engine: RefittedEngine | None = None
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    encoder: ObservationEncoder | None = None
    shared: SharedStream | None = None
    judging: AbstractContextManager[Any] | None = None
    scorer: Scorer | None = None

    @classmethod
    def of_run(
        cls,
        config: RunConfig,
        section: AlgorithmConfig,
        policy: GenerationInterface,
        tokenizer: PreTrainedTokenizerBase,
        environment: Environment,
        timer: PhaseTimer,
        engine: RefittedEngine | None = None,
    ) -> Collector:
        """Build the collector of a run.

        Args:
            config: the complete configuration.
            section: section of the algorithm, which limits the turns and tokens of conversations.
            policy, tokenizer, environment, timer, engine: see the attributes of the class.
        """
        stops = generation_of(config["policy"])["stop_token_ids"]
        limits = _limits(config["policy"], section)
        encoder = observation_encoder(config["policy"], tokenizer, stops or ()) if limits.turns > 1 else None
        return cls(policy, tokenizer, environment, timer, stops, engine, limits, encoder)

    @property
    def stops(self) -> Sequence[int]:
        """Token ids that end a response."""
        return [self.tokenizer.eos_token_id] if self.stop_token_ids is None else self.stop_token_ids

    def collect(
        self,
        records: Sequence[Example],
        generations: int = 1,
        seeds: Sequence[int] | None = None,
        *,
        weight_version: int | None = None,
        greedy: bool = False,
        sampling: Sampling | None = None,
    ) -> Rollouts:
        """Sample responses to the prompts of P records, and have the environment score them.

        Args:
            records: P records.
            generations: number of responses per prompt, G.
            seeds: P * G seeds, see ``sampling_seeds``; None lets the engine choose.
            weight_version: number of finished training steps, for the column of that name; None omits the
                column, for samples that are not trained on.
            greedy: decode greedily.
            sampling: overrides the configured temperature, top-p and top-k.

        Raises:
            BatchError: there are no records; the number of seeds is not P * G; or the engine's or
                environment's result is malformed or has another length than its input.
        """
        if not records:
            raise BatchError("there are no records to collect samples for. Fix: give at least one")
        rows = len(records) * generations
        if seeds is not None and len(seeds) != rows:
            raise BatchError(
                f"{len(seeds)} sampling seeds for {rows} samples. Fix: pass one seed for each prompt and "
                "generation"
            )
        episodes, prompt_lengths = list[Episode](), list[int]()
        for record in records:
            prompt = np.asarray(record.prompt_ids, np.int64)
            prompt_lengths.append(len(prompt))
            for _ in range(generations):
                seed = None if seeds is None else seeds[len(episodes)]
                episodes.append(Episode(record, [Segment(prompt)], seed))
        engines = _Engines(self, prompt_lengths, greedy=greedy, sampling=sampling)
        if self.scorer is not None:
            self.scorer.begin([episode.segment for episode in episodes], generations)
        runner = EpisodeRunner(
            engines,
            self.environment,
            self.tokenizer,
            self.timer,
            self.limits,
            self.encoder,
            self.judging,
            None if self.scorer is None else self.scorer.sampled,
        )
        metrics = runner.run(episodes)
        samples = self._rows([episode.segment for episode in episodes])
        # Call this before ``masked`` is applied below, because it overwrites ``sample_mask``.
        earlier = self._earlier(episodes, samples)
        samples |= _columns(episodes)
        if weight_version is not None:
            versions = [
                weight_version if episode.version is None else episode.version for episode in episodes
            ]
            samples["weight_version"] = torch.tensor(versions, dtype=torch.int64)
        # Multiply rather than assign, because batch_of has already masked the rows without a response.
        samples["sample_mask"] = samples["sample_mask"] * (~samples["masked"]).float()
        if self.scorer is not None:
            logprobs = self.scorer.take(samples["input_ids"].shape[1])
            samples[PREV_LOGPROBS] = logprobs.where(samples["sample_mask"][:, None] != 0, 0.0)
        if self.limits.turns > 1:
            samples["turns"] = torch.tensor([episode.turns for episode in episodes])
            samples["ended"] = [str(episode.reason) for episode in episodes]
            samples["turn_rewards"] = [episode.rewards for episode in episodes]
            metrics = add_metrics(_ends(episodes), [metrics])
        if self.encoder is not None and self.encoder.rewritten is not None:
            samples["segments"] = torch.tensor([len(episode.segments) for episode in episodes])
        return Rollouts(samples, [episode.record for episode in episodes], metrics, earlier)

    def _rows(self, segments: Sequence[Segment]) -> BatchedDataDict[Any]:
        batch = batch_of(segments, self.tokenizer.pad_token_id)
        if self.limits.turns > 1:
            batch["token_rewards"] = token_rewards(segments, batch["input_ids"].shape[1])
        return batch

    def _earlier(
        self, episodes: Sequence[Episode], samples: BatchedDataDict[Any]
    ) -> BatchedDataDict[Any] | None:
        """Return all segments except the last of each episode (see ``Rollouts.earlier``), or None if there
        are none. Otherwise also update the columns of ``samples`` that count all segments of a response."""
        segments, rows = list[Segment](), list[int]()
        for row, episode in enumerate(episodes):
            segments += episode.segments[:-1]
            rows += [row] * (len(episode.segments) - 1)
        if not segments:
            return None
        earlier = self._rows(segments)
        earlier["opening"] = torch.tensor([segment.opening for segment in segments])
        earlier["response"] = torch.tensor(rows)
        lengths = samples["generation_lengths"]
        lengths = lengths.index_add(0, earlier["response"], earlier["generation_lengths"])
        samples["generation_lengths"] = lengths
        samples["sample_mask"] = (lengths > 0).float()
        samples["opening"] = torch.tensor([episode.segment.opening for episode in episodes])
        return earlier


def _limits(policy: PolicyConfig, section: AlgorithmConfig) -> EpisodeLimits:
    longest = policy["max_total_sequence_length"], at(policy, "generation.vllm_cfg.max_model_len")
    # Include the engine's own bound, which may be smaller: vLLM refuses a request that exceeds it.
    length = min(filter(None, longest))
    return EpisodeLimits(section.get("max_rollout_turns", 1), section.get("max_rollout_tokens"), length)


def observation_encoder(
    policy: PolicyConfig, tokenizer: PreTrainedTokenizerBase, stops: Sequence[int]
) -> ObservationEncoder:
    """Build the encoder of a run's observations.

    Args:
        policy: the complete ``policy`` section.
        tokenizer: the policy's tokenizer.
        stops: token ids that end a response.
    """
    section = policy["tokenizer"]
    day = section.get("template_date")
    date = None if day is None else datetime.date.fromisoformat(day)
    return ObservationEncoder(
        tokenizer, ChatTemplate(tokenizer, section.get("chat_template_kwargs"), date), stops
    )


@dataclass(slots=True)
class _Engines:
    """A collector's engines, or its generating policy, as ``megarl.rollout.episodes.Engines``."""

    collector: Collector
    prompts: Sequence[int]
    greedy: bool
    sampling: Sampling | None

    def ready(self) -> RequestStream:
        if self.collector.shared is not None:
            return self.collector.shared.view()
        engine, timer = self.collector.engine, self.collector.timer
        if engine is None:
            with timer.phase(GENERATION):
                self.collector.policy.prepare_for_generation()
        else:
            with timer.phase("refit"):
                # Time the refit separately, so that metrics distinguish a slow refit from slow generation.
                engine.bring_up_to_date()
        tokenizer, stops = self.collector.tokenizer, self.collector.stops
        generation = self._generation
        one_turn = self.collector.limits.turns == 1
        # One-turn conversations are passed to the environment as one batch, so they need no streaming, except
        # to start rewards and log-probabilities of complete responses early.
        gathers = (
            one_turn
            and getattr(generation, "takes_requests", False)
            and (
                self.collector.scorer is not None
                or getattr(self.collector.environment, "scores_ahead", False)
            )
        )
        if not hasattr(generation, "requests") or (one_turn and not gathers):
            return Waves(
                generation, tokenizer.pad_token_id, stops, greedy=self.greedy, sampling=self.sampling
            )
        options = {"gathers": True} if gathers else {}
        return generation.requests(
            stops, tokenizer.pad_token_id, greedy=self.greedy, sampling=self.sampling, **options
        )

    @property
    def _generation(self) -> GenerationInterface:
        engine = self.collector.engine
        return self.collector.policy if engine is None else engine.generation

    def replace_lost(self, error: MegarlError) -> None:
        if self.collector.engine is None or self.collector.shared is not None:
            raise error
        if self.collector.scorer is not None:
            # New engines receive the policy's weights, for which the policy must not be busy with the
            # scorer's calls.
            self.collector.scorer.wait()
        with self.collector.timer.phase("engine_restart"):
            self.collector.engine.replace_lost_engines(error)

    def finish(self, episodes: Sequence[Episode]) -> None:
        if self.collector.shared is None:
            self._generation.finish_generation()
        lengths, prompts = list[int](), list[int]()
        for episode in episodes:
            for segment in episode.segments:
                lengths.append(len(segment))
                prompts.append(len(segment.prompt))
        self.collector.timer.passed(Sequences(np.array(lengths), np.array(prompts), np.array(self.prompts)))


def _columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """Return the batch columns with rewards, response texts and stop flags."""
    return {
        "truncated": torch.tensor(
            [episode.truncated or episode.reason in CUT for episode in episodes], dtype=torch.bool
        ),
        "response_text": [episode.response for episode in episodes],
        "reward": torch.tensor([sum(episode.rewards) for episode in episodes], dtype=torch.float64).float(),
        **_further_columns(episodes),
        "masked": torch.tensor([episode.masked for episode in episodes], dtype=torch.bool),
    }


def _ends(episodes: Sequence[Episode]) -> dict[str, float]:
    """Count episodes by stop reason, and the observed tokens of all episodes."""
    metrics = {f"{EPISODES}{reason}": 0.0 for reason in StopReason}
    observed = 0.0
    for episode in episodes:
        metrics[f"{EPISODES}{episode.reason}"] += 1
        for segment in episode.segments:
            observed += segment.opening + segment.length - segment.sampled_length
    return {**metrics, "observed_tokens": observed}


def add_metrics(own: Mapping[str, float], of_environment: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Sum the environment's metrics over batches and add them to the metrics of a step or validation.

    Raises:
        BatchError: the environment has a metric with the name of one of the run's own metrics.
    """
    total: dict[str, float] = {}
    for metrics in of_environment:
        for name, value in metrics.items():
            total[name] = total.get(name, 0) + value
    taken = sorted(own.keys() & total.keys())
    if taken:
        raise BatchError(
            f"the environment returned the metrics {', '.join(taken)}, whose names the run uses "
            "itself. Fix: rename them"
        )
    return {**own, **total}


def _further_columns(episodes: Sequence[Episode]) -> dict[str, Tensor]:
    """Return the columns ``accuracy`` and ``reward/NAME``, [B] float32 each, that the environment provides. A
    missing part is NaN; an episode of an environment without accuracies has its reward as accuracy."""
    columns: dict[str, list[float]] = {}
    for place, episode in enumerate(episodes):
        if episode.last is None:
            continue
        said, row = episode.last
        found = {f"{PART}{name}": value for name, value in episode.parts.items()}
        if len(said.accuracies):
            found["accuracy"] = said.accuracies[row]
        for name, value in found.items():
            if name not in columns:
                # If only some environments report an accuracy, the others' accuracy is the reward.
                columns[name] = (
                    [sum(each.rewards) for each in episodes]
                    if name == "accuracy"
                    else [np.nan] * len(episodes)
                )
            columns[name][place] = np.nan if value is None else float(value)
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}


def accuracies_of(samples: BatchedDataDict[Any]) -> Tensor:
    """Return the accuracy of each response, [B] float32: the environment's own, else the reward. NaN if
    unknown."""
    return samples["accuracy"] if "accuracy" in samples else samples["reward"]


def part_metrics(batches: Sequence[BatchedDataDict[Any]]) -> dict[str, float]:
    """Return the mean of each reward part as ``reward/NAME``, over the unmasked samples of all batches that
    have the part."""
    found: dict[str, list[Tensor]] = {}
    for samples in batches:
        for name in samples:
            if name.startswith(PART):
                values = samples[name]
                found.setdefault(name, []).append(values[~samples["masked"] & ~values.isnan()])
    means: dict[str, float] = {}
    for name, parts in found.items():
        values = torch.cat(parts).double()
        if len(values):
            means[name] = float(values.mean())
    return means
