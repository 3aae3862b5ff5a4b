"""The check of right padding, and what the abstract classes ask of an engine and a policy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import BatchError
from megarl.models.generation.interfaces import GenerationInterface, verify_right_padding
from megarl.models.policy.interfaces import ColocatablePolicyInterface, PolicyInterface

PAIRS = [("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths")]


def batch(tokens: Any, lengths: Any, pair: tuple[str, str] = PAIRS[0]) -> BatchedDataDict[Any]:
    return BatchedDataDict({pair[0]: torch.tensor(tokens), pair[1]: torch.tensor(lengths)})


@pytest.mark.parametrize("pair", PAIRS)
def test_good_padding(pair: tuple[str, str]) -> None:
    assert verify_right_padding(batch([[5, 6, 9], [7, 9, 9]], [2, 1], pair), pad_value=9) == (True, None)
    assert verify_right_padding(batch([[9, 9, 9], [9, 9, 9]], [3, 0], pair), pad_value=9) == (True, None)


@pytest.mark.parametrize("pair", PAIRS)
def test_bad_padding_names_row_and_column(pair: tuple[str, str]) -> None:
    data = batch([[5, 6, 0], [7, 0, 8]], [3, 1], pair)
    ok, message = verify_right_padding(data, raise_error=False)
    assert not ok and message is not None
    assert f"{pair[0]}[0, 2]" not in message and f"{pair[0]}[1, 2] = 8" in message
    with pytest.raises(BatchError, match="non-padding token"):
        verify_right_padding(data)


def test_left_padding_is_refused() -> None:
    with pytest.raises(ValueError, match="Pad on the right"):
        verify_right_padding(batch([[0, 0, 5]], [1]))


@settings(max_examples=100, derandomize=True)
@given(rows=st.integers(0, 4), width=st.integers(0, 5), pad=st.integers(0, 2), draw=st.data())
def test_agrees_with_a_plain_loop(rows: int, width: int, pad: int, draw: st.DataObject) -> None:
    tokens = [[draw.draw(st.integers(0, 2)) for _ in range(width)] for _ in range(rows)]
    lengths = [draw.draw(st.integers(0, width)) for _ in range(rows)]
    good = all(token == pad for row, length in zip(tokens, lengths, strict=True) for token in row[length:])
    data = BatchedDataDict(
        input_ids=torch.tensor(tokens, dtype=torch.int64).reshape(rows, width),
        input_lengths=torch.tensor(lengths, dtype=torch.int64),
    )
    assert verify_right_padding(data, pad, raise_error=False)[0] is good


@pytest.mark.parametrize("raise_error", [True, False])
@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"input_ids": torch.zeros(1, 2), "input_lengths": torch.ones(1)}, "must be a BatchedDataDict"),
        (BatchedDataDict(input_ids=torch.zeros(1, 2)), "either input_ids and input_lengths"),
        (
            BatchedDataDict(input_ids=torch.zeros(1, 2), unpadded_sequence_lengths=torch.ones(1)),
            "either input_ids",
        ),
        (BatchedDataDict(input_ids=torch.zeros(2), input_lengths=torch.ones(2)), "must be 2-D"),
        (
            BatchedDataDict(input_ids=torch.zeros(2, 3), input_lengths=torch.ones(3)),
            "one length for each row",
        ),
        (
            BatchedDataDict(input_ids=torch.zeros(2, 3), input_lengths=torch.tensor([1, 4])),
            "ranges from 1 to 4",
        ),
        (
            BatchedDataDict(input_ids=torch.zeros(2, 3), input_lengths=torch.tensor([-1, 2])),
            "ranges from -1 to 2",
        ),
    ],
)
def test_data_that_cannot_be_checked(data: Any, message: str, raise_error: bool) -> None:
    with pytest.raises(BatchError, match=message):
        verify_right_padding(data, raise_error=raise_error)


def test_pad_value_is_needed() -> None:
    with pytest.raises(AssertionError, match="pad_value"):
        verify_right_padding(batch([[1]], [1]), pad_value=None)  # type: ignore[arg-type]


def test_what_an_engine_and_a_policy_must_offer() -> None:
    assert GenerationInterface.__abstractmethods__ == {
        "init_collective",
        "generate",
        "prepare_for_generation",
        "finish_generation",
    }
    trainable = {
        "get_logprobs",
        "get_reference_policy_logprobs",
        "train",
        "prepare_for_training",
        "finish_training",
        "save_checkpoint",
        "shutdown",
    }
    assert PolicyInterface.__abstractmethods__ == trainable
    assert ColocatablePolicyInterface.__abstractmethods__ == trainable | {
        "init_collective",
        "offload_before_refit",
        "offload_after_refit",
        "prepare_refit_info",
        "prepare_weights_for_ipc",
        "get_weights_ipc_handles",
        "broadcast_weights_for_collective",
    }


def test_older_names_lead_to_the_newer_ones() -> None:
    class Engine(GenerationInterface):
        def update_weights_from_ipc_handles(self, ipc_handles: dict[str, Any]) -> bool:
            return ipc_handles == {"a": 1}

    class Model(ColocatablePolicyInterface):
        def prepare_refit_info(self) -> dict[str, Any] | None:
            return {"weight": 1}

    Engine.__abstractmethods__ = Model.__abstractmethods__ = frozenset()
    engine, model = Engine(), Model()
    assert engine.update_weights({"a": 1}) and not engine.update_weights({})
    assert model.prepare_info_for_collective() == {"weight": 1}
    for call in (lambda: engine.prepare_refit_info({}), engine.update_weights_from_collective):
        with pytest.raises(NotImplementedError):
            call()
