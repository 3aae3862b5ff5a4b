"""The random batch of a case, with ragged lengths, masked tokens and samples, and log-probabilities near the
model's own; and its division into ``train()`` calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.config.policy import PolicyConfig
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.models.policy.batch_plan import ShardedBatch, shard_batch
from megarl.parity.case import Case
from megarl.parity.reference_advantages import PART_WEIGHTS, reference_signals

Batch = dict[str, Tensor]


def token_batch(case: Case) -> Batch:
    """Return ``input_ids`` [B, S] (0 in padding), ``input_lengths`` [B], ``token_mask`` [B, S] and
    ``sample_mask`` [B] for all global batches of a case."""
    # A seed per kind of random number, so that a new kind does not change the others.
    generator = torch.Generator().manual_seed(case.seed + 1)
    rows, columns = case.total_rows, case.length
    lengths = torch.randint(1, columns + 1, (rows,), generator=generator)
    inside = torch.arange(columns)[None] < lengths[:, None]
    batch = {
        "input_ids": torch.randint(0, case.vocab, (rows, columns), generator=generator) * inside,
        "input_lengths": lengths,
        "token_mask": ((torch.rand(rows, columns, generator=generator) < 0.7) & inside).float(),
        "sample_mask": _sample_mask(case, generator),
    }
    if case.segments > 1:
        response = responses_of_rows(case)
        # The first token of a row is not predicted.
        counts = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum(dim=1).long()
        batch["response_tokens"] = torch.zeros_like(counts).index_add(0, response, counts)[response]
    return batch


def responses_of_rows(case: Case) -> Tensor:
    """Return the response that each row is a segment of, [B] int64. The segments of a response are
    consecutive rows of one global batch. A global batch with several rows has at least one response with
    several segments."""
    generator = torch.Generator().manual_seed(case.seed + 6)
    found: list[int] = []
    for _ in range(case.steps):
        left, most = case.global_batch, case.segments
        while left:
            # The first response of a global batch has the largest number of segments, so every case contains
            # one.
            size = min(
                left,
                most
                if left == case.global_batch
                else int(torch.randint(1, most + 1, (1,), generator=generator)),
            )
            found += [found[-1] + 1 if found else 0] * size
            left -= size
    return torch.tensor(found)


def _sample_mask(case: Case, generator: torch.Generator) -> Tensor:
    mask = torch.ones(case.steps, case.global_batch)
    if case.masked == "some":
        mask = (torch.rand(mask.shape, generator=generator) < 0.6).float()
        # In a small global batch all rows could be masked by chance, which is a case of its own.
        mask[mask.sum(1) == 0, 0] = 1.0
    elif case.masked == "rank":
        mask[:, : case.mbs * case.micro] = (
            0.0  # With fixed micro-batches, these are the rows of the first data-parallel rank.
        )
    elif case.masked == "all":
        mask[0] = 0.0
    return mask.flatten()


def with_signals(case: Case, batch: Batch, logprobs: Tensor) -> Batch:
    """Return the batch with the columns that the case's loss reads.

    Args:
        case: the case.
        batch: result of ``token_batch``.
        logprobs: the model's log-probabilities [B, S] before training, with 0 in column 0 and padding; for a
            value or reward model, its values. Previous, generation and reference log-probabilities are
            sampled near them, so that some ratios are clipped.
    """
    if case.loss_kind in ("nll", "rm"):
        return batch
    generator = torch.Generator().manual_seed(case.seed + 2)
    inside = torch.arange(case.length)[None] < batch["input_lengths"][:, None]

    def near(values: Tensor, spread: float) -> Tensor:
        return (values + spread * torch.randn(values.shape, generator=generator)) * inside

    if case.loss_kind == "value":
        if case.advantages_kind != "given":
            return _with_rewards(case, {**batch, "values": near(logprobs, 0.3)})
        before = torch.nn.functional.pad(logprobs[:, :-1], (1, 0))
        return {**batch, "prev_values": near(before, 0.3), "returns": near(before, 1.0)}
    if case.loss_kind == "distill":
        teacher = _teacher(case, generator).topk(case.likeliest)
        return {**batch, "teacher_topk_logits": teacher.values, "teacher_topk_indices": teacher.indices}
    if case.loss_kind == "dpo":
        # In DPO's data, the log-probability of a token is one position before it.
        return {**batch, "reference_policy_logprobs": near(logprobs, 0.3).roll(-1, dims=1)}
    previous = near(logprobs, 0.3)
    advantages = 0.5 + torch.randn(logprobs.shape[0], 1, generator=generator)
    if {"gspo", "gspo-token"} & case.loss_options:
        # With equal advantages in a sequence, both losses would have the same gradient.
        of_tokens = torch.Generator().manual_seed(case.seed + 3)
        advantages = advantages + 0.5 * torch.randn(logprobs.shape, generator=of_tokens)
    if case.segments > 1:
        # All segments of a response share one advantage.
        advantages = advantages[responses_of_rows(case)]
    signals = {
        **batch,
        "advantages": advantages.expand_as(logprobs) * inside,
        "prev_logprobs": previous,
        "generation_logprobs": near(previous, 0.2),
        "reference_policy_logprobs": near(logprobs, 0.3),
    }
    if case.advantages_kind != "given":
        signals = _with_rewards(case, signals)
    if "forced" in case.loss_options and not (
        case.takes_divergence_from_rewards or case.advantages_kind == "teacher"
    ):
        # With ``forced``, the previous log-probabilities are the current ones, and are not computed.
        del signals["prev_logprobs"]
    return signals


def _teacher(case: Case, generator: torch.Generator) -> Tensor:
    """Return a teacher's log-probabilities [B, S, V]. Half of the positions are flat; at the others one token
    has a probability of 0.99 to 0.9999, as is common for large models."""
    flat = torch.randn(case.total_rows, case.length, case.vocab, generator=generator)
    others = 10 ** -(2 + 2 * torch.rand(case.total_rows, case.length, 1, generator=generator))
    is_sharp = torch.rand(others.shape, generator=generator) < 0.5
    best = torch.nn.functional.one_hot(flat.argmax(-1), case.vocab).bool()
    rest = flat.masked_fill(best, -torch.inf).log_softmax(-1) + others.log()
    # For small x, log(1 - x) would lose its digits in float32.
    sharp = torch.where(best, torch.log1p(-others), rest)
    return torch.where(is_sharp, sharp, flat.log_softmax(-1))


REWARDS = (
    "reward",
    "reward/one",
    "reward/other",
    "rewarded",
    "prompt",
    "truncated",
    "values",
    "teacher_logprobs",
)
"""Columns from which advantages are computed. [B]: reward, its parts, whether a response has a reward (also
some that are not trained on), prompt number, whether the response was truncated. [B, S]: a critic's values,
and a teacher's log-probabilities."""
ANSWERS_A_PROMPT = 3


