"""Batches on their way to another process: what arrives is equal to the bit, may be written to, and left out
what can be made anew."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megarl.distributed.batched_data_dict import BatchedDataDict, SlicedDataDict
from megarl.distributed.parcels import Packer
from megarl.models.policy.batch_plan import shard_batch

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def sent(value: Any) -> tuple[Any, int]:
    """What arrives of it, with arrays in memory that cannot be written to, as in Ray's store; and the bytes
    of these arrays."""
    buffers: list[pickle.PickleBuffer] = []
    message = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    stored = [bytes(buffer.raw()) for buffer in buffers]
    before = list(map(hash, stored))
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns of tensors over memory that cannot be written to
        arrived = pickle.loads(message, buffers=stored)
    for column in arrived.values():
        if isinstance(column, Tensor) and column.is_floating_point() and not column.requires_grad:
            column.copy_(column.new_zeros(column.shape))
    assert list(map(hash, stored)) == before, "the store was written to"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return pickle.loads(message, buffers=stored), sum(map(len, stored))


def require_equal(arrived: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert list(arrived) == list(expected)
    for name, value in expected.items():
        if not isinstance(value, Tensor):
            assert arrived[name] == value
            continue
        assert (arrived[name].dtype, arrived[name].shape) == (value.dtype, value.shape)
        assert bits(arrived[name]) == bits(value), name


def bits(tensor: Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def full(dtype: torch.dtype, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random bits: numbers of all kinds, not-a-numbers and negative zeros among them."""
    raw = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return (raw[..., 0] > 127) if dtype == torch.bool else raw.view(dtype).reshape(shape)


def padded(column: Tensor, lengths: Tensor, value: Tensor) -> Tensor:
    outside = torch.arange(column.shape[1])[None] >= lengths[:, None]
    return torch.where(outside.reshape(*outside.shape, *[1] * (column.ndim - 2)), value, column)


def zero(dtype: torch.dtype) -> Tensor:
    return torch.zeros(1).to(dtype)


def zeros_and_ones(column: Tensor) -> Tensor:
    return (column == column.reshape(-1)[0]).to(column.dtype)


KINDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "all": lambda column, lengths: column,
    "padded with 0": lambda column, lengths: padded(column, lengths, zero(column.dtype)),
    "padded with another": lambda column, lengths: padded(
        column, lengths, column.reshape(-1)[-1:].reshape(*[1] * column.ndim)
    ),
    "zeros and ones": lambda column, lengths: padded(zeros_and_ones(column), lengths, zero(column.dtype)),
    "zeros and negative zeros": lambda column, lengths: padded(
        (column != column).float(), lengths, torch.tensor([-0.0])
    ).to(column.dtype),
    "one of a row": lambda column, lengths: column[:, :1].expand(column.shape).contiguous(),
    "one of a row, expanded": lambda column, lengths: column[:, :1].expand(column.shape),
    "one of a row, padded": lambda column, lengths: padded(
        column[:, :1].expand(column.shape), lengths, zero(column.dtype)
    ),
    "columns of a wider one": lambda column, lengths: torch.cat([column, column], dim=1)[
        :, : column.shape[1]
    ],
    "every other row": lambda column, lengths: torch.cat([column, column])[::2],
}


@st.composite
def batches(draw: st.DrawFn) -> BatchedDataDict[Any]:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 20))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 999)))
    lengths = torch.tensor(draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows)))
    columns: dict[str, Any] = {}
    for number in range(draw(st.integers(0, 4))):
        dtype = draw(st.sampled_from(DTYPES))
        column = full(dtype, (rows, width, *draw(st.sampled_from([(), (), (3,), (0,)]))), generator)
        columns[f"column {number}"] = (
            KINDS[draw(st.sampled_from(sorted(KINDS)))](column, lengths) if column.numel() else column
        )
    if draw(st.booleans()):
        columns[draw(st.sampled_from(["input_lengths", "unpadded_sequence_lengths"]))] = lengths
    columns["flat"] = full(draw(st.sampled_from(DTYPES)), (rows,), generator)
    columns["texts"] = [f"row {row}" for row in range(rows)]
    return BatchedDataDict(columns)


@given(batches())
def test_all_that_is_sent_arrives(batch: BatchedDataDict[Any]) -> None:
    arrived, _ = sent(batch)
    assert type(arrived) is BatchedDataDict
    require_equal(arrived, batch)


