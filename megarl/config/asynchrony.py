"""The configuration section of asynchronous training."""

from __future__ import annotations

from typing import Annotated, Literal, NotRequired

from typing_extensions import TypedDict

from megarl.key import AT_LEAST_0, AT_LEAST_1, Key

NAME = "async_grpo"
"""Name of the section, inside the own section of each algorithm whose policy generates responses."""

LEDGER = "ledger"
"""Subdirectory of the run directory for the ledger of a ``ready_first`` run."""


class AsyncConfig(TypedDict):
    """Asynchronous training: engines sample the batches of later steps while a step trains."""

    enabled: Annotated[
        bool, Key("sample while a step trains; needs ``policy.generation.colocated.enabled: false``.")
    ]
    schedule: NotRequired[
        Annotated[
            Literal["in_order", "ready_first"],
            Key(
                "``in_order``: the batch of step n is sampled with the weights after step n - 1 - "
                "``max_trajectory_age_steps``, whatever the timing, so that a run repeats itself. "
                "``ready_first``: a step trains on the groups that complete first, and engines keep "
                "sampling over refits, so that no step waits for its longest response; the batches are "
                "kept in ``RUN/ledger``.",
                default="in_order",
            ),
        ]
    ]
    max_trajectory_age_steps: NotRequired[
        Annotated[
            int,
            Key(
                "age of a response in training steps, from the weights that sample it to those that it "
                "trains: exactly k ``in_order``, at most k ``ready_first``. 0 samples and trains in turn; "
                "1 is enough to keep both busy.",
                AT_LEAST_0,
                default=1,
            ),
        ]
    ]
    lookahead_steps: NotRequired[
        Annotated[
            int,
            Key(
                "``ready_first``: number of batches that are sampled or wait while a step trains; with "
                "more of them a step has more groups to choose from. At most ``max_trajectory_age_steps``.",
                AT_LEAST_1,
                default=1,
            ),
        ]
    ]
    on_stale: NotRequired[
        Annotated[
            Literal["wait", "drop"],
            Key(
                "``ready_first``: ``wait`` trains on a group before it is too old, and waits for that "
                "group if it has to; ``drop`` discards groups that are too old (``rollouts_dropped``), "
                "which favours short responses.",
                default="wait",
            ),
        ]
    ]
    in_flight_weight_updates: NotRequired[
        Annotated[
            bool,
            Key(
                "``ready_first``, with engines that take requests one by one (``vllm``): a response that "
                "is not complete at a refit continues with the new weights. false waits for all responses "
                "before each refit.",
                default=True,
            ),
        ]
    ]
    replay: NotRequired[
        Annotated[
            str | None,
            Key(
                "directory of a ``ready_first`` run: train on its ledger again, bit for bit, and without "
                "engines unless something is validated; null samples.",
                default=None,
            ),
        ]
    ]
    recompute_logprobs: NotRequired[
        Annotated[
            bool,
            Key(
                "compute the log-probabilities of a batch before training on it: the clipped ratio is then "
                "to the newest weights, and the importance weight corrects the age (decoupled objective, "
                "arXiv 2505.24298). false uses those of the engine, saves the pass, and leaves the age to "
                "the clip.",
                default=True,
            ),
        ]
    ]