def _with_rewards(case: Case, signals: Batch) -> Batch:
    """Return the batch with rewards, and with the advantages that the reference computes from them."""
    generator = torch.Generator().manual_seed(case.seed + 4)
    rows, columns = signals["input_ids"].shape
    # Different sizes, so that normalising each part differs from normalising their sum.
    parts = torch.randn(rows, 2, generator=generator) * torch.tensor([1.0, 30.0])
    by_chance = torch.rand(rows, generator=torch.Generator().manual_seed(case.seed + 5)) < 0.6
    further = torch.randn(rows, columns, generator=generator)
    rewarded = {
        "values": 0.5 * further,
        **signals,
        "reward": parts @ torch.tensor([PART_WEIGHTS["one"], PART_WEIGHTS["other"]]),
        "reward/one": parts[:, 0],
        "reward/other": parts[:, 1],
        "rewarded": torch.maximum(signals["sample_mask"], by_chance.float()),
        # Numbered within each call, because advantages are computed call by call.
        "prompt": torch.arange(rows) % _rows_of_a_call(case) // ANSWERS_A_PROMPT,
        "truncated": torch.rand(rows, generator=generator) < 0.5,
    }
    if case.advantages_kind == "teacher":
        rewarded["teacher_logprobs"] = signals["prev_logprobs"] + 0.4 * further
    return rewarded | joined_rows([reference_signals(case, data) for data in calls_of(case, rewarded)])


def joined_rows(parts: Sequence[Mapping[str, Tensor]]) -> Batch:
    """Return the rows of all parts, one part after another."""
    columns: Batch = {}
    for name in parts[0]:
        columns[name] = torch.cat([part[name] for part in parts])
    return columns


def logprob_shards(case: Case, config: PolicyConfig, batch: Mapping[str, Tensor]) -> ShardedBatch:
    """Return the rows whose log-probabilities are requested, sharded over the data-parallel ranks."""
    keys = ("input_ids", "input_lengths", "token_mask", "sample_mask")
    asked: BatchedDataDict[Any] = BatchedDataDict({key: batch[key][: case.logprob_rows] for key in keys})
    return shard_batch(asked, config, case.dp, phase="logprob")


def calls_of(case: Case, batch: Mapping[str, Tensor]) -> list[Batch]:
    """Return the batch of each ``train()`` call."""
    return in_parts(batch, _rows_of_a_call(case))


def in_parts(batch: Mapping[str, Tensor], rows: int) -> list[Batch]:
    """Divide a batch into parts of ``rows`` rows; the last part may have fewer."""
    return [rows_of(batch, first, rows) for first in range(0, len(batch["input_ids"]), rows)]


def rows_of(batch: Mapping[str, Tensor], first: int, rows: int) -> Batch:
    """Return consecutive rows of a batch."""
    return {key: value[first : first + rows] for key, value in batch.items()}


def _rows_of_a_call(case: Case) -> int:
    return case.total_rows if case.together else case.global_batch


def first_step(case: Case, batch: Mapping[str, Tensor]) -> Batch:
    """Return the first global batch."""
    return rows_of(batch, 0, case.global_batch)
