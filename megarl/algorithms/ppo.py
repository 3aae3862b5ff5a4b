"""Proximal policy optimisation with a critic. The advantage of a token compares the critic's values of the
states before and after it (PPO, arXiv 1707.06347; generalized advantage estimation, arXiv 1506.02438)."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, NotRequired

from megarl.algorithms.algorithm import ACTOR, CRITIC, ModelSection, Parts, Role
from megarl.algorithms.grpo import GRPO, RewardedConfig
from megarl.algorithms.sampled import Sampled, Sampling
from megarl.config.environments import EnvConfig
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.sections import RunConfig
from megarl.errors import NonFiniteError
from megarl.key import ABOVE_0, AT_LEAST_0, AT_LEAST_1, SHARE, Key
from megarl.observe.timing import TRAIN_CRITIC, Sequences

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.rollout.collector import Rollouts


class PPOConfig(RewardedConfig):
    """Proximal policy optimisation with a critic."""

    num_generations_per_prompt: NotRequired[
        Annotated[
            int,
            Key(
                "number of responses sampled per prompt in a training step; 1 is enough, because the "
                "critic's values replace the comparison within a group.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    gae_gamma: NotRequired[
        Annotated[
            float,
            Key(
                "discount factor per token for later rewards and values (gamma of generalised advantage "
                "estimation).",
                SHARE,
                default=1.0,
            ),
        ]
    ]
    gae_lambda: NotRequired[
        Annotated[
            float,
            Key(
                "lambda of generalised advantage estimation: 0 takes the critic's value of the next token "
                "for all that follows, 1 the actual rewards that followed; values between mix both.",
                SHARE,
                default=0.95,
            ),
        ]
    ]
    normalize_advantages: NotRequired[
        Annotated[
            bool,
            Key(
                "whiten advantages over all tokens of the step; the returns on which the critic is trained "
                "are not changed.",
                default=True,
            ),
        ]
    ]
    bootstrap_truncated: NotRequired[
        Annotated[
            bool,
            Key(
                "add the critic's value of the state after a truncated response, as if the response went "
                "on; false takes 0 there, as after a complete response.",
                default=False,
            ),
        ]
    ]
    rewards_by_turn: NotRequired[
        Annotated[
            bool,
            Key(
                "with ``max_rollout_turns`` above 1: put the reward of each turn on the last token of that "
                "turn's response, so that it credits only the tokens before it; false puts the sum of all "
                "rewards on the last token of the conversation.",
                default=False,
            ),
        ]
    ]
    value_clip: NotRequired[
        Annotated[
            float | None,
            Key(
                "maximum change of the critic's value of a token since the responses were sampled; beyond "
                "it the value gets no gradient that would move it further away. null for no maximum.",
                ABOVE_0,
                default=0.2,
            ),
        ]
    ]
    ppo_epochs: NotRequired[
        Annotated[
            int,
            Key(
                "number of passes of the actor over the batch of a step.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    critic_ppo_epochs: NotRequired[
        Annotated[
            int,
            Key(
                "number of passes of the critic over the batch of a step; ``ppo_epochs`` when absent.",
                AT_LEAST_1,
                follows="ppo_epochs",
            ),
        ]
    ]
    critic_warmup_steps: NotRequired[
        Annotated[
            int,
            Key(
                "number of steps at the beginning of the run in which only the critic is trained; 0 trains "
                "both from the first step.",
                AT_LEAST_0,
                default=0,
            ),
        ]
    ]


class PPO(GRPO):
    """Proximal policy optimisation. A step samples responses, computes the critic's values of their states,
    and trains both models.

    It differs from GRPO in its advantages. The critic has workers of its own on the actor's devices, which
    the two models share over time.
    """

    SECTIONS = MappingProxyType({"ppo": PPOConfig, "loss_fn": ClippedPGLossConfig, "env": EnvConfig})
    MODELS = MappingProxyType(
        {
            **GRPO.MODELS,
            "critic": ModelSection(
                "value model of PPO. It has the keys of ``policy``, and absent keys have the policy's "
                "values. Without a ``model_name`` it starts from the policy's model, with a new value "
                "head.",
                scores=True,
                is_trained=True,
                has_backbone_of_policy=True,
            ),
        }
    )
    PROMPTS = "ppo.num_prompts_per_step"
    GENERATIONS = "ppo.num_generations_per_prompt"

    # All methods that read keys of GRPO's section only are overridden.
    config: PPOConfig  # type: ignore[assignment]

    def __init__(self, parts: Parts) -> None:
        from megarl.algorithms.value_losses import ValueLoss

        super().__init__(parts)
        self.critic = parts.models[CRITIC]
        # Any, because a value loss takes other arguments than the protocol's type.
        self.value_loss: Any = ValueLoss(self.config["value_clip"])

    @classmethod
    def roles(cls, config: RunConfig) -> tuple[Role, ...]:
        """Return the roles of a run: those of GRPO, and the critic."""
        actor, *others = super().roles(config)
        return (actor, CRITIC, *others)

    def is_warming_up(self, step: int) -> bool:
        """Return whether this step trains only the critic."""
        return bool(step <= self.config["critic_warmup_steps"])

    def sample(self, step: int) -> Sampling:
        """Sample responses to the next prompts. There is no dynamic sampling, because responses are not
        compared with each other and each has a learning signal."""
        # Not GRPO's method: it reads dynamic sampling keys, which PPO's section lacks.
        return Sampled.sample(self, step)

    def score(self, samples: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
        """Extend GRPO's columns by ``values`` [B, S]: the critic's value at each token, before the critic is
        trained."""
        batch = super().score(samples)
        self.turns.take(CRITIC)
        with self.timer.phase("values"):
            self.critic.prepare_for_lp_inference()
            inputs = batch.select_columns(("input_ids", "input_lengths"))
            batch["values"] = self.critic.get_values(inputs)["values"]
            self.timer.passed(Sequences(samples["input_lengths"].numpy(), scored=0))
        return batch

    def advantages(
        self, samples: BatchedDataDict[Any], batch: BatchedDataDict[Any]
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute advantages, [B, S] float32, 0 at tokens that do not count; and metrics. Add the critic's
        training targets to the batch: ``returns``, and ``prev_values``, its value of the state before each
        token; both [B, S] float32.

        Raises:
            NonFiniteError: a value is NaN or infinite.
        """
        from megarl.algorithms.advantages import (
            explained_variance,
            generalized_advantages,
            rewards_of_tokens,
            values_before,
            whitened,
        )
        from megarl.algorithms.value_losses import last_values

        counts = (batch["token_mask"] * batch["sample_mask"].unsqueeze(1)) != 0
        values = batch.pop("values")
        before = values_before(values).where(counts, 0.0)
        bootstrapped = counts.any(dim=1) & samples["truncated"].bool() & self.config["bootstrap_truncated"]
        after_end = last_values(values, samples["input_lengths"]).where(bootstrapped, 0.0)
        # One non-finite value would make all whitened advantages NaN.
        nonfinite = int((~before.isfinite()).sum() + (~after_end.isfinite()).sum())
        if nonfinite:
            raise NonFiniteError(
                f"the critic's values of {nonfinite} of {int(counts.sum() + bootstrapped.sum())} states are "
                "not finite. Nothing was trained on these responses. Fix: lower "
                "critic.megatron_cfg.optimizer.lr, or set critic.precision=float32"
            )
        penalties, metrics = self.penalties_of(samples, batch)
        of_turns = self._rewards_of_turns(samples, counts)
        # Whatever no turn has, such as a reward model's score, is given at the end of the conversation.
        at_end = samples["reward"].double() - of_turns.sum(dim=1)
        advantages, returns = generalized_advantages(
            of_turns + rewards_of_tokens(at_end, counts, penalties),
            before,
            counts,
            discount=self.config["gae_gamma"],
            gae_lambda=self.config["gae_lambda"],
            after_end=after_end,
        )
        metrics["explained_variance"] = explained_variance(before, returns, counts)
        # float64 up to here, because a return sums thousands of tokens.
        batch["prev_values"], batch["returns"] = before, returns.float()
        if self.config["normalize_advantages"]:
            advantages = whitened(advantages, counts)
        return advantages.float(), metrics

    def _rewards_of_turns(self, samples: BatchedDataDict[Any], counts: Tensor) -> Tensor:
        """Return [B, S] float64 with each turn's reward at its last token, or zeros if rewards are given at
        the end of the conversation. Rewards of the complete conversation, such as a reward model's, are not
        included."""
        import torch

        if not self.config["rewards_by_turn"]:
            return torch.zeros(counts.shape, dtype=torch.float64)
        # The weight is for the sum with a reward model's score; without one, the reward is unweighted.
        weight = 1.0 if self.reward_model is None else self.config["env_reward_weight"]
        return weight * samples["token_rewards"].double().where(counts, 0.0)

    def train(
        self, batch: BatchedDataDict[Any], step: int, rollouts: Rollouts, epochs: int = 1
    ) -> dict[str, float]:
        """Train the critic and, after ``critic_warmup_steps``, also the actor."""
        from megarl.rollout.samples import MODEL_INPUTS
        from megarl.rollout.segment_rows import RESPONSE

        of_critic = batch.select_columns((*MODEL_INPUTS, RESPONSE))
        # Remove these columns from the batch, because the actor's workers do not need them.
        for key in ("prev_values", "returns"):
            of_critic[key] = batch.pop(key)
        epochs_of_critic = self.config["critic_ppo_epochs"]
        # The critic first, so that the actor has the devices when the next step samples.
        with self.timer.phase(TRAIN_CRITIC):
            self.turns.take(CRITIC)
            self.critic.prepare_for_training()
            kept, results, metrics = self._train_global_batches(
                self.critic, of_critic, self.value_loss, step, rollouts, epochs_of_critic, CRITIC
            )
            self.critic.finish_training()
            for result in results:
                # scored=0: a layer with one output is negligible next to the other layers.
                self.timer.passed(
                    Sequences(kept["input_lengths"].numpy(), positions=result.get("positions"), scored=0)
                )
        # The actor's metrics have the same names.
        metrics = {f"critic_{name}": value for name, value in metrics.items()}
        self.turns.take(ACTOR)
        if self.is_warming_up(step):
            return metrics
        return {**super().train(batch, step, rollouts, self.config["ppo_epochs"]), **metrics}
