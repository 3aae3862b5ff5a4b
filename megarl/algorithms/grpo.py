"""Group-relative policy optimisation: sample several responses per prompt, score them, compare them within
the group, and train (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.algorithms.algorithm import ACTOR, REFERENCE, REWARD_MODEL, ModelSection, Parts, Role
from megarl.algorithms.sampled import Sampled, SampledConfig, Sampling, answer_metrics, mean
from megarl.config.environments import EnvConfig, weights_of_rewards
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.models import model_sections
from megarl.config.sections import RunConfig
from megarl.errors import MismatchError, NonFiniteError
from megarl.key import AT_LEAST_0, AT_LEAST_1, Key, Range
from megarl.observe.timing import Sequences

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy.lm_policy import Policy
    from megarl.rollout.collector import Rollouts


class AdvEstimatorConfig(TypedDict):
    """Advantage estimator and its options."""

    name: Annotated[
        str,
        Key(
            "how a response's reward becomes its advantage. ``grpo``: reward minus the mean of the "
            "prompt's responses, see ``normalize_rewards``, ``std`` and ``use_leave_one_out_baseline``; "
            "``rloo``: reward minus the mean of the prompt's other responses; ``gdpo``: each of several "
            "rewards as in ``grpo``, then their sum whitened over the batch; ``reinforce_plus_plus``: "
            "rewards whitened over all tokens of the batch; or the import path of a custom function, "
            "``path/to/file.py:name``, from ``AdvantageInputs`` to a tensor "
            "(``megarl.algorithms.advantages``).",
        ),
    ]
    options: NotRequired[Annotated[dict[str, Any], Key("settings passed to a custom estimator.", default={})]]
    minus_baseline: NotRequired[
        Annotated[
            bool,
            Key(
                "`reinforce_plus_plus`: subtract the mean reward of the prompt's responses before whitening.",
                default=False,
            ),
        ]
    ]


class RewardedConfig(SampledConfig):
    """Keys shared by GRPO and PPO, which train on sampled responses and their rewards."""

    reward_model_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the score of ``reward_model`` in the total reward of a response; without that "
                "section it must stay 1.",
                default=1.0,
            ),
        ]
    ]
    env_reward_weight: NotRequired[
        Annotated[
            float,
            Key(
                "weight of the reward from ``env`` in the total reward, if there is a ``reward_model``; 0 "
                "trains on the reward model's score alone. The reward from ``env`` is logged as the "
                "accuracy in any case.",
                default=1.0,
            ),
        ]
    ]
    logprob_parts: NotRequired[
        Annotated[
            int,
            Key(
                "number of parts into which a step's prompts are divided for the log-probability pass. With "
                "engines on ranks of their own, the policy processes a part as soon as all of its responses "
                "are complete, while engines still sample those of other parts; 1 waits for all responses. "
                "The number changes log-probabilities by rounding only.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    overlong_filtering: NotRequired[
        Annotated[
            bool,
            Key(
                "leave truncated responses out of training. With GRPO they still count in the mean and "
                "deviation of their group. A global batch in which no other response is left updates no "
                "weights (``empty_global_batches``).",
                default=False,
            ),
        ]
    ]
    seq_logprob_error_threshold: NotRequired[
        Annotated[
            float | None,
            Key(
                "leave a response out of training if its mean over tokens of exp(abs(log-probability in the "
                "engine - log-probability in the policy)) exceeds this; 1 means equal log-probabilities, "
                "null leaves out none. ``max_token_mult_prob_error`` is then checked on the remaining "
                "responses; if none remains, the run ends.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]
    max_token_mult_prob_error: NotRequired[
        Annotated[
            float | None,
            Key(
                "end the run, before it trains on the step, if ``token_mult_prob_error``, the mean over all "
                "tokens of exp(abs(log-probability in the engine - log-probability in the policy)), exceeds "
                "this; 1 means equal log-probabilities, null never ends the run.",
                AT_LEAST_1,
                default=None,
            ),
        ]
    ]


class GRPOConfig(RewardedConfig):
    """Group-relative policy optimisation."""

    num_generations_per_prompt: Annotated[
        int,
        Key(
            "number of responses sampled per prompt in a training step; at least 2, except with custom "
            "estimators and with `reinforce_plus_plus` without ``minus_baseline``.",
            AT_LEAST_1,
        ),
    ]
    adv_estimator: NotRequired[
        Annotated[
            AdvEstimatorConfig,
            Key(
                "computation of advantages from rewards.",
                default={"name": "grpo", "options": {}, "minus_baseline": False},
            ),
        ]
    ]
    advantage_clip_low: NotRequired[
        Annotated[
            float | None,
            Key(
                "lower bound to which advantages are clipped; null for no bound.", Range(high=0), default=None
            ),
        ]
    ]
    advantage_clip_high: NotRequired[
        Annotated[
            float | None,
            Key("upper bound to which advantages are clipped; null for no bound.", AT_LEAST_0, default=None),
        ]
    ]
    normalize_rewards: NotRequired[
        Annotated[
            bool,
            Key(
                "divide a response's advantage by the standard deviation of the rewards of its group (the "
                "responses to its prompt).",
                default=True,
            ),
        ]
    ]
    std: NotRequired[
        Annotated[
            Literal["population", "sample"],
            Key(
                "standard deviation of the rewards of a group of n responses: `population` divides the sum "
                "of squares by n, `sample` by n - 1, as TRL does. Advantages with `population` are larger "
                "by the factor sqrt(n / (n - 1)), which is 1.155 for n = 4.",
                default="population",
            ),
        ]
    ]
    use_leave_one_out_baseline: NotRequired[
        Annotated[
            bool,
            Key(
                "subtract the mean reward of the prompt's other responses from a response's reward; false "
                "subtracts the mean of all of them.",
                default=True,
            ),
        ]
    ]
    use_dynamic_sampling: NotRequired[
        Annotated[
            bool,
            Key(
                "leave out prompts whose responses all have the same accuracy, because their advantages are "
                "0, and sample further prompts until the step has ``num_prompts_per_step`` others (DAPO). "
                "The accuracy counts, not the shaped reward.",
                default=False,
            ),
        ]
    ]
    batch_multiplier: NotRequired[
        Annotated[
            float,
            Key(
                "with ``use_dynamic_sampling``: prompts sampled per generation round, as a multiple of "
                "``num_prompts_per_step``. It changes the time of a step, not the prompts that are trained "
                "on.",
                AT_LEAST_1,
                default=1.0,
            ),
        ]
    ]
    dynamic_sampling_max_gen_batches: NotRequired[
        Annotated[
            int,
            Key(
                "maximum number of generation rounds to fill one step; the run fails if the step is still "
                "incomplete.",
                AT_LEAST_1,
                default=10,
            ),
        ]
    ]


class GRPO(Sampled):
    """Group-relative policy optimisation. Each step samples several responses to each of its prompts, and
    trains on all of them."""

    SECTIONS = MappingProxyType({"grpo": GRPOConfig, "loss_fn": ClippedPGLossConfig, "env": EnvConfig})
    MODELS = MappingProxyType(
        {
            "reward_model": ModelSection(
                "reward model of GRPO and PPO. It has the keys of ``policy``, and absent keys have the "
                "policy's values. ``model_name`` must have a score head, as models trained with ``rm`` "
                "have.",
                scores=True,
                is_optional=True,
            )
        }
    )
    PROMPTS = "grpo.num_prompts_per_step"
    GENERATIONS = "grpo.num_generations_per_prompt"

    config: GRPOConfig

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.advantages import estimator_of
        from megarl.algorithms.loss_functions import policy_loss

        self.loss_config = parts.config["loss_fn"]
        super().__init__(parts, policy_loss(self.loss_config))
        self.reward_model = parts.models.get(REWARD_MODEL)
        # env_reward_weight weights the sum with the reward model's score; without one it must not scale
        # rewards.
        shared = 1.0 if self.reward_model is None else self.config["env_reward_weight"]
        self.reward_weights = {
            **{name: shared * weight for name, weight in weights_of_rewards(parts.config["env"]).items()},
            REWARD_MODEL.name: self.config["reward_model_weight"],
        }
        self.pad_token_id = parts.tokenizer.pad_token_id
        # Load it once, so that an edit of the user's file during the run does not change the algorithm.
        own = self.config.get("adv_estimator")
        self.estimator = (
            None if own is None else estimator_of(own["name"], f"{self.section()}.adv_estimator.name")
        )

    @classmethod
    def roles(cls, config: RunConfig) -> tuple[Role, ...]:
        """Return the roles of a run: the actor, the reference if the loss has a KL penalty, and the reward
        model if it is configured."""
        reference = (REFERENCE,) if config["loss_fn"]["reference_policy_kl_penalty"] > 0 else ()
        return (
            ACTOR,
            *reference,
            *((REWARD_MODEL,) if REWARD_MODEL.section in model_sections(config) else ()),
        )

    def step(self, step: int) -> dict[str, float]:
        """Sample responses to the next prompts, score them, and train on them."""
        from megarl.algorithms.skipped_batches import warn_of_no_signal
        from megarl.rollout.collector import add_metrics, part_metrics

        self.turns.take(ACTOR)
        sampled = self.take(step)
        rollouts, all_samples, rows = sampled.rollouts, sampled.judged, self.rows_of(sampled.rollouts)
        samples = rows.samples
        batch = self.score(samples)
        if self.config["overlong_filtering"]:
            # Only in ``batch``: ``samples`` keeps its mask, so that these responses still count in their
            # groups.
            batch["sample_mask"] = batch["sample_mask"] * (~samples["truncated"]).float()
        mismatch_metrics: dict[str, float] = {}
        refusal: MismatchError | None = None
        # If the engine's log-probabilities are used as ``previous``, there is nothing to compare them with.
        if self.needs_previous_logprobs and not self.anchors_at_engine:
            try:
                mismatch_metrics = self.judge_mismatch(batch, step)
            except MismatchError as error:
                # Raise after the samples are logged, because they help to find the cause.
                refusal = error
        with self.timer.phase("reward"):
            advantages, by_response, reward_metrics = self._advantages_of_responses(samples, batch)
        if self.sample_log is not None:
            # Log the samples even if they will not be trained on, because they are needed most then.
            self.sample_log.train(
                step, rollouts, _means_of_rows(advantages, by_response), by_response, self.train_data.sources
            )
        if refusal is not None:
            raise refusal
        self.empty_steps.look(batch, rollouts.samples, step)
        warn_of_no_signal(step, rollouts.samples, advantages, rollouts.records, self.run_config)
        train_metrics = self.train(batch, step, rows)
        self.done_steps = step
        metrics = {
            **train_metrics,
            **_sample_metrics(all_samples, samples, advantages),
            **part_metrics([all_samples]),
        }
        metrics |= {**self.settle(samples, step), **self.age_metrics(batch, samples, step)}
        metrics |= {**sampled.metrics, **mismatch_metrics, **reward_metrics, "epoch": sampled.epoch}
        return add_metrics(metrics, [rollouts.metrics])

    def _advantages_of_responses(
        self, samples: BatchedDataDict[Any], batch: BatchedDataDict[Any]
    ) -> tuple[Tensor, BatchedDataDict[Any], dict[str, float]]:
        """Estimate advantages per response (see ``advantages``), and write them into ``batch``. All segments
        of a response get its advantages.

        Returns:
            The advantages; the batch with one row per response; and metrics of the rewards.
        """
        from megarl.rollout.segment_rows import SegmentRows

        segments = SegmentRows.of(batch)
        if segments is None:
            advantages, metrics = self.advantages(samples, batch)
            batch["advantages"] = advantages.expand_as(batch["token_mask"])
            return advantages, batch, metrics
        scored = segments.by_response(batch)
        known = {*scored}
        counted = {**samples, "token_mask": batch["token_mask"] * batch["sample_mask"].unsqueeze(1)}
        # Per response, because a group counts responses however many segments each has.
        advantages, metrics = self.advantages(segments.by_response(counted), scored)
        # ``advantages`` may remove or add columns, as PPO does; apply that to the rows.
        for name in {*batch} & known - {*scored}:
            del batch[name]
        for name in {*scored} - known:
            batch[name] = segments.by_row(scored[name])
        batch["advantages"] = segments.by_row(advantages).expand_as(batch["token_mask"])
        return advantages, scored, metrics

    def train(
        self, batch: BatchedDataDict[Any], step: int, rollouts: Rollouts, epochs: int = 1
    ) -> dict[str, float]:
        """Train ``epochs`` times on a batch that has advantages, and return the metrics."""
        return self.train_policy(batch, step, rollouts, epochs)

    def collect(self, indices: list[int], seeds: list[int], step: int) -> Rollouts:
        """Sample responses to some prompts, and add the reward model's score to their rewards if there is
        one."""
        rollouts = super().collect(indices, seeds, step)
        if self.reward_model is not None:
            self.turns.take(REWARD_MODEL)
            with self.timer.phase("reward_model"):
                self._add_scores(rollouts.samples, self.reward_model)
            # The actor needs the devices next: to sample again (dynamic sampling), or to compute
            # log-probabilities.
            self.turns.take(ACTOR)
        return rollouts

    def _add_scores(self, samples: BatchedDataDict[Any], model: Policy) -> None:
        """Add the weighted scores of the reward model to ``reward``, and store the unweighted ones in
        ``reward/reward_model``. The accuracy remains that of the environment.

        Raises:
            NonFiniteError: a score is NaN or infinite.
        """
        import torch

        from megarl.algorithms.advantages import PART
        from megarl.rollout.collector import accuracies_of

        model.prepare_for_lp_inference()
        scores = model.score(samples.select_columns(("input_ids", "input_lengths")))["scores"]
        # scored=0, because a score layer has one output, which costs nothing compared with a vocabulary's.
        self.timer.passed(Sequences(samples["input_lengths"].numpy(), scored=0))
        if not bool(scores.isfinite().all()):
            raise NonFiniteError(
                f"the reward model gives {int((~scores.isfinite()).sum())} of {len(scores)} responses a "
                "score that is not finite. Nothing was trained on them. Fix: give reward_model.model_name "
                "working weights, or another reward_model.precision"
            )
        weights = self.config["env_reward_weight"], self.config["reward_model_weight"]
        # Before the reward changes: without an accuracy from the environment, its reward is the accuracy.
        samples["accuracy"] = accuracies_of(samples)
        samples[f"{PART}{REWARD_MODEL.name}"] = scores
        # Masked responses have no reward to which a score could be added.
        samples["reward"] = torch.where(
            samples["masked"], samples["reward"], weights[0] * samples["reward"] + weights[1] * scores
        )

    def sample(self, step: int) -> Sampling:
        """Sample responses to the next prompts. With dynamic sampling, repeat this until enough prompts have
        a learning signal."""
        from megarl.rollout.dynamic_sampling import DynamicSampling
        from megarl.rollout.samples import seeds_from

        if not self.config["use_dynamic_sampling"]:
            return super().sample(step)
        prompts, generations = self.config["num_prompts_per_step"], self.config["num_generations_per_prompt"]

        def collect(indices: list[int], ordinal: int) -> Rollouts:
            # Seeds depend on the prompt's ordinal in the run, not on the call, so that batch_multiplier does
            # not change the samples.
            seeds = seeds_from(self.seed, ordinal, len(indices), generations, prompts)
            return self.collect(indices, seeds, step)

        sampling = DynamicSampling(
            prompts,
            generations,
            round(prompts * self.config["batch_multiplier"]),
            self.config["dynamic_sampling_max_gen_batches"],
            self.config["overlong_filtering"],
            self.pad_token_id,
        )
        filled = sampling.fill(step, self.sampler, collect)
        trained = filled.rollouts.samples
        metrics = {**filled.metrics, "filtered_reward": mean(trained["reward"][~trained["masked"]])}
        return Sampling(filled.rollouts, filled.judged, metrics)

    @property
    def needs_previous_logprobs(self) -> bool:
        """True if a separate pass must compute the log-probabilities under the policy before the update.

        It is not needed if the ratio is forced to 1; the mismatch is then measured while training. It is
        needed anyway if a large mismatch must prevent training, or if rewards depend on the
        log-probabilities.
        """
        bounds = [self.config[key] for key in ("max_token_mult_prob_error", "seq_logprob_error_threshold")]
        return (
            not self.loss_config["force_on_policy_ratio"]
            or self.loss_config["use_kl_in_reward"]
            or bounds != [None, None]
        )

    def judge_mismatch(self, batch: BatchedDataDict[Any], step: int) -> dict[str, float]:
        """Measure the mismatch between engine and policy. Mask the sequences that differ too much in
        ``sample_mask``, together with all other segments of their responses.

        Raises:
            MismatchError: the mismatch is too large to train.
        """
        from megarl.rollout.samples import check_mismatch, masked_far_apart, mismatch_metrics
        from megarl.rollout.segment_rows import SegmentRows

        generation, previous = batch["generation_logprobs"], batch["prev_logprobs"]
        metrics = mismatch_metrics(
            generation, previous, batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        )
        kept, threshold = metrics, self.config["seq_logprob_error_threshold"]
        if threshold is not None:
            near, of_sequences = masked_far_apart(
                generation,
                previous,
                batch["token_mask"],
                batch["sample_mask"],
                threshold,
                step,
                self.section(),
            )
            segments = SegmentRows.of(batch)
            batch["sample_mask"] = (
                near if segments is None else segments.without_some_rows(batch["sample_mask"], near)
            )
            kept = mismatch_metrics(
                generation, previous, batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
            )
            metrics = {**metrics, **of_sequences}
        # Check only the sequences that are trained on.
        check_mismatch(kept, self.config["max_token_mult_prob_error"], step, self.section())
        return metrics

    def advantages(
        self, samples: BatchedDataDict[Any], batch: BatchedDataDict[Any]
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute advantages: float32 [B, 1], or [B, S] if they differ between tokens; 0 at rows and tokens
        that do not count. Also return metrics of the rewards.

        A group contains all its scored samples, including those that the mismatch has excluded from training.
        """
        import torch

        from megarl.algorithms.advantages import clipped, estimated_advantages

        # Group by position: two records with equal prompts are two groups.
        place = torch.arange(len(samples["reward"])) // self.config["num_generations_per_prompt"]
        grouped = {**samples, "prompt_ids": place.unsqueeze(1)}
        penalties, metrics = self.penalties_of(samples, batch)
        advantages = estimated_advantages(
            self.config, grouped, batch["sample_mask"], penalties, self.reward_weights, self.estimator
        )
        return clipped(
            advantages, self.config["advantage_clip_low"], self.config["advantage_clip_high"]
        ), metrics

    def penalties_of(
        self, samples: BatchedDataDict[Any], batch: BatchedDataDict[Any]
    ) -> tuple[Tensor | None, dict[str, float]]:
        """Return the KL penalty to subtract from each token's reward, [B, S], or None if there is none; and
        its metrics.

        Responses that are excluded from training keep their penalties, because other responses of their group
        are compared with them.
        """
        from megarl.algorithms.loss_functions import kl_of_tokens

        if not self.loss_config["use_kl_in_reward"]:
            return None, {}
        divergence = kl_of_tokens(self.loss_config, {**batch, "sample_mask": samples["sample_mask"]})
        # The KL of sequences that the error threshold excluded may be NaN, which would spread to the whole
        # group.
        divergence = divergence.where(divergence.isfinite() | (batch["sample_mask"] != 0)[:, None], 0.0)
        counts = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        # Without column 0: the first token of a row has no log-probability.
        mean = (divergence * counts).sum() / counts[:, 1:].sum().clamp(min=1)
        return self.loss_config["reference_policy_kl_penalty"] * divergence, {"kl_in_reward": float(mean)}

    def score(self, samples: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Build a ``ClippedPGLossDataDict`` without advantages. It has the log-probabilities under the policy
        before the update and under the reference, if needed."""
        previous = self.needs_previous_logprobs and not self.anchors_at_engine
        batch = self.batch_of(
            samples, previous=previous, reference=bool(self.loss_config["reference_policy_kl_penalty"])
        )
        if self.anchors_at_engine:
            batch["prev_logprobs"] = batch["generation_logprobs"]
        return batch


def _means_of_rows(advantages: Tensor, batch: BatchedDataDict[Any]) -> Tensor:
    """Average advantages [B, 1] or [B, S] over each row's valid tokens, [B]."""
    if advantages.shape[1] == 1:
        return advantages.squeeze(1)
    counts = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
    return (advantages * counts).sum(dim=1) / counts.sum(dim=1).clamp(min=1)


def _sample_metrics(
    all_samples: BatchedDataDict[Any], samples: BatchedDataDict[Any], advantages: Tensor
) -> dict[str, float]:
    """Compute metrics of all samples that a step has scored, and of those on which it trains."""
    rewards = all_samples["reward"][~all_samples["masked"]]
    return {
        **answer_metrics(all_samples),
        # correction=0: with n - 1, the deviation of a single reward would be NaN.
        "reward_std": float(rewards.std(correction=0)) if len(rewards) else 0.0,
        "advantages_min": float(advantages.min()),
        "advantages_max": float(advantages.max()),
        "samples_without_signal": float((advantages == 0).all(dim=1).double().mean()),
        "num_tokens": int(samples["input_lengths"].sum()),
    }
