"""What a worker process does for a case: the calls that a driver would make, in their order, on a real worker."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.policy.batch_plan import shard_batch
from megarl.parity.batches import calls_of, first_step, logprob_shards
from megarl.parity.case import Case
from megarl.parity.losses import make_loss, rows_together
from megarl.parity.mutations import applied

WORKERS = {
    "megatron": "megarl.models.policy.megatron_policy_worker.MegatronPolicyWorker",
    "dtensor": "megarl.models.policy.dtensor_policy_worker.DTensorPolicyWorker",
    "fsdp1": "megarl.models.policy.fsdp1_policy_worker.FSDP1PolicyWorker",
}


@dataclass(frozen=True)
class Share:
    """What one rank measured.

    Attributes:
        data_rank: its data-parallel rank.
        logprobs: [rows here, S] before training.
        reference_logprobs: the same under the reference policy, after training; None without one.
        evaluation: what ``train(eval_mode=True)`` answered; None where it was not asked.
        calls: what each ``train()`` answered.
        weights: full tensors by Hugging Face name.
    """

    data_rank: int
    logprobs: torch.Tensor
    reference_logprobs: torch.Tensor | None
    evaluation: Mapping[str, Any] | None
    calls: Sequence[Mapping[str, Any]] = field(default_factory=list)
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)


def measure(case: Case, config: Mapping[str, Any], batch: Mapping[str, torch.Tensor], mutation: str | None = None) -> Share:
    """Build the case's worker on this rank and make it do everything that is compared.

    Args:
        case: the case.
        config: its policy configuration, checked and filled in.
        batch: the whole batch.
        mutation: name of a known fault to put in.
    """
    with applied(mutation, case), _worker(case, config) as worker:
        return _measure(worker, case, config, batch)


@contextlib.contextmanager
def _worker(case: Case, config: Mapping[str, Any]) -> Iterator[Any]:
    module, name = WORKERS[case.backend].rsplit(".", 1)
    worker = getattr(importlib.import_module(module), name)(config, None, init_reference_model=case.reference)
    try:
        yield worker
    finally:
        close = getattr(worker.backend, "close", None)
        if close is not None:
            close()


def _measure(worker: Any, case: Case, config: Mapping[str, Any], batch: Mapping[str, torch.Tensor]) -> Share:
    data_rank = worker.backend.groups.data_rank
    asked = logprob_shards(case, config, batch).shards[data_rank]
    loss_fn = make_loss(case)

    def train(data: Mapping[str, torch.Tensor], evaluate: bool = False) -> dict[str, Any]:
        dealt = shard_batch(
            BatchedDataDict(data), config, case.dp, phase="train", global_batch=case.global_batch, rows_together=rows_together(loss_fn)
        )
        answer: dict[str, Any] = worker.train(data=dealt.shards[data_rank], loss_fn=loss_fn, eval_mode=evaluate)
        return answer

    worker.prepare_for_lp_inference()
    logprobs = worker.get_logprobs(data=asked)["logprobs"]
    evaluation = train(first_step(case, batch), evaluate=True) if case.evaluate else None
    worker.prepare_for_training()
    calls = [train(data) for data in calls_of(case, batch)]
    worker.prepare_for_lp_inference()
    weights = {name: tensor.detach().cpu().clone() for name, tensor in worker.backend.export_hf()}
    again = worker.get_reference_policy_logprobs(data=asked)["reference_logprobs"] if case.reference else None
    return Share(data_rank, logprobs, again, evaluation, calls, weights)
