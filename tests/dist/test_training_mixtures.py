"""Mixtures of experts in every layout and kind of micro-batch, with every dispatcher, router option and
balancing loss, against one process of plain transformers: log-probabilities, and losses, gradient norms,
weights and balance figures of three Adam steps. The cases are a table, ``tests/data/training_mixtures.yaml``.
Of its families

* Qwen2-MoE has a gated shared expert, which is cut over the tensor-parallel ranks, the routed ones over ranks
  of their own. Under sequence parallelism a rank sees a part of the tokens only, so that the gradients of the
  gate, which is whole on every rank, have to be added up.
* GLM-4.5's routers take sigmoids, prefer groups of experts and correct their choice by a bias: a buffer that
  no gradient reaches. The two tiny models route as Megatron-Core can and as only our own router does. No
  gradient reaches what a bias adds to keys where they are not rotated: it is the same for all keys of a
  softmax. An epsilon that is large beside rounding keeps Adam from making steps of it.
* GPT-OSS has attention sinks, windows in some layers, biases everywhere, clamped experts.
* Qwen3-Next has gated delta nets in place of attention in some layers, gated attention in the others,
  zero-centred norms.
* DeepSeek-V2 and -V3 have attention through latent vectors; routers take softmaxes or sigmoids, with groups
  of experts or without.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megarl.parity.pool import WorkerPool
from tests.dist import jobs, mixtures
from tests.dist.batches import make_batch
from tests.dist.layouts import layout as ranks_of
from tests.dist.mixtures import check_training
from tests.dist.training import LOSSES
from tests.models import policy_config
from tests.tables import read_table
from tests.tiers import newest_megatron, sampled, slow

CORRECTION = "mlp.gate.e_score_correction_bias"
# layouts that together have every group and both pipeline schedules
NEWEST = ("ep4", "tp2-sp-ep2-etp2", "pp2-vpp2-ep2", "cp2-tp2-sp-ep2")
TABLE = read_table("training_mixtures.yaml")


def cases(kind: str) -> Iterator[Any]:
    """Model, layout, all changes of a configuration, and the loss."""
    for given in TABLE[kind] + TABLE["families"]:
        row = {"batchings": "fixed", "dispatchers": "alltoall", "balancing": "none"} | given
        product = itertools.product(
            *(row[key].split() for key in ("models", "layouts", "batchings", "dispatchers"))
        )
        for model, layout, batching, dispatcher in product:
            balancing = row["balancing"]
            changes: dict[str, Any] = {"batching": batching, "dispatcher": dispatcher, "balancing": balancing}
            if balancing != "none":
                changes |= {"aux": 0.7, "z": 0.3}
            if "changes" not in row:
                changes |= {"mbs": 2, "clip": 0.5, **({"eps": row["eps"]} if "eps" in row else {})}
            changes |= row.get("changes", {})
            loss = row.get("loss", "pg" if balancing == "none" else "nll")
            words = [f"{key}={value}" for key, value in row.get("changes", {}).items()]
            name = "-".join([model, layout, batching, dispatcher, balancing, loss, *words])
            yield pytest.param(model, layout, changes, loss, id=name, marks=[slow] if "slow" in row else [])


@newest_megatron(layout=NEWEST)
@sampled(5)
@pytest.mark.parametrize(("model", "layout", "changes", "loss"), cases("logprobs"))
def test_logprobs_equal_transformers(
    pool: WorkerPool,
    model_of: Callable[[str], Path],
    model: str,
    layout: str,
    changes: dict[str, Any],
    loss: str,
) -> None:
    world, placed = ranks_of(layout, padded=True)
    batch, options = (
        make_batch(rows=7, length=19, seed=3),
        {key: changes[key] for key in ("batching", "dispatcher")},
    )
    config = policy_config(model_of(model), temperature=0.7, **options, **placed)
    for result in pool.run(world, jobs.logprobs, config, batch):
        torch.testing.assert_close(result, mixtures.logprobs(model_of(model), batch, 0.7), atol=1e-5, rtol=0)
        assert result[:, 0].eq(0).all()


@newest_megatron(layout=NEWEST)
@sampled(14)
@pytest.mark.parametrize(("model", "layout", "changes", "loss"), cases("training"))
def test_three_adam_steps_equal_transformers(
    pool: WorkerPool,
    model_of: Callable[[str], Path],
    tmp_path: Path,
    model: str,
    layout: str,
    changes: dict[str, Any],
    loss: str,
) -> None:
    """Everything learns but the corrections of routers, and routers that are frozen: they stay as they were,
    to the bit."""
    world, placed = ranks_of(layout, padded=True)
    weights = check_training(
        pool, world, model_of(model), policy_config(model_of(model), **placed, **changes), LOSSES[loss]
    )[0]["weights"]
    before = mixtures.weights_of(mixtures.load(model_of(model)), tmp_path / "before")
    frozen = "mlp.gate.weight" if changes.get("freeze_router") else CORRECTION
    unchanged = {name for name in before if name.endswith((CORRECTION, frozen))}
    assert bool(unchanged) == (model.startswith(("glm", "deepseek_v3")) or "freeze_router" in changes)
    assert {name for name, tensor in before.items() if torch.equal(weights[name], tensor)} == unchanged
    assert all(weights[name].dtype == torch.float32 for name in unchanged)
