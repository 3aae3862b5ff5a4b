"""Segments of responses as rows of a training batch, and estimates for a response from its rows.

A response whose conversation is one segment is one row. Any other response is several consecutive rows, which
share the response's advantage. Estimates for a response (advantages, returns) are made over all its tokens,
one segment after the other, as if they were one row.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.distributed.batched_data_dict import BatchedDataDict

if TYPE_CHECKING:
    from megarl.rollout.collector import Rollouts

RESPONSE = "response"
"""Column [R] int64 of rows that are segments: the number of each segment's response, ascending."""
RESPONSE_TOKENS = "response_tokens"
"""Column [R] int64 of a training batch: the number of tokens that count, over all rows of the same
response."""


def rows_of_segments(rollouts: Rollouts, pad_token_id: int) -> Rollouts:
    """Return rollouts with one row per segment and the column ``response``. If each response is one segment,
    return the same object.

    Args:
        rollouts: B responses.
        pad_token_id: padding of token ids.
    """
    earlier = rollouts.earlier
    if earlier is None:
        return rollouts
    last = rollouts.samples
    count = last.size
    # Copy the values that describe a whole response into each of its rows.
    of_earlier = last.select_indices(earlier[RESPONSE]) | {
        name: earlier[name] for name in earlier if name != RESPONSE
    }
    # An earlier segment only counts if its response does.
    of_earlier["sample_mask"] = of_earlier["sample_mask"] * (~of_earlier["masked"]).float()
    padding = {"input_ids": pad_token_id, "prompt_ids": pad_token_id}
    both = type(last).from_batches([last, of_earlier], padding)
    response = torch.cat([torch.arange(count), earlier[RESPONSE]])
    # Move each last segment, which comes first here, behind the other segments of its response.
    is_last = torch.arange(len(response)) < count
    order = sorted(range(len(response)), key=lambda row: (int(response[row]), bool(is_last[row])))
    samples = both.select_indices(order)
    samples[RESPONSE] = response[order]
    records = [rollouts.records[number] for number in samples[RESPONSE].tolist()]
    return replace(rollouts, samples=samples, records=records, earlier=None)


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """The assignment of rows, which are segments, to responses.

    Attributes:
        response: [R] int64, ascending from 0, the response of each row.
    """

    response: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> SegmentRows | None:
        """Return the segments of a batch, or None if each row is a response."""
        return cls(batch[RESPONSE]) if RESPONSE in batch else None

    @property
    def _places(self) -> Tensor:
        """Number of each row among those of its response, [R]."""
        first = torch.searchsorted(self.response, self.response)
        return torch.arange(len(self.response)) - first

    @property
    def _last_rows(self) -> Tensor:
        """The last row of each response, [B]."""
        return torch.searchsorted(self.response, torch.arange(int(self.response[-1]) + 1), right=True) - 1

    def by_response(self, batch: Mapping[str, Any]) -> BatchedDataDict[Any]:
        """Return a batch with one row for each of B responses.

        Columns [R, S] become [B, K * S], the rows of a response one after the other. Other columns have the
        values of the response's last row. ``sample_mask`` is 1 if any of its rows counts, and
        ``input_lengths`` ends with the last row.
        """
        last, places = self._last_rows, self._places
        found: BatchedDataDict[Any] = BatchedDataDict()
        for name, values in batch.items():
            if isinstance(values, Tensor) and values.ndim == 2 and name != "prompt_ids":
                found[name] = self._joined(values)
            elif isinstance(values, Tensor):
                found[name] = values[last]
            else:
                found[name] = [values[row] for row in last.tolist()]
        width = batch["input_ids"].shape[1]
        found["input_lengths"] = found["input_lengths"] + places[last] * width
        counted = torch.zeros_like(found["sample_mask"]).index_add(0, self.response, batch["sample_mask"])
        found["sample_mask"] = (counted > 0).to(counted.dtype)
        # Mask the tokens of a row that does not count, because other rows of its response may count.
        found["token_mask"] = self._joined(batch["token_mask"] * batch["sample_mask"].unsqueeze(1))
        del found[RESPONSE]
        return found

    def _joined(self, values: Tensor) -> Tensor:
        places = self._places
        joined = values.new_zeros(int(self.response[-1]) + 1, int(places.max()) + 1, values.shape[1])
        joined[self.response, places] = values
        return joined.flatten(1)

    def by_row(self, values: Tensor) -> Tensor:
        """Return values of responses, [B, 1] or [B, K * S], by row: [R, 1] or [R, S]."""
        if values.shape[1] == 1:
            return values[self.response]
        places = self._places
        return values.unflatten(1, (int(places.max()) + 1, -1))[self.response, places]

    def without_some_rows(self, before: Tensor, after: Tensor) -> Tensor:
        """Return the sample mask ``after``, [R], with all rows of a response set to 0 if any of its rows
        counts in ``before`` but not in ``after``."""
        left_out = torch.zeros(int(self.response[-1]) + 1, dtype=torch.bool)
        left_out[self.response[(before != 0) & (after == 0)]] = True
        return after * (~left_out[self.response]).to(after.dtype)


def global_batches(
    batch: BatchedDataDict[Any], responses: int, multiple: int
) -> tuple[BatchedDataDict[Any], int, list[int]]:
    """Return a batch of segments with global batches of equal size, and the counts by which a loss weights
    responses.

    A global batch has the rows of ``responses`` responses, and is padded with copies of its shortest row that
    do not count.

    Args:
        batch: R rows with ``response``.
        responses: number of responses per global batch.
        multiple: the number of rows of a global batch is a multiple of this.

    Returns:
        The batch, with ``response_tokens`` instead of ``response``; the number of rows of a global batch; and
        for each row its row in the original ``batch``.
    """
    response = batch[RESPONSE]
    begins = torch.searchsorted(response, torch.arange(0, int(response[-1]) + 1, responses)).tolist()
    groups = [range(begin, end) for begin, end in zip(begins, [*begins[1:], len(response)], strict=True)]
    size = max(map(len, groups))
    size += -size % multiple
    lengths = batch["input_lengths"].tolist()
    rows: list[int] = []
    fills: list[bool] = []
    for group in groups:
        missing = size - len(group)
        rows += [*group, *[min(group, key=lengths.__getitem__)] * missing]
        fills += [False] * len(group) + [True] * missing
    filled = batch.select_indices(rows)
    filling = torch.tensor(fills)
    filled["sample_mask"] = filled["sample_mask"].masked_fill(filling, 0)
    filled["token_mask"] = filled["token_mask"].masked_fill(filling.unsqueeze(1), 0)
    numbers = filled.pop(RESPONSE)
    # Leave out a row's first token, which is given and not predicted, and therefore has no loss.
    counts = ((filled["token_mask"] != 0) & (filled["sample_mask"] != 0).unsqueeze(1))[:, 1:].sum(dim=1)
    totals = torch.zeros(int(numbers.max()) + 1, dtype=counts.dtype).index_add(0, numbers, counts)
    filled[RESPONSE_TOKENS] = totals[numbers]
    return filled, size, rows
