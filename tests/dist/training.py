"""Three steps of a backend in a layout against plain transformers, and the losses that tests train by."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megarl.algorithms.loss_functions import ClippedPGLossFn, DPOLossFn, NLLLoss
from megarl.parity.pool import WorkerPool
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained, run_reference
from tests.dist.layouts import CONFIG
from tests.models import policy_config

PG_LOSS = {
    "reference_policy_kl_penalty": 0.05,
    "ratio_clip_min": 0.2,
    "ratio_clip_max": 0.28,
    "ratio_clip_c": 3.0,
    "use_on_policy_kl_approximation": False,
    "use_importance_sampling_correction": True,
    "token_level_loss": True,
}
DPO_LOSS = {
    "reference_policy_kl_penalty": 0.3,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.2,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}
LOSSES = {"nll": NLLLoss(), "pg": ClippedPGLossFn(PG_LOSS), "dpo": DPOLossFn(DPO_LOSS)}


def check_training(
    pool: WorkerPool, backend: str, world: int, model: Path, loss: str = "nll", **changes: Any
) -> None:
    """Losses, gradient norms and weights of three steps; of the changes the reference is told of the clipping
    alone."""
    rows = 8 if backend == "megatron" else 12
    batches = [make_batch(rows=rows, length=12, seed=seed) for seed in (1, 2, 3)]
    expected = run_reference(
        model, policy_config(model, clip=changes.get("clip", 1.0) or 0.0), batches, LOSSES[loss]
    )
    check_trained(
        pool.run(world, jobs.train, CONFIG[backend](model, gbs=rows, **changes), batches, LOSSES[loss]),
        *expected,
    )


def check_fusions(pool: WorkerPool, config: dict[str, Any]) -> None:
    """The functions that torch.compile fuses on a GPU, whose backward passes Megatron-Core has by hand, give
    what the others give."""
    batches = [make_batch(rows=8, length=12, seed=seed) for seed in (1, 2)]
    (plain,), (fused,) = (
        pool.run(1, job, config, batches, NLLLoss()) for job in (jobs.train, jobs.train_with_fusions)
    )
    check_trained([fused], plain["losses"], plain["norms"], plain["weights"])
