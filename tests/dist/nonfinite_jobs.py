"""What a rank does where losses, gradients or weights are not finite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from megarl.algorithms.loss_functions import NLLLoss
from megarl.errors import MegarlError
from tests.dist import jobs

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
    worker = jobs.build(config, init_reference_model=False)
    outcome: dict[str, Any] = {"skipped": [], "steps": [], "lr": [], "error": None}
    for batch in batches:
        outcome["lr"].append(worker.backend.schedule_values()["lr"])
        try:
            result = worker.train(data=jobs.my_share(worker, batch), loss_fn=PoisonedLoss(quantity))
        except MegarlError as error:
            outcome["error"] = (type(error).__name__, str(error))
            break
        outcome["skipped"].append(result["skipped"])
        outcome["steps"].append(result["all_mb_metrics"]["skipped_steps"])
    outcome["weights"] = jobs.full_weights(worker)
    outcome["place"] = (dist.get_rank(), worker.backend.groups.data_rank)
    worker.backend.close()
    return outcome


def refusals(config: Mapping[str, Any], directory: str) -> dict[str, str]:
    """What saving, exporting and loading say where one rank alone has one weight that is not finite."""
    worker = jobs.build(config, init_reference_model=False)
    worker.save_checkpoint(f"{directory}/good", f"{directory}/good-optimizer")
    texts = {}
    if dist.get_rank() == dist.get_world_size() - 1:
        *_, (_, last) = worker.backend.parameters()
        with torch.no_grad():
            last.view(-1)[-1] = float("inf")
    texts["save"] = jobs.said(lambda: worker.save_checkpoint(f"{directory}/save"))
    texts["export"] = jobs.said(lambda: worker.export_hf(f"{directory}/export"))
    worker.load_checkpoint(f"{directory}/good", f"{directory}/good-optimizer")
    worker.save_checkpoint(f"{directory}/again")
    worker.backend.close()
    return texts
