"""Group-relative policy optimisation: answer, reward, compare within the group, train (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import group_advantages
from megarl.algorithms.mismatch import check_mismatch, mismatch_metrics
from megarl.algorithms.rollouts import generate_samples, sampling_seeds
from megarl.algorithms.skipped_batches import SkippedBatches
from megarl.algorithms.train_results import step_metrics
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.environments.rewards import RewardFunction, Rewards, compute_rewards

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megarl.algorithms.loss_functions import ClippedPGLossFn
    from megarl.algorithms.refit import Refit
    from megarl.config.sections import GRPOConfig
    from megarl.data.datasets import Dataset, Example
    from megarl.data.sampler import ResumableSampler
    from megarl.models.generation.interfaces import GenerationInterface
    from megarl.models.policy.lm_policy import Policy
    from megarl.observe.timing import PhaseTimer

_MODEL_INPUTS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


@dataclass
class GRPO:
    """One step answers some prompts several times each and trains on all the answers.

    Attributes:
        policy: what is trained, and generates unless there are engines.
        tokenizer: decodes answers.
        config: the ``grpo`` section.
        loss_fn: the clipped policy gradient.
        reward: compares an answer with the reference answer.
        train_data: prompts and reference answers.
        validation_data: the same, never trained on; None for no validation.
        sampler: the order of the training data.
        timer: told the phases of a step.
        seed: the run's seed, from which every answer's random numbers come.
        stop_token_ids: tokens that end an answer; None for the end-of-sequence token.
        refit: the engines that generate and how they get the policy's weights; None where the policy itself generates.
        skipped: keeps batches that could not be trained on.
    """

    policy: Policy
    tokenizer: PreTrainedTokenizerBase
    config: GRPOConfig
    loss_fn: ClippedPGLossFn
    reward: RewardFunction
    train_data: Dataset
    validation_data: Dataset | None
    sampler: ResumableSampler
    timer: PhaseTimer
    seed: int
    stop_token_ids: Sequence[int] | None = None
    refit: Refit | None = None
    skipped: SkippedBatches = field(default_factory=SkippedBatches)

    def step(self, step: int) -> dict[str, float]:
        """Answer the next prompts and train on the answers."""
        examples = self.train_data.select(self.sampler.take(self.config["num_prompts_per_step"]))
        generations = self.config["num_generations_per_prompt"]
        samples = self._answer(examples, generations, sampling_seeds(self.seed, step, len(examples), generations))
        of_samples = [example for example in examples for _ in range(generations)]
        with self.timer.phase("reward"):
            rewards = self._rewards(samples, of_samples)
            advantages = self._advantages(samples, rewards.values)
        batch = self._training_batch(samples, advantages)
        mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        mismatch = mismatch_metrics(batch["generation_logprobs"], batch["prev_logprobs"], mask)
        check_mismatch(mismatch, self.config.get("max_token_mult_prob_error"), step)
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, [example.index for example in of_samples])
            self.policy.finish_training()
        if self.refit is not None:
            self.refit.stale = True
        answers = {**_sample_metrics(samples, rewards.values, advantages), "rewards_timed_out": rewards.timed_out}
        return {**step_metrics(result, self.loss_fn), **answers, **mismatch, "epoch": self.sampler.epoch}

    def validate(self) -> dict[str, float]:
        """Greedy answers to the first ``max_val_samples`` prompts: ``accuracy`` (mean reward), ``samples``, lengths, what timed out."""
        if self.validation_data is None:
            return {}
        examples = self.validation_data.examples[: self.config.get("max_val_samples")]
        size = self.config["val_batch_size"]
        rewards, lengths, truncated = [], [], []
        for start in range(0, len(examples), size):
            chosen = list(examples[start : start + size])
            # Whole batches only: a batch that the data-parallel ranks cannot share equally would be refused.
            samples = self._answer(chosen + [chosen[0]] * (size - len(chosen)), 1, None, greedy=True)
            rewards.append(compute_rewards(self.reward, samples["response_text"][: len(chosen)], [example.answer for example in chosen]))
            lengths.append(samples["generation_lengths"][: len(chosen)])
            truncated.append(samples["truncated"][: len(chosen)])
        if self.refit is not None:
            # the engines may have had its devices; whoever saves or exports next finds it there again
            self.policy.prepare_for_lp_inference()
        return {
            "accuracy": float(torch.cat([reward.values for reward in rewards]).mean()),
            "rewards_timed_out": sum(reward.timed_out for reward in rewards),
            "samples": len(examples),
            "generation_length": float(torch.cat(lengths).double().mean()),
            "truncated": float(torch.cat(truncated).double().mean()),
        }

    def _answer(
        self, examples: Sequence[Example], generations: int, seeds: Sequence[int] | None, greedy: bool = False
    ) -> BatchedDataDict[Any]:
        """The answers, see ``generate_samples``."""
        prompts = [example.prompt_ids for example in examples]
        engine: GenerationInterface = self.policy
        if self.refit is not None:
            engine = self.refit.generation
            with self.timer.phase("refit"):
                self.refit.bring_up_to_date()
        with self.timer.phase("generation"):
            if self.refit is None:
                engine.prepare_for_generation()
            samples = generate_samples(engine, prompts, self.tokenizer, generations, seeds, greedy, self.stop_token_ids)
            engine.finish_generation()
        return samples

    def _rewards(self, samples: BatchedDataDict[Any], examples: Sequence[Example]) -> Rewards:
        """In the order of the samples, each of which has its example."""
        return compute_rewards(self.reward, samples["response_text"], [example.answer for example in examples])

    def _advantages(self, samples: BatchedDataDict[Any], rewards: Tensor) -> Tensor:
        """[B] float32."""
        return group_advantages(
            samples["prompt_ids"],
            rewards,
            samples["sample_mask"],
            leave_one_out_baseline=self.config.get("use_leave_one_out_baseline", True),
            normalize_rewards=self.config.get("normalize_rewards", True),
            std=self.config.get("std", "population"),
        )

    def _training_batch(self, samples: BatchedDataDict[Any], advantages: Tensor) -> BatchedDataDict[Any]:
        """A ``ClippedPGLossDataDict`` with the log-probabilities of the policy before the update, and of the reference where needed."""
        inputs: BatchedDataDict[Any] = BatchedDataDict({key: samples[key] for key in _MODEL_INPUTS})
        batch: BatchedDataDict[Any] = BatchedDataDict(
            {
                **inputs,
                "advantages": advantages.unsqueeze(1).expand_as(samples["token_mask"]).contiguous(),
                "generation_logprobs": samples["generation_logprobs"],
            }
        )
        self.policy.prepare_for_lp_inference()
        with self.timer.phase("logprobs"):
            batch["prev_logprobs"] = self.policy.get_logprobs(inputs)["logprobs"]
        if self.loss_fn.kl_penalty:
            with self.timer.phase("reference_logprobs"):
                batch["reference_policy_logprobs"] = self.policy.get_reference_policy_logprobs(inputs)["reference_logprobs"]
        return batch


def _sample_metrics(samples: BatchedDataDict[Any], rewards: Tensor, advantages: Tensor) -> dict[str, float]:
    """What the answers of a step were like."""
    return {
        "reward": float(rewards.mean()),
        "reward_std": float(rewards.std(correction=0)),
        "advantages_min": float(advantages.min()),
        "advantages_max": float(advantages.max()),
        "samples_without_signal": float((advantages == 0).double().mean()),
        "generation_length": float(samples["generation_lengths"].double().mean()),
        "truncated": float(samples["truncated"].double().mean()),
        "num_tokens": int(samples["input_lengths"].sum()),
    }
