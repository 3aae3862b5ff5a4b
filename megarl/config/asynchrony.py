"""Configuration section of asynchronous training."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.key import AT_LEAST_0, AT_LEAST_1, Key

NAME = "async_grpo"
"""Name of this section inside the own section of each algorithm that generates responses."""

LEDGER = "ledger"
"""Subdirectory of the run directory in which a ``ready_first`` run stores its batches."""


class AsyncConfig(TypedDict):
    """Asynchronous training: engines sample the batches of later steps while a step trains."""

    enabled: Annotated[
        bool,
        Key(
            "sample the batches of later steps while a step trains; needs "
            "``policy.generation.colocated.enabled: false``."
        ),
    ]
    schedule: NotRequired[
        Annotated[
            Literal["in_order", "ready_first"],
            Key(
                "``in_order``: the batch of step n is sampled with the weights after step n - 1 - "
                "``max_trajectory_age_steps``, whatever the timing, so a run can be repeated exactly. "
                "``ready_first``: a step trains on the groups (the responses to one prompt) that complete "
                "first, and engines keep sampling during refits, so no step waits for its longest response; "
                "the batches are stored in ``RUN/ledger``.",
                default="in_order",
            ),
        ]
    ]
    max_trajectory_age_steps: NotRequired[
        Annotated[
            int,
            Key(
                "maximum age of a response: training steps between the weights that sampled it and those "
                "that train on it. With ``in_order`` the age is exactly this number. 0 alternates sampling "
                "and training; 1 is enough to overlap the two.",
                AT_LEAST_0,
                default=1,
            ),
        ]
    ]
    lookahead_steps: NotRequired[
        Annotated[
            int,
            Key(
                "``ready_first``: number of batches in flight (being sampled, or complete and waiting) "
                "while a step trains; more give a step more groups to choose from. At most "
                "``max_trajectory_age_steps``.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    on_stale: NotRequired[
        Annotated[
            Literal["wait", "drop"],
            Key(
                "``ready_first``: what to do with a group that would exceed ``max_trajectory_age_steps``. "
                "``wait`` trains on it before that, and delays the step until it is complete; ``drop`` "
                "discards it (``rollouts_dropped``), which favours short responses.",
                default="wait",
            ),
        ]
    ]
    in_flight_weight_updates: NotRequired[
        Annotated[
            bool,
            Key(
                "``ready_first``, with engines that take single requests (``vllm``): a response that is "
                "incomplete at a refit is continued with the new weights. false completes all responses "
                "before each refit.",
                default=True,
            ),
        ]
    ]
    replay: NotRequired[
        Annotated[
            str | None,
            Key(
                "run directory of an earlier ``ready_first`` run: train again on the responses recorded in "
                "its ``ledger``, with bit-identical results; engines start only for validations. null "
                "samples responses as usual.",
                default=None,
            ),
        ]
    ]
    recompute_logprobs: NotRequired[
        Annotated[
            bool,
            Key(
                "compute the log-probabilities of a batch with the newest weights before training on it: "
                "the clipped ratio is then relative to these, and the importance weight corrects for the "
                "age (decoupled objective, arXiv 2505.24298). false uses the engine's log-probabilities, "
                "which saves a forward pass; the ratio then includes the age, and only its clip limits it.",
                default=True,
            ),
        ]
    ]
