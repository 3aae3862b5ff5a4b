"""Evaluation: samples of validation sets and their figures: mean@k with an interval, pass@k, majority@k,
truncated share.

A prompt counts once in mean@k, however many of its k answers could be scored, and in pass@k and majority@k
where all of them were. An answer is right where its accuracy is 1.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megarl.config.sections import RunConfig
from megarl.config.validation_sets import SetPlan, set_plans
from megarl.rollout.collector import Collector, Rollouts, accuracies_of, add_metrics, part_metrics
from megarl.rollout.environments import final_answers
from megarl.rollout.samples import validation_seeds

if TYPE_CHECKING:
    from megarl.data.datasets import Dataset, Example

_NORMAL_975 = statistics.NormalDist().inv_cdf(0.975)


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """Prompts of a validation and the settings by which they are answered.

    Attributes:
        plan: name, answers a prompt, how they are drawn.
        records: P prompts; the place of one among them is what its random numbers depend on.
    """

    plan: SetPlan
    records: Sequence[Example]


@dataclass(frozen=True, slots=True)
class ValidatedSet:
    """The samples of one validation set.

    Attributes:
        plan: of the set.
        batches: P * k samples, the k of a prompt next to each other: texts (``response_text``), rewards,
            lengths and the rest of ``Rollouts``; whole prompts in each batch, in the order of the set.
        answers: P * k final answers, None for a response without one; None where the environment does not
            know of any, or k is 1.
    """

    plan: SetPlan
    batches: Sequence[Rollouts]
    answers: Sequence[str | None] | None

    def column(self, name: str) -> Tensor:
        """[P * k], a column of the samples with one value a row."""
        return torch.cat([rollouts.samples[name] for rollouts in self.batches])

    @property
    def accuracies(self) -> Tensor:
        """[P * k] float32, how right each answer is; NaN where it could not be scored."""
        known = torch.cat([accuracies_of(rollouts.samples) for rollouts in self.batches])
        # NaN and not 0: a scorer that was down must not lower the accuracy.
        return known.masked_fill(self.column("masked"), torch.nan)


def validation_sets(config: RunConfig, dataset: Dataset) -> list[ValidationSet]:
    """The sets of a run's validation data, each cut to ``max_val_samples``.

    Args:
        config: of the run, checked.
        dataset: made of its validation sources, in their order.
    """
    found = []
    for plan in set_plans(config):
        ranges = [dataset.sources[place] for place in plan.places]
        places = [place for each in ranges for place in range(each.start, each.end)]
        found.append(ValidationSet(plan, dataset.select(places[: plan.max_prompts])))
    return found


def answer_set(
    collector: Collector, validation_set: ValidationSet, batch_size: int | None = None
) -> ValidatedSet:
    """Sample k answers to every prompt of a set and have them scored.

    Args:
        collector: samples and scores.
        validation_set: of P prompts.
        batch_size: prompts that are generated together; None for all of them in one call.
    """
    plan, records = validation_set.plan, validation_set.records
    # By the name of the set and the prompt's place in it, so that a further set changes nothing.
    seeds = None if plan.sampling is None else validation_seeds(plan.name, len(records), plan.generations)
    size, batches = batch_size or len(records), []
    for start in range(0, len(records), size):
        chosen = slice(start * plan.generations, (start + size) * plan.generations)
        batches.append(
            collector.collect(
                records[start : start + size],
                plan.generations,
                None if seeds is None else seeds[chosen],
                greedy=plan.sampling is None,
                sampling=plan.sampling,
            )
        )
    return ValidatedSet(plan, batches, _final_answers(collector, batches) if plan.generations > 1 else None)


def _final_answers(collector: Collector, batches: Sequence[Rollouts]) -> list[str | None] | None:
    found: list[str | None] = []
    for rollouts in batches:
        answers = final_answers(collector.environment, rollouts.records, rollouts.samples["response_text"])
        if answers is None:
            return None
        found += answers
    return found


def validation_metrics(validated: Sequence[ValidatedSet]) -> dict[str, float]:
    """Figures of a validation.

    Of one set those of ``metrics_of_set``. Of several those of each under ``NAME/``, and of all:
    ``accuracy``, the mean over sets of their mean@k, so that a large set counts no more than a small one
    (none where a set has no mean@k: the mean of the others would be another figure under its name);
    ``samples``; ``scored``, ``generation_length`` and ``truncated`` over all answers; and the sums of the
    figures of the environment.
    """
    if len(validated) == 1:
        return metrics_of_set(validated[0], estimates=validated[0].plan.generations > 1)
    of_sets = {each.plan.name: metrics_of_set(each) for each in validated}
    means = [of_sets[each.plan.name].get(f"mean@{each.plan.generations}") for each in validated]
    known = [mean for mean in means if mean is not None]
    lengths, truncated = (
        torch.cat([each.column(name) for each in validated]) for name in ("generation_lengths", "truncated")
    )
    overall: dict[str, float] = {
        **({"accuracy": statistics.fmean(known)} if len(known) == len(means) else {}),
        "samples": len(lengths),
        "scored": _share_scored(torch.cat([each.accuracies for each in validated])),
        "generation_length": float(lengths.double().mean()),
        "truncated": float(truncated.double().mean()),
    }
    overall = add_metrics(overall, [rollouts.metrics for each in validated for rollouts in each.batches])
    return {
        **overall,
        **{
            f"{name}/{metric}": value
            for name, metrics in of_sets.items()
            for metric, value in metrics.items()
        },
    }


def metrics_of_set(validated: ValidatedSet, *, estimates: bool = True) -> dict[str, float]:
    """Figures of one set: ``accuracy`` (mean over scored answers; none without any), the parts of the
    rewards, ``samples`` (answers), ``scored`` (share of answers that could be), ``generation_length``,
    ``truncated`` (share of answers), those of the environment and, with ``estimates``, those of
    ``estimates_of``."""
    accuracies = validated.accuracies
    known = accuracies[~accuracies.isnan()]
    own = {
        **({"accuracy": float(known.mean())} if len(known) else {}),
        **part_metrics([rollouts.samples for rollouts in validated.batches]),
        "samples": len(accuracies),
        "scored": _share_scored(accuracies),
        "generation_length": float(validated.column("generation_lengths").double().mean()),
        "truncated": float(validated.column("truncated").double().mean()),
    }
    if estimates:
        own |= estimates_of(accuracies.tolist(), validated.plan.generations, validated.answers)
    return add_metrics(own, [rollouts.metrics for rollouts in validated.batches])


def _share_scored(accuracies: Tensor) -> float:
    return float((~accuracies.isnan()).double().mean())


def estimates_of(
    accuracies: Sequence[float], k: int, answers: Sequence[str | None] | None = None
) -> dict[str, float]:
    """Estimate figures of a model from k answers to each of P prompts.

    Args:
        accuracies: P * k numbers, the k of a prompt next to each other; NaN for an answer that could not be
            scored, which counts in none of the figures. Prompts without any that was are left out.
        k: answers a prompt.
        answers: P * k final answers, by which a majority votes; None for no ``majority@k``.

    Returns:
        ``mean@k``, the mean over prompts of the mean of their answers; ``mean@k_ci95``, half of its
        confidence interval of 95 % over prompts, where there are at least two. For several answers a prompt
        also, over the prompts all k answers of which were scored: ``pass@j``, for j = 2, 4, ... and k, the
        mean of ``pass_at``; ``majority@k``, the mean of ``majority``; and ``pass@k_prompts``, the number of
        these prompts; if it is 0, the others are left out. Nothing if no answer was scored.
    """
    prompts = [
        [
            (accuracies[place], None if answers is None else answers[place])
            for place in range(start, start + k)
        ]
        for start in range(0, len(accuracies), k)
    ]
    scored = [[each for each in prompt if not math.isnan(each[0])] for prompt in prompts]
    scored = [prompt for prompt in scored if prompt]
    means = [statistics.fmean(accuracy for accuracy, _ in prompt) for prompt in scored]
    if not means:
        return {}
    found = {f"mean@{k}": statistics.fmean(means)}
    if len(means) > 1:
        found[f"mean@{k}_ci95"] = half_interval(means)
    if k == 1:
        return found
    # pass@j of fewer than k answers would be another quantity under the same name.
    whole = [prompt for prompt in scored if len(prompt) == k]
    right = [[accuracy >= 1 for accuracy, _ in prompt] for prompt in whole]
    for j in _powers_of_two(k) if whole else ():
        found[f"pass@{j}"] = statistics.fmean(pass_at(j, k, sum(each)) for each in right)
    if whole and answers is not None:
        votes = [
            majority([answer for _, answer in prompt], each)
            for prompt, each in zip(whole, right, strict=True)
        ]
        found[f"majority@{k}"] = statistics.fmean(votes)
    return {**found, f"pass@{k}_prompts": len(whole)}


def _powers_of_two(k: int) -> Iterator[int]:
    """2, 4, 8, ... below k, and k."""
    j = 2
    while j < k:
        yield j
        j *= 2
    yield k


def half_interval(means: Sequence[float]) -> float:
    """Half of the 95 % confidence interval of a mean over prompts: 1.96 standard deviations (n - 1) over the
    root of their number.

    Answers to one prompt resemble each other; as independent samples they would make the interval too narrow.
    That of the normal distribution is too narrow itself for fewer than some thirty prompts, and 0 where all
    prompts have one value.
    """
    return _NORMAL_975 * statistics.stdev(means) / math.sqrt(len(means))


def pass_at(k: int, answered: int, right: int) -> float:
    """Probability that some of k answers, drawn without replacement from ``answered`` ones of which ``right``
    are right, is right.

    1 - C(n - c, k) / C(n, k) as a product (Chen et al. 2021, arXiv 2107.03374, equation 1), which no binomial
    coefficient overflows.

    Raises:
        ValueError: k is not in [1, answered].
    """
    if not 1 <= k <= answered:
        raise ValueError(
            f"k = {k}: must be at least 1 and at most the {answered} answers. Fix: sample at least k "
            "answers a prompt"
        )
    # Fewer wrong answers than k: the product below would have a factor of 0 or less.
    if answered - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / size for size in range(answered - right + 1, answered + 1))


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return how right the most frequent answer is; 0 where no response has an answer.

    Among answers that were given equally often a fair draw decides: the value is their mean. A response
    without an answer has no vote. Of responses with one answer of which not all are right, by their form for
    example, it is the share that is.

    Args:
        answers: final answers of the responses to one prompt; equal ones are equal texts.
        right: whether each response is right.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return statistics.fmean(sum(each) / most for each in votes.values() if len(each) == most)