@given(batches(), st.data())
def test_dealt_rows_arrive_as_their_shard(batch: BatchedDataDict[Any], data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 4))
    for deal in batch.deal(shards, allow_uneven_shards=True):
        arrived, _ = sent(deal)
        assert type(arrived) is SlicedDataDict
        require_equal(arrived, deal.shard())
    rows = data.draw(st.lists(st.integers(0, batch.size - 1), max_size=7))
    require_equal(Packer(batch).pack(rows).unpack(), batch.select_indices(rows))


def test_the_plan_of_micro_batches_arrives_too() -> None:
    batch = BatchedDataDict(
        {"input_ids": torch.arange(12).reshape(4, 3), "input_lengths": torch.tensor([1, 3, 2, 3])}
    )
    packing = {"enabled": True, "train_mb_tokens": 6, "logprob_mb_tokens": 6}
    policy = {"fsdp1_cfg": {"enabled": True}, "sequence_packing": packing}
    dealt = shard_batch(batch, policy, 2, phase="train")
    for deal, shard in zip(dealt.dealt, dealt.shards, strict=True):
        arrived, _ = sent(deal)
        assert arrived.elem_counts_per_gb is not None and vars(arrived).keys() == vars(shard).keys()
        assert {key: value for key, value in vars(arrived).items() if key != "data"} == {
            key: value for key, value in vars(shard).items() if key != "data"
        }
        require_equal(arrived, shard)


@pytest.mark.parametrize("lengths", [[2, 0, 4], [9, 2, 3], [-1, 2, 3], [2.0, 2.0, 2.0], [[1], [2], [3]]])
def test_lengths_that_do_not_fit_cut_nothing(lengths: list[Any]) -> None:
    batch = BatchedDataDict(
        {"input_ids": torch.arange(15).reshape(3, 5), "input_lengths": torch.tensor(lengths)}
    )
    require_equal(sent(batch)[0], batch)


def test_what_is_no_plain_tensor_travels_as_it_is() -> None:
    odd = {
        "gradient": torch.ones(2, 3, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "sparse": torch.eye(2).to_sparse(),
        "complex": torch.ones(2, 3, dtype=torch.complex128),
        "negated": torch.imag(torch.ones(2, 3, dtype=torch.complex64).conj()),
        "scalars": [1, None],
    }
    arrived, _ = sent(BatchedDataDict(odd))
    assert (
        arrived["gradient"].requires_grad
        and type(arrived["parameter"]) is torch.nn.Parameter
        and arrived["sparse"].is_sparse
    )
    for name in ("complex", "negated", "gradient"):
        assert torch.equal(arrived[name], odd[name])
    [deal] = BatchedDataDict({"complex": odd["complex"], "scalars": odd["scalars"]}).deal(1)
    assert torch.equal(sent(deal)[0]["complex"], odd["complex"]) and sent(deal)[0]["scalars"] == [1, None]


def test_padding_masks_and_repeated_values_stay_behind() -> None:
    """A training batch of 64 rows, 39 % of 512 positions real: at most the bytes of its valid positions, far
    below in fact."""
    rows, width = 64, 512
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(16, 384, (rows,), generator=generator)
    inside = torch.arange(width)[None] < lengths[:, None]
    batch = BatchedDataDict(
        {
            "input_ids": torch.randint(1, 99, (rows, width), generator=generator).where(inside, 0),
            "input_lengths": lengths,
            "token_mask": (inside & (torch.arange(width) > 9)[None]).float(),
            "advantages": torch.randn(rows, 1, generator=generator).expand(rows, width).contiguous(),
            "prev_logprobs": torch.randn(rows, width, generator=generator).where(inside, 0.0),
        }
    )
    tokens = int(lengths.sum())
    arrived, stored = sent(batch)
    require_equal(arrived, batch)
    assert stored == tokens * (8 + 4) + -(-tokens // 8) + rows * (8 + 4 + 4)
    [answered, bytes_back] = sent(BatchedDataDict({"logprobs": batch["prev_logprobs"]}))
    require_equal(answered, {"logprobs": batch["prev_logprobs"]})
    assert bytes_back == tokens * 4 + rows * 4
    dealt = [sent(deal)[1] for deal in batch.deal(4)]
    assert stored <= sum(dealt) <= stored + 4


def test_copies_within_a_process_are_whole() -> None:
    batch = BatchedDataDict({"input_ids": torch.arange(6).reshape(2, 3), "texts": [["a"], ["b"]]})
    batch.micro_batch_indices = [[[0, 2]]]
    for again in (copy.deepcopy(batch), copy.copy(batch), pickle.loads(pickle.dumps(batch, protocol=2))):
        require_equal(again, batch)
        assert again.micro_batch_indices == [[[0, 2]]]
    assert copy.deepcopy(batch)["texts"][0] is not batch["texts"][0]
