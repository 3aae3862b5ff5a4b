"""The section of asynchronous training."""

from __future__ import annotations

from typing import Annotated, NotRequired

from typing_extensions import TypedDict

from megarl.key import AT_LEAST_0, Key

SECTION = "grpo.async_grpo"


class AsyncConfig(TypedDict):
    """Engines sample the batches of later steps while a step trains."""

    enabled: Annotated[bool, Key("sample beside training; needs ``policy.generation.colocated.enabled: false``.")]
    max_trajectory_age_steps: NotRequired[
        Annotated[
            int,
            Key(
                "k: the batch of step n is sampled with the weights behind step n - 1 - k, whatever the timing, so that a run repeats "
                "itself. 0 samples and trains in turn; 1 is enough to keep both busy.",
                AT_LEAST_0,
                default=1,
            ),
        ]
    ]
    recompute_logprobs: NotRequired[
        Annotated[
            bool,
            Key(
                "the trainer computes the log-probabilities of a batch before it trains on it: the clipped ratio is then to the newest "
                "weights, and the importance weight corrects the age (decoupled objective, arXiv 2505.24298). false takes those of the "
                "engine, saves the pass, and leaves the age to the clip.",
                default=True,
            ),
        ]
    ]
