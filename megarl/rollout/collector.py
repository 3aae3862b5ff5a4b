"""The collector: turns prompts into samples, by means of a generator and an environment. It is synchronous:
all prompts are sampled together, with the newest weights."""

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
from megarl.observe.timing import GENERATION, Sequences
from megarl.rollout.environment import CUT, Environment, StopReason
from megarl.rollout.episodes import Episode, EpisodeLimits, EpisodeRunner
from megarl.rollout.trajectory import Segment, batch_of, token_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.data.datasets import Example
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.generation.interfaces import GenerationInterface, Sampling
    from megarl.observe.timing import PhaseTimer

logger = logging.getLogger(__name__)

PREV_LOGPROBS = "prev_logprobs"
"""Column of a batch with the log-probabilities of the policy before the update."""


class RefittedEngine(Protocol):
    """Rollout engines that are separate from the policy, and the operations that keep their weights
    in sync."""

    @property
    def generation(self) -> GenerationInterface:
        """The generation interface of the engines."""
        ...

    def bring_up_to_date(self) -> None:
        """Sync the policy's weights to the engines, if the engines have other weights."""
        ...

    def replace_lost_engines(self, error: MegarlError) -> None:
        """Start new engines in place of lost ones, after ``error``. Raise if no engine is lost, or no more
        engines are replaced."""
        ...


class Scorer(Protocol):
    """Computation of the policy's own log-probabilities of responses, part by part; see
    ``megarl.algorithms.scored_ahead``."""

    def begin(self, segments: Sequence[Segment], generations: int) -> None:
        """Begin a batch. Its segments are filled as they are sampled."""
        ...

    def sampled(self, numbers: Iterable[int]) -> None:
        """Record which responses are complete."""
        ...

    def wait(self) -> None:
        """Wait until the policy has no pending work."""
        ...

    def take(self, width: int) -> Tensor:
        """Return the log-probabilities of the batch, [B, width]."""
        ...


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Samples of a batch of prompts.

    Attributes:
        samples: B rows, the responses to one prompt next to each other. They have the columns of
            ``batch_of``, and ``truncated`` [B] bool (a length limit ended the conversation),
            ``response_text`` (B texts, what rewards read of the last response), ``reward`` [B] float32,
            ``masked`` [B] bool (masked by the environment, so that ``sample_mask`` is 0 too) and
            ``weight_version`` [B] int64 (training steps of the weights that sampled the row). If the
            environment provides them, there are also ``accuracy`` [B] float32 and, for each part of its
            rewards, ``reward/NAME`` [B] float32; missing values are NaN. Conversations of several turns also
            have ``turns`` [B] int64, ``ended`` (``StopReason``, B), ``turn_rewards`` (B lists, one reward per
            turn) and ``token_rewards`` [B, S] float32 (the same rewards at the last token of each response).
            If the chat template rewrites earlier responses, there is ``segments`` [B] int64; the tokens of a
            row are then those of the last segment of its response, and ``generation_lengths`` counts the
            tokens of all its segments. With a ``Scorer`` there is ``prev_logprobs`` [B, S] float32.
        records: B records, one per row.
        metrics: metrics of the environment.
        earlier: columns of ``batch_of`` and ``token_rewards`` for all segments except the last one of each
            response; and ``response`` [E] int64, ascending, the row of ``samples`` that each segment belongs
            to; and ``opening`` [E] int64, which ``samples`` then has too, the number of tokens at the end of
            a segment's prompt that are the observation it begins with. None if every response is one segment.
    """

    samples: BatchedDataDict[Any]
    records: Sequence[Example]
    metrics: Mapping[str, float]
    earlier: BatchedDataDict[Any] | None = None


@dataclass(frozen=True, slots=True)
class Collector:
    """Synchronous collector of samples.

    Attributes:
        policy: generates if there are no engines.
        tokenizer: decodes responses.
        environment: computes rewards.
        timer: timer of the phases ``refit``, ``generation``, ``reward`` and, if engines were lost,
            ``engine_restart``.
        stop_token_ids: tokens that end a response; None for the end-of-sequence token.
        engine: engines separate from the policy; None if the policy itself generates.
        limits: limits of each conversation.
        encoder: encoder of observations; None if conversations have one turn.
        shared: engines that several collectors use at once, with weights that their owner syncs; None if this
            collector uses ``policy`` or ``engine`` and syncs the weights itself.
        judging: as for ``EpisodeRunner``.
        scorer: computes log-probabilities of responses of one turn while others are sampled; None if they are
            computed later.
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
            config: the complete configuration of the run.
            section: section of its algorithm, which limits conversations.
            policy, tokenizer, environment, timer, engine: as the attributes.
        """
        stops = generation_of(config["policy"])["stop_token_ids"]
        limits = _limits(config["policy"], section)
        encoder = observation_encoder(config["policy"], tokenizer, stops or ()) if limits.turns > 1 else None
        return cls(policy, tokenizer, environment, timer, stops, engine, limits, encoder)

    @property
    def stops(self) -> Sequence[int]:
        """Tokens that end a response."""
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
        """Sample responses to the prompts of some records, and have the environment reward the responses.

        Args:
            records: P records.
            generations: G, responses per prompt.
            seeds: P * G seeds, see ``sampling_seeds``; None if the engine may choose its own.
            weight_version: finished training steps; None if nobody trains on the samples, which then lack
                that column.
            greedy: always take the most likely token.
            sampling: overrides the configured temperature, top-p and top-k; None keeps them.

        Raises:
            BatchError: the generated responses do not fit the prompts, or the environment's results do not
                fit the responses.
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
        # Take the earlier segments before the columns below are added: those count all segments of a response
        # together.
        earlier = self._earlier(episodes, samples)
        samples |= _columns(episodes)
        if weight_version is not None:
            versions = [
                weight_version if episode.version is None else episode.version for episode in episodes
            ]
            samples["weight_version"] = torch.tensor(versions, dtype=torch.int64)
        # Multiply instead of assigning, because batch_of has already masked the rows without a response.
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
        """Return all segments except the last one of each episode, see ``Rollouts``; None if there are none.
        Update the columns of ``samples`` that count all segments of a response."""
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
    """Build the encoder of observations of a run.

    Args:
        policy: the complete section of the policy.
        tokenizer: tokenizer of the policy.
        stops: tokens that end a response.
    """
    section = policy["tokenizer"]
    day = section.get("template_date")
    date = None if day is None else datetime.date.fromisoformat(day)
    return ObservationEncoder(
        tokenizer, ChatTemplate(tokenizer, section.get("chat_template_kwargs"), date), stops
    )


