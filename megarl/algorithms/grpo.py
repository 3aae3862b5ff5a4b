"""Group-relative policy optimisation: answer, reward, compare within the group, train (GRPO, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import group_advantages
from megarl.algorithms.skipped_batches import SkippedBatches
from megarl.algorithms.train_results import step_metrics
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.rollout.samples import check_mismatch, mismatch_metrics, sampling_seeds

if TYPE_CHECKING:
    from megarl.algorithms.loss_functions import ClippedPGLossFn
    from megarl.algorithms.refit import Refit
    from megarl.config.sections import GRPOConfig
    from megarl.data.datasets import Dataset
    from megarl.data.sampler import ResumableSampler
    from megarl.models.policy.lm_policy import Policy
    from megarl.observe.timing import PhaseTimer
    from megarl.rollout.collector import Collector

_MODEL_INPUTS = ("input_ids", "input_lengths", "token_mask", "sample_mask")


@dataclass
class GRPO:
    """One step answers some prompts several times each and trains on all the answers.

    Attributes:
        policy: what is trained, and generates unless there are engines.
        config: the ``grpo`` section.
        loss_fn: the clipped policy gradient.
        collector: collects samples.
        train_data: prompts and reference answers.
        validation_data: the same, never trained on; None for no validation.
        sampler: the order of the training data.
        timer: told the phases of a step.
        seed: the run's seed, from which every response's random numbers come.
        refit: the engines that generate, which have other weights than the policy once it is trained; None where the policy generates.
        skipped: keeps batches that could not be trained on.
    """

    policy: Policy
    config: GRPOConfig
    loss_fn: ClippedPGLossFn
    collector: Collector
    train_data: Dataset
    validation_data: Dataset | None
    sampler: ResumableSampler
    timer: PhaseTimer
    seed: int
    refit: Refit | None = None
    skipped: SkippedBatches = field(default_factory=SkippedBatches)

    def step(self, step: int) -> dict[str, float]:
        """Answer the next prompts and train on the answers."""
        examples = self.train_data.select(self.sampler.take(self.config["num_prompts_per_step"]))
        generations = self.config["num_generations_per_prompt"]
        seeds = sampling_seeds(self.seed, step, len(examples), generations)
        rollouts = self.collector.collect(examples, generations, seeds, weight_version=step - 1)
        samples = rollouts.samples
        with self.timer.phase("reward"):
            advantages = self._advantages(samples)
        batch = self._training_batch(samples, advantages)
        mask = batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        mismatch = mismatch_metrics(batch["generation_logprobs"], batch["prev_logprobs"], mask)
        check_mismatch(mismatch, self.config.get("max_token_mult_prob_error"), step)
        with self.timer.phase("train"):
            self.policy.prepare_for_training()
            result = self.skipped.train(self.policy, batch, self.loss_fn, step, [record.index for record in rollouts.records])
            self.policy.finish_training()
        if self.refit is not None:
            self.refit.stale = True
        of_samples = {**_sample_metrics(samples, advantages), **rollouts.metrics}
        return {**step_metrics(result, self.loss_fn), **of_samples, **mismatch, "epoch": self.sampler.epoch}

    def validate(self) -> dict[str, float]:
        """Greedy answers to the first ``max_val_samples`` prompts: ``accuracy`` (mean reward), ``samples``, lengths, what timed out."""
        if self.validation_data is None:
            return {}
        examples = self.validation_data.examples[: self.config.get("max_val_samples")]
        size = self.config["val_batch_size"]
        collected = [
            # Whole batches only: a batch that the data-parallel ranks cannot share equally would be refused.
            self.collector.collect(examples[start : start + size], greedy=True, pad_to=size)
            for start in range(0, len(examples), size)
        ]
        if self.refit is not None:
            # the engines may have had its devices; whoever saves or exports next finds it there again
            self.policy.prepare_for_lp_inference()
        names = ("reward", "masked", "generation_lengths", "truncated")
        column = {name: torch.cat([rollouts.samples[name] for rollouts in collected]) for name in names}
        return {
            "accuracy": float(column["reward"][~column["masked"]].mean()),
            **{name: sum(each.metrics[name] for each in collected) for name in collected[0].metrics},
            "samples": len(examples),
            "generation_length": float(column["generation_lengths"].double().mean()),
            "truncated": float(column["truncated"].double().mean()),
        }

    def _advantages(self, samples: BatchedDataDict[Any]) -> Tensor:
        """[B] float32."""
        return group_advantages(
            samples["prompt_ids"],
            samples["reward"],
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


def _sample_metrics(samples: BatchedDataDict[Any], advantages: Tensor) -> dict[str, float]:
    """Figures of a step's samples; rewards without those that are masked."""
    rewards = samples["reward"][~samples["masked"]]
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
