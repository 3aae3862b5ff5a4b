"""Dynamic sampling: sample prompts until a step has as many groups of responses with a signal as it trains on
(DAPO, arXiv 2503.14476, equation 11).

The groups of a step are the first ones with a signal, in the order of the data, from where the previous step
ended. Prompts after the last of them were sampled in vain: the next step samples them again, with its own
weights. So the training data of a step depend on its weights and the order of the data, but not on how many
prompts were requested at once. Nothing else needs to be stored between steps: the position in the data that a
checkpoint holds is enough to continue exactly.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megarl.algorithms.advantages import PART, agree
from megarl.distributed.batched_data_dict import BatchedDataDict
from megarl.errors import RewardError
from megarl.rollout.collector import Rollouts, accuracies_of, add_metrics
from megarl.rollout.trajectory import TOKEN_VERSIONS

if TYPE_CHECKING:
    from megarl.data.datasets import Example
    from megarl.data.sampler import Sampler


class Signal(Enum):
    """Signal that the responses to a prompt give an algorithm. The value is its name in messages."""

    SOME = "with a signal"
    ALL_RIGHT = "all correct"
    ALL_WRONG = "all incorrect"
    ALIKE = "alike in another way"
    UNUSABLE = "fewer than two scored responses, or none to train on"


def signals(accuracies: Tensor, scored: Tensor, trained: Tensor, generations: int) -> list[Signal]:
    """Return the signal of each group of responses.

    Args:
        accuracies: [B] float, accuracy of each response (1 correct, 0 incorrect): the metric itself, not a
            shaped reward. The responses to one prompt are next to each other.
        scored: [B] bool, whether the accuracy is known. Other responses are ignored.
        trained: [B] bool, whether the response would be trained on.
        generations: responses per prompt.
    """
    found: list[Signal] = []
    known = scored & ~accuracies.isnan()
    for start in range(0, len(accuracies), generations):
        group = slice(start, start + generations)
        is_usable = bool((known[group] & trained[group]).any())
        found.append(_signal(accuracies[group][known[group]].double(), is_usable))
    return found


def _signal(values: Tensor, any_trained: bool) -> Signal:
    if len(values) < 2 or not any_trained:
        return Signal.UNUSABLE
    if not agree(values):
        return Signal.SOME
    value = float(values[0])
    return Signal.ALL_RIGHT if value >= 1 else Signal.ALL_WRONG if value <= 0 else Signal.ALIKE


@dataclass(frozen=True, slots=True)
class Filled:
    """The prompts that filled a step.

    Attributes:
        rollouts: the groups to train on, in the order of the data; their metrics are the environment's, over
            all that was sampled.
        judged: columns [B] of all responses up to the last of these groups, including those of dropped
            groups.
        metrics: metrics of the dynamic sampling.
    """

    rollouts: Rollouts
    judged: BatchedDataDict[Any]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Dynamic sampling, which fills steps with groups that have a signal.

    Attributes:
        prompts: groups per step.
        generations: responses per prompt.
        batch: prompts that are sampled at a time.
        most_batches: maximum number of such batches per step.
        without_truncated: truncated responses are not trained on.
        pad_token_id: padding of token ids.
    """

    prompts: int
    generations: int
    batch: int
    most_batches: int
    without_truncated: bool
    pad_token_id: int

    def fill(self, step: int, sampler: Sampler, collect: Callable[[list[int], int], Rollouts]) -> Filled:
        """Sample until a step is full. The sampler is then positioned after the last prompt that is trained
        on.

        Args:
            step: step of the run, for messages.
            sampler: the order of the data.
            collect: samples responses; takes the indices of records and the ordinal of the first of them (the
                number of prompts before it in the run).

        Raises:
            RewardError: the step is not full after ``most_batches``.
        """
        # Store the sampler's state, because more prompts may be taken than are trained on.
        begin, ordinal = sampler.state(), sampler.taken
        found: list[Signal] = []
        batches: list[Rollouts] = []
        kept: list[int] = []
        while len(kept) < self.prompts:
            if len(batches) == self.most_batches:
                raise self._not_full(step, found)
            batches.append(collect(sampler.take(self.batch), ordinal + len(found)))
            found += self._signals(batches[-1].samples)
            kept = [place for place, signal in enumerate(found) if signal is Signal.SOME][: self.prompts]
        used = kept[-1] + 1
        if used < len(found):
            # Reset the sampler and advance it by the number of used prompts, because it cannot take single
            # prompts back.
            sampler.load_state(begin)
            sampler.take(used)
        # Keep only the numbers of dropped groups, because their tokens and texts would take most of the
        # memory.
        judged = joined(
            batches, list(range(used)), self.generations, self.pad_token_id, only_numbers=True
        ).samples
        rollouts = joined(batches, kept, self.generations, self.pad_token_id)
        of_environment = add_metrics({}, [batch.metrics for batch in batches])
        return Filled(
            replace(rollouts, metrics=of_environment), judged, self._metrics(found, used, len(batches))
        )

    def _signals(self, samples: BatchedDataDict[Any]) -> list[Signal]:
        scored = samples["sample_mask"] != 0
        trained = scored & ~samples["truncated"] if self.without_truncated else scored
        return signals(accuracies_of(samples), scored, trained, self.generations)

    def _metrics(self, found: Sequence[Signal], used: int, batches: int) -> dict[str, float]:
        counts = Counter(found[:used])
        return {
            "dynamic_sampling_num_gen_batches": batches,
            "dynamic_sampling_dropped": 1 - self.prompts / used,
            "dynamic_sampling_all_right": counts[Signal.ALL_RIGHT] / used,
            "dynamic_sampling_all_wrong": counts[Signal.ALL_WRONG] / used,
            "dynamic_sampling_num_discarded_valid_samples": found[used:].count(Signal.SOME)
            * self.generations,
        }

    def _not_full(self, step: int, found: Sequence[Signal]) -> RewardError:
        counts = Counter(found)
        shares = ", ".join(f"{signal.value}: {counts[signal] / len(found):.1%}" for signal in Signal)
        return RewardError(
            f"step {step}: only {counts[Signal.SOME]} of the {self.prompts} groups of a step were "
            f"found in {len(found)} prompts (grpo.dynamic_sampling_max_gen_batches = "
            f"{self.most_batches} times {self.batch}). Shares of these prompts: {shares}. Nothing "
            "was trained on them. Fix: take prompts of which the policy solves some, or more "
            "responses a prompt; raise the bound only if such prompts are rare but exist"
        )


