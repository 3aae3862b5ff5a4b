"""Jobs of the worker processes: the calls that a driver makes for a case, in the same order, on a real policy
worker."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.algorithms.distillation import Distillation
from megarl.algorithms.grpo import GRPO
from megarl.algorithms.ppo import PPO
from megarl.config.losses import ClippedPGLossConfig
from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.key import defaults_of
from megarl.models.policy.batch_plan import shard_batch
from megarl.parity.batches import (
    ANSWERS_A_PROMPT,
    REWARDS,
    calls_of,
    first_step,
    joined_rows,
    logprob_shards,
)
from megarl.parity.case import Case
from megarl.parity.faults import Fault, planted
from megarl.parity.losses import make_loss, policy_gradient_settings, rows_together
from megarl.parity.options import numbers_of
from megarl.parity.paths import taken
from megarl.parity.reference_advantages import PART_WEIGHTS

if TYPE_CHECKING:
    from megarl.models.engine.passing import WorkerTrainResult

WORKERS = {
    "megatron": "megarl.models.policy.megatron_policy_worker.MegatronPolicyWorker",
    "dtensor": "megarl.models.policy.dtensor_policy_worker.DTensorPolicyWorker",
    "fsdp1": "megarl.models.policy.fsdp1_policy_worker.FSDP1PolicyWorker",
}


@dataclass(frozen=True)
class Share:
    """Measurements of one rank.

    Attributes:
        data_rank: the data-parallel rank.
        logprobs: [rows of this rank, S] log-probabilities before training; values for a value or reward
            model.
        logprobs_after: the same after training.
        under_mask: log-probabilities computed with ``skip_masked=True``, before and after training; empty on
            plain paths.
        repeated: True if recomputing the log-probabilities after those of the reference policy gave bitwise
            equal results.
        reference_logprobs: log-probabilities of the reference policy, before and after training; empty
            without a reference policy.
        likeliest: results of ``get_topk_logits`` before and after training, with ``skip_masked`` on fast
            paths; empty if the case does not need them.
        evaluation: result of ``train(eval_mode=True)``; None if it was not called.
        calls: result of each ``train()`` call.
        weights: full tensors by Hugging Face name, exported after training.
    """

    data_rank: int
    logprobs: Tensor
    logprobs_after: Tensor
    under_mask: Sequence[Tensor]
    repeated: bool
    reference_logprobs: Sequence[Tensor]
    likeliest: Sequence[Mapping[str, Tensor]]
    evaluation: WorkerTrainResult | None
    calls: Sequence[WorkerTrainResult] = field(default_factory=list)
    weights: Mapping[str, Tensor] = field(default_factory=dict)


def measure(
    case: Case, config: PolicyConfig, batch: Mapping[str, Tensor], fault: Fault | None = None
) -> Share:
    """Build the worker of a case on this rank, run all its calls, and return the measurements.

    Args:
        case: the case.
        config: its validated policy configuration.
        batch: the complete batch, the same on all ranks.
        fault: fault to plant during the run; None for none.
    """
    with planted(fault), taken(case), _worker(case, config) as worker:
        return _measure(worker, case, config, batch)


@contextlib.contextmanager
def _worker(case: Case, config: PolicyConfig) -> Iterator[Any]:
    module, name = WORKERS[case.backend].rsplit(".", 1)
    worker = getattr(importlib.import_module(module), name)(config, None, init_reference_model=case.reference)
    try:
        yield worker
    finally:
        close = getattr(worker.backend, "close", None)
        if close is not None:
            close()


def with_signals_made(case: Case, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the batch with advantages (or returns) that the driver's code computes from the rewards,
    separately for each ``train()`` call.

    They replace those that the reference computed. A batch with given advantages is returned unchanged.
    """
    if case.advantages_kind == "given":
        return batch
    columns = joined_rows([_made(case, data) for data in calls_of(case, batch)])
    return {**{name: values for name, values in batch.items() if name not in REWARDS}, **columns}


def _made(case: Case, data: Mapping[str, Tensor]) -> dict[str, Tensor]:
    batch, algorithm = dict(data), _algorithm(case)
    if case.advantages_kind == "teacher":
        return {"advantages": algorithm.advantages(batch, data["teacher_logprobs"])[0]}
    # Responses without a loss still count in the baseline of their group.
    advantages, _ = algorithm.advantages({**data, "sample_mask": data["rewarded"]}, batch)
    if case.loss_kind == "value":
        return {"prev_values": batch["prev_values"], "returns": batch["returns"]}
    return {"advantages": advantages.expand_as(data["token_mask"])}


