"""Assignment of rows to shards and micro-batches, from their lengths alone. Pure Python, without torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NotRequired

from typing_extensions import TypedDict

from megarl.data.packing import DEFAULT_PACKING_ALGORITHM, deal_bins, get_packer, sequence_cost
from megarl.data.packing.balance import DEFAULT_ATTENTION_CROSSOVER_LENGTH
from megarl.errors import BatchError


class DynamicBatchingArgs(TypedDict):
    """Settings of dynamic batching, which forms micro-batches of rows of similar length.

    Keys:
        max_tokens_per_microbatch: maximum of rows times padded length in a micro-batch.
        sequence_length_round: padded lengths are rounded up to a multiple of this.
        input_key: key of the tensor [B, S], whose S is the maximum padded length.
        input_lengths_key: key of the lengths [B].
        width_multiple: S is first rounded up to a multiple of this (default 1).
        rows_together: number of consecutive rows that must stay in one micro-batch, 2 for pairs (default 1).
    """

    max_tokens_per_microbatch: int
    sequence_length_round: int
    input_key: str
    input_lengths_key: str
    width_multiple: NotRequired[int]
    rows_together: NotRequired[int]


class SequencePackingArgs(TypedDict):
    """Settings of sequence packing, which concatenates the rows of a micro-batch to one row.

    Keys:
        max_tokens_per_microbatch: maximum sum of the padded lengths in a micro-batch.
        input_key, input_lengths_key: keys of the tensor [B, S] and of the lengths [B].
        algorithm: name of the packing algorithm (default best_fit_decreasing).
        sequence_length_pad_multiple: each sequence length is rounded up to a multiple of this.
        seed: seed of the algorithm first_fit_shuffle (default 0).
        attention_crossover_length: length in tokens at which attention costs as much as the matmuls; used to
            balance shards.
        rows_together: number of consecutive rows that must stay in one micro-batch, 2 for pairs (default 1).
    """

    max_tokens_per_microbatch: int
    input_key: str
    input_lengths_key: str
    algorithm: NotRequired[str]
    sequence_length_pad_multiple: int
    seed: NotRequired[int]
    attention_crossover_length: NotRequired[int]
    rows_together: NotRequired[int]


@dataclass(slots=True)
class ShardPlan:
    """The rows of one shard, in order, and its micro-batches.

    Attributes:
        rows: row numbers in the batch.
        micro_batch_indices: for each chunk (global batch), the row range ``[start, end]`` of each
            micro-batch, counted from the first row of the chunk in this shard.
        micro_batch_lengths: for each chunk, the length of each micro-batch: of its padded rows (dynamic
            batching) or of all its padded rows together (packing).
        elem_counts_per_gb: for each chunk, the number of rows in this shard.
    """

    rows: list[int]
    micro_batch_indices: list[list[list[int]]]
    micro_batch_lengths: list[list[int]]
    elem_counts_per_gb: list[int]

    @classmethod
    def empty(cls) -> ShardPlan:
        """Return a plan without rows."""
        return cls([], [], [], [])

    def add_chunk(self, rows: Sequence[int], ranges: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        """Append the rows and micro-batches of one chunk."""
        self.rows.extend(rows)
        self.micro_batch_indices.append(list(map(list, ranges)))
        self.micro_batch_lengths.append(list(lengths))
        self.elem_counts_per_gb.append(len(rows))


def plan_even(total: int, batch_size: int, shards: int) -> list[list[int]]:
    """Return the rows of each shard: an equal, contiguous slice of every chunk of ``batch_size`` rows."""
    share = batch_size // shards
    rows: list[list[int]] = [[] for _ in range(shards)]
    for first in range(0, total, share):
        rows[first // share % shards] += range(first, first + share)
    return rows


def plan_uneven(total: int, shards: int) -> list[list[int]]:
    """Return the rows of each shard: contiguous slices of ``ceil(total / shards)`` rows. The last shards may
    have fewer rows, or none."""
    share = -(-total // shards)
    rows = list(range(total))
    return [rows[shard * share : (shard + 1) * share] for shard in range(shards)]


def plan_dynamic(
    lengths: Sequence[int], width: int, batch_size: int, shards: int, args: DynamicBatchingArgs
) -> list[ShardPlan]:
    """Form micro-batches of rows of similar length. All shards get the same number of micro-batches with the
    same shapes.

    The rows of each chunk are sorted by length and distributed round-robin. The i-th rows of all shards
    together determine a padded length for all of them. A micro-batch is closed when one more row would exceed
    the token budget.

    Args:
        lengths: the length of each row, from 1 to ``width``.
        width: S, the maximum padded length.
        batch_size: rows of a chunk (global batch).
        shards: number of data-parallel shards.
        args: the settings.

    Raises:
        BatchError: a single padded row exceeds the token budget, or a setting is not positive.
    """
    budget, multiple = args["max_tokens_per_microbatch"], args["sequence_length_round"]
    together = _rows_together(args, batch_size, shards)
    _require_positive("sequence_length_round", multiple)
    width = _round_up(width, args.get("width_multiple", 1))

    def padded(length: int) -> int:
        return min(_round_up(length, multiple), width)

    longest = max(lengths)
    if padded(longest) * together > budget:
        raise BatchError(
            f"sequence length {longest}, padded to {padded(longest)} tokens{_times(together)}, exceeds "
            f"max_tokens_per_microbatch = {budget}; raise the token budget to at least the padded length or "
            "shorten the sequences"
        )

    def longest_row(rows: range) -> int:
        return max(lengths[rows.start : rows.stop])

    plans = [ShardPlan.empty() for _ in range(shards)]
    for start in range(0, len(lengths), batch_size):
        groups = [range(first, first + together) for first in range(start, start + batch_size, together)]
        # sorted keeps the order of equal items, so that all ranks of a run, and a resumed run, make the same
        # plan.
        shortest_first = sorted(groups, key=longest_row)
        # A slot has one group for each shard. Groups are in ascending order, so the last one of a slot is the
        # longest. All shards pad to its length, and so run the same number of micro-batches: otherwise a rank
        # would wait in a collective without end.
        slot_lengths = [padded(longest_row(rows)) for rows in shortest_first[shards - 1 :: shards]]
        ranges, rounded = _cut_by_budget(slot_lengths, budget // together)
        for shard, plan in enumerate(plans):
            rows = list(chain.from_iterable(shortest_first[shard::shards]))
            plan.add_chunk(rows, [[first * together, last * together] for first, last in ranges], rounded)
    return plans


def plan_packed(
    lengths: Sequence[int], batch_size: int, shards: int, args: SequencePackingArgs
) -> list[ShardPlan]:
    """Pack the rows of each chunk into bins; each bin is a micro-batch. All shards get the same number of
    bins, but possibly different numbers of rows.

    Raises:
        PackingError: a padded length exceeds the token budget, a chunk has fewer rows than shards, or the
            algorithm is unknown.
        BatchError: ``sequence_length_pad_multiple`` is not positive.
    """
    multiple = args["sequence_length_pad_multiple"]
    together = _rows_together(args, batch_size, 1)
    _require_positive("sequence_length_pad_multiple", multiple)
    crossover = args.get("attention_crossover_length", DEFAULT_ATTENTION_CROSSOVER_LENGTH)
    packer = get_packer(
        args.get("algorithm", DEFAULT_PACKING_ALGORITHM),
        args["max_tokens_per_microbatch"],
        # Each shard needs the same number of bins, because ranks that share collectives must run the same
        # number of micro-batches.
        min_bin_count=shards,
        bin_count_multiple=shards,
        seed=args.get("seed", 0),
    )
    plans = [ShardPlan.empty() for _ in range(shards)]
    for start in range(0, len(lengths), batch_size):
        # Round before packing, because a bin must have space for the padding of its sequences.
        padded = [_round_up(length, multiple) for length in lengths[start : start + batch_size]]
        bins = packer.pack(_sums(padded, together))
        group_costs = _sums([sequence_cost(length, crossover) for length in padded], together)
        # Bins have about the same number of tokens, but attention takes longer for longer sequences. So
        # balance the shards by cost, not by tokens.
        costs = [sum(map(group_costs.__getitem__, members)) for members in bins]
        dealt: list[list[int]] = []
        for number in deal_bins(costs, shards):
            dealt.append([])
            for member in bins[number]:
                dealt[-1] += range(member * together, (member + 1) * together)
        for shard, plan in enumerate(plans):
            rows: list[int] = []
            ranges: list[list[int]] = []
            for members in dealt[shard::shards]:
                ranges.append([len(rows), len(rows) + len(members)])
                rows.extend(start + member for member in members)
            plan.add_chunk(
                rows, ranges, [sum(map(padded.__getitem__, members)) for members in dealt[shard::shards]]
            )
    return plans


def _rows_together(args: DynamicBatchingArgs | SequencePackingArgs, batch_size: int, shards: int) -> int:
    together = args.get("rows_together", 1)
    _require_positive("rows_together", together)
    if batch_size % (together * shards):
        raise BatchError(
            f"Batch size ({batch_size}) is not a multiple of shards ({shards}) x rows that stay together "
            f"({together}); choose a multiple"
        )
    return together


def _sums(values: Sequence[int], together: int) -> Sequence[int]:
    """Return the sums of consecutive groups of ``together`` values."""
    return (
        values
        if together == 1
        else [sum(values[first : first + together]) for first in range(0, len(values), together)]
    )


def _times(rows: int) -> str:
    return f" for each of {rows} rows that stay together" if rows > 1 else ""


def _cut_by_budget(slot_lengths: Sequence[int], budget: int) -> tuple[list[list[int]], list[int]]:
    """Divide slots into ranges within the token budget. A slot consists of the i-th rows of all shards.

    Args:
        slot_lengths: padded length of each slot, in ascending order.
        budget: maximum of slots times padded length in a range.

    Returns:
        The ranges ``[first, last]`` of slots, and the padded length of each range.
    """
    ranges: list[list[int]] = []
    padded: list[int] = []
    for slot, length in enumerate(slot_lengths):
        # Lengths are in ascending order, so the newest slot determines the padded length of the range.
        if ranges and (slot + 1 - ranges[-1][0]) * length <= budget:
            ranges[-1][1] = slot + 1
            padded[-1] = length
        else:
            ranges.append([slot, slot + 1])
            padded.append(length)
    return ranges, padded


def _round_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise BatchError(f"{name} = {value} must be at least 1; write 1 for no rounding")
