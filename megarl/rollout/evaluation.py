"""Evaluation: sampling of validation sets and their metrics (mean@k with a confidence interval, pass@k,
majority@k, share of truncated responses).

mean@k weights all prompts equally, even if some of a prompt's k responses could not be scored. pass@k and
majority@k use only prompts whose k responses were all scored. A response is correct if its accuracy is 1.
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
    """Prompts of a validation set and the plan for sampling them.

    Attributes:
        plan: name, responses per prompt, and sampling parameters.
        records: P prompts. A prompt's index in this list determines its sampling seeds.
    """

    plan: SetPlan
    records: Sequence[Example]


@dataclass(frozen=True, slots=True)
class ValidatedSet:
    """Samples of one validation set.

    Attributes:
        plan: plan of the set.
        batches: P * k samples as ``Rollouts``, in set order; the k responses to a prompt are adjacent and in
            the same batch.
        answers: P * k final answers, None for a response without one. The attribute is None if the
            environment cannot extract answers, or if k is 1.
    """

    plan: SetPlan
    batches: Sequence[Rollouts]
    answers: Sequence[str | None] | None

    def column(self, name: str) -> Tensor:
        """Concatenate a column over all batches, [P * k]."""
        return torch.cat([rollouts.samples[name] for rollouts in self.batches])

    @property
    def accuracies(self) -> Tensor:
        """Accuracy of each response, [P * k] float32; NaN if the response could not be scored."""
        known = torch.cat([accuracies_of(rollouts.samples) for rollouts in self.batches])
        # NaN rather than 0, so that an unreachable scorer does not lower the accuracy.
        return known.masked_fill(self.column("masked"), torch.nan)


def validation_sets(config: RunConfig, dataset: Dataset) -> list[ValidationSet]:
    """Return a run's validation sets, each limited to its maximum number of prompts.

    Args:
        config: the checked configuration.
        dataset: data set of the validation sources, in configuration order.
    """
    found = []
    for plan in set_plans(config):
        rows = list[int]()
        for place in plan.places:
            rows += range(dataset.sources[place].start, dataset.sources[place].end)
        found.append(ValidationSet(plan, dataset.select(rows[: plan.max_prompts])))
    return found


def answer_set(
    collector: Collector, validation_set: ValidationSet, batch_size: int | None = None
) -> ValidatedSet:
    """Sample k responses to each prompt of a set, and have them scored.

    Args:
        collector: samples and scores the responses.
        validation_set: set of P prompts.
        batch_size: prompts per collector call; None for all at once.
    """
    plan, records = validation_set.plan, validation_set.records
    # Derive seeds from the set's name and the prompt's index, so that adding another set does not change
    # them.
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
    """Return the metrics of a validation.

    For a single set they are those of ``metrics_of_set``. For several sets they are each set's metrics under
    ``NAME/``, and these totals: ``accuracy``, the unweighted mean over sets of mean@k (omitted if any set
    lacks it, because a mean of fewer sets would be a different metric); ``samples``; ``scored``,
    ``generation_length`` and ``truncated`` over all responses; and the summed metrics of the environment.
    """
    if len(validated) == 1:
        return metrics_of_set(validated[0], estimates=validated[0].plan.generations > 1)
    of_sets: dict[str, float] = {}
    means, batches = list[float](), list[Rollouts]()
    for each in validated:
        metrics = metrics_of_set(each)
        for metric, value in metrics.items():
            of_sets[f"{each.plan.name}/{metric}"] = value
        mean = f"mean@{each.plan.generations}"
        if mean in metrics:
            means.append(metrics[mean])
        batches += each.batches
    overall = {
        **({"accuracy": statistics.fmean(means)} if len(means) == len(validated) else {}),
        **_response_metrics(ValidatedSet(validated[0].plan, batches, None)),
    }
    return {**add_metrics(overall, [rollouts.metrics for rollouts in batches]), **of_sets}


def metrics_of_set(validated: ValidatedSet, *, estimates: bool = True) -> dict[str, float]:
    """Return the metrics of one set.

    These are ``accuracy`` (mean over scored responses, omitted if there are none), the means of the reward
    parts, ``samples`` (number of responses), ``scored`` (share of responses that could be scored),
    ``generation_length`` (mean tokens), ``truncated`` (share of responses), and the environment's metrics.
    With ``estimates``, those of ``estimates_of`` are added.
    """
    accuracies = validated.accuracies
    known = accuracies[~accuracies.isnan()]
    own = {
        **({"accuracy": float(known.mean())} if len(known) else {}),
        **part_metrics([rollouts.samples for rollouts in validated.batches]),
        **_response_metrics(validated),
    }
    if estimates:
        own |= estimates_of(accuracies.tolist(), validated.plan.generations, validated.answers)
    return add_metrics(own, [rollouts.metrics for rollouts in validated.batches])


def _response_metrics(validated: ValidatedSet) -> dict[str, float]:
    unscored = validated.accuracies.isnan()
    return {
        "samples": len(unscored),
        "scored": float((~unscored).double().mean()),
        "generation_length": float(validated.column("generation_lengths").double().mean()),
        "truncated": float(validated.column("truncated").double().mean()),
    }


def estimates_of(
    accuracies: Sequence[float], k: int, answers: Sequence[str | None] | None = None
) -> dict[str, float]:
    """Estimate mean@k, pass@k and majority@k from k responses to each of P prompts.

    Args:
        accuracies: P * k accuracies; the k responses to a prompt are adjacent. NaN marks a response that
            could not be scored, which no metric counts. Prompts without any scored response are left out.
        k: responses per prompt.
        answers: P * k final answers for the majority vote; None omits ``majority@k``.

    Returns:
        * ``mean@k``: mean over prompts of their mean accuracy.
        * ``mean@k_ci95``: half-width of its 95 % confidence interval over prompts; needs 2 prompts.
        * for k > 1, over prompts with k scored responses: ``pass@j`` for j = 2, 4, ... and k, the mean of
          ``pass_at``; ``majority@k``, the mean of ``majority``; and ``pass@k_prompts``, the number of these
          prompts. If it is 0, the other two are omitted.

        Empty if no response was scored.
    """
    means, votes, correct_counts = list[float](), list[float](), list[int]()
    for start in range(0, len(accuracies), k):
        scored = [accuracy for accuracy in accuracies[start : start + k] if not math.isnan(accuracy)]
        if scored:
            means.append(statistics.fmean(scored))
        # Leave out prompts with fewer than k scored responses: their pass@j would be a different quantity
        # under the same name.
        if len(scored) == k:
            correct = [accuracy >= 1 for accuracy in scored]
            correct_counts.append(sum(correct))
            if answers is not None:
                votes.append(majority(answers[start : start + k], correct))
    if not means:
        return {}
    found = {f"mean@{k}": statistics.fmean(means)}
    if len(means) > 1:
        found[f"mean@{k}_ci95"] = half_interval(means)
    if k == 1:
        return found
    for j in _powers_of_two(k) if correct_counts else ():
        found[f"pass@{j}"] = statistics.fmean(pass_at(j, k, correct) for correct in correct_counts)
    if votes:
        found[f"majority@{k}"] = statistics.fmean(votes)
    return {**found, f"pass@{k}_prompts": len(correct_counts)}


def _powers_of_two(k: int) -> Iterator[int]:
    """Yield the powers of two from 2 that are below k, then k itself."""
    j = 2
    while j < k:
        yield j
        j *= 2
    yield k


def half_interval(means: Sequence[float]) -> float:
    """Return the half-width of the 95 % confidence interval of a mean over prompts: 1.96 times the standard
    deviation (n - 1) divided by the square root of the number of prompts.

    The interval is over prompts because responses to the same prompt are correlated; treating them as
    independent would make it too narrow. Below about thirty prompts the normal approximation is still too
    narrow. If all prompts have the same value, the result is 0.
    """
    return _NORMAL_975 * statistics.stdev(means) / math.sqrt(len(means))


def pass_at(k: int, answered: int, right: int) -> float:
    """Return the probability that at least one of k responses is correct, if they are sampled without
    replacement from ``answered`` responses of which ``right`` are correct.

    This is 1 - C(n - c, k) / C(n, k), computed as a product to avoid overflow (Chen et al. 2021, arXiv
    2107.03374, equation 1).

    Raises:
        ValueError: k is not in [1, answered].
    """
    if not 1 <= k <= answered:
        raise ValueError(
            f"k = {k}: must be at least 1 and at most the {answered} responses. Fix: sample at least k "
            "responses a prompt"
        )
    # With fewer than k incorrect responses, any k include a correct one, and the product below is not
    # defined.
    if answered - right < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / size for size in range(answered - right + 1, answered + 1))


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Return the accuracy of the most frequent answer; 0 if no response has an answer.

    A tie counts as a uniformly random choice, so the result is the mean over the tied answers. Responses
    without an answer do not vote. If only some responses with the same answer are correct, for example
    because format counts, the answer's accuracy is their share.

    Args:
        answers: final answers of the responses to one prompt; equal answers are equal texts.
        right: for each response, true if it is correct.
    """
    votes: dict[str, list[bool]] = {}
    for answer, is_right in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(is_right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    return statistics.fmean(sum(each) / most for each in votes.values() if len(each) == most)
