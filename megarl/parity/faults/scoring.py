"""Known faults of models that score and of losses of values."""

from __future__ import annotations

from typing import Any

import torch

from megarl.parity.batches import token_batch
from megarl.parity.case import Case
from megarl.parity.faults.patching import LEAST_TOKENS, Mutation, replacing

LOSSES = "megarl.algorithms.value_losses"


def _pairs_of_two_lengths(case: Case) -> bool:
    """In every step a pair counts whose rows have different lengths."""
    if case.loss_kind != "rm":
        return False
    batch = token_batch(case)
    lengths, counts = (batch[name].view(case.steps, -1, 2) for name in ("input_lengths", "sample_mask"))
    return bool(((lengths[..., 0] != lengths[..., 1]) & (counts.prod(-1) != 0)).any(1).all())


def _sees_values(case: Case) -> bool:
    """In every step several tokens count for a value loss."""
    if case.loss_kind != "value" or case.masked not in ("none", "some"):
        return False
    batch = token_batch(case)
    tokens = batch["token_mask"][:, 1:].sum(1) * batch["sample_mask"]
    return bool((tokens.view(case.steps, -1).sum(1) >= LEAST_TOKENS).all())


def _has_hidden_tokens(case: Case) -> bool:
    """In every step some token of a row that counts does not."""
    batch = token_batch(case)
    inside = torch.arange(case.length)[None] < batch["input_lengths"][:, None]
    hidden = (inside & (batch["token_mask"] == 0))[:, 1:].sum(1) * batch["sample_mask"]
    return bool((hidden.view(case.steps, -1).sum(1) > 0).all())


def _values_in_both_runs(case: Case) -> bool:
    """Rows are cut in two over tensor-parallel ranks, and both have tokens whose values have gradients."""
    if not (_sees_values(case) and case.sp and case.tp == 2 and case.cp == 1 and case.batching == "fixed"):
        return False
    multiple = case.share * case.pad
    half = -(-case.length // multiple) * multiple // 2
    batch = token_batch(case)
    trained = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:]  # column i: the value of token i has a gradient
    return bool(trained[:, :half].any() and trained[:, half:].any())


def _of_other_values(change: Any) -> Any:
    """The value loss reads other values than it is given."""

    def changed(original: Any) -> Any:
        return lambda self, data, sequences, tokens, values: original(self, data, sequences, tokens, values=change(values))

    return replacing(f"{LOSSES}:ValueLoss", "__call__", changed)


def _of_all_tokens(original: Any) -> Any:
    def call(self: Any, data: Any, sequences: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> Any:
        inside = torch.arange(values.shape[1])[None] < data["input_lengths"][:, None]
        return original(self, {**data, "token_mask": inside.float()}, sequences, tokens, values=values)

    return call


def _of_own_tokens(original: Any) -> Any:
    def call(self: Any, data: Any, sequences: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> Any:
        own = (data["token_mask"][:, 1:] * data["sample_mask"][:, None]).sum()
        return original(self, data, sequences, own, values=values)

    return call


def _weight_not_marked(original: Any) -> Any:
    def init(self: Any, *arguments: Any) -> None:
        original(self, *arguments)
        self.weight.sequence_parallel = False

    return init


FAULTS: dict[str, Mutation] = {
    "score-of-the-last-column": Mutation(
        "the score of a sequence is the value in the last column, padding or not",
        _pairs_of_two_lengths,
        replacing(LOSSES, "last_values", lambda original: lambda values, lengths: values[:, -1]),
        "loss=rm masked=none",
    ),
    "value-behind-the-token": Mutation(
        "the value of the state before a token is taken behind it",
        _sees_values,
        _of_other_values(lambda values: values.roll(-1, dims=1)),
        "loss=value masked=none",
    ),
    "value-loss-over-masked-tokens": Mutation(
        "tokens that the policy has not sampled count for the value loss",
        lambda case: _sees_values(case) and _has_hidden_tokens(case),
        replacing(f"{LOSSES}:ValueLoss", "__call__", _of_all_tokens),
        "loss=value masked=none",
    ),
    "value-loss-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens, not by those of the global batch",
        lambda case: _sees_values(case) and case.batching == "fixed" and case.micro >= 2,
        replacing(f"{LOSSES}:ValueLoss", "__call__", _of_own_tokens),
        "loss=value batching=fixed micro=2 masked=none",
    ),
    "score-gradient-of-one-run": Mutation(
        "the gradient of the score layer is not summed over sequence-parallel ranks",
        _values_in_both_runs,
        replacing("megarl.models.megatron.build:ScoreLayer", "__init__", _weight_not_marked),
        "loss=value tp=2 sp=1 cp=1 batching=fixed masked=none",
        ("megatron",),
    ),
}
"""The faults by name."""
