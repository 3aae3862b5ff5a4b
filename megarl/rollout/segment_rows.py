"""Conversion between responses and training rows, for responses with several segments.

A response of one segment is one row. Any other response is several consecutive rows, which share its
advantage. Estimates per response (advantages, returns) are computed over all its tokens, as if its segments
were one row.
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
"""Batch column [R] int64, ascending: index of the response to which each row (segment) belongs."""
RESPONSE_TOKENS = "response_tokens"
"""Batch column [R] int64: number of trained tokens of the row's whole response."""


def rows_of_segments(rollouts: Rollouts, pad_token_id: int) -> Rollouts:
    """Convert rollouts to one row per segment, and add the column ``response``. Return the same object if
    each response is one segment.

    Args:
        rollouts: B responses.
        pad_token_id: token id for padding.
    """
    earlier = rollouts.earlier
    if earlier is None:
        return rollouts
    last = rollouts.samples
    count = last.size
    # Values per response are copied to each of its rows.
    of_earlier = last.select_indices(earlier[RESPONSE]) | {
        name: earlier[name] for name in earlier if name != RESPONSE
    }
    # If a response is masked, all its segments are.
    of_earlier["sample_mask"] = of_earlier["sample_mask"] * (~of_earlier["masked"]).float()
    padding = {"input_ids": pad_token_id, "prompt_ids": pad_token_id}
    both = type(last).from_batches([last, of_earlier], padding)
    response = torch.cat([torch.arange(count), earlier[RESPONSE]])
    # The last segments come first in ``both``; sort each behind the earlier segments of its response.
    is_last = torch.arange(len(response)) < count
    order = sorted(range(len(response)), key=lambda row: (int(response[row]), bool(is_last[row])))
    samples = both.select_indices(order)
    samples[RESPONSE] = response[order]
    records = [rollouts.records[number] for number in samples[RESPONSE].tolist()]
    return replace(rollouts, samples=samples, records=records, earlier=None)


@dataclass(frozen=True, slots=True)
class SegmentRows:
    """Maps the rows of a batch, which are segments, to responses.

    Attributes:
        response: [R] int64, ascending from 0, response index of each row.
    """

    response: Tensor

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> SegmentRows | None:
        """Build the mapping of a batch. Return None if each row is a complete response."""
        return cls(batch[RESPONSE]) if RESPONSE in batch else None

    @property
    def _places(self) -> Tensor:
        """Index of each row among the rows of its response, [R]."""
        first = torch.searchsorted(self.response, self.response)
        return torch.arange(len(self.response)) - first

    @property
    def _last_rows(self) -> Tensor:
        """Index of each response's last row, [B]."""
        return torch.searchsorted(self.response, torch.arange(int(self.response[-1]) + 1), right=True) - 1

    def by_response(self, batch: Mapping[str, Any]) -> BatchedDataDict[Any]:
        """Convert a batch of R rows to one row per response, B rows.

        Columns [R, S] become [B, K * S] by concatenation of a response's rows. Other columns take the value
        of the response's last row. ``sample_mask`` is 1 if any row of the response counts, and
        ``input_lengths`` extends to the end of the last row.
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
        # The joined response counts if any of its rows does, so mask the tokens of rows that do not.
        found["token_mask"] = self._joined(batch["token_mask"] * batch["sample_mask"].unsqueeze(1))
        del found[RESPONSE]
        return found

    def _joined(self, values: Tensor) -> Tensor:
        places = self._places
        joined = values.new_zeros(int(self.response[-1]) + 1, int(places.max()) + 1, values.shape[1])
        joined[self.response, places] = values
        return joined.flatten(1)

    def by_row(self, values: Tensor) -> Tensor:
        """Convert values per response to values per row: [B, 1] to [R, 1], or [B, K * S] to [R, S]."""
        if values.shape[1] == 1:
            return values[self.response]
        places = self._places
        return values.unflatten(1, (int(places.max()) + 1, -1))[self.response, places]

    def without_some_rows(self, before: Tensor, after: Tensor) -> Tensor:
        """Extend a change of the sample mask from rows to whole responses.

        Args:
            before: [R], the mask before the change.
            after: [R], the mask after some rows were set to 0.

        Returns:
            ``after``, with all rows of a response set to 0 if any of its rows was.
        """
        left_out = torch.zeros(int(self.response[-1]) + 1, dtype=torch.bool)
        left_out[self.response[(before != 0) & (after == 0)]] = True
        return after * (~left_out[self.response]).to(after.dtype)


def global_batches(
    batch: BatchedDataDict[Any], responses: int, multiple: int
) -> tuple[BatchedDataDict[Any], int, list[int]]:
    """Pad a batch of segments so that all global batches have the same number of rows.

    A global batch has the rows of ``responses`` responses. It is padded with copies of its shortest row whose
    masks are 0.

    Args:
        batch: R rows with ``response``.
        responses: number of responses per global batch.
        multiple: round the rows of a global batch up to a multiple of this.

    Returns:
        The padded batch, with ``response_tokens`` in place of ``response``; the rows per global batch; and
        for each row the index of its original in ``batch``.
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
    # A row's first token is not predicted, and so has no loss.
    counts = ((filled["token_mask"] != 0) & (filled["sample_mask"] != 0).unsqueeze(1))[:, 1:].sum(dim=1)
    totals = torch.zeros(int(numbers.max()) + 1, dtype=counts.dtype).index_add(0, numbers, counts)
    filled[RESPONSE_TOKENS] = totals[numbers]
    return filled, size, rows