def _algorithm(case: Case) -> Any:
    """Return an algorithm object without models, which is enough to compute advantages."""
    kind, options = case.advantages_kind, case.advantages_options
    classes: dict[str, Any] = {"gae": PPO, "teacher": Distillation}
    # Skip __init__, which needs models. The attributes that the advantage code reads are set below.
    algorithm: Any = object.__new__(classes.get(kind, GRPO))
    low, high = numbers_of(case.advantages, "clip") if "clip" in options else (None, None)
    algorithm.config = {
        "num_generations_per_prompt": ANSWERS_A_PROMPT,
        "adv_estimator": {
            "name": "reinforce_plus_plus" if kind.startswith("reinforce") else kind,
            "minus_baseline": kind == "reinforce-baseline",
        },
        "use_leave_one_out_baseline": "plain" not in options,
        "normalize_rewards": "raw" not in options,
        "std": "sample" if "sample" in options else "population",
        "advantage_clip_low": low,
        "advantage_clip_high": high,
    }
    if kind == "gae":
        (gamma,), (trace,) = numbers_of(case.advantages, "gamma"), numbers_of(case.advantages, "lambda")
        own = {
            "gae_gamma": gamma,
            "gae_lambda": trace,
            "normalize_advantages": "white" in options,
            "rewards_by_turn": False,
        }
        algorithm.config |= {**own, "bootstrap_truncated": "bootstrap" in options}
    algorithm.reward_weights = PART_WEIGHTS
    # A value loss trains a critic. The advantage code also reads the loss settings of the actor, which always
    # has a policy-gradient loss.
    actor = case if case.loss_kind == "pg" else replace(case, loss="pg")
    algorithm.loss_config = {**defaults_of(ClippedPGLossConfig), **policy_gradient_settings(actor)}
    algorithm.estimator = None
    return algorithm


def _measure(worker: Any, case: Case, config: PolicyConfig, batch: Mapping[str, Tensor]) -> Share:
    data_rank, stage = worker.backend.groups.data_rank, worker.backend.groups.pipeline_rank
    batch = with_signals_made(case, batch)
    asked = logprob_shards(case, config, batch).shards[data_rank]
    loss_fn = make_loss(case)

    def train(data: Mapping[str, Tensor], evaluate: bool = False) -> WorkerTrainResult:
        dealt = shard_batch(
            BatchedDataDict(data),
            config,
            case.dp,
            phase="train",
            global_batch=case.global_batch,
            rows_together=rows_together(loss_fn),
        )
        mine = dealt.by_stage(case.pp)[stage][data_rank].shard()
        return worker.train(data=mine, loss_fn=loss_fn, eval_mode=evaluate)

    # These lists collect the results of both calls of score().
    references: list[Tensor] = []
    under_mask: list[Tensor] = []
    likeliest: list[Mapping[str, Tensor]] = []

    def score() -> tuple[Tensor, bool]:
        """Return log-probabilities (or values) and True if they are bitwise equal when recomputed after those
        of the reference policy."""
        worker.prepare_for_lp_inference()
        # Value and reward models have no reference policy to recompute after.
        if case.scores:
            return worker.get_values(data=asked)["values"], True
        first: Tensor = worker.get_logprobs(data=asked)["logprobs"]
        if case.is_fast:
            under_mask.append(worker.get_logprobs(data=asked, skip_masked=True)["logprobs"])
        if case.likeliest:
            likeliest.append(
                dict(worker.get_topk_logits(data=asked, k=case.likeliest, skip_masked=case.is_fast))
            )
        if not case.reference:
            return first, True
        references.append(worker.get_reference_policy_logprobs(data=asked)["reference_logprobs"])
        return first, torch.equal(worker.get_logprobs(data=asked)["logprobs"], first)

    logprobs, repeated = score()
    evaluation = train(first_step(case, batch), evaluate=True) if case.evaluate else None
    worker.prepare_for_training()
    calls = list(map(train, calls_of(case, batch)))
    worker.prepare_for_lp_inference()
    # Clone, because the export may reuse its buffers for the next tensor.
    weights = {name: tensor.detach().cpu().clone() for name, tensor in worker.backend.export_hf()}
    logprobs_after, repeated_after = score()
    repeated = repeated and repeated_after
    return Share(
        data_rank,
        logprobs,
        logprobs_after,
        under_mask,
        repeated,
        references,
        likeliest,
        evaluation,
        calls,
        weights,
    )
