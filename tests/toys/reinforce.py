"""A toy algorithm: REINFORCE with the mean reward of the batch as its baseline, and a loss of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NotRequired

from typing_extensions import TypedDict

from megarl.algorithms.algorithm import ACTOR, Algorithm, Parts
from megarl.config.environments import EnvConfig
from megarl.key import ABOVE_0, AT_LEAST_1, Key


class ReinforceConfig(TypedDict):
    """REINFORCE."""

    prompts: Annotated[int, Key("prompts a step, with one response each.", AT_LEAST_1)]
    max_num_steps: Annotated[int, Key("steps of the run.", AT_LEAST_1)]
    scale: NotRequired[Annotated[float, Key("of the rewards.", ABOVE_0, default=1.0)]]


class WeightedLikelihood:
    """Loss: minus the log-probabilities of the responses, weighted by advantages, over the tokens of the
    global batch."""

    metric_reductions: Mapping[str, Any] = {}

    def __init__(self) -> None:
        from megarl.algorithms.interfaces import LossInputType, LossType

        self.loss_type, self.input_type = LossType.TOKEN_LEVEL, LossInputType.LOGPROB

    def __call__(
        self, data: Any, global_valid_seqs: Any, global_valid_toks: Any, next_token_logprobs: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Loss and metrics of one micro-batch, see ``LossFunction``."""
        mask = data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(1)
        loss = -(next_token_logprobs * data["advantages"][:, 1:] * mask).sum() / global_valid_toks.clamp(
            min=1
        )
        return loss, {"loss": loss.detach()}


class Reinforce(Algorithm):
    """One step samples a response to each of some prompts and trains on them."""

    SECTIONS: ClassVar[Mapping[str, Any]] = {"reinforce": ReinforceConfig, "env": EnvConfig}
    PROMPTS = "reinforce.prompts"

    def __init__(self, parts: Parts) -> None:
        from megarl.rollout.collector import Collector

        super().__init__(parts)
        assert parts.environment is not None
        self.parts, self.config, self.policy = parts, parts.config["reinforce"], parts.models[ACTOR]
        stop_token_ids = parts.config["policy"]["generation"]["stop_token_ids"]
        self.collector = Collector(
            self.policy, parts.tokenizer, parts.environment, parts.timer, stop_token_ids, parts.refit
        )
        self.loss_fn = WeightedLikelihood()

    def step(self, step: int) -> dict[str, float]:
        """Sample, weigh, train."""
        from megarl.algorithms.train_results import step_metrics
        from megarl.distributed.batched_data_dict import BatchedDataDict
        from megarl.rollout.collector import add_metrics
        from megarl.rollout.samples import MODEL_INPUTS, mismatch_metrics, sampling_seeds

        records = self.parts.train_data.select(self.sampler.take(self.config["prompts"]))
        seeds = sampling_seeds(self.parts.config["seed"], step, len(records), 1)
        rollouts = self.collector.collect(records, seeds=seeds, weight_version=step - 1)
        samples = rollouts.samples
        batch: BatchedDataDict[Any] = BatchedDataDict({key: samples[key] for key in MODEL_INPUTS})
        self.policy.prepare_for_lp_inference()
        logprobs = self.policy.get_logprobs(batch)["logprobs"]
        mismatch = mismatch_metrics(
            samples["generation_logprobs"], logprobs, batch["token_mask"] * batch["sample_mask"].unsqueeze(1)
        )
        known = samples["reward"][~samples["masked"]]
        baseline = float(known.mean()) if len(known) else 0.0
        advantages = self.config["scale"] * (samples["reward"] - baseline)
        batch["advantages"] = advantages.unsqueeze(1).expand_as(batch["token_mask"]).contiguous()
        self.policy.prepare_for_training()
        result = self.parts.skipped.train(
            self.policy, batch, self.loss_fn, step, [record.index for record in rollouts.records]
        )
        self.policy.finish_training()
        if self.parts.refit is not None:
            self.parts.refit.stale = True
        figures = {"reward": baseline, "num_tokens": int(batch["input_lengths"].sum())}
        return add_metrics({**step_metrics(result, self.loss_fn), **mismatch, **figures}, [rollouts.metrics])
