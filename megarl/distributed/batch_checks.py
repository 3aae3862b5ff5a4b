"""Checks of a batch on the driver, before any worker is called: columns, shapes, dtypes and values. Error
messages name the column, the expected value and the given value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from megarl.distributed.parcels import Columns
from megarl.errors import BatchError


def check_batch(
    data: Any,
    *,
    required: Sequence[str],
    vocab_size: int,
    max_length: int,
    max_length_key: str = "policy.max_total_sequence_length",
    may_be_empty: bool = False,
) -> None:
    """Check that workers can use a batch.

    Args:
        data: a BatchedDataDict with the columns of NeMo-RL's policy API.
        required: columns that must exist in addition to ``input_ids`` and ``input_lengths``.
        vocab_size: token ids must be in [0, vocab_size).
        max_length: maximum sequence length in tokens.
        max_length_key: configuration key that sets this length, for messages.
        may_be_empty: accept a batch without rows.

    Raises:
        BatchError: lists all problems; if columns are missing, only these.
    """
    problems: list[str] = []
    missing = [key for key in ("input_ids", "input_lengths", *required) if key not in data]
    # Raise at once if columns are missing, because all checks below read them.
    if missing:
        raise BatchError(
            f"{', '.join(missing)} must be present in the data; it has {', '.join(sorted(map(str, data)))}"
        )
    ids, lengths = data["input_ids"], data["input_lengths"]
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise BatchError(f"input_ids: expected an int64 tensor [B, S], got {_describe(ids)}")
    rows, width = ids.shape
    if rows == 0 and not may_be_empty:
        raise BatchError("the batch is empty (0 rows): give at least one sample")
    problems += _length_problems(lengths, rows, width, max_length, max_length_key)
    problems += _shape_problems(data, rows, width)
    # The following checks compare positions with lengths, so they require correct shapes and lengths.
    if not problems and "token_mask" in data:
        problems += _mask_problems(data["token_mask"], lengths)
    if not problems:
        problems += _token_problems(ids, lengths, vocab_size)
    if problems:
        raise BatchError("; ".join(problems))


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _length_problems(lengths: Any, rows: int, width: int, max_length: int, max_length_key: str) -> list[str]:
    if (
        not isinstance(lengths, Tensor)
        or lengths.shape != (rows,)
        or lengths.dtype not in (torch.int64, torch.int32)
    ):
        return [f"input_lengths: expected an integer tensor [{rows}], got {_describe(lengths)}"]
    # Return early, because torch's min and max raise for an empty tensor.
    if rows == 0:
        return []
    shortest, longest = int(lengths.min()), int(lengths.max())
    problems = []
    if shortest < 1:
        problems.append(
            f"input_lengths[{int(lengths.argmin())}] = {shortest}: a sequence has at least 1 token"
        )
    if longest > width:
        problems.append(
            f"input_lengths[{int(lengths.argmax())}] = {longest}: input_ids has only {width} columns"
        )
    if longest > max_length:
        problems.append(
            f"input_lengths[{int(lengths.argmax())}] = {longest} tokens: more than {max_length_key} = "
            f"{max_length}; "
            "raise it or shorten the sample"
        )
    return problems


def check_scored_tokens(data: Columns, key: str, vocab_size: int) -> None:
    """Check a column of additional tokens to score. A token outside the vocabulary has no logit on any rank,
    and would silently count as a logit of 0.

    Args:
        data: a batch that ``check_batch`` has accepted.
        key: name of the column, integers [B, S, K].
        vocab_size: tokens must be in [0, vocab_size).

    Raises:
        BatchError: dtype, dimensions or a token are invalid.
    """
    tokens = data[key]
    if (
        not isinstance(tokens, Tensor)
        or tokens.ndim != 3
        or tokens.dtype not in (torch.int64, torch.int32)
        or not tokens.shape[2]
    ):
        raise BatchError(
            f"{key}: expected an integer tensor [B, S, K] of K tokens a position, got {_describe(tokens)}"
        )
    if tokens.numel() and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        wrong = ((tokens < 0) | (tokens >= vocab_size)).nonzero()[0].tolist()
        raise BatchError(
            f"{key}{wrong} = {int(tokens[tuple(wrong)])}: token ids lie in [0, {vocab_size}). Fix: give "
            "tokens of a model with this "
            "vocabulary"
        )


def check_sequence_dimension(data: Columns) -> None:
    """Check that all columns have as many rows, and tensors as many columns, as ``input_ids``. Workers check
    their own data with this.

    Args:
        data: batch of a data-parallel rank; a batch without ``input_ids`` is accepted.

    Raises:
        BatchError: (also an AssertionError) lists all such columns.
    """
    ids = data.get("input_ids")
    problems = _shape_problems(data, *ids.shape) if isinstance(ids, Tensor) and ids.ndim == 2 else []
    if problems:
        raise BatchError("; ".join(problems))


def _shape_problems(data: Columns, rows: int, width: int) -> list[str]:
    problems = []
    for key, value in data.items():
        if isinstance(value, Tensor):
            if value.ndim == 0 or value.shape[0] != rows:
                problems.append(f"{key}: expected {rows} rows as in input_ids, got {_describe(value)}")
            elif value.ndim > 1 and value.shape[1] != width:
                problems.append(
                    f"{key}: Dim 1 must be the sequence dim, expected {width} as in input_ids, got "
                    f"{_describe(value)}"
                )
        elif len(value) != rows:
            problems.append(f"{key}: expected a list of {rows} entries, got {len(value)}")
    for key, dimensions in (("sample_mask", 1), ("token_mask", 2)):
        if key in data and (not isinstance(data[key], Tensor) or data[key].ndim != dimensions):
            problems.append(
                f"{key}: expected a tensor of {dimensions} dimension{'s' * (dimensions > 1)}, got "
                f"{_describe(data[key])}"
            )
    return problems


def _mask_problems(mask: Tensor, lengths: Tensor) -> list[str]:
    """Report padding whose ``token_mask`` is not 0. A packed row contains no such position."""
    outside = torch.arange(mask.shape[1], device=mask.device)[None] >= lengths[:, None].to(mask.device)
    wrong = outside.logical_and_(mask)
    if not bool(wrong.any()):
        return []
    row, column = map(int, wrong.nonzero()[0])
    return [
        f"token_mask[{row}, {column}] = {float(mask[row, column]):g} beyond input_lengths[{row}] = "
        f"{int(lengths[row])}: "
        "padding is no target; write 0 there"
    ]


def _token_problems(ids: Tensor, lengths: Tensor, vocab_size: int) -> list[str]:
    """Report token ids outside the vocabulary. Padding is checked too, because it also goes through the
    embedding."""
    if ids.numel() == 0 or (int(ids.min()) >= 0 and int(ids.max()) < vocab_size):
        return []
    # Compute a mask over all tokens only for an invalid batch. For a valid one, the two reductions above are
    # enough.
    wrong = (ids < 0) | (ids >= vocab_size)
    row, column = map(int, wrong.nonzero()[0])
    where = "padding" if column >= int(lengths[row]) else "a token"
    return [
        f"input_ids[{row}, {column}] = {int(ids[row, column])} ({where}): token ids lie in [0, "
        f"{vocab_size}); "
        f"{int(wrong.sum())} ids are out of range. Use the tokenizer that belongs to the model"
    ]
