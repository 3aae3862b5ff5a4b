"""Steps in which there is nothing to learn: found at the start of a run, with the likely cause where one is known."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megarl.config.environments import environments_of, rewards_of

if TYPE_CHECKING:
    from torch import Tensor

    from megarl.data.datasets import Example

logger = logging.getLogger(__name__)

STEPS = (1, 5)
"""Steps that are looked at: a run that does not learn should be stopped early, and the first step may be chance."""

_WHOLE_SOLUTIONS = ("####", "\\boxed")


def warn_of_no_signal(
    step: int, samples: Mapping[str, Tensor], advantages: Tensor, records: Sequence[Example], config: Mapping[str, Any]
) -> None:
    """Log a warning at the steps ``STEPS`` if rewards tell no response from another, so that the step has no gradient.

    That is where all advantages are 0, and, for estimators with values of their own, where all rewards are the same.

    Args:
        step: of the run, counted from 1.
        samples: ``reward`` [B], ``masked`` [B] bool, ``truncated`` [B] bool, ``generation_lengths`` [B].
        advantages: [B, 1] or [B, S].
        records: [B], what each response answers.
        config: of the run.
    """
    rewards = samples["reward"][~samples["masked"]]
    if step not in STEPS or not len(rewards):
        return
    if bool((advantages != 0).any()) and bool((rewards != rewards[0]).any()):
        return
    values = sorted({float(f"{value:.6g}") for value in rewards.tolist()})
    shown = ", ".join(f"{value:g}" for value in values[:3]) + (", ..." if len(values) > 3 else "")
    causes = "; ".join(likely_causes(samples, records, config)) or "none is known"
    logger.warning(
        "step %d: all rewards of every group are equal (%d responses, rewards %s), so that there is no gradient in this step. Look at "
        "`megarl samples %s`. Likely cause: %s",
        step,
        len(rewards),
        shown,
        config["run_dir"],
        causes,
    )


def likely_causes(samples: Mapping[str, Tensor], records: Sequence[Example], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what makes all rewards equal, as far as the responses and the references show it."""
    rewards = [reward for key, section in environments_of(config["env"]).items() for reward in rewards_of(section, key).values()]
    names = {reward.get("reward") for reward in rewards}
    marks = [mark for mark in _WHOLE_SOLUTIONS if any(mark in record.answer for record in records)]
    if "exact_match" in names and marks:
        yield (
            f"references have {' and '.join(map(repr, marks))}, and exact_match compares a response with the whole of them: use "
            f"env.reward={'gsm8k' if marks[0] == '####' else 'math'}"
        )
    generation = config["policy"]["generation"]
    if bool(samples["truncated"].all()):
        yield (
            f"all responses were cut off at policy.generation.max_new_tokens = {generation['max_new_tokens']}, none ended by one of the "
            f"stop tokens {generation.get('stop_token_ids')}: raise the limit, or see whether the model knows the chat template"
        )
    elif int(samples["generation_lengths"].max()) <= 1:
        yield "all responses are empty: the model ends where it should begin, so see whether it knows the chat template"
