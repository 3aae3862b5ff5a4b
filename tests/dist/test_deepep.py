"""Tokens that DeepEP would send, with a stand-in for its two kernels over gloo: the same training as by
Megatron-Core's own exchange."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.distributed.nn.functional import all_reduce

from megarl.algorithms.loss_functions import NLLLoss
from megarl.parity.pool import WorkerPool
from megarl.patched import patched
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.models import make_tiny, policy_config
from tests.tiers import newest_megatron

BATCHES = [make_batch(8, 9, seed=seed) for seed in (0, 1)]


def _all_rows(rows: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, slice]:
    """Rows [T, ...] of all ranks one after another, T of each its own, and the place of this rank's;
    gradients go back to where rows come from."""
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
    dist.all_gather(counts, torch.tensor([len(rows)]), group=group)
    before = sum(int(count) for count in counts[: group.rank()])
    whole = rows.new_zeros(sum(map(int, counts)), *rows.shape[1:])
    place = slice(before, before + len(rows))
    # sums with zeros, whose gradient is summed over the ranks too
    return all_reduce(torch.cat([whole[: place.start], rows, whole[place.stop :]]), group=group), place


def dispatch(
    tokens: Tensor, experts: Tensor, weights: Tensor, count: int, group: dist.ProcessGroup, **_: Any
) -> Any:
    """Return the tokens [R, H] that an expert of this rank gets, once each, with the experts [R, K] of this
    rank among theirs (-1 for those of others) and their weights, the tokens of each expert, and what
    ``combine`` needs."""
    (tokens, place), (weights, _), (experts, _) = (
        _all_rows(tokens, group),
        _all_rows(weights, group),
        _all_rows(experts, group),
    )
    here = count // group.size()
    own = experts - here * group.rank()
    own = torch.where((own >= 0) & (own < here), own, -1)
    taken = (own >= 0).any(1).nonzero()[:, 0]
    per_expert = torch.bincount(own[own >= 0], minlength=here)
    return tokens[taken], own[taken], weights[taken], per_expert, (len(tokens), taken, place)


def combine(outputs: Tensor, group: dist.ProcessGroup, handle: Any, **_: Any) -> tuple[Tensor, None]:
    """Return for each of this rank's tokens [T, H] the sum of what came of it on all ranks."""
    total, taken, place = handle
    whole = outputs.new_zeros(total, outputs.shape[1]).index_add(0, taken, outputs)
    return all_reduce(whole, group=group)[place], None


def trained_by_deepep(config: Mapping[str, Any]) -> dict[str, Any]:
    replaced = {
        "fused_dispatch": dispatch,
        "fused_combine": combine,
        "set_deepep_num_sms": lambda count: None,
    }
    with patched(*((token_dispatcher, name, function) for name, function in replaced.items())):
        return jobs.train(config, BATCHES, NLLLoss())


@newest_megatron
@pytest.mark.parametrize(
    "layout", [{"ep": 2}, {"ep": 2, "tp": 2, "sp": True}], ids=["expert", "expert-and-tensor"]
)
@pytest.mark.parametrize("grouped", [False, True], ids=["one-after-another", "grouped"])
def test_flex_trains_as_the_exchange_does(
    pool: WorkerPool, tmp_path: Path, layout: dict[str, Any], grouped: bool
) -> None:
    config = policy_config(make_tiny(tmp_path / "model", "qwen3_moe", tied=False, seed=3), **layout)
    config["megatron_cfg"]["moe_grouped_gemm"] = grouped
    expected = pool.run(2, jobs.train, config, BATCHES, NLLLoss())[0]
    config["megatron_cfg"]["moe_token_dispatcher_type"] = "flex"
    for found in pool.run(2, trained_by_deepep, config):
        torch.testing.assert_close(
            torch.tensor(found["losses"]), torch.tensor(expected["losses"]), atol=0, rtol=1e-5
        )
        torch.testing.assert_close(
            torch.tensor(found["norms"]), torch.tensor(expected["norms"]), atol=0, rtol=1e-5
        )
        for name, weight in expected["weights"].items():
            torch.testing.assert_close(found["weights"][name], weight, atol=1e-6, rtol=1e-5)