@dataclass(slots=True)
class _Engines:
    """The engines of a collector, as ``megarl.rollout.episodes.Engines``."""

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
                # Give the refit its own phase, so that metrics distinguish a slow refit from slow generation.
                engine.bring_up_to_date()
        tokenizer, stops = self.collector.tokenizer, self.collector.stops
        generation = self._generation
        one_turn = self.collector.limits.turns == 1
        # Conversations of one turn wait for the environment together. Only rewards and log-probabilities that
        # are computed ahead begin with the complete ones.
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
            # Wait for the scorer, because new engines receive the policy's weights and the policy may still
            # be computing for it.
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
    """Return the columns with the environment's results and with how episodes ended."""
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
    """Count the episodes by the reason of their end, and the observed tokens of all."""
    metrics = {f"{EPISODES}{reason}": 0.0 for reason in StopReason}
    observed = 0.0
    for episode in episodes:
        metrics[f"{EPISODES}{episode.reason}"] += 1
        for segment in episode.segments:
            observed += segment.opening + segment.length - segment.sampled_length
    return {**metrics, "observed_tokens": observed}


def add_metrics(own: Mapping[str, float], of_environment: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Add the environment's metrics, summed over batches, to those of a step or a validation.

    Raises:
        BatchError: the environment has a metric with the name of one of the run's metrics.
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
    """Return the columns ``accuracy`` and ``reward/NAME``, [B] float32 each, that the environment provides.
    Missing parts are NaN; a missing accuracy is the reward."""
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
                # If only some environments report an accuracy, use the reward as the accuracy of the others.
                columns[name] = (
                    [sum(each.rewards) for each in episodes]
                    if name == "accuracy"
                    else [np.nan] * len(episodes)
                )
            columns[name][place] = np.nan if value is None else float(value)
    return {name: torch.tensor(values, dtype=torch.float32) for name, values in columns.items()}


def accuracies_of(samples: BatchedDataDict[Any]) -> Tensor:
    """Return the accuracy of each response, [B] float32: the environment's own, else the reward; NaN if it is
    unknown."""
    return samples["accuracy"] if "accuracy" in samples else samples["reward"]


def part_metrics(batches: Sequence[BatchedDataDict[Any]]) -> dict[str, float]:
    """Return the mean of each part of the rewards, ``reward/NAME``, over the unmasked samples of all batches
    that have that part."""
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
