"""What a rank does where losses, gradients or weights are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import MegarlError
from megarl.models.policy.batch_plan import shard_batch
from tests.dist.refit_jobs import build

MARK = 2.0
"""``sample_mask`` of the row that does it."""


class PoisonedLoss(NLLLoss):
    """NLL that is not finite wherever the marked row is: in its value, or in its gradient alone."""

    def __init__(self, quantity: str) -> None:
        self.quantity = quantity

    def __call__(self, data: Any, *normalizers: Any, next_token_logprobs: torch.Tensor) -> Any:
        loss, metrics = super().__call__(data, *normalizers, next_token_logprobs=next_token_logprobs)
        if bool((data["sample_mask"] == MARK).any()):
            # sqrt has an infinite slope at 0, and nothing of it in its value
            zero = (next_token_logprobs - next_token_logprobs.detach()).square().sum()
            loss = loss * float("nan") if self.quantity == "loss" else loss + 0.0 * zero.sqrt()
        return loss, metrics


def train(config: Mapping[str, Any], batches: Sequence[Mapping[str, Any]], quantity: str) -> dict[str, Any]:
    """Trains on each batch; the error that ends it, what was skipped, and weights and schedule at the end."""
    worker = build(config)
    outcome: dict[str, Any] = {"skipped": [], "steps": [], "lr": [], "error": None}
    for batch in batches:
        groups = worker.backend.groups
        sharded = shard_batch(
            BatchedDataDict(batch), config, groups.data_size, phase="train", global_batch=config["train_global_batch_size"]
        )
        outcome["lr"].append(worker.backend.schedule_values()["lr"])
        try:
            result = worker.train(data=sharded.shards[groups.data_rank], loss_fn=PoisonedLoss(quantity))
        except MegarlError as error:
            outcome["error"] = (type(error).__name__, str(error))
            break
        outcome["skipped"].append(result["skipped"])
        outcome["steps"].append(result["all_mb_metrics"]["skipped_steps"])
    outcome["weights"] = {name: tensor.clone() for name, tensor in worker.backend.export_hf()}
    outcome["place"] = (dist.get_rank(), worker.backend.groups.data_rank)
    worker.backend.close()
    return outcome


def refusals(config: Mapping[str, Any], directory: str) -> dict[str, str]:
    """What saving, exporting and loading say where one rank alone has one weight that is not finite."""
    worker = build(config)
    worker.save_checkpoint(f"{directory}/good", f"{directory}/good-optimizer")
    texts = {}
    if dist.get_rank() == dist.get_world_size() - 1:
        *_, (_, last) = worker.backend.parameters()
        with torch.no_grad():
            last.view(-1)[-1] = float("inf")
    for name, call in (("save", worker.save_checkpoint), ("export", worker.export_hf)):
        try:
            call(f"{directory}/{name}")
        except MegarlError as error:
            texts[name] = f"{type(error).__name__}: {error}"
    worker.load_checkpoint(f"{directory}/good", f"{directory}/good-optimizer")
    worker.save_checkpoint(f"{directory}/again")
    worker.backend.close()
    return texts


def build_error(config: Mapping[str, Any]) -> str:
    """What building says of the model."""
    try:
        build(config)
    except MegarlError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"
