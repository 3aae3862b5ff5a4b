"""Known faults of models that score and of losses of values."""

from __future__ import annotations

from typing import Any

import torch

from megarl.parity.batches import first_step, token_batch, with_signals
from megarl.parity.case import Case
from megarl.parity.faults.patching import LEAST_TOKENS, Mutation, in_several_micro_batches, normalised_by_micro_batch, replacing

LOSSES = "megarl.algorithms.value_losses"


def _pairs_of_two_lengths(case: Case) -> bool:
    """In every step a pair counts whose rows have different lengths."""
    if case.loss_kind != "rm":
        return False
    batch = token_batch(case)
    lengths, counts = (batch[name].view(case.steps, -1, 2) for name in ("input_lengths", "sample_mask"))
    return bool(((lengths[..., 0] != lengths[..., 1]) & (counts.prod(-1) != 0)).any(1).all())


def compares_scores(case: Case) -> bool:
    """In every step a pair counts that a reward model learns from."""
    if case.loss_kind != "rm" or case.masked not in ("none", "some"):
        return False
    pairs = token_batch(case)["sample_mask"].view(case.steps, -1, 2).prod(2)
    return bool((pairs.sum(1) > 0).all())


def _pairs_in_several_micro_batches(case: Case) -> bool:
    """In the first step more than one micro-batch has pairs that count."""
    if not compares_scores(case) or case.batching != "fixed" or case.micro < 2 or case.mbs % 2:
        return False
    pairs = token_batch(case)["sample_mask"][: case.global_batch].view(-1, case.mbs // 2, 2).prod(2)
    return int((pairs.sum(1) > 0).sum()) > 1


def _clip_of_values_is_reached(case: Case) -> bool:
    """In the first step the value of some token has moved clearly past the clip, and away from its return: values are drawn around those
    of the model, so that differences do not depend on it."""
    if not _sees_values(case) or "clip" not in case.loss_options or case.advantages_kind != "given":
        return False
    data = first_step(case, with_signals(case, token_batch(case), torch.zeros(case.total_rows, case.length)))
    counted = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:] != 0
    moved, error = (-data[name][:, 1:] for name in ("prev_values", "returns"))
    clip = case.loss_number("clip") or torch.inf
    # past the clip and nearer to the return than at its bound: the error at the bound is the larger one
    at_bound = data["prev_values"][:, 1:] + moved.clamp(-clip, clip) - data["returns"][:, 1:]
    return bool((counted & (moved.abs() > 1.1 * clip) & (at_bound.abs() > error.abs() + 0.02)).any())


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


def _old_values_move(original: Any) -> Any:
    def call(self: Any, data: Any, sequences: torch.Tensor, tokens: torch.Tensor, values: torch.Tensor) -> Any:
        moves = torch.nn.functional.pad((values - values.detach())[:, :-1], (1, 0))
        return original(self, {**data, "prev_values": data["prev_values"] + moves}, sequences, tokens, values=values)

    return call


def _scores_detached(rows: slice) -> Any:
    """Scores of some rows of the pairs are constants."""

    def detached(original: Any) -> Any:
        def last(values: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            scores: torch.Tensor = original(values, lengths)
            scores = scores.clone()
            scores[rows] = scores[rows].detach()
            return scores

        return last

    return detached


def _without_clip(original: Any) -> Any:
    def init(self: Any, *given: Any) -> None:
        original(self, *given)
        self.value_clip = None

    return init


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
        ("loss=value masked=none", "loss=value+clip masked=none"),
    ),
    "value-loss-over-masked-tokens": Mutation(
        "tokens that the policy has not sampled count for the value loss",
        lambda case: _sees_values(case) and _has_hidden_tokens(case),
        replacing(f"{LOSSES}:ValueLoss", "__call__", _of_all_tokens),
        ("loss=value masked=none", "loss=value+clip masked=none"),
    ),
    "value-loss-normalised-a-micro-batch": Mutation(
        "a micro-batch is divided by its own tokens, not by those of the global batch",
        lambda case: _sees_values(case) and in_several_micro_batches(case),
        replacing(f"{LOSSES}:ValueLoss", "__call__", normalised_by_micro_batch),
        ("loss=value batching=fixed micro=2 masked=none", "loss=value+clip batching=fixed micro=2 masked=none"),
    ),
    "scores-normalised-a-micro-batch": Mutation(
        "the pairs of a micro-batch are divided by their own number, not by that of the global batch",
        _pairs_in_several_micro_batches,
        replacing(f"{LOSSES}:PreferenceLoss", "__call__", normalised_by_micro_batch),
        "loss=rm batching=fixed micro=2 masked=none",
    ),
    "score-of-the-chosen-without-gradient": Mutation(
        "the scores of chosen answers are constants",
        compares_scores,
        replacing(LOSSES, "last_values", _scores_detached(slice(0, None, 2))),
        "loss=rm masked=none",
    ),
    "score-of-the-rejected-without-gradient": Mutation(
        "the scores of rejected answers are constants",
        compares_scores,
        replacing(LOSSES, "last_values", _scores_detached(slice(1, None, 2))),
        "loss=rm masked=none",
    ),
    "values-without-gradient": Mutation(
        "the values that are learned are constants",
        _sees_values,
        # a loss without any gradient would end the worker
        _of_other_values(lambda values: values.detach() + 0.0 * values),
        ("loss=value masked=none", "loss=value+clip masked=none"),
    ),
    "old-values-with-gradient": Mutation(
        "the values from before the update move with the new ones",
        _clip_of_values_is_reached,
        replacing(f"{LOSSES}:ValueLoss", "__call__", _old_values_move),
        "loss=value+clip masked=none",
    ),
    "clip-of-values-left-out": Mutation(
        "values may change as far as they like",
        _clip_of_values_is_reached,
        replacing(f"{LOSSES}:ValueLoss", "__init__", _without_clip),
        "loss=value+clip masked=none",
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
