"""Training on responses that the policy samples: the common base of GRPO, PPO and on-policy distillation."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from typing_extensions import TypedDict

from megarl.algorithms.ahead import HeldEngines, SamplingAhead
from megarl.algorithms.algorithm import ACTOR, Algorithm, Parts, Role
from megarl.algorithms.ready_first import Ledger, Order, ReadyFirst, Replay
from megarl.algorithms.rollout_source import InTurn, RolloutSource, WaitingBatches
from megarl.algorithms.sampled_batch import Sampling
from megarl.algorithms.scored_ahead import ScoredAhead
from megarl.algorithms.served import ServedCheck
from megarl.config.asynchrony import LEDGER, AsyncConfig
from megarl.config.backend import generation_of
from megarl.config.nested import at
from megarl.config.policy import PolicyConfig
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key
from megarl.observe.timing import LOGPROBS, PhaseTimer, Sequences

__all__ = ["Sampled", "SampledConfig", "Sampling", "answer_metrics", "mean"]

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.algorithms.refit import Refit
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.lm_policy import Policy
    from megarl.rollout.collector import Collector, Rollouts
    from megarl.rollout.evaluation import ValidatedSet


class SampledConfig(TypedDict):
    """Keys of all algorithms that train on sampled responses: steps, sampling and validation."""

    num_prompts_per_step: Annotated[
        int,
        Key(
            "number of prompts taken from the training data in a step; each gets "
            "``num_generations_per_prompt`` responses.",
            AT_LEAST_1,
        ),
    ]
    max_num_steps: Annotated[
        int, Key("maximum number of training steps, after which the run ends.", AT_LEAST_1)
    ]
    max_rollout_turns: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of responses of the policy in one conversation, with an environment that "
                "replies; after the last one the conversation ends, whatever its state.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    max_rollout_tokens: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of tokens of a conversation after its prompt, observations included; null "
                "for as many as ``policy.max_total_sequence_length`` leaves after the prompt. "
                "``policy.generation.max_new_tokens`` limits each single response.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    async_grpo: NotRequired[
        Annotated[
            AsyncConfig,
            Key(
                "asynchronous training: engines sample the batches of later steps while a step trains.",
                default={
                    "enabled": False,
                    "schedule": "in_order",
                    "max_trajectory_age_steps": 1,
                    "lookahead_steps": 1,
                    "on_stale": "wait",
                    "in_flight_weight_updates": True,
                    "replay": None,
                    "recompute_logprobs": True,
                },
            ),
        ]
    ]
    max_num_epochs: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of passes over the training data; the run ends at this or at "
                "``max_num_steps``, whichever comes first. null for no limit.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    val_period: NotRequired[
        Annotated[
            int,
            Key(
                "number of steps between validations; 0 for no validation during training.",
                AT_LEAST_0,
                default=0,
                advice="write 0 for no validation",
            ),
        ]
    ]
    val_at_start: NotRequired[Annotated[bool, Key("run a validation before the first step.", default=False)]]
    val_at_end: NotRequired[Annotated[bool, Key("run a validation after the last step.", default=False)]]
    max_val_samples: NotRequired[
        Annotated[
            int | None,
            Key(
                "maximum number of prompts of a validation set that are used, the first ones; null for all.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    val_batch_size: NotRequired[
        Annotated[
            int | None,
            Key(
                "number of prompts of a validation set whose responses are generated in one call; null for "
                "the whole set. Without a rollout engine, the policy samples "
                "``policy.generation_batch_size`` responses at a time within the call.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    val_num_generations_per_prompt: NotRequired[
        Annotated[
            int,
            Key(
                "number k of responses sampled per validation prompt. More than one gives the metrics "
                "mean@k, pass@k and majority@k, and needs ``policy.generation.val_temperature`` above 0. A "
                "source of ``data.validation`` may override it.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]


class Sampled(Algorithm):
    """Base of algorithms that train on sampled responses. A step samples responses to some prompts and trains
    on them; a validation scores responses to the validation sets.

    A step of an algorithm with rewards has four parts: ``sample``, ``score``, ``advantages``, ``train``. A
    variant overrides the parts that it changes.

    Args:
        parts: models, data and tools of the run.
        loss_fn: loss function of the policy.
    """

    config: SampledConfig

    def __init__(self, parts: Parts, loss_fn: Any) -> None:
        # Imports are inside functions, here and below, because a configuration is checked against these
        # classes without loading torch.
        from megarl.algorithms.skipped_batches import EmptySteps
        from megarl.rollout.collector import Collector

        super().__init__(parts)
        assert parts.environment is not None
        self.run_config, self.config = parts.config, at(parts.config, self.section())
        self.generations: int = 1 if self.GENERATIONS is None else at(parts.config, self.GENERATIONS)
        self.seed, self.loss_fn = parts.config["seed"], loss_fn
        self.policy, self.models, self.turns = parts.models[ACTOR], parts.models, parts.turns
        self.refit, self.timer, self.skipped = parts.refit, parts.timer, parts.skipped
        self.train_data, self.validation_data = parts.train_data, parts.validation_data
        self.sample_log, self.done_steps, self._validated_step = parts.sample_log, 0, 0
        self._version: int | None = None
        self.empty_steps = EmptySteps(parts.config["policy"]["max_consecutive_skips"], self.section())
        self.served: ServedCheck | None = None
        section = generation_of(parts.config["policy"])["engine_check"]
        if parts.refit is not None and not parts.refit.colocated and section["sequences"]:
            precision = parts.config["policy"]["precision"]
            self.served = ServedCheck(section, self.policy, parts.refit.generation, precision, self.seed)
            parts.refit.check = self.served.check
        engine: Refit | HeldEngines | None = parts.refit
        self.source: RolloutSource = InTurn(self._sample_step)
        timer = parts.timer
        asynchrony: AsyncConfig | None = (
            at(self.config, "async_grpo") if at(self.config, "async_grpo.enabled") else None
        )
        if asynchrony is not None and parts.refit is not None and asynchrony["max_trajectory_age_steps"]:
            engine = held = HeldEngines(parts.refit)
            # A timer serves one thread, so work in the background gets its own.
            timer = PhaseTimer()
            if asynchrony["schedule"] == "in_order":
                lag = asynchrony["max_trajectory_age_steps"]
                self.source = SamplingAhead(
                    self._sample_step, lag, parts.last_step, held, WaitingBatches(), parts.timer, timer
                )
        own = self.policy, parts.tokenizer, parts.environment
        self.collector = Collector.of_run(parts.config, self.config, *own, parts.timer, engine)
        if asynchrony is not None and asynchrony["schedule"] == "ready_first":
            # Groups are scored in separate threads, possibly during a validation, so calls of the environment
            # need a lock.
            self.collector = replace(self.collector, judging=threading.Lock())
            self.source = self._ready_first(asynchrony, parts, engine, timer)
        self.scorer: ScoredAhead | None = None
        parts_of_step: int = at(self.config, "logprob_parts") or 1
        # A single part is the whole batch, which ``batch_of`` scores once it is complete.
        if parts_of_step > 1 and self.needs_previous_logprobs:
            self.scorer = ScoredAhead(self.policy, parts_of_step, parts.tokenizer.pad_token_id, parts.timer)
        self._sampling_collector = replace(self.collector, timer=timer, scorer=self.scorer)

    def _ready_first(
        self, section: AsyncConfig, parts: Parts, held: Refit | HeldEngines | None, timer: PhaseTimer
    ) -> ReadyFirst | Replay:
        from megarl.models.generation.shared_stream import SharedStream
        from megarl.rollout.collector import add_metrics
        from megarl.rollout.dynamic_sampling import joined
        from megarl.rollout.environments import tell_of_groups
        from megarl.rollout.samples import seeds_from

        prompts, generations = self.config["num_prompts_per_step"], self.generations
        run = {**parts.sampler.identity, "prompts": prompts, "generations": generations}
        if section["replay"] is not None:
            return Replay(Ledger(Path(section["replay"]) / LEDGER, run), parts.train_data)
        assert isinstance(held, HeldEngines) and parts.environment is not None, "a rule wants engines apart"
        engines, pad = held.generation, parts.tokenizer.pad_token_id
        generation = generation_of(parts.config["policy"])
        shared = SharedStream(
            lambda: engines.requests(self.collector.stops, pad, greedy=False, sampling=None),
            generation["max_new_tokens"],
            stops_at_texts=bool(generation["stop_strings"]),
            drains=not section["in_flight_weight_updates"],
        )
        # A call of the environment gets one group only, which is too few responses to conclude that a reward
        # function is broken.
        tell_of_groups(parts.environment, prompts * generations)
        collector = replace(self.collector, shared=shared)

        def collect(index: int, ordinal: int, version: int, timer: PhaseTimer) -> Rollouts:
            seeds = seeds_from(self.seed, ordinal, 1, generations, prompts)
            record = parts.train_data.select([index])
            return replace(collector, timer=timer).collect(record, generations, seeds, weight_version=version)

        def join(groups: list[Rollouts]) -> Rollouts:
            found = joined(groups, range(len(groups)), generations, pad)
            return replace(found, metrics=add_metrics({}, [group.metrics for group in groups]))

        order = Order(
            prompts,
            section["lookahead_steps"],
            section["max_trajectory_age_steps"],
            section["on_stale"] == "drop",
        )
        ledger = Ledger(Path(parts.config["run_dir"]) / LEDGER, run)
        own = parts.sampler, parts.last_step, parts.timer, timer
        return ReadyFirst(order, collect, join, shared, held, *own, ledger)

    def validate(self) -> dict[str, float]:
        """Sample and score all validation sets, and return their metrics (``validation_metrics``)."""
        if self.validation_data is None:
            return {}
        self.turns.take(ACTOR)
        if self.refit is not None and not self.refit.colocated:
            # Engines on other devices read the actor's weights from its devices, which another model may be
            # using.
            self.turns.bring(ACTOR)
        validated = self._validated(self.collector)
        if self.refit is not None:
            # The engines may have used the actor's devices; a later save or export expects the actor there.
            self.policy.prepare_for_lp_inference()
        return self._figures(validated, self.done_steps)

    def _validated(self, collector: Collector) -> list[ValidatedSet]:
        """Sample and score the responses to all validation sets."""
        from megarl.rollout.evaluation import answer_set, validation_sets

        assert self.validation_data is not None
        size = self.config["val_batch_size"]
        sets = validation_sets(self.run_config, self.validation_data)
        return [answer_set(collector, each, size) for each in sets]

    def _figures(self, validated: list[ValidatedSet], step: int) -> dict[str, float]:
        """Log the samples of a validation after ``step`` finished steps, and return its metrics."""
        from megarl.rollout.evaluation import validation_metrics

        if self.sample_log is not None and self.validation_data is not None:
            self.sample_log.validation(step, validated, self.validation_data.sources)
        return validation_metrics(validated)

    def validate_beside(self) -> bool:
        """Request that the engines which sample during the next step validate too. Return False if this run,
        or a subclass with its own ``validate``, cannot do so."""
        if self.validation_data is None or type(self).validate is not Sampled.validate:
            return False
        self._validated_step = self.done_steps
        return self.source.validate_beside(partial(self._validated, self._sampling_collector))

    def validated_beside(self) -> dict[str, float] | None:
        found = self.source.validated()
        return None if found is None else self._figures(found, self._validated_step)

    def take(self, step: int) -> Sampling:
        """Return the batch for a step. It is sampled now, or was sampled while an earlier step trained."""
        if self.refit is not None and not self.refit.colocated:
            # Engines on other devices read the actor's weights, which may be offloaded in favour of another
            # model.
            self.turns.bring(ACTOR)
        # Everything sampled until the next step uses the weights after step - 1.
        self._version = step - 1
        return self.source.next(step)

    def settle(self, samples: BatchedDataDict[Any], step: int) -> dict[str, float]:
        """Wait at the end of a step for the sampling in progress. Return metrics of the last refit's engine
        check, and of waiting batches."""
        found: dict[str, float] = {}
        if self.served is not None:
            found = self.served.metrics
            self.served.remember(samples, step)
        self.source.settle()
        return {**found, **self.source.metrics}

    def save(self, directory: Path) -> None:
        """Write the waiting batches into a checkpoint."""
        self.source.save(directory)

    def load(self, directory: Path) -> None:
        """Read the waiting batches of a checkpoint.

        Raises:
            UnusableCheckpointError: they cannot be read, or belong to another schedule.
        """
        self.source.load(directory, self.train_data)

    def close(self) -> None:
        """Stop background sampling and scoring."""
        if self.scorer is not None:
            self.scorer.close()
        self.source.close()

    @property
    def needs_previous_logprobs(self) -> bool:
        """True if a separate pass must compute the log-probabilities under the policy before the update. Read
        in the constructor."""
        return False

    @property
    def anchors_at_engine(self) -> bool:
        """True if importance ratios are relative to the engine's log-probabilities rather than recomputed
        ones."""
        return self.source.is_ahead and not self.config["async_grpo"]["recompute_logprobs"]

    def age_metrics(
        self, batch: BatchedDataDict[Any], samples: BatchedDataDict[Any], step: int
    ) -> dict[str, float]:
        """Compute metrics of the age of a step's responses. Empty unless batches are sampled during training.

        ``rollout_age`` is the mean number of training steps between the oldest weights that sampled a
        response and the weights that it trains; ``token_age`` is the same per token.
        ``effective_sample_share`` is (sum w)^2 / (n sum w^2) over the valid tokens, where w is the
        probability ratio of the policy before the step to the policy that sampled.
        """
        from megarl.rollout.samples import effective_share
        from megarl.rollout.trajectory import TOKEN_VERSIONS

        if not self.source.is_ahead:
            return {}
        age = {"rollout_age": float(step - 1 - samples["weight_version"].double().mean())}
        if TOKEN_VERSIONS in samples:
            versions = samples[TOKEN_VERSIONS][samples["token_mask"] != 0]
            age["token_age"] = float(step - 1 - versions.double().mean()) if len(versions) else 0.0
        if self.anchors_at_engine or "prev_logprobs" not in batch:
            return age
        counts = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        return {
            **age,
            "effective_sample_share": effective_share(
                batch["prev_logprobs"] - batch["generation_logprobs"], counts
            ),
        }

    def _sample_step(self, step: int) -> Sampling:
        return replace(self.sample(step), epoch=self.sampler.epoch)

    def sample(self, step: int) -> Sampling:
        """Sample responses to the next prompts. The step trains on all of them."""
        from megarl.rollout.samples import sampling_seeds

        prompts, generations = self.config["num_prompts_per_step"], self.generations
        rollouts = self.collect(
            self.sampler.take(prompts), sampling_seeds(self.seed, step, prompts, generations), step
        )
        return Sampling(rollouts, rollouts.samples, {})

    def collect(self, indices: list[int], seeds: list[int], step: int) -> Rollouts:
        """Sample responses to the prompts of the records with these indices."""
        if self.refit is None or self.refit.colocated:
            # If engines sample on other devices, another model may keep the actor's devices.
            self.turns.take(ACTOR)
        version = step - 1 if self._version is None else self._version
        return self._sampling_collector.collect(
            self.train_data.select(indices), self.generations, seeds, weight_version=version
        )

    def rows_of(self, rollouts: Rollouts) -> Rollouts:
        """Convert rollouts to one row per segment."""
        from megarl.rollout.segment_rows import rows_of_segments

        return rows_of_segments(rollouts, self.collector.tokenizer.pad_token_id)

    def batch_of(
        self, samples: BatchedDataDict[Any], *, previous: bool, reference: bool
    ) -> BatchedDataDict[Any]:
        """Build the training batch from samples: the model's inputs and ``generation_logprobs``.

        Args:
            samples: the samples, one row per segment.
            previous: add ``prev_logprobs``, the log-probabilities under the policy before the update.
            reference: add ``reference_policy_logprobs``.
        """
        from megarl.algorithms.train_results import scored_tokens
        from megarl.rollout.collector import PREV_LOGPROBS
        from megarl.rollout.samples import MODEL_INPUTS
        from megarl.rollout.segment_rows import RESPONSE

        inputs = samples.select_columns(MODEL_INPUTS)
        batch = samples.select_columns((*MODEL_INPUTS, "generation_logprobs", RESPONSE))
        # The log-probabilities were computed in parts while other responses were sampled (ScoredAhead).
        if previous and PREV_LOGPROBS in samples:
            batch[PREV_LOGPROBS], previous = samples[PREV_LOGPROBS], False
        if not previous and not reference:
            return batch
        passed = Sequences(samples["input_lengths"].numpy(), scored=scored_tokens(inputs))
        self.policy.prepare_for_lp_inference()
        if previous:
            with self.timer.phase(LOGPROBS):
                batch[PREV_LOGPROBS] = self.policy.get_logprobs(inputs, skip_masked=True)["logprobs"]
                self.timer.passed(passed)
        if reference:
            with self.timer.phase("reference_logprobs"):
                found = self.policy.get_reference_policy_logprobs(inputs, skip_masked=True)
                batch["reference_policy_logprobs"] = found["reference_logprobs"]
                self.timer.passed(passed)
        return batch

    def train_policy(
        self, batch: BatchedDataDict[Any], step: int, rollouts: Rollouts, epochs: int = 1
    ) -> dict[str, float]:
        """Train the policy ``epochs`` times on a batch, and return the metrics. Global batches without a
        valid token are left out."""
        from megarl.algorithms.train_results import trained_sequences

        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            kept, results, metrics = self._train_global_batches(
                self.policy, batch, self.loss_fn, step, rollouts, epochs
            )
            self.policy.finish_training()
            for result in results:
                self.timer.passed(trained_sequences(kept, result, self.loss_fn))
        # Without a trained global batch the weights are unchanged, and no refit is needed.
        if self.refit is not None and results:
            self.refit.stale = True
        return metrics

    def _train_global_batches(
        self,
        model: Policy,
        batch: BatchedDataDict[Any],
        loss_fn: Any,
        step: int,
        rollouts: Rollouts,
        epochs: int,
        role: Role | None = None,
    ) -> tuple[BatchedDataDict[Any], list[dict[str, Any]], dict[str, float]]:
        """Train a model ``epochs`` times on the global batches that have a valid token.

        Returns:
            The rows that were trained on, the result of each epoch, and the metrics.
        """
        from megarl.algorithms.skipped_batches import filled
        from megarl.algorithms.train_results import metrics_of_epochs
        from megarl.rollout.segment_rows import RESPONSE, global_batches

        section: PolicyConfig = at(self.run_config, (role or ACTOR).section)
        size, rows, gbs = section["train_global_batch_size"], list(range(batch.size)), None
        # Segments of a response must share a global batch, so its number of rows is known only now.
        if RESPONSE in batch:
            batch, size, rows = global_batches(
                batch, size, rows_of_a_round(section, model.data_parallel_size)
            )
            gbs = size
        found = filled(batch, size)
        records = [rollouts.records[rows[row]].index for row in found.rows]
        results = [
            self.skipped.train(model, found.batch, loss_fn, step, records, gbs, role=role)
            for _ in range(epochs if len(found.rows) else 0)
        ]
        return found.batch, results, found.with_left_out(metrics_of_epochs(results, loss_fn))


def rows_of_a_round(section: PolicyConfig, replicas: int) -> int:
    """Return the number of rows that all data-parallel replicas process in one pass. The rows of a global
    batch must be a multiple of it."""
    planned = section["sequence_packing"]["enabled"] or section["dynamic_batching"]["enabled"]
    return replicas * (1 if planned else section["train_micro_batch_size"])


def mean(values: Tensor) -> float:
    """Return the mean, or 0 if there are no values, for example because the environment masked all
    samples."""
    return float(values.mean()) if len(values) else 0.0


def answer_metrics(judged: Mapping[str, Tensor]) -> dict[str, float]:
    """Return metrics of a step's scored responses: the mean reward and, if it is not the reward, the mean
    accuracy over unmasked responses (each omitted if there are none); the mean length; the truncated share;
    and the mean numbers of turns and segments, if known."""
    counted = ~judged["masked"]
    accuracies = judged["accuracy"][counted] if "accuracy" in judged else judged["reward"][:0]
    found = {"accuracy": accuracies[~accuracies.isnan()], "reward": judged["reward"][counted]}
    return {
        **{name: mean(values) for name, values in found.items() if len(values)},
        **{name: float(judged[name].double().mean()) for name in ("turns", "segments") if name in judged},
        "generation_length": float(judged["generation_lengths"].double().mean()),
        "truncated": float(judged["truncated"].double().mean()),
    }