def joined(
    batches: Sequence[Rollouts],
    groups: Sequence[int],
    generations: int,
    pad_token_id: int,
    *,
    only_numbers: bool = False,
) -> Rollouts:
    """Join groups of several batches to one batch, truncated to its longest response, without metrics.

    Args:
        batches: batches with the responses to each prompt next to each other.
        groups: numbers of the groups, ascending, counted across all batches.
        generations: responses per prompt.
        pad_token_id: padding of token ids.
        only_numbers: keep only the columns [B], and no records.
    """
    rows = list[int]()
    for group in groups:
        rows += range(group * generations, (group + 1) * generations)
    first = 0
    parts: list[BatchedDataDict[Any]] = []
    records: list[Example] = []
    of_segments: list[BatchedDataDict[Any]] = []
    # Look at all batches for columns, because an environment may omit a column that it has no values for.
    columns = _column_types(batches, only_numbers)
    for rollouts in batches:
        end = first + len(rollouts.records)
        mine = [row - first for row in rows if first <= row < end]
        first = end
        if mine:
            batch: BatchedDataDict[Any] = BatchedDataDict(
                {name: _column(rollouts, name, kind) for name, kind in columns.items()}
            )
            parts.append(_cut(batch.select_indices(mine)))
            if not only_numbers:
                of_segments += _earlier(rollouts, mine, len(records))
                records += [rollouts.records[row] for row in mine]
    padding = {"input_ids": pad_token_id, "prompt_ids": pad_token_id}
    earlier: BatchedDataDict[Any] | None = (
        BatchedDataDict.from_batches(of_segments, padding) if of_segments else None
    )
    return Rollouts(BatchedDataDict.from_batches(parts, padding), records, {}, earlier)


def _earlier(rollouts: Rollouts, rows: Sequence[int], first: int) -> Iterator[BatchedDataDict[Any]]:
    """Yield the earlier segments of the given responses of a batch, if there are any. Their column
    ``response`` is renumbered to count from ``first``."""
    if rollouts.earlier is None:
        return
    places = dict(zip(rows, count(first), strict=False))
    chosen, responses = list[int](), list[int]()
    for number, row in enumerate(rollouts.earlier["response"].tolist()):
        if row in places:
            chosen.append(number)
            responses.append(places[row])
    if chosen:
        found = _cut(rollouts.earlier.select_indices(chosen))
        found["response"] = torch.tensor(responses)
        yield found


def _column_types(batches: Sequence[Rollouts], only_numbers: bool) -> dict[str, Any]:
    """Return an example of each column that any batch has, by name."""
    # Iterate in reverse, so that a column has the type of the first batch that holds it.
    columns: dict[str, Any] = {}
    for rollouts in reversed(batches):
        for name, values in rollouts.samples.items():
            if not only_numbers or (isinstance(values, Tensor) and values.ndim == 1):
                columns[name] = values
    return columns


def _column(rollouts: Rollouts, name: str, kind: Any) -> Any:
    """Return a column of a batch. If the environment has not provided the column for this batch, an accuracy
    is the reward, and a part of the rewards is NaN."""
    samples = rollouts.samples
    if name in samples:
        return samples[name]
    if name == "opening":
        return torch.zeros_like(samples["input_lengths"])
    if name == TOKEN_VERSIONS:
        # The batch comes from a checkpoint that was written before this column existed.
        return samples["weight_version"].unsqueeze(1) * (samples["token_mask"] != 0)
    assert name == "accuracy" or name.startswith(PART), f"a batch of samples lacks {name}"
    return (
        samples["reward"]
        if name == "accuracy"
        else torch.full_like(samples["reward"], torch.nan, dtype=kind.dtype)
    )


def _cut(samples: BatchedDataDict[Any]) -> BatchedDataDict[Any]:
    """Truncate the columns [B, S] of samples to the longest sample."""
    for name, values in samples.items():
        if isinstance(values, Tensor) and values.ndim == 2:
            lengths = samples["prompt_lengths" if name == "prompt_ids" else "input_lengths"]
            samples[name] = values[:, : int(lengths.max())]
    return samples
