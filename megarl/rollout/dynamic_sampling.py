"""Dynamic sampling (DAPO, arXiv 2503.14476, equation 11): sample more prompts until a step has enough groups
of responses with a learning signal.

A step trains on the first groups with a signal, in data order, starting where the previous step stopped.
Prompts after the last used group are sampled again by the next step, with its own weights. So the training
data of a step depend on the weights and the data order, but not on how many prompts are requested at a time.
The sampler's position is thus all that a checkpoint has to store for an exact resume.
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
    """Learning signal of the responses to one prompt. The values are used in messages."""

    SOME = "with a signal"
    ALL_RIGHT = "all correct"
    ALL_WRONG = "all incorrect"
    ALIKE = "alike in another way"
    UNUSABLE = "fewer than two scored responses, or none to train on"


def signals(accuracies: Tensor, scored: Tensor, trained: Tensor, generations: int) -> list[Signal]:
    """Classify each group of responses by its learning signal.

    Args:
        accuracies: [B] float, accuracy of each response (1 correct, 0 incorrect), without reward shaping.
            Responses to the same prompt are adjacent.
        scored: [B] bool, true if the accuracy is known. Other responses are ignored.
        trained: [B] bool, true if the response would be trained on.
        generations: number of responses per prompt.
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
    """The groups that fill one training step.

    Attributes:
        rollouts: the groups to train on, in data order. Their metrics are the environment's, summed over all
            sampled responses.
        judged: [B] columns of all responses up to the last used group, including those of dropped groups.
        metrics: metrics of dynamic sampling.
    """

    rollouts: Rollouts
    judged: BatchedDataDict[Any]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class DynamicSampling:
    """Fills training steps with groups that have a learning signal.

    Attributes:
        prompts: number of groups per step.
        generations: number of responses per prompt.
        batch: number of prompts sampled at a time.
        most_batches: maximum number of such batches per step.
        without_truncated: truncated responses are not trained on, so a group of truncated responses is
            dropped.
        pad_token_id: token id for padding.
    """

    prompts: int
    generations: int
    batch: int
    most_batches: int
    without_truncated: bool
    pad_token_id: int

    def fill(self, step: int, sampler: Sampler, collect: Callable[[list[int], int], Rollouts]) -> Filled:
        """Sample batches of prompts until the step is full. Leave the sampler directly after the last used
        prompt.

        Args:
            step: number of the step, for error messages.
            sampler: yields the record indices in data order.
            collect: samples responses, given record indices and the ordinal of the first (the number of
                prompts before it in the run).

        Raises:
            RewardError: ``most_batches`` batches do not fill the step.
        """
        # Remember the sampler's state: the last batch may contain prompts that are not used.
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
            # The sampler cannot return single prompts, so reset it and advance it by the used ones.
            sampler.load_state(begin)
            sampler.take(used)
        # Of dropped groups keep only numbers: their tokens and texts would take most of the memory.
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
    """Concatenate groups from several batches into one batch without metrics, truncated to its longest
    response.

    Args:
        batches: batches in which responses to the same prompt are adjacent.
        groups: indices of the groups to keep, ascending, counted across all batches.
        generations: number of responses per prompt.
        pad_token_id: token id for padding.
        only_numbers: keep only the columns of shape [B], and no records.
    """
    rows = list[int]()
    for group in groups:
        rows += range(group * generations, (group + 1) * generations)
    first = 0
    parts: list[BatchedDataDict[Any]] = []
    records: list[Example] = []
    of_segments: list[BatchedDataDict[Any]] = []
    # Collect column names from all batches, because an environment omits a column for which a batch has no
    # values.
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
    """Yield the earlier segments of the given rows of a batch, if it has any. Their column ``response`` is
    renumbered to the rows of the joined batch, which start at ``first``."""
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
    """Map each column name that occurs in any batch to an example of its values."""
    # Iterate in reverse, so that a column has the type of the first batch that holds it.
    columns: dict[str, Any] = {}
    for rollouts in reversed(batches):
        for name, values in rollouts.samples.items():
            if not only_numbers or (isinstance(values, Tensor) and values.ndim == 1):
                columns[name] = values
    return columns


def _column(rollouts: Rollouts, name: str, kind: Any) -> Any:
    """Return a column of a batch. If this batch lacks it, substitute the reward for ``accuracy``, NaN for a
    reward part, zeros for ``opening``, and the row's weight version for the token versions."""
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
    """Truncate the columns [B, S] to the longest row."""
    for name, values in samples.items():
        if isinstance(values, Tensor) and values.ndim == 2:
            lengths = samples["prompt_lengths" if name == "prompt_ids" else "input_lengths"]
            samples[name] = values[:, : int(lengths.max())]
    return samples
