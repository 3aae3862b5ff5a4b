"""Positions under a mask, and chunks of positions, on real workers of each backend: how many logits there
are, and that numbers stay."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megarl.algorithms.loss_functions import NLLLoss
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.engine import logprobs, output_layer
from megarl.models.policy.batch_plan import Phase, shard_batch
from megarl.parity.pool import WorkerPool
from megarl.patched import patched
from tests.dist import jobs
from tests.dist.batches import make_batch
from tests.dist.layouts import CONFIG
from tests.tiers import sampled

LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("megatron", {"tp": 2, "sp": True, "batching": "packed"}),
    ("megatron", {"cp": 2, "batching": "packed"}),
    ("megatron", {"pp": 2, "first": 1, "last": 2}),
    ("dtensor", {"tp": 2, "sp": True}),
    ("dtensor", {"cp": 2, "batching": "packed"}),
    ("fsdp1", {"batching": "dynamic"}),
]


class ReadsAll(NLLLoss):
    """NLL that does not say that it leaves out what is masked."""

    skips_masked = False


def logits_of_a_step(kind: str, config: Mapping[str, Any], batch: Mapping[str, Tensor]) -> dict[str, Any]:
    """Log-probabilities with and without the mask, a step with and without it, and the positions of all
    logits that were scored."""
    worker = jobs.build(config, init_reference_model=False)
    groups, counts, score = worker.backend.groups, [], logprobs.score

    def counted(logits: Tensor, *others: Any, **options: Any) -> Any:
        counts.append(len(logits))
        return score(logits, *others, **options)

    def dealt(phase: Phase) -> BatchedDataDict[Any]:
        size = {"global_batch": config["train_global_batch_size"]} if phase == "train" else {}
        return shard_batch(BatchedDataDict(batch), worker.cfg, groups.data_size, phase=phase, **size).shards[
            groups.data_rank
        ]

    def positions() -> tuple[int, int]:
        """Over the ranks that have each other's replicas and parts of sequences; and the most at a time."""
        summed = torch.tensor([sum(counts)])
        dist.all_reduce(summed)
        most = max(counts, default=0)
        counts.clear()
        return int(summed) // (groups.tensor_size), most

    with patched((logprobs, "score", counted), (output_layer, "score", counted)):
        asked = dealt("logprob")
        seen: dict[str, Any] = {"rows": asked["input_ids"], "mask": output_layer_mask(asked)}
        for name, skips in (("all", False), ("masked", True)):
            seen[name] = worker.get_logprobs(data=asked, skip_masked=skips)["logprobs"]
            seen[f"{name} positions"] = positions()
        for name, loss_fn in (("reading all", ReadsAll()), ("skipping", NLLLoss())):
            answer = worker.train(data=dealt("train"), loss_fn=loss_fn, eval_mode=True)
            seen[name] = float(answer["global_loss"][0])
            seen[f"{name} positions"] = positions()
    worker.backend.close()
    return seen


def output_layer_mask(data: Mapping[str, Tensor]) -> Tensor:
    return (data["token_mask"] != 0) & (data["sample_mask"] != 0)[:, None]


@sampled(5)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kind", "layout"), LAYOUTS, ids=str)
def test_only_what_a_mask_lets_through_is_computed(
    pool: WorkerPool, tiny_models: dict[str, Path], kind: str, layout: dict[str, Any], precision: str
) -> None:
    config = CONFIG[kind](tiny_models["qwen3"], precision=precision, **layout)
    batch = make_batch(8, 13, seed=3)
    wanted = int(output_layer_mask(batch)[:, 1:].sum())
    bound = 2e-6 if precision == "float32" else 2e-2
    for seen in pool.run(2, logits_of_a_step, kind, config, batch):
        expected = seen["all"].where(seen["mask"], torch.zeros(()))
        torch.testing.assert_close(seen["masked"], expected, atol=bound, rtol=0)
        assert not seen["masked"][~seen["mask"]].any() and seen["all"][~seen["mask"]].any()
        # log-probability batches of rows that repeat the last one, where replicas have different numbers, are
        # counted too
        assert wanted <= seen["masked positions"][0] < seen["all positions"][0]
        assert seen["skipping positions"][0] == wanted < seen["reading all positions"][0]
        assert seen["skipping"] == pytest.approx(
            seen["reading all"], rel=1e-6 if precision == "float32" else 2e-3
        )


@sampled(1)
@pytest.mark.parametrize(("kind", "layout"), [LAYOUTS[0], LAYOUTS[3], LAYOUTS[5]], ids=str)
def test_a_chunk_of_logits_is_there_at_a_time(
    pool: WorkerPool, tiny_models: dict[str, Path], kind: str, layout: dict[str, Any]
) -> None:
    batch, found = make_batch(8, 13, seed=3), []
    for size in (None, 3):
        config = {**CONFIG[kind](tiny_models["qwen3"], **layout), "logprob_chunk_size": size}
        found.append(pool.run(2, logits_of_a_step, kind, config, batch))
    for whole, chunked in zip(*found, strict=True):
        for name in ("all", "masked", "reading all", "skipping"):
            torch.testing.assert_close(chunked[name], whole[name], atol=2e-6, rtol=1e-6)
            assert (
                chunked[f"{name} positions"] == (whole[f"{name} positions"][0], 3)
                and whole[f"{name} positions"][1] > 3
            )


@sampled(1)
@pytest.mark.parametrize("sp", [False, True])
def test_chunks_of_all_positions_train_as_whole_logits_do(
    pool: WorkerPool, tiny_models: dict[str, Path], sp: bool
) -> None:
    # With several rows in a micro-batch the gradient of the hidden states, which are sequence first, is not
    # contiguous.
    found = []
    for size in (None, 5):
        config = CONFIG["megatron"](tiny_models["qwen3"], tp=2, sp=sp, mbs=2, gbs=8, multiple=2)
        config["logprob_chunk_size"] = size
        found.append(pool.run(2, jobs.train, config, [make_batch(8, 12, seed=3)], ReadsAll()))
    for whole, chunked in zip(*found, strict=True):
        assert chunked["norms"] == pytest.approx(whole["norms"], rel=1e-5)
        for name, weight in whole["weights"].items():
            torch.testing.assert_close(chunked["weights"][name], weight, atol=2e-6, rtol=1e-5)
