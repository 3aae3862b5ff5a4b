"""Dealing a batch to replicas and bringing results back, in every way of batching."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.distributed.worker_dispatch import WorkerCall, plan_sharded_data
from megarl.errors import BatchError, PackingError
from megarl.models.policy.batch_plan import STAGE_KEYS, sequence_multiple, shard_batch
from megarl.models.policy.lm_policy import Policy, _sharding

BUDGET = 24


def policy(batching: str, **megatron: Any) -> dict[str, Any]:
    budgets = {"train_mb_tokens": BUDGET, "logprob_mb_tokens": BUDGET, "sequence_length_round": 3}
    return {
        "megatron_cfg": {
            "enabled": True,
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": False,
            **megatron,
        },
        "make_sequence_length_divisible_by": 1,
        "sequence_packing": {"enabled": batching == "packed", **budgets},
        "dynamic_batching": {"enabled": batching == "dynamic", **budgets},
    }


def batch(lengths: list[int]) -> BatchedDataDict[Any]:
    ids = torch.arange(len(lengths))[:, None].expand(-1, max(lengths)).contiguous()
    return BatchedDataDict({"input_ids": ids, "input_lengths": torch.tensor(lengths)})


@given(
    st.sampled_from(["fixed", "dynamic", "packed"]),
    st.lists(st.integers(1, 12), min_size=1, max_size=14),
    st.integers(1, 4),
)
def test_log_probabilities_come_back_in_order_from_any_number_of_rows(
    batching: str, lengths: list[int], replicas: int
) -> None:
    data = batch(lengths)
    sharded = shard_batch(data, policy(batching), replicas, phase="logprob")
    assert len(sharded.shards) == replicas
    counts = {
        len(shard.micro_batch_indices[0]) if shard.micro_batch_indices else shard.size
        for shard in sharded.shards
    }
    assert len(counts) == 1, "all replicas run the same number of micro-batches"
    assert (
        sharded.restore([shard["input_ids"] for shard in sharded.shards]).tolist()
        == data["input_ids"].tolist()
    )


@given(
    st.sampled_from(["dynamic", "packed"]),
    st.lists(st.integers(1, 12), min_size=6, max_size=6),
    st.integers(1, 3),
)
def test_pairs_stay_together_under_the_budget(batching: str, pair_lengths: list[int], replicas: int) -> None:
    lengths = [length for pair in zip(pair_lengths, reversed(pair_lengths), strict=True) for length in pair]
    sharded = shard_batch(batch(lengths), policy(batching), replicas, phase="train", rows_together=2)
    for shard in sharded.shards:
        assert shard.micro_batch_indices is not None and shard.micro_batch_lengths is not None
        for (first, last), planned in zip(
            shard.micro_batch_indices[0], shard.micro_batch_lengths[0], strict=True
        ):
            rows = shard["input_ids"][first:last, 0].tolist()
            assert [row // 2 for row in rows[::2]] == [row // 2 for row in rows[1::2]], (
                "a pair was torn apart"
            )
            assert all(second == first_ + 1 for first_, second in zip(rows[::2], rows[1::2], strict=True))
            assert (planned if batching == "packed" else planned * (last - first)) <= BUDGET


def test_sequences_are_padded_to_what_the_ranks_share() -> None:
    chosen = policy("packed", tensor_model_parallel_size=2, context_parallel_size=2, sequence_parallel=True)
    assert sequence_multiple(chosen) == 8
    (shard,) = shard_batch(batch([3, 9]), chosen, 1, phase="train").shards
    assert shard.micro_batch_lengths == [[24]]


def test_dynamic_rows_never_outgrow_the_budget_through_padding() -> None:
    """Width 11 is no multiple of the 4 that context parallelism wants: counted as 12, two rows of it are 24
    tokens."""
    chosen = policy("dynamic", context_parallel_size=2)
    (shard,) = shard_batch(batch([11, 11, 11]), chosen, 1, phase="train").shards
    assert shard.micro_batch_lengths == [[12, 12]]
    assert shard.micro_batch_indices == [[[0, 2], [2, 3]]]


@pytest.mark.parametrize("batching", ["dynamic", "packed"])
def test_a_sequence_beyond_the_budget_is_refused(batching: str) -> None:
    with pytest.raises((BatchError, PackingError), match="25"):
        shard_batch(batch([25, 2]), policy(batching), 1, phase="train")


@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
def test_fewer_rows_than_replicas_cannot_be_trained_on(batching: str) -> None:
    with pytest.raises((BatchError, PackingError)):
        shard_batch(batch([3, 4]), policy(batching), 3, phase="train", global_batch=2)


@pytest.mark.parametrize("batching", ["fixed", "dynamic", "packed"])
def test_what_the_loss_alone_reads_goes_to_the_last_stage(batching: str) -> None:
    """The same rows in the same micro-batches everywhere; bytes counted as they travel."""
    data = batch([9, 3, 12, 5, 8, 2, 7, 12])
    rows, width = data["input_ids"].shape
    data.update(
        token_mask=torch.ones(rows, width), sample_mask=torch.ones(rows), response_tokens=torch.ones(rows)
    )
    for key in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs"):
        data[key] = torch.randn(rows, width, generator=torch.Generator().manual_seed(len(key)))
    sharded = shard_batch(data, policy(batching), 2, phase="train", global_batch=rows)
    first, middle, last = sharded.by_stage(3)
    assert last is sharded.dealt and all(one is other for one, other in zip(first, middle, strict=True)), (
        "stored once"
    )
    for less, whole in zip(first, last, strict=True):
        slim, full = (pickle.loads(pickle.dumps(deal)) for deal in (less, whole))
        assert set(slim) == {
            "input_ids",
            "input_lengths",
            "token_mask",
            "sample_mask",
            "response_tokens",
        } and set(full) == set(data)
        assert all(torch.equal(slim[key], full[key]) for key in STAGE_KEYS)
        assert (slim.micro_batch_indices, slim.micro_batch_lengths) == (
            full.micro_batch_indices,
            full.micro_batch_lengths,
        )
        assert len(pickle.dumps(less)) < 0.5 * len(pickle.dumps(whole))
    likelihood = shard_batch(
        BatchedDataDict({key: data[key] for key in STAGE_KEYS}),
        policy(batching),
        2,
        phase="train",
        global_batch=rows,
    )
    assert likelihood.by_stage(2)[0][0] is likelihood.dealt[0], "what no stage can do without is stored once"


def test_each_worker_gets_what_its_stage_reads_of_its_replicas_rows() -> None:
    """Two stages of two replicas of two tensor-parallel ranks; one answer a replica, from the first stage."""
    driver = object.__new__(Policy)
    chosen = policy("fixed", tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    driver.sharding_annotations = _sharding(chosen, 8)  # type: ignore[arg-type]
    calls: list[WorkerCall] = []

    def run(method: str, *, data: Any, common_kwargs: dict[str, Any], **axes: Any) -> None:
        axes["dummy_calls_on_free_axes"] = False
        calls.extend(
            plan_sharded_data(
                driver.sharding_annotations, common_kwargs=common_kwargs, nested={"data": data}, **axes
            )
        )

    driver.worker_group = SimpleNamespace(run_all_workers_sharded_data=run, shutdown=lambda: True)  # type: ignore[assignment]
    data = batch([3, 5, 2, 4])
    data.update(sample_mask=torch.ones(4), advantages=torch.randn(4, 5))
    sharded = shard_batch(data, chosen, 2, phase="train", global_batch=4)
    driver._start_sharded("train", sharded.by_stage(2), {})
    assert [call.worker for call in calls if call.returns] == [0, 2]
    for call in calls:
        stage, replica = divmod(call.worker // 2, 2)
        got = call.kwargs["data"].shard()
        assert ("advantages" in got) == (stage == 1) and got["input_lengths"].tolist() == [[3, 5], [2, 4]][
            replica
        ]
    assert (
        calls[0].kwargs["data"] is calls[1].kwargs["data"]
        and calls[6].kwargs["data"] is calls[7].kwargs["data"]
    )
