"""What PPO's critic costs a step: its values and its training against the training of the actor, of the same backbone on the same batch.

The two take turns, as their workers do in a run; each turn builds a worker anew, outside of what is measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.options import Options
from benchmarks.point import Point, sides
from benchmarks.timing import Spent, spent_in_turn

if TYPE_CHECKING:
    from megarl.distributed.batched_data_dict import BatchedDataDict
    from megarl.models.policy import PolicyConfig

WARM_UP = 2
CRITIC = {"reward_model_cfg": {"enabled": True}}


def measure(quick: bool, options: Options) -> Iterator[Point]:
    """A point for each backend, one rank."""
    from benchmarks import tiny
    from benchmarks.ranks import Ranks
    from benchmarks.subject import Work, model_of, policy_of

    work = Work(8, max(options.tokens or (64,)))
    turns, repeats = (1, 1) if quick else (2, 4)
    with tempfile.TemporaryDirectory() as directory, Ranks(options.device) as ranks:
        model = model_of(options, Path(directory) / "model", work.length)
        for backend in tiny.BACKENDS:
            actor, critic = (policy_of(model, backend, work, device=options.device, **changes) for changes in ({}, CRITIC))
            spent: dict[str, Spent] = {}
            for _ in range(turns):
                for of_model, config in ((_actor, actor), (_critic, critic)):
                    [found] = ranks.run(1, of_model, config, work.rows, work.length, repeats, options.device)
                    for name, took in found.items():
                        whole = spent.setdefault(name, Spent())
                        whole.wall.extend(took.wall)
                        whole.cpu.extend(took.cpu)
            yield Point(
                {"backend": backend, "length": work.length},
                {
                    **sides("critic_training", spent["critic_train"], "the actor's training", spent["train"]),
                    **sides("critic_values", spent["values"], "the actor's log-probabilities", spent["logprobs"]),
                },
            )


def _batch(config: PolicyConfig, rows: int, length: int) -> BatchedDataDict[Any]:
    """What a step of PPO hands to both models, with numbers of chance in the place of what was sampled."""
    import torch

    from benchmarks.subject import Work, batch_of
    from megarl.distributed.batched_data_dict import BatchedDataDict

    batch = batch_of(Path(config["model_name"]), Work(rows, length))
    generator = torch.Generator().manual_seed(2)
    names = ("advantages", "prev_logprobs", "generation_logprobs", "prev_values", "returns")
    drawn = {name: torch.randn(batch["input_ids"].shape, generator=generator) for name in names}
    return BatchedDataDict({**batch, **drawn})


def _actor(config: PolicyConfig, rows: int, length: int, repeats: int, device: str) -> dict[str, Spent]:
    from benchmarks import tiny
    from benchmarks.device import clock_of
    from megarl.algorithms.loss_functions import ClippedPGLossFn

    worker, batch, loss = tiny.worker_of(config), _batch(config, rows, length), ClippedPGLossFn(tiny.CLIPPED_LOSS)  # type: ignore[arg-type]
    # as in a step: the log-probabilities of the policy that sampled, so that the ratio begins at 1
    batch["prev_logprobs"] = worker.get_logprobs(data=batch)["logprobs"]
    actions = {"logprobs": lambda: worker.get_logprobs(data=batch), "train": lambda: worker.train(data=batch, loss_fn=loss)}
    spent = spent_in_turn(actions, repeats=repeats, warm_up=WARM_UP, clock=clock_of(device))
    worker.backend.close()
    return spent


def _critic(config: PolicyConfig, rows: int, length: int, repeats: int, device: str) -> dict[str, Spent]:
    from benchmarks import tiny
    from benchmarks.device import clock_of
    from megarl.algorithms.value_losses import ValueLoss

    worker, batch, loss = tiny.worker_of(config), _batch(config, rows, length), ValueLoss(0.2)
    actions = {"values": lambda: worker.get_values(data=batch), "critic_train": lambda: worker.train(data=batch, loss_fn=loss)}
    spent = spent_in_turn(actions, repeats=repeats, warm_up=WARM_UP, clock=clock_of(device))
    worker.backend.close()
    return spent
