"""What the pool's processes run for the most likely tokens: of logits cut over ranks, and of workers on any
backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megarl.models.engine.logprobs import VocabularyShard, vocab_parallel_scores
from megarl.models.engine.topk import largest_tokens
from megarl.models.generation.sampling import SamplingSettings
from tests.dist import jobs


def _own(logits: Tensor, size: int) -> tuple[Tensor, VocabularyShard]:
    rank, columns = dist.get_rank(), logits.shape[1] // dist.get_world_size()
    shard = VocabularyShard(size, rank * columns, dist.group.WORLD)
    return logits[:, rank * columns : (rank + 1) * columns].clone(), shard


def largest_of_shards(logits: Tensor, size: int, count: int) -> Tensor:
    """The most likely tokens when ``logits`` [T, columns] are cut over all ranks."""
    return largest_tokens(*_own(logits, size), count)


def scores_of_shards(
    logits: Tensor, targets: Tensor, further: Tensor, weights: Tensor, size: int
) -> tuple[Tensor, Tensor]:
    """Log-probabilities [T, 1 + K] of targets and further tokens, and this rank's gradient of their sum by
    ``weights``."""
    mine, shard = _own(logits, size)
    mine.requires_grad_()
    scores = vocab_parallel_scores(mine, targets, shard, SamplingSettings(temperature=0.7), further=further)
    values = torch.cat([scores.logprobs[:, None], scores.further], dim=1)
    (values * weights).sum().backward()
    return values.detach(), mine.grad


def topk(config: Mapping[str, Any], batch: Mapping[str, Any], k: int, skip_masked: bool) -> dict[str, Tensor]:
    """What ``get_topk_logits`` gives of the whole batch, in its order; and the log-probabilities of
    ``get_logprobs``."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    sharded = jobs.dealt(worker, batch, "logprob")
    share = sharded.shards[worker.backend.groups.data_rank]
    mine = dict(worker.get_topk_logits(data=share, k=k, skip_masked=skip_masked))
    mine["plain"] = worker.get_logprobs(data=share, skip_masked=skip_masked)["logprobs"]
    shares = jobs.of_replicas(worker, mine)
    worker.backend.close()
    return {name: sharded.restore([share[name] for share in shares]) for name in mine}


def refusals(config: Mapping[str, Any], batch: Mapping[str, Any], ks: list[int]) -> list[str]:
    """What a worker says when it is asked for so many tokens."""
    worker = jobs.build(config, init_optimizer=False, init_reference_model=False)
    share = jobs.dealt(worker, batch, "logprob").shards[worker.backend.groups.data_rank]
    said = [jobs.said(lambda k=k: worker.get_topk_logits(data=share, k=k)) for k in ks]  # type: ignore[misc]
    worker.backend.close()
    return said
