"""Three steps with each of TRL's losses of GRPO: plain transformers under TRL's own code, and Megatron on two
replicas, packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megarl.algorithms.loss_functions import ClippedPGLossFn
from megarl.parity.pool import WorkerPool
from tests.dist import jobs, reference
from tests.dist.batches import make_batch
from tests.dist.checks import check_trained
from tests.models import policy_config
from tests.tiers import slow
from tests.unit.test_losses_of_trl import CASES, DEFAULTS, loss_of_trl

pytest.importorskip("trl")


class Loss:
    """A loss of TRL as the reference calls one."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings

    def __call__(
        self, data: Any, sequences: Any, tokens: Any, next_token_logprobs: Tensor
    ) -> tuple[Tensor, dict[str, Any]]:
        return loss_of_trl(self._settings, data, next_token_logprobs), {}


def answers(model: Path, seed: int) -> dict[str, Tensor]:
    """Rows that all count, each with all tokens behind its first ones: TRL has a column for every token of an
    answer."""
    batch = make_batch(rows=8, length=12, seed=seed)
    place = torch.arange(12)[None]
    inside = (place < batch["input_lengths"][:, None]) & (place > 0)
    # near the model's own, so that ratios are on both sides of their bounds and no divergence is clamped,
    # which TRL does not do
    own = reference.logprobs_of(model, batch, 1.0)
    near = {
        name: own + batch[name] / 3 + 0.5
        for name in ("prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    }
    return {**batch, **near, "token_mask": inside.float(), "sample_mask": torch.ones(8)}


@slow
@pytest.mark.parametrize("name", CASES)
def test_three_steps_of_trl(pool: WorkerPool, tiny_models: dict[str, Path], name: str) -> None:
    theirs, settings, _ = CASES[name]
    config = policy_config(tiny_models["llama"], mbs=2, clip=0.5, batching="packed")
    batches = [answers(tiny_models["llama"], seed) for seed in (1, 2, 3)]
    trainer = reference.ReferenceTrainer(reference.load(tiny_models["llama"]).double(), config)
    exact = [
        {
            column: values.double() if values.is_floating_point() else values
            for column, values in batch.items()
        }
        for batch in batches
    ]
    losses, norms = zip(*(trainer.step(batch, Loss(theirs)) for batch in exact), strict=True)
    assert len(set(losses)) == 3 and min(norms) > 1e-4
    results = pool.run(2, jobs.train, config, batches, ClippedPGLossFn({**DEFAULTS, **settings}))  # type: ignore[typeddict-item]
    check_trained(results, list(losses), list(norms), trainer.model.state_dict())
