"""Prompts as vLLM gets them and answers as the contract wants them, without vLLM: its objects are played by
plain ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megarl.models.generation.vllm.requests import answer_of, assembled, requests_of

CONFIG: dict[str, Any] = {"max_new_tokens": 3, "temperature": 0.7, "stop_token_ids": [1, 9]}
DATA = {
    "input_ids": torch.tensor([[5, 6, 0], [7, 8, 9], [4, 0, 0]]),
    "input_lengths": torch.tensor([2, 3, 1]),
}


def completion(tokens: list[int], logprobs: list[float] | None, reason: str = "stop") -> Any:
    steps = (
        None
        if logprobs is None
        else [{t: SimpleNamespace(logprob=p)} for t, p in zip(tokens, logprobs, strict=True)]
    )
    return SimpleNamespace(token_ids=tokens, logprobs=steps, finish_reason=reason)


@pytest.mark.parametrize(
    ("temperature", "greedy", "asked"), [(0.7, False, 0), (0.7, True, None), (1.0, True, 0), (1.0, False, 0)]
)
def test_log_probabilities_of_another_distribution_are_not_asked_for(
    temperature: float, greedy: bool, asked: int | None
) -> None:
    """vLLM gives greedy tokens' before the temperature, and all others' after it."""
    requests = requests_of(DATA, {**CONFIG, "temperature": temperature}, 64, greedy=greedy)
    assert [request.options["logprobs"] for request in requests] == [asked] * 3
    assert [request.options["temperature"] for request in requests] == [0.0 if greedy else temperature] * 3


def test_log_probabilities_that_are_not_known_are_no_numbers() -> None:
    rows = {
        0: answer_of(completion([3, 1], None)),
        1: answer_of(completion([], None, "length")),
        2: answer_of(completion([2], [-0.5])),
    }
    output = assembled(DATA, rows, 0)
    expected = torch.tensor([[0, 0, torch.nan, torch.nan], [0, 0, 0, 0], [0, -0.5, 0, 0]])
    torch.testing.assert_close(output["logprobs"], expected, rtol=0, atol=0, equal_nan=True)
    assert output["output_ids"].tolist() == [[5, 6, 3, 1], [7, 8, 9, 0], [4, 2, 0, 0]]
    assert output["generation_lengths"].tolist() == [2, 0, 1] and output["truncated"].tolist() == [
        False,
        True,
        False,
    ]


def test_an_answer_gets_the_room_that_its_prompt_leaves() -> None:
    requests = requests_of({**DATA, "sampling_seeds": torch.tensor([-1, 2**62, 0])}, CONFIG, 3, greedy=False)
    assert [(request.row, request.prompt, request.options["max_tokens"]) for request in requests] == [
        (0, [5, 6], 1),
        (2, [4], 2),
    ]
    assert [request.options["seed"] for request in requests] == [2**63 - 1, 0]
    assert requests[0].options["stop_token_ids"] == [1, 9] and requests[0].options["ignore_eos"]
